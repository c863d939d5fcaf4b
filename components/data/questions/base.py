"""A multiple-choice question, and what a question set is made of.

A set is a QuestionSet, whose function `read` makes a question of one row of the hub's schema:

    MINE = QuestionSet("mine", read_mine, hub="me/mine", split="train", files=("train", "dev"))

    def read_mine(row: Row, where: str) -> Question: ...

`read` makes the question with `answered`, which raises SkippedRow for a row that is no question
(the reason is counted), and raises DataError if a column is missing or of another type. The set is
registered in QUESTION_SETS, or by the package that contains it:

    [project.entry-points."fed_rlhf.question_sets"]
    mine = "my_package.my_questions:MINE"
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import Registry
from components.data.records import DataError, pair_id
from components.data.rows import Row, check_columns, check_text, read_file

LETTERS = string.ascii_uppercase
UNREADABLE_OPTIONS = "options that cannot be told apart"


@dataclass(frozen=True)
class Question:
    """A question with one right answer among its options.

    Attributes:
        id: unique in its set, and the same for every copy of the data: the set's own id, or a hash
            of the texts if it has none.
        set: name of the set.
        question: text, without its context and its options.
        options: (label, text) in the set's order; the labels are A, B, C ...
        answer: label of the right option.
        explanation: a human's reason for the answer; empty if the set has none.
        context: text that the question is about; empty if the set has none.
    """

    id: str
    set: str
    question: str
    options: tuple[tuple[str, str], ...]
    answer: str
    explanation: str = ""
    context: str = ""


class SkippedRow(Exception):
    """A row that makes no question; the message is the reason by which it is counted."""


def read_hub_schema(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read a file with the hub's schema; no row is left out."""
    return read_file(file), {}


@dataclass(frozen=True)
class QuestionSet:
    """A question set.

    Attributes:
        name: its name.
        read: makes the question of a row of the hub's schema; the second argument is the place of
            the row, for errors.
        files: stems of the files that are searched in a folder; the first that exists is read.
        hub: data set of the hub; empty for an embedded set.
        config: its configuration.
        split: its split.
        revision: its default revision.
        local: reads a local file as rows of the hub's schema, and counts left-out rows by reason.
        embedded: makes the rows from an installed package; None if they come from the hub.
        pool: name of the pool of questions that the set takes its questions from; empty: its own.
            Sets of one pool ask the same questions under the same ids, if in other words.
    """

    name: str
    read: Callable[[Row, str], Question]
    files: tuple[str, ...]
    hub: str = ""
    config: str | None = None
    split: str = ""
    revision: str | None = None
    local: Callable[[Path], tuple[list[Row], dict[str, int]]] = read_hub_schema
    embedded: Callable[[], list[Row]] | None = None
    pool: str = ""


QUESTION_SETS: Registry[QuestionSet] = Registry(
    "question set",
    "fed_rlhf.question_sets",
    {
        "aqua": "components.data.questions.mathematics:AQUA",
        "chitchat": "components.data.questions.conversation:CHITCHAT",
        "cose": "components.data.questions.commonsense:COSE",
        "csqa": "components.data.questions.commonsense:CSQA",
        "mathqa": "components.data.questions.mathematics:MATHQA",
        "medmcqa": "components.data.questions.medicine:MEDMCQA",
        "medqa": "components.data.questions.medicine:MEDQA",
        "piqa": "components.data.questions.commonsense:PIQA",
        "pubmedqa": "components.data.questions.medicine:PUBMEDQA",
    },
)
"""Question sets by name."""


@dataclass(frozen=True)
class QuestionTexts:
    """The texts of a question as a row has them.

    Attributes:
        question: the question.
        options: texts of the options in the set's order.
        answer: label of the right option; empty if the row names none.
        own_id: the set's own id; if it is empty, the id is a hash of context, question and options.
        explanation: a human's reason for the answer.
        context: text that the question is about.
    """

    question: str
    options: Sequence[str]
    answer: str
    own_id: str = ""
    explanation: str = ""
    context: str = ""


def answered(name: str, texts: QuestionTexts) -> Question:
    """Make a question of its texts.

    Args:
        name: of the set.
        texts: of the row.

    Raises:
        SkippedRow: the question or an option is empty, the number of options is below two or above
            that of the letters, two options are equal, or the answer is missing or none of them.
    """
    options = [option.strip() for option in texts.options]
    reason = _skip_reason(texts, options)
    if reason is not None:
        raise SkippedRow(reason)
    return Question(
        id=texts.own_id or pair_id(texts.context, texts.question, *options),
        set=name,
        question=texts.question,
        options=tuple(zip(LETTERS[: len(options)], options, strict=True)),
        answer=texts.answer,
        explanation=texts.explanation,
        context=texts.context,
    )


def _skip_reason(texts: QuestionTexts, options: Sequence[str]) -> str | None:
    checks = (
        (not texts.question, "empty question"),
        (len(options) < 2, "fewer than two options"),
        (len(options) > len(LETTERS), "more options than letters"),
        (not all(options), "empty option"),
        (len({" ".join(option.split()) for option in options}) < len(options), "two equal options"),
        (not texts.answer, "no right answer"),
        (texts.answer not in list(LETTERS[: len(options)]), "answer that is none of the options"),
    )
    return next((reason for failed, reason in checks if failed), None)


def letter(position: int | None) -> str:
    """The label of the option at a position that counts from 0; '?' if there is no such label.

    It is empty for None and -1, with which the hub marks rows without an answer.
    """
    if position is None or position == -1:
        return ""
    return LETTERS[position] if 0 <= position < len(LETTERS) else "?"


def in_order(labels: Sequence[str]) -> bool:
    """Whether labels are A, B, C ... (or a, b, c ...) without a gap."""
    return [label.strip().upper() for label in labels] == list(LETTERS[: len(labels)])


def texts(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[str]:
    """The texts of columns without white space around them; empty where a column is null.

    Raises:
        DataError: a column is missing or not text.
    """
    check_columns(row, columns, where)
    check_text(row, columns, where)
    return [(row[column] or "").strip() for column in columns]


def text_list(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    """A column's list of texts without white space around them; empty where the column is null.

    Raises:
        DataError: the column is missing or not a list of texts.
    """
    check_columns(row, (column,), where)
    if not isinstance(row[column], list | None):
        raise wrong_type(row, column, "a list of texts", where)
    entries = {f"{column}[{i}]": value for i, value in enumerate(row[column] or [])}
    return texts(entries, tuple(entries), where)


def whole_number(row: Mapping[str, Any], column: str, where: str) -> int | None:
    """A column's whole number, or None where it is null.

    Raises:
        DataError: the column is missing or of another type.
    """
    check_columns(row, (column,), where)
    value = row[column]
    if value is None or type(value) is int:
        return value
    raise wrong_type(row, column, "a whole number", where)


def wrong_type(row: Mapping[str, Any], column: str, expected: str, where: str) -> DataError:
    """The error for a column of another type than expected."""
    value = row[column]
    return DataError(
        f"{where}: column '{column}' must be {expected}, but is {str(value)[:60]!r} ({type(value).__name__})"
    )
