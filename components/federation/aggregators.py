"""Aggregators, registered in AGGREGATORS: how the server combines the clients' adapters.

A SumAggregator needs the sum of the weighted adapters of the clients, from which the server learns no single
one. Others need each client's adapter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from components.config import one_of
from components.config.federation import AGGREGATORS
from components.config.registry import registered_section
from components.config.section import KindSection
from components.federation import aggregation
from components.federation.protocol import Update, sent_adapters
from components.models.store import Adapter, AdapterStore, iterate_blocks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sum:
    """sum_m w_m a_m of the tensors a_m of clients whose updates are accepted."""

    tensors: Adapter  # fp32
    weight: float  # sum_m w_m
    clients: tuple[str, ...]  # in the order of their names, in which the sum is taken
    asked: int  # clients that it was to be of


@dataclass(frozen=True)
class Contributions:
    """Accepted updates of one step, in the order of the clients' names."""

    store: AdapterStore
    updates: Sequence[Update]
    weights: Sequence[float]  # p_m of each update's client, its share of all training pairs
    clients: int  # of the federation (M)

    @property
    def names(self) -> list[str]:
        return [update.client for update in self.updates]

    def __len__(self) -> int:
        return len(self.updates)

    def adapters(self) -> Iterator[Adapter]:
        """The clients' adapters, read one at a time."""
        return (self.store.get(digest) for digest in sent_adapters(self.updates).values())

    def open(self) -> list[Adapter]:
        """The clients' adapters, whose values are read when they are needed."""
        return self.store.open(sent_adapters(self.updates).values())


def sum_updates(store: AdapterStore, updates: Sequence[Update], weights: Mapping[str, float]) -> Sum:
    """The weighted sum of what clients have sent, in the order of their names.

    Args:
        store: has the adapters.
        updates: of some of the clients that were asked.
        weights: of all clients that were asked.
    """
    adapters = sent_adapters(updates)
    pairs = ((store.get(digest), weights[name]) for name, digest in adapters.items())
    total, weight = aggregation.weighted_sum(pairs)
    return Sum(total, weight, tuple(adapters), len(weights))


class Aggregator(KindSection, ABC):
    """How the server combines updates, as the section of a recipe that describes it."""

    @property
    def rescales(self) -> bool:
        """Whether the weights of a round sum to one only in expectation, so that it scales the adapter."""
        return False

    @abstractmethod
    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The server's new adapter (fp32), and numbers for the server's metrics.

        The given adapter is the server's before the step, which is not changed; there is at least
        one contribution.
        """

    def for_clusters(self) -> Aggregator:
        """The aggregator of a cluster's members, a part of the sampled clients (FedBiscuit step 2.4)."""
        return self


class SumAggregator(Aggregator):
    """An aggregator that needs the sum of the weighted adapters alone."""

    @abstractmethod
    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        """w_m of the clients that are asked, which they may apply before they send.

        Args:
            shares: p_m of these clients.
            clients: of the federation (M).
        """

    @abstractmethod
    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        """As `combine`, from the sum of the clients that have sent an update, at least one."""

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        shares = dict(zip(contributions.names, contributions.weights, strict=True))
        weights = self.client_weights(shares, contributions.clients)
        return self.finish(server, sum_updates(contributions.store, contributions.updates, weights))


class ParticipationMean(SumAggregator):
    """sum p_m phi_m / sum p_m over the clients that took part (McMahan et al. 2017)."""

    kind: Literal["participation"] = "participation"
    """Name of the aggregator."""

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        return dict(shares)

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        return aggregation.mean(total.tensors, total.weight), {"weight_sum": 1.0}


