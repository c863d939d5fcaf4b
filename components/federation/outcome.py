"""Outcomes of a federation: values that score pairs and export policies.

- `SelectorEnsemble`: selectors, whose majority labels pairs for DPO on the server
- `SharedPolicy`: one policy for all clients
- `ClientAdapters`: an adapter for each client
- `PersonalizedClients`: a model for each client, which it computes from the server's adapter with
  its private modules or by steps on its own pairs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from components.config import PolicyConfig, Recipe, Registry, SelectorConfig, UserError
from components.data.records import Pairs
from components.federation.clients.base import Trainer
from components.federation.clients.context import ClientContexts
from components.learning.pair_scores import Array, PreferenceScores, concat
from components.models.adapters import export_adapter
from components.models.policy import save_client_adapters
from components.names import file_name
from components.results import ExportedAdapter, OutcomeRecord, PolicyRecord

if TYPE_CHECKING:
    from components.models.selector import Comparison
    from components.models.store import Adapter


class OutcomeError(UserError, ValueError):
    """An outcome that cannot do what a phase needs."""


@dataclass(frozen=True)
class Workspace:
    """Where the adapters, the clients and the models of a federation are.

    Attributes:
        recipe: the run's recipe.
        contexts: opens the clients' contexts.
        lend_trainer: lends the resident trainer of the recipe's method.
        lend_device: lends a device.
    """

    recipe: Recipe
    contexts: ClientContexts
    lend_trainer: Callable[[], AbstractContextManager[Trainer]]
    lend_device: Callable[[], AbstractContextManager[str]]

    def adapter(self, digest: str) -> Adapter:
        """An adapter of the federation's store."""
        return self.contexts.adapters.get(digest)


class Outcome(ABC):
    """What a federation ends with.

    Attributes:
        kind: name of the outcome in its record.
        trained_model: section of the recipe whose model the adapters are of.
        accuracy_label: what its accuracies are accuracies of.
        accuracy_note: how clients are measured, where they do not all use the same model.
        policy_note: how the aligned policies can be used, where clients have their own.
        exports_clients: whether the aligned policy is a PEFT folder for each client.
        record: the adapters, and which client uses which.
    """

    kind: ClassVar[str]
    policy_note: ClassVar[str] = ""
    exports_clients: ClassVar[bool] = False
    trained_model: ClassVar[Literal["selector", "policy"]] = "policy"
    accuracy_label: ClassVar[str] = "Implicit reward"
    accuracy_note: ClassVar[str] = ""

    def __init__(self, record: OutcomeRecord) -> None:
        self.record = record

    @property
    def clients(self) -> list[str] | None:
        """The clients whose pairs it can score; None where it can score all pairs."""
        return None

    @abstractmethod
    def score(self, pairs: Pairs, workspace: Workspace) -> PreferenceScores:
        """Scores of held-out pairs.

        Args:
            pairs: rows with prompt, chosen, rejected and client_id, of `clients` only.
            workspace: the federation.
        """

    def compare(self, comparisons: Sequence[Comparison], workspace: Workspace) -> Array:
        """Log-odds that the first completion is better, by each selector, [U, N].

        Raises:
            OutcomeError: the outcome has no selectors.
        """
        raise OutcomeError(f"the outcome '{self.kind}' has no selectors that compare completions")

    def export(self, folder: Path, workspace: Workspace) -> dict[str, ExportedAdapter]:
        """Write the adapters as PEFT folders.

        Args:
            folder: folder of all PEFT folders, under the federation's folder.
            workspace: the federation.

        Returns:
            hash and relative folder of each adapter by name.
        """
        model = self.exported_model(workspace.recipe)
        exported = {}
        for name, digest in self.record.adapters.items():
            target = folder / file_name(name)
            export_adapter(workspace.adapter(digest), model.lora, model.backbone, target, model.template)
            exported[name] = ExportedAdapter(hash=digest, folder=f"{folder.name}/{target.name}")
        return exported

    def exported_model(self, recipe: Recipe) -> SelectorConfig | PolicyConfig:
        """The section of the model that the adapters are of."""
        return recipe.selector if self.trained_model == "selector" else recipe.policy

    @abstractmethod
    def export_policy(self, folder: Path, workspace: Workspace) -> PolicyRecord | None:
        """Write the policy that the rounds ended with; None where a policy has to be aligned first.

        Args:
            folder: the PEFT folder, or the folder of one for each client, in the alignment's
                folder.
            workspace: the federation.
        """


class SelectorEnsemble(Outcome):
    """Selectors; a pair's label is their majority's. Clients may each be assigned one."""

    kind = "selector-ensemble"
    trained_model = "selector"
    accuracy_label = "Selector accuracy"

    def score(self, pairs: Pairs, workspace: Workspace) -> PreferenceScores:
        """Log-odds by each selector, in the order of their names."""
        names = sorted(self.record.adapters)
        scores = score_distinct(self.record.adapters, names, pairs, workspace)
        if not self.record.assignment:
            return scores
        assigned = [
            names.index(self.record.assignment[pair["client_id"]])
            if pair["client_id"] in self.record.assignment
            else -1
            for pair in pairs
        ]
        return scores.with_assignment(assigned)

    def compare(self, comparisons: Sequence[Comparison], workspace: Workspace) -> Array:
        """Log-odds by each selector, in the order of their names."""
        adapters = [workspace.adapter(self.record.adapters[name]) for name in sorted(self.record.adapters)]
        with workspace.lend_trainer() as trainer:
            return trainer.compare(comparisons, adapters)

    def export_policy(self, folder: Path, workspace: Workspace) -> None:
        """Nothing: a policy is aligned by the pairs that the selectors label."""
        return None


