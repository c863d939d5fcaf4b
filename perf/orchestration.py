"""The cost of orchestration: the same rounds through the flow and as a loop over the components."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.servers import prefect_api
from perf.comparison import Comparison, Ratios, format_seconds, median_ratio, paired_ratios

if TYPE_CHECKING:
    from components.config import Recipe
    from components.federation.commits import Commits
    from components.federation.protocol import Federation
    from components.models.store import Adapter
    from components.results import StepRecord
    from tasks.tracking.federate import FederationLog


@dataclass
class RoundTimes:
    """Seconds of runs of the rounds, in their order.

    Attributes:
        flow: through the flow.
        loop: as a loop.
        work: of single clients, in the runs through the flow.
    """

    flow: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rounds:
    """The rounds that are timed.

    Attributes:
        recipe: the recipe.
        federation: its clients.
        initial: the adapter that all clients start from.
        pairs: the prepared pairs.
        folder: where each run has a folder.
    """

    recipe: Recipe
    federation: Federation
    initial: Adapter
    pairs: Path
    folder: Path

    def open_commits(self, name: str) -> Commits:
        """The commits of a new run."""
        from components.federation.commits import Commits

        commits = Commits(self.folder / name, "benchmark")
        commits.store.put(self.initial)
        return commits

    def run_flow(self, name: str, run_id: str) -> list[StepRecord]:
        """Run the rounds as the flow does, logged to an MLflow run.

        Returns:
            the records of their steps.
        """
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
        return records

    def _log(self, run_id: str, commits: Commits) -> FederationLog:
        from tasks.tracking.federate import FederationLog

        return FederationLog(run_id, run_id, self.recipe, commits.store, {})

    def run_loop(self, name: str) -> None:
        """Run the rounds without Prefect and MLflow."""
        from components.federation.rounds import run_federation
        from tasks.devices import POOL

        with POOL.borrow_trainer(self.recipe) as trainer:
            run_federation(self.recipe, self.federation, self.pairs, self.open_commits(name), trainer)


def compare_orchestration(comparison: Comparison, rounds: int) -> Ratios:
    """Print the times of the rounds through the flow and as a loop.

    Args:
        comparison: recipe and repeats.
        rounds: of each timed run.

    Returns:
        the time of the loop over that of the flow.
    """
    from components.recipes import load_recipe

    overrides = [f"federation.rounds={rounds}", "tracking.experiment=benchmark"]
    recipe = load_recipe(comparison.recipe, overrides)
    with prefect_api(), tempfile.TemporaryDirectory() as scratch:
        times = _measure(recipe, Path(scratch), comparison.repeats)
    ratios = paired_ratios(times.flow, times.loop)
    print(
        f"\n{rounds} rounds of {recipe.federation.clients_per_round} clients,"
        f" {statistics.median(times.work):.1f} s of work per client,"
        f" {comparison.repeats} runs of each, alternating"
    )
    print(f"  flow  {format_seconds(times.flow, 1)}")
    print(f"  loop  {format_seconds(times.loop, 1)}")
    overheads = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
    print(f"  orchestration costs {statistics.median(ratios) - 1:+.1%} (pairs: {overheads})")
    return {"orchestration/flow_against_bare_loop": median_ratio(times.loop, times.flow)}


def _measure(recipe: Recipe, folder: Path, repeats: int) -> RoundTimes:
    """Times of the rounds, measured inside a Prefect flow."""
    from prefect import flow
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    from components.data.prepare import prepare
    from tasks.devices import task_runner

    prepare(recipe.data, recipe.seed, folder / "prepared")

    @flow(name="orchestration-costs", persist_result=False)
    def measure() -> RoundTimes:
        return _alternate(recipe, folder, repeats)

    times = measure.with_options(task_runner=task_runner(recipe.runtime))()
    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
    return times


def _alternate(recipe: Recipe, folder: Path, repeats: int) -> RoundTimes:
    """Run the rounds in both ways, each first in turn."""
    from tasks.flow_runs import current_flow_run
    from tasks.runs import create_run
    from tasks.tracking.run_tree import ending, open_run_tracking, phase_tracking

    run = create_run(recipe, folder / "run")
    open_run_tracking(run, recipe, current_flow_run())
    rounds = _form(recipe, folder)
    times = RoundTimes()
    with ending(run), phase_tracking(run, recipe.tracking, "federate") as child:
        for number in range(repeats):
            for kind in ("flow", "loop") if number % 2 else ("loop", "flow"):
                start = time.perf_counter()
                if kind == "loop":
                    rounds.run_loop(f"loop-{number}")
                    times.loop.append(time.perf_counter() - start)
                    continue
                records = rounds.run_flow(f"flow-{number}", child)
                times.flow.append(time.perf_counter() - start)
                times.work += _client_seconds(records)
    return times


def _form(recipe: Recipe, folder: Path) -> Rounds:
    """The rounds of a recipe on prepared data; the model is loaded by this."""
    from components.federation.commits import Commits
    from tasks.federation import form_federation
    from tasks.runs import Run

    commits = Commits(folder / "initial", "benchmark")
    federation = form_federation(Run("prepared", folder), recipe, commits)
    initial = commits.store.get(federation.initial)
    return Rounds(recipe, federation, initial, folder / "prepared" / "pairs.parquet", folder)


def _client_seconds(records: list[StepRecord]) -> list[float]:
    """Seconds of work of each client in each step."""
    seconds: list[float] = []
    for record in records:
        seconds += [client.metrics.scalars["seconds"] for client in record.clients.values()]
    return seconds
