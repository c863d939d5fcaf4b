"""The project's own side of the comparisons: rounds through the flow, and clients one after the other."""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.servers import prefect_api
from perf.orchestration import call_in_flow, run_through_flow
from perf.peers.exchange import open_federation, pairs_file, plan_rounds

if TYPE_CHECKING:
    from components.config import Recipe
    from components.results import Metrics

Work = dict[str, Any]
"""Seconds of a round or of a client, and losses by client, of its first and its last step (nats)."""


def time_rounds(name: str) -> list[Work]:
    """Run the rounds of an exchange folder as the flow does: Prefect's tasks, commits, MLflow logging.

    Start-up, data and the loading of the resident model are not timed.
    """
    from components.recipes import load_recipe

    folder = Path(name)
    with prefect_api(), tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(str(folder / "recipe.yaml"))
        return call_in_flow(recipe, Path(scratch), partial(_time_rounds, recipe, folder, Path(scratch)))


def _time_rounds(recipe: Recipe, folder: Path, scratch: Path, run_id: str) -> list[Work]:
    from components.federation.commits import Commits
    from tasks.devices import POOL

    commits = Commits(scratch / "federation", "peers")
    with POOL.borrow_trainer(recipe):
        pass  # the model is resident from here on
    federation = open_federation(recipe, folder, commits.store)
    work = []
    for record, seconds in run_through_flow(recipe, federation, pairs_file(folder), commits, run_id):
        losses = {client: _losses(result.metrics) for client, result in record.clients.items()}
        work.append({"seconds": seconds, "losses": losses})
    return work


def time_clients(name: str) -> list[Work]:
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
            update = run_job(job, trainer, contexts, recipe)
            seconds = time.perf_counter() - start
            work.append({"seconds": seconds, "losses": {job.client: _losses(update.metrics)}})
    return work


def _losses(metrics: Metrics) -> tuple[float, float]:
    return metrics.scalars["loss_first"], metrics.scalars["loss_last"]
