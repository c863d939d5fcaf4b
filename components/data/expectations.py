"""The expectations on prepared data; to import them (Great Expectations) takes seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import great_expectations as gx
from great_expectations.core import ExpectationValidationResult
from great_expectations.data_context.types import base as configuration
from great_expectations.expectations.expectation import Expectation
from great_expectations.render.view.view import DefaultJinjaPageView
from jinja2 import pass_context

from components.data.records import SPLITS

if TYPE_CHECKING:
    import pandas as pd

    from components.data.validation import Limits

gxe: Any = import_module("great_expectations.expectations")  # exports its classes only implicitly

BALANCE = {"min_value": 0.02, "max_value": 0.98}
MIN_BALANCE_PAIRS = 50


class EscapingView(DefaultJinjaPageView):
    """Data Docs in which values of rows are text, also where Great Expectations takes them for HTML."""

    @pass_context
    def render_content_block(
        self, jinja_context: Any, content_block: Any, *arguments: Any, **options: Any
    ) -> Any:
        if isinstance(content_block, str):
            return escape(content_block, quote=False)
        if isinstance(content_block, list):
            content_block = [escape(part) if isinstance(part, str) else part for part in content_block]
        return super().render_content_block(jinja_context, content_block, *arguments, **options)


def pair_suite(pairs: pd.DataFrame, judges: Collection[str], limits: Limits) -> gx.ExpectationSuite:
    """The suite 'pairs'; a label balance is expected where enough pairs determine it."""
    expectations: list[Expectation] = [
        gxe.ExpectTableRowCountToBeBetween(description="there are pairs", min_value=1)
    ]
    for column in ("prompt", "chosen", "rejected"):
        expectations += _text(column, limits.max_characters)
    equal = "chosen differs from rejected (data.max_equal)"
    known = sorted({*limits.clients, *judges})
    expectations += [
        _in_set("chosen_differs", equal, [True], mostly=1 - limits.max_equal),
        gxe.ExpectColumnValuesToNotBeNull(description="every pair has a client", column="client_id"),
        _in_set("client_id", "the client is known", known),
        _in_set("split", "the split is known", SPLITS),
        gxe.ExpectColumnValuesToBeUnique(description="the pair_id is unique", column="pair_id"),
        _in_set("prompt_in_one_split", "no prompt in two splits", [True]),
        _in_set("group_in_one_split", "no group in two splits", [True]),
        gxe.ExpectColumnDistinctValuesToContainSet(
            description="every client has a pair", column="client_id", value_set=list(limits.clients)
        ),
    ]
    if limits.one_client_groups:
        expectations.append(_in_set("group_in_one_client", "no group in two clients", [True]))
    for column, order, severity in (
        ("chosen_is_longer", "is the longer completion", "warning"),
        ("chosen_is_first", "comes first in a label-free order", "critical"),
    ):
        if pairs[column].count() >= MIN_BALANCE_PAIRS:
            description = f"label balance: chosen {order}"
            expectations.append(
                gxe.ExpectColumnMeanToBeBetween(
                    description=description, severity=severity, column=column, **BALANCE
                )
            )
    return gx.ExpectationSuite("pairs", expectations=expectations)


def prompt_suite(limits: Limits) -> gx.ExpectationSuite:
    """The suite 'prompts', of the server's prompts."""
    expectations = [
        *_text("prompt", limits.max_characters),
        _in_set("split", "the split is known", ("align", "test")),
        gxe.ExpectColumnValuesToBeUnique(description="the prompt_id is unique", column="prompt_id"),
        _in_set("prompt_in_one_split", "no prompt in two splits", [True]),
    ]
    return gx.ExpectationSuite("prompts", expectations=expectations)


def run_suites(
    suites: Iterable[gx.ExpectationSuite], frames: Mapping[str, pd.DataFrame], docs: Path | None
) -> list[tuple[str, ExpectationValidationResult]]:
    """Check each suite on the table of its name; write the Data Docs to `docs` unless None.

    Returns:
        the name of the suite and the result, for each expectation.
    """
    sites: dict[str, dict[str, object]] = {}
    if docs is not None:
        store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())}
        sites["docs"] = {
            "class_name": "SiteBuilder",
            "store_backend": store,
            "site_section_builders": {
                section: {"view": {"module_name": __name__, "class_name": EscapingView.__name__}}
                for section in ("expectations", "validations")
            },
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        }
    context = gx.get_context(
        mode="ephemeral",
        project_config=configuration.DataContextConfig(
            store_backend_defaults=configuration.InMemoryStoreBackendDefaults(),
            data_docs_sites=sites,
            progress_bars=configuration.ProgressBarsConfig(globally=False),
            analytics_enabled=False,
        ),
    )
    results: list[tuple[str, ExpectationValidationResult]] = []
    for suite in suites:
        source = context.data_sources.add_pandas(f"prepared {suite.name}")
        batch = source.add_dataframe_asset(suite.name).add_batch_definition_whole_dataframe("all")
        definition = gx.ValidationDefinition(name=suite.name, data=batch, suite=context.suites.add(suite))
        parameters = {"dataframe": frames[suite.name]}
        validation = definition.run(batch_parameters=parameters, result_format="COMPLETE")
        results += [(suite.name, result) for result in validation.results]
    if docs is not None:
        context.build_data_docs()
    return results


def _text(column: str, max_characters: int) -> list[Expectation]:
    longest = f"{column} has at most {max_characters} characters"
    return [
        gxe.ExpectColumnValuesToNotBeNull(description=f"{column} is there", column=column),
        gxe.ExpectColumnValuesToMatchRegex(description=f"{column} is not empty", column=column, regex=r"\S"),
        gxe.ExpectColumnValueLengthsToBeBetween(description=longest, column=column, max_value=max_characters),
    ]


def _in_set(column: str, description: str, values: Collection[object], mostly: float = 1.0) -> Expectation:
    expectation: Expectation = gxe.ExpectColumnValuesToBeInSet(
        description=description, column=column, value_set=list(values), mostly=mostly
    )
    return expectation
