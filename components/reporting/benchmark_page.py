"""The report of a benchmark: claims, tables of means over seeds, win rates, charts and answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.charts import bar_chart, curve_charts, interval_chart
from components.config.benchmark import BASE_POLICY, WINS, Benchmark
from components.data.records import answered_prompt
from components.evaluation.contests import Contest
from components.evaluation.diagnostics import load_diagnostics
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.changes import Change, changes_table
from components.reporting.choices import ChosenArm, choices_table
from components.reporting.claims import Finding, claims_table
from components.reporting.formats import (
    format_client_range,
    format_counts,
    format_equal_length,
    format_mean,
    format_number,
    format_percent,
    format_rate,
)
from components.reporting.fronts import front_charts
from components.reporting.metrics import ALIASES, alias_of, named, values_of
from components.reporting.page import Answers, Chart, Notes, Page, PageSection, Table, filled
from components.reporting.run_page import RATE_HEADINGS, hacking_chart
from components.reporting.units import UnitsByMetric, client_range
from components.results import WinRate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

REWARD_TITLES = {
    "reward": "Reward of the chosen completions",
    "margin": "Reward margin",
    "accuracy": "Accuracy by the implicit reward",
    "summed": "Accuracy by log-likelihood",
}
SHOWN_PROMPTS = 4
"""Prompts whose answers are shown for each front."""


def benchmark_page(
    name: str,
    benchmark: Benchmark,
    results: BenchmarkResults,
    findings: Sequence[Finding],
    chosen: Sequence[ChosenArm],
    changes: Sequence[Change],
    commit: str,
) -> Page:
    """The report of a benchmark.

    Args:
        name: of the benchmark's folder.
        benchmark: its file.
        results: of the finished runs.
        findings: the checked claims.
        chosen: the choices.
        changes: since the last runs.
        commit: of the code that writes the report.
    """
    first = [claim.figure for claim in benchmark.claims if claim.figure != WINS]
    first += [choice.figure for choice in benchmark.choices.values()]
    means, single = metrics_tables(results, first)
    curves = [*curve_charts(results.rewards, REWARD_TITLES), *_hacking_charts(results)]
    for diagnostic, summaries in results.diagnostics.items():
        curves += load_diagnostics([diagnostic])[0].benchmark_charts(summaries)
    curves += front_charts(results.fronts)
    seeds = ", ".join(map(str, benchmark.seeds))
    notes = [
        commits_line(results.commits),
        f"report written by commit {short_commit(commit)}",
        "accuracies are of the selectors' majority, or of the trained policy's implicit reward; a client"
        " step is an optimizer step of the arm's own batch size",
        *([f"all arms: {'; '.join(benchmark.settings)}"] if benchmark.settings else []),
        *(f"{arm}: {'; '.join(settings)}" for arm, settings in benchmark.arms.items()),
    ]
    return Page(
        name,
        f"recipe {benchmark.recipe}, {len(benchmark.arms)} arms, seeds {seeds}",
        [
            PageSection(
                "Changes",
                "Whether a figure is worse than in the last runs of this benchmark.",
                filled([changes_table(changes)]),
            ),
            PageSection(
                "Claims",
                "What the benchmark is expected to show, and whether it does.",
                filled([claims_table(findings), choices_table(chosen)]),
            ),
            PageSection(
                "Methods",
                "Means over the seeds, with the worst client beside the mean.",
                [means, *_bars(results)],
            ),
            PageSection(
                "Win rates",
                "What the judge says of the answers of two policies to the same prompts.",
                [*_win_rates(results), *filled([contests_table(results), judges_table(results)])],
            ),
            PageSection(
                "Curves", "How the numbers went over the rounds.", [Chart(figure) for figure in curves]
            ),
            PageSection(
                "Answers", "Answers by preference, of the first prompts by id.", list(_answers(results))
            ),
            PageSection("Each seed", "The numbers that the means are of.", [single]),
            PageSection("Settings and commits", "What the runs can be repeated from.", [Notes(notes)]),
        ],
    )


def short_commit(commit: str) -> str:
    """The first 12 digits of a commit, with '-dirty' where files differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def commits_line(commits: Mapping[str, Sequence[str]]) -> str:
    """The commits of the runs, and which run is of which where they differ.

    Args:
        commits: by run, the commits of the code that worked on it; empty where none was recorded.
    """
    runs_of: dict[str, list[str]] = {}
    for run, own in commits.items():
        runs_of.setdefault(", then ".join(map(short_commit, own)) or "not recorded", []).append(run)
    if len(runs_of) == 1:
        return f"commit of the runs: {next(iter(runs_of))}"
    parts = [f"{commit} ({', '.join(runs)})" for commit, runs in runs_of.items()]
    return f"commits of the runs: {'; '.join(parts)}"


