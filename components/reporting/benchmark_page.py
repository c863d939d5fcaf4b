"""The report of a benchmark: claims, tables of means over seeds, win rates, charts and answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from components.config.benchmark import BASE_POLICY, OF_CONTESTS, Benchmark
from components.data.records import answered_prompt
from components.evaluation.charts import bar_chart, curve_charts, front_chart, interval_chart
from components.evaluation.contests import Contest, ties_half
from components.evaluation.diagnostics import load_diagnostics
from components.evaluation.pareto import dominated as find_dominated
from components.reporting.benchmark_results import BenchmarkResults, Front
from components.reporting.changes import Change, changes_table, choices_table
from components.reporting.claims import SPREADS, Finding, claims_table
from components.reporting.formats import (
    MISSING,
    format_counts,
    format_mean,
    format_number,
    format_percent,
    format_spreads,
    rate_cells,
)
from components.reporting.metrics import ALIASES, REWARD_ALIAS, alias_of, named, values_of
from components.reporting.page import (
    Answers,
    Chart,
    Notes,
    Page,
    PageSection,
    Part,
    Table,
    filled,
    text_table,
)
from components.reporting.run_page import CORRECTED, RATE_HEADINGS, hacking_chart, style_table
from components.reporting.units import UnitsByMetric, client_range

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

REWARD_TITLES = {
    "reward": "Reward of the chosen completions",
    "margin": "Reward margin",
    "accuracy": "Accuracy by the implicit reward",
    "summed": "Accuracy by log-likelihood",
}
UNSEEN = ("unseen", "unseen_worst_tenth")
UNSEEN_CAPTION = (
    " Clients in no round: some methods use up to data.unseen_pairs pairs of such a client, to train, to"
    " choose a model or as examples; the others use none."
)
SUMMARY_FIGURES = 4
"""Figures of each arm in the summary for a terminal, if the benchmark's file asks no more."""
SHOWN_PROMPTS = 4
"""Prompts whose answers are shown for each front."""
POLICY_ACCURACIES = ("implicit_reward", "policy_summed", "policy_per_token")
"""Accuracies of the aligned policy: by its implicit reward, and by log-likelihood."""


LEADS = {
    "Changes": "Whether a figure is worse than in the last runs of this benchmark.",
    "Claims": "What the benchmark is expected to show, and whether it does.",
    "Methods": "Means over the seeds, with the worst clients beside the mean.",
    "Win rates": "What the judge says of the answers of two policies to the same prompts.",
    "Curves": "How the numbers went over the rounds.",
    "Answers": "Answers by preference, of the first prompts by id.",
    "Each seed": "The numbers that the means are of.",
    "Settings and commits": "What the runs can be repeated from.",
}
"""What each section tells."""


def benchmark_page(
    name: str,
    benchmark: Benchmark,
    results: BenchmarkResults,
    findings: Sequence[Finding],
    chosen: Mapping[str, str],
    changes: Sequence[Change],
    commit: str,
) -> Page:
    """The report of a benchmark, of its folder's name, its file, and the results of the finished runs.

    It has the checked claims, the arm of each choice, the changes since the last runs, and the commit of the
    code that writes it.
    """
    means, single = metrics_tables(results, _figures_asked(benchmark))
    curves = curve_charts(results.rewards, REWARD_TITLES)
    for arm, by_seed in results.hacking.items():
        for seed, curve in by_seed.items():
            curves.append(hacking_chart(f"Selectors and judge over the alignment: {arm}, seed {seed}", curve))
    for diagnostic, summaries in results.diagnostics.items():
        curves += load_diagnostics([diagnostic])[0].benchmark_charts(summaries)
    curves += front_charts(results.fronts)
    notes = [
        commits_line(results.commits),
        f"report written by commit {short_commit(commit)}",
        "accuracies are of the selectors' majority, or of the trained policy's implicit reward; a client"
        " step is an optimizer step of the arm's own batch size",
        *([f"all arms: {'; '.join(benchmark.settings)}"] if benchmark.settings else []),
        *(f"{arm}: {'; '.join(settings)}" for arm, settings in benchmark.arms.items()),
    ]
    styles = style_table({name: pool.style_effects for name, pool in results.pools.items()})
    parts: dict[str, Sequence[Part]] = {
        "Changes": filled([changes_table(changes)]),
        "Claims": filled([claims_table(findings), choices_table(benchmark.choices, chosen)]),
        "Methods": [means, *filled([policies_table(results)]), *_bars(results)],
        "Win rates": [
            *_win_rates(results),
            *filled([contests_table(results), styles, judges_table(results)]),
        ],
        "Curves": [Chart(figure) for figure in curves],
        "Answers": [*_answers(results)],
        "Each seed": [single],
        "Settings and commits": [Notes(notes)],
    }
    return Page(
        name,
        _subtitle(benchmark),
        [PageSection(title, LEADS[title], own) for title, own in parts.items()],
    )


