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

from components.data.questions.base import (
    UNREADABLE_OPTIONS,
    Question,
    QuestionSet,
    QuestionTexts,
    SkippedRow,
    answered,
    in_order,
    text_list,
    texts,
)
from components.data.rows import Row

FILES = ("train", "dev", "validation", "test")
LABELED_OPTION = re.compile(r"\s*([A-Z])\s*\)(.*)", re.DOTALL)
LABEL_IN_LINE = re.compile(r"(?:^|,)\s*([a-e])\s*\)")


def read_aqua(row: Row, where: str) -> Question:
    """Read a row of question, options ["A)...", ...], rationale and correct (a letter)."""
    question, rationale, correct = texts(row, ("question", "rationale", "correct"), where)
    labels: list[str] = []
    options: list[str] = []
    for option in text_list(row, "options", where):
        match = LABELED_OPTION.fullmatch(option)
        if match is None:
            raise SkippedRow(UNREADABLE_OPTIONS)
        labels.append(match[1])
        options.append(match[2])
    if not in_order(labels):
        raise SkippedRow(UNREADABLE_OPTIONS)
    return answered("aqua", QuestionTexts(question, options, correct, explanation=rationale))


AQUA = QuestionSet("aqua", read_aqua, FILES, hub="deepmind/aqua_rat", config="raw", split="train")


def read_mathqa(row: Row, where: str) -> Question:
    """Read a row of Problem, options ("a ) 1 , b ) 2 , ..."), Rationale and correct (a letter)."""
    problem, options, rationale, correct = texts(row, ("Problem", "options", "Rationale", "correct"), where)
    return answered(
        "mathqa",
        QuestionTexts(problem, split_options(options), correct.upper(), explanation=rationale.strip('" ')),
    )


MATHQA = QuestionSet("mathqa", read_mathqa, FILES, hub="regisss/math_qa", split="train")


def split_options(line: str) -> list[str]:
    """Split a line of options of MathQA, which may include commas: "a ) 1 , 000 , b ) 2 , 000".

    Raises:
        SkippedRow: the labels at the start of the line or after a comma are not a, b, c ... in
            order.
    """
    prefix, *pieces = LABEL_IN_LINE.split(line)
    if prefix.strip() or not in_order(pieces[::2]):
        raise SkippedRow(UNREADABLE_OPTIONS)
    return [option.strip(" ,") for option in pieces[1::2]]
