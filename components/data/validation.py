"""The checks of prepared data, before anything trains on them.

Prompts are the same if they are the same text (same_text.py). Label balance: the learner shows
each pair in both orders, so A and B are balanced there by construction; the data set itself can be
unbalanced. Two shares are checked, if at least 50 pairs determine them:

    the longer completion    the share of pairs whose chosen completion is the longer one
    a label-free order       the share of pairs whose chosen completion comes first in an order (by
                             hash) that does not depend on the labels

The first is extreme if the labels are nothing but lengths: because completions were truncated on one
side or a column was filled by sorting, or because concise answers are what is preferred. So there is a
warning if it is not within 2% and 98%. The second must be: it is extreme if the same answer wins again
and again, a label column that is constant. Neither detects labels that are all reversed: that is tested
for each source.

To import Great Expectations takes seconds, so import this module where the data are validated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import great_expectations as gx
import pandas as pd
from great_expectations.core import ExpectationValidationResult
from great_expectations.data_context.types import base as configuration
from great_expectations.expectations.expectation import Expectation
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from great_expectations.render.view.view import DefaultJinjaPageView
from jinja2 import pass_context

from components.data.data_report import ExpectationOutcome, Limits, ValidationSummary
from components.data.records import SPLITS, UNSEEN, DataError
from components.data.same_text import same_text

gxe: Any = import_module("great_expectations.expectations")  # exports its classes only implicitly

BALANCE = {"min_value": 0.02, "max_value": 0.98}
MIN_BALANCE_PAIRS = 50
SHOWN_ROWS = 5
SHOWN_COLUMNS = ("pair_id", "prompt_id")


class ExpectationsFailed(DataError):
    """Data do not meet their expectations. The text names rows by their ids, and quotes none."""

    def __init__(self, text: str, outcomes: Sequence[ExpectationOutcome] = ()) -> None:
        super().__init__(text)
        self.outcomes = tuple(outcomes)


def validate(tables: Mapping[str, pd.DataFrame], limits: Limits, docs: Path | None) -> ValidationSummary:
    """Check the tables of a prepared folder: pairs, judge and prompts, and unseen if there are any.

    The Data Docs are written first, to the folder `docs` (entry: index.html), unless it is None.

    Raises:
        ExpectationsFailed: the expectations that fail, the number of rows of each, five of the rows, and
            the path of the Data Docs.
    """
    frames = _frames(tables, limits)
    suites = []
    if limits.clients or len(frames["pairs"]):  # a server may have neither clients' pairs nor a judge's
        suites.append(pair_suite(frames["pairs"], set(tables["judge"]["client_id"]), limits))
    if len(tables["prompts"]):
        expectations = [
            *_text("prompt", limits.max_characters),
            _in_set("split", "the split is known", ("align", "test")),
            gxe.ExpectColumnValuesToBeUnique(description="the prompt_id is unique", column="prompt_id"),
            _in_set("prompt_in_one_split", "no prompt in two splits", [True]),
        ]
        suites.append(gx.ExpectationSuite("prompts", expectations=expectations))
    results: list[tuple[ExpectationOutcome, ExpectationValidationResult]] = []
    for suite, result in run_suites(suites, frames, docs):
        config = _config(result)
        outcome = ExpectationOutcome(
            suite=suite,
            expectation=config.description,
            type=config.type,
            column=config.kwargs.get("column"),
            rows=result.result.get("unexpected_count") or 0,
            success=bool(result.success),
        )
        results.append((outcome, result))
    unmet = [(outcome, result) for outcome, result in results if not outcome.success]
    errors = [one for one in unmet if _config(one[1]).severity != "warning" or _error_message(one[1])]
    if errors:
        lines = [f"the data do not meet {len(errors)} of {len(results)} expectations, so nothing is trained:"]
        for outcome, result in errors:
            lines += _sentences(outcome, result, frames[outcome.suite])
        lines += [f"Data Docs: {docs / 'index.html'}"] if docs else []
        raise ExpectationsFailed("\n".join(lines), [outcome for outcome, _ in results])
    return ValidationSummary(
        success=True,
        expectations=[outcome for outcome, _ in results],
        warnings=[
            f"in {_share(outcome, result, frames[outcome.suite])} the chosen completion is the longer one: a"
            " model can learn from length alone what is preferred; if the completions were cut or sorted,"
            " correct the data."
            for outcome, result in unmet
        ],
    )


def label_free_first(chosen: str, rejected: str) -> bool:
    """Whether chosen comes before rejected in an order by hash, independent of the labels."""
    first, second = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (chosen, rejected))
    return first < second


def _frames(tables: Mapping[str, pd.DataFrame], limits: Limits) -> dict[str, pd.DataFrame]:
    """The tables by suite, with a column for each check that compares several values."""
    owned = [tables[name] for name in ("pairs", UNSEEN, "judge") if name in tables]
    pairs = pd.concat(owned, ignore_index=True)
    pairs["group_in_one_split"] = pairs.groupby("group")["split"].transform("nunique") <= 1
    # A group of a client may also be the judge's.
    federated = pairs["client_id"].where(pairs["client_id"].isin(limits.clients))
    pairs["group_in_one_client"] = federated.groupby(pairs["group"]).transform("nunique") <= 1
    chosen = pairs["chosen"].fillna("")
    rejected = pairs["rejected"].fillna("")
    pairs["chosen_differs"] = chosen.str.strip() != rejected.str.strip()
    longer = (chosen.str.len() > rejected.str.len()).astype("float64")
    pairs["chosen_is_longer"] = longer.where(chosen.str.len() != rejected.str.len())
    first = [float(label_free_first(*texts)) for texts in zip(chosen, rejected, strict=True)]
    pairs["chosen_is_first"] = pd.Series(first, dtype="float64").where(pairs["chosen_differs"])
    frames = {"pairs": pairs, "prompts": tables["prompts"].copy()}
    known = pd.concat([frame[["prompt", "split"]] for frame in frames.values()])
    splits = known.groupby(known["prompt"].map(same_text, na_action="ignore"))["split"].nunique()
    for frame in frames.values():
        counts = frame["prompt"].map(same_text, na_action="ignore").map(splits)
        frame["prompt_in_one_split"] = counts.fillna(1) <= 1
    return frames


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
        if limits.label_balance and pairs[column].count() >= MIN_BALANCE_PAIRS:
            options = {"description": f"label balance: chosen {order}", "severity": severity, **BALANCE}
            expectations.append(gxe.ExpectColumnMeanToBeBetween(column=column, **options))
    return gx.ExpectationSuite("pairs", expectations=expectations)


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


def _config(result: ExpectationValidationResult) -> ExpectationConfiguration:
    assert result.expectation_config is not None  # it is optional only by type
    return result.expectation_config


def _error_message(result: ExpectationValidationResult) -> str | None:
    """The message of an expectation's exception, or else of the first metric that raised one."""
    information = result.exception_info
    for part in (information, *information.values()):
        if isinstance(part, dict) and part.get("exception_message"):
            return str(part["exception_message"])
    return None