# --- tables


def metrics_tables(results: BenchmarkResults, first: Sequence[str] = ()) -> tuple[Table, Table]:
    """Means over seeds, and the numbers of each seed; aliases or metrics of `first` come first."""
    arms = results.metrics | ({BASE_POLICY: results.base} if any(results.base.values()) else {})
    runs = [run for by_seed in arms.values() for run in by_seed.values()]
    known = set[str]().union(*runs)
    names = [
        name
        for name in dict.fromkeys([*first, *ALIASES, *_reward_names(runs)])
        if alias_of(name).metrics[0] in known  # an accuracy of assigned adapters only where some are assigned
    ]
    labels = [alias_of(name).label for name in names]
    means, single = [], []
    for arm, by_seed in arms.items():
        units = results.units.get(arm, {})
        means.append([arm, str(len(by_seed)), *(_cell(name, by_seed, units) for name in names)])
        for seed, run in by_seed.items():
            cells = (_cell(name, {seed: run}, {seed: units.get(seed, {})}) for name in names)
            single.append([arm, str(seed), *cells])
    caption = (
        "Mean ± sample standard deviation over seeds. In brackets, beside a mean over clients: the worst"
        " client and the spread, as means over seeds. The spread is the standard deviation over the clients"
        " of a seed."
    )
    return (
        Table("Means over seeds", ["method", "seeds", *labels], means, caption),
        Table("Each seed", ["method", "seed", *labels], single),
    )


