"""Logging of the reports of runs and benchmarks, and the address of a run in the MLflow UI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.io import read_json
from components.reporting.claims import Finding
from tasks.tracking.client import RunLog, flatten, mlflow_client, tracking_uri
from tasks.uncached import task

LOCAL_UI = "http://127.0.0.1:5000"
"""Address of the MLflow UI that `make mlflow-ui` starts."""


@task()
def log_report(run_id: str, folder: Path) -> None:
    """Log a run's headline figures and its report at the parent run."""
    log = RunLog.open(run_id)
    log.log_points((name, value, 0) for name, value in flatten(read_json(folder / "metrics.json")))
    log.log_folder(folder, "report")


@task()
def log_benchmark_report(
    run_id: str, folder: Path, means: dict[str, dict[str, float]], findings: Sequence[Finding]
) -> None:
    """Log a benchmark's report, and the means over seeds of each arm's figures, at its own run.

    Each claim is a tag, with its verdict and its interval, whose bounds are metrics too.
    """
    log = RunLog.open(run_id)
    for arm, figures in means.items():
        log.log_metrics({f"{arm}/{name}": value for name, value in figures.items()}, 0)
    for number, finding in enumerate(findings, 1):
        log.set_tags({f"claim/{number}": f"{finding.claim}: {finding}"})
        if finding.low is not None and finding.high is not None:
            log.log_metrics({f"claim/{number}/low": finding.low, f"claim/{number}/high": finding.high}, 0)
    log.log_folder(folder, "report")


def run_page(run_id: str) -> str:
    """Path of a run's page in the MLflow UI."""
    experiment = mlflow_client().get_run(run_id).info.experiment_id
    return f"#/experiments/{experiment}/runs/{run_id}"


def run_url(run_id: str) -> str:
    """Address of a run's page: at the tracking server, or at the UI of `make mlflow-ui`."""
    base = tracking_uri() if tracking_uri().startswith("http") else LOCAL_UI
    return f"{base}/{run_page(run_id)}"
