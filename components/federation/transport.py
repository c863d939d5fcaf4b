"""How jobs reach the clients, and how their updates reach the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from components.config import Recipe
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.clients.worker import build_trainer, run_job
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Failure, Job, Update


class Transport(ABC):
    """Runs the jobs of a step; runtime.transport names the one of a recipe."""

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
        postprocessors = postprocessors_of(self.recipe.federation)
        return [run_job(job, self._trainer(job.trainer), self.contexts, postprocessors) for job in jobs]

    def _trainer(self, name: str) -> Trainer:
        if name not in self.trainers:
            self.trainers[name] = build_trainer(self.recipe, "cpu", name)
        return self.trainers[name]