def benchmark_summary(
    name: str,
    benchmark: Benchmark,
    results: BenchmarkResults,
    findings: Sequence[Finding],
    chosen: Mapping[str, str],
    changes: Sequence[Change],
) -> str:
    """The summary of a benchmark for a terminal: main figures, win rates, and what its file asks.

    The arguments are those of benchmark_page.
    """
    asked = _figures_asked(benchmark)
    means, _ = metrics_tables(
        replace(results, units={}), [*asked, *accuracy_names(results), "mean_reward", "answer_accuracy"]
    )
    corrected = "corrected for the judge's errors [95%]"
    rates = []
    for contest, pool in results.pools.items():
        cells = rate_cells(pool, results.judges_of(contest), corrected)
        shown = ("wins/ties/losses", "length-controlled [95%]", corrected)
        rates.append({"contest": contest} | {heading: cells[heading] for heading in shown})
    lines = [f"{name}: {_subtitle(benchmark)}"]
    means = means.first(2 + max(len(asked), SUMMARY_FIGURES))
    has_base = any(row[0] == BASE_POLICY and {*row[2:]} != {MISSING} for row in means.rows)
    means = replace(means, rows=[row for row in means.rows if row[0] != BASE_POLICY or has_base])
    for table in filled([means, Table.of("Win rates over all seeds", rates)]):
        lines += ["", *text_table(table)]
    for title, texts in (
        ("Claims", [f"{finding.claim}: {finding}" for finding in findings]),
        ("Choices", [f"{choice}: {arm or 'not measured'}" for choice, arm in chosen.items()]),
        ("Since the last runs", [f"{change}: {change.verdict}" for change in changes]),
    ):
        if texts:
            lines += ["", title, *(f"  {text}" for text in texts)]
    return "\n".join(lines)


def _subtitle(benchmark: Benchmark) -> str:
    seeds = ", ".join(map(str, benchmark.seeds))
    return f"recipe {benchmark.recipe}, {len(benchmark.arms)} arms, seeds {seeds}"


def _figures_asked(benchmark: Benchmark) -> list[str]:
    """The figures that a benchmark's file asks about, contests excepted."""
    names = [claim.figure for claim in benchmark.claims if claim.figure not in OF_CONTESTS]
    chosen_by = (choice.figure for choice in benchmark.choices.values())
    return [*dict.fromkeys([*names, *chosen_by, *benchmark.regressions])]


