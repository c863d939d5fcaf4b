"""The cost of orchestration: the same rounds through the flow and as a loop over the components."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.servers import prefect_api
from perf.harness import Ratios, alternate, compare

if TYPE_CHECKING:
    import pandas as pd

    from components.config import Recipe
    from components.federation.commits import Commits
    from components.federation.protocol import Federation
    from components.models.store import Adapter
    from components.results import StepRecord
    from tasks.tracking.federate import FederationLog


@dataclass(frozen=True)
class Rounds:
    """The rounds that are timed."""

    recipe: Recipe
    federation: Federation
    initial: Adapter  # that all clients start from
    pairs: Path  # the prepared pairs
    folder: Path  # where each run has a folder

    def open_commits(self, name: str) -> Commits:
        """The commits of a new run."""
        from components.federation.commits import Commits

        commits = Commits(self.folder / name, "benchmark")
        commits.store.put(self.initial)
        return commits

    def run_flow(self, name: str, run_id: str) -> dict[str, float]:
        """Run the rounds as the flow does, logged to an MLflow run; gives the median work of a client."""
        from components.federation.clients.context import ClientContexts
        from components.federation.method import method_of
        from components.federation.protocol import ServerState
        from components.federation.rounds import run_rounds
        from tasks.prefect_transport import PrefectTransport
        from tasks.tracking.federate import log_steps

        commits = self.open_commits(name)
        target = self._log(run_id, commits)
        records: list[StepRecord] = []

        def after_step(state: ServerState[Any], record: StepRecord) -> None:
            records.append(record)
            log_steps(target, records, len(records) - 1)

        method = method_of(self.recipe.federation)
        state = method.start(self.federation, self.recipe.seed)
        transport = PrefectTransport(self.recipe, ClientContexts(commits.store, self.pairs))
        run_rounds(method, state, transport, commits, self.recipe.federation, after_step)
        work = [client.metrics.scalars["seconds"] for record in records for client in record.clients.values()]
        return {"seconds of a client's work": statistics.median(work)}

    def _log(self, run_id: str, commits: Commits) -> FederationLog:
        from tasks.tracking.federate import FederationLog

        return FederationLog(run_id, run_id, self.recipe, commits.store, {})

    def run_loop(self, name: str) -> None:
        """Run the rounds without Prefect and MLflow."""
        from components.federation.rounds import run_federation
        from tasks.devices import POOL

        with POOL.borrow_trainer(self.recipe) as trainer:
            run_federation(self.recipe, self.federation, self.pairs, self.open_commits(name), trainer)


def compare_orchestration(recipe_name: str, repeats: int) -> Ratios:
    """A federated round through the flow (Prefect, MLflow), and as a loop over the same components.

    Start-up, data and the loading of the model are not timed.

    Returns:
        the time of the loop over that of the flow.
    """
    from components.recipes import load_recipe

    recipe = load_recipe(recipe_name, ["federation.rounds=1", "tracking.experiment=benchmark"])
    with prefect_api(), tempfile.TemporaryDirectory() as scratch:
        frame = _measure(recipe, Path(scratch), repeats)
    title = f"A round of {recipe.federation.clients_per_round} clients of {recipe_name}"
    return compare(title, frame, {"orchestration/flow_against_bare_loop": ("loop", "flow")})


def _measure(recipe: Recipe, folder: Path, repeats: int) -> pd.DataFrame:
    """Times of the rounds, measured inside a Prefect flow."""
    from prefect import flow
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    from components.data.prepare import prepare
    from tasks.devices import task_runner

    prepare(recipe.data, recipe.seed, folder / "prepared")

    @flow(name="orchestration-costs", persist_result=False)
    def measure() -> pd.DataFrame:
        return _time_rounds(recipe, folder, repeats)

    times = measure.with_options(task_runner=task_runner(recipe.runtime))()
    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
    return times


def _time_rounds(recipe: Recipe, folder: Path, repeats: int) -> pd.DataFrame:
    from tasks.flow_runs import current_flow_run
    from tasks.runs import create_run
    from tasks.tracking.run_tree import ending, open_run_tracking, phase_tracking

    run = create_run(recipe, folder / "run")
    open_run_tracking(run, recipe, current_flow_run())
    rounds = _form(recipe, folder)
    numbers = count()
    with ending(run), phase_tracking(run, recipe.tracking, "federate") as child:
        calls = {
            "loop": lambda: rounds.run_loop(f"loop-{next(numbers)}"),
            "flow": lambda: rounds.run_flow(f"flow-{next(numbers)}", child),
        }
        return alternate(calls, repeats)


def _form(recipe: Recipe, folder: Path) -> Rounds:
    """The rounds of a recipe on prepared data; the model is loaded by this."""
    from components.federation.commits import Commits
    from tasks.federation import form_federation
    from tasks.runs import Run

    commits = Commits(folder / "initial", "benchmark")
    federation = form_federation(Run("prepared", folder), recipe, commits)
    initial = commits.store.get(federation.initial)
    return Rounds(recipe, federation, initial, folder / "prepared" / "pairs.parquet", folder)
