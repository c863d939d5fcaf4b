"""Answers to questions: parsing, figures (DRIFT section 7.1), and which questions are allowed."""

import json
import random

import pytest

from components.config import QuestionsConfig, RecipeError
from components.data.questions import Question, load_questions, render
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.trees import Tree, append_trees
from components.evaluation.answer_parsing import parse_answer
from components.evaluation.answers import answer_figures, load_evaluation_questions, tree_questions
from components.evaluation.winrate import bootstrap_interval
from components.recipes import load_recipe
from components.seeding import derive

PLACES = (("A", "dog"), ("B", "a stand"), ("C", "an oven, hot"), ("D", "It stays open."))
NUMBERS = (("A", "5"), ("B", "-5"), ("C", ".5"), ("D", "$50"))
MEDICINE = (
    ("A", "B. anthracis"),
    ("B", "C-reactive protein"),
    ("C", "B cells"),
    ("D", "A and B"),
    ("E", "none of these"),
)


# --- Parsing


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *[
            (text, "B")
            for text in (
                "Answer: B",
                "answer: B",
                "ANSWER : B.",
                "Answer:B",
                "**Answer:** B",
                "**Answer**: **B**",
                "*Answer: B*",
                "`Answer: B`",
                "Answer: (B)",
                "Answer: [B]",
                "Answer: 'B'",
                "Answer:\n\nB",
                "Final answer: B)",
                "Answer = B",
                "the answer is (B)",
                "The answer is B)",
                "So the correct answer is: B.",
                "the answer is **B**, I think",
                "The answer would be B!",
                "The answer to the question is B",
                "The best option must be B",
                "Correct choice: B",
                "\\boxed{B}",
                "$\\boxed{\\text{B}}$",
                "It is \\boxed{(B)} here",
                "\\boxed{ B ) a stand }",
                "The answer is $\\boxed{B}$.",
                "The answer is \\(B\\).",
                "Answer: option B",
                "the answer is option B which drips",
                "Answer: the letter B",
                "A leash is for a dog.\nAnswer: B\n",
                "Answer: A\nNo, wait.\nAnswer: B",
                "The answer is A. Or not.\n\nthe answer is (B)",
                "A or C?\nAnswer: B",
                "Answer: B) a stand",
                "Answer: B. a stand",
                "Answer: B - a stand",
                "Answer: B: a stand",
                "Answer: B a stand",
                "Answer: B because A barks",
                "Answer: B, since A and C are wrong",
                "Answer: B as A is wrong",
                "Answer: B. A and C are wrong.",
                "Answer: B (not A)",
                "Answer: B, A is wrong",
                "Answer: B) A stand.",
            )
        ],
        ("Answer: B\nThis answer is supported by what a stand is for.", "B"),
        ("Answer: B\nMy answer is based on drips.", "B"),
        ("Answer: A", "A"),
        ("The answer is A.", "A"),
        ("Answer: A because dogs bark", "A"),
        ("Answer: A) it barks", "A"),
        ("Answer: A dog", "A"),
        ("Answer: A, dog", "A"),
        ("Answer: C. It is hot.", "C"),
    ],
)
def test_the_last_statement_decides_in_any_form(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize(
    "text",
    [
        "Answer: A or B",
        "Answer: A and B",
        "Answer: A/B",
        "Answer: A, B",
        "Answer: A, B and C",
        "Answer: (A) or (B)",
        "Answer: A) dog or B) a stand",
        "Answer: A dog or B a stand",
        "Answer: option A or option B",
        "Answer: A & B",
        "The answer is both A and B",
        "The answer is either A or B",
        "\\boxed{A or B}",
    ],
)
def test_a_statement_with_two_labels_names_no_option(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize(
    "text",
    [
        "The answer is a dog-like thing",
        "Answer: A cat",
        "The answer is A cat",
        "Answer: A dog barks",
        "Answer: A good one is B",
        "Answer: B cells",
        "Answer: B-cells",
        "Answer: C's",
        "Answer: Both",
        "The answer is a",
        "answer: b",
    ],
)
def test_an_article_and_a_letter_of_a_word_are_no_labels(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize(
    "text",
    [
        "Answer: F",
        "Answer: A\nAnswer: X",
        "Answer: A\nThe answer is F.",
        "Answer: A\nAnswer:",
        "Answer: A\nAnswer: I do not know",
        "Answer: A\nThe answer is not B",
        "Answer: A\nThe answer is unclear",
        "Answer: A\n\\boxed{\\frac{1}{2}}",
        "Answer: B) dog",
        "Answer: A. a stand",
    ],
)
def test_an_earlier_statement_does_not_replace_a_last_one_that_names_no_option_or_contradicts_itself(text):
    assert parse_answer(text, PLACES) is None


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B)", "B"),
        (" **B**. ", "B"),
        ('"B"', "B"),
        ("B) a stand", "B"),
        ("B: A stand.", "B"),
        ("Option B", "B"),
        ("A", "A"),
        ("A) dog", "A"),
        ("A dog", "A"),
        ("b", None),
        ("E", None),
        ("B) dog", None),
        ("A cat", None),
        ("A stand", "B"),
        ("B and C", None),
        ("A) dog or B) a stand", None),
        ("B) because it drips", None),
        ("B\nA", None),
        ("AB", None),
        ("It is B", None),
    ],
)
def test_without_a_statement_the_whole_text_may_be_a_label_with_or_without_its_option(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("a stand", "B"),
        ("It drips.\n\nA  STAND.", "B"),
        ("Heat.\n**an oven, hot**", "C"),
        ("It stays open", "D"),
        ("an oven", None),
        ("stand", None),
        ("a stand\nIt drips.", None),
        ("dog\na stand\nan oven, hot", None),
        ("A) dog\nB) a stand\nC) an oven, hot", None),
        ("A) dog\na stand", None),
        ("", None),
        (" \n\t", None),
        ("?", None),
    ],
)
def test_the_last_line_may_be_the_text_of_an_option_unless_it_is_part_of_a_list(text, label):
    assert parse_answer(text, PLACES) == label


