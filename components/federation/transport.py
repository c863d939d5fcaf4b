"""How jobs reach the clients, and how their updates reach the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from components.config import Recipe
from components.config.privacy import ClientPrivacy
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.clients.worker import build_trainer, run_job
from components.federation.private_sums import contribution_fault
from components.federation.protocol import Failure, Job, Update
from components.federation.step_answers import StepAnswers, Weights, add_up, collect
from components.models.store import Adapter


class Transport(ABC):
    """Runs the jobs of a step; runtime.transport names the one of a recipe.

    It has two verbs: `run` gives each client's answer, and `sum` weighted sums of the tensors that clients
    send. A method that needs sums alone is never given a single update. A transport has the recipe and the
    contexts that it was opened with as attributes, which `sum` uses.
    """

    recipe: Recipe
    contexts: ClientContexts

    @classmethod
    @abstractmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts) -> Self:
        """The transport to the clients of a federation, whose contexts it opens where they work."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Sequence[Update | Failure]:
        """An update or a failure for each job, in any order.

        The jobs are of one class, whose `trainer` carries them out. Measurements involve clients without
        training pairs too.
        """

    def sum(self, jobs: Sequence[Job], weights: Weights, template: Adapter) -> StepAnswers:
        """The weighted sums of the clients' tensors, and who is in them.

        A client whose tensors are not finite, or are others than expected, is in no sum. This function sums
        what `run` gives, in fp32 and in the order of the clients' names.

        Args:
            jobs: as of `run`; all send tensors.
            weights: which clients each sum is of, and with which weights.
            template: has the names, shapes and types of the expected tensors.
        """
        store, ratio = self.contexts.adapters, self.recipe.federation.max_update_ratio
        config = self.recipe.federation
        fault = None
        if isinstance(config.privacy, ClientPrivacy):
            frozen = config.options.local().frozen
            fault = partial(contribution_fault, clip=config.privacy.clip, frozen=frozen)
        answers = collect(jobs, self.run(jobs), store, template, ratio, fault)
        return add_up(answers, store, weights, self.recipe.tracking.client_figures)

    def close(self) -> None:  # noqa: B027  # most transports have nothing to end
        """End the work with the clients; nothing is run afterwards."""


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Runs the jobs in this process, one client after the other."""

    recipe: Recipe
    contexts: ClientContexts
    trainers: dict[str, Trainer] = field(default_factory=dict)  # on the processor, by `Job.trainer`

    @classmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts) -> Self:
        return cls(recipe, contexts)

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """An update for each job; an error ends the run."""
        return [run_job(job, self._trainer(job.trainer), self.contexts, self.recipe) for job in jobs]

    def _trainer(self, name: str) -> Trainer:
        if name not in self.trainers:
            self.trainers[name] = build_trainer(self.recipe, "cpu", name)
        return self.trainers[name]
