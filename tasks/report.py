"""Reports of a run: its page, numbers for `dvc metrics`, links between the two UIs, a phase's line."""

from __future__ import annotations

import csv
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import Recipe
from components.data.data_report import read_client_counts, read_report
from components.data.records import read_pairs, read_true_clusters
from components.data.sources.owners import has_owners
from components.environment import PRIVATE_PREFECT
from components.evaluation.contests import Contest
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.diagnostics.diagnostic import DiagnosedRun
from components.io import read_json, write_atomically, write_json
from components.paths import home, tracking_uri, without_credentials
from components.progress import format_duration
from components.recipes.load import dump_recipe
from components.reporting.lines import left_out_line
from components.reporting.metrics import RunResults
from components.results import FederationResult
from tasks.runs import Run, contest_file
from tasks.tracking.report import LOCAL_UI, run_page_path, run_url
from tasks.uncached import task

if TYPE_CHECKING:
    from components.reporting.run_page import RunDescription

PACKAGES = ("torch", "transformers", "peft", "trl", "datasets", "prefect", "mlflow")
"""Whose versions the report shows."""


@task()
def write_report(run: Run, recipe: Recipe) -> None:
    """Write report/report.html, summary.txt, metrics.json, and the tables for `dvc plots`."""
    from components.reporting.page import to_html
    from components.reporting.run_page import run_page, run_summary

    results = replace(read_results(run, recipe), answers_author=answers_author(run))
    run.report.mkdir(parents=True, exist_ok=True)
    write_json(run.report / "metrics.json", results.metrics)
    write_tables(run, results.federation)
    history = results.alignment.history
    dpo = [[entry["step"], entry["loss"], entry.get("rewards/margins", "")] for entry in history]
    _write_csv(run.report / "dpo.csv", ["step", "loss", "margin"], dpo)
    description = describe(run, results)
    write_atomically(run.report / "summary.txt", (run_summary(results, description) + "\n").encode())
    write_atomically(run.report / "report.html", to_html(run_page(results, description)).encode())


def read_results(run: Run, recipe: Recipe) -> RunResults:
    """The results of a finished run, and the summaries by its method's diagnostics."""
    federation = run.federation_result()
    diagnosed = DiagnosedRun.of(recipe, read_true_clusters(run.prepared))
    diagnostics = zip(federation.diagnostics, load_diagnostics(federation.diagnostics), strict=True)
    evaluation = run.evaluation_result()
    return RunResults(
        recipe,
        federation,
        run.alignment_result(),
        evaluation,
        read_json(run.evaluation / "answers.json"),
        {name: diagnostic.summarize(federation, diagnosed) for name, diagnostic in diagnostics},
        {name: Contest.read(contest_file(run.evaluation, name)) for name in evaluation.contests},
    )


def answers_author(run: Run) -> str:
    """Who wrote the references of the held-out prompts."""
    prompts = read_report(run.prepared).prompts
    return (prompts["test"].references if "test" in prompts else "") or "human text"


