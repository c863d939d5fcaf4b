"""Logging of the federated rounds: metrics of clients and server, adapters, diagnostics."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config import Recipe
from components.data.records import known_groups
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.diagnostics.base import DiagnosedRun, Groups
from components.federation.protocol import method_of
from components.models.adapters import AdapterStore, export_adapter
from components.reporting.run_plots import plot_accuracy, plot_learning_curves
from components.reporting.summary import evaluation_metrics
from components.results import FederationResult, Metrics, RoundEvaluation, StepRecord, Traffic
from tasks.runs import RESULT, Run
from tasks.tracking.client import RunLog
from tasks.uncached import task


@dataclass(frozen=True)
class FederationLog:
    """The inputs of the logging of rounds.

    Attributes:
        run_id: MLflow run of the phase.
        recipe: the recipe.
        store: the adapter store.
        groups: the clients' true groups, where the source knows them.
    """

    run_id: str
    recipe: Recipe
    store: AdapterStore
    groups: Groups

    @classmethod
    def of_run(cls, run_id: str, run: Run, recipe: Recipe) -> FederationLog:
        """The log of a run."""
        return cls(run_id, recipe, AdapterStore(run.federation / "adapters"), known_groups(run.prepared))


@task()
def log_steps(target: FederationLog, records: Sequence[StepRecord], start: int) -> None:
    """Log committed steps: numbers of clients and server, failures, adapters, and diagnostics.

    Args:
        target: where they are logged.
        records: all steps so far; the bytes sent in a round are the sum over its steps.
        start: number of records that are logged already.
    """
    log = RunLog.open(target.run_id)
    federation = target.recipe.federation
    diagnostics = load_diagnostics(list(method_of(federation).diagnostics))
    for position, record in enumerate(records[start:], start):
        log.log_json(record.model_dump(mode="json"), f"rounds/{record.step:05d}.json")
        log.log_points(step_points(records[: position + 1]))
        for diagnostic in diagnostics:
            diagnostic.log(record, target.groups, log)
        last = record.rounds_done == federation.rounds
        if record.ends_round and (last or record.rounds_done % federation.keep_every == 0):
            for name, digest in record.adapters.items():
                log_adapter(log, target, name, digest, record.rounds_done)


def step_points(records: Sequence[StepRecord]) -> list[tuple[str, float, int]]:
    """The metrics of the last of several steps, as (name, value, step).

    Steps that do not end their round are logged under the name of their phase, because a later step
    of the round has the same round number.
    """
    record = records[-1]
    step = record.logged_at
    if record.ends_round:
        metrics = {f"server/{name}": value for name, value in record.server.scalars.items()}
        metrics |= {f"train/{name}": value for name, value in record.client_means().items()}
        metrics |= _traffic_metrics(traffic_of_round(records))
        metrics["round/participants"] = len(record.clients)
        metrics["round/failed"] = len(record.failed)
        metrics["round/refused"] = len(record.refused)
        metrics["round/aggregation_seconds"] = record.aggregation_seconds
    else:
        phase = record.phase
        metrics = {f"{phase}/{name}": value for name, value in record.server.scalars.items()}
        metrics |= {f"{phase}/clients/{name}": value for name, value in record.client_means().items()}
        metrics[f"{phase}/participants"] = len(record.clients)
        metrics[f"{phase}/failed"] = len(record.failed)
    prefix = "" if record.ends_round else f"{record.phase}/"
    for name, client in record.clients.items():
        metrics |= {f"clients/{name}/{prefix}{key}": value for key, value in client.metrics.scalars.items()}
    points = [(name, value, step) for name, value in metrics.items()]
    return points + _series_points(records)


def _series_points(records: Sequence[StepRecord]) -> list[tuple[str, float, int]]:
    """The series of the last step, at the running index of their values over all rounds."""
    points = _indexed_points("server/series", [record.server for record in records])
    for name in records[-1].clients:
        metrics = [record.clients[name].metrics for record in records if name in record.clients]
        points += _indexed_points(f"series/{name}", metrics)
    return points


def _indexed_points(prefix: str, metrics: Sequence[Metrics]) -> list[tuple[str, float, int]]:
    """The series of the last of several metrics; their indices continue those of the earlier ones."""
    points = []
    for key, values in metrics[-1].series.items():
        earlier = sum(len(step.series.get(key, [])) for step in metrics[:-1])
        points += [(f"{prefix}/{key}", value, earlier + n) for n, value in enumerate(values, 1)]
    return points


def traffic_of_round(records: Sequence[StepRecord]) -> dict[str, Traffic]:
    """Bytes of each client in the round of the last record, over the steps of that round."""
    traffic: dict[str, Traffic] = {}
    for record in records:
        if record.round != records[-1].round:
            continue
        for name, client in record.clients.items():
            if client.traffic == Traffic():  # jobs that only score adapters are not counted
                continue
            earlier = traffic.get(name, Traffic())
            traffic[name] = Traffic(
                received=earlier.received + client.traffic.received,
                sent=earlier.sent + client.traffic.sent,
                kept=client.traffic.kept,
            )
    return traffic


def _traffic_metrics(traffic: Mapping[str, Traffic]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for kind in ("received", "sent", "kept"):
        values = {name: getattr(client, kind) for name, client in traffic.items()}
        metrics |= {f"clients/{name}/bytes_{kind}": value for name, value in values.items()}
        metrics[f"round/bytes_{kind}"] = sum(values.values())
    return metrics


@task(name="log evaluation after {evaluation.rounds_done} rounds")
def log_round_evaluation(run_id: str, evaluation: RoundEvaluation) -> None:
    """Log a measurement between two rounds; series under a name with the number of complete rounds."""
    log = RunLog.open(run_id)
    log.log_metrics(evaluation_metrics(evaluation), evaluation.rounds_done)
    for name, measure in evaluation.measures.items():
        log.log_points(_indexed_points(f"{name}/after_round_{evaluation.rounds_done}", [measure]))


@task()
def log_federation(target: FederationLog, folder: Path, result: FederationResult) -> None:
    """Log the finished rounds: measurements, plots, final adapters, and diagnostics."""
    log = RunLog.open(target.run_id)
    for evaluation in (result.before, result.after):
        log.log_metrics(evaluation_metrics(evaluation), evaluation.rounds_done)
    plot_learning_curves(result.records, folder / "learning-curves.png")
    plot_accuracy(
        result.before.accuracy, result.after.accuracy, result.accuracy_label, folder / "accuracy.png"
    )
    for name in ("learning-curves.png", "accuracy.png", RESULT):
        log.log_file(folder / name, "federation")
    log.log_folder(folder / "final", "federation/adapters")
    method = method_of(target.recipe.federation)
    run = DiagnosedRun(
        target.recipe.federation.method, target.recipe.seed, target.groups, method.preferences()
    )
    for diagnostic in load_diagnostics(result.diagnostics):
        diagnostic.log_result(result, run, log)


def log_adapter(log: RunLog, target: FederationLog, name: str, digest: str, step: int) -> None:
    """Log an adapter as an MLflow model with PEFT's own files, once for each run, step and name."""
    from mlflow.entities import LoggedModelOutput

    client = log.client
    experiment = client.get_run(log.run_id).info.experiment_id
    title = f"{name}-round-{step}"
    condition = f"name = '{title}' AND source_run_id = '{log.run_id}'"
    existing = client.search_logged_models([experiment], filter_string=condition)
    if any(str(model.status).upper().endswith("READY") for model in existing):
        return
    config = target.recipe.federation.options.trained_section(target.recipe)
    model = client.create_logged_model(
        experiment,
        name=title,
        source_run_id=log.run_id,
        model_type="adapter",
        tags={"sha256": digest},
        params={
            "backbone": config.backbone.name,
            "layers": str(config.backbone.layers or "all"),
            "round": str(step),
        },
    )
    with tempfile.TemporaryDirectory() as scratch:
        adapter = target.store.get(target.store.ref(digest))
        export_adapter(adapter, config.lora, config.backbone, Path(scratch), config.template)
        client.log_model_artifacts(model.model_id, scratch)
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(log.run_id, [LoggedModelOutput(model.model_id, step)])
