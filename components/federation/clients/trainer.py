"""The protocol of a trainer, which runs clients' jobs on a resident model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from components.federation.protocol import ClientResult, Job
from components.models.store import Adapter

if TYPE_CHECKING:
    import torch

    from components.federation.clients.context import ClientContext
    from components.learning.reference_cache import ReferenceCache


class Trainer(Protocol):
    """Runs jobs with one resident model."""

    reference_cache: ReferenceCache  # log-probabilities that were computed so far; trainers may share them

    @property
    def model(self) -> torch.nn.Module:
        """The resident model."""

    def initial_adapter(self, seed: int) -> Adapter:
        """The adapter that all clients start from."""

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Run a job in the context of its client.

        All trainers run TrainJob and MeasureJob, those of clients with policies of their own GenerateJob
        too; others are those that its methods plan.
        """


def unsupported_job(trainer: Trainer, job: Job) -> TypeError:
    """The error of a job that a trainer cannot run."""
    return TypeError(f"{type(trainer).__name__} has no jobs of kind '{job.kind}'")
