"""Trees of thoughts: growth with scripted models, parsing of scores, the file, and small models."""

import functools
import json
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace

import httpx
import pytest
import torch

from components.alignment.thoughts import stored_trees
from components.alignment.thoughts.growth import TreeSettings, grow_trees
from components.alignment.thoughts.scores import Score, parse_score
from components.alignment.thoughts.stored_trees import (
    grow_missing_trees,
    load_thought_templates,
    settings_key,
)
from components.alignment.thoughts.tree_models import (
    ExpectedScores,
    Request,
    TreeModels,
    WrittenScores,
    sample_keys,
)
from components.concurrency import concurrent_parts
from components.config import ThoughtsConfig, UserError
from components.config.thoughts import EvaluatorOptions
from components.data.questions import Question, render, truncate_context
from components.data.trees import read_trees, tree_pairs
from components.models.backbone import load_tokenizer
from components.models.policy import Policy
from components.models.samples import Completion, Reply
from components.versions import THOUGHT_TREES

TEMPLATES = load_thought_templates("csqa")


def question_named(name):
    return Question(name, "csqa", f"What is {name}?", (("A", "this"), ("B", "that")), "A")


class ScriptedModels:
    """Writes t0, t1, ... in the order of the prompts, and scores by a table; the default is 5."""

    def __init__(self, scores, texts=None):
        self.scores = scores
        self.texts = texts or {}
        self.prompts = []
        self.scored = []

    def write(self, requests):
        names = [f"t{len(self.prompts) + n}" for n in range(len(requests))]
        self.prompts += [request.prompt for request in requests]
        return [self.texts.get(name, f"{name}\nmore text that is not part of it") for name in names]

    def score(self, requests):
        names = [request.prompt.split("Thought:\n")[1].splitlines()[0] for request in requests]
        self.scored.append(names)
        return [Score(self.scores.get(name, 5), 1) for name in names]


def grow_scripted(scores, config=None, texts=None):
    """Grow a tree by scripted models; gives the models and the tree."""
    models = ScriptedModels(scores, texts)
    settings = TreeSettings(config or ThoughtsConfig(depth=2), TEMPLATES, "key", 0)
    (tree,) = grow_trees([question_named("x")], models, {"csqa": settings})
    return models, tree


# --- Growth


def test_a_full_tree_is_grown_level_by_level_with_the_better_prefix_first():
    """t1 has a higher score than t0, so that t2 and t3 grow from t1, and t4 and t5 from t0."""
    _, tree = grow_scripted({"t0": 6, "t1": 8, "t2": 4, "t3": 9})
    assert [(n.number, n.parent, n.depth, n.thought, n.score) for n in tree.nodes] == [
        (0, -1, 1, "t0", 6),
        (1, -1, 1, "t1", 8),
        (2, 1, 2, "t2", 4),
        (3, 1, 2, "t3", 9),
        (4, 0, 2, "t4", 5),
        (5, 0, 2, "t5", 5),
    ]
    assert tree.path == (1, 3), "8 + 9 is the greatest sum of scores"
    assert tree.id == "csqa/x"
    assert tree.question == render(question_named("x"))


def test_prompts_show_the_thoughts_before_the_next_one():
    models, _ = grow_scripted({"t0": 6, "t1": 8})
    assert "(none yet)" in models.prompts[0]
    assert "1. t1" in models.prompts[2]
    assert "1. t0" in models.prompts[4]
    assert models.prompts[0].rstrip().endswith("Next thought:")


def test_a_beam_extends_the_best_prefixes_only_and_without_one_all_are_extended():
    models, tree = grow_scripted({"t0": 6, "t1": 8}, ThoughtsConfig(depth=3, beam=1))
    assert len(tree.nodes) == 6
    assert {node.parent for node in tree.nodes if node.depth == 2} == {1}
    assert len(models.prompts) == 6
    _, tree = grow_scripted({}, ThoughtsConfig(depth=3))
    assert len(tree.nodes) == 2 + 4 + 8