class PaperMean(SumAggregator):
    """(M / A) sum p_m phi_m (FedBiscuit eq. 8).

    It is unbiased over the sampling, but the weights of a round sum to one only in expectation, so
    that a round scales the adapter. A is the number of clients that took part; those without an
    update count as not sampled. Over many rounds with clients of unequal size the adapter vanishes,
    see components/federation/weight_scale.py.
    """

    kind: Literal["paper"] = "paper"
    """Name of the aggregator."""

    @property
    def rescales(self) -> bool:
        return True

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        """(M / A) p_m, with the clients that are asked as A."""
        scale = clients / len(shares)
        return {name: scale * share for name, share in shares.items()}

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        """The weighted sum, and the sum of its weights as `weight_sum`."""
        took_part = len(total.clients)
        if took_part == total.asked:
            return total.tensors, {"weight_sum": total.weight}
        scale = total.asked / took_part
        tensors = {name: scale * tensor for name, tensor in total.tensors.items()}
        return tensors, {"weight_sum": scale * total.weight}

    def for_clusters(self) -> Aggregator:
        """Eq. 6 with p_m."""
        return ResidualUpdate(weights="pairs")


class UniformMean(SumAggregator):
    """(1 / A) sum phi_m: all clients that took part count the same."""

    kind: Literal["uniform"] = "uniform"
    """Name of the aggregator."""

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        return dict.fromkeys(shares, 1.0)

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        return aggregation.mean(total.tensors, total.weight), {"weight_sum": 1.0}

    def for_clusters(self) -> Aggregator:
        """Eq. 6 with 1 / M."""
        return ResidualUpdate(weights="uniform")


class ExpectedMean(SumAggregator):
    """phi + (1 / A) sum (phi_m - phi) over the A clients that were asked.

    A client without an update counts as one that has not moved, so that no client changes the weight of
    another.
    """

    kind: Literal["expected"] = "expected"
    """Name of the aggregator."""

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        return dict.fromkeys(shares, 1.0 / len(shares))

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        return aggregation.residual_update(total.tensors, total.weight, server), {"weight_sum": 1.0}

    def for_clusters(self) -> Aggregator:
        """Eq. 6 with 1 / M."""
        return ResidualUpdate(weights="uniform")


class ResidualUpdate(SumAggregator):
    """(1 - sum w_m) phi_u + sum w_m phi_m (FedBiscuit eq. 6).

    With weights 'pairs', w_m is p_m; with 'uniform' it is 1 / M. Either moves a selector by its
    sampled members' share of the federation.
    """

    kind: Literal["residual"] = "residual"
    """Name of the aggregator."""
    weights: Literal["pairs", "uniform"] = "pairs"
    """Weights of the members."""

    def client_weights(self, shares: Mapping[str, float], clients: int) -> dict[str, float]:
        return shares_of(self.weights, shares, clients)

    def finish(self, server: Adapter, total: Sum) -> tuple[Adapter, dict[str, float]]:
        """The residual update, and the sum of the members' weights as `weight_sum`."""
        return aggregation.residual_update(total.tensors, total.weight, server), {"weight_sum": total.weight}


def shares_of(
    weights: Literal["pairs", "uniform"], shares: Mapping[str, float], clients: int
) -> dict[str, float]:
    """Each client's share of the federation, of all training pairs (p_m) or of all clients (1 / M)."""
    return dict(shares) if weights == "pairs" else dict.fromkeys(shares, 1.0 / clients)


class ExactMean(Aggregator):
    """The mean of the clients' products B A by their training pairs, truncated to the adapters' rank.

    Averaging LoRA's factors apart gives the product of two means, which is not the mean of the products
    (Sun et al. 2024, FFA-LoRA, section 3). The mean of the products has rank K r for K clients of rank
    r. It is

        sum_m w_m B_m A_m = [w_1 B_1 ... w_K B_K] [A_1; ...; A_K] = P Q

    and its best approximation of rank r (Eckart and Young 1936) follows from the QR decompositions of P
    and Q^T and an SVD of a K r x K r matrix, so that the full matrix is never formed.

    The new factors are B = U S and A = V^T, so that A has orthonormal rows, also where a singular
    value is 0 and a column of B vanishes; training can still use such a direction.
    """

    kind: Literal["exact"] = "exact"
    """Name of the aggregator."""

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The truncated mean, and `truncation`, the lost share of the mean's squared norm."""
        total = sum(contributions.weights)
        weights = [weight / total for weight in contributions.weights]
        adapters = list(contributions.adapters())
        combined: Adapter = {}
        squared_norm = 0.0
        lost = 0.0
        for name_a in sorted(name for name in server if ".lora_A." in name):
            name_b = name_a.replace(".lora_A.", ".lora_B.")
            factors = [(adapter[name_b].double(), adapter[name_a].double()) for adapter in adapters]
            combined[name_b], combined[name_a], singular_values = truncated_mean(factors, weights)
            rank = len(server[name_a])
            squared_norm += float(singular_values.square().sum())
            lost += float(singular_values[rank:].square().sum())
        truncation = lost / squared_norm if squared_norm else 0.0
        return combined, {"weight_sum": 1.0, "truncation": truncation}


