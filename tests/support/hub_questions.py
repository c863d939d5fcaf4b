"""Question sets as folders with the files, columns and types that they have on the hub."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tests.support.hub_data import STRING, TEXTS, write_lines, write_parquet

CHOICES = pa.struct({"label": TEXTS, "text": TEXTS})
QUESTION_SETS = {
    "csqa": (
        "tau/commonsense_qa/data/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Where is a wet umbrella put?",
            "question_concept": "umbrella",
            "choices": {"label": list("ABCDE"), "text": ["bed", "stand", "oven", "book", "bath"]},
            "answerKey": "B",
        },
        {
            "id": STRING,
            "question": STRING,
            "question_concept": STRING,
            "choices": CHOICES,
            "answerKey": STRING,
        },
        None,
    ),
    "cose": (
        "Salesforce/cos_e/v1.0/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Where is a wet umbrella put?",
            "choices": ["bed", "stand", "oven"],
            "answer": "stand",
            "abstractive_explanation": "it drips",
            "extractive_explanation": "wet",
        },
        None,
        "v1.0",
    ),
    "piqa": (
        "ybisk/piqa/plain_text/train/0000.parquet",
        {"goal": "Keep a door open.", "sol1": "Take it away.", "sol2": "Use a wedge.", "label": 1},
        None,
        None,
    ),
    "aqua": (
        "deepmind/aqua_rat/raw/train-00000-of-00001.parquet",
        {
            "question": "What is 3 times 4?",
            "options": ["A)7", "B)10", "C)12", "D)14", "E)16"],
            "rationale": "3 times 4 is 12.",
            "correct": "C",
        },
        None,
        "raw",
    ),
    "mathqa": (
        "regisss/math_qa/data/train-00000-of-00001.parquet",
        {
            "Problem": "what is 4 * 250 ?",
            "Rationale": "4 * 250 = 1000",
            "options": "a ) 900 , b ) 1000 , c ) 1250 , d ) 2000 , e ) none of these",
            "correct": "b",
            "annotated_formula": "multiply(4, 250)",
            "linear_formula": "multiply(n0,n1)|",
            "category": "gain",
        },
        None,
        None,
    ),
    "medmcqa": (
        "openlifescienceai/medmcqa/data/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Which organ pumps blood?",
            "opa": "liver",
            "opb": "heart",
            "opc": "lung",
            "opd": "skin",
            "cop": 1,
            "choice_type": "single",
            "exp": "the heart does",
            "subject_name": "Anatomy",
            "topic_name": None,
        },
        None,
        None,
    ),
    "medqa": (
        "GBaker/MedQA-USMLE-4-options/phrases_no_exclude_train.jsonl",
        {
            "question": "Which organ pumps blood?",
            "answer": "heart",
            "options": {"A": "liver", "B": "heart", "C": "lung", "D": "skin"},
            "meta_info": "step1",
            "answer_idx": "B",
            "metamap_phrases": ["organ", "blood"],
        },
        None,
        None,
    ),
    "pubmedqa": (
        "qiaojin/PubMedQA/pqa_labeled/train-00000-of-00001.parquet",
        {
            "pubid": 7,
            "question": "Does it work?",
            "context": {
                "contexts": ["We tried it."],
                "labels": ["METHODS"],
                "meshes": ["Humans"],
                "reasoning_required_pred": ["y"],
                "reasoning_free_pred": ["y"],
            },
            "long_answer": "It does.",
            "final_decision": "yes",
        },
        None,
        "pqa_labeled",
    ),
}
"""By set: the file of its training split, a row, types that are not inferred, and its configuration."""

TEXT_COLUMNS = ("question", "Problem", "goal")
"""Columns of a question's text."""


ONE_SPLIT = ("pubmedqa",)
"""Sets whose configuration has a training split alone."""


def write_question_set(hub: Path, name: str, questions: int = 1, held_out: int = 1) -> None:
    """Write a set's files: its row, or as many like it as asked for, each a question of its own.

    Args:
        hub: folder of the data sets.
        name: of the set.
        questions: number of questions of the training split.
        held_out: number of questions of the splits validation and test.
    """
    file, row, types, configuration = QUESTION_SETS[name]
    # The two sets of one pool ask the same questions
    pool = "csqa" if name == "cose" else name
    splits = {"train": [row] if questions == 1 else [numbered(row, f"{pool} {n}") for n in range(questions)]}
    for split in () if name in ONE_SPLIT else ("validation", "test"):
        splits[split] = [numbered(row, f"{pool} {split} {n}") for n in range(held_out)]
    for split, rows in splits.items():
        path = hub / file.replace("train", split)
        if path.suffix == ".jsonl":
            write_lines(path, rows)
        else:
            write_parquet(path, rows, types)
    if configuration is not None:
        _write_card(hub.joinpath(*Path(file).parts[:2]), (configuration, "another"), list(splits))


def numbered(row: dict, number: str) -> dict:
    """The row with an id and a question of its own."""
    changed = {"id": number} if "id" in row else {}
    if "pubid" in row:
        changed["pubid"] = int(number.split()[-1])
    return row | changed | {column: f"{row[column]} ({number})" for column in TEXT_COLUMNS if column in row}


def _write_card(repository: Path, configurations: Sequence[str], splits: Sequence[str]) -> None:
    """The card of a data set with several configurations."""
    lines = ["---", "configs:"]
    for name in configurations:
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (repository / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
