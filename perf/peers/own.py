"""The project's own side of the comparisons: rounds through the flow, and clients one after the other."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.servers import prefect_api
from perf.peers.exchange import open_federation, pairs_file, plan_rounds
from perf.peers.runs import TimedWork

if TYPE_CHECKING:
    from components.config import Recipe
    from components.federation.protocol import ServerState
    from components.results import Metrics, StepRecord


def time_rounds(folder: str) -> list[dict[str, Any]]:
    """Run the rounds of an exchange folder as the flow does: Prefect's tasks, commits, MLflow logging.

    Start-up, data and the loading of the resident model are not timed.
    """
    with prefect_api(), tempfile.TemporaryDirectory() as scratch:
        return [asdict(work) for work in _measure_rounds(Path(folder), Path(scratch))]


def _measure_rounds(folder: Path, scratch: Path) -> list[TimedWork]:
    """Run the rounds inside a Prefect flow; Prefect must not have been imported before its API is there."""
    from prefect import flow
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    from components.recipes import load_recipe
    from tasks.devices import task_runner

    recipe = load_recipe(str(folder / "recipe.yaml"))

    @flow(name="peers", persist_result=False)
    def measure() -> list[TimedWork]:
        return _run_rounds(recipe, folder, scratch)

    work = measure.with_options(task_runner=task_runner(recipe.runtime))()
    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
    return work


def _run_rounds(recipe: Recipe, folder: Path, scratch: Path) -> list[TimedWork]:
    """Run the rounds, and log them to an MLflow run."""
    from tasks.flow_runs import current_flow_run
    from tasks.runs import create_run
    from tasks.tracking.run_tree import ending, open_run_tracking, phase_tracking

    run = create_run(recipe, scratch / "run")
    open_run_tracking(run, recipe, current_flow_run())
    with ending(run), phase_tracking(run, recipe.tracking, "federate") as child:
        return _time_steps(recipe, folder, scratch / "federation", child)


def _time_steps(recipe: Recipe, folder: Path, federation: Path, run_id: str) -> list[TimedWork]:
    """Seconds of each round, from its plan to its commit and its logging."""
    from components.federation.clients.context import ClientContexts
    from components.federation.commits import Commits
    from components.federation.method import method_of
    from components.federation.rounds import run_rounds
    from tasks.devices import POOL
    from tasks.prefect_transport import PrefectTransport
    from tasks.tracking.federate import FederationLog, log_steps

    commits = Commits(federation, "peers")
    with POOL.borrow_trainer(recipe):  # the model is resident from here on
        method = method_of(recipe.federation)
    state = method.start(open_federation(recipe, folder, commits.store), recipe.seed)
    log = FederationLog(run_id, run_id, recipe, commits.store, {})
    records: list[StepRecord] = []
    times = [time.perf_counter()]

    def after_step(state: ServerState[Any], record: StepRecord) -> None:
        records.append(record)
        log_steps(log, records, len(records) - 1)
        times.append(time.perf_counter())

    transport = PrefectTransport(recipe, ClientContexts(commits.store, pairs_file(folder)))
    run_rounds(method, state, transport, commits, recipe.federation, after_step)
    return [
        TimedWork(end - start, {name: _losses(client.metrics) for name, client in record.clients.items()})
        for record, start, end in zip(records, times, times[1:], strict=False)
    ]


def time_clients(name: str) -> list[dict[str, Any]]:
    """Do the jobs of the first round in exchange.json, one after the other, with a resident model.

    Each client reads and encodes its rows, computes the reference of those that it draws, trains, and
    stores its adapter. The loading of the model is not timed.
    """
    from components.federation.clients.context import ClientContexts
    from components.federation.clients.worker import build_trainer, run_job
    from components.models.store import AdapterStore
    from components.recipes import load_recipe
    from tasks.devices import set_threads

    folder = Path(name)
    recipe = load_recipe(str(folder / "recipe.yaml"))
    set_threads(recipe.runtime)
    trainer = build_trainer(recipe, "cpu")
    jobs = len(json.loads((folder / "exchange.json").read_text(encoding="utf-8"))["rounds"][0])
    work = []
    with tempfile.TemporaryDirectory() as scratch:
        store = AdapterStore(Path(scratch) / "adapters")
        contexts = ClientContexts(store, pairs_file(folder))
        federation = open_federation(recipe, folder, store)
        for job in plan_rounds(recipe, federation, store)[0][:jobs]:
            start = time.perf_counter()
            update = run_job(job, trainer, contexts)
            work.append(TimedWork(time.perf_counter() - start, {job.client: _losses(update.metrics)}))
    return [asdict(part) for part in work]


def _losses(metrics: Metrics) -> tuple[float, float]:
    return metrics.scalars["loss_first"], metrics.scalars["loss_last"]