def truncated_mean(
    factors: list[tuple[torch.Tensor, torch.Tensor]], weights: list[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best approximation of rank r of sum_m w_m B_m A_m, and the singular values of that sum.

    The factors (B [out, r], A [r, in]) of each client are fp64; the results B and A fp32. There are
    min(out, in, K r) singular values.
    """
    import torch

    rank = len(factors[0][1])
    left = torch.cat([weight * b for (b, _), weight in zip(factors, weights, strict=True)], dim=1)
    right = torch.cat([a for _, a in factors], dim=0)
    left_basis, left_triangle = torch.linalg.qr(left)
    right_basis, right_triangle = torch.linalg.qr(right.T)
    u, singular_values, v_transposed = torch.linalg.svd(left_triangle @ right_triangle.T, full_matrices=False)
    b = left_basis @ (u[:, :rank] * singular_values[:rank])
    a = v_transposed[:rank] @ right_basis.T
    surplus = rank - b.shape[1]  # where the layer itself is narrower than the rank
    b = torch.nn.functional.pad(b, (0, surplus))
    a = torch.nn.functional.pad(a, (0, 0, 0, surplus))
    return b.float(), a.float(), singular_values


class TrimmedMean(Aggregator):
    """The coordinate-wise trimmed mean (Yin et al. 2018, Byzantine-Robust Distributed
    Learning, definition 2).

    For each coordinate, the largest and the smallest values of the clients are removed, and the others
    are averaged; all clients count the same. A minority of clients that send arbitrary adapters therefore
    moves no coordinate beyond the values of honest clients.
    """

    kind: Literal["trimmed"] = "trimmed"
    """Name of the aggregator."""
    share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the clients of a round whose values are removed on each side of a coordinate (beta),
    rounded up. It should be at least the share of clients that may be malicious."""

    def removed_per_side(self, clients: int) -> int:
        """Values removed on each side: share x clients, rounded up; at least one value remains."""
        return min(math.ceil(self.share * clients), (clients - 1) // 2)

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The trimmed mean, and `removed_per_side`, which is 0 if fewer than three clients took part."""
        import torch

        removed = self.removed_per_side(len(contributions))
        combined: Adapter = {}
        adapters = contributions.open()
        for name in sorted(server):
            means = [trimmed_mean(block, removed) for block in iterate_blocks(adapters, [name])]
            values = torch.from_numpy(np.concatenate(means).astype(np.float32))
            combined[name] = values.reshape(server[name].shape)
        return combined, {"removed_per_side": float(removed)}


def trimmed_mean(values: np.ndarray, removed: int) -> np.ndarray:
    """The mean of values [K, n] without the `removed` largest and smallest of each column, [n]."""
    ordered = np.sort(values, axis=0)
    mean: np.ndarray = ordered[removed : len(values) - removed].mean(axis=0)
    return mean


AnyAggregator = Annotated[SerializeAsAny[Aggregator], registered_section(AGGREGATORS, "participation")]
"""Type of an option that takes any registered aggregator."""
AnyMean = Annotated[
    ParticipationMean | PaperMean | UniformMean, one_of(ParticipationMean, PaperMean, UniformMean)
]
"""Type of an option that takes a weighted mean."""
