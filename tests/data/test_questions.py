"""The question sets: the right option in each schema, skipped rows, parts, and real samples."""

import json
from collections import Counter
from itertools import chain, product

import pytest

from components.config import RecipeError
from components.data.questions import (
    in_part,
    load_questions,
    names,
    parts_meet,
    pool,
    read_questions,
    render,
    shared_questions,
)
from components.data.questions.base import QUESTION_SETS, SkippedRow
from components.data.questions.mathematics import split_options
from components.data.records import DataError
from components.data.sources.chitchat import read_replies

AQUA = {
    "question": "A shelf holds 3 rows of 4 jars. How many jars is that?",
    "options": ["A)7", "B)10", "C) 12", "D)14 jars", "E)16"],
    "rationale": "3 times 4 is 12.",
    "correct": "C",
}
MATHQA = {
    "Problem": "a shop sells 4 lamps at 250 each . what does it take in ?",
    "options": "a ) 900 , b ) 1 , 000 , c ) 1 , 250 , d ) 2 , 000 , e ) none of these",
    "Rationale": '"4 * 250 = 1000 . answer : b ."',
    "correct": "b",
    "annotated_formula": "multiply(4, 250)",
    "linear_formula": "multiply(n0,n1)|",
    "category": "gain",
}
CSQA = {
    "id": "q1",
    "question": "Where would you put a wet umbrella?",
    "question_concept": "umbrella",
    "choices": {"label": ["A", "B", "C"], "text": ["bed", "stand", "oven"]},
    "answerKey": "B",
}
COSE = {
    "id": "q1",
    "question": CSQA["question"],
    "choices": ["bed", "stand", "oven"],
    "answer": "stand",
    "abstractive_explanation": "a stand lets it drip",
    "extractive_explanation": "wet",
}
PIQA = {
    "goal": "Keep a door from slamming.",
    "sol1": "Take it off its hinges.",
    "sol2": "Put a wedge under it.",
    "label": 1,
}
MEDMCQA = {
    "id": "m1",
    "question": "Which bone is in the thigh?",
    "opa": "Femur",
    "opb": "Ulna",
    "opc": "Tibia",
    "opd": "Radius",
    "cop": 0,
    "choice_type": "single",
    "exp": "The femur is.",
    "subject_name": "Anatomy",
}
MEDQA = {
    "question": "A child limps after a fall. What is done first?",
    "options": {"A": "Surgery", "B": "Nothing", "C": "An examination", "D": "A cast"},
    "answer": "An examination",
    "answer_idx": "C",
    "meta_info": "step1",
    "metamap_phrases": ["child"],
}
PUBMEDQA = {
    "pubid": 101,
    "question": "Do longer walks help sleep?",
    "context": {
        "contexts": ["We asked 20 walkers.", "They slept longer."],
        "labels": ["METHODS", "RESULTS"],
        "meshes": ["Sleep"],
    },
    "long_answer": "Longer walks may help.",
    "final_decision": "maybe",
}
HUB = {
    "aqua": AQUA,
    "mathqa": MATHQA,
    "csqa": CSQA,
    "cose": COSE,
    "piqa": PIQA,
    "medmcqa": MEDMCQA,
    "medqa": MEDQA,
    "pubmedqa": PUBMEDQA,
}
RIGHT = {
    "aqua": "12",
    "mathqa": "1 , 000",
    "csqa": "stand",
    "cose": "stand",
    "piqa": "Put a wedge under it.",
    "medmcqa": "Femur",
    "medqa": "An examination",
    "pubmedqa": "maybe",
}
REASONS = {
    "aqua": "3 times 4 is 12.",
    "mathqa": "4 * 250 = 1000 . answer : b .",
    "csqa": "",
    "cose": "a stand lets it drip",
    "piqa": "",
    "medmcqa": "The femur is.",
    "medqa": "",
    "pubmedqa": "Longer walks may help.",
}


def right(question):
    return dict(question.options)[question.answer]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(name, row):
    """The question of a row, or the reason by which it was dropped."""
    made, dropped = read_questions(name, [row], "here")
    assert len(made) + sum(dropped.values()) == 1
    return made[0] if made else next(iter(dropped))


def csqa_original(row):
    """A row of the hub's CommonsenseQA as the original files have it."""
    choices = [
        {"label": label, "text": text}
        for label, text in zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    ]
    return {
        "answerKey": row["answerKey"],
        "id": row["id"],
        "question": {"choices": choices, "stem": row["question"]},
    }