class SharedPolicy(Outcome):
    """One policy for all clients."""

    kind = "shared-policy"

    def score(self, pairs: Pairs, workspace: Workspace) -> PreferenceScores:
        """Log-ratios to the reference under the adapter."""
        return score_distinct(self.record.adapters, sorted(self.record.adapters), pairs, workspace)

    def export_policy(self, folder: Path, workspace: Workspace) -> PolicyRecord:
        """The adapter as a PEFT folder."""
        export_shared_adapter(self, folder, workspace)
        return PolicyRecord(kind="single", folder=folder.name)


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
        """The clients that have an adapter."""
        return sorted(self.record.adapters)

    def score(self, pairs: Pairs, workspace: Workspace) -> PreferenceScores:
        """Each client's pairs by its own adapter."""
        adapters = self.record.adapters
        return score_by_client(pairs, workspace, lambda name: workspace.adapter(adapters[name]), {})

    def export_policy(self, folder: Path, workspace: Workspace) -> PolicyRecord:
        """A PEFT folder for each client."""
        adapters = {name: workspace.adapter(digest) for name, digest in self.record.adapters.items()}
        save_client_adapters(adapters, workspace.recipe.policy, folder)
        return PolicyRecord(kind="client-adapters", folder=folder.name)


class PersonalizedClients(Outcome):
    """A model for each client, made of the server's adapter and the client's own modules or steps.

    It is built at the client when it is needed.
    """

    kind = "personalized-clients"
    policy_note = (
        "Each client's policy is the shared adapter with private modules, which stay with the client. The"
        " PEFT folder and the registered model are the shared adapter."
    )
    accuracy_note = "each client's own model from the server's adapter, on its own pairs"

    @property
    def clients(self) -> list[str]:
        """The participating clients."""
        return sorted(self.record.job_keys)

    def score(self, pairs: Pairs, workspace: Workspace) -> PreferenceScores:
        """Each client's pairs by its own model."""
        (digest,) = self.record.adapters.values()
        return score_by_client(pairs, workspace, lambda _: workspace.adapter(digest), self.record.job_keys)

    def export_policy(self, folder: Path, workspace: Workspace) -> PolicyRecord:
        """The shared adapter as a PEFT folder; nothing of the clients' own is in it."""
        export_shared_adapter(self, folder, workspace)
        return PolicyRecord(kind="personalized-clients", folder=folder.name, job_keys=self.record.job_keys)


OUTCOMES: Registry[type[Outcome]] = Registry(
    "outcome",
    "fed_rlhf.outcomes",
    {
        outcome.kind: f"{__name__}:{outcome.__name__}"
        for outcome in (SelectorEnsemble, SharedPolicy, ClientAdapters, PersonalizedClients)
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


def export_shared_adapter(outcome: Outcome, folder: Path, workspace: Workspace) -> None:
    """Write the only adapter of an outcome as a PEFT folder."""
    (digest,) = outcome.record.adapters.values()
    model = outcome.exported_model(workspace.recipe)
    export_adapter(workspace.adapter(digest), model.lora, model.backbone, folder, model.template)


def score_distinct(
    adapters: dict[str, str], names: Sequence[str], pairs: Pairs, workspace: Workspace
) -> PreferenceScores:
    """Scores by several adapters, each distinct one computed once.

    Args:
        adapters: hash by name.
        names: the order of the models.
        pairs: the scored pairs.
        workspace: the federation.
    """
    distinct = list(dict.fromkeys(adapters.values()))
    with workspace.lend_trainer() as trainer:
        scores = trainer.score_pairs(pairs, [workspace.adapter(digest) for digest in distinct])
    return scores.select([distinct.index(adapters[name]) for name in names])


def score_by_client(
    pairs: Pairs, workspace: Workspace, load: Callable[[str], Adapter], job_keys: dict[str, str]
) -> PreferenceScores:
    """Scores of each client's pairs by its own model.

    Args:
        pairs: the scored pairs.
        workspace: the federation.
        load: gives the adapter that a client, by its name, is sent.
        job_keys: key of each client's last accepted job, for clients with private state.
    """
    parts = []
    with workspace.lend_trainer() as trainer:
        for name in sorted({pair["client_id"] for pair in pairs}):
            rows = [n for n, pair in enumerate(pairs) if pair["client_id"] == name]
            context = workspace.contexts.open(name, job_keys.get(name, ""))
            parts.append((rows, trainer.score_client_pairs([pairs[n] for n in rows], load(name), context)))
    return concat(parts)
