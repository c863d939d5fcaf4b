"""Which questions are asked, how an answer is read, and the figures worked out by hand (DRIFT section 7.1)."""

import json
import random

import pytest

from components.config import QuestionsConfig, RecipeError
from components.data.questions import Question, load_questions, render
from components.data.records import DataError
from components.data.trees import Tree, append_tree
from components.evaluation.answers import answer_figures, grown_questions, load_asked, parse_answer
from components.evaluation.winrate import bootstrap_interval
from components.recipes import load_recipe
from components.seeding import derive

PLACES = (("A", "dog"), ("B", "a stand"), ("C", "an oven, hot"), ("D", "It stays open."))
NUMBERS = (("A", "5"), ("B", "-5"), ("C", ".5"), ("D", "$50"))
MEDICINE = (("A", "B. anthracis"), ("B", "C-reactive protein"), ("C", "B cells"), ("D", "A and B"), ("E", "none of these"))


# --- reading an answer

@pytest.mark.parametrize(("text", "label"), [
    *[(text, "B") for text in (
        "Answer: B", "answer: B", "ANSWER : B.", "Answer:B", "**Answer:** B", "**Answer**: **B**", "*Answer: B*", "`Answer: B`", "Answer: (B)", "Answer: [B]",
        "Answer: 'B'", "Answer:\n\nB", "Final answer: B)", "Answer = B",
        "the answer is (B)", "The answer is B)", "So the correct answer is: B.", "the answer is **B**, I think", "The answer would be B!",
        "The answer to the question is B", "The best option must be B", "Correct choice: B",
        "\\boxed{B}", "$\\boxed{\\text{B}}$", "It is \\boxed{(B)} here", "\\boxed{ B ) a stand }", "The answer is $\\boxed{B}$.", "The answer is \\(B\\).",
        "Answer: option B", "the answer is option B which drips", "Answer: the letter B",
        "A leash is for a dog.\nAnswer: B\n", "Answer: A\nNo, wait.\nAnswer: B", "The answer is A. Or not.\n\nthe answer is (B)", "A or C?\nAnswer: B",
        "Answer: B) a stand", "Answer: B. a stand", "Answer: B - a stand", "Answer: B: a stand",
        "Answer: B a stand", "Answer: B because A barks", "Answer: B, since A and C are wrong", "Answer: B as A is wrong", "Answer: B. A and C are wrong.",
        "Answer: B (not A)", "Answer: B, A is wrong", "Answer: B) A stand.")],
    ("Answer: B\nThis answer is supported by what a stand is for.", "B"), ("Answer: B\nMy answer is based on drips.", "B"), ("Answer: A", "A"),
    ("The answer is A.", "A"), ("Answer: A because dogs bark", "A"), ("Answer: A) it barks", "A"),
    ("Answer: A dog", "A"), ("Answer: A, dog", "A"), ("Answer: C. It is hot.", "C")])
