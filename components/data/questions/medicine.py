"""Question sets `medmcqa`, `medqa` and `pubmedqa`: medical examinations and biomedical studies.

DRIFT table 7.

medmcqa    Pal et al., 2022, PMLR 174; hub openlifescienceai/medmcqa. The right option `cop` counts from 0
           there (its page says 1 to 4). The original files, which count from 1, are not read.
medqa      Jin et al., 2021, arXiv 2009.13081, the USMLE questions; hub
           GBaker/MedQA-USMLE-4-options; files of jind11/MedQA (phrases_no_exclude_*.jsonl have four
           options, train.jsonl, dev.jsonl and test.jsonl of the folder US five).
pubmedqa   Jin et al., 2019, arXiv 1909.06146, the 1,000 with labels of experts; hub
           qiaojin/PubMedQA pqa_labeled; file ori_pqal.json of pubmedqa/pubmedqa, one object keyed
           by the article's id. The abstract without its conclusion is the context, the conclusion
           is the explanation. 500 of the 1,000 are the published test set (test_ground_truth.json);
           neither the hub nor this module separates them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

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
from components.data.raw import BareText, Identifier, RawRow, describe
from components.data.records import DataError
from components.data.rows import OBJECTS_EXPECTED, Row, read_file

DECISIONS = ("yes", "no", "maybe")
ARTICLES_EXPECTED = "expected one object keyed by the articles' ids"


class MedMcqaRow(QuestionRow):
    """A question with four options and the position of the right one, from 0."""

    id: BareText
    question: BareText
    exp: BareText = ""
    opa: BareText
    opb: BareText
    opc: BareText
    opd: BareText
    cop: int | None

    @field_validator("cop")
    @classmethod
    def _check_count(cls, value: int | None) -> int | None:
        if value == 4:
            raise ValueError("must count from 0, as on the hub, but is 4, as in the original files")
        return value

    def ask(self) -> Question:
        options = (self.opa, self.opb, self.opc, self.opd)
        return self.answered(self.question, options, letter(self.cop), own_id=self.id, explanation=self.exp)


MEDMCQA = QuestionSet(
    "medmcqa",
    MedMcqaRow,
    ("train", "dev", "validation"),
    hub="openlifescienceai/medmcqa",
    split="train",
)


def _by_label(options: Any) -> Any:
    """Options as {label: text}, which are a list of {key, value} too."""
    if isinstance(options, dict):
        return options
    if not isinstance(options, list) or not all(
        isinstance(option, dict) and option.keys() >= {"key", "value"} for option in options
    ):
        raise ValueError(
            f"must be an object of labels and texts, or a list of key and value, but is {describe(options)}"
        )
    labels = [str(option["key"]) for option in options]
    if len(set(labels)) < len(labels):
        raise SkippedRow(UNREADABLE_OPTIONS)
    return {label: option["value"] for label, option in zip(labels, options, strict=True)}


class MedQaRow(QuestionRow):
    """A question with labeled options, and letter and text of the right one."""

    question: BareText
    options: Annotated[dict[str, BareText | None], BeforeValidator(_by_label)]
    answer_idx: BareText
    answer: BareText = ""

    def ask(self) -> Question:
        """The question, with the options that are not null by label."""
        labeled = {label: text for label, text in sorted(self.options.items()) if text is not None}
        require_order(list(labeled))
        made = self.answered(self.question, list(labeled.values()), self.answer_idx)
        if self.answer and self.answer != dict(made.options)[made.answer]:
            raise SkippedRow("answer whose letter and text disagree")
        return made


MEDQA = QuestionSet(
    "medqa",
    MedQaRow,
    (
        "phrases_no_exclude_train",
        "train",
        "phrases_no_exclude_dev",
        "dev",
        "phrases_no_exclude_test",
        "test",
    ),
    hub="GBaker/MedQA-USMLE-4-options",
    split="train",
)


class ArticleRow(RawRow):
    """The columns of an article in the original file, whose values PubMedQaRow checks."""

    contexts: Any = Field(alias="CONTEXTS")
    question: Any = Field(alias="QUESTION")
    long_answer: Any = Field(alias="LONG_ANSWER")
    final_decision: Any


def keyed_by_article(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read PubMedQA's rows of one JSON object keyed by the article's id, with the hub's columns.

    Other files are read as they are.
    """
    articles = _articles(file)
    if articles is None:
        return read_file(file), {}
    rows: list[Row] = []
    for number, (article, columns) in enumerate(articles, 1):
        where = f"{file}, row {number} ('{article}')"
        if not isinstance(columns, tuple):
            raise DataError(f"{where}: {OBJECTS_EXPECTED}, but this is {describe(columns)}")
        values = ArticleRow.read_one(dict(columns), where).model_dump()
        rows.append({"pubid": article, "context": {"contexts": values.pop("contexts")}} | values)
    return rows, {}


class Abstract(RawRow):
    """The sections of an abstract, without its conclusion."""

    contexts: Texts


class PubMedQaRow(QuestionRow):
    """A study's question, abstract, conclusion and decision."""

    pubid: Identifier
    question: BareText
    context: Abstract
    long_answer: BareText
    final_decision: BareText

    def ask(self) -> Question:
        """The question whether the study finds so: yes, no or maybe."""
        context = "\n".join(text for text in self.context.contexts if text)
        label = option_label(DECISIONS, self.final_decision)
        own_id = self.pubid.strip()
        made = self.answered(self.question, DECISIONS, label, own_id, self.long_answer, context)
        if not context:
            raise SkippedRow("no context")
        return made


PUBMEDQA = QuestionSet(
    "pubmedqa",
    PubMedQaRow,
    ("ori_pqal", "train"),
    hub="qiaojin/PubMedQA",
    config="pqa_labeled",
    split="train",
    local=keyed_by_article,
)


def _articles(file: Path) -> tuple[tuple[str, Any], ...] | None:
    """The (id, columns) of one JSON object, with repeated ids, and with objects as tuples of pairs.

    None if the file holds a list or lines.
    """
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=tuple)
    except UnicodeDecodeError:
        return None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise DataError(
            f"{file}, line {error.lineno}: this is not valid JSON ({error.msg}, column {error.colno});"
            f" {ARTICLES_EXPECTED}"
        ) from None
    is_keyed = isinstance(content, tuple) and content and "question" not in dict(content)
    return content if is_keyed else None