@pytest.fixture
def many(tmp_path):
    """A file of forty questions of CommonsenseQA, and another with the same in reverse order."""
    rows = [
        csqa_original(CSQA | {"id": f"id{i}", "question": f"Where would you put umbrella {i}?"})
        for i in range(40)
    ]
    return written(tmp_path / "forwards.jsonl", rows), written(tmp_path / "backwards.jsonl", rows[::-1])


@pytest.mark.parametrize("name", sorted(HUB))
def test_a_row_of_the_hub_is_a_question_with_its_answer(name, monkeypatch):
    requests = []

    def from_hub(hub, config=None, *, split, revision=None):
        requests.append((hub, config, split, revision))
        return [HUB[name]]

    monkeypatch.setattr("components.data.questions.loading.from_hub", from_hub)
    (question,), dropped = load_questions(name)
    assert right(question) == RIGHT[name]
    assert question.explanation == REASONS[name]
    assert not dropped
    assert question.set == name
    assert [label for label, _ in question.options] == list("ABCDE"[: len(question.options)])
    load_questions(name, revision="abc")
    question_set = QUESTION_SETS.load(name)
    assert requests == [
        (question_set.hub, question_set.config, "train", question_set.revision),
        (question_set.hub, question_set.config, "train", "abc"),
    ]


def test_the_sets_are_loaded_from_these_hub_data_sets():
    sets = [QUESTION_SETS.load(name) for name in names()]
    assert {
        question_set.name: (question_set.hub, question_set.config, question_set.revision)
        for question_set in sets
        if question_set.hub
    } == {
        "aqua": ("deepmind/aqua_rat", "raw", None),
        "mathqa": ("regisss/math_qa", None, None),
        "csqa": ("tau/commonsense_qa", None, None),
        "cose": ("Salesforce/cos_e", "v1.0", None),
        "piqa": ("ybisk/piqa", None, "refs/convert/parquet"),
        "medmcqa": ("openlifescienceai/medmcqa", None, None),
        "medqa": ("GBaker/MedQA-USMLE-4-options", None, None),
        "pubmedqa": ("qiaojin/PubMedQA", "pqa_labeled", None),
    }


@pytest.mark.parametrize("name", sorted(HUB))
def test_a_local_parquet_file_of_the_hubs_schema_gives_the_same_question(name, tmp_path):
    from datasets import Dataset

    Dataset.from_list([HUB[name]]).to_parquet(tmp_path / "train.parquet")
    (question,), _ = load_questions(name, tmp_path)
    assert question == one(name, HUB[name])


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        *[
            ("aqua", {"correct": letter}, text)
            for letter, text in zip("ABCDE", ("7", "10", "12", "14 jars", "16"), strict=True)
        ],
        *[
            ("mathqa", {"correct": letter}, text)
            for letter, text in zip(
                "abcde", ("900", "1 , 000", "1 , 250", "2 , 000", "none of these"), strict=True
            )
        ],
        *[
            ("csqa", {"answerKey": letter}, text)
            for letter, text in zip("ABC", ("bed", "stand", "oven"), strict=True)
        ],
        *[("cose", {"answer": text}, text) for text in ("bed", "stand", "oven")],
        ("piqa", {"label": 0}, "Take it off its hinges."),
        ("piqa", {"label": 1}, "Put a wedge under it."),
        *[("medmcqa", {"cop": cop}, text) for cop, text in enumerate(("Femur", "Ulna", "Tibia", "Radius"))],
        *[
            ("medqa", {"answer_idx": letter, "answer": text}, text)
            for letter, text in zip("ABCD", ("Surgery", "Nothing", "An examination", "A cast"), strict=True)
        ],
        *[("pubmedqa", {"final_decision": text}, text) for text in ("yes", "no", "maybe")],
    ],
)
def test_each_label_names_the_option_that_it_means(name, change, text):
    assert right(one(name, HUB[name] | change)) == text


def test_pubmedqas_options_are_yes_no_and_maybe_and_its_abstract_is_the_context():
    question = one("pubmedqa", PUBMEDQA)
    assert question.options == (("A", "yes"), ("B", "no"), ("C", "maybe"))
    assert question.id == "101"
    assert question.context == "We asked 20 walkers.\nThey slept longer."
    assert question.question == "Do longer walks help sleep?"


