"""Prepares an owner's pairs for a run, at the owner, and says what it publishes of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from components.config import DataConfig, Recipe
from components.data.data_report import ExpectationOutcome
from components.data.prepare import DataSet, assemble, prepare, repeat_warnings
from components.data.records import DataError, read_pairs
from components.data.sources import load
from components.data.sources.owners import file_source
from components.evaluation.control_tokens import with_control_tokens
from components.evaluation.pair_warnings import reading_warnings
from components.owners.home import OwnerConfig, read_config, salted_digest
from components.owners.jobs import Statement, prompt_hash
from components.versions import ROUNDS

log = logging.getLogger(__name__)
LIBRARIES = ("fed-rlhf", "torch", "transformers", "peft")
"""Whose versions are published."""
COMPLETIONS = ("chosen", "rejected")
"""Columns that a verdict exchanges."""
OVERLAP = "prompt of the server's"
"""Reason for which pairs are left out."""


def own_data(home: Path, config: OwnerConfig, data: DataConfig) -> DataConfig:
    """The data of an owner: its own file, divided as the recipe of the run says."""
    path = (home / config.data).resolve()
    own = {
        "source": file_source(path).name,
        "path": str(path),
        "options": {"align_share": 0.0, "judge_clients": 0.0},
        "columns": config.columns,
        "drop_invalid": config.drop_invalid,
        "messages": config.messages,
    }
    return DataConfig.model_validate(own | {name: getattr(data, name) for name in SHARED})


SHARED = ("validation", "test", "max_characters", "max_dropped", "max_equal", "control_tokens")
"""The keys of the section data that the recipe sets for all owners."""


def publish(
    home: Path, config: OwnerConfig, recipe: Recipe, folder: Path, prompts: Collection[str] = ()
) -> Statement:
    """Write the owner's prepared folder, and return what is published of it.

    Sentences that may quote rows are logged here, at the owner.

    Args:
        home: of the owner.
        config: of the owner.
        recipe: of the run.
        folder: of the prepared data; written, unless an expectation is not met.
        prompts: hashes of the server's prompts; the owner's pairs with such a prompt are left out, so that
            none is on both sides.

    Raises:
        DataError: the owner's file cannot be used. The text may quote it.
    """
    from components.data.validation import ExpectationsFailed  # imports Great Expectations

    data = own_data(home, config, recipe.data)
    is_private = recipe.federation.privacy is not None
    forbidden = set(prompts)
    left_out: dict[str, int] = {}
    read: list[DataSet] = []

    def assembled(data: DataConfig, seed: int) -> DataSet:
        source = load(data, seed)
        # Measurements are by domain, whose names are the owner's words.
        pairs = [replace(pair, client_id=config.name, domain="") for pair in source.pairs]
        own = [pair for pair in pairs if prompt_hash(pair.prompt) not in forbidden]
        if len(own) < len(pairs):
            left_out[OVERLAP] = len(pairs) - len(own)
        if not own:
            raise DataError(f"all {len(pairs)} pairs of {config.data} have prompts of the server")
        one = assemble(data, seed, replace(source, pairs=own, prompts=[], judge=[], true_clusters={}))
        read.append(with_control_tokens(recipe, one))
        return read[-1]

    warnings: list[str] = []
    digest = ""
    try:
        docs = recipe.runtime.data_docs
        report = prepare(data, recipe.seed, folder, docs, assembled, label_balance=not is_private)
    except ExpectationsFailed as error:
        log.error("%s", error)
        outcomes = error.outcomes
    else:
        outcomes = tuple(report.expectations.expectations)
        pairs = folder / "pairs.parquet"
        warnings += report.expectations.warnings
        warnings += [] if is_private else repeat_warnings(report.repeats)
        warnings += reading_warnings(recipe, read_pairs(pairs))
        digest = salted_digest(home, pairs)
        for warning in report.warnings:
            log.warning("%s", warning)
    (data_set,) = read
    return Statement(
        counts=data_set.clients[config.name],
        left_out=data_set.rows.left_out | left_out,
        dropped=data_set.rows.dropped,
        repeats=None if is_private else data_set.repeats,
        control_tokens=data_set.control_tokens,
        expectations=without_verdicts(outcomes) if is_private else outcomes,
        warnings=tuple(warnings),
        digest=digest,
        rounds_version=ROUNDS,
        versions={name: version(name) for name in LIBRARIES},
    )


def without_verdicts(outcomes: Sequence[ExpectationOutcome]) -> tuple[ExpectationOutcome, ...]:
    """Outcomes that do not say which completion is chosen: what is expected of both is one outcome."""
    merged: dict[tuple[str, str, str | None], ExpectationOutcome] = {}
    for outcome in outcomes:
        column, expectation = outcome.column, outcome.expectation
        if column in COMPLETIONS:
            expectation, column = expectation.replace(column, "completion"), "completion"
        key = (expectation, outcome.type, column)
        if (other := merged.get(key)) is not None:
            outcome = outcome.model_copy(
                update={"rows": outcome.rows + other.rows, "success": outcome.success and other.success}
            )
        merged[key] = outcome.model_copy(update={"expectation": expectation, "column": column})
    return tuple(merged.values())


def check_owner(home: Path, recipe: Recipe) -> Statement:
    """What an owner would publish for a recipe; nothing is kept.

    The server's prompts are not known here, so that no pair is left out because of them.

    Raises:
        UserError: the home or the file cannot be used.
    """
    with TemporaryDirectory(dir=home, prefix=".check-") as scratch:
        return publish(home, read_config(home), recipe, Path(scratch) / "prepared")
