"""The aligned policy of a run, as it is stored: one policy, or one for each client.

The policy of a client is an adapter, or what its private modules make of a shared adapter. A stored
policy opens a set of policies, which answers prompts, and scores pairs by its implicit reward.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from components.config import InputFile, Recipe, UserError
from components.data.records import Pairs
from components.federation.clients.base import Trainer
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import build_trainer
from components.federation.outcome import Workspace, score_by_client
from components.models.adapters import read_adapter
from components.models.generation import Completion
from components.models.policy import (
    GREEDY,
    ClientPolicySet,
    Policy,
    Sampling,
    assign_round_robin,
    client_adapter_folders,
)
from components.results import PolicyRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.models.store import Adapter

Progress = Callable[[int, int], None]
Margins = npt.NDArray[np.float64]


class StoredPolicyError(UserError, ValueError):
    """A stored policy that cannot be opened."""


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt.

    Attributes:
        completion: the answer.
        client: whose policy wrote it; empty if all clients share one.
    """

    completion: Completion
    client: str


class PolicySet(ABC):
    """Policies that are open on a device.

    Attributes:
        clients: names of the clients with policies of their own, sorted; empty if all share one.
    """

    clients: list[str]

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of all policies."""

    @abstractmethod
    def select(self, client: str) -> Policy:
        """The policy of a client, until another one is selected.

        Args:
            client: its name; empty for the shared policy.
        """

    @abstractmethod
    def answer(
        self,
        prompts: Sequence[str],
        seed: int,
        progress: Progress | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[list[Answer]]:
        """Answers to each prompt; clients with policies of their own take the prompts round-robin."""

    @abstractmethod
    def assign_questions(self, count: int, question_set: str) -> list[str]:
        """The client that answers each question of a set.

        Args:
            count: number of questions.
            question_set: name of their set.

        Returns:
            a name for each question; empty names if all clients share a policy.
        """


class SharedPolicySet(PolicySet):
    """One policy for all clients."""

    def __init__(self, policy: Policy) -> None:
        self.clients = []
        self._policy = policy

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self._policy.tokenizer

    def select(self, client: str) -> Policy:
        """The shared policy."""
        return self._policy

    def answer(
        self,
        prompts: Sequence[str],
        seed: int,
        progress: Progress | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[list[Answer]]:
        """Answers of the shared policy."""
        completions = self._policy.generate(
            prompts, seed, sampling.temperature, sampling.count, progress=progress
        )
        return [[Answer(completion, "") for completion in samples] for samples in completions]

    def assign_questions(self, count: int, question_set: str) -> list[str]:
        """All questions to the shared policy."""
        return [""] * count


class OwnPolicySet(PolicySet):
    """A policy for each client."""

    def __init__(self, policies: ClientPolicySet) -> None:
        self.clients = policies.clients
        self._policies = policies

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the common backbone."""
        return self._policies.policy.tokenizer

    def select(self, client: str) -> Policy:
        """The policy of a client.

        Raises:
            PolicyError: there is no such client.
        """
        return self._policies.select(client)

    def answer(
        self,
        prompts: Sequence[str],
        seed: int,
        progress: Progress | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[list[Answer]]:
        """Answers of the clients' policies, round-robin."""
        clients = assign_round_robin(len(prompts), self.clients)
        completions = self._policies.generate(prompts, clients, seed, progress, sampling)
        return [
            [Answer(completion, client) for completion in samples]
            for samples, client in zip(completions, clients, strict=True)
        ]

    def assign_questions(self, count: int, question_set: str) -> list[str]:
        """The questions of a client's own set to that client; those of other sets round-robin.

        Clients that share a set (<set>-0, <set>-1 and so on) answer its questions round-robin.
        """
        if question_set in self.clients:
            return [question_set] * count
        sharing = [name for name in self.clients if re.fullmatch(rf"{re.escape(question_set)}-\d+", name)]
        return assign_round_robin(count, sharing or self.clients)


class StoredPolicy(ABC):
    """An aligned policy in a run folder.

    Attributes:
        kind: name in its record.
        record: folder, and private state of clients.
        folder: the PEFT folder, or the folder of one for each client.
    """

    kind: ClassVar[str]

    def __init__(self, record: PolicyRecord, alignment: Path) -> None:
        """A policy of a record, whose folder is relative to the alignment's folder."""
        self.record = record
        self.folder = alignment / record.folder

    @property
    def clients(self) -> list[str] | None:
        """The clients whose pairs it can score; None if it can score all pairs."""
        return None

    @abstractmethod
    def open(self, device: str, workspace: Workspace) -> PolicySet:
        """Load the policies on a device."""

    @abstractmethod
    def score_margins(self, pairs: Pairs, workspace: Workspace) -> Margins:
        """Margins of the implicit reward over beta.

        Args:
            pairs: N rows with prompt, chosen, rejected and client_id, of `clients` only.
            workspace: the federation.

        Returns:
            [N], positive if the reward prefers the chosen completion (nats).
        """


class SingleStoredPolicy(StoredPolicy):
    """One policy for all clients."""

    kind = "single"

    def open(self, device: str, workspace: Workspace) -> PolicySet:
        """The backbone with the adapter."""
        return SharedPolicySet(Policy(workspace.recipe.policy, device, self.folder))

    def score_margins(self, pairs: Pairs, workspace: Workspace) -> Margins:
        """Margins under the adapter."""
        return score_folders([(self.folder, list(range(len(pairs))))], pairs, workspace)


class ClientStoredPolicies(StoredPolicy):
    """An adapter for each client."""

    kind = "client-adapters"

    @property
    def clients(self) -> list[str]:
        """The clients that have an adapter."""
        return sorted(client_adapter_folders(self.folder))

    def open(self, device: str, workspace: Workspace) -> PolicySet:
        """The backbone with a slot for the clients' adapters."""
        return OwnPolicySet(ClientPolicySet(workspace.recipe.policy, device, self.folder))

    def score_margins(self, pairs: Pairs, workspace: Workspace) -> Margins:
        """Margins of each client's pairs under its own adapter."""
        folders = client_adapter_folders(self.folder)
        names = sorted({pair["client_id"] for pair in pairs})
        parts = [
            (folders[name], [n for n, pair in enumerate(pairs) if pair["client_id"] == name])
            for name in names
        ]
        return score_folders(parts, pairs, workspace)


class PersonalizedStoredPolicies(StoredPolicy):
    """A policy for each client, of a shared adapter and the client's private modules."""

    kind = "personalized-clients"

    @property
    def clients(self) -> list[str]:
        """The participating clients."""
        return sorted(self.record.job_keys)

    def open(self, device: str, workspace: Workspace) -> PolicySet:
        """A resident model, into which the selected client's modules are loaded."""
        trainer = build_trainer(workspace.recipe, device)
        adapter, _ = read_adapter(self.folder)
        return OwnPolicySet(PersonalizedPolicySet(trainer, adapter, workspace.contexts, self.record.job_keys))

    def score_margins(self, pairs: Pairs, workspace: Workspace) -> Margins:
        """Margins of each client's pairs by its own model."""
        adapter, _ = read_adapter(self.folder)
        scores = score_by_client(pairs, workspace, lambda _: adapter, self.record.job_keys)
        margins: Margins = scores.margins[0]
        return margins


class PersonalizedPolicySet(ClientPolicySet):
    """Policies of a shared adapter and clients' private modules, on one resident model."""

    def __init__(
        self, trainer: Trainer, adapter: Adapter, contexts: ClientContexts, job_keys: dict[str, str]
    ) -> None:
        """Open the policies.

        Args:
            trainer: of the method.
            adapter: the shared adapter.
            contexts: opens the clients' contexts.
            job_keys: key of each client's last accepted job, empty before the first one.
        """
        self.clients = sorted(job_keys)
        self._trainer = trainer
        self._adapter = adapter
        self._contexts = {name: contexts.open(name, key) for name, key in job_keys.items()}
        self._selected = ""
        self.policy = trainer.resident_policy()
        trainer.model.eval()

    def select(self, client: str) -> Policy:
        """Load the private modules of a client into the resident model.

        Raises:
            PolicyError: there is no such client.
        """
        self.check_client(client)
        if client != self._selected:
            self.policy = self._trainer.client_policy(self._adapter, self._contexts[client])
            self._selected = client
        return self.policy


STORED_POLICIES: dict[str, type[StoredPolicy]] = {
    policy.kind: policy for policy in (SingleStoredPolicy, ClientStoredPolicies, PersonalizedStoredPolicies)
}
"""Stored policies by the kind of their records."""


def load_policy(record: PolicyRecord, alignment: Path) -> StoredPolicy:
    """Open the record of a policy.

    Args:
        record: kind and folder.
        alignment: the alignment's folder, which the record's folder is relative to.

    Raises:
        StoredPolicyError: its kind is not known.
    """
    if record.kind not in STORED_POLICIES:
        raise StoredPolicyError(
            f"the kind '{record.kind}' of a stored policy is not known (known: {', '.join(STORED_POLICIES)}):"
            " use the version of the project that wrote the run."
        )
    return STORED_POLICIES[record.kind](record, alignment)


def load_base_policy(recipe: Recipe, device: str) -> Policy:
    """The policy before the alignment: it samples completions, and is what aligned answers are compared with.

    It is the backbone, with DPO's reference adapter where the recipe has one and the server aligns.
    """
    adapter = base_adapter(recipe)
    return Policy(recipe.policy, device, None if adapter is None else Path(adapter))


def base_adapter(recipe: Recipe) -> InputFile | None:
    """Folder of the adapter of the policy before the alignment; None for the backbone alone."""
    aligns = recipe.federation.options.needs_server_prompts
    return recipe.alignment.dpo.reference_adapter if aligns else None


def open_base_policy(recipe: Recipe, device: str) -> PolicySet:
    """The policy before the alignment, see load_base_policy."""
    return SharedPolicySet(load_base_policy(recipe, device))


def score_folders(parts: Sequence[tuple[Path, list[int]]], pairs: Pairs, workspace: Workspace) -> Margins:
    """Margins of the implicit reward over beta under adapters in PEFT folders.

    Args:
        parts: (PEFT folder, indices of the pairs that are scored by it); all with the same LoRA
            configuration.
        pairs: N pairs.
        workspace: the recipe, and the devices.

    Returns:
        [N].
    """
    from components.learning.pair_scores import implicit_margins, pair_logprobs
    from components.models.resident import ResidentPolicy

    margins = np.zeros(len(pairs))
    if not parts:
        return margins
    _, lora = read_adapter(parts[0][0])
    policy = workspace.recipe.policy.model_copy(update={"lora": lora})
    batch_size = workspace.recipe.evaluation.score_batch_size
    with workspace.lend_device() as device:
        references = _reference_logprobs(pairs, workspace.recipe, device)
        resident = ResidentPolicy(policy, device)
        for folder, rows in parts:
            chosen = [pairs[n] for n in rows]
            if references is None:
                reference = pair_logprobs(resident, chosen, batch_size, reference=True)
            else:
                reference = references[rows]
            adapter, _ = read_adapter(folder)
            resident.slot.load(adapter)
            margins[rows] = implicit_margins(pair_logprobs(resident, chosen, batch_size), reference)
    return margins


def _reference_logprobs(pairs: Pairs, recipe: Recipe, device: str) -> Margins | None:
    """Log-probabilities of completions under DPO's reference adapter, [N, 2]; None without one."""
    from components.learning.pair_scores import pair_logprobs
    from components.models.resident import ResidentPolicy

    folder = base_adapter(recipe)
    if folder is None:
        return None
    adapter, lora = read_adapter(Path(folder))
    resident = ResidentPolicy(recipe.policy.model_copy(update={"lora": lora}), device)
    resident.slot.load(adapter)
    return pair_logprobs(resident, pairs, recipe.evaluation.score_batch_size)


def kl_to_base(
    policies: PolicySet, prompts: Sequence[str], seed: int, temperature: float
) -> dict[str, float]:
    """Estimate KL(policy || backbone) on sampled completions, see kl_to_reference.

    With policies of their own, clients complete the prompts round-robin, and the KL is the mean
    over the prompts.
    """
    from components.alignment.kl import kl_to_reference
    from components.seeding import derive

    if not policies.clients:
        return kl_to_reference(policies.select(""), prompts, seed, temperature)
    clients = assign_round_robin(len(prompts), policies.clients)
    measured = [
        kl_to_reference(policies.select(client), [prompt], derive(seed, n), temperature)["kl_sequence"]
        for n, (client, prompt) in enumerate(zip(clients, prompts, strict=True))
    ]
    return {"kl_sequence": sum(measured) / len(measured)} if measured else {}
