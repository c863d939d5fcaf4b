"""Sums, means, distances and similarities of adapters.

Sums read one adapter at a time, in fp32, in their order; callers pass the adapters in the order
of the clients' names, since an fp32 sum depends on its order in the last bits. LoRA's factors A and
B are summed apart, which is not the sum of their products B A (FedBiscuit section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.models.store import Adapter, AdapterError, check_adapter, iterate_blocks

if TYPE_CHECKING:
    import torch

Matrix = npt.NDArray[np.float64]


def weighted_sum(adapters: Iterable[tuple[Adapter, float]]) -> tuple[Adapter, float]:
    """The fp32 sum_m w_m a_m, and sum_m w_m, of (adapter, weight) pairs that are read one at a time."""
    total: Adapter | None = None
    weight_sum = 0.0
    for position, (adapter, weight) in enumerate(adapters):
        if not (math.isfinite(weight) and weight >= 0):
            raise AdapterError(f"adapter {position}: weight {weight} must be finite and not negative")
        adapter = {name: tensor.float() for name, tensor in adapter.items()}
        try:
            check_adapter(adapter, total or adapter)
        except AdapterError as error:
            raise AdapterError(f"adapter {position}: {error}") from None
        if total is None:
            total = {name: tensor * weight for name, tensor in adapter.items()}
        else:
            for name, tensor in adapter.items():
                total[name].add_(tensor, alpha=weight)
        weight_sum += weight
    if total is None:
        raise AdapterError("there is no adapter to aggregate")
    return total, weight_sum


def weighted_average(adapters: Iterable[tuple[Adapter, float]]) -> Adapter:
    """sum_m w_m a_m / sum_m w_m (FedAvg, McMahan et al. 2017)."""
    return mean(*weighted_sum(adapters))


def mean(total: Adapter, weight_sum: float) -> Adapter:
    """The average, from sum_m w_m a_m and sum_m w_m."""
    if weight_sum == 0:
        raise AdapterError("the weights of the adapters sum to zero")
    return {name: tensor / weight_sum for name, tensor in total.items()}


def residual_update(total: Adapter, weight_sum: float, server: Adapter) -> Adapter:
    """(1 - sum_m p_m) server + sum_m p_m a_m, from the two sums (FedBiscuit eq. 6)."""
    if weight_sum > 1 + 1e-6:
        raise AdapterError(f"the weights of the members sum to {weight_sum}, more than one")
    return {name: tensor.add(server[name].float(), alpha=1 - weight_sum) for name, tensor in total.items()}


def mixtures(adapters: Sequence[Mapping[str, torch.Tensor]], weights: Matrix) -> list[Adapter]:
    """sum_k w_tk a_k for T targets t, fp32, in one pass over the K adapters, summed in fp64.

    The weights are [T, K]; rows that sum to one give averages. A mapping may read its tensors from
    a file.
    """
    import torch

    weights = np.asarray(weights, dtype=float)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise AdapterError("weights must be finite and not negative")
    mixed: list[Adapter] = [{} for _ in weights]
    for name in sorted(adapters[0]):
        blocks = [(weights @ block).astype(np.float32) for block in iterate_blocks(adapters, [name])]
        for target, row in zip(mixed, np.concatenate(blocks, axis=1), strict=True):
            target[name] = torch.from_numpy(row.copy()).reshape(adapters[0][name].shape)
    return mixed


def inner_products(
    adapters: Sequence[Mapping[str, torch.Tensor]], origin: Mapping[str, torch.Tensor]
) -> Matrix:
    """<a_i - o, a_j - o> of all pairs of K adapters, over all values, in one pass, [K, K].

    The origin is subtracted from each, so that small differences of large values keep their digits.
    A mapping may read its tensors from a file.
    """
    total = np.zeros((len(adapters), len(adapters)))
    for block in iterate_blocks([*adapters, origin]):
        movements = block[:-1] - block[-1]
        total += movements @ movements.T
    return total


def movement_cosines(
    adapters: Sequence[Mapping[str, torch.Tensor]], origin: Mapping[str, torch.Tensor]
) -> Matrix:
    """Cosines of the movements of K adapters from a common origin, [K, K].

    They are 1 on the diagonal and between two adapters that have not moved, 0 between one that has
    moved and one that has not.
    """
    products = inner_products(adapters, origin)
    norms = np.sqrt(np.diag(products))
    still = norms == 0
    divisors = np.where(still, 1.0, norms)
    cosines = products / divisors[:, None] / divisors[None, :]
    cosines[np.ix_(still, still)] = 1.0
    np.fill_diagonal(cosines, 1.0)
    return np.clip(cosines, -1.0, 1.0)


def attention(similarities: Matrix, temperature: float, floor: float) -> Matrix:
    """Weights of K clients' mixtures: a softmax of each row [K], clipped at a floor and normalized."""
    scores = similarities / temperature
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = np.maximum(weights / weights.sum(axis=1, keepdims=True), floor)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def distance(first: Adapter, second: Adapter) -> float:
    """Euclidean distance of two adapters, over all values."""
    squares = (float((first[name].float() - second[name].float()).pow(2).sum()) for name in sorted(first))
    return math.sqrt(sum(squares))


def movement(adapter: Adapter, origin: Adapter) -> float:
    """As `distance`, in fp64, whose squares do not overflow for any fp32 value."""
    squares = (float((adapter[n].double() - origin[n].double()).pow(2).sum()) for n in sorted(adapter))
    return math.sqrt(sum(squares))


def norm(adapter: Adapter) -> float:
    """Euclidean norm of an adapter, over all values."""
    return math.sqrt(sum(float(adapter[name].float().pow(2).sum()) for name in sorted(adapter)))


def step_metrics(new: Adapter, previous: Adapter) -> dict[str, float]:
    """How far the adapter moved in a server step, and its norm."""
    return {"server_step": distance(new, previous), "server_norm": norm(new)}
