"""Trees of thoughts by a scripted writer and evaluator, worked out by hand; the pairs; the file; and real small models."""

import functools
import json
import time
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from components.alignment import thoughts
from components.alignment.thoughts import (
    ModelEvaluator,
    PolicyWriter,
    ThoughtsError,
    ask_again,
    build_models,
    grow,
    grow_all,
    parse_score,
    set_templates,
    settings_key,
)
from components.config import EvaluatorOptions, ThoughtsConfig
from components.data.questions import Question, render
from components.data.trees import read_trees, tree_pairs
from components.models.chat import Reply
from components.models.policy import Completion


def asked_for(name):
    return Question(name, "csqa", f"What is {name}?", (("A", "this"), ("B", "that")), "A")


class Script:
    """Proposes t0, t1, ... in the order of asking, and scores by a table."""

    def __init__(self, scores, texts=None):
        self.scores, self.texts, self.given, self.seen, self.calls = scores, texts or {}, 0, [], []

    def write(self, prompts, seed):
        self.seen += prompts
        names = [f"t{self.given + n}" for n in range(len(prompts))]
        self.given += len(prompts)
        return [self.texts.get(name, f"{name}\nsome more that is not part of it") for name in names]

    def score(self, prompts, seed):
        found = [prompt.split("Thought:\n")[1].splitlines()[0] for prompt in prompts]
        self.calls.append(found)
        return [(self.scores.get(name, 5), 1) for name in found]


TEMPLATES = set_templates("csqa")


def grown(scores, config=None, texts=None, question=None):
    script = Script(scores, texts)
    return script, grow(question or asked_for("x"), script, script, config or ThoughtsConfig(depth=2), TEMPLATES, "key", 0)


# --- growing

def test_a_full_tree_is_grown_level_by_level_and_the_best_path_has_the_greatest_sum():
    #  t0 (6) -> t2 (4), t3 (9);   t1 (8) -> t4 (5), t5 (5):  15 against 13
    script, tree = grown({"t0": 6, "t1": 8, "t2": 4, "t3": 9, "t4": 5, "t5": 5})
    assert [(n.number, n.parent, n.depth, n.thought, n.score) for n in tree.nodes] == [
        (0, -1, 1, "t0", 6), (1, -1, 1, "t1", 8), (2, 1, 2, "t2", 4), (3, 1, 2, "t3", 9), (4, 0, 2, "t4", 5), (5, 0, 2, "t5", 5)], "the better prefix is carried on first"
    assert tree.path == (1, 3) and tree.id == "csqa/x" and tree.question == render(asked_for("x"))
    assert "(none yet)" in script.seen[0] and "1. t1" in script.seen[2] and "1. t0" in script.seen[4] and script.seen[0].rstrip().endswith("Next thought:")


def test_a_beam_carries_on_the_best_prefixes_only():
    script, tree = grown({"t0": 6, "t1": 8}, ThoughtsConfig(depth=3, beam=1))
    assert len(tree.nodes) == 6 and {n.parent for n in tree.nodes if n.depth == 2} == {1} and len(script.seen) == 6
    assert len(grown({}, ThoughtsConfig(depth=3))[1].nodes) == 2 + 4 + 8


def test_what_cannot_be_scored_is_left_out_with_what_would_have_grown_from_it_and_empty_thoughts_are_not_asked_about():
    script, tree = grown({"t0": None, "t3": None}, texts={"t2": "  \n "})
    assert [n.parent for n in tree.nodes if n.depth == 2] == [1, 1] and tree.nodes[2].thought == "" and tree.nodes[2].asked == 0 and tree.nodes[2].score is None
    assert script.calls == [["t0", "t1"], ["t3"]] and tree.path == (1,)
    _, nothing = grown({"t0": None, "t1": None})
    assert nothing.path == () and len(nothing.nodes) == 2 and tree_pairs(nothing, TEMPLATES[0]) == ([], Counter({"path ends early": 1}))


# --- scores

