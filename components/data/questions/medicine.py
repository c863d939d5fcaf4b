"""Question sets `medmcqa`, `medqa` and `pubmedqa`: medical examinations and biomedical studies.

DRIFT table 7.

medmcqa    Pal et al., 2022, PMLR 174; hub openlifescienceai/medmcqa; files train.json and dev.json
           of medmcqa/medmcqa (JSON lines). The right option `cop` counts from 0 on the hub (whose
           page says 1 to 4) and from 1 in the original files.
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
from typing import Any

from components.data.questions.base import (
    UNREADABLE_OPTIONS,
    Question,
    QuestionSet,
    QuestionTexts,
    SkippedRow,
    answered,
    in_order,
    letter,
    text_list,
    texts,
    whole_number,
    wrong_type,
)
from components.data.records import DataError
from components.data.rows import OBJECTS_EXPECTED, Row, check_columns, parse_failure, read_file

DECISIONS = ("yes", "no", "maybe")
PUBMEDQA_COLUMNS = {"QUESTION": "question", "LONG_ANSWER": "long_answer", "final_decision": "final_decision"}
ARTICLES_EXPECTED = "expected one object keyed by the articles' ids"


def count_from_0(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read MedMCQA's rows with `cop` counted from 0, as on the hub.

    The column tells how it counts: the original files count from 1 and have a 4, the hub's count
    from 0 and have a 0 (or a -1).

    Raises:
        DataError: the file cannot be read, or its column has both, or neither and is not the hub's
            parquet.
    """
    rows = read_file(file)
    values = {whole_number(row, "cop", f"{file}, row {number}") for number, row in enumerate(rows, 1)}
    from_0 = bool(values & {-1, 0})
    from_1 = 4 in values
    if from_0 and from_1:
        raise DataError(
            f"{file}: column 'cop' holds {0 if 0 in values else -1} and 4; expected 0 to 3, as on the hub, or"
            " 1 to 4, as in the original files"
        )
    if not (from_0 or from_1 or file.suffix == ".parquet"):
        raise DataError(
            f"{file}: column 'cop' holds neither 0 nor 4, so nothing says whether it counts from 0, as on the"
            " hub, or from 1, as in the original files; give the whole file, or the hub's rows as parquet"
        )
    if not from_1:
        return rows, {}
    return [row if row["cop"] is None else row | {"cop": row["cop"] - 1} for row in rows], {}


def read_medmcqa(row: Row, where: str) -> Question:
    """Read a row of id, question, opa, opb, opc, opd, exp and cop (0 if opa is right, and so on)."""
    columns = ("id", "question", "exp", "opa", "opb", "opc", "opd")
    own_id, question, explanation, *options = texts({"exp": None} | row, columns, where)
    answer = letter(whole_number(row, "cop", where))
    return answered(
        "medmcqa", QuestionTexts(question, options, answer, own_id=own_id, explanation=explanation)
    )


MEDMCQA = QuestionSet(
    "medmcqa",
    read_medmcqa,
    ("train", "dev", "validation"),
    hub="openlifescienceai/medmcqa",
    split="train",
    local=count_from_0,
)


def read_medqa(row: Row, where: str) -> Question:
    """Read a row of question, options, answer_idx (a letter) and answer (that option's text).

    The options are {label: text}, or a list of {key, value}.
    """
    question, index, answer = texts({"answer": None} | row, ("question", "answer_idx", "answer"), where)
    labeled = sorted(_labeled_options(row, where))
    if not in_order([label for label, _ in labeled]):
        raise SkippedRow(UNREADABLE_OPTIONS)
    made = answered("medqa", QuestionTexts(question, [option for _, option in labeled], index))
    if answer and answer != dict(made.options)[made.answer]:
        raise SkippedRow("answer whose letter and text disagree")
    return made


def _labeled_options(row: Row, where: str) -> list[tuple[str, str]]:
    check_columns(row, ("options",), where)
    options = row["options"]
    if isinstance(options, dict):
        labels = [label for label, option in options.items() if option is not None]
        return list(zip(labels, texts(options, labels, f"{where}, options"), strict=True))
    if not isinstance(options, list) or not all(isinstance(option, dict) for option in options):
        raise wrong_type(row, "options", "an object of labels and texts", where)
    labeled: list[tuple[str, str]] = []
    for i, option in enumerate(options, 1):
        label, text = texts(option, ("key", "value"), f"{where}, option {i}")
        labeled.append((label, text))
    return labeled


MEDQA = QuestionSet(
    "medqa",
    read_medqa,
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


def keyed_by_article(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read PubMedQA's rows of one JSON object keyed by the article's id, with the hub's columns.

    Other files are read as they are.

    Raises:
        DataError: the file cannot be read, or a row lacks a column.
    """
    articles = _articles(file)
    if articles is None:
        return read_file(file), {}
    rows: list[Row] = []
    for number, (article, columns) in enumerate(articles, 1):
        where = f"{file}, row {number} ('{article}')"
        if not isinstance(columns, tuple):
            raise DataError(f"{where}: {OBJECTS_EXPECTED}, but this is {str(columns)[:60]!r}")
        values = dict(columns)
        check_columns(values, ("CONTEXTS", *PUBMEDQA_COLUMNS), where)
        row: Row = {"pubid": article, "context": {"contexts": values["CONTEXTS"]}}
        rows.append(row | {ours: values[theirs] for theirs, ours in PUBMEDQA_COLUMNS.items()})
    return rows, {}


def read_pubmedqa(row: Row, where: str) -> Question:
    """Read a row of pubid, question, context {contexts}, long_answer and final_decision."""
    question, conclusion, decision = texts(row, ("question", "long_answer", "final_decision"), where)
    check_columns(row, ("pubid", "context"), where)
    if type(row["pubid"]) not in (int, str):
        raise wrong_type(row, "pubid", "a whole number or text", where)
    if not isinstance(row["context"], dict):
        raise wrong_type(row, "context", "an object with a list of contexts", where)
    context = "\n".join(text for text in text_list(row["context"], "contexts", f"{where}, context") if text)
    label = letter(DECISIONS.index(decision)) if decision in DECISIONS else "?" if decision else ""
    own_id = str(row["pubid"]).strip()
    made = answered("pubmedqa", QuestionTexts(question, DECISIONS, label, own_id, conclusion, context))
    if not context:
        raise SkippedRow("no context")
    return made


PUBMEDQA = QuestionSet(
    "pubmedqa",
    read_pubmedqa,
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
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: this JSON cannot be read ({parse_failure(error)}); {ARTICLES_EXPECTED}"
        ) from None
    is_keyed = isinstance(content, tuple) and content and "question" not in dict(content)
    return content if is_keyed else None
