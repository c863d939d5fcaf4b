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
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.data.data_report import ExpectationOutcome, ValidationSummary
from components.data.records import DataError
from components.data.same_text import same_text

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.core import ExpectationValidationResult
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

SHOWN_ROWS = 5
SHOWN_CHARACTERS = 80
SHOWN_COLUMNS = ("pair_id", "prompt_id", "client_id", "split", "group", "prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Limits:
    """What the data must meet."""

    clients: Sequence[str]  # ids, sorted; each has pairs
    max_characters: int  # of a prompt or completion
    one_client_groups: bool  # as the partitions dirichlet, iid and margin promise
    max_equal: float = 0.0  # share of the pairs whose two completions may be the same text


def validate(tables: Mapping[str, pd.DataFrame], limits: Limits, docs: Path | None) -> ValidationSummary:
    """Check the tables of a prepared folder, by the names of their files: pairs, judge and prompts.

    The Data Docs are written first, to the folder `docs` (entry: index.html), unless it is None.

    Raises:
        DataError: the expectations that fail, the number of rows of each, five of the rows, and the
            path of the Data Docs.
    """
    from components.data import expectations  # imports Great Expectations

    frames = _frames(tables, limits)
    suites = [expectations.pair_suite(frames["pairs"], set(tables["judge"]["client_id"]), limits)]
    if len(tables["prompts"]):
        suites.append(expectations.prompt_suite(limits))
    results = [
        (_outcome(suite, result), result) for suite, result in expectations.run_suites(suites, frames, docs)
    ]
    unmet = [(outcome, result) for outcome, result in results if not outcome.success]
    errors = [
        (outcome, result)
        for outcome, result in unmet
        if _config(result).severity != "warning" or _error_message(result)
    ]
    if errors:
        lines = [f"the data do not meet {len(errors)} of {len(results)} expectations, so nothing is trained:"]
        for outcome, result in errors:
            lines += _sentences(outcome, result, frames[outcome.suite])
        lines += [f"Data Docs: {docs / 'index.html'}"] if docs else []
        raise DataError("\n".join(lines))
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
    import pandas as pd

    pairs = pd.concat([tables["pairs"], tables["judge"]], ignore_index=True)
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


def _outcome(suite: str, result: ExpectationValidationResult) -> ExpectationOutcome:
    config = _config(result)
    return ExpectationOutcome(
        suite=suite,
        expectation=config.description,
        type=config.type,
        column=config.kwargs.get("column"),
        rows=result.result.get("unexpected_count") or 0,
        success=bool(result.success),
    )


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
    hidden = set() if "group" in str(outcome.column) else {"group"}
    columns = [name for name in SHOWN_COLUMNS if name in frame and name not in hidden]
    for index in (rows or list(frame.index))[:SHOWN_ROWS]:
        yield "    " + "; ".join(f"{name}: {_short(frame.at[index, name])}" for name in columns)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")
