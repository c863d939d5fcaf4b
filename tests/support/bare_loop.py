"""A federation without Prefect and MLflow: the loop of components, on prepared data.

What a federation consists of (method, commits, trainer) is built here and nowhere else in the
tests.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from components.config import Recipe
from components.federation.clients.context import ClientContext, ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.commits import Commits
from components.federation.protocol import Federation, Job, ServerState, Update
from components.models.store import AdapterStore
from components.results import StepRecord
from tests.support.bound_methods import BoundMethod, bind

FINGERPRINT = "bare loop"
"""Fingerprint of the commits."""


@dataclass(frozen=True)
class BareLoop:
    """A federation on prepared data, and what runs it.

    Attributes:
        recipe: what is run.
        prepared: folder of prepared data.
        commits: the server's folder `federation`.
        trainer: the resident trainer.
        federation: the participating clients.
        bound: the method, with the store of the commits.
    """

    recipe: Recipe
    prepared: Path
    commits: Commits
    trainer: Trainer
    federation: Federation
    bound: BoundMethod

    @property
    def contexts(self) -> ClientContexts:
        """Opens the clients' contexts."""
        return ClientContexts(self.commits.store, self.prepared / "pairs.parquet")

    @property
    def records(self) -> list[StepRecord]:
        """The records of all committed steps."""
        committed = self.commits.latest(self.bound.memory_type)
        assert committed is not None
        return committed[1]

    def initial_state(self) -> ServerState[Any]:
        """The state before the first step."""
        return self.bound.start(self.federation, self.recipe.seed)

    def latest_state(self) -> ServerState[Any]:
        """The last committed state."""
        committed = self.commits.latest(self.bound.memory_type)
        assert committed is not None
        return committed[0]

    def context(self, client: str) -> ClientContext:
        """The context of a client after its last accepted job."""
        job_keys = self.bound.outcome(self.latest_state()).job_keys
        return self.contexts.open(client, job_keys.get(client, ""))

    def run_job(self, job: Job) -> Update:
        """Carry out one job."""
        from components.federation.clients.worker import run_job

        return run_job(job, self.trainer, self.contexts, self.recipe)

    def run(self) -> ServerState[Any]:
        """Run all rounds, or resume those that are committed."""
        from components.federation.rounds import run_federation

        pairs = self.prepared / "pairs.parquet"
        with torch_threads(self.recipe.runtime.torch_threads or 1):
            return run_federation(self.recipe, self.federation, pairs, self.commits, self.trainer)


def open_loop(recipe: Recipe, prepared: Path, folder: Path, trainer: Trainer | None = None) -> BareLoop:
    """Open a federation.

    Args:
        recipe: what is run.
        prepared: folder of prepared data.
        folder: holds the folder `federation` of the server, and those of the clients.
        trainer: a resident trainer, see build_trainer; None builds one.
    """
    from components.data.records import read_clients, read_true_clusters
    from components.federation.clients.worker import build_trainer
    from components.federation.protocol import build_federation

    commits = Commits(folder / "federation", FINGERPRINT)
    with torch_threads(recipe.runtime.torch_threads or 1):
        trainer = trainer or build_trainer(recipe, "cpu")
        initial = commits.store.put(trainer.initial_adapter(recipe.seed))
    federation = build_federation(
        read_clients(prepared), initial, recipe.federation.clients_per_round, read_true_clusters(prepared)
    )
    return BareLoop(recipe, prepared, commits, trainer, federation, bind(recipe.federation, commits.store))


@dataclass(frozen=True)
class Federated:
    """What a loop ends with.

    Attributes:
        hashes: of the final adapters by name.
        records: of all committed steps.
    """

    hashes: dict[str, str]
    records: list[StepRecord]


def run_bare_loop(recipe: Recipe, prepared: Path, folder: Path, trainer: Trainer | None = None) -> Federated:
    """Run all rounds of a recipe, or resume those that are committed; arguments as of open_loop."""
    loop = open_loop(recipe, prepared, folder, trainer)
    state = loop.run()
    return Federated(state.adapters, loop.records)


def prepare_rewards(recipe: Recipe, prepared: Path, folder: Path, judges: Path) -> None:
    """Prepare a recipe's rewards, as the pipeline does before the rounds.

    Arguments as of run_bare_loop.

    Args:
        judges: folder of trained judges and rewards.
    """
    from prefect.logging import disable_run_logger

    from components.federation.transport import InProcessTransport
    from tasks.rewards import prepare_reward, score_pairs
    from tasks.runs import Run

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prepared").symlink_to(prepared.resolve())
    run = Run("bare loop", folder)
    contexts = ClientContexts(AdapterStore(run.federation / "adapters"), prepared / "pairs.parquet")
    transport = InProcessTransport(recipe, contexts)
    with (
        mock.patch.dict(os.environ, FED_RLHF_JUDGES=str(judges)),
        disable_run_logger(),
        torch_threads(recipe.runtime.torch_threads or 1),
    ):
        for name in recipe.rewards:
            prepare_reward.fn(run, recipe, name)
            if not recipe.federation.options.sampling:
                score_pairs(run, recipe, name, transport)


def loss_curve(records: Sequence[StepRecord]) -> list[dict[str, float]]:
    """Figures of each step: the clients' mean losses and scores, and the server's movement.

    The loss of a step without training is the validation loss of the adapters. What a step does not
    have is left out.
    """
    return [step_figures(record) for record in records]


def step_figures(record: StepRecord) -> dict[str, float]:
    """Figures of one record, see loss_curve."""
    values: dict[str, list[float]] = {}
    for client in record.clients.values():
        for name, value in client.metrics.scalars.items():
            if name == "loss" or name.startswith("score/"):
                values.setdefault(name, []).append(value)
        values.setdefault("validation_loss", []).extend(client.losses)
    for name, value in record.server.scalars.items():
        if name.endswith(("server_norm", "server_step")):
            values.setdefault(name.rpartition("/")[2], []).append(value)
    return {name: statistics.fmean(listed) for name, listed in values.items() if listed}


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let operations use so many threads, since sums are split by them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