def short_commit(commit: str) -> str:
    """The first 12 digits of a commit, with '-dirty' where files differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def commits_line(commits: Mapping[str, Sequence[str]]) -> str:
    """The commits of the runs, and which run is of which where they differ.

    By run, they are those of the code that worked on it; empty where none was recorded.
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
    known = {name for by_seed in arms.values() for run in by_seed.values() for name in run}
    prefix = "after/rewards/"
    objectives = {name.removeprefix(prefix) for name in known if name.startswith(prefix)} - {"kl"}
    rewards = [f"{REWARD_ALIAS}{name}" for name in sorted(objectives)]
    by_metrics: dict[Sequence[str], str] = {}
    for name in (*first, *ALIASES, *rewards):
        by_metrics.setdefault(alias_of(name).metrics, name)
    names = [
        name
        for name in by_metrics.values()
        if alias_of(name).metrics[0] in known  # an accuracy of assigned adapters only where some are assigned
    ]

    def cell(name: str, runs: Mapping[int, Mapping[str, float]], units: Mapping[int, UnitsByMetric]) -> str:
        values = values_of(runs, name)
        clients = client_range(units, name)
        text = format_mean(values) if values else MISSING
        if values and clients:
            text += f" ({'; '.join(map(format_number, clients))})"
        return text if len(values) in (0, len(runs)) else f"{text}, {len(values)} of {len(runs)} seeds"

    labels = [alias_of(name).label for name in names]
    means, single = [], []
    for arm, by_seed in arms.items():
        units = results.units.get(arm, {})
        means.append([arm, str(len(by_seed)), *(cell(name, by_seed, units) for name in names)])
        for seed, run in by_seed.items():
            cells = (cell(name, {seed: run}, {seed: units.get(seed, {})}) for name in names)
            single.append([arm, str(seed), *cells])
    caption = (
        "Mean ± sample standard deviation over seeds. In brackets, beside a mean over clients: the mean of"
        " the worst 10% of the clients (at least one), the spread, and Jain's index, as means over seeds. The"
        " spread is the standard deviation over the clients of a seed; Jain's index is 1 where all clients"
        " are equal."
    )
    if any(name in UNSEEN for name in names):
        caption += UNSEEN_CAPTION
    return (
        Table("Means over seeds", ["method", "seeds", *labels], means, caption),
        Table("Each seed", ["method", "seed", *labels], single),
    )


def policies_table(results: BenchmarkResults) -> Table:
    """Pair accuracies beside those of the aligned policy, and their rank correlation over the arms.

    A selector, or an implicit reward, that ranks pairs well need not lead to a policy that does (arXiv
    2512.23067).
    """
    rows = []
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICY_ACCURACIES}
    for arm, by_seed in results.metrics.items():
        accuracy = values_of(by_seed, "accuracy")
        policy = {name: values_of(by_seed, name) for name in POLICY_ACCURACIES}
        if not accuracy or not any(policy.values()):
            continue
        for name, values in policy.items():
            if values:
                pairs[name].append((float(np.mean(accuracy)), float(np.mean(values))))
        cells = {alias_of(name).label: format_mean(own) if own else MISSING for name, own in policy.items()}
        rows.append({"arm": arm, alias_of("accuracy").label: format_mean(accuracy)} | cells)
    correlations = "; ".join(
        f"{alias_of(name).label}: {format_number(rank_correlation(own))}"
        for name, own in pairs.items()
        if own
    )
    return Table.of(
        "Pair accuracy and the policy's",
        rows,
        "Means over seeds. The policy's accuracies are those of the aligned policy on the held-out pairs of"
        " evaluation.preference_pairs; without these, of the clients' policies after the rounds on their own"
        " held-out pairs. Kendall's rank correlation with pair accuracy over the arms (tau-b):"
        f" {correlations}.",
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of two figures of several arms; NaN with fewer than three, or where one is constant."""
    from scipy.stats import kendalltau

    if len(pairs) < 3:
        return math.nan
    return float(kendalltau(*zip(*pairs, strict=True)).statistic)


def contests_table(results: BenchmarkResults) -> Table:
    """Counts and rates over all seeds, and by seed."""
    rows = []
    for name, by_seed in results.contests.items():
        pool = results.pools[name]
        every = Contest.pooled(by_seed)
        prompts = {prompt for contest in by_seed.values() for prompt in contest.units}
        rates = {seed: contest.win_rate() for seed, contest in by_seed.items()}
        by_seeds = [
            f"{seed}: {format_percent(one.ties_as_half)} ({format_counts(one)})"
            for seed, one in rates.items()
        ]
        lengths = f"{np.mean(every.ours):.0f}, {np.mean(every.theirs):.0f}" if every.ours else MISSING
        rows.append(
            {"contest": name, "answers (different prompts)": f"{len(every.ours)} ({len(prompts)})"}
            | rate_cells(pool, results.judges_of(name), "corrected for the judge's errors [95%]")
            | {SPREADS: format_spreads(ties_half([*by_seed.values()]) if len(by_seed) > 1 else None)}
            | {"characters": lengths, "by seed": "; ".join(by_seeds)}
        )
    return Table.of(
        "Win rates over all seeds",
        rows,
        "Intervals of 95% are over seeds and prompts (components/evaluation/intervals.py). With one seed they"
        " are over its prompts, and concern its policies alone. They are not corrected for the number of"
        " contests. Standard deviations are those of the win rate with ties as 1/2: between"
        " the seeds, and within a seed between its prompts (means of a prompt's answers)." + CORRECTED,
        RATE_HEADINGS,
    )


def judges_table(results: BenchmarkResults) -> Table:
    """The judge's position consistency in each contest and seed, and its own accuracy."""
    seeds = sorted(set[int]().union(*results.contests.values()))
    rows = []
    for name, by_seed in results.contests.items():
        consistency = {seed: format_number(contest.consistency) for seed, contest in by_seed.items()}
        rows.append([f"both orders agree, {name}", *(consistency.get(seed, MISSING) for seed in seeds)])
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
        "Both orders agree: the share of pairs on which the verdicts in both orders do (the position"
        " consistency). The judge's own accuracy is on held-out pairs of owners outside the federation.",
    )


