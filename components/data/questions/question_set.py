"""A multiple-choice question, and what a question set is made of.

A set is a QuestionSet with a model of the rows of the hub's schema, which makes their questions:

    class MineRow(QuestionRow):
        question: BareText
        options: Texts
        answer: BareText

        def ask(self) -> Question:
            return self.answered(self.question, self.options, self.answer)

    MINE = QuestionSet("mine", MineRow, hub="me/mine", split="train", files=("train", "dev"))

The set is registered in QUESTION_SETS, or by the package that contains it:

    [project.entry-points."fed_rlhf.question_sets"]
    mine = "my_package.my_questions:MINE"
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from components.config import Registry
from components.data.raw import BareText, RawRow, if_null
from components.data.records import pair_id
from components.data.rows import Row, read_file

LETTERS = string.ascii_uppercase
UNREADABLE_OPTIONS = "options that cannot be told apart"
Texts = Annotated[list[BareText], if_null([])]
"""Texts without white space around them; null is no text."""


@dataclass(frozen=True)
class Question:
    """A question with one right answer among its options."""

    id: str  # unique in its set, and in every copy of the data the same: its own, or a hash of the texts
    set: str  # name of the set
    question: str  # text, without its context and its options
    options: tuple[tuple[str, str], ...]  # (label, text) in the set's order; the labels are A, B, C ...
    answer: str  # label of the right option
    explanation: str = ""  # a human's reason for the answer; empty if the set has none
    context: str = ""  # text that the question is about; empty if the set has none


class SkippedRow(Exception):
    """A row that makes no question; the message is the reason by which it is counted."""


class QuestionRow(RawRow, ABC):
    """A row of a question set."""

    @abstractmethod
    def ask(self) -> Question:
        """Make the question of the row.

        Raises:
            SkippedRow: the row is no question.
        """

    def answered(
        self,
        question: str,
        options: Sequence[str],
        answer: str,
        own_id: str = "",
        explanation: str = "",
        context: str = "",
    ) -> Question:
        """Make a question of texts; `read_questions` names its set.

        Args:
            question: the question.
            options: texts of the options in the set's order.
            answer: label of the right option; empty if the row names none.
            own_id: the set's own id; if it is empty, the id is a hash of context, question and options.
            explanation: a human's reason for the answer.
            context: text that the question is about.

        Raises:
            SkippedRow: the question or an option is empty, the number of options is below two or above
                that of the letters, two options are equal, or the answer is missing or none of them.
        """
        options = [option.strip() for option in options]
        labels = LETTERS[: len(options)]
        checks = (
            (not question, "empty question"),
            (len(options) < 2, "fewer than two options"),
            (len(options) > len(LETTERS), "more options than letters"),
            (not all(options), "empty option"),
            (len({" ".join(option.split()) for option in options}) < len(options), "two equal options"),
            (not answer, "no right answer"),
            (answer not in list(labels), "answer that is none of the options"),
        )
        for failed, reason in checks:
            if failed:
                raise SkippedRow(reason)
        labeled = tuple(zip(labels, options, strict=True))
        own_id = own_id or pair_id(context, question, *options)
        return Question(own_id, "", question, labeled, answer, explanation, context)


@dataclass(frozen=True)
class QuestionSet:
    """A question set."""

    name: str  # also the `set` of its questions
    row: type[QuestionRow]  # model of its rows on the hub
    files: tuple[str, ...]  # stems of the files that are searched in a folder; the first there is read
    hub: str = ""  # data set of the hub; empty for an embedded set
    config: str | None = None  # its configuration
    split: str = ""
    revision: str | None = None
    # Reads a local file as rows of the hub's schema, and counts left-out rows by reason.
    local: Callable[[Path], tuple[list[Row], dict[str, int]]] = lambda file: (read_file(file), {})
    embedded: Callable[[], list[Row]] | None = None  # makes the rows from an installed package
    # Sets of one pool ask the same questions under the same ids, if in other words; empty: its own.
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


def letter(position: int | None) -> str:
    """The label of the option at a position that counts from 0; '?' if there is no such label.

    It is empty for None and -1, with which the hub marks rows without an answer.
    """
    if position is None or position == -1:
        return ""
    return LETTERS[position] if 0 <= position < len(LETTERS) else "?"


def option_label(options: Sequence[str], answer: str) -> str:
    """The label of the option with this text; '?' if there is none, and empty for an empty text."""
    return letter(options.index(answer)) if answer in options else "?" if answer else ""


def require_order(labels: Sequence[str]) -> None:
    """Skip a row whose labels are not A, B, C ... (or a, b, c ...) without a gap.

    Raises:
        SkippedRow: they are not.
    """
    if [label.strip().upper() for label in labels] != list(LETTERS[: len(labels)]):
        raise SkippedRow(UNREADABLE_OPTIONS)
