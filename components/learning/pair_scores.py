"""Scores that models give to pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from components.models.resident import Pair, ResidentPolicy

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
    # [N], index of the model that the client of each pair uses, -1 if it uses none; None if all
    # clients use the same model.
    assigned: npt.NDArray[np.int64] | None = None
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
        return _combine([self], lambda arrays: arrays[0][rows])

    def by_assigned(self) -> tuple[list[int], PreferenceScores]:
        """Indices of the n pairs whose client uses a model, and their scores [1, n] by this model."""
        if self.assigned is None:
            raise ValueError("no client is assigned a model of its own")
        columns = [int(n) for n in np.flatnonzero(self.assigned >= 0)]
        rows = [int(self.assigned[n]) for n in columns]
        return columns, _combine([self], lambda arrays: arrays[0][rows, columns][None, :])

    def with_assignment(self, assigned: Sequence[int]) -> PreferenceScores:
        """The same scores, with the index of the model that the client of each pair uses, [N]."""
        return replace(self, assigned=np.array(assigned, dtype=np.int64))


def concat(parts: Sequence[tuple[Sequence[int], PreferenceScores]]) -> PreferenceScores:
    """Concatenate the scores of disjoint sets of pairs, in the order of the pairs' indices.

    A part has the indices of n pairs and their scores [U, n]; all indices together are 0 to N - 1.
    """
    order = np.argsort(list(chain.from_iterable(columns for columns, _ in parts)))
    return _combine([part for _, part in parts], lambda arrays: np.concatenate(arrays, axis=1)[:, order])


def _combine(parts: Sequence[PreferenceScores], combine: Callable[[list[Array]], Array]) -> PreferenceScores:
    def combine_present(arrays: Iterable[Array | None]) -> Array | None:
        present = [array for array in arrays if array is not None]
        return combine(present) if present else None

    return PreferenceScores(
        combine([part.margins for part in parts]),
        combine_present(part.rewards for part in parts),
        {
            name: combine([part.margins_by_metric[name] for part in parts])
            for name in parts[0].margins_by_metric
        },
        swapped=combine_present(part.swapped for part in parts),
    )


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
    completions = [resident.encode_pair(pair)[1:] for pair in pairs]
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
    return resident.score([resident.encode_pair(pair) for pair in pairs], batch_size, reference)


def implicit_margins(policy: Array, reference: Array) -> Array:
    """Margins of the implicit reward, over beta, [N] (Rafailov et al. 2023, section 4).

    They are those of log pi / pi_ref, chosen minus rejected, from summed log-probabilities [N, 2].
    """
    ratios = policy - reference
    return np.asarray(ratios[:, 0] - ratios[:, 1])