def test_empty_thoughts_and_those_without_a_score_are_not_extended_and_give_no_pairs():
    models, tree = grow_scripted({"t0": None, "t3": None}, texts={"t2": "  \n "})
    assert [node.parent for node in tree.nodes] == [-1, -1, 1, 1]
    empty = tree.nodes[2]
    assert (empty.thought, empty.asked, empty.score) == ("", 0, None)
    assert models.scored == [["t0", "t1"], ["t3"]]
    assert tree.path == (1,)
    _, tree = grow_scripted({"t0": None, "t1": None})
    assert tree.path == ()
    assert len(tree.nodes) == 2
    assert tree_pairs(tree, TEMPLATES.thought) == ([], Counter({"path ends early": 1}))


def test_a_context_that_is_too_long_loses_its_end_and_the_question_stays_complete(debug):
    tokenizer = load_tokenizer(debug.policy.backbone)
    question = replace(question_named("x"), context="A long trial was made. " * 20)
    truncated = truncate_context(question, tokenizer, 80)
    assert question.context.startswith(truncated.context)
    assert len(truncated.context) < len(question.context)
    assert replace(truncated, context=question.context) == question
    assert len(tokenizer.encode(render(truncated), add_special_tokens=False)) <= 80
    assert truncate_context(question, tokenizer, 1000) == question


# --- Parsing of scores


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8", 8),
        (" 10 ", 10),
        ("The rating is 3.", 3),
        ("thinking ...\n\nRating: 9\n", 9),
        ("1", 1),
        ("Score (1-10): 8", 8),
        ("Rating (from 1 to 10): 8.", 8),
        ("Score out of 10: 8", 8),
        ("**Score: 8 / 10**", 8),
        ("(8)", 8),
        ("\\boxed{8}", 8),
        ("Final rating: **8**", 8),
        ("Score: 8. It says why.", 8),
        ("8/10 - it says why", 8),
        ("8 because it says why", 8),
        ("8 (right)", 8),
        ("8 (out of 10)", 8),
        ("Rating: 10 out of 10", 10),
        ("<think>\n3\n</think>\n\n8", 8),
        ("<think>3</think> no </think> 4", 4),
        ("Score - 8", 8),
        ("8, as 8 of them are", 8),
        ("1 to 10: 8", None),
        ("1. The thought is good: 9", None),
        ("1) The thought", None),
        ("3: the thought", None),
        ("8/8", None),
        ("8-9", None),
        ("Score: 7-8", None),
        ("Score: 7, or 8", None),
        ("-3", None),
        ("Score -3", None),
        ("3 reasons why", None),
        ("3 (three) reasons", None),
        ("Score 1-10", None),
        ("Score: 8/10, not 9", None),
        ("8 or nine", None),
        ("8%", None),
        ("5.5", None),
        ("Answer: 4", None),
        ("<think>\n8", None),
        ("Score:", None),
        ("11", None),
        ("0", None),
        ("", None),
        ("ten", None),
        ("10/100", None),
        ("7,5", None),
        ("8\nor not", None),
    ],
)
def test_an_answer_is_parsed_to_a_score_from_1_to_10_or_to_none(text, score):
    assert parse_score(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("First, it names the place.\n2. Next, it", None),
        ("<think>\nIt is\n8", None),
        ("", None),
        ("8", 8),
        ("8\n\nThe thought says where", 8),
        ("**8**\n1. It says", 8),
        ("Score: 8/10\nBecause", 8),
        ("10", 10),
        ("1\nThe 1", 1),
        ("1\n", 1),
        ("1", None),
        ("Score: **1", None),
        ("8, because it", None),
        ("Score: 8. It says", None),
        ("8\n7\n6\n", None),
        ("8\n8\n8", 8),
        ("8/1", None),
    ],
)
def test_of_an_answer_that_was_cut_off_only_a_first_line_with_the_score_alone_is_parsed(text, score):
    assert parse_score(text, finished=False) == score


@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000,
        "(" * 200_000,
        "score" + " " * 200_000 + "x",
        "8" + ")" * 200_000 + "x",
        "8 (" + "(" * 200_000,
        "8\n" * 50_000 + "x",
        "</think>" * 30_000,
        "Score (" * 30_000,
        "8 because " + "1" * 200_000,
    ],
)
def test_the_longest_answers_are_parsed_in_less_than_two_seconds(text):
    start = time.process_time()
    for finished in (True, False):
        parse_score(text, finished)
    assert time.process_time() - start < 2


