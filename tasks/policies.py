"""The policies that answer after the rounds: one for all, an adapter for each client, or what each client makes of the server's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe
from components.models.adapters import AdapterStore
from tasks.runs import Run, read_json

if TYPE_CHECKING:
    from components.models.policy import PersonalPolicies, Policy


@dataclass(frozen=True)
class Homes:
    """The clients' own sides, where they make something of their own of the server's adapter: their policies are asked in their place.

    Attributes:
        trains: the method's objective.
        adapters: folder of the adapter store, which theirs are beside.
        pairs: the prepared pairs.
        last: key of each client's last job; empty where it has none.
    """

    trains: str
    adapters: Path
    pairs: Path
    last: dict[str, str]


def homes_of(run: Run) -> Homes | None:
    """Of a run whose rounds are done; None where its clients use what the server has."""
    result = read_json(run.federation / "result.json")
    return Homes(result["trains"], run.federation / "adapters", run.prepared / "pairs.parquet", result["last"]) if result.get("private") else None


def open_policies(recipe: Recipe, device: str, adapter: Path | None, homes: Homes | None) -> Policy | PersonalPolicies:
    """Load a policy, or those of several clients.

    Args:
        recipe: its policy section, and its method's.
        device: where to.
        adapter: PEFT folder, or one of personal policies; None is the raw policy.
        homes: of clients that make something of their own of the adapter; None where there are none.
    """
    from components.federation.clients import LEARNERS
    from components.federation.personal_client import ClientPolicies
    from components.models.adapters import read_adapter
    from components.models.policy import PersonalPolicies, Policy, is_personal

    if adapter is not None and homes is not None:
        return ClientPolicies(LEARNERS[homes.trains](recipe, device), read_adapter(adapter)[0], AdapterStore(homes.adapters), homes.pairs, homes.last)
    return (PersonalPolicies if is_personal(adapter) else Policy)(recipe.policy, device, *([] if adapter is None else [adapter]))