@pytest.mark.parametrize(("text", "score"), [
    ("8", 8), (" 10 ", 10), ("Score: 7", 7), ("**8/10**", 8), ("8 out of 10, because", 8), ("The rating is 3.", 3), ("thinking ...\n\nRating: 9\n", 9), ("1", 1), ("5, I think", 5),
    ("Score (1-10): 8", 8), ("Rating (from 1 to 10): 8.", 8), ("Score out of 10: 8", 8), ("Score: 8/10", 8), ("**Score: 8 / 10**", 8), ("**8**", 8), ("(8)", 8), ("\\boxed{8}", 8), ("Final rating: **8**", 8),
    ("Score: 8. It says why.", 8), ("8/10 - it says why", 8), ("8 because it says why", 8), ("8 (right)", 8), ("8 (out of 10)", 8), ("Rating: 10 out of 10", 10), ("</think> 8", 8),
    ("<think>\n3\n</think>\n\n8", 8), ("<think>3</think> no </think> 4", 4), ("Score - 8", 8), ("8, as 8 of them are", 8),
    ("1 to 10: 8", None), ("1. The thought is good: 9", None), ("2. Next, the thought", None), ("1) The thought", None), ("3: the thought", None), ("7 or 8", None), ("7/8", None), ("8/8", None), ("8-9", None), ("8 - 9", None),
    ("7 to 8", None), ("Score: 7-8", None), ("Score: 7, or 8", None), ("-3", None), ("−3", None), ("Score: -3", None), ("Score -3", None), ("3 reasons why", None), ("10 being best: 4", None),
    ("3 (three) reasons", None), ("Score 1-10", None), ("Score: 8/10, not 9", None), ("Rating: 1 to 5", None), ("8 or nine", None), ("8%", None), ("5.5", None), ("Answer: 4", None), ("<think>\n8", None),
    ("Score:", None), ("</think>", None), ("11", None), ("0", None), ("7.5", None), ("8/9", None), ("between 6 and 8", None), ("", None), ("ten", None), ("-", None), ("100", None), ("10/100", None), ("7,5", None), ("8\nor not", None)])
def test_every_answer_gives_a_score_from_1_to_10_or_none(text, score):
    assert parse_score(text) == score


@pytest.mark.parametrize(("text", "score"), [
    ("First, it names the place.\n2. Next, it", None), ("Let me see.\n2", None), ("Rating is a matter of 3", None), ("<think>\nIt is\n8", None), ("2. Next, it", None), ("The thought", None), ("", None),
    ("8", 8), ("8\n\nThe thought says where", 8), ("**8**\n1. It says", 8), ("Score: 8/10\nBecause", 8), ("8.\nIt", 8), ("so</think>\n8\nas", 8), ("10", 10), ("1\nThe", 1), ("1\n", 1),
    ("1", None), ("Score: **1", None), ("8, because it", None), ("Score: 8. It says", None), ("8\n7\n6\n", None), ("8\n8\n8", 8), ("8/1", None)])
def test_of_an_answer_that_was_cut_off_only_a_score_that_stands_first_and_by_itself_is_read(text, score):
    assert parse_score(text, finished=False) == score


@pytest.mark.parametrize("text", [" " * 200_000, "(" * 200_000, "score" + " " * 200_000 + "x", "8" + " " * 200_000 + "x", "8" + ")" * 200_000 + "x", "8 (" + "(" * 200_000, "the " * 50_000, "9" * 200_000,
                                  "8 " + "8" * 200_000, "8\n" * 50_000 + "x", "</think>" * 30_000, "Score (" * 30_000, "\\boxed{" * 30_000, "8 because " + "1" * 200_000])
def test_the_longest_answers_are_read_in_no_time(text):
    begun = time.process_time()
    for finished in (True, False):
        parse_score(text, finished)
    assert time.process_time() - begun < 2


def test_unreadable_scores_are_asked_again_and_then_given_up():
    asked = []

    def ask(texts, attempt):
        asked.append((tuple(texts), attempt))
        return [Reply({"a": "4", "b": "?" if attempt < 2 else "9", "c": "so it is\n5"}[text], text != "c") for text in texts]

    assert ask_again(ask, ["a", "b", "c"], 2) == [(4, 1), (9, 3), (None, 3)]
    assert asked == [(("a", "b", "c"), 0), (("b", "c"), 1), (("b", "c"), 2)]