def test_scores_that_cannot_be_parsed_are_requested_again_up_to_the_number_of_retries():
    requests = []

    def write(prompts, keys, temperature, progress):
        requests.append(("".join(prompts), temperature, len(set(keys))))
        answers = {"a": "4", "b": "?" if len(requests) < 3 else "9"}
        return [Reply(answers.get(text, "so it is\n5"), text != "c") for text in prompts]

    scores = WrittenScores(SimpleNamespace(write=write), 2).score([Request(text, 0) for text in "abc"])
    assert scores == [(4, 1), (9, 3), (None, 3)]
    assert requests == [("abc", 0.0, 3), ("bc", 1.0, 2), ("bc", 1.0, 2)]


# --- The file


class SeededModels(ScriptedModels):
    """Writes texts that are a function of the seed and the position."""

    def write(self, requests):
        return [f"{seed} {position}" for seed, position in sample_keys(requests)]


QUESTIONS = [question_named(name) for name in "abcd"]


def load_seeded():
    return SeededModels({})


def grow_file(questions, path, key="k", load=load_seeded):
    """Grow the missing trees of a file with seed 7, for two questions at a time."""
    settings = {"csqa": TreeSettings(ThoughtsConfig(depth=2), TEMPLATES, key, 7)}
    return grow_missing_trees(questions, path, load, settings, 2)


def refuse_to_load():
    pytest.fail("the models were loaded although no tree is missing")


def test_a_stopped_stage_resumes_with_the_remaining_questions_and_gives_the_same_bytes(tmp_path):
    complete = tmp_path / "complete.jsonl"
    stopped = tmp_path / "stopped.jsonl"
    trees = grow_file(QUESTIONS, complete)
    grow_file(QUESTIONS[:2], stopped)
    with stopped.open("ab") as file:
        file.write(b'{"id": "csqa/c", "no')  # a kill within a line
    assert len(read_trees(stopped)) == 2
    assert grow_file(QUESTIONS, stopped) == trees
    assert stopped.read_bytes() == complete.read_bytes()


def test_no_model_is_loaded_for_trees_of_the_file_which_are_returned_in_the_order_of_the_questions(tmp_path):
    trees = grow_file(QUESTIONS, tmp_path / "trees.jsonl")
    assert [tree.id for tree in trees] == [f"csqa/{name}" for name in "abcd"]
    assert grow_file(QUESTIONS[::-1], tmp_path / "trees.jsonl", load=refuse_to_load) == trees[::-1]


@pytest.mark.parametrize(
    ("text", "key"), [({"options": (("A", "another"), ("B", "text"))}, "k"), ({}, "other")]
)
def test_another_text_or_other_settings_give_another_tree_beside_the_earlier_one(tmp_path, text, key):
    path = tmp_path / "trees.jsonl"
    trees = grow_file(QUESTIONS, path)
    changed = replace(QUESTIONS[0], **text)
    (tree,) = grow_file([changed], path, key)
    assert (tree.question, tree.key) == (render(changed), key)
    assert grow_file(QUESTIONS[:1], path, load=refuse_to_load) == trees[:1]
    assert len(read_trees(path)) == 5


@pytest.mark.parametrize(
    ("thoughts", "lora"),
    [
        ({"evaluator": EvaluatorOptions(timeout=1.0, concurrency=9)}, {}),
        ({"question_batch_size": 1}, {}),
        ({}, {"r": 99}),
    ],
)
def test_the_key_of_trees_does_not_depend_on_an_endpoints_pace_batches_or_the_policys_lora(
    debug, thoughts, lora
):
    policy = debug.policy.model_copy(update={"lora": debug.policy.lora.model_copy(update=lora)})
    key = settings_key(ThoughtsConfig(**thoughts), policy, TEMPLATES, 0)
    assert key == settings_key(ThoughtsConfig(), debug.policy, TEMPLATES, 0)


