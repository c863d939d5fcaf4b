"""How jobs reach the clients of a run: mapped to Prefect tasks, or by an installed transport."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

from prefect import runtime
from prefect.events.worker import EventsWorker
from prefect.futures import PrefectFuture
from prefect.logging.handlers import APILogWorker
from pydantic import JsonValue

from components.config import Recipe, Registry
from components.federation import rounds
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import finished_update, run_job
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import Failure, Job, Update
from components.federation.transport import Transport
from components.io import ABANDONED, FullDiskError, file_hash, write_atomically
from components.models.store import AdapterStore
from components.names import short_labels
from tasks import ray_cluster, ray_tasks
from tasks.devices import POOL, map_task, max_tasks
from tasks.ray_files import Sender, SentFiles, Written
from tasks.runs import Run
from tasks.uncached import task

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

R = TypeVar("R")
TRANSPORTS: Registry[type[Transport]] = Registry(
    "runtime.transport",
    "fed_rlhf.transports",
    {"prefect": f"{__name__}:PrefectTransport"},
    "components.federation.transport:Transport",
)


class ClientsFailed(RuntimeError):
    """Some clients of a shard failed; the others' updates are stored.

    A reason has the type of the error and a code. The error's text may quote rows of the client, and stays in
    the client's private store.
    """

    def __init__(
        self, reasons: dict[str, str], some_hang: bool = False, written: Written | None = None
    ) -> None:
        super().__init__(reasons, some_hang, written)
        self.reasons = reasons  # by client
        self.some_hang = some_hang  # whether a job took longer than runtime.client_timeout
        self.written = written  # by the clients that were sent files

    def __str__(self) -> str:
        return "; ".join(f"client {name}: {reason}" for name, reason in self.reasons.items())


HANGING: list[Thread] = []
"""Threads of jobs that took too long."""


def end_despite_hanging_jobs(status: int) -> None:
    """End the process at once if a job hangs; Python would abort where it hangs in code of torch."""
    if any(thread.is_alive() for thread in HANGING):
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=10)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class JobHangs(Exception):
    """A client's job takes longer than it may."""


def run_within(seconds: float | None, call: Callable[[], R]) -> R:
    """The result of a call, in a thread of its own where it may take so many seconds only.

    A thread cannot be stopped. One that hangs is left alone; it writes no file any more
    (components.io.ABANDONED), and does not keep the process from its end, see end_despite_hanging_jobs.

    Raises:
        JobHangs: the call has not returned in time.
    """
    if seconds is None:
        return call()
    result: Future[R] = Future()
    context = copy_context()  # Prefect's, for its log
    abandoned = Event()
    context.run(ABANDONED.set, abandoned)

    def work() -> None:
        try:
            result.set_result(context.run(call))
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    if not wait([result], seconds).done:
        abandoned.set()
        if not HANGING:  # the command line calls it before, with its status
            atexit.register(end_despite_hanging_jobs, 0)
        HANGING.append(thread)
        raise JobHangs(f"no answer within {seconds:g} s (runtime.client_timeout)")
    return result.result()


def _shard_name() -> str:
    jobs = runtime.task_run.parameters["shard"]
    clients = short_labels(job.client for job in jobs).values()
    first = jobs[0]
    when = f"round {first.round + 1}" if first.is_step else f"after {first.round} rounds"
    return f"{when}: {first.kind} {', '.join(clients)}"


@dataclass(frozen=True)
class ShardAnswer:
    """The updates of a shard's jobs, and what the jobs have written where they were sent files."""

    updates: list[Update]
    written: Written | None = None


