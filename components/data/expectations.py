"""Runs expectation suites with Great Expectations, in memory, and writes its Data Docs."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.core import ExpectationValidationResult
    from great_expectations.data_context.data_context.ephemeral_data_context import EphemeralDataContext

SITE = "docs"


@dataclass(frozen=True)
class Rule:
    """An expectation.

    Attributes:
        expectation: name of its class in Great Expectations.
        description: what is expected, in words.
        arguments: of the class.
        is_warning: whether data that do not meet it are used nevertheless.
    """

    expectation: str
    description: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    is_warning: bool = False


@dataclass(frozen=True)
class Suite:
    """A table and the expectations on it.

    Attributes:
        name: of the table.
        frame: the table.
        rules: the expectations.
    """

    name: str
    frame: pd.DataFrame
    rules: Sequence[Rule]


@dataclass(frozen=True)
class Outcome:
    """The result of an expectation.

    Attributes:
        suite: the suite.
        expectation: its description.
        type: its name in Great Expectations.
        column: the column, None for expectations on the table.
        success: whether it holds.
        rows: number of rows that violate it.
        indices: their indices.
        observed: the observed value, for expectations on the whole column.
        error: why it could not be checked; None where it could.
        is_warning: whether the data are used although it fails.
    """

    suite: Suite
    expectation: str
    type: str
    column: str | None
    success: bool
    rows: int
    indices: list[int]
    observed: Any
    error: str | None
    is_warning: bool


def run_suites(suites: Sequence[Suite], docs: Path | None) -> list[Outcome]:
    """Check all expectations.

    Args:
        suites: what to check.
        docs: folder for the Data Docs (its index.html is the entry), or None.
    """
    with _quiet():
        import great_expectations as gx

        context = gx.get_context(mode="ephemeral")
        variables: Any = context.variables
        variables.progress_bars = {"globally": False}
        for site in list(context.get_site_names()):
            context.delete_data_docs_site(site)  # the default one writes into the temporary folder
        actions = [] if docs is None else [_add_docs(context, docs)]
        outcomes: list[Outcome] = []
        for suite in suites:
            outcomes += _run_suite(context, suite, actions)
    return outcomes


def _add_docs(context: EphemeralDataContext, docs: Path) -> Any:
    """Add a site of Data Docs, and return the action that writes it."""
    from great_expectations.checkpoint.actions import UpdateDataDocsAction

    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())}
    site: Any = {
        "class_name": "SiteBuilder",
        "store_backend": store,
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }
    context.add_data_docs_site(SITE, site)
    return UpdateDataDocsAction(name=SITE, site_names=[SITE])


def _run_suite(context: EphemeralDataContext, suite: Suite, actions: Sequence[Any]) -> list[Outcome]:
    import great_expectations as gx

    classes = importlib.import_module("great_expectations.expectations")
    expectations = [
        getattr(classes, rule.expectation)(
            description=rule.description,
            severity="warning" if rule.is_warning else "critical",
            **rule.arguments,
        )
        for rule in suite.rules
    ]
    source = context.data_sources.add_or_update_pandas(f"prepared {suite.name}")
    batch = source.add_dataframe_asset(suite.name).add_batch_definition_whole_dataframe("all")
    rules = gx.ExpectationSuite(suite.name, expectations=expectations)
    parameters = {"dataframe": suite.frame}
    if not actions:  # a checkpoint also stores the suite and its result, which takes as long again
        validation = batch.get_batch(parameters).validate(rules, result_format="COMPLETE")
        return [_outcome(suite, result) for result in validation.results]
    definition = context.validation_definitions.add(
        gx.ValidationDefinition(name=suite.name, data=batch, suite=context.suites.add(rules))
    )
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=suite.name,
            validation_definitions=[definition],
            actions=list(actions),
            result_format="COMPLETE",
        )
    )
    results = checkpoint.run(batch_parameters=parameters).run_results
    validation = next(iter(results.values()))
    return [_outcome(suite, result) for result in validation.results]


def _outcome(suite: Suite, result: ExpectationValidationResult) -> Outcome:
    config: Any = result.expectation_config
    values: Mapping[str, Any] = result.result or {}
    return Outcome(
        suite=suite,
        expectation=config.description,
        type=config.type,
        column=config.kwargs.get("column"),
        success=bool(result.success),
        rows=int(values.get("unexpected_count") or 0),
        indices=list(values.get("unexpected_index_list") or []),
        observed=values.get("observed_value"),
        error=_error_message(result.exception_info or {}),
        is_warning=config.severity == "warning",
    )


def _error_message(information: Mapping[str, Any]) -> str | None:
    """The message of an expectation's exception, or of the first metric that raised one; None without."""
    for part in (information, *information.values()):
        if isinstance(part, Mapping) and part.get("exception_message"):
            return str(part["exception_message"])
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """No telemetry, no log lines and no warnings of the library's own while it runs."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")  # read when great_expectations is first imported
    logger = logging.getLogger("great_expectations")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # This logger sets its own level when it is imported.
    noisy = logging.getLogger("great_expectations.data_context.types.base")
    noisy.addFilter(_is_error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        noisy.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