def test_a_rendered_question_has_context_question_and_options_but_no_answer():
    assert (
        render(one("pubmedqa", PUBMEDQA))
        == "We asked 20 walkers.\nThey slept longer.\n\nDo longer walks help sleep?\nA) yes\nB) no\nC) maybe"
    )
    assert (
        render(one("aqua", AQUA))
        == "A shelf holds 3 rows of 4 jars. How many jars is that?\nA) 7\nB) 10\nC) 12\nD) 14 jars\nE) 16"
    )


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("a ) 1 , b ) 2", ["1", "2"]),
        ("a ) 1 , 000 , b ) 2 , 000 , 000 , c ) 3", ["1 , 000", "2 , 000 , 000", "3"]),
        ("a)1,b)2,c)f ( a )", ["1", "2", "f ( a )"]),
        (
            "a ) rs . 5 , 50 , b ) both a and c , c ) neither a ) nor b )",
            ["rs . 5 , 50", "both a and c", "neither a ) nor b )"],
        ),
        ("a ) 1 , b ) 2 , ", ["1", "2"]),
        ("a ) , b ) 2", ["", "2"]),
    ],
)
def test_mathqas_options_are_split_at_their_labels_and_not_at_commas(line, options):
    assert split_options(line) == options


@pytest.mark.parametrize(
    "line",
    ["a ) 1 , c ) 3", "b ) 2 , c ) 3", "a ) 1 , b ) ( x , b ) , c ) 3", "so : a ) 1 , b ) 2", "1 , 2 , 3"],
)
def test_mathqas_options_with_labels_out_of_order_are_skipped(line):
    with pytest.raises(SkippedRow):
        split_options(line)
    assert one("mathqa", MATHQA | {"options": line}) == "options that cannot be told apart"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("aqua", {"question": "  "}, "empty question"),
        ("aqua", {"question": None}, "empty question"),
        ("aqua", {"correct": ""}, "no right answer"),
        ("aqua", {"correct": None}, "no right answer"),
        ("aqua", {"correct": "F"}, "answer that is none of the options"),
        ("aqua", {"correct": "AB"}, "answer that is none of the options"),
        ("aqua", {"options": ["A)12"]}, "fewer than two options"),
        ("aqua", {"options": None}, "fewer than two options"),
        ("aqua", {"options": ["A)1", "B)2", "C) 1"], "correct": "B"}, "two equal options"),
        ("aqua", {"options": ["A)1  km", "B)1 km"], "correct": "B"}, "two equal options"),
        ("aqua", {"options": ["A)1", "B)"], "correct": "A"}, "empty option"),
        ("aqua", {"options": ["A)1", "C)2"], "correct": "A"}, "options that cannot be told apart"),
        ("aqua", {"options": ["1", "2"], "correct": "A"}, "options that cannot be told apart"),
        ("csqa", {"answerKey": ""}, "no right answer"),
        ("csqa", {"choices": {"label": ["1", "2"], "text": ["a", "b"]}}, "options that cannot be told apart"),
        ("csqa", {"choices": {"label": [], "text": []}}, "fewer than two options"),
        ("cose", {"answer": "B"}, "answer that is none of the options"),
        ("cose", {"answer": ""}, "no right answer"),
        ("cose", {"abstractive_explanation": " "}, "no explanation"),
        ("piqa", {"label": -1}, "no right answer"),
        ("piqa", {"label": None}, "no right answer"),
        ("piqa", {"label": 2}, "answer that is none of the options"),
        ("piqa", {"sol2": PIQA["sol1"]}, "two equal options"),
        ("medmcqa", {"cop": -1}, "no right answer"),
        ("medmcqa", {"cop": 4}, "answer that is none of the options"),
        ("medmcqa", {"cop": 99}, "answer that is none of the options"),
        ("medmcqa", {"opd": None}, "empty option"),
        ("medqa", {"answer": "Surgery"}, "answer whose letter and text disagree"),
        ("medqa", {"options": {"A": "x", "C": "y"}}, "options that cannot be told apart"),
        ("pubmedqa", {"final_decision": "perhaps"}, "answer that is none of the options"),
        ("pubmedqa", {"final_decision": None}, "no right answer"),
        ("pubmedqa", {"context": {"contexts": []}}, "no context"),
    ],
)
def test_a_row_that_makes_no_question_is_counted_by_its_reason(name, change, reason):
    assert one(name, HUB[name] | change) == reason