# --- the file

def test_a_stage_that_was_stopped_goes_on_with_the_questions_that_are_left_and_gives_the_same_bytes(tmp_path):
    questions, config, key = [asked_for(name) for name in "abcd"], ThoughtsConfig(depth=2), {"csqa": "k"}
    whole, stopped, built = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl", []

    class Named(Script):
        def write(self, prompts, seed):
            return [f"{seed} {n}" for n in range(len(prompts))]

    def models():
        built.append(1)
        return Named({}), Named({})

    trees = grow_all(questions, whole, models, config, {"csqa": TEMPLATES}, key, 7)
    assert [t.id for t in trees] == [f"csqa/{name}" for name in "abcd"]
    grow_all(questions[:2], stopped, models, config, {"csqa": TEMPLATES}, key, 7)
    with stopped.open("ab") as file:
        file.write(b'{"id": "csqa/c", "no')  # a kill within a line
    assert len(read_trees(stopped)) == 2
    assert grow_all(questions, stopped, models, config, {"csqa": TEMPLATES}, key, 7) == trees and stopped.read_bytes() == whole.read_bytes()
    count = len(built)
    assert grow_all(questions[::-1], whole, models, config, {"csqa": TEMPLATES}, key, 7) == trees[::-1] and len(built) == count, "nothing is built where nothing is missing"
    other = [replace(questions[0], options=(("A", "another"), ("B", "text")))]
    assert grow_all(other, whole, models, config, {"csqa": TEMPLATES}, key, 7)[0].question == render(other[0]), "another text under the same id is another tree"
    assert grow_all(questions[:1], whole, models, config, {"csqa": TEMPLATES}, key, 7) == trees[:1]
    assert grow_all(questions[:1], whole, models, config, {"csqa": TEMPLATES}, {"csqa": "other"}, 7)[0].key == "other" and len(read_trees(whole)) == 6


def test_trees_belong_to_the_settings_that_change_them_and_not_to_an_endpoints_pace(monkeypatch):
    config = ThoughtsConfig()
    key = settings_key(config, {"name": "x"}, TEMPLATES, 0)
    paced = config.model_copy(update={"evaluator": config.evaluator.model_copy(update={"timeout": 1.0, "concurrency": 9})})
    assert settings_key(paced, {"name": "x"}, TEMPLATES, 0) == key
    others = [settings_key(config.model_copy(update={"depth": 2}), {"name": "x"}, TEMPLATES, 0), settings_key(config, {"name": "y"}, TEMPLATES, 0),
              settings_key(config, {"name": "x"}, set_templates("aqua"), 0), settings_key(config, {"name": "x"}, TEMPLATES, 1)]
    assert len({key, *others}) == 5
    expected = config.model_copy(update={"evaluator": EvaluatorOptions(read="expected")})
    before = settings_key(expected, {"name": "x"}, TEMPLATES, 0)
    monkeypatch.setattr(thoughts, "VERSIONS", thoughts.VERSIONS | {"text": thoughts.VERSIONS["text"] + 1})
    assert settings_key(config, {"name": "x"}, TEMPLATES, 0) != key, "scores are read otherwise"
    assert settings_key(expected, {"name": "x"}, TEMPLATES, 0) == before, "and probabilities as before"


def test_each_set_has_a_template_of_its_own_and_unknown_ones_the_common_one():
    sets = ("aqua", "cose", "csqa", "mathqa", "medmcqa", "medqa", "piqa", "pubmedqa")
    assert len({set_templates(name)[0].pieces for name in sets}) == 8 and set_templates("mine")[0].name == "thoughts/thought_default"


# --- models

