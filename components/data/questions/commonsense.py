"""Question sets `csqa`, `cose` and `piqa`: common sense (DRIFT table 7).

csqa     CommonsenseQA, Talmor et al., 2019, arXiv 1811.00937; hub tau/commonsense_qa (v1.11, five
         options); files train_rand_split.jsonl and dev_rand_split.jsonl (v1.0 has three options),
         in which stem and choices are in `question`.
cose     CoS-E, Rajani et al., 2019, arXiv 1906.02361: questions of CommonsenseQA with a crowd
         worker's open-ended explanation; hub Salesforce/cos_e v1.0 (of v1.11's 1,221 explanations
         of dev questions 114 are one and the same, of v1.0's 950 at most 16); CommonsenseQA's file
         with cose_train_v1.0.jsonl or another of salesforce/cos-e beside it, joined by id.
piqa     Bisk et al., 2020, arXiv 1911.11641; a goal and two solutions; files train.jsonl with
         train-labels.lst, or dev, or valid. The hub set ybisk/piqa is a loading script; its parquet
         conversion (revision refs/convert/parquet) is read instead.

csqa and cose ask the same questions under the same ids (POOL): give their clients different parts
(load_questions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
from components.data.rows import CONVERSION, SUFFIXES, Row, check_columns, find_file, read_file

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


def read_csqa(row: Row, where: str) -> Question:
    """Read a row of id, question, choices {label, text} and answerKey (a letter).

    In the original files choices is in question.
    """
    return _read_csqa("csqa", row, where, "")


CSQA = QuestionSet("csqa", read_csqa, CSQA_FILES, hub="tau/commonsense_qa", split="train", pool=POOL)


def join_explanations(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read CommonsenseQA's questions with the column `explanation` (null if a question has none).

    The explanations are in the file of EXPLANATION_FILES in the same folder that explains most of
    the questions; a file of the hub's CoS-E schema is read as it is.

    Returns:
        the rows, and the number of explanations left out, by reason: of no question in this file,
        or a second one.

    Raises:
        DataError: a file is missing or cannot be read, or lacks a column.
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
    ids = [texts(row, ("id",), f"{file}, row {number}")[0] for number, row in enumerate(rows, 1)]
    candidates = [_explanations(path, set(ids)) for path in existing]
    explanations, dropped = max(candidates, key=lambda candidate: len(candidate[0]))
    joined = [row | {"explanation": explanations.get(own_id)} for row, own_id in zip(rows, ids, strict=True)]
    return joined, dropped


def read_cose(row: Row, where: str) -> Question:
    """Read a row of id, question, choices, answer (the option's text) and abstractive_explanation.

    Rows of join_explanations are read too.
    """
    if HUB_EXPLANATION not in row:
        (explanation,) = texts(row, ("explanation",), where)
        return _read_csqa("cose", row, where, _require_explanation(explanation))
    own_id, question, answer, explanation = texts(row, ("id", "question", "answer", HUB_EXPLANATION), where)
    options = text_list(row, "choices", where)
    label = letter(options.index(answer)) if answer in options else "?" if answer else ""
    explanation = _require_explanation(explanation)
    return answered("cose", QuestionTexts(question, options, label, own_id=own_id, explanation=explanation))


COSE = QuestionSet(
    "cose",
    read_cose,
    CSQA_FILES,
    hub="Salesforce/cos_e",
    config="v1.0",
    split="train",
    local=join_explanations,
    pool=POOL,
)


def join_labels(file: Path) -> tuple[list[Row], dict[str, int]]:
    """Read PIQA's rows with the column `label`, their own or of the file ...-labels.lst.

    Raises:
        DataError: a file is missing or cannot be read, or does not have one label, a whole number,
            for each row.
    """
    rows = read_file(file)
    if "label" in rows[0]:
        return rows, {}
    labels = file.with_name(f"{file.name.partition('.')[0]}-labels.lst")
    if not labels.is_file():
        raise DataError(
            f"{file}: the rows have no column 'label', and there is no file {labels.name} with the labels"
            " beside this one"
        )
    lines = labels.read_text(encoding="utf-8", errors="replace").split()
    for number, line in enumerate(lines, 1):
        if line not in ("-1", "0", "1"):
            raise DataError(
                f"{labels}, line {number}: expected 0 (the first solution is right) or 1 (the second), but"
                f" this is {line[:60]!r}"
            )
    if len(lines) != len(rows):
        raise DataError(
            f"{labels}: there are {len(lines)} labels for the {len(rows)} rows of {file.name}; expected one"
            " a row"
        )
    return [row | {"label": int(line)} for row, line in zip(rows, lines, strict=True)], {}


def read_piqa(row: Row, where: str) -> Question:
    """Read a row of goal, sol1, sol2 and label: 0 if sol1 is right, 1 if sol2 is."""
    goal, *solutions = texts(row, ("goal", "sol1", "sol2"), where)
    return answered("piqa", QuestionTexts(goal, solutions, letter(whole_number(row, "label", where))))


PIQA = QuestionSet(
    "piqa",
    read_piqa,
    ("train", "dev", "valid", "validation"),
    hub="ybisk/piqa",
    split="train",
    revision=CONVERSION,
    local=join_labels,
)


def _read_csqa(name: str, row: Row, where: str, explanation: str) -> Question:
    own_id, answer = texts(row, ("id", "answerKey"), where)
    check_columns(row, ("question",), where)
    inner = row["question"] if isinstance(row["question"], dict) else row
    (question,) = texts(inner, ("question" if inner is row else "stem",), where)
    labels, options = _choices(inner, where)
    if not in_order(labels):
        raise SkippedRow(UNREADABLE_OPTIONS)
    return answered(name, QuestionTexts(question, options, answer, own_id=own_id, explanation=explanation))


def _choices(row: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Labels and texts of choices.

    These are a list of {label, text} in the original files and {label: [...], text: [...]} on the
    hub.
    """
    check_columns(row, ("choices",), where)
    choices = row["choices"]
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        both = [
            texts(choice, ("label", "text"), f"{where}, choice {i}") for i, choice in enumerate(choices, 1)
        ]
        return [label for label, _ in both], [text for _, text in both]
    if not isinstance(choices, dict):
        raise wrong_type(row, "choices", "a list of choices with label and text", where)
    labels, options = (text_list(choices, column, f"{where}, choices") for column in ("label", "text"))
    if len(labels) != len(options):
        raise DataError(
            f"{where}: column 'choices' has {len(labels)} labels and {len(options)} texts; expected one label"
            " a text"
        )
    return labels, options


def _require_explanation(explanation: str) -> str:
    if not explanation:
        raise SkippedRow("no explanation")
    return explanation


def _explanations(file: Path, ids: set[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Open-ended explanations by the id of their question, and the number of those left out."""
    explanations: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for number, row in enumerate(read_file(file, ("id", "explanation")), 1):
        where = f"{file}, row {number}"
        (own_id,) = texts(row, ("id",), where)
        if not isinstance(row["explanation"], dict):
            raise wrong_type(row, "explanation", "an object with the text 'open-ended'", where)
        (text,) = texts(row["explanation"], ("open-ended",), f"{where}, explanation")
        if own_id not in ids:
            dropped["explanation without a question"] += 1
        elif own_id in explanations:
            dropped["second explanation of a question"] += 1
        else:
            explanations[own_id] = text
    return explanations, dict(dropped)
