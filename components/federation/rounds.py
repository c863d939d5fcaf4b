"""The federated rounds: plan, run, aggregate, commit.

The flow and the loop without Prefect run the same steps; they differ in the transport.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import JsonValue

from components.config import FederationConfig, Recipe
from components.federation.aggregation import movement
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.commits import Commits
from components.federation.method import Method, Server, State, method_of
from components.federation.postprocessing import origin_of, postprocessors_of, processing_key
from components.federation.protocol import Failure, Federation, FederationError, Job, Update, by_client
from components.federation.transport import InProcessTransport, Transport
from components.models.store import Adapter, AdapterError, AdapterHash, AdapterStore, check_adapter
from components.progress import CLIENTS, ROUNDS, Work, progress
from components.results import ClientRecord, Metrics, StepRecord

log = logging.getLogger(__name__)

J = TypeVar("J", bound=Job)
AfterStep = Callable[[State, StepRecord], None]


def run_rounds(
    method: Method,
    state: State,
    transport: Transport,
    commits: Commits,
    config: FederationConfig,
    after_step: AfterStep | None = None,
) -> State:
    """Run all rounds that are not complete yet, from a state.

    The updates of a step are removed when the next one begins, and those of the last one at the
    end; the server's adapters are kept as federation.keep_every says. `after_step` is called with
    the state and the record of each step, once it is committed.
    """
    if state.round < config.rounds:
        rounds = Work(ROUNDS, state.round, config.rounds)
        log.info("%d of %d rounds are done", state.round, config.rounds, extra=progress(rounds))
    while state.round < config.rounds:
        jobs = plan_step(method, state, config, commits.store)
        clients = Work(CLIENTS, 0, len(jobs))
        log.info("round %d: %d clients", state.round + 1, len(jobs), extra=progress(clients))
        commits.discard(jobs, config.keep_every)
        answers = transport.run(jobs)
        state, record = close_step(method, state, jobs, answers, config, commits)
        if after_step is not None:
            after_step(state, record)
    commits.discard(keep_every=config.keep_every)
    return state


def plan_step(method: Method, state: State, config: FederationConfig, store: AdapterStore) -> list[Job]:
    """The jobs of the next step, with what post-processors depend on."""
    jobs = with_processing(method.plan(state, Server(config, store)), config)
    weights = state.federation.weights
    return [job.model_copy(update={"weight": weights[job.client]}) for job in jobs]


def with_processing(jobs: Sequence[J], config: FederationConfig) -> list[J]:
    """Jobs with what post-processors depend on."""
    common = {
        "processing": processing_key(postprocessors_of(config)),
        "participants": tuple(job.client for job in jobs),
    }
    return [job.model_copy(update=common) for job in jobs]


def ask_clients(jobs: Sequence[Job], transport: Transport, config: FederationConfig) -> dict[str, JsonValue]:
    """The output of each client's job, which belongs to no step.

    Raises:
        FederationError: a client has no answer. A repeated call takes the others' answers as they are.
    """
    jobs = with_processing(jobs, config)
    updates, failures, refused = match_answers(jobs, transport.run(jobs))
    if missing := by_client([*failures, *refused]):
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in missing)
        raise FederationError(
            f"{len(missing)} of {len(jobs)} clients have no answer to a job '{jobs[0].kind}', which needs all"
            f" of them: resume the run once the cause is removed. {reasons}"
        )
    return {update.client: update.output for update in updates}


def aggregate_step(
    method: Method, state: State, updates: Sequence[Update], config: FederationConfig, store: AdapterStore
) -> State:
    """The state after a step with these accepted updates.

    A client that kept something (its traffic says how many bytes) continues from it in its next job, which
    names this one: PrivateJob.previous_job_key.
    """
    updates = by_client(updates)
    server = Server(config, store, updates, list(state.processing))
    if method.needs == "sums":  # the server has the adapters, for the aggregator and post-processors
        updates = [update.model_copy(update={"adapter": None}) for update in updates]
    new = method.aggregate(state, updates, server)
    kept = {update.client: update.job for update in updates if update.traffic.kept}
    memory = new.memory.model_copy(update={"job_keys": state.memory.job_keys | kept})
    metrics = new.metrics.merged(Metrics(scalars=server.metrics))
    return new.model_copy(update={"memory": memory, "metrics": metrics, "processing": server.processing})


def close_step(
    method: Method,
    state: State,
    jobs: Sequence[Job],
    answers: Iterable[Update | Failure],
    config: FederationConfig,
    commits: Commits,
) -> tuple[State, StepRecord]:
    """Validate the updates, check the quorum, aggregate, and commit.

    The answers are an update or a failure for each job, in any order; the state is that before the
    step. Where fewer than `quorum` of the jobs have an accepted update, nothing is committed.
    """
    updates, failures, foreign = match_answers(jobs, answers)
    template = method.update_template(state, commits.store.get(state.initial))
    received = {job.client: job.received[0] for job in jobs}
    accepted, damaged = validate_updates(updates, commits.store, template, received, config.max_update_ratio)
    refused = by_client([*damaged, *foreign])
    required = max(1, math.ceil(config.quorum * len(jobs) - 1e-9))
    if len(accepted) < required:
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in [*failures, *refused])
        raise FederationError(
            f"round {state.round + 1} has {len(accepted)} accepted updates of {len(jobs)} clients, but"
            f" {required} are needed (federation.quorum {config.quorum}). {reasons}"
        )
    start = time.perf_counter()
    new = aggregate_step(method, state, accepted, config, commits.store)
    record = _record_step(state, new, accepted, failures, refused, time.perf_counter() - start)
    commits.write(new, record)
    return new, record


def _record_step(
    state: State,
    new: State,
    accepted: Sequence[Update],
    failures: Sequence[Failure],
    refused: Sequence[Failure],
    seconds: float,
) -> StepRecord:
    clients = {
        update.client: ClientRecord(**{name: getattr(update, name) for name in ClientRecord.model_fields})
        for update in accepted
    }
    return StepRecord(
        step=new.step,
        round=state.round,
        phase=state.phase,
        rounds_done=new.round,
        logged_at=new.logged_at,
        clients=clients,
        failed={failure.client: failure.reason for failure in failures},
        refused={failure.client: failure.reason for failure in refused},
        adapters=new.adapters,
        memory=new.memory.model_dump(mode="json"),
        server=new.metrics,
        aggregation_seconds=seconds,
    )


def match_answers(
    jobs: Sequence[Job], answers: Iterable[Update | Failure]
) -> tuple[list[Update], list[Failure], list[Failure]]:
    """The answers to the jobs of a step: updates, failures, and what is refused.

    An update that names another job, or that is a second one, is refused. A client whose job has no
    answer has failed. Each list is in the order of the clients' names.
    """
    expected = {job.client: (job.key(), job.adapter_name) for job in jobs}
    updates: dict[str, Update] = {}
    failures: dict[str, Failure] = {}
    refused = []
    for answer in answers:
        client = answer.client
        if isinstance(answer, Failure):
            failures[client] = answer
        elif (answer.job, answer.adapter_name) != expected.get(client):
            refused.append(Failure(client, f"its update answers job {answer.job}, not that of this step"))
        elif client in updates:
            refused.append(Failure(client, "it has sent a second update in this step"))
        else:
            updates[client] = answer
    for client in expected.keys() - updates.keys() - failures.keys() - {other.client for other in refused}:
        failures[client] = Failure(client, "there is no answer")
    return by_client(list(updates.values())), by_client(list(failures.values())), by_client(refused)


def validate_updates(
    updates: Sequence[Update],
    store: AdapterStore,
    template: Adapter,
    received: Mapping[str, AdapterHash] = MappingProxyType({}),
    max_ratio: float | None = None,
) -> tuple[list[Update], list[Failure]]:
    """Separate updates that can be aggregated from others, in the order of the clients' names.

    An update with NaN or infinite values, another shape or type, or a missing or an additional tensor
    is refused, and the reason names the tensor. So is one whose norm, after what the client received is
    subtracted, is more than `max_ratio` times the median of those in the step that are not 0; two updates
    have the smaller one as their median, and a single one is accepted.

    Args:
        template: has the names, shapes and types of the expected tensors.
        received: the adapter that each client was sent.
        max_ratio: None accepts any norm.
    """
    accepted = []
    refused = []
    norms: dict[str, float] = {}
    origin = lru_cache(maxsize=1)(store.get)  # most methods send all clients the same adapter
    for update in by_client(updates):
        try:
            if update.adapter is not None:
                tensors = store.get(update.adapter)
                check_adapter(tensors, template)
                if max_ratio is not None:
                    start = origin_of(tensors, origin(received[update.client]))
                    norms[update.client] = movement(tensors, start)
            accepted.append(update)
        except AdapterError as error:
            refused.append(Failure(update.client, str(error)))
    moved = [norm for norm in norms.values() if norm > 0]
    median = statistics.median_low(moved) if moved else 0.0
    for client, norm in norms.items():
        if max_ratio is not None and norm > max_ratio * median:
            reason = (
                f"its update has norm {norm:.3g}, {norm / median:.3g} times the median of the clients"
                f" (federation.max_update_ratio {max_ratio:g})"
            )
            refused.append(Failure(client, reason))
    outliers = {failure.client for failure in refused}
    return [update for update in accepted if update.client not in outliers], by_client(refused)


def split_shards(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """A step's jobs in lists of at most `size`, one for each mapped task."""
    return [list(jobs[start : start + size]) for start in range(0, len(jobs), size)]


def run_federation(
    recipe: Recipe, federation: Federation, pairs: Path, commits: Commits, trainer: Trainer | None = None
) -> State:
    """Run, or resume, all rounds in this process, without Prefect.

    Pairs are the prepared ones (parquet); without a trainer, that of the method is built on the
    processor.
    """
    method = method_of(recipe.federation)
    trainers = {} if trainer is None else {"": trainer}
    transport = InProcessTransport(recipe, ClientContexts(commits.store, pairs), trainers)
    for warning in method.warnings(federation, recipe.seed, recipe.federation):
        log.warning("%s", warning)
    committed = commits.latest(method.memory_type)
    state = committed[0] if committed is not None else method.start(federation, recipe.seed)
    return run_rounds(method, state, transport, commits, recipe.federation)
