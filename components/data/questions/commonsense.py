"""Question sets `csqa`, `cose` and `piqa`: common sense (DRIFT table 7).

csqa     CommonsenseQA, Talmor et al., 2019, arXiv 1811.00937; hub tau/commonsense_qa (v1.11, five
         options); files train_rand_split.jsonl and dev_rand_split.jsonl (v1.0 has three options),
         in which stem and choices are in `question`.
cose     CoS-E, Rajani et al., 2019, arXiv 1906.02361: questions of CommonsenseQA with a crowd
         worker's open-ended explanation; hub Salesforce/cos_e v1.0 (of v1.11's 1,221 explanations
         of dev questions 114 are one and the same, of v1.0's 950 at most 16); CommonsenseQA's file
         with cose_train_v1.0.jsonl or another of salesforce/cos-e beside it, joined by id.
piqa     Bisk et al., 2020, arXiv 1911.11641; a goal and two solutions. The hub set ybisk/piqa is a loading
         script; its parquet conversion (revision refs/convert/parquet) is read instead.

csqa and cose ask the same questions under the same ids (POOL): give their clients different parts
(load_questions).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from components.data.questions.question_set import (
    UNREADABLE_OPTIONS,
    Question,
    QuestionRow,
    QuestionSet,
    SkippedRow,
    Texts,
    letter,
    option_label,
    require_order,
)
from components.data.raw import BareText, RawRow, column_names, describe
from components.data.records import DataError
from components.data.rows import CONVERSION, SUFFIXES, Row, find_file, read_file

POOL = "commonsenseqa"
CSQA_FILES = (
    "csqa_train_rand_split",
    "train_rand_split",
    "csqa_dev_rand_split",
    "dev_rand_split",
    "train",
    "validation",
)
EXPLANATION_FILES = ("cose_train_v1.0", "cose_dev_v1.0", "cose_train_v1.11", "cose_dev_v1.11")
HUB_EXPLANATION = "abstractive_explanation"


class Choices(RawRow):
    """Labels and texts of choices, which are a list of {label, text} in the original files."""

    label: Texts
    text: Texts

    @model_validator(mode="before")
    @classmethod
    def _by_column(cls, choices: Any) -> Any:
        if isinstance(choices, dict):
            return choices
        columns = ("label", "text")
        if not isinstance(choices, list) or not all(
            isinstance(choice, dict) and all(column in choice for column in columns) for choice in choices
        ):
            raise ValueError(f"must be a list of choices with label and text, but is {describe(choices)}")
        return {column: [choice[column] for choice in choices] for column in columns}

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.label) != len(self.text):
            raise ValueError(
                f"has {len(self.label)} labels and {len(self.text)} texts; expected one label a text"
            )
        return self


class CsqaRow(QuestionRow):
    """A question with choices and the letter of the right one.

    In the original files the question's text is `stem`, and choices is in question.
    """

    id: BareText
    question: BareText
    choices: Choices
    answer: BareText = Field(alias="answerKey")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, row: Row) -> Row:
        inner = row.get("question")
        if not isinstance(inner, dict):
            return row
        if "stem" not in inner:
            raise ValueError(f"column 'stem' is missing; there are: {column_names(inner)}")
        return row | inner | {"question": inner["stem"]}

    def ask(self) -> Question:
        require_order(self.choices.label)
        return self.answered(self.question, self.choices.text, self.answer, own_id=self.id)


CSQA = QuestionSet("csqa", CsqaRow, CSQA_FILES, hub="tau/commonsense_qa", split="train", pool=POOL)


def join_explanations(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read CommonsenseQA's questions as rows of the hub's CoS-E (without an explanation, it is empty).

    The explanations are in the file of EXPLANATION_FILES in the same folder that explains most of
    the questions; a file of the hub's CoS-E schema is read as it is.

    Returns:
        the rows, and the number of left-out explanations (of no question in this file, or a second
        one) and rows (options that cannot be told apart), by reason.
    """
    rows = read_file(file)
    if HUB_EXPLANATION in rows[0]:
        return rows, {}
    files = [find_file(file.parent, stem) for stem in EXPLANATION_FILES]
    existing = [path for path in files if path is not None]
    if not existing:
        raise DataError(
            f"{file}: the rows have no column '{HUB_EXPLANATION}', and none of the files"
            f" {', '.join(EXPLANATION_FILES)} ({', '.join(SUFFIXES)}) with explanations lies beside this one"
        )
    questions = list(CsqaRow.read(rows, str(file)))
    ids = {question.id for question in questions}
    candidates = [_explanations(path, ids) for path in existing]
    explanations, dropped = max(candidates, key=lambda candidate: len(candidate[0]))
    joined: list[Row] = []
    for row in questions:
        try:
            require_order(row.choices.label)
        except SkippedRow:
            dropped[UNREADABLE_OPTIONS] += 1
            continue
        answers = dict(zip(map(str.upper, row.choices.label), row.choices.text, strict=True))
        joined.append(
            {
                "id": row.id,
                "question": row.question,
                "choices": row.choices.text,
                "answer": answers.get(row.answer, ""),
                HUB_EXPLANATION: explanations.get(row.id),
            }
        )
    return joined, dict(dropped)


class CoseRow(QuestionRow):
    """A question with choices, the text of the right one, and a crowd worker's explanation."""

    id: BareText
    question: BareText
    choices: Texts
    answer: BareText
    explanation: BareText = Field(alias=HUB_EXPLANATION)

    def ask(self) -> Question:
        if not self.explanation:
            raise SkippedRow("no explanation")
        label = option_label(self.choices, self.answer)
        return self.answered(self.question, self.choices, label, own_id=self.id, explanation=self.explanation)


COSE = QuestionSet(
    "cose",
    CoseRow,
    CSQA_FILES,
    hub="Salesforce/cos_e",
    config="v1.0",
    split="train",
    local=join_explanations,
    pool=POOL,
)


class PiqaRow(QuestionRow):
    """A goal and two solutions; label is 0 if the first is right, 1 if the second is."""

    goal: BareText
    sol1: BareText
    sol2: BareText
    label: int | None

    def ask(self) -> Question:
        return self.answered(self.goal, (self.sol1, self.sol2), letter(self.label))


PIQA = QuestionSet(
    "piqa",
    PiqaRow,
    ("train", "dev", "valid", "validation"),
    hub="ybisk/piqa",
    split="train",
    revision=CONVERSION,
)


class OpenEnded(RawRow):
    """A crowd worker's own words."""

    text: BareText = Field(alias="open-ended")


class ExplanationRow(RawRow):
    """An explanation of the question with this id."""

    id: BareText
    explanation: OpenEnded


def _explanations(file: Path, ids: set[str]) -> tuple[dict[str, str], Counter[str]]:
    """Open-ended explanations by the id of their question, and the number of those left out."""
    explanations: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for row in ExplanationRow.read(read_file(file), str(file)):
        if row.id not in ids:
            dropped["explanation without a question"] += 1
        elif row.id in explanations:
            dropped["second explanation of a question"] += 1
        else:
            explanations[row.id] = row.explanation.text
    return explanations, dropped
