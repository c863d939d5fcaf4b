"""How jobs reach the clients, and how their updates reach the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from components.federation.clients.base import Trainer
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import run_job
from components.federation.postprocessing import PostProcessor
from components.federation.protocol import Failure, Job, Update


class Transport(Protocol):
    """Runs the jobs of a step."""

    def run(self, jobs: Sequence[Job]) -> Sequence[Update | Failure]:
        """An update or a failure for each job, in any order."""
        ...


@dataclass(frozen=True)
class InProcessTransport:
    """Runs the jobs in this process, one client after the other.

    Attributes:
        trainer: the resident model.
        contexts: opens the clients' contexts.
        postprocessors: applied to what the clients send.
    """

    trainer: Trainer
    contexts: ClientContexts
    postprocessors: tuple[PostProcessor, ...] = ()

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """An update for each job; an error ends the run."""
        return [run_job(job, self.trainer, self.contexts, self.postprocessors) for job in jobs]
