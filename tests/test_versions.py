"""The table of artifact versions: where each entry is used."""

from typing import get_args

import pytest

from components import versions
from components.config import UserError
from components.config.evaluation import REWARDS
from components.config.thoughts import EvaluatorOptions
from components.recipes import load_recipe
from components.results import RoundEvaluation, StoredResult
from tasks.federation import open_commits
from tasks.runs import Run


def test_trained_rewards_have_the_version_of_the_table():
    assert REWARDS.load("trained").artifact_version == versions.TRAINED_REWARD


@pytest.mark.parametrize("kind", ["classifier", "function", "judge"])
def test_rewards_that_are_not_trained_have_no_version(kind):
    assert REWARDS.load(kind).artifact_version is None


def test_trees_of_thoughts_and_stored_results_have_the_versions_of_the_table():
    assert set(versions.THOUGHT_TREES) == set(get_args(EvaluatorOptions.model_fields["read"].annotation))
    assert StoredResult.model_fields["schema_version"].default == versions.RESULTS


def test_a_result_of_an_earlier_version_is_refused(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text('{"schema_version": 0, "rounds_done": 1, "accuracy": {}}')
    with pytest.raises(UserError, match=r"evaluation\.json"):
        RoundEvaluation.read(path)


def test_commits_of_another_version_of_the_rounds_have_another_fingerprint(tmp_path, monkeypatch):
    run = Run("a-run", tmp_path)
    run.prepared.mkdir()
    (run.prepared / "clients.json").write_text("{}")
    (run.prepared / "pairs.parquet").write_bytes(b"rows")
    recipe = load_recipe("debug")
    fingerprint = open_commits(run, recipe).fingerprint
    assert open_commits(run, recipe).fingerprint == fingerprint
    monkeypatch.setattr("tasks.federation.ROUNDS", versions.ROUNDS + 1)
    assert open_commits(run, recipe).fingerprint != fingerprint
