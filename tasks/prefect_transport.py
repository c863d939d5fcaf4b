"""How jobs reach the clients of a run: mapped to Prefect tasks, or by an installed transport."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from prefect import runtime
from prefect.futures import PrefectFuture
from pydantic import JsonValue

from components.config import Recipe, Registry
from components.data.records import UNSEEN, DataError, pairs_digest, read_pairs
from components.data.sources.owners import has_owners
from components.federation import rounds
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import failure, finished_update, run_job
from components.federation.protocol import Failure, Job, Update
from components.federation.transport import InProcessTransport, Transport
from components.io import FullDiskError, write_atomically
from components.models.store import AdapterStore
from components.names import short_labels
from components.owners.home import sockets_root
from components.owners.jobs import PublishJob
from components.owners.requests import Requests
from tasks import ray_cluster, ray_tasks
from tasks.devices import POOL, map_task, max_tasks
from tasks.owner_processes import HOST, JobFailed, ask_owner, name_at_owners, release_owner
from tasks.ray_nodes import Files, Sender, SentRequest
from tasks.runs import Run
from tasks.uncached import task

TRANSPORTS: Registry[type[Transport]] = Registry(
    "runtime.transport",
    "fed_rlhf.transports",
    {"prefect": f"{__name__}:PrefectTransport", "processes": f"{__name__}:ProcessTransport"},
    "components.federation.transport:Transport",
)


SILENCE_SECONDS = 600.0
"""Beside runtime.client_timeout, how long an owner may receive files and load a model."""


class ClientsFailed(RuntimeError):
    """Some clients of a shard failed; the others' updates are stored.

    A reason has the type of the error and a code. The error's text may quote rows of the client, and stays in
    the client's private store.
    """

    def __init__(self, reasons: dict[str, str], written: Files | None = None) -> None:
        super().__init__(reasons, written)
        self.reasons = reasons  # by client
        self.written = written  # by the clients that were sent files

    def __str__(self) -> str:
        return "; ".join(f"client {name}: {reason}" for name, reason in self.reasons.items())


def _shard_name() -> str:
    jobs = runtime.task_run.parameters["shard"]
    clients = short_labels(job.client for job in jobs).values()
    first = jobs[0]
    return f"{first.when}: {first.kind} {', '.join(clients)}"


@dataclass(frozen=True)
class ShardAnswer:
    """The updates of a shard's jobs, and what the jobs have written where they were sent files."""

    updates: list[Update]
    written: Files | None = None


class Place(ABC):
    """Where the jobs of a shard are carried out."""

    @abstractmethod
    def run(self, shard: Sequence[Job], recipe: Recipe) -> ShardAnswer:
        """Run the jobs of a shard, one after the other.

        A client that fails does not stop the others. Updates that an earlier attempt finished are read, so a
        retry repeats only the failed clients.

        Raises:
            ClientsFailed: after all clients were tried, naming those that failed.
        """


@task(name=_shard_name)
def run_shard(shard: list[Job], recipe: Recipe, place: Place) -> ShardAnswer:
    """Run the jobs of a shard of clients, which need one trainer; see Place.run."""
    return place.run(shard, recipe)


@dataclass(frozen=True)
class ThisProcess(Place):
    """A thread of the flow's process, or a process of Ray that sees the run's files."""

    contexts: ClientContexts

    def run(self, shard: Sequence[Job], recipe: Recipe) -> ShardAnswer:
        updates = []
        reasons = {}
        for job in shard:
            with POOL.borrow_trainer(recipe, mapped=True, name=job.trainer) as trainer:
                try:
                    updates.append(run_job(job, trainer, self.contexts, recipe))
                except FullDiskError:  # not the client's fault
                    raise
                except (Exception, SystemExit) as error:
                    reasons[job.client] = failure(job.client, error, self.contexts).reason
                    ray_tasks.end_if_gpu_is_lost()
        if reasons:
            raise ClientsFailed(reasons)
        return ShardAnswer(updates)


@dataclass(frozen=True)
class RayNode(Place):
    """A process of Ray on a node that does not see the run's files, and is sent them."""

    sent: SentRequest

    def run(self, shard: Sequence[Job], recipe: Recipe) -> ShardAnswer:
        own, contexts = self.sent.unpack()
        try:
            updates = ThisProcess(contexts).run(shard, own).updates
        except ClientsFailed as error:
            raise ClientsFailed(error.reasons, self.sent.written()) from None
        return ShardAnswer(updates, self.sent.written())


