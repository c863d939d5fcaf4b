"""The record of the project, and the files of a prepared folder.

A preference pair is a row of PAIR_COLUMNS; a server prompt is a row of PROMPT_COLUMNS. Both are
parquet files on disk. A prepared folder contains:

    pairs.parquet      the pairs of the clients, with splits train, validation and test
    judge.parquet      pairs of owners that never take part in the federation (may have no rows)
    prompts.parquet    the server's prompts: split 'align' for labeling and DPO, 'test' for
                       evaluation
    clients.json       {client_id: {"train": rows, "validation": rows, "test": rows, "group": str |
                       null}}
    report.json        components.data.data_report.PreparationReport
    docs/              Great Expectations Data Docs (runtime.data_docs)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from components.config import UserError
from components.data.data_report import read_client_counts
from components.seeding import generator

TEXTS = ("prompt", "chosen", "rejected")
PAIR_COLUMNS = (*TEXTS, "client_id", "domain", "source", "pair_id", "split")
OPTIONAL_COLUMNS = ("margin", "group", "tree", "depth", "column")
"""Columns that some sources have beside PAIR_COLUMNS; see Pair."""
TEXT_COLUMNS = (*PAIR_COLUMNS, "group", "tree")
"""The columns of the record that data.column may name with any source."""
PROMPT_COLUMNS = ("prompt_id", "prompt", "references", "split")
SPLITS = ("train", "validation", "test")


class PairRow(TypedDict):
    """A row of prepared pairs: the columns of PAIR_COLUMNS, and those of OPTIONAL_COLUMNS that it has.

    The columns are described in Pair; `pair_id` identifies the pair.
    """

    prompt: str
    chosen: str
    rejected: str
    client_id: str
    domain: str
    source: str
    pair_id: str
    split: str
    margin: NotRequired[float | None]
    group: NotRequired[str | None]
    tree: NotRequired[str | None]
    depth: NotRequired[int | None]
    column: NotRequired[str | None]


Pairs = Sequence[PairRow]
"""Rows of prepared pairs, in order."""


class PromptRow(TypedDict):
    """A row of the server's prompts (PROMPT_COLUMNS)."""

    prompt_id: str
    prompt: str
    references: list[str]
    split: str


class DataError(UserError, ValueError):
    """Data that cannot be used."""


@dataclass(frozen=True)
class Pair:
    """A preference pair as a source reads it.

    A completion that continues the text of its prompt begins with the white space between the two
    (see Policy.encode_texts).
    """

    prompt: str
    chosen: str
    rejected: str
    client_id: str = ""  # the owner; empty where the source knows none
    domain: str = ""  # empty where the source knows none
    source: str = ""  # name of the source, where it is not that of the recipe (data.source)
    split: str = ""  # train, validation or test; empty where it is drawn later
    group: str | None = None  # stays with one client and in one split; None or empty: the prompt
    margin: float | None = None  # how much better chosen is, in the units of the source
    tree: str | None = None  # name of the tree of thoughts that the pair is from
    depth: int | None = None  # of the pair's thoughts in that tree
    column: str | None = None  # value of data.column, if that is a column of the user's own file

    @property
    def split_group(self) -> str:
        """What must stay in one split: the group, or the prompt where there is none."""
        return self.group or self.prompt


class Prompt(NamedTuple):
    """A prompt of the server as a source reads it."""

    prompt: str
    # Human answers, if any, under the name of their column; the first is the opponent in a win rate
    # against humans.
    references: list[str]
    split: str  # 'align' or 'test'


@dataclass(frozen=True)
class SourceData:
    """What a source returns, before the partition."""

    pairs: list[Pair]
    prompts: list[Prompt]  # of the server; of equal ones the first is used
    judge: list[Pair]  # of owners outside the federation; may be empty
    true_clusters: dict[str, str] = field(default_factory=dict)  # of each client, where they are known
    dropped: dict[str, int] = field(default_factory=dict)  # raw rows that became no pair, by reason
    warnings: tuple[str, ...] = ()  # what may be wrong with the rows, as sentences


@dataclass(frozen=True)
class PromptData:
    """What a source of prompts returns."""

    prompts: list[tuple[str, list[str]]]  # with answers to them, if any, in the order of the data set
    answers_author: str = ""  # e.g. 'human' or the name of a model; empty without any
    dropped: dict[str, int] = field(default_factory=dict)  # raw rows that became no prompt, by reason


def pair_id(*parts: str) -> str:
    """Stable id of a pair: a hash of what identifies it (source, owner, prompt, both completions)."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def answer_id(prompt_id: str, number: int) -> str:
    """Id of the answer of this number (from 0) to a prompt; that of the first one is the prompt's."""
    return prompt_id if number == 0 else f"{prompt_id}#{number}"


def answered_prompt(answer: str) -> str:
    """The prompt's id in the id of an answer."""
    return answer.partition("#")[0]


def trailing_space(text: str) -> str:
    """The white space at the end of a text; empty if there is none."""
    return text[len(text.rstrip()) :]


def read_rows(path: Path, client_id: str | None = None, split: str | None = None) -> list[Any]:
    """Read rows (PairRow or PromptRow) from parquet, optionally only those of one client or split.

    Raises:
        DataError: the file is missing or is not parquet.
    """
    import pyarrow
    import pyarrow.parquet

    values = {"client_id": client_id, "split": split}
    filters = [(column, "=", value) for column, value in values.items() if value is not None]
    try:
        rows: list[Any] = pyarrow.parquet.read_table(path, filters=filters or None).to_pylist()
        return rows
    except (FileNotFoundError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"{path}: expected a parquet file of prepared data ({error}); run the prepare stage first."
        ) from None


def read_judges_rows(folder: Path, who: str) -> tuple[list[PairRow], list[PairRow]]:
    """Read the training and the held-out pairs of owners that never take part in the federation.

    Raises:
        DataError: one of the two is empty; names the reader, `who`.
    """
    table = folder / "judge.parquet"
    train: list[PairRow] = read_rows(table, split="train")
    held_out: list[PairRow] = read_rows(table, split="test")
    if not train or not held_out:
        raise DataError(
            f"{table} has {len(train)} training and {len(held_out)} held-out pairs, but {who} needs both, of"
            " owners that are not in the federation: reserve more of them in data.options (judge_clients or"
            " judge_share, as the source has it)."
        )
    return train, held_out


def read_clients(folder: Path) -> dict[str, dict[str, int]]:
    """Number of pairs by split of each client of a prepared folder, by client id in sorted order."""
    return {name: counts.rows() for name, counts in sorted(read_client_counts(folder).items())}


def read_true_clusters(folder: Path) -> dict[str, str | None]:
    """True cluster of each client, None where the source does not know it, by client id."""
    return {name: counts.group for name, counts in sorted(read_client_counts(folder).items())}


def choose_prompts(folder: Path, split: str, limit: int | None, seed: int) -> list[PromptRow]:
    """Choose prepared prompts of a split, all or a seeded sample, in the order of their ids.

    Args:
        folder: prepared data.
        split: 'align' or 'test'.
        limit: maximum number of prompts; None takes all.
        seed: determines the sample.
    """
    rows: list[PromptRow] = read_rows(folder / "prompts.parquet", split=split)
    rows.sort(key=lambda row: str(row["prompt_id"]))
    if limit is None or limit >= len(rows):
        return rows
    chosen = generator(seed, "prompts", split).choice(len(rows), size=limit, replace=False)
    return [rows[i] for i in sorted(chosen)]
