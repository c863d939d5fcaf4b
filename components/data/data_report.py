"""What the preparation of data reports: the models of report.json and clients.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.io import DamagedFileError, read_mapping

REPORT_FILE = "report.json"
CLIENTS_FILE = "clients.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClientCounts(_Frozen):
    """A client's number of pairs per split, and its group of annotators, where it is known."""

    train: int
    validation: int
    test: int
    group: str | None = None

    def rows(self) -> dict[str, int]:
        """Number of pairs by split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


class PartitionSummary(_Frozen):
    """A row of FedBiscuit's table 5: clients, and statistics of their numbers of samples.

    std is the population's (divided by the number of clients), since all clients are counted and
    none is sampled. The table does not say which one it gives; the other is 1% larger for 53
    clients and 0.25% for 200.
    """

    samples: int
    clients: int
    max: int
    min: int
    std: float


class TreeCounts(_Frozen):
    """Pairs of trees of thoughts that the recipe adds to the source's pairs."""

    pairs: int
    questions: int
    dropped: dict[str, int]  # thoughts that gave no pair, by reason


class RowCounts(_Frozen):
    """Numbers of rows."""

    source: int  # pairs that the source gave
    pairs: int  # of the clients, those of `trees` included
    left_out: dict[str, int]  # the difference by reason
    judge: int  # the judge's pairs
    prompts: dict[str, int]  # of the server, by split
    dropped: dict[str, int]  # raw rows that the source dropped, by reason
    trees: TreeCounts | None = None


class PromptSummary(_Frozen):
    """Where the server's prompts of a split come from."""

    source: str
    left_out: dict[str, int]  # prompts that are not used, by reason
    references: str = ""  # author of the references; empty where there are none or it is not known


class MarginSummary(_Frozen):
    """Differences of scores of the pairs of thoughts, those of the judge included."""

    pairs: int
    min: float
    median: float
    max: float


class RepeatCounts(_Frozen):
    """Pairs of the source with equal completions, and those that repeat or contradict others."""

    duplicates: int = 0  # equal to an earlier one
    normalized: int = 0  # the same texts as an earlier one (one_prompt), and not equal
    contradictory: int = 0  # those whose completions the same owner prefers the other way round too
    equal: int = 0  # pairs of two completions of the same text
    prompts: int = 0  # pairs whose two completions both begin with the whole prompt


class ExpectationOutcome(_Frozen):
    """An expectation, and the number of rows that do not meet it."""

    suite: str
    expectation: str
    type: str
    column: str | None
    rows: int
    success: bool


class ValidationSummary(_Frozen):
    """The outcome of the expectation suites; warnings are sentences on those that may fail."""

    success: bool
    expectations: list[ExpectationOutcome]
    warnings: list[str] = Field(default_factory=list)


class PreparationReport(_Frozen):
    """The report of components.data.prepare.prepare."""

    model_config = ConfigDict(extra="ignore")  # earlier reports have equal_completions

    rows: RowCounts
    splits: dict[str, int]  # the clients' pairs by split
    # By split, the server's prompts that do not come unchanged from the source.
    prompts: dict[str, PromptSummary] = Field(default_factory=dict)
    partition: PartitionSummary  # over all pairs of the clients
    partition_train: PartitionSummary  # over their training pairs
    clients_without_train: list[str]
    expectations: ValidationSummary
    warnings: list[str] = Field(default_factory=list)  # what may be wrong with the data, as sentences
    repeats: RepeatCounts = RepeatCounts()
    control_tokens: int = 0  # pairs and prompts that hold control tokens of a model's tokenizer
    same_text: int = 1  # version of the key of texts, by which prompts were split (versions.SAME_TEXT)
    margins: MarginSummary | None = None  # None where there are no pairs of thoughts

    def tied_siblings(self) -> int:
        """Number of thoughts without a pair because their score equals the chosen sibling's."""
        dropped = self.rows.trees.dropped if self.rows.trees else self.rows.dropped
        return dropped.get("same score", 0)

    def metrics(self) -> dict[str, float]:
        """The report's numbers under the names that they are tracked by."""
        numbers: dict[str, float] = {}
        for name in ("partition", "partition_train", "margins"):
            summary = getattr(self, name)
            if summary is not None:
                numbers |= {f"{name}/{key}": value for key, value in summary.model_dump().items()}
        numbers |= {f"rows/{split}": count for split, count in self.splits.items()}
        repeats = self.repeats.model_dump()
        numbers |= {f"repeats/{name}": count for name, count in repeats.items() if count}
        numbers |= {f"prompts/{split}": count for split, count in self.rows.prompts.items()}
        if self.control_tokens:
            numbers["control_tokens"] = self.control_tokens
        return numbers


def write_report(folder: Path, report: PreparationReport) -> None:
    """Write report.json into a folder."""
    _write_json(folder / REPORT_FILE, report.model_dump(mode="json"))


def read_report(folder: Path) -> PreparationReport:
    """Read report.json of a prepared folder."""
    path = folder / REPORT_FILE
    try:
        return PreparationReport.model_validate(read_mapping(path))
    except ValidationError as error:
        raise DamagedFileError(f"{path} is no report of this version ({error.errors()[0]['msg']})") from None


def write_client_counts(folder: Path, clients: Mapping[str, ClientCounts]) -> None:
    """Write clients.json into a folder."""
    content = {name: counts.model_dump(mode="json") for name, counts in clients.items()}
    _write_json(folder / CLIENTS_FILE, content)


def read_client_counts(folder: Path) -> dict[str, ClientCounts]:
    """Read clients.json of a prepared folder."""
    content = read_mapping(folder / CLIENTS_FILE)
    return {name: ClientCounts.model_validate(counts) for name, counts in content.items()}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Limits:
    """What the data must meet."""

    clients: Sequence[str]  # ids, sorted; each has pairs
    max_characters: int  # of a prompt or completion
    one_client_groups: bool  # as the partitions dirichlet, iid and margin promise
    max_equal: float = 0.0  # share of the pairs whose two completions may be the same text
    label_balance: bool = True  # whether what is chosen may follow from an order of the completions
