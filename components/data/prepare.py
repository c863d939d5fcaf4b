"""From a source to a prepared folder (records.py): split, partition, sample, validate, write."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import DataConfig, Recipe
from components.data import partition
from components.data.data_report import (
    ClientCounts,
    MarginSummary,
    PreparationReport,
    PromptSummary,
    RepeatCounts,
    RowCounts,
    ValidationSummary,
    write_client_counts,
    write_report,
)
from components.data.holdout import JUDGE
from components.data.lengths import TOO_LONG, drop_long
from components.data.pairs import client_pairs, with_trees
from components.data.prompts import server_prompts
from components.data.records import SPLITS, DataError, SourceData
from components.data.repeats import alike_warnings, count_repeats, repeat_warnings
from components.data.sources import load
from components.data.splits import with_groups, with_splits
from components.data.tables import pairs_frame, write_table
from components.data.validation import Limits, validate
from components.io import replaced_folder
from components.versions import SAME_TEXT

if TYPE_CHECKING:
    import pandas as pd


def prepare(
    data: DataConfig,
    seed: int,
    folder: Path,
    docs: bool = False,
    amend: Callable[[DataSet], DataSet] = lambda data_set: data_set,
) -> PreparationReport:
    """Write the prepared folder of a recipe's data, replacing an existing one.

    The folder appears complete or not at all. If an expectation fails it is not written, and an
    existing one is unchanged; `<folder>.rejected/docs` then contains the Data Docs, if they are
    written.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.
        folder: to write; its parents are created.
        docs: whether to write the Data Docs, as HTML, into its subfolder docs.
        amend: changes the texts of the data, or refuses them, before they are validated.

    Returns:
        the report, which is also written to report.json.

    Raises:
        DataError: the data cannot be used; one sentence, or one for each expectation that fails.
    """
    folder = Path(folder)
    rejected = folder.with_name(f"{folder.name}.rejected")
    data_set = amend(assemble(data, seed))
    limits = expected(data_set, data)
    with replaced_folder(folder) as building:
        docs_folder = building / "docs" if docs else None
        expectations = _validate(data_set.tables, limits, docs_folder, rejected)
        report = _report(data_set, expectations)
        for name, frame in data_set.tables.items():
            write_table(building / f"{name}.parquet", frame)
        write_client_counts(building, data_set.clients)
        write_report(building, report)
    shutil.rmtree(rejected, ignore_errors=True)
    return report


@dataclass(frozen=True)
class DataSet:
    """The data of a recipe before they are validated and written."""

    tables: dict[str, pd.DataFrame]  # pairs, judge and prompts, see records
    clients: dict[str, ClientCounts]  # numbers of pairs by client, in the order of their names
    rows: RowCounts
    prompts: dict[str, PromptSummary]  # see PreparationReport
    warnings: tuple[str, ...]  # what may be wrong with the rows, as sentences
    repeats: RepeatCounts  # among the source's pairs by their owners, before they are assigned to clients
    control_tokens: int = 0  # pairs and prompts that hold control tokens of a model's tokenizer

    @property
    def splits(self) -> dict[str, int]:
        """Numbers of the clients' pairs."""
        return {split: sum(getattr(client, split) for client in self.clients.values()) for split in SPLITS}


def assemble(data: DataConfig, seed: int) -> DataSet:
    """Load, split and partition the data of a recipe.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.

    Raises:
        DataError: the data cannot be used, as a sentence.
    """

    source = _drop_long(load(data, seed), data)
    rows, judge = (
        pairs_frame(with_splits(pairs, data.validation, data.test, seed), data.source)
        for pairs in with_groups(source.pairs, source.judge)
    )
    repeats = count_repeats(rows, judge[judge["client_id"] != JUDGE])
    sampled, clients, left_out = client_pairs(rows, set(judge["client_id"]), data, seed)
    pairs, trees = with_trees(sampled, clients, data, seed)
    if not (pairs["split"] == "train").any():
        raise DataError(
            f"of {len(pairs)} pairs none is in the train split: bring more pairs, or lower data.test and"
            " data.validation, or raise data.max_pairs"
        )
    pairs = pairs.sort_values(["client_id", "pair_id"], kind="stable", ignore_index=True)
    known = [*zip(pairs["prompt"], pairs["split"], strict=True)]
    known += zip(judge["prompt"], judge["split"], strict=True)
    prompts, summaries = server_prompts(data, source.prompts, known, seed)
    counts = RowCounts(
        source=len(rows),
        pairs=len(pairs),
        left_out=left_out,
        judge=len(judge),
        prompts=dict(sorted(Counter(prompts["split"]).items())),
        dropped=source.dropped,
        trees=trees,
    )
    _check_counts(counts)
    true_clusters = source.true_clusters if data.partition == "natural" else {}
    return DataSet(
        {"pairs": pairs, "judge": judge, "prompts": prompts},
        _client_counts(pairs, clients, true_clusters),
        counts,
        summaries,
        (
            *source.warnings,
            *repeat_warnings(repeats),
            *alike_warnings("clients", clients),
            *alike_warnings("domains", pairs["domain"].dropna().unique()),
        ),
        repeats,
    )


