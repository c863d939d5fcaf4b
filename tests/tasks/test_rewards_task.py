"""What the rewards of a recipe add to the fingerprint of a run's commits, and their backbones."""

import pytest

from components.recipes import load_recipe
from components.recipes.model_checks import required_backbones
from tasks.federation import open_commits
from tasks.rewards import rewards_fingerprint
from tasks.runs import Run

SECTION = "{kind: trained, template: '{prompt}|{response}', training: {backbone: {name: BACKBONE}, steps: 1}}"
TRAINED = f"rewards={{one: {SECTION.replace('BACKBONE', 'tiny-random')}}}"
FIXED = "rewards={one: {kind: function, name: clean}}"
OBJECTIVES = [
    "federation.method=firm",
    "federation.options={objectives: {good: [one]}}",
    "policy.lora.dropout=0",
]


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "judge.parquet").write_bytes(b"rows")
    return tmp_path


@pytest.fixture
def recipe():
    """A recipe with a reward that is trained on the judge's pairs."""
    return load_recipe("debug", [TRAINED, *OBJECTIVES])


def test_trained_rewards_add_the_judges_pairs_and_their_version_to_the_fingerprint(
    recipe, prepared, monkeypatch
):
    first = rewards_fingerprint(recipe.rewards, prepared)
    (prepared / "judge.parquet").write_bytes(b"other rows")
    assert first
    assert rewards_fingerprint(recipe.rewards, prepared) != first
    first = rewards_fingerprint(recipe.rewards, prepared)
    monkeypatch.setattr(type(recipe.rewards["one"]), "artifact_version", 1_000)
    assert rewards_fingerprint(recipe.rewards, prepared) != first


@pytest.mark.parametrize("overrides", [[FIXED, *OBJECTIVES], []], ids=["a function", "no rewards"])
def test_rewards_that_are_not_trained_add_nothing_to_the_fingerprint(prepared, overrides):
    assert rewards_fingerprint(load_recipe("debug", overrides).rewards, prepared) == ""


def write_prepared(run, content):
    run.prepared.mkdir(exist_ok=True)
    (run.prepared / "clients.json").write_text("{}")
    for name in ("pairs", "judge", "prompts"):
        (run.prepared / f"{name}.parquet").write_bytes(content)


@pytest.mark.parametrize("name", ["pairs", "judge", "prompts"])
def test_the_commits_of_several_objectives_belong_to_all_files_that_they_read(recipe, tmp_path, name):
    run = Run("r", tmp_path)
    write_prepared(run, b"one")
    first = open_commits(run, recipe).fingerprint
    (run.prepared / f"{name}.parquet").write_bytes(b"other")
    assert open_commits(run, recipe).fingerprint != first


def test_the_commits_of_a_method_without_objectives_do_not_belong_to_the_held_out_prompts(tmp_path):
    run = Run("r", tmp_path)
    write_prepared(run, b"one")
    recipe = load_recipe("debug")
    first = open_commits(run, recipe).fingerprint
    (run.prepared / "prompts.parquet").write_bytes(b"other")
    assert open_commits(run, recipe).fingerprint == first


def test_a_recipe_requires_the_backbones_of_its_models_and_of_the_reward_of_its_judge():
    judge = f"evaluation.judge={{kind: reward, reward: {SECTION.replace('BACKBONE', 'some/other')}}}"
    assert set(required_backbones(load_recipe("debug", [judge]))) == {"tiny-random", "some/other"}
    assert required_backbones(load_recipe("debug")) == ["tiny-random"]