def test_the_key_of_trees_depends_on_growth_policy_templates_and_seed(debug):
    config = ThoughtsConfig()
    policy = debug.policy.model_copy(update={"max_prompt_tokens": 99})
    keys = {
        settings_key(config, debug.policy, TEMPLATES, 0),
        settings_key(config.model_copy(update={"depth": 2}), debug.policy, TEMPLATES, 0),
        settings_key(config, policy, TEMPLATES, 0),
        settings_key(config, debug.policy, load_thought_templates("aqua"), 0),
        settings_key(config, debug.policy, TEMPLATES, 1),
    }
    assert len(keys) == 5


def test_a_new_version_of_the_parser_changes_the_keys_of_parsed_scores_only(debug, monkeypatch):
    parsed = ThoughtsConfig()
    expected = ThoughtsConfig(evaluator=EvaluatorOptions(read="expected"))
    keys = [settings_key(config, debug.policy, TEMPLATES, 0) for config in (parsed, expected)]
    versions = THOUGHT_TREES | {"text": THOUGHT_TREES["text"] + 1}
    monkeypatch.setattr(stored_trees, "THOUGHT_TREES", versions)
    assert settings_key(parsed, debug.policy, TEMPLATES, 0) != keys[0]
    assert settings_key(expected, debug.policy, TEMPLATES, 0) == keys[1]


def test_each_set_has_its_own_template_and_an_unknown_set_the_default_one():
    sets = ("aqua", "cose", "csqa", "mathqa", "medmcqa", "medqa", "piqa", "pubmedqa")
    assert len({load_thought_templates(name).thought.pieces for name in sets}) == 8
    assert load_thought_templates("mine").thought.name == "thoughts/thought_default"


# --- Models


THOUGHT_PROMPTS = ["a", "a thought", "another thought of more words", "a " * 40, "b " * 40, "the last one, 8"]


@contextmanager
def recorded_rows(model):
    """The number of rows of each call of a model."""
    rows = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


@pytest.fixture(scope="module", params=["text", "expected"])
def real_models(request, debug):
    """Real models, and the settings of trees in which every thought is extended."""
    options = {"model": "tiny-random", "read": request.param, "max_prompt_tokens": 2000}
    evaluator = EvaluatorOptions(**options, max_new_tokens=1, retries_unread=2)
    config = ThoughtsConfig(depth=2, max_thought_tokens=6, evaluator=evaluator)
    policy = debug.policy.model_copy(update={"template": "thoughts/policy", "max_prompt_tokens": 2000})
    models = TreeModels(policy, config, "cpu")
    write_digits(evaluating_policy(models))
    return models, {"csqa": TreeSettings(config, TEMPLATES, "k", 3)}


def evaluating_policy(models):
    evaluator = models.evaluator
    return evaluator.policy if isinstance(evaluator, ExpectedScores) else evaluator.model


def write_digits(policy):
    """Let a model with random weights write a 0, which is unreadable, and any digit at temperature 1."""
    digits = [policy.tokenizer.encode(str(n), add_special_tokens=False)[0] for n in range(10)]
    head = policy.model.get_output_embeddings().weight
    with torch.no_grad():
        head[digits] = 20 * head[digits[6]]
        head[digits[0]] *= 1.02


MANY = [question_named(f"{name} " * n) for n, name in enumerate(["one", "two", "three", "four", "five"], 1)]


def test_trees_grown_together_are_those_grown_one_at_a_time_by_fewer_and_larger_calls(real_models):
    models, settings = real_models
    with recorded_rows(evaluating_policy(models).model) as rows:
        together = grow_trees(MANY, models, settings)
    with recorded_rows(evaluating_policy(models).model) as rows_alone:
        alone = [grow_trees([question], models, settings)[0] for question in MANY]
    assert len(rows) < len(rows_alone)
    assert sum(rows) / len(rows) > sum(rows_alone) / len(rows_alone)
    nodes = [node for tree in alone for node in tree.nodes]
    assert len({node.thought for node in nodes}) > len(MANY)
    assert all("\n" not in node.thought for node in nodes)
    assert len({node.score for node in nodes}) > 3
    assert all(node.score is None or 1 <= node.score <= 10 for node in nodes)
    assert {node.depth for node in nodes} == {1, 2}
    if settings["csqa"].config.evaluator.read == "text":
        assert len({node.asked for node in nodes}) > 1
    for tree, expected in zip(together, alone, strict=True):
        assert [replace(node, score=None) for node in tree.nodes] == [
            replace(node, score=None) for node in expected.nodes
        ]
        scores = [node.score or 0 for node in expected.nodes]
        assert [node.score or 0 for node in tree.nodes] == pytest.approx(scores, rel=1e-5)
        assert tree.path == expected.path


