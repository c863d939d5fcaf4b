"""What the rewards of a recipe add to the key of a run's commits, and the backbones that they need."""

import pytest

from components.learning import reward
from components.recipes import load_recipe
from flows.fed_rlhf import backbones, open_commits
from tasks.rewards import judges_rows, prompts_asked
from tasks.runs import Run

TRAINED = "rewards={one: {kind: trained, template: '{prompt}|{response}', training: {backbone: {name: tiny-random}, steps: 1}}}"
OBJECTIVES = ["federation.method=firm", "federation.options={objectives: {good: [one]}}", "policy.lora.dropout=0"]


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "judge.parquet").write_bytes(b"rows")
    return tmp_path


def test_commits_belong_to_the_rows_and_to_the_way_that_rewards_are_trained_on(prepared, monkeypatch):
    trained, fixed = load_recipe("debug", [TRAINED, *OBJECTIVES]), load_recipe("debug", ["rewards={one: {kind: function, name: clean}}", *OBJECTIVES])
    key = judges_rows(trained, prepared)
    assert key and judges_rows(fixed, prepared) == "" == judges_rows(load_recipe("debug"), prepared)
    (prepared / "judge.parquet").write_bytes(b"other rows")
    other = judges_rows(trained, prepared)
    monkeypatch.setattr(reward, "WAY", reward.WAY + 1)
    assert len({key, other, judges_rows(trained, prepared)}) == 3


def test_commits_of_several_objectives_belong_to_the_prompts_that_rewards_are_measured_on(prepared):
    recipe, seen = load_recipe("debug", [TRAINED, *OBJECTIVES]), []
    for content in (b"prompts", b"others"):
        (prepared / "prompts.parquet").write_bytes(content)
        seen.append(prompts_asked(recipe, prepared))
    assert len({*seen, ""}) == 3 and prompts_asked(load_recipe("debug"), prepared) == ""


def test_a_runs_commits_are_those_of_its_pairs_rows_and_prompts(tmp_path):
    run, recipe, seen = Run("r", tmp_path), load_recipe("debug", [TRAINED, *OBJECTIVES]), []
    run.prepared.mkdir()
    files = [run.prepared / f"{name}.parquet" for name in ("pairs", "judge", "prompts")]
    for file in files:
        file.write_bytes(b"one")
    for file in (None, *files):
        if file is not None:
            file.write_bytes(b"other")
        seen.append(open_commits(run, recipe).fingerprint)
    assert len(set(seen)) == 4


def test_a_reward_judge_brings_the_backbone_that_it_is_trained_on():
    judge = ["evaluation.judge.kind=reward", "evaluation.judge.options={reward: {kind: trained, template: '{prompt}|{response}', training: {backbone: {name: some/other}, steps: 1}}}"]
    assert {*backbones(load_recipe("debug", judge))} == {"tiny-random", "some/other"} and backbones(load_recipe("debug")) == ["tiny-random"]