# --- charts and answers


def accuracy_names(results: BenchmarkResults) -> list[str]:
    """Aliases of the accuracies that are shown for a benchmark's runs.

    Runs with tastes: by taste, and with the clients' own adapters if that differs. Other runs: by
    the metric that scores a pair.
    """
    runs = [run for by_seed in results.metrics.values() for run in by_seed.values()]
    by_taste = [name for name in ("common", "own") if any(named(run, name) is not None for run in runs)]
    if by_taste:
        differs = any(named(run, "own_assigned") != named(run, "own") for run in runs)
        return [*by_taste, "own_assigned"] if differs else by_taste
    metrics = ("accuracy", "summed", "per_token", "explicit")
    return [name for name in metrics if any(named(run, name) is not None for run in runs)]


def _bars(results: BenchmarkResults) -> list[Chart]:
    values: list[tuple[str, str, float]] = []
    for name in accuracy_names(results):
        for arm, by_seed in results.metrics.items():
            values += [(alias_of(name).label, arm, value) for value in values_of(by_seed, name)]
    if not values:
        return []
    title = "Accuracy on held-out pairs (points: seeds)"
    return [Chart(bar_chart(title, "accuracy", values, reference_line=(0.5, "chance")))]


def _win_rates(results: BenchmarkResults) -> list[Chart]:
    pools = {name: pool for name, pool in results.pools.items() if math.isfinite(pool.ties_half)}
    if not pools:
        return []
    seeds = {name: [one.win_rate().ties_as_half for one in results.contests[name].values()] for name in pools}
    figure = interval_chart(
        "Win rates with ties as 1/2, 95% intervals",
        "win rate, ties as 1/2",
        {name: (pool.ties_half, pool.ties_half_low, pool.ties_half_high) for name, pool in pools.items()},
        0.5,
        {name: rates for name, rates in seeds.items() if len(rates) > 1},
    )
    caption = "Over all seeds, with intervals over seeds and prompts. Verdicts that are all ties have none."
    return [Chart(figure, caption)]


def front_charts(fronts: Mapping[str, Mapping[int, Front]]) -> list[Figure]:
    """The rewards of each front's policies by name and seed, a chart per seed and pair of objectives.

    A policy that another one of the same front dominates is hollow and off the front's line.
    """
    charts = []
    for seed in sorted(set[int]().union(*fronts.values())):
        points = []
        for name, runs in fronts.items():
            front = runs.get(seed, {})
            scores = np.array([list(point.scores.values()) for point in front.values()])
            worse = find_dominated(scores) if front else np.array([])
            points += [(name, arm, front[arm], bool(w)) for arm, w in zip(front, worse, strict=True)]
        base = points[0][2].base_scores
        for one, other in combinations(base, 2):
            policies = [(name, arm, own.scores[one], own.scores[other], w) for name, arm, own, w in points]
            origin = (BASE_POLICY, base[one], base[other])
            charts.append(front_chart(f"Fronts, seed {seed}", (one, other), policies, origin))
    return charts


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
