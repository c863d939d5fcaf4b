"""Tasks of the federated rounds: the clients' work on devices, and measurements between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefect import runtime, unmapped
from prefect.futures import PrefectFuture

from components.config import Recipe, Registry
from components.data.records import DataError, read_clients, read_rows
from components.evaluation.accuracy import accuracy_report, sample_evenly
from components.federation import rounds
from components.federation.clients.context import ClientContexts
from components.federation.clients.worker import finished_update, run_job
from components.federation.commits import Commits
from components.federation.method import method_of
from components.federation.outcome import Outcome, Workspace, load_outcome
from components.federation.postprocessing import postprocessors_of
from components.federation.protocol import (
    Failure,
    Federation,
    Job,
    MeasureJob,
    ServerState,
    Update,
    build_federation,
)
from components.federation.transport import Transport
from components.io import file_hash, stored
from components.models.store import AdapterStore
from components.names import short_labels
from components.results import (
    AccuracyReport,
    ExportedAdapter,
    FederationResult,
    Metrics,
    OutcomeRecord,
    RoundEvaluation,
    StepRecord,
)
from components.versions import ROUNDS
from tasks.devices import POOL, open_workspace, placement
from tasks.rewards import rewards_fingerprint
from tasks.runs import RESULT, Run
from tasks.uncached import task

TRANSPORTS: Registry[type[Transport]] = Registry(
    "runtime.transport",
    "fed_rlhf.transports",
    {"prefect": f"{__name__}:PrefectTransport"},
    "components.federation.transport:Transport",
)


class ClientsFailed(RuntimeError):
    """Some clients of a shard failed; the others' updates are stored."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"client {name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons  # by client


@task()
def form_federation(run: Run, recipe: Recipe, commits: Commits) -> Federation:
    """The participating clients, and the adapter that all of them start from."""
    with POOL.borrow_trainer(recipe) as trainer:
        initial = commits.store.put(trainer.initial_adapter(recipe.seed))
    return build_federation(read_clients(run.prepared), initial, recipe.federation.clients_per_round)


def open_commits(run: Run, recipe: Recipe) -> Commits:
    """The commits of a run; their fingerprint covers all that the bytes of the rounds depend on."""
    method = method_of(recipe.federation)
    first, *others = (file_hash(run.prepared / name)[:16] for name in method.prepared_files)
    parts = [
        recipe.fingerprint(*method.recipe_sections(recipe)),
        first + rewards_fingerprint(recipe.rewards, run.prepared),
        *others,
        f"threads{recipe.runtime.torch_threads}x{recipe.runtime.workers}",
        f"v{ROUNDS}",
    ]
    return Commits(run.federation, "-".join(parts))


def _shard_name() -> str:
    jobs = runtime.task_run.parameters["shard"]
    clients = short_labels(job.client for job in jobs).values()
    return f"round {jobs[0].round + 1}: {jobs[0].kind} {', '.join(clients)}"


@task(name=_shard_name)
def run_shard(shard: list[Job], recipe: Recipe, pairs: Path, store: Path) -> list[Update]:
    """Run the jobs of a shard of clients, one after the other, on one device.

    A client that fails does not stop the others. Updates that an earlier attempt finished are read,
    so a retry repeats only the failed clients.

    Raises:
        ClientsFailed: after all clients were tried, naming those that failed.
    """
    contexts = ClientContexts(AdapterStore(store), pairs)
    postprocessors = postprocessors_of(recipe.federation)
    updates = []
    reasons = {}
    with POOL.borrow_trainer(recipe, mapped=True) as trainer:
        for job in shard:
            try:
                updates.append(run_job(job, trainer, contexts, postprocessors))
            except Exception as error:
                reasons[job.client] = f"{type(error).__name__}: {error}"
    if reasons:
        raise ClientsFailed(reasons)
    return updates


@dataclass(frozen=True)
class PrefectTransport(Transport):
    """Maps the jobs of a step to Prefect tasks, a shard of clients each."""

    recipe: Recipe
    pairs: Path  # the prepared pairs
    store: AdapterStore

    @classmethod
    def open(cls, recipe: Recipe, pairs: Path, store: AdapterStore) -> Self:
        return cls(recipe, pairs, store)

    def run(self, jobs: Sequence[Job]) -> list[Update | Failure]:
        """An update or a failure for each job, once all tasks have ended."""
        shards = rounds.split_shards(jobs, self.recipe.federation.clients_per_task)
        mapped = run_shard.with_options(retries=self.recipe.runtime.retries, retry_delay_seconds=1)
        with placement(self.recipe.runtime):
            futures = mapped.map(
                shards,
                recipe=unmapped(self.recipe),
                pairs=unmapped(self.pairs),
                store=unmapped(self.store.root),
            )
        return collect_answers(futures, shards, self.store)


