"""What is asked of the clients after the rounds, and the export: functions of an Outcome.

An outcome says which adapters a client is sent to measure its own pairs. Where clients have policies of
their own, prompts are answered by jobs too: the server never opens a private store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.config import PolicyConfig, Recipe, SelectorConfig
from components.federation.protocol import GenerateJob, Generation, MeasureJob
from components.models.adapters import export_adapter
from components.models.policy import save_client_adapters
from components.models.store import AdapterStore
from components.names import file_name
from components.results import ExportedAdapter, Outcome
from components.seeding import derive

PairCounts = Mapping[str, int | None]
"""By client, how many of its pairs of a split it measures, which it draws itself; None for all of them."""


def rows_by_client(clients: Sequence[str]) -> dict[str, list[int]]:
    """The rows of each client, sorted by name, from the client of each row."""
    rows: dict[str, list[int]] = {name: [] for name in sorted(set(clients))}
    for n, client in enumerate(clients):
        rows[client].append(n)
    return rows


def measure_jobs(
    outcome: Outcome,
    split: str,
    pairs: PairCounts,
    done: int = 0,
    seed: int = 0,
    batch_size: int | None = None,
) -> list[MeasureJob]:
    """After `done` rounds, a job for each client, on pairs of its own."""
    names = sorted(outcome.adapters)
    assigned = {client: names.index(name) for client, name in outcome.assignment.items() if outcome.votes}
    return [
        MeasureJob(
            **_common(outcome, client) | {"round": done, "seed": seed},
            split=split,
            pairs=own,
            assigned=assigned.get(client),
            batch_size=batch_size,
            is_aligned=outcome.is_aligned,
        )
        for client, own in pairs.items()
    ]


def kl_jobs(
    outcome: Outcome, prompts: Sequence[str], clients: Sequence[str], seed: int, temperature: float
) -> list[GenerateJob]:
    """A job for each client, on its prompts; `clients` has the client of each prompt."""
    return [
        GenerateJob(
            **_common(outcome, client),
            generations=tuple(
                Generation(prompts=(prompts[n],), seed=derive(seed, n), temperature=temperature) for n in rows
            ),
            kl=True,
        )
        for client, rows in rows_by_client(clients).items()
    ]


def generate_jobs(outcome: Outcome, generations: Mapping[str, Sequence[Generation]]) -> list[GenerateJob]:
    """A job for each client that has prompts to answer."""
    return [
        GenerateJob(**_common(outcome, client), generations=tuple(wanted))
        for client, wanted in generations.items()
    ]


def _common(outcome: Outcome, client: str) -> dict[str, Any]:
    """What the jobs of a client have in common."""
    return {
        "client": client,
        "round": 0,
        "seed": 0,
        "adapter_name": outcome.trained_model,
        "adapters": outcome.adapters_of(client),
        "previous_job_key": outcome.job_keys.get(client, ""),
    }


def exported_model(outcome: Outcome, recipe: Recipe) -> SelectorConfig | PolicyConfig:
    """The section of the model that the adapters are of."""
    return recipe.selector if outcome.trained_model == "selector" else recipe.policy


def export_adapters(
    outcome: Outcome, folder: Path, recipe: Recipe, store: AdapterStore
) -> dict[str, ExportedAdapter]:
    """Write the adapters as PEFT folders into a folder of the federation's folder.

    Returns:
        hash and relative folder of each adapter by name.
    """
    exported = {}
    model = exported_model(outcome, recipe)
    for name, digest in outcome.adapters.items():
        target = folder / file_name(name)
        export_adapter(store.get(digest), model.lora, model.backbone, target, model.template)
        exported[name] = ExportedAdapter(hash=digest, folder=f"{folder.name}/{target.name}")
    return exported


def export_policy(outcome: Outcome, folder: Path, recipe: Recipe, store: AdapterStore) -> None:
    """Write the policy that the rounds ended with, without anything of the clients' own.

    Args:
        folder: the PEFT folder, or the folder of one for each client.
    """
    policy = recipe.policy
    if outcome.has_client_policies:
        adapters = {name: store.get(digest) for name, digest in outcome.adapters.items()}
        save_client_adapters(adapters, policy, folder)
    else:
        (digest,) = outcome.adapters.values()
        export_adapter(store.get(digest), policy.lora, policy.backbone, folder, policy.template)
