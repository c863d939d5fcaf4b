"""Scores that models give to pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from components.data.records import Pair
from components.results import Result

if TYPE_CHECKING:
    from components.models.resident import ResidentPolicy

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PreferenceScores:
    """Scores of N pairs by U models."""

    # [U, N], positive where a model prefers the chosen completion. Of a selector they are log-odds, of
    # a policy differences of log-ratios to the reference (nats).
    margins: Array
    rewards: Array | None = None  # [U, N], log-ratios of the chosen completions (nats); None for selectors
    # Other margins, [U, N] each. A policy has 'summed', margins of the completions' log-likelihoods,
    # and 'per_token', margins of their means per token; a reward head has 'explicit'.
    margins_by_metric: dict[str, Array] = field(default_factory=dict)
    # [U, N], the margins of a selector that is shown the chosen completion second; None where a
    # margin does not depend on the order.
    swapped: Array | None = None

    @property
    def orders(self) -> list[Array]:
        """The margins in each order that they depend on, [U, N] each."""
        return [self.margins] if self.swapped is None else [self.margins, self.swapped]

    def select(self, models: Sequence[int]) -> PreferenceScores:
        """Scores by these models, in this order; a model may be selected twice."""
        rows = list(models)
        return PreferenceScores(
            self.margins[rows],
            None if self.rewards is None else self.rewards[rows],
            {name: margins[rows] for name, margins in self.margins_by_metric.items()},
            None if self.swapped is None else self.swapped[rows],
        )


class PairFigures(Result):
    """Counts and sums over the pairs of a client.

    A pair's vote is 1 where the models' majority agrees with its owner, and 0 where it does not. A pair
    with a margin of 0, or on which votes tie, counts half, and so does a pair on which the majority
    depends on the order of its completions: a selector that always chooses one position has an accuracy
    of exactly one half.
    """

    pairs: int
    votes: float
    margin: float  # of the means over the models and orders, as in PreferenceScores.margins
    reward: float | None = None  # of the means over the models; None for selectors
    by_metric: dict[str, float] = Field(default_factory=dict)  # votes by other margins
    domains: dict[str, tuple[int, float]] = Field(default_factory=dict)  # pairs and votes by domain
    assigned: PairFigures | None = None  # the same by the one model that the client uses


def pair_figures(
    scores: PreferenceScores, pairs: Sequence[Pair], assigned: int | None = None, flip: float = 0.0
) -> PairFigures:
    """Figures of U models on N pairs, which have a domain.

    Args:
        scores: of the pairs.
        pairs: the pairs.
        assigned: the model that the client uses.
        flip: probability p with which verdicts of the pairs were exchanged. The figures are corrected, so
            that their expectations are those of the true verdicts; shares may lie outside [0, 1].
    """
    votes = (_votes(scores.orders) - flip) / (1 - 2 * flip)
    margins = np.mean(scores.orders, axis=0).mean(axis=0) / (1 - 2 * flip)
    rewards = None if scores.rewards is None else scores.rewards.mean(axis=0)
    if rewards is not None and flip:  # an exchanged pair has the reward of its rejected completion
        rewards = rewards + flip * margins
    domains = np.array([pair.domain for pair in pairs], dtype=object)
    by_domain = {name: votes[domains == name] for name in sorted(set(domains.tolist()))}
    return PairFigures(
        pairs=len(pairs),
        votes=float(votes.sum()),
        margin=float(margins.sum()),
        reward=None if rewards is None else float(rewards.sum()),
        by_metric={
            name: float(((_votes([own]) - flip) / (1 - 2 * flip)).sum())
            for name, own in scores.margins_by_metric.items()
        },
        domains={name: (len(own), float(own.sum())) for name, own in by_domain.items()},
        assigned=None if assigned is None else pair_figures(scores.select([assigned]), pairs, flip=flip),
    )


def _votes(orders: Sequence[Array]) -> Array:
    """The majority of U models on each pair, [N]: 1 for chosen, 0 for rejected, 0.5 for a tie.

    It is the mean over the orders of presentation, of which each has margins [U, N].
    """
    votes = [np.where(one > 0, 1.0, np.where(one < 0, 0.0, 0.5)).mean(axis=0) for one in orders]
    return np.asarray(np.mean([(vote > 0.5) + 0.5 * (vote == 0.5) for vote in votes], axis=0))


def policy_scores(
    resident: ResidentPolicy,
    pairs: Sequence[Pair],
    logprobs: Array,
    reference: Array,
    explicit: Array | None = None,
) -> PreferenceScores:
    """Scores of N pairs by U policies.

    They are made of summed log-probabilities of chosen and rejected, [U, N, 2], those under the
    reference, [N, 2], and the margins of a reward head, [U, N].
    """
    completions = [resident.encode(*pair.texts)[1:] for pair in pairs]
    lengths = np.array([[len(tokens) for tokens in pair] for pair in completions]).reshape(len(pairs), 2)
    ratios = logprobs - reference
    per_token = logprobs / lengths
    margins_by_metric = {
        "summed": logprobs[..., 0] - logprobs[..., 1],
        "per_token": per_token[..., 0] - per_token[..., 1],
    }
    if explicit is not None:
        margins_by_metric["explicit"] = explicit
    return PreferenceScores(ratios[..., 0] - ratios[..., 1], ratios[..., 0], margins_by_metric)


def pair_logprobs(
    resident: ResidentPolicy, pairs: Sequence[Pair], batch_size: int, reference: bool = False
) -> Array:
    """Summed log-probabilities of chosen and rejected of N pairs, [N, 2] (nats).

    They are those of the adapter in the slot, or of the reference, the frozen backbone.
    """
    if not pairs:
        return np.zeros((0, 2))
    return resident.score([resident.encode(*pair.texts) for pair in pairs], batch_size, reference)