def test_a_tree_by_real_models_is_the_same_each_time_and_has_readable_lines(debug):
    config = ThoughtsConfig(depth=2, max_thought_tokens=6, evaluator=EvaluatorOptions(model="tiny-random", read="expected", max_prompt_tokens=2000))
    policy = debug.policy.model_copy(update={"template": "thoughts/policy", "max_prompt_tokens": 2000})
    trees = [grow(asked_for("x"), *build_models(policy, config, "cpu"), config, TEMPLATES, "k", seed) for seed in (0, 0, 1)]
    assert trees[0] == trees[1] != trees[2]
    scores = [n.score for n in trees[0].nodes if n.score is not None]
    assert scores and all(1 <= score <= 10 for score in scores) and len(set(scores)) > 1 and all("\n" not in n.thought for n in trees[0].nodes)
    assert json.loads(json.dumps(tree_pairs(trees[0], TEMPLATES[0])[0]))


def test_the_expected_score_is_the_mean_by_probability_with_ten_as_a_one_that_goes_on(debug):
    evaluator = ModelEvaluator(EvaluatorOptions(model="tiny-random", read="expected", max_prompt_tokens=200), "cpu")
    ids, numbers = evaluator.policy.encode("a thought"), evaluator._numbers
    assert [len(n) for n in numbers] == [1] * 9 + [2]
    first = evaluator._next(ids)
    onward = float(evaluator._next([*ids, numbers[0][0]])[numbers[9][1]])
    shares = [float(first[n[0]]) for n in numbers[:9]]
    mass = {1: shares[0] * (1 - onward), 10: shares[0] * onward} | {n: shares[n - 1] for n in range(2, 10)}
    expected = sum(n * m for n, m in mass.items()) / sum(mass.values())
    assert evaluator.score(["a thought"], 0) == [(pytest.approx(expected), 1)]


def test_an_evaluator_here_that_writes_no_number_is_asked_as_often_as_the_options_say():
    evaluator = ModelEvaluator(EvaluatorOptions(model="tiny-random", max_prompt_tokens=200, max_new_tokens=2, retries_unread=1), "cpu")
    scored = evaluator.score(["one", "two"], 5)
    assert scored == evaluator.score(["one", "two"], 5) and all((score is None and times == 2) or 1 <= score <= 10 for score, times in scored)


def test_a_models_answer_is_read_as_what_it_is_ended_or_cut_off(monkeypatch):
    evaluator = ModelEvaluator(EvaluatorOptions(model="tiny-random", max_prompt_tokens=200, retries_unread=0), "cpu")
    ids = evaluator.policy.tokenizer.encode("It says where.\n2", add_special_tokens=False)
    for finished, score in ((True, 2), (False, None)):
        monkeypatch.setattr(thoughts, "complete", lambda *_, finished=finished, **__: [[Completion(tuple(ids), "It says where.\n2", finished)]])
        assert evaluator.score(["x"], 0) == [(score, 1)]


@pytest.mark.parametrize(("reason", "score"), [("stop", 2), ("length", None), ("content_filter", None), (None, 2), ([], 2)])
def test_an_endpoint_says_whether_its_answer_was_cut_off(monkeypatch, reason, score):
    answer = {"choices": [{"message": {"content": "It says where.\n2"}} | ({} if reason is None else {"finish_reason": reason})]}
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answer))))
    evaluator = thoughts.EndpointEvaluator(EvaluatorOptions(base_url="http://127.0.0.1:1/v1", model="m", retries_unread=0))
    assert evaluator.score(["x"], 0) == [(score, 1)]


def test_an_endpoint_has_no_probabilities_and_one_that_is_not_there_is_one_sentence(debug):
    with pytest.raises(ValueError, match="read 'expected' needs the probabilities of a model here"):
        EvaluatorOptions(base_url="http://127.0.0.1:1/v1", read="expected")
    config = ThoughtsConfig(evaluator=EvaluatorOptions(base_url="http://127.0.0.1:1/v1", model="m", retries=0))
    writer, evaluator = build_models(debug.policy, config, "cpu")
    assert isinstance(writer, PolicyWriter)
    with pytest.raises(ThoughtsError, match="the evaluator's endpoint http://127.0.0.1:1/v1/chat/completions gave no answer"):
        evaluator.score(["x"], 0)
