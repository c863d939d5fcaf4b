"""The variance of rewards between and within prompts."""

import numpy as np
import pytest

from components.config import RecipeError
from components.recipes import load_recipe
from perf.__main__ import main
from perf.reward_variance import sample_scores, variance_components

OBJECTIVES = [
    "federation.method=firm",
    "federation.options={objectives: {long: [long]}, ppo: {minibatch: 2}}",
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'}}",
    "policy.lora={r: 2, alpha: 4, dropout: 0.0}",
    "policy.max_new_tokens=8",
    "federation.batch_size=4",
]


def test_the_variances_are_those_of_the_analysis_of_variance():
    parts = variance_components(np.array([[1.0, 3.0], [5.0, 5.0], [6.0, 10.0]]))
    within = ((1 + 1) + 0 + (4 + 4)) / 3
    means = np.array([2.0, 5.0, 8.0])
    assert parts.within == pytest.approx(within)
    assert parts.between == pytest.approx(means.var(ddof=1) - within / 2)
    assert parts.share == pytest.approx(parts.between / (parts.between + within))


def test_the_estimates_are_unbiased():
    """Prompts with a variance of 2, and answers with one of 0.5."""
    numbers = np.random.default_rng(0)
    draws = [
        variance_components(numbers.normal(0, 2**0.5, (30, 1)) + numbers.normal(0, 0.5**0.5, (30, 3)))
        for _ in range(2000)
    ]
    shares = [parts.share for parts in draws]
    assert np.std(shares) == pytest.approx(np.mean([parts.share_error for parts in draws]), rel=0.2)
    assert np.mean([parts.between for parts in draws]) == pytest.approx(2.0, abs=0.1)
    assert np.mean([parts.within for parts in draws]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("share", "ratio"), [(0.0, 4 / 3), (0.25, 1.0), (1.0, 0.0)])
def test_leave_one_out_helps_where_the_share_is_above_one_over_the_samples(share, ratio):
    numbers = np.random.default_rng(1)
    scores = (
        numbers.normal(size=(20_000, 1)) * share**0.5 + numbers.normal(size=(20_000, 4)) * (1 - share) ** 0.5
    )
    assert variance_components(scores).leave_one_out_ratio == pytest.approx(ratio, abs=0.02)


def test_equal_scores_have_no_variance():
    parts = variance_components(np.ones((3, 2)))
    assert parts.share == 0
    assert parts.leave_one_out_ratio == 1


def test_the_answers_of_a_prompt_are_scored_by_the_reward_of_each_objective():
    scores = sample_scores(load_recipe("debug", OBJECTIVES), "cpu", prompts=3, samples=2)
    assert scores.keys() == {"long"}
    assert scores["long"].shape == (3, 2)
    assert len(np.unique(scores["long"])) > 1


def test_a_recipe_without_objectives_is_refused():
    with pytest.raises(RecipeError, match="federation.method is fedbis, which has no objectives"):
        sample_scores(load_recipe("debug"), "cpu", 3, 2)


def test_one_answer_of_a_prompt_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["reward-variance", "--samples", "1"])
    assert "'--samples'" in capsys.readouterr().err