def collect_answers(
    futures: Sequence[PrefectFuture[list[Update]]], shards: Sequence[list[Job]], store: AdapterStore
) -> list[Update | Failure]:
    """An update or a failure for each job.

    Of a shard whose task failed after all retries, the updates of clients that had finished still
    count.
    """
    answers: list[Update | Failure] = []
    for future, jobs in zip(futures, shards, strict=True):
        future.wait()
        if future.state.is_completed():
            answers += future.result()
            continue
        error = future.result(raise_on_failure=False)
        reasons: dict[str, str] = error.reasons if isinstance(error, ClientsFailed) else {}
        default = f"{future.state.name}: {future.state.message}"
        for job in jobs:
            update = finished_update(job, store)
            answers.append(update or Failure(job.client, reasons.get(job.client, default)))
    return answers


@task(name="evaluate after {state.round} rounds")
def evaluate_state(run: Run, recipe: Recipe, state: ServerState[Any]) -> RoundEvaluation:
    """Measure a state on held-out pairs, and by the method's own measures.

    The measurement is stored, and read if it is stored.
    """
    workspace = open_workspace(run, recipe)
    method = method_of(recipe.federation)
    return RoundEvaluation.stored(
        run.federation / f"evaluation-{state.round:05d}.json",
        lambda: RoundEvaluation(
            rounds_done=state.round,
            accuracy=measure_accuracy(method.outcome(state), workspace),
            measures={
                job.name: _run_measure(job, workspace, run.federation) for job in method.measure(state)
            },
        ),
    )


def _run_measure(job: MeasureJob, workspace: Workspace, folder: Path) -> Metrics:
    """A measure of a method beside accuracy; it has a file of its own, which benchmarks share."""

    def run() -> dict[str, Any]:
        with workspace.lend_trainer() as trainer:
            return trainer.run(job, workspace.contexts.open("")).metrics.model_dump(mode="json")

    return Metrics.model_validate(stored(folder / f"{job.name}-{job.round:05d}.json", run))


def measure_accuracy(record: OutcomeRecord, workspace: Workspace) -> AccuracyReport:
    """Accuracy of an outcome on the clients' held-out pairs.

    Raises:
        DataError: no held-out pair belongs to a client that it can score.
    """
    recipe = workspace.recipe
    outcome = load_outcome(record)
    pairs = read_rows(workspace.contexts.pairs, split=recipe.federation.accuracy_split)
    if not pairs and recipe.federation.accuracy_split == "validation":
        raise DataError(
            "federation.accuracy_split is 'validation', but the prepared data have no validation pairs: raise"
            " data.validation, or the source's own option for them."
        )
    clients = outcome.clients
    if clients is not None:
        pairs = [pair for pair in pairs if pair["client_id"] in clients]
        if not pairs:
            raise DataError(
                "no held-out pair belongs to a participating client, and each client's own model is measured"
                f" on its own pairs: raise data.{recipe.federation.accuracy_split}, or use fewer clients."
            )
    sample = sample_evenly(pairs, recipe.federation.accuracy_pairs, recipe.seed)
    return accuracy_report(outcome.score(sample, workspace), sample)


def store_result(
    run: Run, recipe: Recipe, record: OutcomeRecord, records: list[StepRecord]
) -> FederationResult:
    """Export the outcome of the finished rounds, and store their result."""
    outcome = load_outcome(record)
    evaluations = [RoundEvaluation.read(path) for path in sorted(run.federation.glob("evaluation-*.json"))]
    return FederationResult(
        outcome=record,
        accuracy_label=outcome.accuracy_label,
        accuracy_note=outcome.accuracy_note,
        rounds=evaluations[-1].rounds_done,
        records=records,
        evaluations=evaluations,
        adapters=export_outcome(run, recipe, outcome),
        diagnostics=list(method_of(recipe.federation).diagnostics),
    ).write(run.federation / RESULT)


@task()
def export_outcome(run: Run, recipe: Recipe, outcome: Outcome) -> dict[str, ExportedAdapter]:
    """Write the final adapters as PEFT folders."""
    return outcome.export(run.federation / "final", open_workspace(run, recipe))