def test_repeated_ids_and_questions_are_counted_and_the_first_row_is_used():
    again = CSQA | {
        "id": "q2",
        "choices": {"label": ["A", "B", "C"], "text": ["oven", "bed", "stand"]},
        "answerKey": "C",
    }
    made, dropped = read_questions(
        "csqa", [CSQA | {"question": ""}, CSQA, CSQA | {"question": "Another?"}, again], "here"
    )
    assert [question.question for question in made] == [CSQA["question"]]
    assert dropped == {"empty question": 1, "duplicate id": 1, "question that came before": 1}


@pytest.mark.parametrize("name", ["aqua", "mathqa", "piqa", "medqa"])
def test_a_set_without_ids_gets_ids_of_the_text_alone(name):
    text = {"aqua": "question", "mathqa": "Problem", "piqa": "goal", "medqa": "question"}[name]
    option = {
        "aqua": {"options": ["A)7", "B)8", "C)12"]},
        "mathqa": {"options": "a ) 7 , b ) 8"},
        "piqa": {"sol1": "Lock it."},
        "medqa": {"options": MEDQA["options"] | {"A": "A bath"}},
    }[name]
    rows = [HUB[name], HUB[name] | {text: "Another question?"}, HUB[name] | option, HUB[name]]
    made, dropped = read_questions(name, rows, "here")
    assert len({question.id for question in made}) == len(made) == 3
    assert dropped == {"duplicate id": 1}
    assert {question.id for question in read_questions(name, rows[::-1], "there")[0]} == {
        question.id for question in made
    }


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("aqua", {"options": "A)1, B)2"}, r"column 'options' must be a list of texts, but is 'A\)1, B\)2'"),
        ("aqua", {"options": ["A)1", 2]}, r"column 'options\[1\]' must be text, but is 2"),
        ("aqua", {"correct": 2}, "column 'correct' must be text, but is 2"),
        ("aqua", {"rationale": ...}, "column 'rationale' is missing; there are: question, options, correct"),
        ("mathqa", {"options": ["1", "2"]}, "column 'options' must be text"),
        ("mathqa", {"Problem": ...}, "column 'Problem' is missing"),
        ("csqa", {"choices": ["bed", "stand"]}, "column 'choices' must be a list of choices"),
        ("csqa", {"choices": {"label": ["A"], "text": ["a", "b"]}}, "has 1 labels and 2 texts"),
        ("csqa", {"choices": ...}, "column 'choices' is missing"),
        ("csqa", {"id": 5}, "column 'id' must be text"),
        ("csqa", {"question": {"choices": []}}, "column 'stem' is missing"),
        (
            "csqa",
            {"choices": [{"label": "A"}]},
            "column 'choices' must be a list of choices with label and text",
        ),
        ("cose", {"choices": "bed"}, "column 'choices' must be a list of texts, but is 'bed'"),
        ("cose", {"abstractive_explanation": 1}, "column 'abstractive_explanation' must be text"),
        ("piqa", {"label": "1"}, "column 'label' must be a whole number, but is '1'"),
        ("piqa", {"label": True}, "column 'label' must be a whole number"),
        ("piqa", {"sol1": ...}, "column 'sol1' is missing"),
        ("medmcqa", {"cop": "a"}, "column 'cop' must be a whole number"),
        ("medmcqa", {"opc": 3}, "column 'opc' must be text"),
        ("medqa", {"options": ["a", "b"]}, "column 'options' must be an object"),
        ("medqa", {"options": {"A": 1, "B": "x"}}, "row 1: column 'options.A' must be text, but is 1"),
        ("pubmedqa", {"context": "text"}, "column 'context' must be an object"),
        ("pubmedqa", {"pubid": None}, "column 'pubid' is null, but text is needed"),
        (
            "pubmedqa",
            {"context": {"contexts": "text"}},
            "row 1: column 'context.contexts' must be a list of texts, but is 'text'",
        ),
    ],
)
def test_a_row_with_a_wrong_type_is_refused_with_its_place_and_column(name, change, words):
    row = {column: value for column, value in (HUB[name] | change).items() if value is not ...}
    with pytest.raises(DataError, match=words) as error:
        read_questions(name, [row], "here")
    assert str(error.value).startswith("here, row 1")


