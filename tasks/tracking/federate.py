"""Logging of the federated rounds: metrics of clients and server, adapters, diagnostics."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe
from components.data.records import read_true_clusters
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.diagnostics.diagnostic import DiagnosedRun, TrueClusters
from components.models.adapters import export_adapter
from components.models.store import AdapterStore
from components.names import mlflow_model
from components.reporting.metrics import evaluation_metrics, privacy_metrics, unseen_metrics
from components.results import FederationResult, Metrics, RoundEvaluation, StepRecord, Traffic
from tasks.runs import RESULT, Run
from tasks.tracking.client import Point, RunLog, TableRow, data_digest, explained_failures, log_curves
from tasks.uncached import task

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

CLIENT_COLUMNS = ("rows", "loss", "loss_first", "loss_last", "steps", "seconds", "sent", "received", "kept")
"""Columns of the table of clients, after round and client."""


@dataclass(frozen=True)
class FederationLog:
    """The inputs of the logging of rounds."""

    run_id: str  # MLflow run of the phase
    parent: str  # MLflow run of the whole run, which has the main curves; in a benchmark it is the same
    recipe: Recipe
    store: AdapterStore
    true_clusters: TrueClusters  # the clients' true clusters, where the source knows them
    data: Mapping[str, str] = field(default_factory=dict)  # MLflow's names of what accuracy is measured on

    @classmethod
    def of_run(cls, run_id: str, run: Run, recipe: Recipe) -> FederationLog:
        """The log of a run."""
        parent = run.metadata()["mlflow_run_id"]
        store = AdapterStore(run.federation / "adapters")
        pairs = {"dataset_name": "pairs", "dataset_digest": data_digest(run, recipe, "pairs")}
        return cls(run_id, parent, recipe, store, read_true_clusters(run.prepared), pairs)

    def log_evaluation(self, evaluation: RoundEvaluation) -> None:
        """Log a measurement, as one of the adapter that was logged for its round, if it was a single one."""
        done = evaluation.rounds_done
        adapters = find_adapters(RunLog.open(self.run_id), f"params.round = '{done}'")
        of = {"model_id": str(adapters[0].model_id), **self.data} if len(adapters) == 1 else {}
        points = [(name, value, done) for name, value in evaluation_metrics(evaluation).items()]
        log_curves(self.run_id, self.parent, points, **of)


def log_steps(target: FederationLog, records: Sequence[StepRecord], start: int) -> None:
    """Log committed steps: numbers of clients and server, failures, adapters, and diagnostics.

    Args:
        records: all steps so far; the bytes sent in a round are the sum over its steps.
        start: number of records that are logged already.
    """
    log = RunLog.open(target.run_id)
    federation = target.recipe.federation
    diagnostics = load_diagnostics(list(federation.options.diagnostics))
    for position, record in enumerate(records[start:], start):
        numbers = record.model_dump(mode="json") | {"round": record.round + 1}
        log.log_json(numbers, f"rounds/{record.step:05d}.json")
        log_curves(target.run_id, target.parent, step_points(records[: position + 1]))
        for diagnostic in diagnostics:
            diagnostic.log(record, target.true_clusters, log)
        last = record.rounds_done == federation.rounds
        if record.ends_round and (last or record.rounds_done % federation.keep_every == 0):
            for name, digest in record.adapters.items():
                log_adapter(log, target, name, digest, record.rounds_done)


def step_points(records: Sequence[StepRecord]) -> list[Point]:
    """The metrics of the last of several steps, as (name, value, step).

    Steps that do not end their round are logged under the name of their phase, because a later step
    of the round has the same round number.
    """
    record = records[-1]
    step = record.logged_at
    if record.ends_round:
        metrics = {f"server/{name}": value for name, value in record.server.scalars.items()}
        metrics |= {f"train/{name}": value for name, value in client_ranges(record).items()}
        metrics |= _traffic_of_round(records)
        metrics["round/participants"] = record.participants
        metrics["round/failed"] = len(record.failed)
        metrics["round/refused"] = len(record.refused)
        if record.aggregation_seconds is not None:
            metrics["round/aggregation_seconds"] = record.aggregation_seconds
    else:
        phase = record.phase
        metrics = {f"{phase}/{name}": value for name, value in record.server.scalars.items()}
        metrics |= {f"{phase}/clients/{name}": value for name, value in client_ranges(record).items()}
        metrics[f"{phase}/participants"] = record.participants
        metrics[f"{phase}/failed"] = len(record.failed)
    metrics |= privacy_metrics(record.privacy)
    points = [(name, value, step) for name, value in metrics.items()]
    return points + _indexed_points("server/series", [record.server for record in records])


def client_ranges(record: StepRecord) -> dict[str, float]:
    """Mean, and smallest and largest known value, over the clients of each of their scalars."""
    ranges: dict[str, float] = {}
    for name, mean in record.client_means().items():
        scalars = [client.metrics.scalars for client in record.clients.values()]
        values = [numbers[name] for numbers in scalars if name in numbers]
        ranges[name] = mean
        if values:
            ranges |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return ranges


def _indexed_points(prefix: str, metrics: Sequence[Metrics]) -> list[Point]:
    """The series of the last of several metrics; their indices continue those of the earlier ones."""
    points = []
    for key, values in metrics[-1].series.items():
        earlier = sum(len(step.series.get(key, [])) for step in metrics[:-1])
        points += [(f"{prefix}/{key}", value, earlier + n) for n, value in enumerate(values, 1)]
    return points


def _traffic_of_round(records: Sequence[StepRecord]) -> dict[str, float]:
    """Bytes of all clients in the round of the last record, sent and received over the steps of that round.

    Jobs that only score adapters are not counted.
    """
    traffic = [
        {name: client.traffic for name, client in done.items() if client.traffic != Traffic()}
        for record in records
        for done in [record.clients if record.total is None else {"": record.total}]
        if record.round == records[-1].round
    ]
    last: dict[str, Traffic] = {}
    received = sent = 0
    for step in traffic:
        last |= step
        received += sum(one.received for one in step.values())
        sent += sum(one.sent for one in step.values())
    kept = sum(one.kept for one in last.values())
    return {"round/bytes_received": received, "round/bytes_sent": sent, "round/bytes_kept": kept}


def client_rows(records: Sequence[StepRecord]) -> list[TableRow]:
    """A row for each client of each step: what it reported, and its bytes; none where a step has a total."""
    if any(record.total is not None for record in records):
        return []
    rows = []
    for record in records:
        for name, client in record.clients.items():
            values = client.metrics.scalars | client.traffic.model_dump() | {"rows": client.rows}
            row: TableRow = {"round": record.round + 1, "phase": record.phase, "client": name}
            rows.append(row | {column: values.get(column) for column in CLIENT_COLUMNS})
    return rows


def log_round_evaluation(target: FederationLog, evaluation: RoundEvaluation) -> None:
    """Log a measurement between two rounds; series under a name with the number of complete rounds."""
    target.log_evaluation(evaluation)
    for name, measure in evaluation.measures.items():
        points = _indexed_points(f"{name}/after_round_{evaluation.rounds_done}", [measure])
        log_curves(target.run_id, target.parent, points)


@task()
@explained_failures()
def log_federation(target: FederationLog, run: Run, result: FederationResult) -> None:
    """Log the finished rounds: measurements, plots, final adapters, and diagnostics."""
    log = RunLog.open(target.run_id)
    for evaluation in (result.before, result.after):
        target.log_evaluation(evaluation)
    if result.unseen is not None:
        points = [(name, value, result.rounds) for name, value in unseen_metrics(result.unseen).items()]
        log_curves(target.run_id, target.parent, points)
    if rows := client_rows(result.records):
        log.log_table(rows, "clients.json")
    log.log_file(run.federation / RESULT, "federation")
    log.log_folder(run.federation / "final", "federation/adapters")
    diagnosed = DiagnosedRun.of(target.recipe, target.true_clusters)
    for diagnostic in load_diagnostics(result.diagnostics):
        diagnostic.log_result(result, diagnosed, log)


def find_adapters(log: RunLog, condition: str) -> list[LoggedModel]:
    """The completely logged adapters of a run that meet a condition."""
    experiment = log.client.get_run(log.run_id).info.experiment_id
    condition = f"{condition} AND source_run_id = '{log.run_id}'"
    found = log.client.search_logged_models([experiment], filter_string=condition)
    return [model for model in found if str(model.status).endswith("READY")]


def log_adapter(log: RunLog, target: FederationLog, name: str, digest: str, step: int) -> None:
    """Log an adapter as an MLflow model with PEFT's own files, once for each run, step and name."""
    from mlflow.entities import LoggedModelOutput

    client = log.client
    experiment = client.get_run(log.run_id).info.experiment_id
    title = mlflow_model(f"{name}-round-{step}")
    if find_adapters(log, f"name = '{title}'"):
        return
    config = target.recipe.trained
    model = client.create_logged_model(
        experiment,
        name=title,
        source_run_id=log.run_id,
        model_type="adapter",
        tags={"sha256": digest, "adapter": name},
        params={
            "backbone": config.backbone.name,
            "layers": str(config.backbone.layers or "all"),
            "round": str(step),
        },
    )
    with tempfile.TemporaryDirectory() as scratch:
        adapter = target.store.get(digest)
        export_adapter(adapter, config.lora, config.backbone, Path(scratch), config.template)
        client.log_model_artifacts(model.model_id, scratch)
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(log.run_id, [LoggedModelOutput(model.model_id, step)])