def test_models_in_turn_grow_the_trees_of_models_that_stay_and_are_never_in_memory_together(debug):
    evaluator = EvaluatorOptions(model="tiny-random", read="expected", max_prompt_tokens=2000)
    config = ThoughtsConfig(depth=2, max_thought_tokens=6, evaluator=evaluator)
    policy = debug.policy.model_copy(update={"template": "thoughts/policy", "max_prompt_tokens": 2000})
    models = [
        TreeModels(policy, config.model_copy(update={"loading": m}), "cpu") for m in ("together", "in_turn")
    ]
    settings = {"csqa": TreeSettings(config, TEMPLATES, "k", 3)}
    trees = [grow_trees(MANY[:2], one, settings) for one in models]
    assert trees[0] == trees[1]
    in_turn = models[1]
    first = weakref.ref(in_turn.evaluator)
    assert in_turn.evaluator is first()
    writer = weakref.ref(in_turn.writer)
    assert first() is None
    assert in_turn.evaluator is not None
    assert writer() is None


def test_how_models_are_loaded_is_no_part_of_the_trees_key(debug):
    configs = [ThoughtsConfig(loading=loading) for loading in ("together", "in_turn")]
    keys = {settings_key(config, debug.policy, TEMPLATES, 0) for config in configs}
    assert len(keys) == 1


def test_models_in_turn_need_an_evaluator_in_this_process():
    with pytest.raises(ValueError, match=r"thoughts.loading 'in_turn' is for an evaluator in this process"):
        ThoughtsConfig(loading="in_turn", evaluator={"base_url": "http://127.0.0.1:1/v1"})


def test_a_run_that_is_killed_in_a_batch_resumes_to_the_same_bytes(real_models, tmp_path):
    """At the fourth call, the second level of the second batch, the first batch is in the file."""
    models, settings = real_models
    calls = []

    def score_until_killed(requests):
        calls.append(requests)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return models.score(requests)

    complete = tmp_path / "complete.jsonl"
    stopped = tmp_path / "stopped.jsonl"
    killed = SimpleNamespace(write=models.write, score=score_until_killed)
    grow_missing_trees(MANY, complete, lambda: models, settings, 2)
    with pytest.raises(KeyboardInterrupt):
        grow_missing_trees(MANY, stopped, lambda: killed, settings, 2)
    assert [tree.id for tree in read_trees(stopped)] == [f"csqa/{question.id}" for question in MANY[:2]]
    grow_missing_trees(MANY, stopped, lambda: models, settings, 2)
    assert stopped.read_bytes() == complete.read_bytes()


@pytest.fixture
def expected_evaluator():
    options = EvaluatorOptions(model="tiny-random", read="expected", max_prompt_tokens=200)
    return ExpectedScores(Policy(options.local, "cpu"))


@pytest.fixture
def written_evaluator():
    options = EvaluatorOptions(model="tiny-random", max_prompt_tokens=200, max_new_tokens=2)
    return WrittenScores(Policy(options.local, "cpu"), 1)


