"""Question sets `aqua` and `mathqa`: word problems of algebra with rationales (DRIFT table 7).

Both have five options each.

aqua     Ling et al., 2017, arXiv 1705.04146; hub deepmind/aqua_rat; files train.json, dev.json and
         test.json of google-deepmind/AQuA, which are JSON lines of the hub's schema. An option
         includes its label ("A)32400").
mathqa   Amini et al., 2019, arXiv 1905.13319; files train.json, dev.json and test.json of
         MathQA.zip (math-qa.github.io), lists of the hub's schema. The hub set allenai/math_qa is a
         loading script, which is not run, and its page shows no parquet conversion;
         regisss/math_qa, a copy of its rows in parquet, is read instead. MathQA annotates questions
         of AQuA with other spelling and spacing: clients with the one and the other may have
         problems in common.
"""

from __future__ import annotations

import re

from pydantic import Field

from components.data.questions.question_set import (
    UNREADABLE_OPTIONS,
    Question,
    QuestionRow,
    QuestionSet,
    SkippedRow,
    Texts,
    require_order,
)
from components.data.raw import BareText

FILES = ("train", "dev", "validation", "test")
LABELED_OPTION = re.compile(r"\s*([A-Z])\s*\)(.*)", re.DOTALL)
LABEL_IN_LINE = re.compile(r"(?:^|,)\s*([a-e])\s*\)")


class AquaRow(QuestionRow):
    """A question with options ["A)...", ...] and the letter of the right one."""

    question: BareText
    options: Texts
    rationale: BareText
    correct: BareText

    def ask(self) -> Question:
        """The question, whose options are without their labels."""
        matches = [LABELED_OPTION.fullmatch(option) for option in self.options]
        require_order([match[1] if match else "?" for match in matches])
        options = [match[2] for match in matches if match]
        return self.answered(self.question, options, self.correct, explanation=self.rationale)


AQUA = QuestionSet("aqua", AquaRow, FILES, hub="deepmind/aqua_rat", config="raw", split="train")


class MathQaRow(QuestionRow):
    """A problem with options ("a ) 1 , b ) 2 , ...") and the letter of the right one."""

    problem: BareText = Field(alias="Problem")
    options: BareText
    rationale: BareText = Field(alias="Rationale")
    correct: BareText

    def ask(self) -> Question:
        options = split_options(self.options)
        explanation = self.rationale.strip('" ')
        return self.answered(self.problem, options, self.correct.upper(), explanation=explanation)


MATHQA = QuestionSet("mathqa", MathQaRow, FILES, hub="regisss/math_qa", split="train")


def split_options(line: str) -> list[str]:
    """Split a line of options of MathQA, which may include commas: "a ) 1 , 000 , b ) 2 , 000".

    Raises:
        SkippedRow: the labels at the start of the line or after a comma are not a, b, c ... in
            order.
    """
    prefix, *pieces = LABEL_IN_LINE.split(line)
    if prefix.strip():
        raise SkippedRow(UNREADABLE_OPTIONS)
    require_order(pieces[::2])
    return [option.strip(" ,") for option in pieces[1::2]]
