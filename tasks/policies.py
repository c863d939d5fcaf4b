"""The policies that answer after the rounds: one for all, an adapter for each client, or the server's adapter with each client's own parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe
from tasks.runs import Run, read_json

if TYPE_CHECKING:
    from components.models.policy import PersonalPolicies, Policy


@dataclass(frozen=True)
class Homes:
    """Where clients have parts of their own, which stay there: their policies are asked in the clients' place.

    Attributes:
        stores: folder of their stores.
        names: of the clients.
        rounds: that are done.
    """

    stores: Path
    names: tuple[str, ...]
    rounds: int


def homes_of(run: Run) -> Homes | None:
    """Of a run whose rounds are done; None where its clients have no parts of their own."""
    from components.federation.private import stores_beside
    from components.models.adapters import AdapterStore

    result = read_json(run.federation / "result.json")
    return Homes(stores_beside(AdapterStore(run.federation / "adapters")), tuple(result["clients"]), result["rounds"]) if result.get("private") else None


def open_policies(recipe: Recipe, device: str, adapter: Path | None, homes: Homes | None) -> Policy | PersonalPolicies:
    """Load a policy, or those of several clients.

    Args:
        recipe: its policy section.
        device: where to.
        adapter: PEFT folder, or one of personal policies; None is the raw policy.
        homes: of clients with parts of their own, which are taken with the adapter; None where there are none.
    """
    from components.federation.personal_client import PrivatePolicies
    from components.models.adapters import read_adapter
    from components.models.policy import PersonalPolicies, Policy, is_personal

    if adapter is not None and homes is not None:
        return PrivatePolicies(recipe, device, read_adapter(adapter)[0], homes.stores, homes.names, homes.rounds)
    return (PersonalPolicies if is_personal(adapter) else Policy)(recipe.policy, device, *([] if adapter is None else [adapter]))
