"""Tasks of a run's report: its table, figures for `dvc metrics`, and links between the two UIs."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.config import Recipe
from components.data.records import answered_prompt
from components.data.report import read_report
from components.environment import PRIVATE_PREFECT
from components.io import read_json, write_atomically, write_json
from components.paths import home
from components.reporting.summary import (
    FinishedRun,
    accuracy_metrics,
    question_figures,
    summarize_run,
)
from components.results import EvaluationResult, FederationResult, finite_or_none
from tasks.runs import Run
from tasks.tracking.client import tracking_uri
from tasks.tracking.report import LOCAL_UI, run_page, run_url
from tasks.uncached import task

COUNTS = {"wins", "ties", "losses", "unparsable", "length_effect"}
"""Figures of a contest that are left out of metrics.json."""


@task()
def write_report(run: Run, recipe: Recipe) -> None:
    """Write report/metrics.json, summary.txt, and the tables for `dvc plots`."""
    federation = run.federation_result()
    alignment = run.alignment_result()
    evaluation = run.evaluation_result()
    run.report.mkdir(parents=True, exist_ok=True)
    kl = {
        name.removeprefix("kl_"): value for name, value in alignment.metrics.items() if name.startswith("kl_")
    }
    metrics = headline_metrics(federation, evaluation) | {"kl": kl}
    write_json(run.report / "metrics.json", finite_or_none(metrics))
    write_tables(run, federation)
    dpo = [[entry["step"], entry["loss"], entry.get("rewards/margins", "")] for entry in alignment.history]
    _write_csv(run.report / "dpo.csv", ["step", "loss", "margin"], dpo)
    prompts = read_report(run.prepared).prompts
    adapters = {
        name: _relative(run.federation / adapter.folder) for name, adapter in federation.adapters.items()
    }
    answers = read_json(run.evaluation / "answers.json")
    finished = FinishedRun(
        recipe,
        federation,
        alignment,
        evaluation,
        prompts=len({answered_prompt(row["prompt_id"]) for row in answers}),
        references=(prompts["test"].references if "test" in prompts else "") or "human text",
        adapters=adapters | {"aligned": _relative(run.alignment / alignment.policy.folder)},
    )
    summary = "\n".join([summarize_run(finished), "", *ui_commands(run)]) + "\n"
    write_atomically(run.report / "summary.txt", summary.encode())


def headline_metrics(federation: FederationResult, evaluation: EvaluationResult) -> dict[str, Any]:
    """The figures of metrics.json, by topic."""
    moments = {"before": federation.before, "after": federation.after}
    if federation.best is not None:
        moments["best"] = federation.best
    accuracy: dict[str, dict[str, float]] = {}
    for moment, measured in moments.items():
        figures = accuracy_metrics(measured.accuracy)
        accuracy[moment] = {name.removeprefix("accuracy/"): value for name, value in figures.items()}
    if federation.best is not None:
        accuracy["best"]["round"] = federation.best.rounds_done
    win_rate = {name: contest.model_dump(exclude=COUNTS) for name, contest in evaluation.contests.items()}
    judge = {
        name.removeprefix("judge_"): value
        for name, value in evaluation.judge_figures.items()
        if "accuracy" in name
    }
    metrics: dict[str, Any] = {
        "accuracy": accuracy,
        "win_rate": win_rate,
        "judge": judge,
        "rouge": evaluation.rouge,
    }
    measures = {
        moment: {name: measure.scalars for name, measure in getattr(federation, moment).measures.items()}
        for moment in ("before", "after")
    }
    if measures["after"]:
        metrics["measures"] = measures
    if evaluation.alpaca_eval is not None:
        metrics["alpaca_eval"] = evaluation.alpaca_eval.contests
    if evaluation.questions:
        metrics["questions"] = {
            policy: {
                name: figures.model_dump(exclude_none=True)
                for name, figures in question_figures(result).items()
            }
            for policy, result in evaluation.questions.items()
        }
    return metrics


def write_tables(run: Run, federation: FederationResult) -> None:
    """Write rounds.csv and accuracy.csv for `dvc plots`."""
    rounds = []
    for record in federation.records:
        means = record.client_means()
        if {"loss_first", "loss_last"} <= means.keys():
            rounds.append([record.rounds_done, means["loss_first"], means["loss_last"]])
    _write_csv(run.report / "rounds.csv", ["round", "loss_first", "loss_last"], rounds)
    before = federation.before.accuracy.clients
    clients = [[name, before[name], value] for name, value in federation.after.accuracy.clients.items()]
    _write_csv(run.report / "accuracy.csv", ["client", "before", "after"], clients)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def _relative(path: Path) -> str:
    """A path for the table: relative to the project's home if it is inside it."""
    return str(path.relative_to(home())) if path.is_relative_to(home()) else str(path)


def ui_commands(run: Run) -> list[str]:
    """The commands that open both UIs on a run."""
    metadata = run.metadata()
    page = run_page(metadata["mlflow_run_id"])
    if tracking_uri().startswith("http"):
        mlflow = f"{tracking_uri()}/{page}"
    else:
        mlflow = f"make mlflow-ui      then open {LOCAL_UI}/{page}"
    prefect = metadata.get("flow_run_url") or ""
    if os.environ.get(PRIVATE_PREFECT):  # that server ends with the run, its database stays
        prefect = f"make prefect-ui     then open http://127.0.0.1:4200/{prefect.split('/', 3)[-1]}"
    return ["Open this run", f"  MLflow:   {mlflow}", f"  Prefect:  {prefect}"]


@task()
def link_artifacts(run: Run, recipe: str) -> None:
    """Prefect artifacts of the flow run: a link to its MLflow run, and the table of a finished run.

    Args:
        run: the run.
        recipe: the name of its recipe, the description of both.
    """
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    create_link_artifact(
        run_url(run.metadata()["mlflow_run_id"]),
        link_text=f"MLflow run of {run.id}",
        key="mlflow-run",
        description=recipe,
    )
    table = run.report / "summary.txt"
    if table.is_file():
        text = f"```\n{table.read_text(encoding='utf-8')}\n```"
        create_markdown_artifact(text, key="report", description=recipe)