def describe(run: Run, results: RunResults) -> RunDescription:
    """What the report says about a run beside its results."""
    from components.reporting.run_page import DOMAIN_LABELS, RunDescription

    clients = read_client_counts(run.prepared)
    federation = results.federation
    adapters = {name: _relative(run.federation / one.folder) for name, one in federation.adapters.items()}
    partition: dict[str, Counter[str]] = {name: Counter() for name in clients}
    for name, counts in clients.items() if has_owners(results.recipe) else ():
        partition[name][""] = sum(counts.rows().values())  # owners do not publish domains
    for pair in () if has_owners(results.recipe) else read_pairs(run.prepared / "pairs.parquet"):
        partition[pair.client_id][DOMAIN_LABELS.get(pair.domain, pair.domain)] += 1
    diagnosed = DiagnosedRun.of(results.recipe, read_true_clusters(run.prepared))
    charts = [
        figure
        for diagnostic in load_diagnostics(federation.diagnostics)
        for figure in diagnostic.run_charts(federation, diagnosed)
    ]
    metadata = run.metadata()
    return RunDescription(
        id=run.id,
        clients=clients,
        partition=partition,
        adapters=adapters,
        aligned=_relative(run.alignment / results.alignment.policy.folder),
        links=ui_links(run),
        phases=metadata.get("seconds", {}),
        environment={
            "commits": ", ".join(metadata.get("commits", [])),
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        recipe=dump_recipe(results.recipe),
        charts=charts,
    )


def write_tables(run: Run, federation: FederationResult) -> None:
    """Write rounds.csv and accuracy.csv for `dvc plots`."""
    means = [(record.rounds_done, record.client_means()) for record in federation.records]
    losses = ("loss_first", "loss_last")
    rounds = [[done, *(own[key] for key in losses)] for done, own in means if set(losses) <= own.keys()]
    _write_csv(run.report / "rounds.csv", ["round", *losses], rounds)
    before = federation.before.accuracy.clients
    clients = [
        [name, before.get(name, ""), value] for name, value in federation.after.accuracy.clients.items()
    ]
    _write_csv(run.report / "accuracy.csv", ["client", "before", "after"], clients)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def _relative(path: Path) -> str:
    """A path for the report: relative to the project's home if it is inside it."""
    return str(path.relative_to(home())) if path.is_relative_to(home()) else str(path)


def ui_links(run: Run) -> dict[str, str]:
    """Where to open a run: its report, and its pages in both UIs with the command that starts them."""
    metadata = run.metadata()
    page = run_page_path(metadata["mlflow_run_id"])
    if tracking_uri().startswith("http"):
        mlflow = f"{without_credentials(tracking_uri())}/{page}"
    else:
        mlflow = f"make mlflow-ui      then open {LOCAL_UI}/{page}"
    prefect = metadata.get("flow_run_url") or ""
    if os.environ.get(PRIVATE_PREFECT):  # that server ends with the run, its database stays
        prefect = f"make prefect-ui     then open {prefect}"
    return {"Report": _relative(run.report / "report.html"), "MLflow": mlflow, "Prefect": prefect}


def link_artifacts(run: Run, recipe: str) -> None:
    """Prefect artifacts of the flow run: links to its MLflow run and its report, and the summary.

    Args:
        run: the run.
        recipe: the name of its recipe, the description of both.
    """
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    from components.reporting.page import fenced

    def link(what: str, key: str, *artifact: str) -> None:
        url = run_url(run.metadata()["mlflow_run_id"], *artifact)
        create_link_artifact(url, link_text=f"{what} of {run.id}", key=key, description=recipe)

    link("MLflow run", "mlflow-run")
    if (run.report / "report.html").is_file():
        link("Report", "report-page", "report/report.html")
    table = run.report / "summary.txt"
    if table.is_file():
        create_markdown_artifact(fenced(table.read_text(encoding="utf-8")), key="report", description=recipe)


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("s" if number != 1 else "")


def phase_line(run: Run, phase: str) -> str:
    """What a phase did, in how long, and its main figure: '8 rounds in 42 s, accuracy 0.612 -> 0.750'.

    The time includes that of earlier processes, which were stopped.
    """
    figure = ""
    if phase == "prepare":
        report = read_report(run.prepared)
        done = f"{report.partition.samples:,} pairs of {report.partition.clients:,} clients"
        figure = left_out_line(report.rows)
    elif phase == "federate":
        result = run.federation_result()
        done = _counted(result.rounds, "round")
        after = result.after.accuracy
        figure = f"accuracy {result.before.accuracy.mean:.3f} -> {after.mean:.3f}"
        figure += f" ({after.answered})" if after.missing else ""
    elif phase == "align":
        aligned = run.alignment_result()
        done = (
            _counted(len(aligned.history), "step") + " of DPO" if aligned.history else "the clients' policy"
        )
        if (kl := aligned.metrics.get("kl_sequence")) is not None:
            figure = f"KL to the reference {kl:.2f} nats per completion"
    else:
        contests = run.evaluation_result().contests
        done = _counted(len(contests), "contest") + " judged"
        if (contest := contests.get("aligned_vs_base")) is None:
            done = "evaluated"
        else:
            counts = f"{contest.wins} wins, {contest.ties} ties, {contest.losses} losses"
            figure = f"{counts} against the base policy"
    seconds = run.metadata()["seconds"][phase]
    return f"{done} in {format_duration(seconds)}" + (f", {figure}" if figure else "")