@pytest.mark.parametrize(
    ("text", "options", "label"),
    [
        ("Answer: a stand", PLACES, "B"),
        ("The answer is a stand.", PLACES, "B"),
        ("The answer is an oven, hot", PLACES, "C"),
        ("the answer is stand", PLACES, None),
        ("\\boxed{dog}", PLACES, "A"),
        ("Answer: 5", NUMBERS, "A"),
        ("Answer: -5", NUMBERS, "B"),
        ("Answer: B) -5", NUMBERS, "B"),
        ("Answer: B - 5", NUMBERS, None),
        ("The answer is: .5", NUMBERS, "C"),
        ("Answer: C) .5", NUMBERS, "C"),
        ("**$50**", NUMBERS, "D"),
        ("Answer: $50", NUMBERS, "D"),
        ("Answer: 7", NUMBERS, None),
        ("\\boxed{5}", NUMBERS, "A"),
        ("Answer: B. anthracis", MEDICINE, "A"),
        ("Answer: B", MEDICINE, "B"),
        ("Answer: C-reactive protein", MEDICINE, "B"),
        ("The answer is B cells.", MEDICINE, "C"),
        ("Answer: A and B", MEDICINE, "D"),
        ("Answer: D) A and B", MEDICINE, "D"),
        ("The answer is none of these", MEDICINE, "E"),
        ("Answer: A", (("A", "B"), ("B", "A")), "A"),
        ("Answer: yes", (("A", "yes"), ("B", "Yes."), ("C", "no")), None),
        ("Answer: B", (), None),
    ],
)
def test_the_complete_text_of_one_option_names_it(text, options, label):
    assert parse_answer(text, options) == label


PIECES = [
    "Answer",
    "answer is",
    ":",
    " ",
    "\n",
    "A",
    "B",
    "F",
    "(",
    ")",
    "**",
    "_",
    "$",
    "\\boxed{",
    "\\text{",
    "}",
    "{",
    ".",
    ",",
    "or",
    "and",
    "not",
    "option",
    "dog",
    "a stand",
    "-5",
    "'",
    '"',
    "ß",
    "İ",
    "\x00",
    "\u2028",
    "\ud800",
    "１",
    "=",
    "/",
    "\\",
    "the correct",
    "because",
    "\r\n",
]
"""Parts of random answers."""


