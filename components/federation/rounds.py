"""The federated rounds: plan, run, aggregate, commit.

The flow and the loop without Prefect run the same steps; they differ in the transport.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from components.config import FederationConfig, Recipe, UserError
from components.config.privacy import ClientPrivacy
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.commits import Commits
from components.federation.method import Method
from components.federation.postprocessing import processing_key
from components.federation.protocol import Failure, Federation, Job, Update, by_client
from components.federation.server import Server, State
from components.federation.spending import budget_ends, privacy_spent, repeated_sums
from components.federation.step_answers import StepAnswers, collect, match_answers
from components.federation.transport import InProcessTransport, Transport
from components.models.store import AdapterStore
from components.progress import CLIENTS, ROUNDS, Work, progress
from components.results import Metrics, StepRecord

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
    last = method.local().rounds(config)
    if isinstance(config.privacy, ClientPrivacy):
        commits.sweep(state)
    if state.round < last:
        rounds = Work(ROUNDS, state.round, last)
        log.info("%d of %d rounds are done", state.round, last, extra=progress(rounds))
    while state.round < last:
        if ends := budget_ends(config, state, repeated_sums(config, state, commits.store)):
            log.warning("%s", ends)
            break
        jobs = plan_step(method, state, config, commits.store)
        clients = Work(CLIENTS, 0, len(jobs))
        log.info("round %d: %d clients", state.round + 1, len(jobs), extra=progress(clients))
        commits.discard(jobs, config.keep_every)
        answers = ask_step(method, state, jobs, transport, config, commits.store)
        state, record = close_step(method, state, jobs, answers, config, commits)
        if after_step is not None:
            after_step(state, record)
    commits.discard(keep_every=config.keep_every)
    if isinstance(config.privacy, ClientPrivacy):
        commits.sweep(state)
    return state


def plan_step(method: Method, state: State, config: FederationConfig, store: AdapterStore) -> list[Job]:
    """The jobs of the next step, with what post-processors depend on."""
    jobs = with_processing(method.plan(state, Server(config, store)), config)
    weights = state.federation.weights
    return [job.model_copy(update={"weight": weights[job.client]}) for job in jobs]


def with_processing(jobs: Sequence[J], config: FederationConfig) -> list[J]:
    """Jobs with what post-processors depend on."""
    common = {
        "processing": processing_key(config),
        "participants": tuple(job.client for job in jobs),
    }
    return [job.model_copy(update=common) for job in jobs]


def ask_clients(
    jobs: Sequence[Job], transport: Transport, config: FederationConfig, quorum: float
) -> tuple[list[Update], dict[str, str]]:
    """The answers to jobs that belong to no step, and the reasons of clients without one.

    Answers are in the order of the clients' names.

    Args:
        jobs: the jobs.
        transport: to the clients.
        config: of the rounds.
        quorum: share of the clients that must answer.

    Raises:
        UserError: fewer do. A repeated call takes the others' answers as they are.
    """
    jobs = with_processing(jobs, config)
    updates, failed, refused = match_answers(jobs, transport.run(jobs))
    missing = by_client([*failed, *refused])
    if len(updates) < required_clients(quorum, len(jobs)):
        needed = "needs all of them" if quorum == 1 else f"needs {required_clients(quorum, len(jobs))}"
        raise UserError(
            f"{len(missing)} of {len(jobs)} clients have no answer to a job '{jobs[0].kind}', which {needed}:"
            f" resume the run once the cause is removed. {reasons(missing)}"
        )
    return updates, {failure.client: failure.reason for failure in missing}


def required_clients(quorum: float, asked: int) -> int:
    """How many of the clients that were asked must answer."""
    return max(1, math.ceil(quorum * asked - 1e-9))


def reasons(failures: Sequence[Failure]) -> str:
    """The clients without an answer, in words."""
    return "; ".join(f"{failure.client}: {failure.reason}" for failure in failures)


def ask_step(
    method: Method,
    state: State,
    jobs: Sequence[Job],
    transport: Transport,
    config: FederationConfig,
    store: AdapterStore,
) -> StepAnswers:
    """What the jobs of a step give: sums where the method needs no more, else the accepted updates."""
    template = method.update_template(state, store.get(state.initial))
    weights = method.sums(state, jobs, config)
    if weights is not None:
        if isinstance(config.privacy, ClientPrivacy):  # contributions are integers, which weights would break
            weights = {name: dict.fromkeys(own, 1.0) for name, own in weights.items()}
        return transport.sum(jobs, weights, template)
    return collect(jobs, transport.run(jobs), store, template, config.max_update_ratio)


def aggregate_step(
    method: Method, state: State, answers: StepAnswers, config: FederationConfig, store: AdapterStore
) -> State:
    """The state after a step with these answers.

    A client that kept something continues from it in its next job, which names this one:
    Job.previous_job_key.
    """
    server = Server(config, store, answers, list(state.processing), noise=state.noise)
    new = method.aggregate(state, answers.updates, server)
    memory = new.memory.model_copy(update={"job_keys": state.memory.job_keys | dict(answers.kept)})
    metrics = new.metrics.merged(Metrics(scalars=server.metrics))
    changes = {"memory": memory, "metrics": metrics, "processing": server.processing, "noise": server.noise}
    return new.model_copy(update=changes)


def close_step(
    method: Method,
    state: State,
    jobs: Sequence[Job],
    answers: StepAnswers,
    config: FederationConfig,
    commits: Commits,
) -> tuple[State, StepRecord]:
    """Check the quorum, aggregate, and commit; the state is that before the step.

    Where fewer than `quorum` of the jobs have an accepted update, nothing is committed.
    """
    required = required_clients(config.quorum, len(jobs))
    if len(answers.clients) < required:
        missing = reasons([*answers.failed, *answers.refused])
        raise UserError(
            f"round {state.round + 1} has {len(answers.clients)} accepted updates of {len(jobs)} clients, but"
            f" {required} are needed (federation.quorum {config.quorum}). {missing}"
        )
    start = time.perf_counter()
    new = aggregate_step(method, state, answers, config, commits.store)
    record = StepRecord(
        step=new.step,
        round=state.round,
        phase=state.phase,
        rounds_done=new.round,
        logged_at=new.logged_at,
        clients=dict(answers.figures),
        total=answers.total,
        failed={failure.client: failure.reason for failure in answers.failed},
        refused={failure.client: failure.reason for failure in answers.refused},
        adapters=new.adapters,
        memory=new.memory.model_dump(mode="json"),
        server=new.metrics,
        privacy=privacy_spent(config, len(new.clients), new.round, repeated_sums(config, new, commits.store)),
        aggregation_seconds=time.perf_counter() - start,
    )
    commits.write(new, record)
    return new, record


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
    method = recipe.federation.options
    trainers = {} if trainer is None else {"": trainer}
    transport = InProcessTransport(recipe, ClientContexts(commits.store, pairs), trainers)
    for warning in method.warnings(federation, recipe.seed, recipe.federation):
        log.warning("%s", warning)
    committed = commits.latest(method.memory_type)
    state = committed[0] if committed is not None else method.start(federation, recipe.seed)
    return run_rounds(method, state, transport, commits, recipe.federation)
