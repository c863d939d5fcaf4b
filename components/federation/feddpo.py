"""FedDPO: each client trains the policy by DPO, and the server averages (FedBiscuit section 7.1; Ye et al. 2024, OpenFedLLM).

The reference of eq. 2 is theta_0, the policy that everybody started from, in all rounds.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from components.config import FederationConfig
from components.federation import fedavg
from components.models.adapters import AdapterStore


class Options(fedavg.Options):
    """Options of FedDPO."""

    beta: float = Field(0.1, gt=0, description="Inverse temperature of the implicit reward; Rafailov et al. use 0.1.")


class FedDPO(fedavg.FedAvg):
    """The strategy; see the module's docstring."""

    trains: ClassVar[str] = "dpo"


def build(config: FederationConfig, options: Options, store: AdapterStore) -> FedDPO:
    """FedDPO over a store.

    Raises:
        RecipeError: more than one selector is asked for.
    """
    fedavg.one_adapter(config)
    return FedDPO(config, options, store)
