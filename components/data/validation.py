"""The expectations on prepared data, which are checked before anything trains on them.

Prompts are the same if they differ only in case and white space. Label balance: the learner shows
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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.data.expectations import Outcome, Rule, Suite, run_suites
from components.data.records import SPLITS, DataError
from components.data.report import ExpectationOutcome, ValidationSummary
from components.data.splits import normal
from components.data.tables import PreparedTables

if TYPE_CHECKING:
    import pandas as pd

BALANCE = (0.02, 0.98)
MIN_BALANCE_PAIRS = 50
SHOWN_ROWS = 5
SHOWN_CHARACTERS = 80
SHOWN_COLUMNS = ("pair_id", "prompt_id", "client_id", "split", "group", "prompt", "chosen", "rejected")
BALANCE_COLUMNS = {
    "chosen_is_longer": "label balance: chosen is the longer completion",
    "chosen_is_first": "label balance: chosen comes first in a label-free order",
}


@dataclass(frozen=True)
class Limits:
    """What the data must meet.

    Attributes:
        max_characters: longest prompt or completion (characters).
        max_equal: share of the pairs whose two completions may be the same text.
        one_client_groups: whether each group has one client, as the partitions dirichlet, iid and
            margin promise.
    """

    max_characters: int
    one_client_groups: bool
    max_equal: float = 0.0


def validate(tables: PreparedTables, limits: Limits, docs: Path | None) -> ValidationSummary:
    """Check prepared pairs and prompts; the Data Docs are written first.

    Args:
        tables: of the prepared folder.
        limits: what they must meet.
        docs: folder for the Data Docs (its index.html is the entry), or None.

    Raises:
        DataError: the expectations that fail, the number of rows of each, five of the rows, and the
            path of the Data Docs.
    """
    suites = _suites(tables, limits)
    outcomes = run_suites(suites, docs)
    failed = [outcome for outcome in outcomes if not outcome.success and not _is_warning(outcome)]
    if failed:
        lines = [
            f"the data do not meet {len(failed)} of {len(outcomes)} expectations, so nothing is trained:"
        ]
        for outcome in failed:
            lines += _sentences(outcome)
        lines += [f"Data Docs: {docs / 'index.html'}"] if docs else []
        raise DataError("\n".join(lines))
    return ValidationSummary(
        success=True,
        expectations=[
            ExpectationOutcome(
                suite=outcome.suite.name,
                expectation=outcome.expectation,
                type=outcome.type,
                column=outcome.column,
                rows=outcome.rows,
                success=outcome.success,
            )
            for outcome in outcomes
        ],
        warnings=[_warning(outcome) for outcome in outcomes if not outcome.success],
    )


def _is_warning(outcome: Outcome) -> bool:
    return outcome.is_warning and not outcome.error


def _warning(outcome: Outcome) -> str:
    """A sentence on an expectation that data may fail: the balance of lengths."""
    share = float(outcome.observed)
    pairs = int(outcome.suite.frame[outcome.column].count())
    return (
        f"in {share:.1%} of {pairs} pairs the chosen completion is the longer one: a model can learn from"
        " length alone what is preferred; if the completions were cut or sorted, correct the data."
    )


def _suites(tables: PreparedTables, limits: Limits) -> list[Suite]:
    import pandas as pd

    together = pd.concat([tables.pairs, tables.judge], ignore_index=True)
    pairs = _with_balance(_with_groups(_with_splits(together, tables.prompts), tables.clients))
    prompts = _with_splits(tables.prompts, together)
    judges = set(tables.judge["client_id"])
    suites = [Suite("pairs", pairs, _pair_rules(pairs, tables.clients, judges, limits))]
    if len(prompts):
        suites.append(Suite("prompts", prompts, _prompt_rules(limits.max_characters)))
    return suites


def label_free_first(chosen: str, rejected: str) -> bool:
    """Whether chosen comes before rejected in an order by hash, independent of the labels."""
    first, second = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (chosen, rejected))
    return first < second


def _with_splits(frame: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Add whether a prompt is in one split, since expectations on rows check one row at a time."""
    import pandas as pd

    frame = frame.copy()
    known = pd.concat([frame[["prompt", "split"]], others[["prompt", "split"]]])
    splits = known.groupby(known["prompt"].map(normal, na_action="ignore"))["split"].nunique()
    counts = frame["prompt"].map(normal, na_action="ignore").map(splits)
    frame["prompt_in_one_split"] = counts.fillna(1) <= 1
    return frame


def _with_groups(frame: pd.DataFrame, clients: Collection[str]) -> pd.DataFrame:
    """Add whether a group is in one split and with one client; the judge may have it too."""
    frame["group_in_one_split"] = frame.groupby("group")["split"].transform("nunique") <= 1
    federated = frame["client_id"].where(frame["client_id"].isin(list(clients)))
    frame["group_in_one_client"] = federated.groupby(frame["group"]).transform("nunique") <= 1
    return frame


