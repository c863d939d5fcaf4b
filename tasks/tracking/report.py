"""Logging of the reports of runs and benchmarks, and the address of a run in the MLflow UI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from components.config.benchmark import Benchmark
from components.environment import PRIVATE_PREFECT
from components.io import read_json
from components.names import markdown_text, mlflow_key
from components.paths import tracking_uri, without_credentials
from components.reporting.changes import Change, MeansByArm, regressions
from components.reporting.claims import Finding
from components.reporting.metrics import alias_of
from components.reporting.page import fenced
from tasks.run_table import headline
from tasks.runs import Run
from tasks.tracking.client import RunLog, explained_failures, mlflow_client
from tasks.uncached import task

LOCAL_UI = "http://127.0.0.1:5000"
"""Address of the MLflow UI that `make mlflow-ui` starts."""

PLAN_TAG = "fed_rlhf.plan"
"""Tag of a benchmark's run, by which the next one of the same plan finds it."""
EARLIER_RUNS = 7
"""Last runs of a benchmark that its figures are compared with."""

HEADLINE = (
    *(f"{moment}/accuracy/mean" for moment in ("before", "after", "best")),
    "after/accuracy/worst",
    "after/accuracy/spread",
    *(
        f"aligned_vs_{other}/{name}"
        for other in ("base", "human")
        for name in (
            *("wins", "ties", "losses", "ties_half", "ties_half_low", "ties_half_high"),
            *("length_controlled", "style_controlled", "corrected"),
        )
    ),
    "judge/accuracy",
    "align/kl_sequence",
    "rouge/aligned/rougeLsum",
    "implicit_reward/mean",
    "questions/aligned/mean/accuracy",
    *(f"cost/{name}" for name in ("client_steps", "train_seconds", "sent_mb")),
)
"""Metrics of the parent run and of the registered model; all others are at the phases and in metrics.json."""


@task()
@explained_failures()
def log_report(run_id: str, run: Run) -> None:
    """Log a run's headline numbers and its report at the parent run, and describe what it registered."""
    log = RunLog.open(run_id)
    metrics = read_json(run.report / "metrics.json")
    figures = {name: metrics[name] for name in HEADLINE if name in metrics}
    log.log_folder(run.report, "report")
    summary = (run.report / "summary.txt").read_text(encoding="utf-8")
    log.describe(description(run, summary))
    model_uri = run.alignment_result().model_uri
    if not model_uri:
        log.log_metrics(figures, 0)
        return
    name, version = model_uri.removeprefix("models:/").split("/")
    # The version's own model_id is empty in MLflow 3.17; its source is models:/<id of the logged model>.
    model_id = str(log.client.get_model_version(name, version).source).removeprefix("models:/")
    log.log_metrics(figures, 0, model_id=model_id)
    link = f"[{run.id}]({run_url(run.metadata()['mlflow_run_id'])})"
    words = f"The aligned policy of {link}, a PEFT adapter that `mlflow.pyfunc.load_model` loads."
    log.client.update_model_version(name, version, f"{words}\n\n{fenced(summary)}")
    for metric, value in figures.items():
        log.client.set_model_version_tag(name, version, metric.replace("/", "."), f"{value:.4g}")


def description(run: Run, summary: str) -> str:
    """The description of a finished run: its main figures, links, and its summary."""
    metadata = run.metadata()
    phases = metadata.get("mlflow_phases", {})
    parent = metadata["mlflow_run_id"]
    links = [f"[{phase}]({run_url(run_id)})" for phase, run_id in phases.items() if run_id != parent]
    lines = [markdown_text(headline(run)), ""]
    lines += [f"{report_link(parent)}, with charts and answers side by side", ""]
    if links:
        lines += [f"Phases: {' · '.join(links)}", ""]
    if metadata.get("flow_run_url"):
        words = "flow run, after `make prefect-ui`" if os.environ.get(PRIVATE_PREFECT) else "flow run"
        lines += [f"Prefect: [{words}]({metadata['flow_run_url']})", ""]
    return "\n".join([*lines, fenced(summary)])


def report_link(run_id: str) -> str:
    """A link to the report of a run or a benchmark, as markdown."""
    return f"**[Report]({run_url(run_id, 'report/report.html')})**"


def earlier_means(run_id: str, plan: Benchmark) -> list[MeansByArm]:
    """Means over the seeds by arm and figure whose changes count, of a benchmark's last runs, newest first.

    Args:
        run_id: run of the benchmark that they are compared with, which began after them.
        plan: the benchmark; runs of the same recipe, settings, arms and seeds count.
    """
    client = mlflow_client()
    info = client.get_run(run_id).info
    conditions = f"tags.`{PLAN_TAG}` = '{plan.fingerprint()}' AND attributes.status = 'FINISHED'"
    runs = client.search_runs(
        [info.experiment_id],
        filter_string=f"{conditions} AND attributes.start_time < {info.start_time}",
        order_by=["attributes.start_time DESC"],
        max_results=EARLIER_RUNS,
    )
    names = [name for figure in plan.regressions for name in alias_of(figure).metrics]
    return [
        {
            arm: {name: metrics[key] for name in names if (key := mlflow_key(f"{arm}/{name}")) in metrics}
            for arm in plan.arms
        }
        for metrics in (run.data.metrics for run in runs)
    ]


@task()
@explained_failures()
def log_benchmark_report(
    run_id: str,
    plan: Benchmark,
    folder: Path,
    means: MeansByArm,
    findings: Sequence[Finding],
    changes: Sequence[Change],
) -> None:
    """Log a benchmark's report, and the means over seeds of each arm's figures, at its own run.

    Each claim is a tag, with its verdict and its interval, whose bounds are metrics too.
    """
    log = RunLog.open(run_id)
    log.set_tags({PLAN_TAG: plan.fingerprint()})
    if changes:
        log.set_tags({"regressions": regressions(changes) or "none"})
    for arm, figures in means.items():
        log.log_metrics({f"{arm}/{name}": value for name, value in figures.items()}, 0)
    for number, finding in enumerate(findings, 1):
        log.set_tags({f"claim/{number}": f"{finding.claim}: {finding}"})
        if finding.low is not None and finding.high is not None:
            log.log_metrics({f"claim/{number}/low": finding.low, f"claim/{number}/high": finding.high}, 0)
    log.log_folder(folder, "report")
    claims = [f"- {markdown_text(f'{finding.claim}: {finding}')}" for finding in findings]
    log.describe("\n".join([f"{report_link(run_id)}, of the seeds that are finished", "", *claims]))


def run_page_path(run_id: str, artifact: str = "") -> str:
    """Path of a run's page in the MLflow UI, or of the page of one of its artifacts."""
    experiment = mlflow_client().get_run(run_id).info.experiment_id
    tab = f"/artifacts/{artifact}" if artifact else ""
    return f"#/experiments/{experiment}/runs/{run_id}{tab}?workflowType=machine_learning"


def run_url(run_id: str, artifact: str = "") -> str:
    """Address of that page: at the tracking server, or at the UI of `make mlflow-ui`."""
    base = without_credentials(tracking_uri()) if tracking_uri().startswith("http") else LOCAL_UI
    return f"{base}/{run_page_path(run_id, artifact)}"
