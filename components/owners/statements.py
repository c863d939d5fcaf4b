"""The server's prepared folder of a run whose pairs stay with owners: what these publish, and no row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from components.config import Recipe
from components.data.data_report import (
    PreparationReport,
    RepeatCounts,
    RowCounts,
    ValidationSummary,
    write_client_counts,
    write_report,
)
from components.data.partition import summarize
from components.data.prepare import DataSet, expected, server_data
from components.data.records import OWNERS, SPLITS, DataError, write_table
from components.evaluation.control_tokens import with_control_tokens
from components.federation.protocol import Update
from components.io import replaced_folder, write_json
from components.owners.jobs import Statement, prompt_hash
from components.versions import ROUNDS, SAME_TEXT


@dataclass(frozen=True)
class ServerData:
    """The server's prompts and the judge's pairs."""

    data_set: DataSet
    expectations: ValidationSummary
    prompts: tuple[str, ...]  # hashes of the prompts, as their data set has them


def read_server_data(recipe: Recipe) -> ServerData:
    """The server's prompts and the judge's pairs of a recipe.

    Raises:
        DataError: they cannot be used, or do not meet an expectation.
    """
    from components.data.validation import validate  # imports Great Expectations

    own = server_data(recipe.data, recipe.seed)
    prompts = tuple(sorted({prompt_hash(prompt) for prompt in own.tables["prompts"]["prompt"]}))
    data_set = with_control_tokens(recipe, own)
    return ServerData(data_set, validate(data_set.tables, expected(data_set, recipe.data), None), prompts)


def read_statements(updates: Iterable[Update]) -> dict[str, Statement]:
    """The statements of owners by their names.

    Raises:
        DataError: one is of another version.
    """
    statements = {}
    for update in updates:
        try:
            statements[update.client] = Statement.model_validate(update.output)
        except ValidationError:
            raise DataError(
                f"what owner {update.client} publishes is of another version: install one version of fed-rlhf"
                " on both sides"
            ) from None
    return statements


def check_statements(statements: Mapping[str, Statement]) -> None:
    """Refuse owners whose pairs do not meet an expectation, or whose clients compute otherwise.

    Raises:
        DataError: naming the owners.
    """
    problems = []
    for name, statement in statements.items():
        if statement.rounds_version != ROUNDS:
            problems.append(
                f"owner {name} computes rounds of version {statement.rounds_version}, the server of {ROUNDS}:"
                f" install one version of fed-rlhf on both sides"
            )
        for one in statement.unmet:
            problems.append(
                f"the pairs of owner {name} do not meet '{one.expectation}' ({one.rows} rows); its own log"
                " shows them"
            )
    if problems:
        raise DataError("; ".join(problems))


def write_prepared(
    server: ServerData, statements: Mapping[str, Statement], folder: Path
) -> PreparationReport:
    """Write the prepared folder, replacing an existing one, and return its report.

    Args:
        server: its own data.
        statements: by owner.
        folder: written.
    """
    data_set = server.data_set
    report = _report(data_set, statements, server.expectations)
    with replaced_folder(folder) as building:
        for name in ("judge", "prompts"):
            write_table(building / f"{name}.parquet", data_set.tables[name])
        write_client_counts(building, {name: one.counts for name, one in statements.items()})
        write_json(building / OWNERS, {name: one.model_dump(mode="json") for name, one in statements.items()})
        write_report(building, report)
    return report


def _report(
    data_set: DataSet, statements: Mapping[str, Statement], expectations: ValidationSummary
) -> PreparationReport:
    counts = {name: one.counts for name, one in statements.items()}
    splits = {split: sum(getattr(one, split) for one in counts.values()) for split in SPLITS}
    left_out = _total(one.left_out for one in statements.values())
    pairs = sum(splits.values())
    warnings = [f"owner {name}: {text}" for name, one in statements.items() for text in one.warnings]
    own = [
        outcome.model_copy(update={"suite": f"{outcome.suite} of {name}"})
        for name, one in statements.items()
        for outcome in one.expectations
    ]
    repeats = [one.repeats.model_dump() for one in statements.values() if one.repeats is not None]
    return PreparationReport(
        rows=RowCounts(
            source=pairs + sum(left_out.values()),
            pairs=pairs,
            left_out=left_out,
            judge=data_set.rows.judge,
            prompts=data_set.rows.prompts,
            dropped=_total([data_set.rows.dropped, *(one.dropped for one in statements.values())]),
        ),
        splits=splits,
        prompts=data_set.prompts,
        partition=summarize([sum(one.rows().values()) for one in counts.values()]),
        partition_train=summarize([one.train for one in counts.values()]),
        clients_without_train=[name for name, one in counts.items() if not one.train],
        expectations=expectations.model_copy(update={"expectations": [*expectations.expectations, *own]}),
        warnings=[*data_set.warnings, *expectations.warnings, *warnings],
        repeats=RepeatCounts(**_total(repeats)),
        control_tokens=data_set.control_tokens + sum(one.control_tokens for one in statements.values()),
        same_text=SAME_TEXT,
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