def expected(data_set: DataSet, data: DataConfig) -> Limits:
    """What the tables must meet."""
    one_client_groups = data.partition not in ("natural", "column")
    return Limits(list(data_set.clients), data.max_characters, one_client_groups, data.max_equal)


def check_rows(recipe: Recipe, splits: Mapping[str, int], prompts: Mapping[str, int]) -> None:
    """Refuse data without rows that a phase needs.

    Args:
        recipe: the recipe.
        splits: numbers of the clients' pairs.
        prompts: numbers of the server's prompts, by split.
    """
    required = {
        "held-out prompts to evaluate on": (prompts.get("test", 0), "data.test_prompts"),
        "held-out pairs to measure accuracy on": (splits.get("test", 0), ""),
        "pairs to train on": (splits.get("train", 0), ""),
    }
    if recipe.federation.options.needs_server_prompts:
        align = {"server prompts to align on": (prompts.get("align", 0), "data.align_prompts")}
        required = align | required
    for rows, (count, key) in required.items():
        if not count:
            elsewhere = f", or take them from elsewhere ({key})" if key else ""
            raise DataError(
                f"source {recipe.data.source} leaves no {rows}: see data.test, data.validation and"
                f" data.options (e.g. align_share){elsewhere}."
            )


def _report(data_set: DataSet, expectations: ValidationSummary) -> PreparationReport:
    pairs, judge = data_set.tables["pairs"], data_set.tables["judge"]
    clients = data_set.clients.values()
    repeats = data_set.repeats
    return PreparationReport(
        rows=data_set.rows,
        splits=data_set.splits,
        prompts=data_set.prompts,
        partition=partition.summarize([sum(client.rows().values()) for client in clients]),
        partition_train=partition.summarize([client.train for client in clients]),
        clients_without_train=[name for name, client in data_set.clients.items() if not client.train],
        expectations=expectations,
        warnings=[*data_set.warnings, *expectations.warnings],
        repeats=repeats,
        same_text=SAME_TEXT,
        control_tokens=data_set.control_tokens,
        margins=_margins(pairs, judge),
    )


def _drop_long(source: SourceData, data: DataConfig) -> SourceData:
    """The data of a source without pairs and prompts that are too long, which are counted."""
    kept = replace(
        source,
        pairs=drop_long(source.pairs, f"pairs of source {data.source}", data),
        judge=drop_long(source.judge, f"judge's pairs of source {data.source}", data),
        prompts=drop_long(source.prompts, f"prompts of source {data.source}", data),
    )
    counts = {
        f"pair {TOO_LONG}": len(source.pairs) - len(kept.pairs),
        f"judge's pair {TOO_LONG}": len(source.judge) - len(kept.judge),
        f"prompt {TOO_LONG}": len(source.prompts) - len(kept.prompts),
    }
    return replace(
        kept, dropped=source.dropped | {reason: count for reason, count in counts.items() if count}
    )


def _check_counts(counts: RowCounts) -> None:
    """Every pair that a source or a tree gives is prepared, or counted as left out."""
    total = counts.source + (counts.trees.pairs if counts.trees else 0)
    if total != counts.pairs + sum(counts.left_out.values()):
        raise AssertionError(
            f"of {total} pairs, {counts.pairs} are prepared and {counts.left_out} are left out"
        )


def _client_counts(
    pairs: pd.DataFrame, clients: Sequence[str], true_clusters: Mapping[str, str]
) -> dict[str, ClientCounts]:
    counts = Counter(zip(pairs["client_id"], pairs["split"], strict=True))
    return {
        client: ClientCounts(
            **{split: counts[client, split] for split in SPLITS}, group=true_clusters.get(client)
        )
        for client in clients
    }


def _validate(
    tables: Mapping[str, pd.DataFrame], limits: Limits, docs: Path | None, rejected: Path
) -> ValidationSummary:
    """Check the expectations; the Data Docs of data that fail are moved to `rejected`."""
    try:
        return validate(tables, limits, docs)
    except DataError as error:
        shutil.rmtree(rejected, ignore_errors=True)
        if docs is None:
            raise
        rejected.mkdir()
        docs.rename(rejected / "docs")
        raise DataError(str(error).replace(str(docs), str(rejected / "docs"))) from None


def _margins(*frames: pd.DataFrame) -> MarginSummary | None:
    """Margins of the pairs of thoughts; None where there are none."""
    margins: list[float] = []
    for frame in frames:
        if "margin" in frame:
            margins += list(frame.loc[frame["source"] == "thoughts", "margin"])
    if not margins:
        return None
    return MarginSummary(
        pairs=len(margins),
        min=float(np.min(margins)),
        median=float(np.median(margins)),
        max=float(np.max(margins)),
    )
