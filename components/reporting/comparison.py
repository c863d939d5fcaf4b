"""Runs side by side: the recipe's keys that differ, the reports' figures, and curves over the rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, Field, JsonValue

from components.config.benchmark import REFERENCES
from components.evaluation.charts import Point, curve_charts
from components.reporting.formats import MISSING, are_all_ties, format_mean, format_rate
from components.reporting.metrics import ALIASES, CONTESTS, Alias, Metrics
from components.reporting.page import Chart, Page, PageSection, Table, filled

FIGURES = (Alias(("before/accuracy/mean",), "pair accuracy before the rounds"), *ALIASES.values())
"""The rows of the table of figures, before those of the contests."""
CURVES = {
    "accuracy": "Accuracy on held-out pairs",
    "loss_first": "Training loss at the first local step, clients' mean (nats)",
    "loss_last": "Training loss at the last local step, clients' mean (nats)",
}
"""Titles of the curves, by their key in a point."""
MAX_VALUE = 48
"""Characters of a recipe's value that a table shows."""
BEFORE_DIFFERENCE = 12
"""Of these, characters before the first one that differs, of long values that begin equally."""


class ComparedRun(BaseModel):
    """A run beside others."""

    run: str = Field(description="its id")
    state: str = Field(description="as of `runs`")
    keys: dict[str, JsonValue] = Field(
        description="values of the recipe's keys that differ between the runs; without those that it lacks"
    )
    metrics: Metrics = Field(
        description="the numbers of report/metrics.json; before it, accuracies that were measured so far"
    )


def differing_keys(recipes: Sequence[Mapping[str, JsonValue]]) -> list[Mapping[str, JsonValue]]:
    """The keys of each recipe, by dotted key, that the others lack or have with another value."""
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    texts = {name: {_text(recipe, name) for recipe in recipes} for name in names}
    return [
        {name: recipe[name] for name in names if name in recipe and len(texts[name]) > 1}
        for recipe in recipes
    ]


def comparison_tables(runs: Sequence[ComparedRun]) -> list[Table]:
    """The runs with their numbers, and by these their keys and figures; the last two may have no rows."""
    numbers = [str(number) for number, _ in enumerate(runs, 1)]
    notes = [] if any(run.keys for run in runs) else ["The recipes have equal keys."]
    for number, run in zip(numbers, runs, strict=True):
        if not run.metrics:
            yet = "that this version reads" if run.state == "finished" else "yet"
            notes.append(f"Run {number} has no figures {yet}, it is {run.state}.")
        elif run.state != "finished":
            notes.append(f"Run {number} has the figures that were measured so far, it is {run.state}.")
    listed = [[number, run.run, run.state] for number, run in zip(numbers, runs, strict=True)]
    names = dict.fromkeys(name for run in runs for name in run.keys)
    keys = [[name, *shown_values([_text(run.keys, name) for run in runs])] for name in names]
    return [
        Table("Runs", ["", "run", "state"], listed, "\n".join(notes)),
        Table("Recipe", ["key", *numbers], keys),
        Table("Figures", ["figure", *numbers], figure_rows([run.metrics for run in runs])),
    ]


def comparison_page(runs: Sequence[ComparedRun], curves: Sequence[Sequence[Point]]) -> Page:
    """The tables and the runs' curves, of which each point has `round` and some of CURVES."""
    listed, keys, figures = comparison_tables(runs)
    by_run = {
        f"{number}: {run.run}": {0: points}
        for number, (run, points) in enumerate(zip(runs, curves, strict=True), 1)
    }
    charts = [Chart(figure) for figure in curve_charts(by_run, CURVES)]
    return Page(
        f"Comparison of {len(runs)} runs",
        " · ".join(run.run for run in runs),
        [
            PageSection("Runs", "Which runs the numbers in the other tables stand for.", [listed]),
            PageSection("Recipe", "The keys whose values differ.", filled([keys])),
            PageSection("Figures", "The figures of the runs' reports.", filled([figures])),
            PageSection("Curves", "Accuracy and loss over the rounds so far.", charts),
        ],
    )


def figure_rows(runs: Sequence[Metrics]) -> list[list[str]]:
    """A row for each figure that a run has, with a cell for each run."""
    rows = [[alias.label, *(_figure(metrics, alias) for metrics in runs)] for alias in FIGURES]
    for name, label in CONTESTS.items():
        contest = label.format(answers_author=REFERENCES)
        counts, rates = zip(*(_contest(metrics, name) for metrics in runs), strict=True)
        rows += [
            [f"{contest}: wins/ties/losses", *counts],
            [f"{contest}: win rate, ties as 1/2 [95%]", *rates],
        ]
    return [row for row in rows if any(cell != MISSING for cell in row[1:])]


def shown_values(texts: Sequence[str]) -> list[str]:
    """Values as cells; of long ones, the characters around the first one in which they differ."""
    present = [text for text in texts if text != MISSING]
    start = 0
    if max(map(len, texts)) > MAX_VALUE and len(set(present)) > 1:
        differ = [len(set(characters)) > 1 for characters in zip(*present, strict=False)]
        start = max(0, [*differ, True].index(True) - BEFORE_DIFFERENCE)
    cut = [f"...{text[start:]}" if start and text != MISSING else text for text in texts]
    return [text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..." for text in cut]


def _text(recipe: Mapping[str, JsonValue], name: str) -> str:
    return json.dumps(recipe[name], ensure_ascii=False) if name in recipe else MISSING


def _figure(metrics: Metrics, alias: Alias) -> str:
    value = next((metrics[name] for name in alias.metrics if name in metrics), None)
    return MISSING if value is None else format_mean([value])


def _contest(metrics: Metrics, name: str) -> tuple[str, str]:
    """The counts of a contest, and its win rate with its interval."""
    wins, ties, losses, rate, low, high = (
        metrics.get(f"{name}/{figure}")
        for figure in ("wins", "ties", "losses", "ties_half", "ties_half_low", "ties_half_high")
    )
    if wins is None or ties is None or losses is None:
        return MISSING, MISSING
    rate_text = format_rate(rate, low, high, are_all_ties(wins, ties, losses))
    return f"{wins:.0f}/{ties:.0f}/{losses:.0f}", rate_text
