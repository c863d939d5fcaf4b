"""Similarity of adapters, and mixtures by similarity (FedAMP; FedPDPO D.3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.federation import aggregation

if TYPE_CHECKING:
    import torch

Matrix = npt.NDArray[np.float64]


def movement_cosines(
    adapters: Sequence[Mapping[str, torch.Tensor]], origin: Mapping[str, torch.Tensor]
) -> Matrix:
    """Cosines of the movements of adapters from a common origin.

    Args:
        adapters: K adapters; tensors may be read from files, block by block.
        origin: an adapter with the same tensors.

    Returns:
        [K, K] float64, symmetric; 1 on the diagonal and between two adapters that have not moved, 0
        between one that has moved and one that has not.
    """
    products = aggregation.inner_products(adapters, origin)
    norms = np.sqrt(np.diag(products))
    still = norms == 0
    divisors = np.where(still, 1.0, norms)
    cosines = products / divisors[:, None] / divisors[None, :]
    cosines[np.ix_(still, still)] = 1.0
    np.fill_diagonal(cosines, 1.0)
    return np.clip(cosines, -1.0, 1.0)


def attention(similarities: Matrix, temperature: float, floor: float) -> Matrix:
    """Weights of each client's mixture: a softmax of its row, clipped at a floor and normalized.

    Args:
        similarities: [K, K].
        temperature: tau, above 0.
        floor: minimum weight before the weights are normalized.

    Returns:
        [K, K], rows that sum to 1.
    """
    scores = similarities / temperature
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = np.maximum(weights / weights.sum(axis=1, keepdims=True), floor)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
