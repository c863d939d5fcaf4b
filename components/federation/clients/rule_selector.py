"""A selector that chooses by a rule (components/federation/methods/rule.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from components.config import Recipe
from components.federation.methods.rule import Rule
from components.models.resident import ResidentPolicy
from components.models.selector import Comparison
from components.models.selector_model import WHOLE, BatchShare, Selector


class RuleSelector(Selector):
    """Margins by a rule in place of log-odds; its adapter changes nothing."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        options = recipe.federation.options
        if not isinstance(options, Rule):
            raise TypeError("a selector by a rule needs the options of the method 'rule'")
        super().__init__(recipe.selector, device)
        self.rule = options.rule
        self._policy = ResidentPolicy(recipe.policy, device) if self.rule == "likelihood" else None
        self._batch_size = recipe.selector.score_batch_size

    @classmethod
    def of(cls, recipe: Recipe, device: str) -> Self:
        return cls(recipe, device)

    def margins(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """As shown, since a choice of what is first would cancel in the mean of both orders."""
        return self.margins_as_shown(comparisons, share)

    def margins_as_shown(self, comparisons: Sequence[Comparison], share: BatchShare = WHOLE) -> np.ndarray:
        """By how much the rule prefers the first completion; [N] float64, and 0 outside the share."""
        margins = np.zeros(len(comparisons))
        own = range(share.number, len(comparisons), share.of)
        chosen = [comparisons[n] for n in own]
        if self.rule == "first":
            margins[own] = 1.0
        elif self.rule == "longer":
            margins[own] = [len(one.first) - len(one.second) for one in chosen]
        elif chosen:
            margins[own] = self._mean_likelihoods(chosen)
        return margins

    def _mean_likelihoods(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """Differences of the mean log-likelihoods of a token under the base policy (nats)."""
        policy = self._policy
        assert policy is not None
        rows = [policy.encode(one.prompt, one.first, one.second) for one in comparisons]
        lengths = np.array([[len(ids) for ids in row[1:]] for row in rows])
        means = policy.score(rows, self._batch_size, reference=True) / np.maximum(lengths, 1)
        differences: np.ndarray = means[:, 0] - means[:, 1]
        return differences