def test_aquas_original_file_is_json_lines_named_json(tmp_path):
    written(tmp_path / "dev.json", [AQUA, AQUA | {"question": "How many lids?", "correct": "A"}])
    made, _ = load_questions("aqua", tmp_path)
    assert [right(question) for question in made] == ["12", "7"]
    assert made == load_questions("aqua", tmp_path / "dev.json")[0]


def test_mathqas_original_file_is_one_list(tmp_path):
    (tmp_path / "train.json").write_text(
        json.dumps([MATHQA, MATHQA | {"Problem": "and 8 lamps ?", "correct": "d"}], indent=1)
    )
    assert [right(question) for question in load_questions("mathqa", tmp_path)[0]] == ["1 , 000", "2 , 000"]


def test_csqas_original_file_gives_the_same_questions_as_the_hub(tmp_path):
    file = written(
        tmp_path / "dev_rand_split.jsonl",
        [csqa_original(CSQA), csqa_original(CSQA | {"id": "q2", "question": "And dry?", "answerKey": "A"})],
    )
    made, _ = load_questions("csqa", tmp_path)
    assert made[0] == one("csqa", CSQA)
    assert right(made[1]) == "bed"
    assert made == load_questions("csqa", file)[0]
    assert {question.explanation for question in made} == {""}


def test_cos_es_explanations_are_joined_by_id_and_those_without_a_question_are_counted(tmp_path):
    rows = [
        csqa_original(CSQA | {"id": f"q{i}", "question": f"Where to put umbrella {i}?"}) for i in range(4)
    ]
    file = written(tmp_path / "csqa_dev_rand_split.jsonl", rows)
    explained = [
        {"id": own_id, "explanation": {"open-ended": text, "selected": "umbrella"}}
        for own_id, text in (
            ("q2", "second"),
            ("q0", "first"),
            ("other", "of none"),
            ("q0", "once more"),
            ("q3", ""),
        )
    ]
    written(tmp_path / "cose_dev_v1.0.jsonl", explained)
    written(
        tmp_path / "cose_train_v1.0.jsonl",
        [{"id": "far", "explanation": {"open-ended": "of the train questions", "selected": ""}}],
    )
    made, dropped = load_questions("cose", tmp_path)
    assert {question.id: question.explanation for question in made} == {"q0": "first", "q2": "second"}
    assert dropped == {
        "no explanation": 2,
        "explanation without a question": 1,
        "second explanation of a question": 1,
    }
    assert len(made) + sum(dropped.values()) == 4 + 2
    assert made == load_questions("cose", file)[0]
    assert [right(question) for question in made] == ["stand", "stand"]


def test_cos_e_names_a_missing_file_or_column(tmp_path):
    file = written(tmp_path / "dev_rand_split.jsonl", [csqa_original(CSQA)])
    with pytest.raises(
        DataError, match=r"dev_rand_split.jsonl: .* none of the files cose_train_v1.0, .* lies beside"
    ):
        load_questions("cose", file)
    written(tmp_path / "cose_dev_v1.0.jsonl", [{"id": "q1", "explanation": "text"}])
    with pytest.raises(
        DataError, match=r"cose_dev_v1.0.jsonl, row 1: column 'explanation' must be an object"
    ):
        load_questions("cose", file)
    written(tmp_path / "cose_dev_v1.0.jsonl", [{"id": "q1", "explanation": {"selected": "wet"}}])
    with pytest.raises(
        DataError, match=r"row 1: column 'explanation.open-ended' is missing; there are: selected"
    ):
        load_questions("cose", file)


@pytest.mark.parametrize("stem", ["train", "dev", "valid"])
def test_piqas_original_labels_are_read_from_the_file_beside_its_rows(tmp_path, stem):
    rows = [
        {column: PIQA[column] for column in ("goal", "sol1", "sol2")} | {"goal": goal}
        for goal in ("Stop a draught.", "Hold a gate.", "Wedge a lid.")
    ]
    file = written(tmp_path / f"{stem}.jsonl", rows)
    labels = tmp_path / f"{stem}-labels.lst"
    with pytest.raises(
        DataError,
        match=rf"{stem}.jsonl: the rows have no column 'label', and there is no file {stem}-labels.lst",
    ):
        load_questions("piqa", file)
    labels.write_text("0\n1\n0\n")
    made, _ = load_questions("piqa", tmp_path)
    assert [right(question) for question in made] == [PIQA["sol1"], PIQA["sol2"], PIQA["sol1"]]
    labels.write_text("0\n1\n")
    with pytest.raises(
        DataError, match=rf"{stem}-labels.lst: there are 2 labels for the 3 rows of {stem}.jsonl"
    ):
        load_questions("piqa", file)
    labels.write_text("0\n2\n0\n")
    with pytest.raises(DataError, match=r"labels.lst, line 2: expected 0 .* or 1 .*, but this is '2'"):
        load_questions("piqa", file)


