"""The protocol of an aggregator: a value that a method is built with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import SerializeAsAny

from components.config.federation import AGGREGATORS, AggregatorConfig
from components.config.registry import registered_section
from components.federation.protocol import Update, sent_adapters
from components.models.store import Adapter, AdapterStore


@dataclass(frozen=True)
class Contributions:
    """The accepted updates of one step, in the order of the clients' names."""

    store: AdapterStore
    updates: Sequence[Update]
    weights: Sequence[float]  # p_m of each update's client, its share of all training pairs
    clients: int  # of the federation (M)

    @property
    def names(self) -> list[str]:
        return [update.client for update in self.updates]

    def __len__(self) -> int:
        return len(self.updates)

    def shares(self, weights: Literal["pairs", "uniform"]) -> list[float]:
        """Each client's share of the federation, of all training pairs or of all clients."""
        if weights == "uniform":
            return [1.0 / self.clients] * len(self)
        return list(self.weights)

    def adapters(self) -> Iterator[Adapter]:
        """The clients' adapters, read one at a time."""
        return (self.store.get(digest) for digest in sent_adapters(self.updates).values())

    def open(self) -> list[Adapter]:
        """The clients' adapters, whose values are read when they are needed."""
        return self.store.open(sent_adapters(self.updates).values())


class Aggregator(AggregatorConfig, ABC):
    """An aggregator, as the section of a recipe that describes it."""

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


class LinearAggregator(Aggregator):
    """A weighted sum of the clients' adapters."""

    @abstractmethod
    def client_weights(self, contributions: Contributions) -> list[float]:
        """The weight of each contribution."""


AnyAggregator = Annotated[SerializeAsAny[Aggregator], registered_section(AGGREGATORS, "participation")]
"""Type of an option that takes any registered aggregator."""
