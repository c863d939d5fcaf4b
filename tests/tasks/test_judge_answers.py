"""Judging answers: any judge's verdicts become win rates, what a judge wrote is kept, and a judge in words is told the task."""

import json
import logging
from types import SimpleNamespace

import numpy as np

from components.data.templates import load as load_template
from components.evaluation import autoj
from components.evaluation.judges import JUDGES
from components.evaluation.winrate import Verdict
from tasks import benchmark, evaluation

ANSWERS = [{"prompt_id": f"p{i}", "prompt": f"query {i}", "references": [f"human {i}"], "raw": {"text": f"raw {i}"}, "aligned": {"text": f"aligned {i}"}} for i in range(3)]


class Terse:
    """A judge with nothing but verdicts: the later word in the alphabet is worse."""

    description = "terse"

    def __init__(self, *given):
        Terse.policy = given[-1]

    def compare(self, comparisons):
        return [Verdict.FIRST if c.first < c.second else Verdict.SECOND for c in comparisons]


class Wordy(Terse):
    """One that writes, too."""

    def __init__(self, *_):
        self.texts, self.figures = [], {"judge_shortened": 0}

    def compare(self, comparisons):
        self.texts += [{"prompt": c.prompt, "text": "because"} for c in comparisons]
        return super().compare(comparisons)


def judged(debug, tmp_path, monkeypatch, judge):
    monkeypatch.setitem(JUDGES, "mine", judge)
    monkeypatch.setattr(evaluation, "get_run_logger", lambda: logging.getLogger("test"))
    judge_config = debug.evaluation.judge.model_copy(update={"kind": "mine"})
    recipe = debug.model_copy(update={"evaluation": debug.evaluation.model_copy(update={"judge": judge_config})})
    (tmp_path / "answers.json").write_text(json.dumps(ANSWERS))
    return evaluation.judge_answers.fn(recipe, tmp_path, tmp_path, tmp_path / "answers.json")


def test_a_judge_without_figures_or_texts_gives_win_rates(debug, tmp_path, monkeypatch):
    result = judged(debug, tmp_path, monkeypatch, Terse)
    assert result["judge_figures"] == {} and not (tmp_path / "judgements.json").exists()
    assert {name: c["win_rate"] for name, c in result["contests"].items()} == {"aligned_vs_raw": 1.0, "aligned_vs_human": 1.0, "raw_vs_human": 0.0}


def test_what_a_judge_wrote_is_kept_beside_the_answers(debug, tmp_path, monkeypatch):
    result = judged(debug, tmp_path, monkeypatch, Wordy)
    texts = json.loads((tmp_path / "judgements.json").read_text())
    assert len(texts) == 18 and texts[0] == {"prompt": "query 0", "text": "because"} and result["judge_figures"] == {"judge_shortened": 0}


def in_words(recipe, monkeypatch):
    """The recipe with Auto-J on the tiny model, which likes whatever comes first."""
    monkeypatch.setattr(autoj, "complete", lambda model, tokenizer, encoded, *_, **__: [[SimpleNamespace(text="So, the final decision is Response 1")] for _ in encoded])
    monkeypatch.setattr(evaluation, "get_run_logger", lambda: logging.getLogger("test"))
    judge = recipe.evaluation.judge.model_copy(update={"kind": "autoj", "options": {"model": "tiny-random", "max_prompt_tokens": 1600, "max_new_tokens": 6}})
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"judge": judge})})


def test_a_judge_in_words_is_asked_what_the_policy_was_asked_and_not_the_bare_prompt(debug, tmp_path, monkeypatch):
    (tmp_path / "answers.json").write_text(json.dumps(ANSWERS))
    evaluation.judge_answers.fn(in_words(debug, monkeypatch), tmp_path, tmp_path, tmp_path / "answers.json")
    texts = json.loads((tmp_path / "judgements.json").read_text())
    assert [row["prompt"] for row in texts[:3]] == [f"Write a summary of the text in one paragraph of at most 50 words.\n\nquery {i}" for i in range(3)]


def test_a_contest_of_two_policies_is_judged_on_what_both_were_asked(debug, tmp_path, monkeypatch):
    recipe, told = in_words(debug, monkeypatch), []
    write = autoj.LocalModel.write
    monkeypatch.setattr(autoj.LocalModel, "write", lambda self, comparisons: (told.extend(autoj.query(self.policy, c.prompt) for c in comparisons), write(self, comparisons))[1])
    for arm in ("ours", "theirs"):
        (tmp_path / arm).mkdir()
        (tmp_path / arm / "answers-aligned.json").write_text(json.dumps([{"prompt_id": "p", "prompt": "a post", "text": arm}]))
    monkeypatch.setattr(benchmark, "arm_run", lambda folder, arm, seed: SimpleNamespace(recipe=lambda: recipe, evaluation=folder / arm, prepared=folder))
    benchmark.judge_contest.fn(tmp_path, "ours", "theirs", 0, tmp_path)
    assert json.loads(benchmark.contest_file(tmp_path, "ours", "theirs", 0).read_text())["verdicts"] == ["tie"]
    assert told == ["Write a summary of the text in one paragraph of at most 50 words.\n\na post"] * 2


def test_the_curve_gives_the_share_that_the_selectors_and_the_judge_prefer_to_the_raw_policy(debug, tmp_path, monkeypatch):
    """Three selectors of which two like 'good' and one does not; the judge likes what comes first in the alphabet."""
    from contextlib import contextmanager

    import torch

    from components.models.adapters import AdapterStore

    class Selector:
        def __init__(self):
            self.slot = SimpleNamespace(load=lambda adapter: setattr(self, "sign", float(adapter["sign"])))

        def margins(self, comparisons):
            return self.sign * np.array([c.first.count("good") - c.second.count("good") for c in comparisons])

    @contextmanager
    def borrow_learner(*_):
        yield SimpleNamespace(selector=Selector())

    monkeypatch.setitem(JUDGES, "mine", Terse)
    monkeypatch.setattr(evaluation.POOL, "borrow_learner", borrow_learner)
    recipe = debug.model_copy(update={"evaluation": debug.evaluation.model_copy(update={"judge": debug.evaluation.judge.model_copy(update={"kind": "mine"})})})
    store = AdapterStore(tmp_path / "adapters")
    digests = {f"s{u}": store.put({"sign": torch.tensor(sign)}).hash for u, sign in enumerate((1.0, 1.0, -1.0))}

    def written(name, texts):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([{"prompt_id": f"p{i}", "prompt": f"q{i}", "text": text} for i, text in enumerate(texts)]))
        return path

    answers = {4: written("four", ["good a", "bad", "m"]), 8: written("eight", ["good z", "good z", "good z"])}
    curve = evaluation.reward_hacking_curve.fn(recipe, tmp_path, tmp_path, store.root, digests, tmp_path, answers, written("raw", ["m", "good m", "m", "not asked of the checkpoints"]))
    assert [(p["step"], p["prompts"]) for p in curve] == [(4, 3), (8, 3)]
    assert [p["proxy"] for p in curve] == [(1 + 0 + 0.5) / 3, (1 + 0 + 1) / 3], "the same answer counts half; as many 'good' is no preference"
    assert Terse.policy == load_template("summarization/policy", "policy")
    assert [p["judge"] for p in curve] == [(1 + 1 + 0.5) / 3, (1 + 0 + 1) / 3] and (tmp_path / "reward-hacking.png").is_file()