def _with_balance(frame: pd.DataFrame) -> pd.DataFrame:
    """Add whether the completions differ, and the columns of label balance."""
    chosen = frame["chosen"].fillna("")
    rejected = frame["rejected"].fillna("")
    frame["chosen_differs"] = chosen.str.strip() != rejected.str.strip()
    longer = (chosen.str.len() > rejected.str.len()).astype("float64")
    frame["chosen_is_longer"] = longer.where(chosen.str.len() != rejected.str.len())
    frame["chosen_is_first"] = [
        float(label_free_first(*texts)) for texts in zip(chosen, rejected, strict=True)
    ]
    frame.loc[~frame["chosen_differs"], "chosen_is_first"] = float("nan")
    return frame


def _pair_rules(
    frame: pd.DataFrame, clients: Collection[str], judges: Collection[str], limits: Limits
) -> list[Rule]:
    owners = {"column": "client_id", "value_set": sorted({*clients, *judges})}
    rules = [Rule("ExpectTableRowCountToBeBetween", "there are pairs", {"min_value": 1})]
    for column in ("prompt", "chosen", "rejected"):
        rules += _text_rules(column, limits.max_characters)
    rules += [
        _holds("chosen_differs", "chosen differs from rejected (data.max_equal)", 1 - limits.max_equal),
        Rule("ExpectColumnValuesToNotBeNull", "every pair has a client", {"column": "client_id"}),
        Rule("ExpectColumnValuesToBeInSet", "the client is known", owners),
        _split_rule(SPLITS),
        Rule("ExpectColumnValuesToBeUnique", "the pair_id is unique", {"column": "pair_id"}),
        _holds("prompt_in_one_split", "no prompt in two splits"),
        _holds("group_in_one_split", "no group in two splits"),
        Rule(
            "ExpectColumnDistinctValuesToContainSet",
            "every client has a pair",
            {"column": "client_id", "value_set": sorted(clients)},
        ),
    ]
    if limits.one_client_groups:
        rules.append(_holds("group_in_one_client", "no group in two clients"))
    for column, description in BALANCE_COLUMNS.items():
        if frame[column].count() >= MIN_BALANCE_PAIRS:
            arguments = {"column": column, "min_value": BALANCE[0], "max_value": BALANCE[1]}
            is_warning = column == "chosen_is_longer"
            rules.append(Rule("ExpectColumnMeanToBeBetween", description, arguments, is_warning))
    return rules


def _prompt_rules(max_characters: int) -> list[Rule]:
    return [
        *_text_rules("prompt", max_characters),
        _split_rule(("align", "test")),
        Rule("ExpectColumnValuesToBeUnique", "the prompt_id is unique", {"column": "prompt_id"}),
        _holds("prompt_in_one_split", "no prompt in two splits"),
    ]


def _text_rules(column: str, max_characters: int) -> list[Rule]:
    return [
        Rule("ExpectColumnValuesToNotBeNull", f"{column} is there", {"column": column}),
        Rule(
            "ExpectColumnValuesToMatchRegex",
            f"{column} is not empty",
            {"column": column, "regex": r"\S"},
        ),
        Rule(
            "ExpectColumnValueLengthsToBeBetween",
            f"{column} has at most {max_characters} characters",
            {"column": column, "max_value": max_characters},
        ),
    ]


def _holds(column: str, description: str, share: float = 1.0) -> Rule:
    arguments = {"column": column, "value_set": [True], "mostly": share}
    return Rule("ExpectColumnValuesToBeInSet", description, arguments)


def _split_rule(splits: Collection[str]) -> Rule:
    arguments = {"column": "split", "value_set": list(splits)}
    return Rule("ExpectColumnValuesToBeInSet", "the split is known", arguments)


def _sentences(outcome: Outcome) -> Iterator[str]:
    """The lines of an error on an expectation that fails."""
    frame = outcome.suite.frame
    column = f" (column {outcome.column})" if outcome.column else ""
    title = f"- {outcome.suite.name}: '{outcome.expectation}'{column}"
    if outcome.error:
        yield f"{title} could not be checked: {outcome.error}"
        return
    if outcome.indices:
        yield f"{title} fails in {outcome.rows} of {len(frame)} rows:"
    elif "mean" in outcome.type:
        yield (
            f"{title} holds in {float(outcome.observed):.1%} of {int(frame[outcome.column].count())} pairs,"
            f" but {BALANCE[0]:.0%} to {BALANCE[1]:.0%} is expected; the first of {len(frame)} rows:"
        )
    else:
        yield f"{title} fails for the {len(frame)} rows as a whole"
    columns = [name for name in SHOWN_COLUMNS if name in frame]
    if "group" not in str(outcome.column):
        columns = [name for name in columns if name != "group"]
    for index in (outcome.indices or list(frame.index))[:SHOWN_ROWS]:
        yield "    " + "; ".join(f"{name}: {_short(frame.at[index, name])}" for name in columns)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")