def test_medmcqas_original_files_count_from_1_and_the_hubs_rows_from_0(tmp_path):
    rows = [MEDMCQA | {"id": f"m{i}", "question": f"Which bone is number {i}?", "cop": i} for i in range(4)]
    options = ["Femur", "Ulna", "Tibia", "Radius"]
    hub = written(tmp_path / "hub.jsonl", rows)
    original = written(tmp_path / "dev.json", [row | {"cop": row["cop"] + 1} for row in rows])
    assert [right(question) for question in load_questions("medmcqa", hub)[0]] == options
    assert (
        load_questions("medmcqa", original)[0]
        == load_questions("medmcqa", hub)[0]
        == load_questions("medmcqa", tmp_path)[0]
    )


def test_medmcqas_file_without_a_clear_first_number_is_refused(tmp_path):
    from datasets import Dataset

    both = written(tmp_path / "both.jsonl", [MEDMCQA, MEDMCQA | {"cop": 4}])
    with pytest.raises(
        DataError, match=r"both.jsonl: column 'cop' holds 0 and 4; expected 0 to 3, as on the hub, or 1 to 4"
    ):
        load_questions("medmcqa", both)
    with pytest.raises(DataError, match=r"column 'cop' holds neither 0 nor 4"):
        load_questions("medmcqa", written(tmp_path / "few.jsonl", [MEDMCQA | {"cop": 2}]))
    Dataset.from_list([MEDMCQA | {"cop": 2}]).to_parquet(tmp_path / "few.parquet")
    assert right(load_questions("medmcqa", tmp_path / "few.parquet")[0][0]) == "Tibia", "parquet is the hub's"


@pytest.mark.parametrize(
    "options",
    [
        MEDQA["options"],
        MEDQA["options"] | {"E": "A walk"},
        dict(reversed(MEDQA["options"].items())),
        [{"key": label, "value": text} for label, text in MEDQA["options"].items()],
    ],
)
def test_medqas_options_are_read_with_four_or_five_and_as_pairs_too(tmp_path, options):
    written(tmp_path / "train.jsonl", [MEDQA | {"options": options}])
    (question,), _ = load_questions("medqa", tmp_path)
    assert right(question) == "An examination"
    assert len(question.options) == len(options)


def test_pubmedqas_original_file_is_one_object_keyed_by_the_article(tmp_path):
    article = {
        "QUESTION": PUBMEDQA["question"],
        "CONTEXTS": PUBMEDQA["context"]["contexts"],
        "LABELS": ["METHODS", "RESULTS"],
        "LONG_ANSWER": PUBMEDQA["long_answer"],
        "final_decision": "maybe",
    }
    second = article | {"QUESTION": "Do shorter ones?", "final_decision": "no"}
    file = tmp_path / "ori_pqal.json"
    file.write_text(json.dumps({"101": article, "102": second}, indent=4))
    made, dropped = load_questions("pubmedqa", tmp_path)
    assert made[0] == one("pubmedqa", PUBMEDQA)
    assert right(made[1]) == "no"
    assert made[1].id == "102"
    assert not dropped
    text = json.dumps({"101": article, "102": second})
    file.write_text(text[:-1] + ', "101": ' + json.dumps(second | {"QUESTION": "A repeated id?"}) + "}")
    assert load_questions("pubmedqa", file) == (made, {"duplicate id": 1})
    file.write_text(text.replace('"CONTEXTS"', '"TEXTS"', 1))
    with pytest.raises(
        DataError,
        match=r"ori_pqal.json, row 1 \('101'\): column 'CONTEXTS' is missing; there are: QUESTION, TEXTS",
    ):
        load_questions("pubmedqa", file)
    file.write_text(json.dumps({"101": article, "102": 5}))
    with pytest.raises(DataError, match=r"row 2 \('102'\): expected a JSON object"):
        load_questions("pubmedqa", file)
    file.write_text(json.dumps({"101": article}, indent=4)[:-5])
    with pytest.raises(
        DataError,
        match=r"ori_pqal.json, line 14: this is not valid JSON .* keyed by the articles' ids",
    ):
        load_questions("pubmedqa", file)
    file.write_text('{"101": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(
        DataError,
        match=r"ori_pqal.json: .* nested too deeply\); expected one object keyed by the articles' ids",
    ):
        load_questions("pubmedqa", file)


