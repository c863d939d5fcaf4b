"""Ratios of the benchmarks, measured every night and compared with those of earlier runs in MLflow.

    prefect deployment run 'benchmark/performance'

The flow is here and not in flows/, which cannot import perf/: the wheel has no benchmarks. Deployments
need a checkout anyway.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import State, flow, get_run_logger
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.states import Completed, Failed
from pydantic import Field

from components.config import UserError
from components.environment import configure_libraries
from components.reporting.changes import Change, regressions
from components.reporting.formats import MISSING, format_number
from perf.commands import MEASUREMENTS
from perf.harness import IDLE_LOAD, Ratios, find_conditions, medians
from tasks.devices import POOL
from tasks.flow_runs import current_flow_run, superseded
from tasks.runs import git_commit
from tasks.tracking.client import RunLog, find_or_create_experiment, mlflow_client
from tasks.tracking.report import run_url
from tasks.uncached import task

EXPERIMENT = "performance"
POLL_SECONDS = 15.0
"""Between looks at the load average."""
MAX_RUNS = 1000
"""Last runs of the experiment that are read, which MLflow gives in one page."""
MIN_EARLIER = 3
"""Earlier runs without which a ratio is not judged."""

DEFAULT = ("selector-step", "generation")
"""Measurements that together take minutes on two cores."""


@flow(name="benchmark", flow_run_name="performance of {recipe}", persist_result=False)
def performance(
    recipe: str = "summarization/demo",
    measurements: list[str] | None = None,
    pairs: Annotated[int, Field(ge=1)] = 3,
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.15,
    earlier_runs: Annotated[int, Field(ge=MIN_EARLIER)] = 7,
    wait_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0,
) -> State[Any]:
    """Measure ratios, log them to the MLflow experiment `performance`, and judge them by earlier runs.

    Args:
        recipe: name or path of the recipe whose sizes are measured.
        measurements: names of MEASUREMENTS; None takes DEFAULT.
        pairs: timed runs of each kind.
        tolerance: fraction by which a ratio may be below the median of earlier runs.
        earlier_runs: number of last runs, under the same conditions, that the median is of.
        wait_minutes: how long to wait while the machine has other work.

    Returns:
        the final state, which is failed if a ratio is a regression.

    Raises:
        UserError: a measurement is unknown, or the machine had other work all the time.
    """
    configure_libraries()
    if (cancelled := superseded()) is not None:
        return cancelled
    names = choose_measurements(measurements)
    load = wait_until_idle(wait_minutes)
    started = time.time()
    conditions, settings = find_conditions(recipe)
    ratios: Ratios = {}
    for name in names:
        ratios |= measure(name, recipe, pairs)
    changes = judge(medians(ratios), conditions, read_earlier_runs(), tolerance, earlier_runs)
    settings |= {"pairs": str(pairs), "load_average": f"{load:.2f}"}
    run_id = log_ratios(started, changes, conditions | settings)
    summary = summarize(changes, tolerance)
    show_verdicts(run_id, changes, summary)
    if worse := regressions(changes):
        get_run_logger().warning("regression: %s", worse)
        return Failed(message=summary)
    return Completed(message=summary)


def choose_measurements(names: Sequence[str] | None) -> list[str]:
    """The names of the measurements, each once.

    Raises:
        UserError: a name is unknown, or there are none.
    """
    chosen = list(dict.fromkeys(DEFAULT if names is None else names))
    unknown = [name for name in chosen if name not in MEASUREMENTS]
    if unknown or not chosen:
        wrong = f"unknown measurements: {', '.join(unknown)}" if unknown else "there are no measurements"
        raise UserError(f"{wrong}; choose from {', '.join(MEASUREMENTS)}.")
    return chosen


def judge(
    ratios: Mapping[str, float],
    conditions: Mapping[str, str],
    runs: Sequence[Mapping[str, Any]],
    tolerance: float,
    earlier_runs: int,
) -> list[Change]:
    """Compare each ratio with its median in the last runs under the same conditions that have it.

    Args:
        ratios: of this run.
        conditions: parameters of this run; only runs with the same ones count.
        runs: parameters and metrics of earlier runs, the newest first.
        tolerance: fraction by which a ratio may be below the median.
        earlier_runs: number of last runs that the median is of.
    """
    same = [run for run in runs if conditions.items() <= run.items()]
    changes = []
    for name, now in ratios.items():
        earlier = [run[name] for run in same if math.isfinite(run.get(name, math.nan))][:earlier_runs]
        allowed = tolerance * statistics.median(earlier) if earlier else 0.0
        changes.append(Change("", name, now, earlier, allowed, MIN_EARLIER))
    return changes


def rows(changes: Sequence[Change]) -> list[dict[str, str]]:
    """The table of the ratios, with their changes in percent."""
    return [
        {
            "ratio": change.figure,
            "now": format_number(change.now),
            "median before": format_number(change.median),
            "change": f"{change.change / change.median:+.1%}"
            if change.change is not None and change.median
            else MISSING,
            "verdict": change.verdict,
        }
        for change in changes
    ]


def summarize(changes: Sequence[Change], tolerance: float) -> str:
    """One sentence on all ratios."""
    judged = sum(change.median is not None for change in changes)
    if worse := regressions(changes):
        count = sum(change.is_regression for change in changes)
        return f"{count} of {len(changes)} ratios fell by more than {tolerance:.0%}: {worse}."
    if judged:
        return f"No regression: {judged} of {len(changes)} ratios were judged."
    return (
        f"{len(changes)} ratios were measured and none was judged, because fewer than {MIN_EARLIER} earlier"
        " runs were measured under the same conditions."
    )


@task("wait until the machine is idle")
def wait_until_idle(minutes: float) -> float:
    """Wait until nothing else runs.

    Args:
        minutes: how long at most.

    Returns:
        the load average of the last minute.

    Raises:
        UserError: other work ran all the time.
    """
    deadline = time.monotonic() + 60 * minutes
    while (load := os.getloadavg()[0]) > IDLE_LOAD:
        if time.monotonic() >= deadline:
            raise UserError(
                f"the load average is {load:.2f} after {minutes:g} minutes of waiting, and times beside other"
                f" work mislead: nothing was measured; run the flow when it is below {IDLE_LOAD}."
            )
        time.sleep(POLL_SECONDS)
    return load


@task("measure {name}")
def measure(name: str, recipe: str, pairs: int) -> Ratios:
    """The ratios of a measurement, whose table is logged; memory is freed for the next one."""
    table = io.StringIO()
    try:
        # Not by Prefect's log_prints: it would take the prints that libraries redirect for themselves.
        with redirect_stdout(table):
            return MEASUREMENTS[name](recipe, pairs)
    finally:
        get_run_logger().info("%s", table.getvalue().strip())
        POOL.release()


@task("read earlier runs")
def read_earlier_runs() -> list[dict[str, Any]]:
    """Parameters and metrics of the finished runs of the experiment, the newest first."""
    client = mlflow_client()
    runs = client.search_runs(
        [find_or_create_experiment(client, EXPERIMENT)],
        filter_string="attributes.status = 'FINISHED'",
        order_by=["attributes.start_time DESC"],
        max_results=MAX_RUNS,
    )
    return [run.data.params | run.data.metrics for run in runs]


@task("log ratios")
def log_ratios(started: float, changes: Sequence[Change], params: Mapping[str, str]) -> str:
    """Log a finished MLflow run that started at a time (seconds since the epoch); gives its id."""
    from mlflow.entities import Param

    client = mlflow_client()
    link = current_flow_run()
    judged = any(change.median is not None for change in changes)
    worse = ", ".join(change.figure for change in changes if change.is_regression)
    worse = worse or ("none" if judged else "not judged")
    tags = link.tags() | {"git.commit": git_commit(), "regressions": worse}
    created = client.create_run(
        find_or_create_experiment(client, EXPERIMENT),
        start_time=int(started * 1000),
        run_name=datetime.fromtimestamp(started, UTC).strftime("performance-%Y%m%d-%H%M%S"),
        tags=tags,
    )
    run_id = str(created.info.run_id)
    client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
    log = RunLog(client, run_id)
    log.log_metrics({change.figure: change.now for change in changes if change.now is not None}, 0)
    log.log_table(rows(changes), "ratios.json")
    client.set_terminated(run_id)
    return run_id


@task("show verdicts")
def show_verdicts(run_id: str, changes: Sequence[Change], summary: str) -> None:
    """Prefect artifacts of the flow run: a link to its MLflow run, and the table of the ratios."""
    create_link_artifact(run_url(run_id), link_text="MLflow run", key="mlflow-run", description=summary)
    create_table_artifact(rows(changes), key="performance", description=summary)
