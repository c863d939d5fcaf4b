"""What `fed-rlhf compare` reads of runs, which need not be finished."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import ValidationError

from components.config import UserError
from components.config.loading import leaves, read_yaml
from components.evaluation.charts import Point
from components.io import read_json, read_mapping
from components.reporting.comparison import ComparedRun, comparison_tables, differing_keys
from components.reporting.metrics import Metrics, evaluation_metrics, flatten
from components.reporting.page import text_table
from components.results import RoundEvaluation, StepRecord
from tasks.run_table import run_state
from tasks.runs import RESULT, Run


def compare_runs(runs: Sequence[Run]) -> list[ComparedRun]:
    """The runs with the keys in which their recipes differ, and their figures.

    Raises:
        UserError: they are not several runs.
        RecipeError: a recipe is not valid YAML.
    """
    if len({run.folder for run in runs}) < 2 or len({run.folder for run in runs}) < len(runs):
        given = ", ".join(run.id for run in runs)
        raise UserError(f"compare takes two or more runs, each of them once, but these are: {given}.")
    recipes = [dict(leaves(read_yaml(run.folder / "recipe.yaml", "a recipe is a mapping"))) for run in runs]
    return [
        ComparedRun(run=run.id, state=run_state(run), keys=dict(keys), metrics=read_metrics(run))
        for run, keys in zip(runs, differing_keys(recipes), strict=True)
    ]


def read_metrics(run: Run) -> Metrics:
    """The numbers of a run's report; before it, the accuracies that were measured so far.

    Raises:
        UserError: another version wrote the measurements of a run without a report.
    """
    path = run.report / "metrics.json"
    if path.is_file():  # that of another version may have other values
        numbers = read_mapping(path).items()
        return {name: float(value) for name, value in numbers if isinstance(value, int | float)}
    evaluations, _ = _rounds(run)
    moments = {"before": evaluations[:1], "after": evaluations[-1:] if has_result(run) else []}
    metrics = flatten({moment: evaluation_metrics(own[0]) for moment, own in moments.items() if own})
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def describe_comparison(runs: Sequence[ComparedRun]) -> str:
    """The tables of the comparison for a terminal."""
    blocks = []
    for table in comparison_tables(runs):
        if table.rows:
            blocks.append(
                "\n".join([*text_table(table), *(f"  {line}" for line in table.caption.splitlines())])
            )
    return "\n\n".join(blocks)


def read_curve(run: Run) -> list[Point]:
    """Mean accuracy, and losses as means over the clients, by the rounds done so far.

    Raises:
        UserError: another version wrote the results.
    """
    evaluations, records = _rounds(run)
    points = [{"round": float(one.rounds_done), "accuracy": one.accuracy.mean} for one in evaluations]
    for record in records:
        means = record.client_means()
        losses = {name: means[name] for name in ("loss_first", "loss_last") if name in means}
        points.append({"round": float(record.rounds_done)} | losses)
    return [{name: value for name, value in point.items() if math.isfinite(value)} for point in points]


def _rounds(run: Run) -> tuple[list[RoundEvaluation], list[StepRecord]]:
    """What was measured between the rounds, and the records of the committed steps."""
    if has_result(run):
        result = run.federation_result()
        return result.evaluations, result.records
    commits = [read_json(path) for path in sorted((run.federation / "commits").glob("[0-9]*.json"))]
    try:
        records = [StepRecord.model_validate(one["record"]) for one in commits if one["record"] is not None]
    except (KeyError, ValidationError):
        raise UserError(f"the commits of run {run.id} are of another version of the project.") from None
    return [RoundEvaluation.read(path) for path in sorted(run.federation.glob("evaluation-*.json"))], records


def has_result(run: Run) -> bool:
    """Whether the rounds are finished."""
    return (run.federation / RESULT).is_file()