def test_pubmedqas_hub_rows_are_read_from_lines_and_lists_too(tmp_path):
    for text in (
        json.dumps(PUBMEDQA),
        json.dumps(PUBMEDQA) + "\n" + json.dumps(PUBMEDQA | {"pubid": 102, "question": "And naps?"}),
        json.dumps([PUBMEDQA]),
    ):
        (tmp_path / "rows.json").write_text(text)
        assert load_questions("pubmedqa", tmp_path / "rows.json")[0][0] == one("pubmedqa", PUBMEDQA)


def test_a_count_is_a_seeded_sample_in_the_sets_order(many):
    every, _ = load_questions("csqa", many[0])
    some, dropped = load_questions("csqa", many[0], count=15, seed=3)
    assert len(some) == 15
    assert dropped == {"over count": 25}
    assert [question for question in every if question in some] == some
    assert (
        some
        == load_questions("csqa", many[0], count=15, seed=3)[0]
        != load_questions("csqa", many[0], count=15, seed=4)[0]
    )
    assert (
        load_questions("csqa", many[0], count=40) == load_questions("csqa", many[0], count=300) == (every, {})
    )


def test_parts_are_disjoint_cover_the_set_and_do_not_depend_on_order_seed_or_set(many):
    every, _ = load_questions("csqa", many[0])
    parts = [load_questions("csqa", many[0], part=(k, 3), seed=k)[0] for k in range(3)]
    assert sorted(question.id for question in chain(*parts)) == sorted(question.id for question in every)
    assert all(parts)
    for k, part in enumerate(parts):
        other, dropped = load_questions("csqa", many[1], part=(k, 3))
        assert other[::-1] == part
        assert dropped == {"question of another part": 40 - len(part)}
        assert all(in_part(question.id, k, 3) for question in part)
    written(
        many[0].with_name("cose_dev_v1.0.jsonl"),
        [{"id": question.id, "explanation": {"open-ended": "because", "selected": ""}} for question in every],
    )
    assert [question.id for question in load_questions("cose", many[0], part=(1, 3))[0]] == [
        question.id for question in parts[1]
    ]


def test_the_part_of_a_question_is_the_same_in_all_versions():
    assert [next(k for k in range(3) if in_part(f"id{i}", k, 3)) for i in range(12)] == [
        1,
        0,
        0,
        1,
        0,
        1,
        0,
        1,
        1,
        1,
        2,
        1,
    ]


def test_two_parts_meet_where_a_question_is_in_both():
    numbers = [f"id{i}" for i in range(400)]
    parts = [(k, n) for k, n in product(range(6), (1, 2, 3, 4, 6)) if k < n]
    held = {part: {name for name in numbers if in_part(name, *part)} for part in parts}
    assert all(
        parts_meet(one, other) == bool(held[one] & held[other]) for one, other in product(parts, parts)
    )


def test_sets_of_one_pool_ask_the_same_questions_and_others_share_none():
    assert len({pool(name) for name in names()}) == len(names()) - 1
    assert pool("csqa") == pool("cose")
    assert pool("mathqa") != pool("aqua")
    assert pool("mine") == "mine"
    assert shared_questions(["csqa/1", "aqua/1", "cose/2", "cose/1", "csqa/1", "mine/a/b"]) == [
        ("csqa/1", "cose/1")
    ]


def test_every_raw_row_is_a_question_or_is_counted(many):
    made, dropped = load_questions("csqa", many[0], count=5, part=(0, 2))
    assert len(made) == 5
    assert len(made) + sum(dropped.values()) == 40
    assert set(dropped) == {"question of another part", "over count"}