def random_answer(numbers):
    pieces = []
    for _ in range(numbers.randrange(14)):
        known = numbers.random() < 0.9
        pieces.append(numbers.choice(PIECES) if known else chr(numbers.randrange(0x3000)))
    return "".join(pieces)


def test_every_text_is_parsed_to_the_label_of_an_option_or_to_none():
    numbers = random.Random(0)
    labels = set()
    for _ in range(20_000):
        text = random_answer(numbers)
        label = parse_answer(text, PLACES)
        labels.add(label)
        assert label in (None, "A", "B", "C", "D"), text
    assert {None, "A", "B"} <= labels, "the pieces form answers"


@pytest.mark.parametrize("label", "ABCD")
def test_the_label_of_a_right_statement_is_parsed_after_any_reasoning(label):
    numbers = random.Random(label)
    words = ["dog", "a stand", "B", "(C)", "Answer: A", "the answer is D", "\n", "A)", "or", ",", "so"]
    for _ in range(500):
        reasoning = " ".join(numbers.choice(words) for _ in range(numbers.randrange(12)))
        assert parse_answer(f"{reasoning}\nAnswer: {label}", PLACES) == label
        assert parse_answer(f"{reasoning}\nThe answer is ({label}).", PLACES) == label


# --- Figures


def row(question_set, key, answer, options=2, samples=(), cut=False):
    return {
        "set": question_set,
        "key": key,
        "answer": answer,
        "options": dict.fromkeys("ABCDE"[:options], "x"),
        "samples": [{"answer": sample} for sample in samples],
        "cut": cut,
    }


@pytest.fixture
def figures():
    rows = [
        row("csqa", "A", "A", 4, "AB"),
        row("csqa", "B", None, 4, (None, "C")),
        row("csqa", "C", "B", 4, "DC", cut=True),
        row("csqa", "A", None, 2, "BB"),
        row("piqa", "B", "B", 2, "AB"),
    ]
    return answer_figures(rows, 200, 0)


CSQA_CHANCE = (3 / 4 + 1 / 2) / 4
CSQA_SUCCESS_CHANCE = (3 * (1 - (3 / 4) ** 2) + 3 / 4) / 4
"""Hand-computed chances of guessing: three questions with four options, and one with two."""


def test_answers_that_cannot_be_parsed_are_wrong_and_one_right_sample_is_a_success(figures):
    csqa = figures.sets["csqa"]
    assert csqa.questions == 4
    assert csqa.right == 1
    assert csqa.accuracy == 0.25
    assert csqa.unparsable == 2
    assert csqa.unparsable_share == 0.5
    assert csqa.cut == 1
    piqa = figures.sets["piqa"]
    assert figures.samples == 2
    assert (csqa.succeeded, csqa.success) == (2, 0.5)
    assert (piqa.succeeded, piqa.success) == (1, 1.0)


def test_chances_follow_from_the_numbers_of_options_and_intervals_from_the_bootstrap(figures):
    assert figures.sets["csqa"].chance == pytest.approx(CSQA_CHANCE)
    assert figures.sets["csqa"].success_chance == pytest.approx(CSQA_SUCCESS_CHANCE)
    assert figures.sets["piqa"].success_chance == 0.75
    csqa = figures.sets["csqa"]
    expected = bootstrap_interval([True, False, False, False], 200, derive(0, "csqa"))
    assert (csqa.low, csqa.high) == expected
    assert csqa.low <= 0.25 <= csqa.high
    assert csqa.success_low <= 0.5 <= csqa.success_high


def test_the_total_counts_each_question_once_and_the_mean_each_set(figures):
    total = figures.all
    assert (total.questions, total.right, total.accuracy, total.success) == (5, 2, 0.4, 0.6)
    assert list(figures.sets) == ["csqa", "piqa"]
    mean = {name: value for name, value in figures.mean.model_dump().items() if value is not None}
    assert mean == {
        "accuracy": pytest.approx(0.625),
        "unparsable_share": 0.25,
        "chance": pytest.approx((CSQA_CHANCE + 0.5) / 2),
        "success": 0.75,
        "success_chance": pytest.approx((CSQA_SUCCESS_CHANCE + 0.75) / 2),
    }


