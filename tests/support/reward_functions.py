"""Reward functions that recipes of tests name as 'tests.support.reward_functions:FUNCTION'."""

from collections.abc import Sequence

import numpy as np


def score_length(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
    """The number of characters of each response."""
    return np.array([float(len(response)) for response in responses])


def score_vowels(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
    """The number of vowels of each response, minus a tenth of the length of its prompt."""
    return np.array(
        [
            sum(response.count(vowel) for vowel in "aeiou") - 0.1 * len(prompt)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
