"""A multiple-choice question, and where the sets of them are registered.

A set is a function ``(row, where) -> Question`` that reads one row of the hub's schema, registered under a name:

    @question_set("mine", hub="me/mine", split="train", files=("train", "dev"))
    def read(row: Row, where: str) -> Question: ...

It makes the question with ``answered``, which refuses by Unusable what is no question (the reason is what is counted), and
raises DataError where a column is missing or of another type. A set whose original files differ from the hub's rows names a
function ``(file) -> (rows, dropped)`` as ``local``, which reads them as the hub's rows.

components/data/questions/__init__.py imports the modules that register one; a new set is a function and, in a new file, one import there.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.records import DataError, pair_id
from components.data.rows import Row, check_text, read_file

LETTERS = string.ascii_uppercase
UNREADABLE_OPTIONS = "options that cannot be told apart"


@dataclass(frozen=True)
class Question:
    """A question with one right answer among its options.

    Attributes:
        id: unique in its set, and the same wherever the question is read from: the set's own id, or a hash of the texts
            where it has none.
        set: name of the set, see QUESTION_SETS.
        question: text, without its context and its options.
        options: (label, text) in the set's order; the labels are A, B, C ...
        answer: label of the right option.
        explanation: a human's reason for the answer; empty where the set has none.
        context: text that the question is about; empty where the set has none.
    """

    id: str
    set: str
    question: str
    options: tuple[tuple[str, str], ...]
    answer: str
    explanation: str = ""
    context: str = ""


class Unusable(Exception):
    """A row that makes no question; the message is the reason by which it is counted."""


Read = Callable[[Row, str], Question]
Local = Callable[[Path], tuple[list[Row], dict[str, int]]]


@dataclass(frozen=True)
class QuestionSet:
    """A registered set.

    Attributes:
        read: reads one row of the hub's schema; the second argument says where the row stands, for errors.
        hub, config, split, revision: what is read from the hub; the revision is the default one where it is None. Empty for an
            embedded set.
        files: stems of the files that are looked for in a folder, the first that is there is read.
        local: reads a local file as rows of the hub's schema, and counts what was left out by reason.
        embedded: makes the rows from an installed package; None where they come from the hub.
        pool: name of the pool of questions that the set takes its questions from: sets of one pool ask the same questions under the same
            ids, if in other words. A set that shares no ids has a pool of its own, its name.
    """

    read: Read
    hub: str
    config: str | None
    split: str
    revision: str | None
    files: tuple[str, ...]
    local: Local
    embedded: Callable[[], list[Row]] | None = None
    pool: str = ""


QUESTION_SETS: dict[str, QuestionSet] = {}


def as_they_are(file: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows of a file whose schema is the hub's."""
    return read_file(file), {}


def question_set(
        name: str, *, hub: str = "", split: str = "", files: tuple[str, ...], config: str | None = None, revision: str | None = None,
        local: Local = as_they_are, embedded: Callable[[], list[Row]] | None = None,
        pool: str | None = None) -> Callable[[Read], Read]:
    """Register a set under a name; see QuestionSet for the arguments.

    Raises:
        ValueError: the name is taken.
    """
    def register(read: Read) -> Read:
        if name in QUESTION_SETS:
            raise ValueError(f"two question sets are named '{name}'")
        QUESTION_SETS[name] = QuestionSet(read, hub, config, split, revision, files, local, embedded, pool or name)
        return read

    return register


def answered(name: str, question: str, options: Sequence[str], answer: str, *, own_id: str = "", explanation: str = "", context: str = "") -> Question:
    """A question, where the parts make one.

    Args:
        name: of the set.
        options: texts in the set's order.
        answer: label of the right option; empty where the row names none.
        own_id: the set's own id; where it is empty, the id is a hash of context, question and options.

    Raises:
        Unusable: the question or an option is empty, there are fewer than two options or more than letters, two of them are
            equal, or the answer is missing or none of them.
    """
    options = [option.strip() for option in options]
    if not question:
        raise Unusable("empty question")
    if len(options) < 2:
        raise Unusable("fewer than two options")
    if len(options) > len(LETTERS):
        raise Unusable("more options than letters")
    if not all(options):
        raise Unusable("empty option")
    if len({" ".join(option.split()) for option in options}) < len(options):
        raise Unusable("two equal options")
    if not answer:
        raise Unusable("no right answer")
    labelled = dict(zip(LETTERS[:len(options)], options, strict=True))
    if answer not in labelled:
        raise Unusable("answer that is none of the options")
    return Question(own_id or pair_id(context, question, *options), name, question, tuple(labelled.items()), answer, explanation, context)


def letter(position: int | None) -> str:
    """The label of the option at a position that counts from 0; empty for None and -1, with which the hub marks rows without an answer."""
    return "" if position is None or position == -1 else LETTERS[position] if 0 <= position < len(LETTERS) else "?"


def in_order(labels: Sequence[str]) -> bool:
    """Whether labels are A, B, C ... (or a, b, c ...), none left out."""
    return [label.strip().upper() for label in labels] == list(LETTERS[:len(labels)])


def need(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Refuse a row that lacks a column.

    Raises:
        DataError: naming the row, the columns that are missing and those that are there.
    """
    missing = [c for c in columns if c not in row]
    if missing:
        raise DataError(f"{where}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row)) or 'none'}")


def texts(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[str]:
    """The columns' texts without white space around them; empty where a column is null.

    Raises:
        DataError: a column is missing or not text.
    """
    need(row, columns, where)
    check_text(row, columns, where)
    return [(row[c] or "").strip() for c in columns]


def text_list(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    """A column's list of texts, without white space around them; empty where the column is null.

    Raises:
        DataError: the column is missing or not a list of texts.
    """
    need(row, (column,), where)
    if not isinstance(row[column], list | None):
        raise wrong_type(row, column, "a list of texts", where)
    entries = {f"{column}[{i}]": value for i, value in enumerate(row[column] or [])}
    return texts(entries, tuple(entries), where)


def whole_number(row: Mapping[str, Any], column: str, where: str) -> int | None:
    """A column's whole number, or None where it is null.

    Raises:
        DataError: the column is missing or of another type.
    """
    need(row, (column,), where)
    if row[column] is not None and type(row[column]) is not int:
        raise wrong_type(row, column, "a whole number", where)
    return row[column]


def wrong_type(row: Mapping[str, Any], column: str, expected: str, where: str) -> DataError:
    """The error for a column of another type than expected."""
    return DataError(f"{where}: column '{column}' must be {expected}, but is {str(row[column])[:60]!r} ({type(row[column]).__name__})")