def test_the_last_statement_decides_however_it_is_written(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize("text", [
    "Answer: A or B", "Answer: A and B", "Answer: A/B", "Answer: A, B", "Answer: A, B and C", "Answer: (A) or (B)", "Answer: A) dog or B) a stand",
    "Answer: A dog or B a stand", "Answer: option A or option B", "Answer: A & B", "The answer is both A and B",
    "The answer is either A or B", "\\boxed{A or B}"])
def test_two_answers_are_none(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize("text", [
    "The answer is a dog-like thing", "Answer: A cat", "The answer is A cat", "Answer: A dog barks", "Answer: A good one is B", "Answer: B cells",
    "Answer: B-cells", "Answer: C's", "Answer: Both", "The answer is a", "answer: b"])
def test_an_article_or_a_letter_that_belongs_to_a_word_is_no_label(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize("text", [
    "Answer: F", "Answer: A\nAnswer: X", "Answer: A\nThe answer is F.", "Answer: A\nAnswer:", "Answer: A\nAnswer: I do not know",
    "Answer: A\nThe answer is not B", "Answer: A\nThe answer is unclear", "Answer: A\n\\boxed{\\frac{1}{2}}", "Answer: B) dog",
    "Answer: A. a stand"])
def test_a_last_statement_that_names_no_option_or_contradicts_itself_is_not_made_up_for_by_another(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize(("text", "label"), [
    ("B", "B"), ("(B)", "B"), ("B)", "B"), (" **B**. ", "B"), ('"B"', "B"), ("B) a stand", "B"), ("B: A stand.", "B"), ("Option B", "B"), ("A", "A"),
    ("A) dog", "A"), ("A dog", "A"), ("b", None), ("E", None), ("B) dog", None), ("A cat", None),
    ("A stand", "B"), ("B and C", None), ("A) dog or B) a stand", None), ("B) because it drips", None), ("B\nA", None), ("AB", None), ("It is B", None)])
def test_without_a_statement_a_whole_text_may_be_a_label_with_or_without_its_option(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize(("text", "label"), [
    ("a stand", "B"), ("It drips.\n\nA  STAND.", "B"), ("Heat.\n**an oven, hot**", "C"), ("It stays open", "D"), ("an oven", None), ("stand", None),
    ("a stand\nIt drips.", None), ("dog\na stand\nan oven, hot", None),
    ("A) dog\nB) a stand\nC) an oven, hot", None), ("A) dog\na stand", None), ("", None), (" \n\t", None), ("?", None)])
def test_a_last_line_may_be_an_options_text_where_it_is_not_one_of_a_list(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize(("text", "options", "label"), [
    ("Answer: a stand", PLACES, "B"), ("The answer is a stand.", PLACES, "B"), ("The answer is an oven, hot", PLACES, "C"),
    ("the answer is stand", PLACES, None), ("\\boxed{dog}", PLACES, "A"),
    ("Answer: 5", NUMBERS, "A"), ("Answer: -5", NUMBERS, "B"), ("Answer: B) -5", NUMBERS, "B"), ("Answer: B - 5", NUMBERS, None),
    ("The answer is: .5", NUMBERS, "C"), ("Answer: C) .5", NUMBERS, "C"), ("**$50**", NUMBERS, "D"),
    ("Answer: $50", NUMBERS, "D"), ("Answer: 7", NUMBERS, None), ("\\boxed{5}", NUMBERS, "A"),
    ("Answer: B. anthracis", MEDICINE, "A"), ("Answer: B", MEDICINE, "B"), ("Answer: C-reactive protein", MEDICINE, "B"),
    ("The answer is B cells.", MEDICINE, "C"), ("Answer: A and B", MEDICINE, "D"), ("Answer: D) A and B", MEDICINE, "D"),
    ("The answer is none of these", MEDICINE, "E"), ("Answer: A", (("A", "B"), ("B", "A")), "A"),
    ("Answer: yes", (("A", "yes"), ("B", "Yes."), ("C", "no")), None), ("Answer: B", (), None)])
def test_an_options_text_names_it_where_it_is_all_there_is_and_the_text_of_one_only(text, options, label):
    assert parse_answer(text, options) == label


def test_every_text_gives_a_label_of_an_option_or_none():
    pieces = ["Answer", "answer is", ":", " ", "\n", "A", "B", "F", "(", ")", "**", "_", "$", "\\boxed{", "\\text{", "}", "{", ".", ",", "or", "and", "not",
              "option", "dog", "a stand", "-5", "'", '"', "ß", "İ", "\x00", "\u2028", "\ud800", "１", "=", "/", "\\", "the correct", "because", "\r\n"]
    chance, found = random.Random(0), []
    for _ in range(20_000):
        text = "".join(chance.choice(pieces) if chance.random() < 0.9 else chr(chance.randrange(0x3000)) for _ in range(chance.randrange(14)))
        found.append(parse_answer(text, PLACES))
        assert found[-1] in (None, "A", "B", "C", "D"), text
    assert {None, "A", "B"} <= set(found), "the pieces do make answers"


@pytest.mark.parametrize("label", "ABCD")
def test_the_label_of_a_right_statement_is_read_whatever_was_thought_before(label):
    chance, words = random.Random(label), ["dog", "a stand", "B", "(C)", "Answer: A", "the answer is D", "\n", "A)", "or", ",", "so"]
    for _ in range(500):
        thought = " ".join(chance.choice(words) for _ in range(chance.randrange(12)))
        assert parse_answer(f"{thought}\nAnswer: {label}", PLACES) == parse_answer(f"{thought}\nThe answer is ({label}).", PLACES) == label


# --- figures

def row(of, key, answer, options=2, samples=(), cut=False):
    return {"set": of, "key": key, "answer": answer, "options": dict.fromkeys("ABCDE"[:options], "x"), "samples": [{"answer": given} for given in samples],
        "cut": cut}


def test_accuracy_and_success_are_counted_by_hand():
    rows = [row("csqa", "A", "A", 4, "AB"), row("csqa", "B", None, 4, (None, "C")), row("csqa", "C", "B", 4, "DC", cut=True), row("csqa", "A", None, 2, "BB"),
        row("piqa", "B", "B", 2, "AB")]
    figures = answer_figures(rows, 200, 0)
    assert figures["samples"] == 2 and list(figures["sets"]) == ["csqa", "piqa"]
    csqa, piqa, every, mean = figures["sets"]["csqa"], figures["sets"]["piqa"], figures["all"], figures["mean"]
    assert (csqa["questions"], csqa["right"], csqa["accuracy"], csqa["unparsable"], csqa["unparsable_share"], csqa["cut"]) == (4, 1, 0.25, 2, 0.5,
        1), "what cannot be read is wrong, and stays in the denominator"
    assert csqa["chance"] == pytest.approx((3 / 4 + 1 / 2) / 4) and csqa["success_chance"] == pytest.approx((3 * (1 - (3 / 4) ** 2) + 3 / 4) / 4)
    assert (csqa["succeeded"], csqa["success"]) == (2, 0.5) and (piqa["succeeded"], piqa["success"], piqa["success_chance"]) == (1, 1.0, 0.75)
    assert (every["questions"], every["right"], every["accuracy"], every["success"]) == (5, 2, 0.4, 0.6)
    assert mean == {"accuracy": pytest.approx(0.625), "unparsable_share": 0.25, "chance": pytest.approx((csqa["chance"] + 0.5) / 2), "success": 0.75,
        "success_chance": pytest.approx((csqa["success_chance"] + 0.75) / 2)}, "each set counts once"
    assert (csqa["low"], csqa["high"]) == bootstrap_interval([True, False, False, False], 200, derive(0, "csqa")) and csqa["low"] <= 0.25 <= csqa["high"]
    assert csqa["success_low"] <= 0.5 <= csqa["success_high"]


def test_without_samples_there_is_no_success_rate():
    figures = answer_figures([row("csqa", "A", "A"), row("csqa", "A", "B")], 200, 0)
    assert figures["samples"] == 0 and figures["mean"] == {"accuracy": 0.5, "unparsable_share": 0.0,
        "chance": 0.5} and not any("succe" in name for name in figures["all"])


# --- the questions

def written(path, numbers):
    path.write_text("".join(json.dumps({"id": f"q{n}", "answerKey": "B",
        "question": {"stem": f"Where is thing {n}?", "choices": [{"label": "A", "text": "here"}, {"label": "B", "text": f"there {n}"}]}}) + "\n" for n in numbers))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "csqa.jsonl", range(40))


def grown_for(questions):
    return {f"{question.set}/{question.id}": render(question) for question in questions}


def test_the_parts_that_no_tree_was_grown_for_are_asked(file):
    grown = grown_for(load_questions("csqa", file, part=(0, 2))[0])
    asked = load_asked([QuestionsConfig(set="csqa", path=file, part=[1, 2], count=5)], 0, grown)
    assert len(asked["csqa"]) == 5 and all(f"csqa/{question.id}" not in grown for question in asked["csqa"])
    assert load_asked([QuestionsConfig(set="csqa", path=file, part=[0, 2])], 0, {}) == {"csqa": load_questions("csqa", file, part=(0, 2))[0]}


@pytest.mark.parametrize("part", [[0, 1], [0, 2], [0, 4], [1, 3]])
def test_a_question_that_a_tree_was_grown_for_is_refused_whatever_the_parts_are_called(file, part):
    own = load_questions("csqa", file, part=(0, 2))[0]
    first = next(question for question in load_questions("csqa", file, part=tuple(part))[0] if question in own)
    with pytest.raises(DataError, match=rf"trees of thoughts are grown for \d+ of the \d+ questions of set csqa, e.g. csqa/{first.id} \(tree csqa/{first.id}\)"):
        load_asked([QuestionsConfig(set="csqa", path=file, part=part)], 0, grown_for(own))


def test_the_same_question_in_another_set_is_refused_too_and_one_of_another_text_with_the_same_id_also(file):
    question = load_questions("csqa", file)[0][7]
    with pytest.raises(DataError, match=r"for 1 of the 40 questions of set csqa, e.g. csqa/q7 \(tree cose/q7\)"):
        load_asked([QuestionsConfig(set="csqa", path=file)], 0, {"cose/q7": render(question)})
    with pytest.raises(DataError, match=r"e.g. csqa/q3 \(tree csqa/q3\)"):
        load_asked([QuestionsConfig(set="csqa", path=file)], 0, {"csqa/q3": "a shortened text"})
    assert len(load_asked([QuestionsConfig(set="csqa", path=file)], 0, {"aqua/q3": "another text"})["csqa"]) == 40


def test_a_question_of_another_set_of_its_pool_is_refused_though_its_text_is_another(file):
    with pytest.raises(DataError, match=r"for 1 of the 40 questions of set csqa, e.g. csqa/q3 \(tree cose/q3\).* ask another file, or give each of the sets cose and csqa, which share questions, a part of its own"):
        load_asked([QuestionsConfig(set="csqa", path=file)], 0, {"cose/q3": "three options, not five"})


def test_a_question_is_asked_once_and_a_part_without_any_is_refused(file, tmp_path):
    halves = [QuestionsConfig(set="csqa", path=file, part=part) for part in ([0, 2], [1, 2])]
    assert len(load_asked(halves, 0, {})["csqa"]) == 40
    with pytest.raises(DataError, match="the parts of set csqa share questions"):
        load_asked([halves[0], QuestionsConfig(set="csqa", path=file)], 0, {})
    few = written(tmp_path / "few.jsonl", [0])
    empty = next(k for k in range(2) if not load_questions("csqa", few, part=(k, 2))[0])
    with pytest.raises(DataError, match=rf"part \[{empty}, 2\] of set csqa holds no question"):
        load_asked([QuestionsConfig(set="csqa", path=few, part=[empty, 2])], 0, {})


def test_the_trees_are_those_of_the_run_or_those_that_the_recipe_names(tmp_path):
    for place, name in (("run", "csqa/1"), ("elsewhere", "csqa/2")):
        append_tree(tmp_path / place / "csqa.jsonl", Tree(name, "csqa", "k", f"text of {name}", ()))
    own = load_recipe("debug", ["data={source: thoughts}", "thoughts={questions: [{set: csqa}]}"])
    assert grown_questions(own, tmp_path / "run") == {"csqa/1": "text of csqa/1"}
    for path in (tmp_path / "elsewhere", tmp_path / "elsewhere" / "csqa.jsonl"):
        assert grown_questions(load_recipe("debug", [f"data={{source: thoughts, path: {path}}}"]), tmp_path / "run") == {"csqa/2": "text of csqa/2"}
        assert grown_questions(load_recipe("debug", [f"data.trees={path}"]), tmp_path / "run") == {"csqa/2": "text of csqa/2"}, "beside another source's pairs"
    assert grown_questions(load_recipe("debug", ["thoughts={questions: [{set: csqa}]}"]), tmp_path / "run") == {"csqa/1": "text of csqa/1"}
    assert grown_questions(load_recipe("debug"), tmp_path / "run") == {}
    with pytest.raises(DataError, match="there is no file of trees"):
        grown_questions(own, tmp_path / "none")


@pytest.mark.parametrize(("override", "words"), [
    ("evaluation.questions={questions: [{set: cqsa}]}", "evaluation.questions.questions.set 'cqsa' is not known; there are: aqua, chitchat, cose, csqa"),
    ("evaluation.questions={questions: []}", "evaluation.questions.questions"), ("evaluation.questions={}", "evaluation.questions.questions' is missing"),
    ("evaluation.questions={questions: [{set: csqa}], template: thoughts/anser}", "Did you mean 'thoughts/answer'?"),
    ("evaluation.questions={questions: [{set: csqa}], template: thoughts/value}", "placeholder {thought} is not known in an answer template"),
    ("evaluation.questions={questions: [{set: csqa}], temperature: 0}", "evaluation.questions.temperature"),
    ("evaluation.questions={questions: [{set: csqa}], samples: -1}", "evaluation.questions.samples"),
    ("evaluation.questions={questions: [{set: csqa, part: [2, 2]}]}", "is not a part [k, n]")])
def test_questions_that_cannot_be_asked_are_refused_with_the_recipe(override, words):
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", [override])
    assert words in str(error.value)


def test_the_prompt_shows_the_question_and_says_how_the_answer_ends():
    from components.data.templates import load

    question = Question("1", "csqa", "Where?", PLACES, "B", "a secret reason", "Some context.")
    shown = load("thoughts/answer", "answer").render(question=render(question))
    assert "Some context.\n\nWhere?\nA) dog\nB) a stand" in shown and "Answer: X" in shown and "secret" not in shown
    assert parse_answer("Answer: X", PLACES) is None, "the form itself is no answer"
