"""Sums, means and distances of adapters.

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

from components.models.store import AdapterError, check_adapter, iterate_blocks

if TYPE_CHECKING:
    import torch

    from components.models.store import Adapter


def weighted_sum(adapters: Iterable[tuple[Adapter, float]]) -> tuple[Adapter, float]:
    """sum_m w_m a_m, and sum_m w_m.

    Args:
        adapters: (adapter, weight) pairs, consumed one at a time and not changed.

    Returns:
        the fp32 sum, and the sum of the weights.

    Raises:
        AdapterError: an adapter has NaN or infinite values, other shapes, or missing tensors
            (named); or there is no adapter; or a weight is negative or not finite.
    """
    total, weight_sum = _accumulate(adapters, None)
    if total is None:
        raise AdapterError("there is no adapter to aggregate")
    return total, weight_sum


def weighted_average(adapters: Iterable[tuple[Adapter, float]]) -> Adapter:
    """sum_m w_m a_m / sum_m w_m (FedAvg, McMahan et al. 2017).

    Args:
        adapters: (adapter, weight) pairs; the weights need not sum to one.

    Raises:
        AdapterError: as weighted_sum, or the weights sum to zero.
    """
    total, weight_sum = weighted_sum(adapters)
    if weight_sum == 0:
        raise AdapterError("the weights of the adapters sum to zero")
    return {name: tensor / weight_sum for name, tensor in total.items()}


def residual_update(server: Adapter, members: Iterable[tuple[Adapter, float]]) -> Adapter:
    """(1 - sum_m p_m) server + sum_m p_m a_m (FedBiscuit eq. 6).

    Args:
        server: the server's adapter before the round; not changed.
        members: (adapter, p_m) pairs of the members that took part; without any, the result is the
            server's adapter.

    Raises:
        AdapterError: as weighted_sum, or the weights sum to more than one.
    """
    total, weight_sum = _accumulate(members, server)
    if weight_sum > 1 + 1e-6:
        raise AdapterError(f"the weights of the members sum to {weight_sum}, more than one")
    if total is None:
        return {name: tensor.float().clone() for name, tensor in server.items()}
    return {name: total[name].add_(server[name].float(), alpha=1 - weight_sum) for name in total}


def _accumulate(
    adapters: Iterable[tuple[Adapter, float]], template: Adapter | None
) -> tuple[Adapter | None, float]:
    total: Adapter | None = None
    weight_sum = 0.0
    if template is not None:
        template = {name: tensor.float() for name, tensor in template.items()}
    for position, (adapter, weight) in enumerate(adapters):
        if not (math.isfinite(weight) and weight >= 0):
            raise AdapterError(f"adapter {position}: weight {weight} must be finite and not negative")
        adapter = {name: tensor.float() for name, tensor in adapter.items()}
        try:
            check_adapter(adapter, template or total or adapter)
        except AdapterError as error:
            raise AdapterError(f"adapter {position}: {error}") from None
        if total is None:
            total = {name: tensor * weight for name, tensor in adapter.items()}
        else:
            for name, tensor in adapter.items():
                total[name].add_(tensor, alpha=weight)
        weight_sum += weight
    return total, weight_sum


def mixtures(
    adapters: Sequence[Mapping[str, torch.Tensor]], weights: npt.NDArray[np.float64]
) -> list[Adapter]:
    """sum_k w_tk a_k for several targets t, in one pass over the adapters, in fp64.

    Args:
        adapters: K adapters; a mapping may read its tensors from a file.
        weights: [T, K]; rows that sum to one give averages.

    Returns:
        T adapters, fp32.

    Raises:
        AdapterError: as iterate_blocks, or a weight is negative or not finite.
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
) -> npt.NDArray[np.float64]:
    """<a_i - o, a_j - o> of all pairs, over all values, in one pass over the adapters.

    Args:
        adapters: K adapters; a mapping may read its tensors from a file.
        origin: subtracted from each, so that small differences of large values keep their digits.

    Returns:
        [K, K] float64.
    """
    total = np.zeros((len(adapters), len(adapters)))
    for block in iterate_blocks([*adapters, origin]):
        movements = block[:-1] - block[-1]
        total += movements @ movements.T
    return total


def distance(first: Adapter, second: Adapter) -> float:
    """Euclidean distance of two adapters, over all values."""
    squares = (float((first[name].float() - second[name].float()).pow(2).sum()) for name in sorted(first))
    return math.sqrt(sum(squares))


def norm(adapter: Adapter) -> float:
    """Euclidean norm of an adapter, over all values."""
    return math.sqrt(sum(float(adapter[name].float().pow(2).sum()) for name in sorted(adapter)))


def step_metrics(new: Adapter, previous: Adapter) -> dict[str, float]:
    """Metrics of a server step: how far the adapter moved, and its norm."""
    return {"server_step": distance(new, previous), "server_norm": norm(new)}