def test_impossible_arguments_are_refused_in_one_sentence(many, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"question set 'medqq' is not known; there are: aqua, .*, pubmedqa. Did you mean 'medqa'",
    ):
        load_questions("medqq")
    for part in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(RecipeError, match=r"expected \(k, n\) with k from 0 to n - 1"):
            load_questions("csqa", many[0], part=part)
    with pytest.raises(RecipeError, match="count is 0, but at least 1"):
        load_questions("csqa", many[0], count=0)
    with pytest.raises(DataError, match=r"expected one of the files ori_pqal, train .* in this folder"):
        load_questions("pubmedqa", tmp_path)
    for name in QUESTION_SETS.names():
        with pytest.raises(DataError, match="there is no such file"):
            load_questions(name, tmp_path / "none.json")
    with pytest.raises(DataError, match=r"there is no usable question in these data \(no right answer: 1\)"):
        load_questions("aqua", written(tmp_path / "dev.jsonl", [AQUA | {"correct": ""}]))


@pytest.mark.parametrize(
    ("name", "path", "count", "dropped", "answers"),
    [
        (
            "aqua",
            "aqua/dev.json",
            253,
            {"two equal options": 1},
            {"A": 69, "B": 65, "C": 43, "D": 50, "E": 26},
        ),
        ("csqa", "cos_e", 950, {}, {"A": 315, "B": 323, "C": 312}),
        ("cose", "cos_e", 950, {}, {"A": 315, "B": 323, "C": 312}),
        ("pubmedqa", "pubmedqa", 1000, {}, {"A": 552, "B": 338, "C": 110}),
    ],
)
def test_the_real_samples_lose_no_row_uncounted(samples, name, path, count, dropped, answers):
    made, left_out = load_questions(name, samples / path)
    assert (len(made), left_out) == (count, dropped)
    assert Counter(question.answer for question in made) == answers
    assert all(
        bool(question.explanation) == (name != "csqa") and bool(question.context) == (name == "pubmedqa")
        for question in made
    )


def test_the_real_csqa_and_cos_e_share_one_file_without_a_common_question(samples):
    csqa, cose = (
        load_questions(name, samples / "cos_e", count=300, part=(k, 2))
        for k, name in enumerate(("csqa", "cose"))
    )
    assert len(csqa[0]) == len(cose[0]) == 300
    assert not {question.question for question in csqa[0]} & {question.question for question in cose[0]}
    assert csqa[1] == cose[1] == {"question of another part": 475, "over count": 175}


def test_the_real_pubmedqa_answers_are_the_published_ones(samples):
    published = json.loads((samples / "pubmedqa" / "test_ground_truth.json").read_text())
    mine = {question.id: right(question) for question in load_questions("pubmedqa", samples / "pubmedqa")[0]}
    assert len(published) == 500
    assert {article: mine[article] for article in published} == published


@pytest.mark.slow
def test_each_embedded_conversation_is_a_question_with_the_actual_reply_among_four():
    made, dropped = load_questions("chitchat")
    replies = {}
    for reply in read_replies(2, 5, 20):
        replies.setdefault((reply.conversation, reply.prompt), reply.text)
    assert len(made) == len({question.id for question in made}) > 3000
    assert set(dropped) <= {"two equal options"}
    assert all(right(question) == replies[question.id, question.context] for question in made)
    share = Counter(question.answer for question in made)
    assert all(0.22 < share[label] / len(made) < 0.28 for label in "ABCD"), (
        "the right one stands in any place"
    )
    option_counts = Counter()
    for question in made:
        option_counts.update(text for _, text in question.options)
    assert 6 <= max(n for text, n in option_counts.items() if len(text) > 60) <= 12, (
        "drawn from all: no long reply is a wrong option over and over, and some are more often than by turns"
    )
    assert load_questions("chitchat")[0] == made
    assert render(made[0]).startswith(("TOPIC", "YOU", "THEY"))


def test_a_file_in_place_of_the_embedded_conversations_has_their_columns(tmp_path):
    row = {"id": "c", "context": "THEY: hello", "options": ["hi", "no", "yes"], "answer": "A"}
    (question,), _ = load_questions("chitchat", written(tmp_path / "chitchat.jsonl", [row]))
    assert right(question) == "hi"
    assert question.context == "THEY: hello"
    with pytest.raises(DataError, match=r"column 'options' must be a list of texts, but is 'hi'"):
        load_questions("chitchat", written(tmp_path / "other.jsonl", [row | {"options": "hi"}]))
    with pytest.raises(RecipeError, match="an embedded question set has no revision"):
        load_questions("chitchat", revision="main")
