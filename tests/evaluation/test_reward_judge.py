"""The judge `reward`, which scores each response, and the reward `judge`, which compares pairs."""

import numpy as np
import pytest
from datasets import Dataset

from components.config import RecipeError, UserError
from components.data.records import DataError, read_pairs, read_rows
from components.evaluation.contests import judge_contest
from components.evaluation.judges.judge import JudgeResources
from components.evaluation.judges.pair_reward import JudgeReward
from components.evaluation.judges.reward import RewardJudgeSection
from components.evaluation.winrate import Verdict
from components.learning import reward_model
from components.learning.selector_training import score_pairs
from components.models.backbone import BackboneError
from components.models.rewards.reward_section import RewardResources
from components.models.selector import Comparison
from components.recipes import load_recipe
from tests.support import reward_functions

FIRST, SECOND, TIE, _ = Verdict
LENGTH = {"kind": "function", "name": "tests.support.reward_functions:score_length"}
TRAINED = {
    "kind": "trained",
    "template": "{prompt}|{response}",
    "max_length": 32,
    "training": {
        "backbone": {"name": "tiny-random", "layers": 1},
        "lora": {"dropout": 0.0},
        "steps": 2,
        "batch_size": 2,
    },
}


def section_with(reward):
    return RewardJudgeSection.model_validate({"reward": reward})


@pytest.fixture
def resources(prepared, tmp_path):
    return JudgeResources(prepared, tmp_path, 0, "cpu")


@pytest.fixture
def scored(monkeypatch):
    """The responses that the reward by length has scored."""
    responses_scored = []
    score = reward_functions.score_length

    def record_and_score(prompts, responses):
        responses_scored.extend(responses)
        return score(prompts, responses)

    monkeypatch.setattr(reward_functions, "score_length", record_and_score)
    return responses_scored


# --- Verdicts


def test_the_response_with_the_higher_score_is_better_in_both_orders_and_equal_ones_tie(resources):
    judge = section_with(LENGTH).build(resources)
    comparisons = [Comparison("p", "aaa", "bb"), Comparison("p", "a", "bb"), Comparison("p", "aa", "bb")]
    assert judge.compare(comparisons) == [FIRST, SECOND, TIE]
    assert section_with(LENGTH).build(resources).compare([]) == []
    contest = judge_contest(judge, {ours: Comparison("p", ours, "bb") for ours in ("aaa", "a", "aa")})
    assert contest.verdicts == [FIRST, SECOND, TIE]
    assert contest.consistency == 1.0


def test_each_response_to_a_prompt_is_scored_once_although_both_orders_are_compared(resources, scored):
    judge = section_with(LENGTH).build(resources)
    judge_contest(judge, {ours: Comparison(f"to {ours}", ours, "bb") for ours in ("a", "aaa")})
    assert sorted(scored) == ["a", "aaa", "bb", "bb"]


def test_the_description_names_the_reward_and_a_function_has_no_figures(resources):
    judge = section_with(LENGTH).build(resources)
    assert judge.description == f"reward model, function {LENGTH['name']}"
    assert judge.figures == {}
    assert judge.texts == []


# --- A reward that is trained


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A trained reward and its folder, with the cache that a judge may share."""
    cache = tmp_path_factory.mktemp("rewards")
    section = section_with(TRAINED)
    resources = RewardResources(prepared, cache, 0, "cpu", section)
    ready = section.reward.prepare(resources)
    return cache, ready.figures, section.reward.load("cpu", ready.folder)


@pytest.fixture
def trained_judge(trained, prepared, monkeypatch):
    """The judge of the trained reward, which is not trained again."""
    monkeypatch.setattr(reward_model, "train_reward", lambda *_: pytest.fail("the reward is trained again"))
    return section_with(TRAINED).build(JudgeResources(prepared, trained[0], 0, "cpu"))


def test_a_reward_that_is_trained_for_an_objective_is_the_judges_too(trained, trained_judge):
    _, _, score = trained
    first = score(["p", "q"], ["a b c", "d"])
    second = score(["p", "q"], ["e f", "g h i"])
    expected = [FIRST if a > b else SECOND for a, b in zip(first, second, strict=True)]
    comparisons = [Comparison("p", "a b c", "e f"), Comparison("q", "d", "g h i")]
    assert trained_judge.compare(comparisons) == expected


def test_a_trained_reward_is_described_by_its_accuracy_its_pairs_and_its_backbone(trained, trained_judge):
    assert trained_judge.figures == {
        "judge_accuracy": trained[1]["accuracy"],
        "judge_pairs": 6,
        "judge_held_out_pairs": 4,
    }
    assert "tiny-random, first 1 layers, trained centrally" in trained_judge.description


# --- Checks before a run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{kind: selectr}", "Did you mean 'selector'"),
        ("{kind: reward}", r"evaluation\.judge\.reward"),
        ("{kind: reward, reward: {}}", "name"),
        ("{kind: reward, reward: {kind: judge}}", "evaluation.judge.reward .* 'judge'"),
        ("{kind: reward, reward: {kind: function, name: clea}}", "Did you mean 'clean'"),
    ],
)
def test_a_judge_that_cannot_be_built_is_refused_with_the_recipe(settings, message):
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe("debug", [f"evaluation.judge={settings}"])
    assert ".." not in str(error.value)


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ({"kind": "function", "name": "math:sqrt"}, UserError, "evaluation.judge.reward failed"),
        ({"name": "/no/such/folder"}, BackboneError, "'/no/such/folder'.*could not be loaded"),
    ],
)
def test_a_reward_that_fails_is_refused_before_anything_is_trained(prepared, reward, error, message):
    with pytest.raises(error, match=message):
        section_with(reward).check_data(prepared)


@pytest.fixture
def without_held_out(prepared, tmp_path):
    """A prepared folder whose judge has training pairs only."""
    rows = read_rows(prepared / "judge.parquet", split="train")
    Dataset.from_list(rows).to_parquet(tmp_path / "judge.parquet")
    return tmp_path


def test_a_reward_that_is_trained_here_needs_training_and_held_out_pairs_and_a_function_none(
    without_held_out,
):
    with pytest.raises(DataError, match="6 training and 0 held-out pairs.*'reward'"):
        section_with(TRAINED).check_data(without_held_out)
    section_with(LENGTH).check_data(without_held_out)


# --- The recipe's judge as a reward of pairs


def test_the_judge_as_a_reward_scores_pairs_by_half_of_its_log_odds(debug, prepared, tmp_path):
    section = debug.evaluation.judge
    pairs = read_pairs(prepared / "judge.parquet", split="test")
    made = JudgeReward().prepare(RewardResources(prepared, tmp_path, 0, "cpu", section))
    scores = JudgeReward().load_pair_scorer(debug, "cpu", made.folder)(pairs)
    judge = section.build(JudgeResources(prepared, tmp_path, 0, "cpu"))
    odds = score_pairs(judge.selector, pairs).mean(axis=0)
    np.testing.assert_array_equal(scores, np.stack([odds / 2, -odds / 2], axis=1))
    assert made.figures == {}


def test_a_judge_without_log_odds_is_refused_as_a_reward(debug):
    judge = section_with(LENGTH)
    evaluation = debug.evaluation.model_copy(update={"judge": judge})
    with pytest.raises(RecipeError, match="evaluation.judge.kind 'selector'.*'reward'"):
        JudgeReward().check(debug.model_copy(update={"evaluation": evaluation}))


def test_all_refusals_are_errors_of_the_user():
    assert issubclass(BackboneError, UserError)
