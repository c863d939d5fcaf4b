"""The cost of orchestration: the same rounds through the flow and as a loop over the components."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from infra.servers import prefect_api
from perf.harness import Ratios, alternate, compare

if TYPE_CHECKING:
    import pandas as pd

    from components.config import Recipe
    from components.federation.commits import Commits
    from components.federation.protocol import Federation, ServerState
    from components.results import StepRecord

T = TypeVar("T")


def call_in_flow(recipe: Recipe, folder: Path, measure: Callable[[str], T]) -> T:
    """Call a function in a Prefect flow, with the id of a new MLflow run for the rounds of a recipe.

    The caller has an API of Prefect before, so that a server which starts does not slow what is timed.
    """
    from flows.api import pipeline_flow
    from tasks.devices import task_runner
    from tasks.flow_runs import current_flow_run
    from tasks.runs import create_run
    from tasks.tracking.run_tree import ending, open_run_tracking, phase_tracking

    @pipeline_flow("measured-rounds")
    def measured_rounds() -> T:
        run = create_run(recipe, folder / "run")
        open_run_tracking(run, recipe, current_flow_run())
        with ending(run), phase_tracking(run, recipe.tracking, "federate") as child:
            return measure(child)

    measured_rounds.task_runner = task_runner(recipe.runtime)  # with_options would give a plain Flow
    return measured_rounds()


def run_through_flow(
    recipe: Recipe, federation: Federation, pairs: Path, commits: Commits, run_id: str
) -> list[tuple[StepRecord, float]]:
    """Run the rounds inside a flow: Prefect's tasks, commits, and logging to an MLflow run.

    Returns:
        the record of each round, and its seconds from the plan to the commit and the logging.
    """
    from components.federation.clients.context import ClientContexts
    from components.federation.rounds import run_rounds
    from tasks.prefect_transport import PrefectTransport
    from tasks.tracking.federate import FederationLog, log_steps

    log = FederationLog(run_id, run_id, recipe, commits.store, {})
    records: list[StepRecord] = []
    method = recipe.federation.options
    state = method.start(federation, recipe.seed)
    times = [time.perf_counter()]

    def after_step(state: ServerState[Any], record: StepRecord) -> None:
        records.append(record)
        log_steps(log, records, len(records) - 1)
        times.append(time.perf_counter())

    transport = PrefectTransport(recipe, ClientContexts(commits.store, pairs))
    run_rounds(method, state, transport, commits, recipe.federation, after_step)
    seconds = [end - start for start, end in pairwise(times)]
    return list(zip(records, seconds, strict=True))


def compare_orchestration(recipe_name: str, repeats: int) -> Ratios:
    """A federated round through the flow (Prefect, MLflow), and as a loop over the same components.

    Start-up, data and the loading of the model are not timed.

    Returns:
        the time of the loop over that of the flow.
    """
    from components.data.prepare import prepare
    from components.recipes import load_recipe

    recipe = load_recipe(recipe_name, ["federation.rounds=1", "tracking.experiment=benchmark"])
    with prefect_api(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, folder / "prepared")
        frame = call_in_flow(recipe, folder, partial(_time_rounds, recipe, folder, repeats))
    title = f"A round of {recipe.federation.clients_per_round} clients of {recipe_name}"
    return compare(title, frame, {"orchestration/flow_against_bare_loop": ("loop", "flow")})


def _time_rounds(recipe: Recipe, folder: Path, repeats: int, run_id: str) -> pd.DataFrame:
    from components.federation.commits import Commits
    from components.federation.rounds import run_federation
    from tasks.devices import POOL
    from tasks.federation import form_federation
    from tasks.runs import Run

    first = Commits(folder / "initial", "benchmark")
    federation = form_federation(Run("prepared", folder), recipe, first)  # loads the model
    initial = first.store.get(federation.initial)
    pairs = folder / "prepared" / "pairs.parquet"
    numbers = count()

    def open_commits() -> Commits:
        commits = Commits(folder / f"rounds-{next(numbers)}", "benchmark")
        commits.store.put(initial)
        return commits

    def loop() -> None:
        with POOL.borrow_trainer(recipe) as trainer:
            run_federation(recipe, federation, pairs, open_commits(), trainer)

    def flow() -> dict[str, float]:
        rounds = run_through_flow(recipe, federation, pairs, open_commits(), run_id)
        clients = [client for record, _ in rounds for client in record.clients.values()]
        work = [client.metrics.scalars["seconds"] for client in clients]
        return {"seconds of a client's work": statistics.median(work)}

    return alternate({"loop": loop, "flow": flow}, repeats)