@task(name=_shard_name)
def run_shard(shard: list[Job], recipe: Recipe, contexts: ClientContexts | SentFiles) -> ShardAnswer:
    """Run the jobs of a shard of clients, one after the other; they need one trainer.

    A client that fails, or takes longer than runtime.client_timeout, does not stop the others. Updates that
    an earlier attempt finished are read, so a retry repeats only the failed clients.

    Raises:
        ClientsFailed: after all clients were tried, naming those that failed.
    """
    if isinstance(contexts, ClientContexts):
        return ShardAnswer(run_jobs(shard, recipe, contexts))
    try:
        updates = run_jobs(shard, *contexts.unpack(shard, recipe))
    except ClientsFailed as error:
        raise ClientsFailed(error.reasons, error.some_hang, contexts.written(shard)) from None
    return ShardAnswer(updates, contexts.written(shard))


def run_jobs(shard: Sequence[Job], recipe: Recipe, contexts: ClientContexts) -> list[Update]:
    """See run_shard."""
    postprocessors = postprocessors_of(recipe.federation)
    updates = []
    reasons = {}
    some_hang = False
    for job in shard:
        with POOL.borrow_trainer(recipe, mapped=True, name=job.trainer) as trainer:
            run = partial(run_job, job, trainer, contexts, postprocessors)
            try:
                updates.append(run_within(recipe.runtime.client_timeout, run))
            except JobHangs as error:
                some_hang = True
                reasons[job.client] = str(error)
                POOL.forget(trainer)  # the job still uses it
            except FullDiskError:  # not the client's fault
                raise
            except (Exception, SystemExit) as error:
                code = contexts.open(job.client).store.record_error(error)
                ray_tasks.end_if_gpu_is_lost()
                reasons[job.client] = f"{type(error).__name__} (errors/{code}.txt of its private store)"
    if reasons:
        raise ClientsFailed(reasons, some_hang)
    return updates


def may_succeed(_task: object, _task_run: object, state: State[Any]) -> bool:
    """Whether a failed shard is tried again: a job that hangs would hold another trainer."""
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, ClientsFailed) and error.some_hang)


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
        mapped = run_shard.with_options(
            retries=self.recipe.runtime.retries, retry_delay_seconds=1, retry_condition_fn=may_succeed
        )
        sender = self.senders[0] if self.senders else None
        contexts = [self.contexts] * len(shards) if sender is None else sender.send(shards)
        calls = [
            {"shard": shard, "recipe": self.recipe, "contexts": own}
            for shard, own in zip(shards, contexts, strict=True)
        ]
        futures = map_task(mapped, calls, self.recipe.runtime)
        return collect_answers(futures, shards, self.contexts.adapters, sender)


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
            sender.receive(result.written)
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


def exchange_contexts(run: Run, recipe: Recipe) -> ClientContexts:
    """The clients' contexts after the rounds.

    Adapters and updates are exchanged in a folder of their own, so that the folder of the rounds stays as
    it is. Its name says what the outputs of jobs depend on, since DVC repeats phases with other recipes.
    """
    pairs = run.prepared / "pairs.parquet"
    name = recipe.fingerprint("selector", "policy", "federation", "rewards", "alignment", "evaluation")
    folder = run.exchange / f"{name}-{file_hash(pairs)[:16]}"
    return ClientContexts(AdapterStore(folder / "adapters"), pairs, run.federation)


def ask_after_rounds(
    run: Run, recipe: Recipe, jobs: Sequence[Job], contexts: ClientContexts | None = None
) -> dict[str, JsonValue]:
    """The output of each client's job after the rounds, see components.federation.rounds.ask_clients.

    Without contexts, those of the recipe are used.
    """
    contexts = contexts or exchange_contexts(run, recipe)
    sent = rounds_contexts(run).adapters
    for digest in {digest for job in jobs for digest in job.received}:
        if not contexts.adapters.path(digest).is_file():
            write_atomically(contexts.adapters.path(digest), sent.path(digest).read_bytes())
    try:
        with closing(TRANSPORTS.load(recipe.runtime.transport).open(recipe, contexts)) as transport:
            return rounds.ask_clients(jobs, transport, recipe.federation)
    finally:
        POOL.release()  # the trainer's memory


def close_exchange(run: Run) -> None:
    """Remove what was exchanged after the rounds."""
    shutil.rmtree(run.exchange, ignore_errors=True)
