"""Weighted means of adapters, and the residual update of clusters (FedBiscuit eqs. 8 and 6).

LoRA's factors A and B are averaged apart, which is not the average of the products B A; see
exact.py for that.
"""

from __future__ import annotations

from typing import Annotated, Literal

from components.config import one_of
from components.federation import aggregation
from components.federation.aggregators.aggregator import Aggregator, Contributions, LinearAggregator
from components.models.store import Adapter


class ParticipationMean(LinearAggregator):
    """sum p_m phi_m / sum p_m over the clients that took part (McMahan et al. 2017)."""

    kind: Literal["participation"] = "participation"
    """Name of the aggregator."""

    def client_weights(self, contributions: Contributions) -> list[float]:
        total = sum(contributions.weights)
        return [weight / total for weight in contributions.weights]

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        pairs = zip(contributions.adapters(), contributions.weights, strict=True)
        return aggregation.weighted_average(pairs), {"weight_sum": 1.0}


class PaperMean(LinearAggregator):
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

    def client_weights(self, contributions: Contributions) -> list[float]:
        scale = contributions.clients / len(contributions)
        return [scale * weight for weight in contributions.weights]

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The weighted sum, and the sum of its weights as `weight_sum`."""
        pairs = zip(contributions.adapters(), self.client_weights(contributions), strict=True)
        total, weight_sum = aggregation.weighted_sum(pairs)
        return total, {"weight_sum": weight_sum}

    def for_clusters(self) -> Aggregator:
        """Eq. 6 with p_m."""
        return ResidualUpdate(weights="pairs")


class UniformMean(LinearAggregator):
    """(1 / A) sum phi_m: all clients that took part count the same."""

    kind: Literal["uniform"] = "uniform"
    """Name of the aggregator."""

    def client_weights(self, contributions: Contributions) -> list[float]:
        return [1.0 / len(contributions)] * len(contributions)

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        pairs = ((adapter, 1.0) for adapter in contributions.adapters())
        return aggregation.weighted_average(pairs), {"weight_sum": 1.0}

    def for_clusters(self) -> Aggregator:
        """Eq. 6 with 1 / M."""
        return ResidualUpdate(weights="uniform")


class ResidualUpdate(Aggregator):
    """(1 - sum w_m) phi_u + sum w_m phi_m (FedBiscuit eq. 6).

    With weights 'pairs', w_m is p_m; with 'uniform' it is 1 / M. Either moves a selector by its
    sampled members' share of the federation.
    """

    kind: Literal["residual"] = "residual"
    """Name of the aggregator."""
    weights: Literal["pairs", "uniform"] = "pairs"
    """Weights of the members."""

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The residual update, and the sum of the members' weights as `weight_sum`."""
        weights = contributions.shares(self.weights)
        pairs = zip(contributions.adapters(), weights, strict=True)
        return aggregation.residual_update(server, pairs), {"weight_sum": sum(weights)}


AnyLinearAggregator = Annotated[
    ParticipationMean | PaperMean | UniformMean, one_of(ParticipationMean, PaperMean, UniformMean)
]
"""Type of an option that takes a weighted mean."""