def _reward_names(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Aliases of the single objectives' rewards."""
    prefix = "after/rewards/"
    names = {name.removeprefix(prefix) for run in runs for name in run if name.startswith(prefix)}
    return [f"reward:{name}" for name in sorted(names - {"kl"})]


def _cell(name: str, runs: Mapping[int, Mapping[str, float]], units: Mapping[int, UnitsByMetric]) -> str:
    values = values_of(runs, name)
    return format_mean(values) + format_client_range(client_range(units, name)) if values else "-"


def contests_table(results: BenchmarkResults) -> Table:
    """Win rates, uncorrected and at equal length, over the answers of all seeds, and by seed."""
    rows = []
    for name, by_seed in results.contests.items():
        pool = results.pools[name]
        every = Contest.pooled(by_seed)
        prompts = {prompt for contest in by_seed.values() for prompt in contest.units}
        rates = {seed: contest.win_rate() for seed, contest in by_seed.items()}
        rows.append(
            {
                "contest": name,
                "answers (different prompts)": f"{len(every.ours)} ({len(prompts)})",
                "win rate [95%] (wins/ties/losses)": _with_counts(
                    format_rate(pool.win_rate, pool.low, pool.high), pool, every
                ),
                "at equal length [95%]": format_equal_length(pool),
                "ties half": format_percent(pool.ties_half),
                "characters": f"{np.mean(every.ours):.0f}, {np.mean(every.theirs):.0f}"
                if every.ours
                else "-",
                "by seed": "; ".join(
                    f"{seed}: {_with_counts(format_percent(rate.win_rate), rate, every)}"
                    for seed, rate in rates.items()
                ),
            }
        )
    return Table.of(
        "Win rates over the answers of all seeds",
        rows,
        "Intervals are 95% bootstraps over seeds and prompts; a prompt that several seeds have is drawn once"
        " for all of them. With few seeds they are too narrow, and with one they concern its policies alone.",
        RATE_HEADINGS,
    )


def _with_counts(text: str, rate: WinRate, contest: Contest) -> str:
    return f"{text} ({format_counts(rate)})" if contest.ours else text


def judges_table(results: BenchmarkResults) -> Table:
    """The judge's position consistency in each contest and seed, and its own accuracy."""
    seeds = sorted(set[int]().union(*results.contests.values()))
    rows = [
        [
            f"position consistency, {name}",
            *(format_number(by_seed[seed].consistency) if seed in by_seed else "-" for seed in seeds),
        ]
        for name, by_seed in results.contests.items()
    ]
    runs = [results.judges.get(seed, {}) for seed in seeds]
    names = sorted(set[str]().union(*results.judges.values()))
    for name in (name for name in names if name.startswith("judge_accuracy")):
        _, _, domain = name.partition("/")
        label = "own accuracy" + (f", pairs of domain {domain}" if domain else "")
        rows.append([label, *(format_number(run.get(name)) for run in runs)])
    if names:
        counts = [run.get("judge_held_out_pairs") for run in runs]
        cells = ["not recorded" if count is None else f"{count:.0f}" for count in counts]
        rows.append(["own accuracy, held-out pairs", *cells])
    return Table(
        "The judge",
        ["", *(f"seed {seed}" for seed in seeds)],
        rows,
        "Position consistency: the share of pairs on which the verdicts in both orders agree. The judge's own"
        " accuracy is on held-out pairs of owners outside the federation.",
    )


# --- charts and answers


def accuracy_names(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Aliases of the accuracies that are shown for these runs.

    Runs with tastes: by taste, and with the clients' own adapters if that differs. Other runs: by
    the metric that scores a pair.
    """
    by_taste = [name for name in ("common", "own") if any(named(run, name) is not None for run in runs)]
    if by_taste:
        differs = any(named(run, "own_assigned") != named(run, "own") for run in runs)
        return [*by_taste, "own_assigned"] if differs else by_taste
    return [
        name
        for name in ("accuracy", "summed", "per_token", "explicit")
        if any(named(run, name) is not None for run in runs)
    ]


def _bars(results: BenchmarkResults) -> list[Chart]:
    runs = [run for by_seed in results.metrics.values() for run in by_seed.values()]
    values: list[tuple[str, str, float]] = []
    for name in accuracy_names(runs):
        for arm, by_seed in results.metrics.items():
            values += [(alias_of(name).label, arm, value) for value in values_of(by_seed, name)]
    if not values:
        return []
    title = "Accuracy on held-out pairs (points: seeds)"
    return [Chart(bar_chart(title, "accuracy", values, reference_line=(0.5, "chance")))]


def _win_rates(results: BenchmarkResults) -> list[Chart]:
    pools = {name: pool for name, pool in results.pools.items() if math.isfinite(pool.win_rate)}
    if not pools:
        return []
    seeds = {name: [one.win_rate().win_rate for one in results.contests[name].values()] for name in pools}
    figure = interval_chart(
        "Win rates, 95% intervals",
        "win rate",
        {name: (pool.win_rate, pool.low, pool.high) for name, pool in pools.items()},
        0.5,
        {name: rates for name, rates in seeds.items() if len(rates) > 1},
    )
    caption = "Over the answers of all seeds. A tie is neither a win nor a loss, so both may be below half."
    return [Chart(figure, caption)]


def _hacking_charts(results: BenchmarkResults) -> list[Figure]:
    return [
        hacking_chart(f"Selectors and judge over the alignment: {arm}, seed {seed}", curve)
        for arm, by_seed in results.hacking.items()
        for seed, curve in by_seed.items()
    ]


def _answers(results: BenchmarkResults) -> Iterator[Answers]:
    """Answers of the policies of each front to the first prompts that all of them answered."""
    for name, by_arm in results.answers.items():
        rows = {arm: {row["prompt_id"]: row for row in answers} for arm, answers in by_arm.items()}
        shared = set.intersection(*map(set, rows.values()))
        first = next(iter(rows.values()))
        prompts = sorted(answer for answer in shared if answered_prompt(answer) == answer)[:SHOWN_PROMPTS]
        for prompt in prompts:
            texts = {BASE_POLICY: first[prompt]["base"]["text"]}
            texts |= {f"{name}: {arm}": own[prompt]["aligned"]["text"] for arm, own in rows.items()}
            yield Answers(first[prompt]["prompt"], texts)
