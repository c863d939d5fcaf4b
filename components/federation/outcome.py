"""Whose model answers: what the rounds end with, and the policy that is aligned.

- `SelectorEnsemble`: selectors, whose majority labels pairs for DPO on the server
- `SharedPolicy`: one policy for all clients
- `AlignedPolicy`: one policy, which the server aligned by the selectors' labels
- `ClientAdapters`: an adapter for each client
- `PersonalizedClients`: a model for each client, which it computes from the server's adapter with
  its private modules or by steps on its own pairs

An outcome says which adapters a client is sent to measure its own pairs. Where clients have policies of
their own, prompts are answered by jobs too: the server never opens a private store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from components.config import PolicyConfig, Recipe, Registry, SelectorConfig, UserError
from components.federation.protocol import (
    AlignedMeasureJob,
    GenerateJob,
    Generation,
    KlJob,
    MeasureJob,
    PairsJob,
)
from components.models.adapters import export_adapter
from components.models.policy import save_client_adapters
from components.models.store import AdapterHash, AdapterStore
from components.names import file_name
from components.results import ExportedAdapter, OutcomeRecord
from components.seeding import derive

Positions = Mapping[str, Sequence[int] | None]
"""By client, positions of some of its pairs of a split; None for all of them."""


def rows_by_client(clients: Sequence[str]) -> dict[str, list[int]]:
    """The rows of each client, sorted by name, from the client of each row."""
    rows: dict[str, list[int]] = {name: [] for name in sorted(set(clients))}
    for n, client in enumerate(clients):
        rows[client].append(n)
    return rows


class OutcomeError(UserError, ValueError):
    """An outcome that cannot do what a phase needs."""


class Outcome(ABC):
    """Whose model answers."""

    kind: ClassVar[str]  # name of the outcome in its record
    trained_model: ClassVar[Literal["selector", "policy"]] = "policy"  # section of the adapters' model
    accuracy_label: ClassVar[str] = "Implicit reward"  # what its accuracies are accuracies of
    accuracy_note: ClassVar[str] = ""  # how clients are measured that do not all use the same model
    policy_note: ClassVar[str] = ""  # how the policies can be used, where clients have their own
    exports_clients: ClassVar[bool] = False  # whether the aligned policy is a PEFT folder for each client
    measured_by: ClassVar[type[PairsJob]] = MeasureJob
    keeps_modules: ClassVar[bool] = False  # whether private modules or steps belong to a client's model

    def __init__(self, record: OutcomeRecord) -> None:
        self.record = record

    @property
    def clients(self) -> list[str]:
        """The clients with models of their own; empty where all clients use the same."""
        return []

    @property
    def adapter(self) -> AdapterHash:
        """The only adapter."""
        (digest,) = self.record.adapters.values()
        return digest

    def adapters_of(self, client: str) -> tuple[AdapterHash, ...]:
        """The adapters of a client's model: one, or those of all selectors."""
        return (self.adapter,)

    def measure_jobs(
        self, split: str, positions: Positions, done: int = 0, batch_size: int | None = None
    ) -> list[PairsJob]:
        """After `done` rounds, a job for each client, on pairs of its own."""
        return [
            self.measured_by(
                **self._named(client) | {"round": done},
                adapters=self.adapters_of(client),
                split=split,
                positions=None if own is None else tuple(own),
                batch_size=batch_size,
            )
            for client, own in positions.items()
        ]

    def kl_jobs(
        self, prompts: Sequence[str], clients: Sequence[str], seed: int, temperature: float
    ) -> list[KlJob]:
        """A job for each client, on its prompts; `clients` has the client of each prompt."""
        by_client = rows_by_client(clients)
        return [
            KlJob(
                **self._named(client),
                adapter=self.adapters_of(client)[0],
                prompts=tuple(prompts[n] for n in rows),
                seeds=tuple(derive(seed, n) for n in rows),
                temperature=temperature,
            )
            for client, rows in by_client.items()
        ]

    def generate_jobs(self, generations: Mapping[str, Sequence[Generation]]) -> list[GenerateJob]:
        """A job for each client that has prompts to answer."""
        return [
            GenerateJob(**self._named(client), adapter=self.adapters_of(client)[0], generations=tuple(wanted))
            for client, wanted in generations.items()
        ]

    def _named(self, client: str) -> dict[str, Any]:
        """What the jobs of a client have in common."""
        return {
            "client": client,
            "round": 0,
            "seed": 0,
            "adapter_name": self.trained_model,
            "previous_job_key": self.record.job_keys.get(client, ""),
        }

    def export(self, folder: Path, recipe: Recipe, store: AdapterStore) -> dict[str, ExportedAdapter]:
        """Write the adapters as PEFT folders into a folder of the federation's folder.

        Returns:
            hash and relative folder of each adapter by name.
        """
        exported = {}
        for name, digest in self.record.adapters.items():
            target = folder / file_name(name)
            self._export_adapter(digest, target, recipe, store)
            exported[name] = ExportedAdapter(hash=digest, folder=f"{folder.name}/{target.name}")
        return exported

    def exported_model(self, recipe: Recipe) -> SelectorConfig | PolicyConfig:
        """The section of the model that the adapters are of."""
        return recipe.selector if self.trained_model == "selector" else recipe.policy

    @abstractmethod
    def export_policy(self, folder: Path, recipe: Recipe, store: AdapterStore) -> bool:
        """Write the policy that the rounds ended with; False where one has to be aligned first.

        Args:
            folder: the PEFT folder, or the folder of one for each client.
        """

    def _export_adapter(self, digest: AdapterHash, folder: Path, recipe: Recipe, store: AdapterStore) -> None:
        model = self.exported_model(recipe)
        export_adapter(store.get(digest), model.lora, model.backbone, folder, model.template)


