"""Tasks of the federated rounds: the clients' start, and measurements between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from components.config import Recipe
from components.data.records import DataError, read_clients
from components.evaluation.accuracy import accuracy_report, sample_evenly
from components.federation import rounds
from components.federation.commits import Commits
from components.federation.method import method_of
from components.federation.outcome import Outcome, load_outcome
from components.federation.protocol import Federation, RewardsJob, ServerState, build_federation
from components.federation.transport import Transport
from components.io import file_hash, stored
from components.learning.pair_scores import PairFigures
from components.models.weight_files import hub_snapshot
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
from tasks.devices import POOL, run_on_workers
from tasks.prefect_transport import rounds_contexts
from tasks.rewards import rewards_fingerprint
from tasks.runs import RESULT, Run
from tasks.uncached import task


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
        *_hub_snapshots(recipe),  # the files of local models are part of the recipe
    ]
    return Commits(run.federation, "-".join(parts))


def _hub_snapshots(recipe: Recipe) -> Iterator[str]:
    """The commits of the models of the hub that the rounds read."""
    backbones = [recipe.federation.options.trained_section(recipe).backbone]
    for name, reward in recipe.rewards.items():
        backbones += [model.backbone for model in reward.frozen_models(name)]
    for backbone in backbones:
        snapshot = hub_snapshot(backbone.location, backbone.revision)
        if snapshot:
            yield snapshot[:16]


def evaluate_state(
    run: Run, recipe: Recipe, state: ServerState[Any], transport: Transport
) -> RoundEvaluation:
    """Measure a state on held-out pairs, and by the method's own measures.

    The measurement is stored, and read if it is stored.
    """
    method = method_of(recipe.federation)

    def measure() -> RoundEvaluation:
        jobs = method.measure(state)
        calls = [{"run": run, "recipe": recipe, "job": job} for job in jobs]
        measured = run_on_workers(measure_rewards, calls, recipe.runtime, run.folder)
        return RoundEvaluation(
            rounds_done=state.round,
            accuracy=measure_accuracy(run, recipe, method.outcome(state), state.round, transport),
            measures={job.name: figures for job, figures in zip(jobs, measured, strict=True)},
        )

    return RoundEvaluation.stored(run.federation / f"evaluation-{state.round:05d}.json", measure)


@task(name="measure {job.name} after {job.round} rounds")
def measure_rewards(run: Run, recipe: Recipe, job: RewardsJob) -> Metrics:
    """A measure on the server's held-out prompts; it has a file of its own, which benchmarks share."""

    def measure() -> dict[str, Any]:
        with POOL.borrow_trainer(recipe) as trainer:
            return trainer.run(job, rounds_contexts(run).open("")).metrics.model_dump(mode="json")

    return Metrics.model_validate(stored(run.federation / f"{job.name}-{job.round:05d}.json", measure))


def measure_accuracy(
    run: Run, recipe: Recipe, record: OutcomeRecord, done: int, transport: Transport
) -> AccuracyReport:
    """Accuracy of an outcome, after `done` rounds, on the held-out pairs, which each client measures itself.

    Raises:
        DataError: no held-out pair belongs to a client that it can measure.
    """
    split = recipe.federation.accuracy_split
    outcome = load_outcome(record)
    counts = {name: splits[split] for name, splits in read_clients(run.prepared).items()}
    if not any(counts.values()) and split == "validation":
        raise DataError(
            "federation.accuracy_split is 'validation', but the prepared data have no validation pairs: raise"
            " data.validation, or the source's own option for them."
        )
    if outcome.clients:
        counts = {name: counts[name] for name in outcome.clients}
        if not any(counts.values()):
            raise DataError(
                "no held-out pair belongs to a participating client, and each client's own model is measured"
                f" on its own pairs: raise data.{split}, or use fewer clients."
            )
    positions = sample_evenly(counts, recipe.federation.accuracy_pairs, recipe.seed)
    jobs = outcome.measure_jobs(split, positions, done)
    answers = rounds.ask_clients(jobs, transport, recipe.federation)
    return accuracy_report({name: PairFigures.model_validate(answer) for name, answer in answers.items()})


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
    return outcome.export(run.federation / "final", recipe, rounds_contexts(run).adapters)