def test_without_samples_there_is_no_success_rate():
    figures = answer_figures([row("csqa", "A", "A"), row("csqa", "A", "B")], 200, 0)
    mean = {name: value for name, value in figures.mean.model_dump().items() if value is not None}
    assert figures.samples == 0
    assert mean == {
        "accuracy": 0.5,
        "unparsable_share": 0.0,
        "chance": 0.5,
    }
    for name, value in figures.all.model_dump().items():
        assert value is None or not name.startswith("succe"), name


# --- Questions


def csqa_line(number):
    """A question in the format of the original distribution."""
    choices = [{"label": "A", "text": "here"}, {"label": "B", "text": f"there {number}"}]
    question = {"stem": f"Where is thing {number}?", "choices": choices}
    return (
        json.dumps(
            {
                "id": f"q{number}",
                "answerKey": "B",
                "question": question,
            }
        )
        + "\n"
    )


def write_csqa(path, numbers):
    path.write_text("".join(csqa_line(number) for number in numbers))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write_csqa(tmp_path / "csqa.jsonl", range(40))


def as_tree_questions(questions):
    return {f"{question.set}/{question.id}": render(question) for question in questions}


def test_parts_without_trees_are_loaded_and_any_part_where_there_are_none(file):
    with_trees = as_tree_questions(load_questions("csqa", file, part=(0, 2))[0])
    sections = [QuestionsConfig(set="csqa", path=file, part=[1, 2], count=5)]
    questions = load_evaluation_questions(sections, 0, with_trees)["csqa"]
    assert len(questions) == 5
    assert all(f"csqa/{question.id}" not in with_trees for question in questions)
    sections = [QuestionsConfig(set="csqa", path=file, part=[0, 2])]
    expected = load_questions("csqa", file, part=(0, 2))[0]
    assert load_evaluation_questions(sections, 0, {}) == {"csqa": expected}


@pytest.mark.parametrize("part", [[0, 1], [0, 2], [0, 4], [1, 3]])
def test_a_question_with_a_tree_is_refused_in_every_part(file, part):
    trained = load_questions("csqa", file, part=(0, 2))[0]
    questions = load_questions("csqa", file, part=tuple(part))[0]
    first = next(question for question in questions if question in trained)
    with pytest.raises(
        DataError,
        match=r"trees of thoughts were grown for \d+ of the \d+ questions of set csqa, "
        rf"e.g. csqa/{first.id} \(tree csqa/{first.id}\)",
    ):
        load_evaluation_questions(
            [QuestionsConfig(set="csqa", path=file, part=part)], 0, as_tree_questions(trained)
        )


def test_a_question_with_the_text_or_the_name_of_a_tree_of_its_pool_is_refused(file):
    question = load_questions("csqa", file)[0][7]
    with pytest.raises(
        DataError, match=r"for 1 of the 40 questions of set csqa, e.g. csqa/q7 \(tree cose/q7\)"
    ):
        load_evaluation_questions([QuestionsConfig(set="csqa", path=file)], 0, {"cose/q7": render(question)})
    with pytest.raises(DataError, match=r"e.g. csqa/q3 \(tree csqa/q3\)"):
        load_evaluation_questions(
            [QuestionsConfig(set="csqa", path=file)], 0, {"csqa/q3": "a truncated text"}
        )
    sections = [QuestionsConfig(set="csqa", path=file)]
    questions = load_evaluation_questions(sections, 0, {"aqua/q3": "another text"})
    assert len(questions["csqa"]) == 40
    with pytest.raises(
        DataError,
        match=r"for 1 of the 40 questions of set csqa, e.g. csqa/q3 \(tree cose/q3\).* use another file, "
        "or give each of the sets cose and csqa, which share questions, a part of its own",
    ):
        load_evaluation_questions(
            [QuestionsConfig(set="csqa", path=file)], 0, {"cose/q3": "three options, not five"}
        )


