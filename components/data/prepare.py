"""From a source to a prepared folder (records.py): split, partition, sample, validate, write."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import DataConfig
from components.data import partition
from components.data.lengths import drop_long_rows
from components.data.pairs import PreparedPairs, prepare_pairs
from components.data.prompts import ServerPrompts, server_prompts
from components.data.records import SPLITS, DataError, SourceData
from components.data.report import (
    ClientCounts,
    MarginSummary,
    PreparationReport,
    RowCounts,
    ValidationSummary,
    write_client_counts,
    write_report,
)
from components.data.sources import load
from components.data.tables import PreparedTables
from components.data.validation import Limits, validate
from components.data.writing import replaced_folder, write_tables

if TYPE_CHECKING:
    import pandas as pd


def prepare(data: DataConfig, seed: int, folder: Path, docs: bool = False) -> PreparationReport:
    """Write the prepared folder of a recipe's data, replacing an existing one.

    The folder appears complete or not at all. If an expectation fails it is not written, and an
    existing one is unchanged; `<folder>.rejected/docs` then contains the Data Docs, if they are
    written.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.
        folder: to write; its parents are created.
        docs: whether to write the Data Docs, as HTML, into its subfolder docs.

    Returns:
        the report, which is also written to report.json.

    Raises:
        DataError: the data cannot be used; one sentence, or one for each expectation that fails.
    """
    folder = Path(folder)
    source = drop_long_rows(load(data, seed), data)
    pairs = prepare_pairs(source, data, seed)
    prompts = server_prompts(data, source, pairs.pairs, pairs.judge, seed)
    _check_counts(pairs)
    tables = PreparedTables(pairs.pairs, pairs.judge, prompts.rows, pairs.clients)
    clients = _client_counts(pairs, source, data)
    with replaced_folder(folder) as building:
        expectations = _validate(tables, data, building / "docs" if docs else None, _rejected(folder))
        report = _report(source, pairs, prompts, clients, expectations)
        write_tables(building, tables)
        write_client_counts(building, clients)
        write_report(building, report)
    shutil.rmtree(_rejected(folder), ignore_errors=True)
    return report


def _rejected(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.rejected")


def _check_counts(pairs: PreparedPairs) -> None:
    """Every pair that a source or a tree gives is prepared, or counted as left out."""
    total = pairs.source_rows + (pairs.trees.pairs if pairs.trees else 0)
    if total != len(pairs.pairs) + sum(pairs.left_out.values()):
        raise AssertionError(
            f"of {total} pairs, {len(pairs.pairs)} are prepared and {pairs.left_out} are left out"
        )


def _client_counts(pairs: PreparedPairs, source: SourceData, data: DataConfig) -> dict[str, ClientCounts]:
    groups = source.groups if data.partition == "natural" else {}
    counts = Counter(zip(pairs.pairs["client_id"], pairs.pairs["split"], strict=True))
    return {
        client: ClientCounts(
            train=counts[client, "train"],
            validation=counts[client, "validation"],
            test=counts[client, "test"],
            group=groups.get(client),
        )
        for client in pairs.clients
    }


def _validate(
    tables: PreparedTables, data: DataConfig, docs: Path | None, rejected: Path
) -> ValidationSummary:
    """Check the expectations; the Data Docs of data that fail are moved to `rejected`."""
    limits = Limits(data.max_characters, data.partition not in ("natural", "column"), data.max_equal)
    try:
        return validate(tables, limits, docs)
    except DataError as error:
        shutil.rmtree(rejected, ignore_errors=True)
        if docs is None:
            raise
        rejected.mkdir()
        docs.rename(rejected / "docs")
        raise DataError(str(error).replace(str(docs), str(rejected / "docs"))) from None


def _report(
    source: SourceData,
    pairs: PreparedPairs,
    prompts: ServerPrompts,
    clients: dict[str, ClientCounts],
    expectations: ValidationSummary,
) -> PreparationReport:
    splits = Counter(pairs.pairs["split"])
    counts = clients.values()
    return PreparationReport(
        rows=RowCounts(
            source=pairs.source_rows,
            pairs=len(pairs.pairs),
            left_out=pairs.left_out,
            judge=len(pairs.judge),
            prompts=dict(sorted(Counter(prompts.rows["split"]).items())),
            dropped=source.dropped,
            trees=pairs.trees,
        ),
        splits={split: splits[split] for split in SPLITS},
        prompts=prompts.summaries,
        partition=partition.summarize([sum(client.rows().values()) for client in counts]),
        partition_train=partition.summarize([client.train for client in counts]),
        clients_without_train=[name for name, client in clients.items() if not client.train],
        expectations=expectations,
        warnings=[*source.warnings, *expectations.warnings],
        margins=_margins(pairs.pairs, pairs.judge),
    )


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