class SelectorEnsemble(Outcome):
    """Selectors; a pair's label is their majority's. Clients may each be assigned one."""

    kind = "selector-ensemble"
    trained_model = "selector"
    accuracy_label = "Selector accuracy"

    @property
    def names(self) -> list[str]:
        """The selectors, in the order of their votes."""
        return sorted(self.record.adapters)

    def adapters_of(self, client: str) -> tuple[AdapterHash, ...]:
        return tuple(self.record.adapters[name] for name in self.names)

    def measure_jobs(
        self, split: str, positions: Positions, done: int = 0, batch_size: int | None = None
    ) -> list[PairsJob]:
        assigned = {client: self.names.index(name) for client, name in self.record.assignment.items()}
        return [
            job.model_copy(update={"assigned": assigned.get(job.client)})
            for job in super().measure_jobs(split, positions, done, batch_size)
        ]

    def export_policy(self, folder: Path, recipe: Recipe, store: AdapterStore) -> bool:
        """Nothing: a policy is aligned by the pairs that the selectors label."""
        return False


class SharedPolicy(Outcome):
    """One policy for all clients."""

    kind = "shared-policy"

    def export_policy(self, folder: Path, recipe: Recipe, store: AdapterStore) -> bool:
        self._export_adapter(self.adapter, folder, recipe, store)
        return True


class AlignedPolicy(SharedPolicy):
    """One policy, which the server has aligned by DPO; it is sent to clients that measure it."""

    kind = "aligned-policy"
    measured_by = AlignedMeasureJob


class ClientAdapters(Outcome):
    """An adapter for each client, under its name."""

    kind = "client-adapters"
    exports_clients = True
    policy_note = (
        "Each client has an aligned policy of its own, a PEFT folder within the folder `aligned`. The"
        " registered model has all of them: its column client_id says whose policy answers."
    )
    accuracy_note = "each client's own adapter, on its own pairs"

    @property
    def clients(self) -> list[str]:
        return sorted(self.record.adapters)

    def adapters_of(self, client: str) -> tuple[AdapterHash, ...]:
        return (self.record.adapters[client],)

    def export_policy(self, folder: Path, recipe: Recipe, store: AdapterStore) -> bool:
        adapters = {name: store.get(digest) for name, digest in self.record.adapters.items()}
        save_client_adapters(adapters, recipe.policy, folder)
        return True


class PersonalizedClients(SharedPolicy):
    """A model for each client, made at the client of the server's adapter and its own modules or steps.

    The exported policy is the shared adapter; nothing of the clients' own is in it.
    """

    kind = "personalized-clients"
    keeps_modules = True
    policy_note = (
        "Each client's policy is the shared adapter with private modules, which stay with the client. The"
        " PEFT folder and the registered model are the shared adapter."
    )
    accuracy_note = "each client's own model from the server's adapter, on its own pairs"

    @property
    def clients(self) -> list[str]:
        return sorted(self.record.job_keys)


OUTCOMES: Registry[type[Outcome]] = Registry(
    "outcome",
    "fed_rlhf.outcomes",
    {
        outcome.kind: f"{__name__}:{outcome.__name__}"
        for outcome in (SelectorEnsemble, SharedPolicy, AlignedPolicy, ClientAdapters, PersonalizedClients)
    },
)
"""Outcomes by the kind of their records."""


def load_outcome(record: OutcomeRecord) -> Outcome:
    """The outcome of a record.

    Raises:
        OutcomeError: its kind is not known.
    """
    if record.kind not in OUTCOMES:
        raise OutcomeError(
            f"the outcome '{record.kind}' is not known; there are: {', '.join(OUTCOMES.names())}"
        )
    return OUTCOMES.load(record.kind)(record)