def test_parts_of_a_set_are_joined_and_refused_if_they_share_questions(file):
    sections = [QuestionsConfig(set="csqa", path=file, part=part) for part in ([0, 2], [1, 2])]
    assert len(load_evaluation_questions(sections, 0, {})["csqa"]) == 40
    sections = [QuestionsConfig(set="csqa", path=file, part=[0, 2]), QuestionsConfig(set="csqa", path=file)]
    with pytest.raises(DataError, match="the parts of set csqa share questions"):
        load_evaluation_questions(sections, 0, {})


def test_a_part_without_questions_is_refused(tmp_path):
    file = write_csqa(tmp_path / "few.jsonl", [0])
    empty = next(k for k in range(2) if not load_questions("csqa", file, part=(k, 2))[0])
    with pytest.raises(DataError, match=rf"part \[{empty}, 2\] of set csqa holds no question"):
        load_evaluation_questions([QuestionsConfig(set="csqa", path=file, part=[empty, 2])], 0, {})


@pytest.fixture
def trees(tmp_path):
    """A folder of trees of the run, and one of trees that were grown before it."""
    for folder, name in (("run", "csqa/1"), ("earlier", "csqa/2")):
        append_trees(tmp_path / folder / "csqa.jsonl", [Tree(name, "csqa", "k", f"text of {name}", (), ())])
    return tmp_path


GROWN = {"csqa/1": "text of csqa/1"}
EARLIER = {"csqa/2": "text of csqa/2"}


@pytest.mark.parametrize("override", ["data={source: thoughts}", "seed=0"])
def test_trees_of_the_run_are_read_from_its_folder(trees, override):
    recipe = load_recipe("debug", [override, "thoughts={questions: [{set: csqa}]}"])
    assert tree_questions(recipe.data, trees / "run") == GROWN


@pytest.mark.parametrize("path", ["earlier", "earlier/csqa.jsonl"])
@pytest.mark.parametrize("override", ["data={{source: thoughts, path: {}}}", "data.trees={}"])
def test_earlier_trees_are_read_from_the_file_or_folder_of_the_recipe(trees, path, override):
    recipe = load_recipe("debug", [override.format(trees / path)])
    assert tree_questions(recipe.data, None) == EARLIER


def test_a_recipe_without_trees_has_no_questions_with_trees_and_a_folder_must_have_some(tmp_path):
    assert tree_questions(load_recipe("debug").data, None) == {}
    with pytest.raises(DataError, match="there is no file of trees"):
        tree_questions(load_recipe("debug").data, tmp_path / "none")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{questions: [{set: cqsa}]}",
            "evaluation.questions.questions.set 'cqsa' is not known; there are: aqua, chitchat, cose, csqa",
        ),
        ("{questions: []}", "evaluation.questions.questions"),
        ("{}", "evaluation.questions.questions' is missing"),
        ("{questions: [{set: csqa}], template: thoughts/anser}", "Did you mean 'thoughts/answer'?"),
        (
            "{questions: [{set: csqa}], template: thoughts/value}",
            "placeholder {thought} is not known in an answer template",
        ),
        ("{questions: [{set: csqa}], temperature: 0}", "evaluation.questions.temperature"),
        ("{questions: [{set: csqa}], samples: -1}", "evaluation.questions.samples"),
        ("{questions: [{set: csqa, part: [2, 2]}]}", "is not a part [k, n]"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_with_the_recipe(section, message):
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", [f"evaluation.questions={section}"])
    assert message in str(error.value)


def test_the_prompt_shows_the_question_and_the_format_of_the_answer_but_no_explanation():
    question = Question("1", "csqa", "Where?", PLACES, "B", "a secret reason", "Some context.")
    prompt = load_template("thoughts/answer", "answer").render(question=render(question))
    assert "Some context.\n\nWhere?\nA) dog\nB) a stand" in prompt
    assert "Answer: X" in prompt
    assert "secret" not in prompt


def test_the_placeholder_of_the_answers_format_is_no_answer():
    assert parse_answer("Answer: X", PLACES) is None
