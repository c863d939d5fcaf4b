"""How jobs reach the clients, and how their updates reach the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from components.config import Recipe
from components.federation.clients.base import Trainer
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import build_trainer, run_job
from components.federation.postprocessing import PostProcessor, postprocessors_of
from components.federation.protocol import Failure, Job, Update


class Transport(ABC):
    """Runs the jobs of a step; runtime.transport names the one of a recipe."""

    @classmethod
    @abstractmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts) -> Self:
        """The transport to the clients of a federation, whose contexts it opens where they work."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Sequence[Update | Failure]:
        """An update or a failure for each job, in any order."""


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Runs the jobs in this process, one client after the other."""

    trainer: Trainer  # the resident model
    contexts: ClientContexts
    postprocessors: tuple[PostProcessor, ...] = ()  # applied to what the clients send

    @classmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts, trainer: Trainer | None = None) -> Self:
        """The transport with a trainer; None builds the one of the method on the processor."""
        return cls(trainer or build_trainer(recipe, "cpu"), contexts, postprocessors_of(recipe.federation))

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """An update for each job; an error ends the run."""
        return [run_job(job, self.trainer, self.contexts, self.postprocessors) for job in jobs]