@dataclass(frozen=True)
class OwnerProcess(Place):
    """The process of each client's owner on this machine."""

    owners: Requests
    contexts: ClientContexts
    sockets: Path | None = None
    """Folder of the sockets of owners that have started their own processes; None: they are simulated."""

    def run(self, shard: Sequence[Job], recipe: Recipe) -> ShardAnswer:
        updates = []
        reasons = {}
        for job in shard:
            try:
                updates.append(finished_update(job, self.contexts.adapters) or self._ask(job, recipe))
            except JobFailed as error:
                reasons[job.client] = str(error)
        if reasons:
            raise ClientsFailed(reasons)
        return ShardAnswer(updates)

    def _ask(self, job: Job, recipe: Recipe) -> Update:
        if self.sockets is None:
            return HOST.ask(job, self.owners, self.contexts, recipe)
        limit = None if isinstance(job, PublishJob) else recipe.runtime.client_timeout
        silence = None if limit is None else limit + SILENCE_SECONDS
        return ask_owner(job, self.owners, self.contexts, self.sockets, silence)


@dataclass(frozen=True)
class PrefectTransport(Transport):
    """Maps the jobs of a step to Prefect tasks, a shard of clients each."""

    recipe: Recipe
    contexts: ClientContexts
    senders: list[Sender] = field(default_factory=list)
    """One, once the cluster has a node that does not see the run's files."""

    @classmethod
    def open(cls, recipe: Recipe, contexts: ClientContexts) -> Self:
        return cls(recipe, contexts)

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """An update or a failure for each job, once all tasks have ended."""
        on_ray = self.recipe.runtime.task_runner == "ray"
        if on_ray and not self.senders and not ray_cluster.sees(self.contexts.pairs):
            self.senders.append(Sender(self.recipe, self.contexts))
        if not self.senders:
            return self._map(jobs)
        updates = [finished_update(job, self.contexts.adapters) for job in jobs]
        left = [job for job, update in zip(jobs, updates, strict=True) if update is None]
        return [*self._map(left), *(update for update in updates if update is not None)]

    def close(self) -> None:
        while self.senders:
            self.senders.pop().close()

    def _map(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        size = self.recipe.federation.clients_per_task
        if jobs and not jobs[0].is_step:  # short jobs: a task for each place
            size = max(size, math.ceil(len(jobs) / max_tasks(self.recipe.runtime)))
        shards = rounds.split_shards(jobs, size)
        mapped = run_shard.with_options(retries=self.recipe.runtime.retries, retry_delay_seconds=1)
        calls = [
            {"shard": shard, "recipe": self.recipe, "place": place}
            for shard, place in zip(shards, self._places(shards), strict=True)
        ]
        futures = map_task(mapped, calls, self.recipe.runtime)
        sender = self.senders[0] if self.senders else None
        return collect_answers(futures, shards, self.contexts.adapters, sender)

    def _places(self, shards: Sequence[Sequence[Job]]) -> Sequence[Place]:
        if self.senders:
            return [RayNode(sent) for sent in self.senders[0].send(shards)]
        return [ThisProcess(self.contexts)] * len(shards)


@dataclass(frozen=True)
class ProcessTransport(PrefectTransport):
    """As PrefectTransport, with a process and a folder of its own for each client, as owners have them.

    With data.source 'owners' these are the processes that owners have started.
    """

    asked: set[str] = field(default_factory=set)
    """Owners with rows of their own that may hold a model."""

    def close(self) -> None:
        if self._place.sockets is None:
            HOST.release()
            return
        self._release(self.asked, self._place.sockets)

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """See PrefectTransport.run. Owners that were asked before and are not now hold no model."""
        if self._place.sockets is not None:
            clients = {job.client for job in jobs}
            self._release(self.asked - clients, self._place.sockets)
            self.asked.update(clients)
        return super().run(jobs)

    def _release(self, clients: Set[str], sockets: Path) -> None:
        for name in sorted(clients):
            release_owner(name, sockets)
        self.asked.difference_update(set(clients))

    @cached_property
    def _place(self) -> OwnerProcess:
        recipe, contexts = self.recipe, self.contexts
        if not has_owners(recipe):
            return OwnerProcess(Requests(recipe, contexts), contexts)
        run = name_at_owners(contexts.federation.parent)
        return OwnerProcess(Requests(recipe, contexts, run), contexts, sockets_root(recipe.runtime.sockets))

    def _places(self, shards: Sequence[Sequence[Job]]) -> Sequence[Place]:
        return [self._place] * len(shards)


def collect_answers(
    futures: Sequence[PrefectFuture[ShardAnswer]],
    shards: Sequence[list[Job]],
    store: AdapterStore,
    sender: Sender | None = None,
) -> list[Update | Failure]:
    """An update or a failure for each job.

    Raises:
        FullDiskError: no space is left, so that no client can continue.

    Of a shard whose task failed after all retries, the updates of clients that had finished still
    count.
    """
    answers: list[Update | Failure] = []
    for future, jobs in zip(futures, shards, strict=True):
        future.wait()
        result = future.result(raise_on_failure=False)
        if sender is not None and isinstance(result, ShardAnswer | ClientsFailed) and result.written:
            sender.receive(jobs, result.written)
        if isinstance(result, ShardAnswer):
            answers += result.updates
            continue
        error: object = result
        if isinstance(error, FullDiskError):
            raise error
        reasons: dict[str, str] = error.reasons if isinstance(error, ClientsFailed) else {}
        default = f"{future.state.name}: {future.state.message}"
        for job in jobs:
            update = finished_update(job, store)
            answers.append(update or Failure(job.client, reasons.get(job.client, default)))
    return answers


def rounds_contexts(run: Run) -> ClientContexts:
    """The clients' contexts in the rounds of a run."""
    return ClientContexts(AdapterStore(run.federation / "adapters"), run.prepared / "pairs.parquet")


def unseen_contexts(run: Run) -> ClientContexts:
    """The contexts of the clients that take part in no round."""
    return replace(rounds_contexts(run), pairs=run.prepared / UNSEEN / "pairs.parquet")


@contextmanager
def outside_transport(
    run: Run, recipe: Recipe, contexts: ClientContexts, trainer: str = ""
) -> Iterator[Transport]:
    """Asks owners outside the federation, whose pairs the server has, in this process.

    Args:
        run: with the judge's pairs.
        recipe: of the run.
        contexts: by which adapters are exchanged.
        trainer: name of the trainer of the jobs.
    """
    with POOL.borrow_trainer(recipe, name=trainer) as own:
        outside = replace(contexts, pairs=run.prepared / "judge.parquet", outside=True)
        yield InProcessTransport(recipe, outside, {trainer: own})


def outside_counts(run: Run) -> dict[str, int]:
    """Numbers of held-out pairs of the owners outside the federation.

    Raises:
        DataError: they have none.
    """
    counts = Counter(pair.client_id for pair in read_pairs(run.prepared / "judge.parquet", split="test"))
    if not counts:
        raise DataError(
            "with federation.privacy.unit 'client' accuracy is measured on the judge's held-out pairs, and"
            " there are none: bring pairs of owners outside the federation (data.options: judge_annotators,"
            " judge_clients, judge_share or judge, as the source has it)."
        )
    return dict(counts)


def exchange_contexts(run: Run, recipe: Recipe) -> ClientContexts:
    """The clients' contexts after the rounds.

    Adapters and updates are exchanged in a folder of their own, so that the folder of the rounds stays as
    it is. Its name says what the outputs of jobs depend on, since DVC repeats phases with other recipes.
    """
    name = recipe.fingerprint("selector", "policy", "federation", "rewards", "alignment", "evaluation")
    folder = run.exchange / f"{name}-{pairs_digest(run.prepared)[:16]}"
    return ClientContexts(AdapterStore(folder / "adapters"), run.prepared / "pairs.parquet", run.federation)


def ask_after_rounds(
    run: Run, recipe: Recipe, jobs: Sequence[Job], quorum: float, contexts: ClientContexts | None = None
) -> tuple[dict[str, JsonValue], dict[str, str]]:
    """The output of each client's job after the rounds, and the reasons of clients without an answer.

    See components.federation.rounds.ask_clients. Without contexts, those of the recipe are used.
    """
    contexts = contexts or exchange_contexts(run, recipe)
    sent = rounds_contexts(run).adapters
    for digest in {digest for job in jobs for digest in job.received}:
        if not contexts.adapters.path(digest).is_file():
            write_atomically(contexts.adapters.path(digest), sent.path(digest).read_bytes())
    try:
        with closing(TRANSPORTS.load(recipe.runtime.transport).open(recipe, contexts)) as transport:
            updates, missing = rounds.ask_clients(jobs, transport, recipe.federation, quorum)
            return {update.client: update.output for update in updates}, missing
    finally:
        POOL.release()  # the trainer's memory


def close_exchange(run: Run) -> None:
    """Remove what was exchanged after the rounds."""
    shutil.rmtree(run.exchange, ignore_errors=True)
