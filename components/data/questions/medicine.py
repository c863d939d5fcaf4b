"""Question sets `medmcqa`, `medqa` and `pubmedqa`: examinations of physicians, and findings of biomedical studies (DRIFT table 7).

medmcqa    Pal et al., 2022, PMLR 174; hub openlifescienceai/medmcqa; files train.json and dev.json of medmcqa/medmcqa (JSON lines).
           The right option `cop` counts from 0 on the hub (whose page says 1 to 4) and from 1 in the original files.
medqa      Jin et al., 2021, arXiv 2009.13081, the USMLE questions; hub GBaker/MedQA-USMLE-4-options; files of jind11/MedQA
           (phrases_no_exclude_*.jsonl have four options, train.jsonl, dev.jsonl and test.jsonl of the folder US five).
pubmedqa   Jin et al., 2019, arXiv 1909.06146, the 1,000 that experts labelled; hub qiaojin/PubMedQA pqa_labeled; file ori_pqal.json of
           pubmedqa/pubmedqa, one object keyed by the article's id. The abstract without its conclusion is the context, the
           conclusion is the explanation. 500 of the 1,000 are the published test set (test_ground_truth.json); neither the hub
           nor this module tells them apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.data.questions.registry import (
    UNREADABLE_OPTIONS,
    Question,
    Unusable,
    answered,
    in_order,
    letter,
    need,
    question_set,
    text_list,
    texts,
    whole_number,
    wrong_type,
)
from components.data.records import DataError
from components.data.rows import Row, read_file, unparsed

DECISIONS = ("yes", "no", "maybe")
PUBMEDQA_COLUMNS = {"QUESTION": "question", "LONG_ANSWER": "long_answer", "final_decision": "final_decision"}


def count_from_0(file: Path) -> tuple[list[Row], dict[str, int]]:
    """MedMCQA's rows with `cop` counted from 0, as on the hub.

    Which it is, the column says: the original files count from 1 and hold a 4, the hub's count from 0 and hold a 0 (or a -1).

    Raises:
        DataError: the file cannot be read, or its column holds both, or neither and is not the hub's parquet.
    """
    rows = read_file(file)
    found = {whole_number(row, "cop", f"{file}, row {number}") for number, row in enumerate(rows, 1)}
    hub, original = bool(found & {-1, 0}), 4 in found
    if hub and original:
        raise DataError(f"{file}: column 'cop' holds {0 if 0 in found else -1} and 4; expected 0 to 3, as on the hub, or 1 to 4, as in the original files")
    if not (hub or original or file.suffix == ".parquet"):
        raise DataError(f"{file}: column 'cop' holds neither 0 nor 4, so nothing says whether it counts from 0, as on the hub, or from 1, as in the original files; "
                        "give the whole file, or the hub's rows as parquet")
    return [row | {"cop": row["cop"] - 1} if original and row["cop"] is not None else row for row in rows], {}


@question_set("medmcqa", hub="openlifescienceai/medmcqa", split="train", files=("train", "dev", "validation"), local=count_from_0)
def read_medmcqa(row: Row, where: str) -> Question:
    """A row of id, question, opa, opb, opc, opd, exp and cop: 0 where opa is right, 1 where opb is, and so on."""
    own_id, question, explanation, *options = texts({"exp": None} | row, ("id", "question", "exp", "opa", "opb", "opc", "opd"), where)
    return answered("medmcqa", question, options, letter(whole_number(row, "cop", where)), own_id=own_id, explanation=explanation)


@question_set("medqa", hub="GBaker/MedQA-USMLE-4-options", split="train", files=(
    "phrases_no_exclude_train", "train", "phrases_no_exclude_dev", "dev", "phrases_no_exclude_test", "test"))
def read_medqa(row: Row, where: str) -> Question:
    """A row of question, options {label: text} (or a list of {key, value}), answer_idx (a letter) and answer (that option's text)."""
    question, index, answer = texts({"answer": None} | row, ("question", "answer_idx", "answer"), where)
    need(row, ("options",), where)
    options = row["options"]
    if isinstance(options, list) and all(isinstance(option, dict) for option in options):
        labelled = [tuple(texts(option, ("key", "value"), f"{where}, option {i}")) for i, option in enumerate(options, 1)]
    elif isinstance(options, dict):
        there = [label for label, option in options.items() if option is not None]
        labelled = list(zip(there, texts(options, there, f"{where}, options"), strict=True))
    else:
        raise wrong_type(row, "options", "an object of labels and texts", where)
    labelled.sort()
    if not in_order([label for label, _ in labelled]):
        raise Unusable(UNREADABLE_OPTIONS)
    made = answered("medqa", question, [option for _, option in labelled], index)
    if answer and answer != dict(made.options)[made.answer]:
        raise Unusable("answer whose letter and text disagree")
    return made


def keyed_by_article(file: Path) -> tuple[list[Row], dict[str, int]]:
    """PubMedQA's rows from one JSON object keyed by the article's id, with the hub's columns; other files are taken as they are.

    Raises:
        DataError: the file cannot be read, or a row lacks a column.
    """
    articles = _articles(file)
    if articles is None:
        return read_file(file), {}
    rows = []
    for number, (article, columns) in enumerate(articles, 1):
        where = f"{file}, row {number} ('{article}')"
        if not isinstance(columns, tuple):
            raise DataError(f"{where}: expected a JSON object with named columns, but this is {str(columns)[:60]!r}")
        values = dict(columns)
        need(values, ("CONTEXTS", *PUBMEDQA_COLUMNS), where)
        rows.append({"pubid": article, "context": {"contexts": values["CONTEXTS"]}} | {ours: values[theirs] for theirs, ours in PUBMEDQA_COLUMNS.items()})
    return rows, {}


@question_set("pubmedqa", hub="qiaojin/PubMedQA", config="pqa_labeled", split="train", files=("ori_pqal", "train"), local=keyed_by_article)
def read_pubmedqa(row: Row, where: str) -> Question:
    """A row of pubid, question, context {contexts}, long_answer and final_decision (yes, no or maybe)."""
    question, conclusion, decision = texts(row, ("question", "long_answer", "final_decision"), where)
    need(row, ("pubid", "context"), where)
    if type(row["pubid"]) not in (int, str):
        raise wrong_type(row, "pubid", "a whole number or text", where)
    if not isinstance(row["context"], dict):
        raise wrong_type(row, "context", "an object with a list of contexts", where)
    context = "\n".join(text for text in text_list(row["context"], "contexts", f"{where}, context") if text)
    label = letter(DECISIONS.index(decision)) if decision in DECISIONS else "?" if decision else ""
    made = answered("pubmedqa", question, DECISIONS, label, own_id=str(row["pubid"]).strip(), explanation=conclusion, context=context)
    if not context:
        raise Unusable("no context")
    return made


def _articles(file: Path) -> tuple[tuple[str, Any], ...] | None:
    """The (id, columns) of one JSON object, repeated ids among them, objects as tuples of pairs; None where the file holds a list or lines."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        whole = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=tuple)
    except UnicodeDecodeError:
        return None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise DataError(f"{file}, line {error.lineno}: this is not valid JSON ({error.msg}, column {error.colno}); expected one object keyed by the articles' ids") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: this JSON cannot be read ({unparsed(error)}); expected one object keyed by the articles' ids") from None
    return whole if isinstance(whole, tuple) and whole and "question" not in dict(whole) else None