def _share(outcome: ExpectationOutcome, result: ExpectationValidationResult, frame: pd.DataFrame) -> str:
    """The share of a label balance, in words."""
    return f"{result.result['observed_value']:.1%} of {frame[outcome.column].count()} pairs"


def _sentences(
    outcome: ExpectationOutcome, result: ExpectationValidationResult, frame: pd.DataFrame
) -> Iterator[str]:
    """The lines of an error on an expectation that fails."""
    column = f" (column {outcome.column})" if outcome.column else ""
    title = f"- {outcome.suite}: '{outcome.expectation}'{column}"
    if message := _error_message(result):
        yield f"{title} could not be checked: {message}"
        return
    rows = result.result.get("unexpected_index_list")
    if rows:
        yield f"{title} fails in {outcome.rows} of {len(frame)} rows:"
    elif "mean" in outcome.type:
        limits = _config(result).kwargs
        yield (
            f"{title} holds in {_share(outcome, result, frame)}, but {limits['min_value']:.0%} to"
            f" {limits['max_value']:.0%} is expected; the first of {len(frame)} rows:"
        )
    else:
        yield f"{title} fails for the {len(frame)} rows as a whole"
    for name in SHOWN_COLUMNS:
        if name in frame:
            ids = [str(frame.at[index, name]) for index in (rows or list(frame.index))[:SHOWN_ROWS]]
            yield f"    {name}: {', '.join(ids)}"


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