def test_a_tree_by_real_models_is_a_function_of_the_seed_and_gives_pairs(real_models):
    models, settings = real_models
    first, again, different = (
        grow_trees([question_named("x")], models, {"csqa": replace(settings["csqa"], seed=seed)})[0]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != different
    pairs, _ = tree_pairs(first, TEMPLATES.thought)
    assert pairs
    json.dumps([asdict(pair) for pair in pairs])


def expected_by_full_passes(evaluator, prompt):
    """The expected score of a prompt from a pass over it, and another one over it with a "1"."""
    ids = evaluator.policy.encode(prompt)
    *digits, ten = evaluator._numbers
    with torch.no_grad():
        first, second = (
            evaluator.policy.model(input_ids=torch.tensor([row])).logits[0, -1].double().softmax(-1)
            for row in (ids, [*ids, ten[0]])
        )
    mass = {number: float(first[token]) for number, (token,) in enumerate(digits, 1)}
    zero = float(second[ten[1]])
    mass |= {1: mass[1] * (1 - zero), 10: mass[1] * zero}
    return sum(number * share for number, share in mass.items()) / sum(mass.values())


def test_expected_scores_count_a_one_and_a_zero_as_ten_in_any_batch_and_any_order(expected_evaluator):
    assert [len(number) for number in expected_evaluator._numbers] == [1] * 9 + [2]
    scores = expected_evaluator.score([Request(prompt, 0) for prompt in THOUGHT_PROMPTS])
    alone = [expected_by_full_passes(expected_evaluator, prompt) for prompt in THOUGHT_PROMPTS]
    assert scores == [(pytest.approx(score, rel=1e-5), 1) for score in alone]
    requests = [Request(prompt, 0) for prompt in THOUGHT_PROMPTS]
    scores = expected_evaluator.score([*requests, requests[0]])
    assert scores[0] == scores[-1]
    assert expected_evaluator.score(requests[::-1]) == scores[-2::-1]


def test_expected_scores_of_many_thoughts_take_full_batches(expected_evaluator):
    with recorded_rows(expected_evaluator.policy.model) as rows:
        expected_evaluator.score([Request(f"thought {n}", 0) for n in range(20)])
    size = expected_evaluator.policy.config.generation_batch_size // concurrent_parts(torch.device("cpu"))
    assert sorted(rows, reverse=True) == [*[size] * (20 // size), *([20 % size] if 20 % size else [])]


def test_a_model_that_writes_no_number_is_requested_as_often_as_the_options_state(written_evaluator):
    requests = [Request("one", 5), Request("two", 5)]
    scores = written_evaluator.score(requests)
    assert scores == written_evaluator.score(requests)
    for value, attempts in scores:
        assert (value is None and attempts == 2) or 1 <= value <= 10


@pytest.mark.parametrize(("finished", "score"), [(True, (2, 1)), (False, (None, 2))])
def test_a_models_answer_is_parsed_as_finished_or_as_cut_off(written_evaluator, monkeypatch, finished, score):
    text = "It says where.\n2"
    tokenizer = written_evaluator.model.tokenizer
    end = [tokenizer.eos_token_id] if finished else []
    ids = (*tokenizer.encode(text, add_special_tokens=False), *end)
    answers = [[Completion(ids, text, finished)]]
    monkeypatch.setattr(written_evaluator.model, "generate", lambda *_, **__: answers)
    assert written_evaluator.score([Request("x", 0)]) == [score]


@pytest.mark.parametrize(
    ("reason", "score"), [("stop", 2), ("length", None), ("content_filter", None), (None, 2), ([], 2)]
)
def test_an_endpoints_answer_is_parsed_as_finished_or_as_cut_off(debug, monkeypatch, reason, score):
    choice = {"message": {"content": "It says where.\n2"}}
    if reason is not None:
        choice["finish_reason"] = reason
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"choices": [choice]}))
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=transport))
    options = EvaluatorOptions(base_url="http://127.0.0.1:1/v1", model="m", retries_unread=0)
    models = TreeModels(debug.policy, ThoughtsConfig(evaluator=options), "cpu")
    assert models.score([Request("x", 0)]) == [(score, 1)]


def test_an_endpoint_has_no_expected_scores_and_is_named_if_it_cannot_be_reached(debug):
    with pytest.raises(ValueError, match="read 'expected' needs the probabilities .* set read to 'text'"):
        EvaluatorOptions(base_url="http://127.0.0.1:1/v1", read="expected")
    options = EvaluatorOptions(base_url="http://127.0.0.1:1/v1", model="m", retries=0)
    models = TreeModels(debug.policy, ThoughtsConfig(evaluator=options), "cpu")
    assert isinstance(models.writer, Policy)
    with pytest.raises(
        UserError, match="the evaluator's endpoint http://127.0.0.1:1/v1/chat/completions gave no answer"
    ):
        models.score([Request("x", 0)])
