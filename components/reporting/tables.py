"""The tables of a benchmark's report, and the report as markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.config.benchmark import BASE_POLICY
from components.data.records import answered_prompt
from components.evaluation.contests import Contest
from components.evaluation.plotting import Image
from components.reporting.figures import REWARD_PREFIX, all_figure_labels, figure_label
from components.reporting.units import UnitsByArm, UnitsByFigure, client_range
from components.results import ContestFigures, WinRate

Figures = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Figures by name, by arm and seed."""


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    title: str  # heading
    header: list[str]  # cells
    rows: list[list[str]]
    caption: str = ""  # what the numbers cover


def format_mean(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds."""
    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def format_share(value: float | None) -> str:
    """A share in [0, 1]."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def format_interval(rate: float, low: float, high: float) -> str:
    """A rate and its interval in percent; '-' if it is not determined."""
    return "-" if math.isnan(rate) else f"{rate:.1%} [{low:.1%}, {high:.1%}]"


def format_equal_length(figures: ContestFigures) -> str:
    """The rate at equal length, a tie half a win, and its interval."""
    return format_interval(
        figures.length_controlled, figures.length_controlled_low, figures.length_controlled_high
    )


def format_counts(rate: WinRate) -> str:
    """Wins, ties and losses."""
    return f"{rate.wins}/{rate.ties}/{rate.losses}"


def figures_tables(
    figures: Figures, base: Mapping[int, Mapping[str, float]], units: UnitsByArm
) -> tuple[Table, Table]:
    """Means over seeds, and the figures of each seed.

    Args:
        figures: by arm and seed.
        base: the base policy's, by seed.
        units: what the figures are means of; means over clients have the worst client and the spread.
    """
    arms = dict(figures) | ({BASE_POLICY: base} if base else {})
    present: set[str] = set()
    for runs in arms.values():
        present |= set[str]().union(*runs.values())
    shown = [name for name in all_figure_labels() if name in present]
    shown += sorted(name for name in present if name.startswith(REWARD_PREFIX))
    labels = [_column_label(name, units) for name in shown]
    means = []
    single = []
    for arm, runs in arms.items():
        own = units.get(arm, {})
        means.append([arm, str(len(runs)), *(_figure_cell(name, runs, own) for name in shown)])
        for seed, run in runs.items():
            by_figure = {seed: own.get(seed, {})}
            single.append([arm, str(seed), *(_figure_cell(name, {seed: run}, by_figure) for name in shown)])
    clients = (
        f" In brackets, beside a mean over clients: {CLIENT_RANGE}, as means over seeds. The spread is the"
        " standard deviation over the clients of a seed."
    )
    caption = "Mean ± sample standard deviation over seeds."
    return (
        Table("Means over seeds", ["method", "seeds", *labels], means, caption + clients),
        Table("Each seed", ["method", "seed", *labels], single),
    )


CLIENT_RANGE = "worst client; spread"


def _column_label(name: str, units: UnitsByArm) -> str:
    has_clients = any(client_range(runs, name) for runs in units.values())
    return f"{figure_label(name)} ({CLIENT_RANGE})" if has_clients else figure_label(name)


def _figure_cell(
    name: str, runs: Mapping[int, Mapping[str, float]], units: Mapping[int, UnitsByFigure]
) -> str:
    values = [run[name] for run in runs.values() if name in run]
    if not values:
        return "-"
    return format_mean(values) + format_client_range(client_range(units, name))


def format_client_range(worst_and_spread: tuple[float, float] | None) -> str:
    """The worst client and the spread, in brackets; empty for figures that are no means over clients."""
    if worst_and_spread is None:
        return ""
    worst, spread = worst_and_spread
    return f" ({worst:.3f}; {spread:.3f})"


def contests_table(
    contests: Mapping[str, Mapping[int, Contest]], pools: Mapping[str, ContestFigures]
) -> Table:
    """Win rates, uncorrected and at equal length, over the answers of all seeds, and by seed.

    Args:
        contests: by name and seed.
        pools: their figures over all seeds.
    """
    rows = []
    for name, pool in pools.items():
        known = not math.isnan(pool.win_rate)
        by_seed = []
        prompts: set[str] = set()
        ours: list[int] = []
        theirs: list[int] = []
        for seed, contest in contests[name].items():
            rate = contest.win_rate()
            text = "-" if math.isnan(rate.win_rate) else f"{rate.win_rate:.1%} ({format_counts(rate)})"
            by_seed.append(f"{seed}: {text}")
            prompts |= set(contest.units)
            ours += contest.ours
            theirs += contest.theirs
        rate_text = format_interval(pool.win_rate, pool.low, pool.high)
        rows.append(
            [
                name,
                f"{len(ours)} ({len(prompts)})",
                f"{rate_text} ({format_counts(pool)})" if known else "-",
                "; ".join(by_seed),
                f"{pool.ties_half:.1%}" if known else "-",
                format_equal_length(pool),
                f"{np.mean(ours):.0f}, {np.mean(theirs):.0f}" if ours else "-",
            ]
        )
    header = [
        "contest",
        "answers (different prompts)",
        "win rate [95%] (wins/ties/losses)",
        "by seed",
        "a tie half",
        "a tie half, at equal length [95%]",
        "characters",
    ]
    return Table(
        "Win rates over the answers of all seeds",
        header,
        rows,
        "A win rate is wins / (wins + ties + losses). Intervals are 95% bootstraps over the answers (the same"
        " prompt with two seeds counts as two): they concern these policies, one per seed, and no other seed."
        " Where the seeds are further apart than the interval is wide, the seed decides and not the method."
        " At equal length: what a logistic model of the length difference predicts for answers of equal"
        " length (components/evaluation/length_control.py).",
    )


def judges_table(
    contests: Mapping[str, Mapping[int, Contest]], judges: Mapping[int, Mapping[str, float]]
) -> Table:
    """The judge's position consistency in each contest and seed, and its own accuracy.

    Args:
        contests: by name and seed.
        judges: figures of the judge's training, by seed; empty for a judge that was not trained.
    """
    seeds = sorted(set[int]().union(*contests.values()))
    rows = []
    for name, by_seed in contests.items():
        cells = [format_share(by_seed[seed].consistency) if seed in by_seed else "-" for seed in seeds]
        rows.append([f"position consistency, {name}", *cells])
    if any(judges.values()):
        rows += _judge_accuracy_rows(judges, seeds)
    return Table(
        "The judge",
        ["", *(f"seed {seed}" for seed in seeds)],
        rows,
        "Position consistency: the share of pairs on which the verdicts in both orders agree. The"
        " judge's own accuracy is on held-out pairs of owners outside"
        " the federation.",
    )


def _judge_accuracy_rows(judges: Mapping[int, Mapping[str, float]], seeds: Sequence[int]) -> list[list[str]]:
    prefix = "judge_accuracy"
    keys = set[str]().union(*judges.values())
    domains = sorted(key for key in keys if key.startswith(f"{prefix}/"))
    rows = []
    for key in (prefix, *domains):
        domain = key.removeprefix(prefix).removeprefix("/")
        name = f"own accuracy, pairs of domain {domain}" if domain else "own accuracy"
        rows.append([name, *(format_share(judges.get(seed, {}).get(key)) for seed in seeds)])
    pairs = [judges.get(seed, {}).get("judge_held_out_pairs") for seed in seeds]
    cells = ["not recorded" if count is None else f"{count:.0f}" for count in pairs]
    return [*rows, ["own accuracy, held-out pairs", *cells]]


def samples_table(
    name: str, answers: Mapping[str, Sequence[Mapping[str, Any]]], max_prompts: int = 4
) -> Table:
    """Answers of the policies of a front to the same prompts.

    Args:
        name: of the front.
        answers: by arm, rows with prompt_id, prompt, and the texts of aligned and base.
        max_prompts: number of prompts, the first ones by id that all arms answered; of several answers
            to a prompt, the first is shown.
    """
    by_arm = {arm: {row["prompt_id"]: row for row in rows} for arm, rows in answers.items()}
    shared = set.intersection(*map(set, by_arm.values()))
    prompts = sorted(answer for answer in shared if answered_prompt(answer) == answer)[:max_prompts]
    first = next(iter(by_arm.values()))
    rows = [
        [
            first[prompt]["prompt"],
            first[prompt]["base"]["text"],
            *(rows[prompt]["aligned"]["text"] for rows in by_arm.values()),
        ]
        for prompt in prompts
    ]
    return Table(
        f"Answers by preference, {name}",
        ["prompt", BASE_POLICY, *by_arm],
        rows,
        "The same held-out prompts for all, in the order of their ids; nothing is selected.",
    )


def to_markdown(title: str, parts: Sequence[Table | Image], notes: Sequence[str]) -> str:
    """The report as markdown, without plots."""

    def line(cells: Sequence[str]) -> str:
        escaped = (" ".join(cell.replace("|", "\\|").splitlines()) for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    lines = [f"# {title}", "", *(f"- {note}" for note in notes)]
    for part in parts:
        if isinstance(part, Table):
            lines += ["", f"## {part.title}", ""]
            if part.caption:
                lines += [part.caption, ""]
            lines += [line(part.header), f"|{'---|' * len(part.header)}", *map(line, part.rows)]
    return "\n".join(lines) + "\n"
