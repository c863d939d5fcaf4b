"""Rewards that are Python functions: registered by name, or allowed ones as 'module:function'.

A reward function scores responses to prompts; larger is better:

    def brief(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray: ...

Its scores must depend on the texts alone, because a resumed run computes them again. Installed
packages register functions through the entry points of the group `fed_rlhf.reward_functions`. A recipe may
come from somebody else, so it can name other code only of packages in the variable ALLOW_CODE.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import Field

from components.config import Recipe, RecipeError, Registry, unknown_name
from components.models.rewards.reward_section import ResponseReward, RewardFunction, Scores, check_scores

# Environment variable: packages and modules, with commas between, whose functions a recipe may name.
ALLOW_CODE = "FED_RLHF_ALLOW_CODE"
REWARD_FUNCTIONS: Registry[RewardFunction] = Registry(
    "reward function",
    "fed_rlhf.reward_functions",
    {"clean": "components.models.rewards.function:clean"},
)


class FunctionReward(ResponseReward):
    """A reward that is a Python function."""

    kind: Literal["function"] = Field("function", description="Kind of the reward.")
    name: str = Field(
        min_length=1, description="Name of a registered function, or module:function (FED_RLHF_ALLOW_CODE)."
    )

    @property
    def description(self) -> str:
        return f"function {self.name}"

    def check(self, recipe: Recipe) -> None:
        """Refuse a name that is neither registered nor module:function; nothing is imported."""
        _require_known(self.name)

    def check_loading(self, key: str) -> None:
        """Refuse a function that fails on a question and an answer."""
        check_scores(key, self.load("cpu", None), ["a question"], ["an answer"])

    def load(self, device: str, folder: Path | None) -> RewardFunction:
        function = find_reward_function(self.name)
        return lambda prompts, responses: np.asarray(function(prompts, responses), dtype=np.float64)


def find_reward_function(name: str) -> RewardFunction:
    """Import a reward function: a registered one, or one as 'module:function' of an allowed package."""
    _require_known(name)
    if name in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS.load(name)
    module, _, attribute = name.partition(":")
    allowed = [one.strip() for one in os.environ.get(ALLOW_CODE, "").split(",") if one.strip()]
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        raise RecipeError(
            f"the reward function '{name}' is code that the recipe names: if you trust it, allow its package"
            f" with {ALLOW_CODE}={module.partition('.')[0] or 'my_package'}, or install a package that"
            " registers it (entry points of fed_rlhf.reward_functions)."
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise RecipeError(
            f"the reward function '{name}' cannot be imported ({type(error).__name__}: {error}): "
            "use module:function with a module that Python can import."
        ) from None
    if not callable(function):
        raise RecipeError(
            f"the reward function '{name}' is of type {type(function).__name__}: "
            "name a function of prompts and responses."
        )
    return cast(RewardFunction, function)


def _require_known(name: str) -> None:
    if name not in REWARD_FUNCTIONS and ":" not in name:
        known = unknown_name("reward function", name, REWARD_FUNCTIONS.names())
        raise RecipeError(f"{known} Name a function of your own as module:function.")


def clean(prompts: Sequence[str], responses: Sequence[str]) -> Scores:
    """Log-odds that a response is not offensive, clipped to [-10, 10]; [N].

    The classifier of alt-profanity-check estimates the probability: a linear support vector machine
    over words. It recognizes offensive words, not offensive meaning. The prompts are not used.
    """
    try:
        from profanity_check import predict_prob
    except ModuleNotFoundError:
        raise RecipeError(
            "the reward function 'clean' needs the package alt-profanity-check: "
            "make install, or pip install -e '.[demo]' in a checkout"
        ) from None
    offensive = np.clip(np.asarray(predict_prob(list(responses)), dtype=np.float64), 1e-5, 1 - 1e-5)
    scores: Scores = np.clip(np.log1p(-offensive) - np.log(offensive), -10, 10)
    return scores
