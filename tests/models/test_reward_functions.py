"""Reward functions: registered by name, named by their module, and what is refused."""

import importlib
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from components.config import RecipeError, UserError
from components.models.rewards.function import (
    ALLOW_CODE,
    REWARD_FUNCTIONS,
    FunctionReward,
    find_reward_function,
)
from components.models.rewards.reward_section import check_scores
from components.recipes import check_recipe, load_recipe
from tests.support.reward_functions import score_length

SCORE_LENGTH = "tests.support.reward_functions:score_length"


def test_an_installed_package_adds_functions_by_entry_points_and_replaces_none_of_the_projects(monkeypatch):
    for name in ("mine", "clean"):
        entry = EntryPoint(name, SCORE_LENGTH, REWARD_FUNCTIONS.group)
        monkeypatch.setitem(REWARD_FUNCTIONS._entry_points, name, entry)
    assert find_reward_function("mine") is score_length
    assert find_reward_function("clean") is not score_length


def test_the_scores_of_a_function_are_float64():
    scores = FunctionReward(name=SCORE_LENGTH).load("cpu", None)(["q", "q"], ["four", "to"])
    assert scores.dtype == np.float64
    assert scores.tolist() == [4.0, 2.0]


@pytest.fixture
def allowed(monkeypatch):
    """A function that sets what recipes may name."""
    return lambda packages: monkeypatch.setenv(ALLOW_CODE, packages)


@pytest.mark.parametrize("packages", ["", "test", "tests.support.reward", "other, tests.support.prepared"])
def test_code_of_a_package_that_is_not_allowed_is_not_imported(allowed, monkeypatch, packages):
    allowed(packages)
    monkeypatch.setattr(importlib, "import_module", lambda module: pytest.fail(f"{module} was imported"))
    with pytest.raises(RecipeError, match="allow its package with FED_RLHF_ALLOW_CODE=tests"):
        find_reward_function(SCORE_LENGTH)


@pytest.mark.parametrize("packages", ["tests", "tests.support", "other, tests.support.reward_functions"])
def test_a_package_and_its_modules_are_allowed_by_name(allowed, packages):
    allowed(packages)
    assert find_reward_function(SCORE_LENGTH) is score_length


def test_reading_a_recipe_imports_no_code_that_it_names(allowed):
    """A finished run is shown without it; what runs a recipe checks the function."""
    allowed("")
    judge = "evaluation.judge={kind: reward, reward: {kind: function, name: 'nowhere.at_all:f'}}"
    recipe = load_recipe("debug", [judge])
    with pytest.raises(RecipeError, match="FED_RLHF_ALLOW_CODE=nowhere"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("claen", "Did you mean 'clean'"),
        ("nowhere.at_all:f", "cannot be imported .*ModuleNotFoundError: No module named 'nowhere'"),
        ("math:nothing", "cannot be imported .*AttributeError"),
        (".x:f", "FED_RLHF_ALLOW_CODE=my_package"),
        ("math:pi", "of type float"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_by_name(allowed, name, words):
    allowed("nowhere,math")
    with pytest.raises(RecipeError, match=words) as error:
        find_reward_function(name)
    assert f"'{name}'" in str(error.value)


# --- the function `clean`


@pytest.fixture(scope="module")
def clean():
    pytest.importorskip("profanity_check", reason="alt-profanity-check (the extra demo) is not installed")
    return FunctionReward(name="clean").load("cpu", None)


def test_clean_language_scores_above_insults_whatever_the_prompt_is(clean):
    responses = ["have a nice day", "you are a stupid idiot", "go to hell, moron"]
    scores = clean(["hello"] * 3, responses)
    assert scores[0] > 2
    assert scores[1:].max() < -2
    assert np.abs(scores).max() <= 10
    assert clean(["you idiot"] * 3, responses).tolist() == scores.tolist()


def test_clean_without_its_package_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    with pytest.raises(RecipeError, match=r"'clean' .*alt-profanity-check.*-e '.\[demo\]'"):
        find_reward_function("clean")(["q"], ["r"])


# --- checked scores


def fail(prompts, responses):
    raise OverflowError("too large")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (fail, "failed on 2 responses: OverflowError: too large"),
        (lambda prompts, responses: np.zeros(3), r"shape \(3,\) for 2 responses"),
        (lambda prompts, responses: np.array([1.0, np.inf]), "1 of them NaN or infinite"),
    ],
)
def test_a_reward_that_does_not_give_one_finite_score_per_response_is_refused_by_name(reward, words):
    with pytest.raises(UserError, match=f"the reward x (?s:.*){words}"):
        check_scores("the reward x", reward, ["q", "q"], ["a", "b"])


def test_an_error_that_is_written_for_the_user_is_not_wrapped():
    def refuse(prompts, responses):
        raise RecipeError("install a package")

    with pytest.raises(RecipeError, match="install a package"):
        check_scores("the reward x", refuse, ["q"], ["a"])


def test_finite_scores_are_returned_as_float64():
    scores = check_scores("the reward x", lambda prompts, responses: [1, 2], ["q", "q"], ["a", "b"])
    assert scores.dtype == np.float64
    assert scores.tolist() == [1.0, 2.0]
