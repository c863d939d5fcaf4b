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
from components.data.questions.question_set import QUESTION_SETS
from components.data.records import DataError
from components.data.sources.chitchat import read_replies

AQUA = {
    "question": "A shelf holds 3 rows of 4 jars. How many jars is that?",
    "options": ["A)7", "B)10", "C) 12", "D)14 jars", "E)16"],
    "rationale": "3 times 4 is 12.",
    "correct": "C",
}
CSQA = {
    "id": "q1",
    "question": "Where would you put a wet umbrella?",
    "question_concept": "umbrella",
    "choices": {"label": ["A", "B", "C"], "text": ["bed", "stand", "oven"]},
    "answerKey": "B",
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


def test_a_rendered_question_has_context_question_and_options_but_no_answer():
    assert (
        render(one("pubmedqa", PUBMEDQA))
        == "We asked 20 walkers.\nThey slept longer.\n\nDo longer walks help sleep?\nA) yes\nB) no\nC) maybe"
    )
    assert (
        render(one("aqua", AQUA))
        == "A shelf holds 3 rows of 4 jars. How many jars is that?\nA) 7\nB) 10\nC) 12\nD) 14 jars\nE) 16"
    )


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


@pytest.mark.long
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
