"""Sections of rewards in a recipe: what does not fit is refused with its key and the remedy."""

import pytest

from components.config import RecipeError
from components.evaluation.judges.pair_reward import JudgeReward
from components.models.rewards.classifier import ClassifierReward
from components.models.rewards.reward_section import response_reward
from components.recipes import load_recipe

PPO = ["federation.method=feddpo", "federation.options={objective: ppo}"]
PAIR = "template: '{prompt} {response}'"


def load_with_reward(section: str):
    """The debug recipe with FedDPO by PPO and one reward."""
    return load_recipe("debug", [*PPO, f"rewards={{a: {section}}}"])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{}", "rewards.a.name.*missing"),
        ("{kind: function}", "rewards.a.name.*missing"),
        ("{kind: trained}", "rewards.a.template.*missing"),
        (f"{{kind: trained, {PAIR}, name: x}}", "unknown key 'rewards.a.name'"),
        (f"{{kind: trained, {PAIR}, output: 1}}", "unknown key 'rewards.a.output'"),
        (
            f"{{kind: trained, {PAIR}, training: {{backbone: {{dtype: bfloat16}}}}}}",
            "rewards.a.training.*float32.*leave out backbone.dtype and quantization",
        ),
        ("{kind: function, name: clean, output: 1}", "unknown key 'rewards.a.output'"),
        ("{name: x, training: {}}", "unknown key 'rewards.a.training'"),
        ("{kind: judge, max_length: 64}", "unknown key 'rewards.a.max_length'"),
        ("{name: x, template: '{prompt} alone'}", r"template .*\{prompt\} and \{response\}"),
        ("{kind: trained, template: '{response} alone'}", r"template .*\{prompt\} and \{response\}"),
        ("{kind: clasifier, name: x}", "Did you mean 'classifier'"),
    ],
)
def test_a_section_that_does_not_fit_its_kind_is_refused_with_the_key(section, words):
    with pytest.raises(RecipeError, match=words):
        load_with_reward(section)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (PPO, "one reward.*rewards names none"),
        (["federation.method=feddpo", "rewards={a: judge}"], "rewards names a.*leave"),
        (
            ["federation.method=fedpdpo", "federation.options={objective: ppo}", "rewards={a: judge}"],
            "federation.options.objective",
        ),
        ([*PPO, "rewards={a: judge}", "evaluation.judge={kind: autoj}"], "evaluation.judge.kind 'selector'"),
    ],
)
def test_rewards_that_do_not_fit_the_method_are_refused(overrides, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe("debug", overrides)


@pytest.mark.parametrize(
    "section",
    ["judge", "{kind: function, name: clean}", f"{{kind: trained, {PAIR}}}", "{name: some/classifier}"],
)
def test_a_section_is_restored_from_its_values(section):
    recipe = load_with_reward(section)
    assert type(recipe).model_validate(recipe.model_dump(mode="json")) == recipe


def test_the_default_kind_is_the_classifier():
    assert isinstance(load_with_reward("{name: some/classifier}").rewards["a"], ClassifierReward)


def test_a_judge_does_not_score_single_responses():
    with pytest.raises(RecipeError, match="kind 'judge' does not score single responses: use another kind"):
        response_reward(JudgeReward())


def test_scores_with_and_without_tf32_have_different_fingerprints():
    recipes = [load_with_reward(f"{{name: x, tf32: {value}}}") for value in ("true", "false")]
    assert recipes[0].fingerprint("rewards") != recipes[1].fingerprint("rewards")
    assert recipes[0].fingerprint("rewards") == load_with_reward("{name: x}").fingerprint("rewards")


@pytest.mark.parametrize("section", ["{name: x}", f"{{kind: trained, {PAIR}}}"])
def test_a_classifier_that_scores_beside_other_threads_has_no_tf32(section):
    reward = response_reward(load_with_reward(section).rewards["a"])
    assert reward.tf32
    assert not reward.without_tf32().tf32
