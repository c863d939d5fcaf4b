"""Generates the tables and pictures of docs/results/ from published results.

python -m docs.generate_results            # writes into docs/results/ and docs/images/results/
python -m docs.generate_results --check    # exit status 1 if a page or a picture is not current

The source is docs/results/data/<benchmark>.jsonl, to which `fed-rlhf benchmark --publish` appends. What
stands between the comments `results: PART BENCHMARK` and `end` of a page is generated; PART is the name of a
function of PARTS.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from components.config import UserError
from components.config.benchmark import Benchmark, Claim
from components.evaluation.intervals import estimate_mean
from components.paths import PACKAGE
from components.recipes.benchmarks import arm_recipe, load_benchmark, select_lines
from components.reporting.benchmark_page import (
    commits_line,
    contests_table,
    metrics_tables,
    policies_table,
    short_commit,
)
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.changes import choose_arms
from components.reporting.claims import (
    ENOUGH_SEEDS,
    FAILS,
    HOLDS,
    SPREADS,
    UNDECIDED,
    Finding,
    check_claims,
)
from components.reporting.formats import format_figure, format_number, rate_cells
from components.reporting.metrics import alias_of, named, values_of
from components.reporting.page import Table, markdown_table
from components.reporting.published import (
    SUFFIX,
    Line,
    expected_minutes,
    read_lines,
    read_results,
    runs_of,
    seconds_of,
)
from components.reporting.units import CLIENTS, Units
from perf.harness import medians

FOLDER = PACKAGE / "docs" / "results"
PUBLISHED = FOLDER / "data"
SPEED = "performance.jsonl"
"""What `python -m perf NAME --record` appended; of each ratio the last line counts."""
FLOWER = "peers/round_with_2_at_once_against_flower_tuned"
TRL = "peers/client_against_trl"
SAMPLING = "generation/continuous_against_batches"
"""The ratios of the page's sentence."""
PICTURES = PACKAGE / "docs" / "images" / "results"
PAPERS = {
    "FedBiscuit": ("summarization.md", ("summarization-decisive",)),
    "DRIFT": ("reasoning.md", ("reasoning",)),
    "FedPDPO": ("personalized.md", ("personalized", "personalized-ppo")),
    "FIRM": ("multi-objective.md", ("multi-objective",)),
}
"""By paper, the page of its claims, and the benchmarks that decide them."""
CURVE = "when-to-federate"
"""The benchmark of the numbers of owners and pairs."""
CURVE_PAGE = ("federating.md", (CURVE,))
"""The page of its claims, as those of PAPERS."""
CURVE_PICTURE = "![Accuracy by the pairs of an owner](../images/results/when-to-federate.svg)"
RATES = ("personalized-rates", "personalized-ppo-rates")
"""Benchmarks that choose learning rates for others."""
BENCHMARKS = (CURVE, *(name for _, names in PAPERS.values() for name in names), *RATES)
LOCAL = "local"
ALONE = (LOCAL, "pooled", "few", "oracle", "longer", "likelihood")
"""First parts of the names of arms that are no federated method of the paper or its baselines."""
TASTES = ("common_assigned", "own_assigned")
OF_CURVE = {
    "common": "what owners share",
    "own": "what they contradict each other in",
    "accuracy": "all pairs of an owner",
}
"""Figures of the curve, and what they are of."""
REWARD = ("mean_reward",)
"""With TASTES, the figures that the references are compared by."""
PAIRS = (8, 16, 32, 64, 128)
OWNERS = (3, 6, 12)
"""Of the arms of the benchmark CURVE."""
ENOUGH_ANSWERS = 30
"""To give a win rate of them."""
NOT_MEASURED = "not measured"
VERDICTS = {HOLDS: ("#23916a", "o"), FAILS: ("#cc4b5b", "X"), UNDECIDED: ("#7d858f", "D")}
"""Color and marker of each verdict; the colors have a contrast of 3 on a light and on a dark page."""
MOVES = {HOLDS: "better", FAILS: "worse", UNDECIDED: "undecided"}
"""Verdicts on federating against training alone, as words of a sentence."""
GREY = "#7d858f"
BLUE = "#2f7ec7"
MACHINES = ((BLUE, "o"), ("#d9822b", "s"), ("#7a5bb5", "^"))
"""Colors and markers of machines in the picture of ratios."""
ROW = 0.3
"""Height of a row of a picture (inches)."""
DIGITS = 3
"""Of numbers in tables and pictures; later ones may differ between processors."""
WIDTH = 8.0
"""Width of a picture (inches)."""


@dataclass(frozen=True)
class Published:
    """A benchmark, and what was measured of it."""

    name: str
    benchmark: Benchmark
    lines: Sequence[Line]  # of finished runs and contests

    @cached_property
    def results(self) -> BenchmarkResults:
        """What its tables are functions of."""
        return read_results(self.lines, self.benchmark)

    @cached_property
    def findings(self) -> list[Finding]:
        """Its checked claims."""
        return check_claims(self.benchmark.claims, self.results)

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """Duration of the finished runs by arm."""
        return seconds_of(self.lines)

    @cached_property
    def runs(self) -> list[tuple[str, int]]:
        """Arm and seed of all of its runs."""
        return runs_of(self.benchmark)

    def is_comparable(self, arm: str) -> bool:
        """Whether an arm is a federated method that trains the model that clients alone train."""
        if arm.partition("-")[0] in ALONE:
            return False
        trained = [
            arm_recipe(self.benchmark, name, self.benchmark.seeds[0]).federation.options.trained_model
            for name in (arm, LOCAL)
        ]
        return trained[0] == trained[1]

    @cached_property
    def missing(self) -> list[tuple[str, int]]:
        """Its runs that are not finished."""
        done = {(line["arm"], line["seed"]) for line in self.lines}
        return [run for run in self.runs if run not in done]

    @property
    def missing_hours(self) -> float:
        """Estimated hours of these, by the finished runs of the same arm or else of the others."""
        return expected_minutes(self.missing, self.seconds)[0] / 60


@cache
def load_benchmarks() -> dict[str, Benchmark]:
    """The benchmarks of the pages, by name, with every arm's recipe checked."""
    return {name: load_benchmark(name) for name in BENCHMARKS}


class Results:
    """The published results of all benchmarks of the pages."""

    def __init__(self, data: Path = PUBLISHED) -> None:
        self.benchmarks = {
            name: Published(name, own, select_lines(read_lines(data / f"{name}{SUFFIX}"), own))
            for name, own in load_benchmarks().items()
        }

        # By machine and ratio its values, and the line that has them; the last one counts.
        self.speed: dict[str, dict[str, tuple[list[float], Line]]] = {}
        for line in read_lines(data / SPEED):
            own = self.speed.setdefault(f"{line['processor']}, {line['cores']} cores", {})
            own |= {name: (values, line) for name, values in line["ratios"].items()}

    def findings(self, names: Sequence[str]) -> list[Finding]:
        """The checked claims of some benchmarks."""
        return [finding for name in names for finding in self.benchmarks[name].findings]


# --- parts of pages


def summary(results: Results, names: Sequence[str]) -> str:
    """The opening sentence of a page, and its picture."""
    paper, page = next((paper, page) for paper, (page, own) in PAPERS.items() if own == tuple(names))
    findings = results.findings(names)
    picture = f"../images/results/{Path(page).stem}.svg"
    return f"{counts_sentence(f'claims on {paper}', findings)}\n\n![The claims' intervals]({picture})"


def overview(results: Results, _: Sequence[str]) -> str:
    """The opening sentence of the index, its picture, and a row for each paper."""
    by_paper = {paper: results.findings(names) for paper, (_, names) in PAPERS.items()}
    every = [finding for findings in by_paper.values() for finding in findings]
    rows = []
    for paper, (page, names) in PAPERS.items():
        counts = Counter(finding.verdict for finding in by_paper[paper])
        unmeasured = sum(finding.value is None for finding in by_paper[paper])
        own = [results.benchmarks[name] for name in names]
        missing = sum(len(each.missing) for each in own)
        every_run = sum(len(each.runs) for each in own)
        rows.append(
            {
                "paper": f"[{paper}]({page})",
                HOLDS: str(counts[HOLDS]),
                FAILS: str(counts[FAILS]),
                UNDECIDED: str(counts[UNDECIDED] - unmeasured),
                NOT_MEASURED: str(unmeasured),
                "runs finished": f"{every_run - missing} of {every_run}",
                "hours missing (estimate)": format_number(sum(each.missing_hours for each in own), 1),
            }
        )
    return "\n\n".join(
        [
            counts_sentence("claims on the four papers' methods", every),
            "![Claims by paper and verdict](../images/results/index.svg)",
            _table(rows),
        ]
    )


def claims(results: Results, names: Sequence[str]) -> str:
    """The claims of benchmarks, and their verdicts."""
    findings = results.findings(names)
    if all(finding.value is None for finding in findings):
        return f"None of the {len(findings)} claims is measured yet; the benchmark's file lists them."
    rows = [
        {
            "claim": finding.claim,
            "verdict": _verdict(finding),
            "over all seeds": format_number(finding.value, DIGITS) + finding.beside,
            "95% interval": "-"
            if finding.low is None
            else f"{format_number(finding.low, DIGITS)} to {format_number(finding.high, DIGITS)}",
            "interval over": finding.drawn,
            SPREADS: finding.spreads,
            "detectable": finding.detectable,
        }
        for finding in findings
    ]
    return _table(rows)


def _verdict(finding: Finding) -> str:
    """A claim's verdict and its reason; without figures there is no verdict."""
    if finding.reason.startswith(NOT_MEASURED):
        return NOT_MEASURED
    return f"**{finding.verdict}**" + (f" ({finding.reason})" if finding.reason else "")


def choices(results: Results, names: Sequence[str]) -> str:
    """The figure of each method by the rates that were tried for it, and the chosen rate."""
    own = results.benchmarks[names[0]]
    chosen = choose_arms(own.benchmark.choices, own.results.metrics, own.benchmark.seeds)
    tried = {
        name: {arm.removeprefix(f"{name}-"): arm for arm in choice.among}
        for name, choice in own.benchmark.choices.items()
    }
    rates = sorted({rate for arms in tried.values() for rate in arms}, key=float)
    seeds = len(own.benchmark.seeds)
    rows = []
    for name, arms in tried.items():
        figure = own.benchmark.choices[name].figure
        cells = dict.fromkeys(rates, "") | {
            rate: mean_cell(own.results, arm, figure, seeds) for rate, arm in arms.items()
        }
        rows.append({"": name, **cells, "chosen": chosen[name].removeprefix(f"{name}-") or NOT_MEASURED})
    return _table(rows)


def means(results: Results, names: Sequence[str]) -> str:
    """Means over seeds of a benchmark's arms."""
    table = metrics_tables(results.benchmarks[names[0]].results)[0].filled()
    header, *rows = zip(table.header, *table.rows, strict=True)  # a row for each figure
    turned = Table("", ["figure", *header[1:]], [[*row] for row in rows])
    return f"{markdown_table(turned)}\n\n{table.caption}"


def policies(results: Results, names: Sequence[str]) -> str:
    """Pair accuracies of a benchmark's arms beside those of their policies."""
    table = policies_table(results.benchmarks[names[0]].results)
    return f"{markdown_table(table)}\n\n{table.caption}"


def contests(results: Results, names: Sequence[str]) -> str:
    """The contests of a benchmark."""
    table = contests_table(results.benchmarks[names[0]].results)
    notes = "\n\n".join(table.notes)
    return f'<div class="wide" markdown>\n\n{markdown_table(table)}\n\n</div>\n\n{notes}'


def runs(results: Results, names: Sequence[str]) -> str:
    """The finished runs of benchmarks, and the hours of the others; without names of all benchmarks."""
    rows = []
    for name in names or results.benchmarks:
        own = results.benchmarks[name]
        minutes = [seconds / 60 for each in own.seconds.values() for seconds in each]
        rows.append(
            {
                "benchmark": f"`{name}`",
                "runs finished": f"{len(own.runs) - len(own.missing)} of {len(own.runs)}",
                "minutes of a run": f"{min(minutes):.0f} to {max(minutes):.0f}" if minutes else "-",
                "hours missing (estimate)": format_number(own.missing_hours, 1) if minutes else "-",
                "commits": commits_line(own.results.commits).partition(": ")[2] if minutes else "-",
            }
        )
    return _table(rows)


def references(results: Results, _: Sequence[str]) -> str:
    """The best federated method of each benchmark beside its references, after their count."""
    rows, verdicts = [], []
    for paper, (page, names) in PAPERS.items():
        for name in names:
            own = results.benchmarks[name]
            for figure in REWARD if name == "multi-objective" else (*TASTES, "accuracy"):
                row, verdict = _reference_row(own, figure)
                if figure == "accuracy" and verdict == NOT_MEASURED:  # earlier runs have it by taste alone
                    continue
                rows.append({"benchmark": f"[{paper}]({page}), `{name}`", **row})
                verdicts.append(verdict)
    counts = Counter(verdicts)
    words = (
        f"Against owners who train alone, the best federated method of the papers' benchmarks is better in"
        f" {counts[HOLDS]} of {len(rows) - counts[NOT_MEASURED]} comparisons and worse in {counts[FAILS]}"
        f" ({counts[UNDECIDED]} are undecided, and {counts[NOT_MEASURED]} more are not"
        f" measured){_curve_clause(results)}."
    )
    return "\n\n".join([words, CURVE_PICTURE, *_curve_words(results), _table(rows)])


def methods(results: Results, _: Sequence[str]) -> str:
    """The main figures of each arm that was measured, and then the claims that fail."""
    rows = []
    for page, names in PAPERS.values():
        for own in (results.benchmarks[name] for name in names):
            for arm in own.benchmark.arms:
                if runs := own.results.metrics.get(arm):
                    cells = {
                        alias_of(figure).label: mean_cell(own.results, arm, figure)
                        for figure in (*TASTES, *REWARD)
                    }
                    head = {"benchmark": f"[`{own.name}`]({page})", "method": arm, "seeds": str(len(runs))}
                    rows.append(head | cells | _win_rates(own.results, arm))
    shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)] if rows else []
    failing = [
        f"- [{page.stem}]({page.name}): {finding.claim}: {format_number(finding.value, DIGITS)}"
        for page, names in ((Path(page), names) for page, names in (*PAPERS.values(), CURVE_PAGE))
        for finding in results.findings(names)
        if finding.verdict == FAILS
    ]
    words = "What fails:" if failing else "No measured claim fails."
    table = (
        _table([{name: row[name] for name in shown} for row in rows]) if rows else "Nothing is measured yet."
    )
    return "\n\n".join([table, words, *(["\n".join(failing)] if failing else [])])


def _win_rates(results: BenchmarkResults, arm: str) -> dict[str, str]:
    """An arm's win rates against the base policy; '-' for few prompts.

    At equal length, and of all lengths corrected for the judge's errors.
    """
    equal, corrected = "win rate against base policy", "of all lengths, corrected for the judge's errors"
    name = f"{arm} against base policy"
    pool = results.pools.get(name)
    if pool is None or pool.wins + pool.ties + pool.losses < ENOUGH_ANSWERS:
        return {equal: "-", corrected: "-"}
    cells = rate_cells(pool, results.judges_of(name), corrected)
    return {equal: format_figure(pool, "length_controlled"), corrected: cells[corrected]}


def _reference_row(own: Published, figure: str) -> tuple[dict[str, str], str]:
    measured = own.results.metrics
    means = {
        arm: float(np.mean(values))
        for arm in own.benchmark.arms
        if own.is_comparable(arm) and (values := values_of(measured.get(arm, {}), figure))
    }
    best = max(means, key=lambda arm: means[arm], default="")
    own_results = _over_seeds_of(own.results, (best, LOCAL), figure)
    verdict, difference, spreads = NOT_MEASURED, "-", "-"
    if best and values_of(measured.get(LOCAL, {}), figure):
        # All methods are checked, because the best one is chosen by the same figures.
        compared = [Claim(arm=arm, figure=figure, against=[LOCAL], above=0.0) for arm in means]
        finding = check_claims(compared, own.results)[[*means].index(best)]
        verdict, difference = finding.verdict, _with_interval(finding.value, finding.low, finding.high)
        spreads = finding.spreads
    # Before the rounds the model of all arms is the same, but few-shot's has read examples.
    start = {seed: _before(run) for seed, run in own_results.metrics.get(LOCAL, {}).items()}
    untrained = replace(own_results, metrics={LOCAL: start}, units={})
    seeds = len(own_results.metrics.get(best, {}))
    cells = {
        "figure": alias_of(figure).label,
        "seeds": str(seeds),
        "best federated": f"{best}: {mean_cell(own_results, best, figure)}" if best else "-",
        **{arm: mean_cell(own_results, arm, figure, seeds) for arm in (LOCAL, "pooled", "few-shot")},
        "untrained": mean_cell(untrained, LOCAL, figure),
        "federated less local": difference,
        SPREADS: spreads,
        "verdict": f"**{verdict}**",
    }
    return cells, verdict


def _over_seeds_of(results: BenchmarkResults, arms: Sequence[str], figure: str) -> BenchmarkResults:
    """The results of the seeds that have a figure of all of these arms, of those that any seed has."""
    having = [_seeds_of(results, arm, figure) for arm in arms]
    seeds = set.intersection(*(own for own in having if own)) if any(having) else set()
    kept = {
        arm: {seed: runs[seed] for seed in runs if seed in seeds} for arm, runs in results.metrics.items()
    }
    return replace(results, metrics=kept)


def _seeds_of(results: BenchmarkResults, arm: str, figure: str) -> set[int]:
    """The seeds of an arm's runs that have a figure."""
    return {seed for seed, run in results.metrics.get(arm, {}).items() if named(run, figure) is not None}


def _seeds_of_both(results: BenchmarkResults, size: str, figure: str) -> set[int]:
    """The seeds that have a figure of owners alone and of one federation of this size, such as 8x12."""
    return _seeds_of(results, f"alone-{size}", figure) & _seeds_of(results, f"federated-{size}", figure)


def _before(run: Mapping[str, float]) -> dict[str, float]:
    """What a run measured before its rounds, under the names of what it measured after them."""
    start = "before/"
    return {f"after/{name.removeprefix(start)}": run[name] for name in run if name.startswith(start)}


def mean_cell(results: BenchmarkResults, arm: str, figure: str, seeds: int = 0) -> str:
    """A figure of an arm over the seeds, with its interval where there are enough seeds.

    It says how many they are where they are fewer than `seeds`, those of the other cells of its row.
    """
    runs = results.metrics.get(arm, {})
    values = {seed: value for seed, run in runs.items() if (value := named(run, figure)) is not None}
    if not values:
        return "-"
    ends = _arm_interval(results, arm, figure, values)
    text = _with_interval(float(np.mean(list(values.values()))), *ends)
    return f"{text} ({len(values)} of {seeds} seeds)" if len(values) < seeds else text


def _arm_interval(
    results: BenchmarkResults, arm: str, figure: str, values: Mapping[int, float]
) -> tuple[float | None, float | None]:
    """The interval over seeds and, where the figure is a mean of them, over units; Nones with few seeds."""
    if len(values) < ENOUGH_SEEDS:
        return None, None
    strata = []
    for seed, value in values.items():
        units = named(results.units.get(arm, {}).get(seed, {}), figure)
        own = {"": {"": value}} if units is None else units.strata
        strata.append(
            {name: {unit: one / len(own) for unit, one in each.items()} for name, each in own.items()}
        )
    return estimate_mean(strata).interval()


def _with_interval(value: float | None, low: float | None, high: float | None) -> str:
    text = format_number(value, DIGITS)
    return text if low is None else f"{text} [{format_number(low, DIGITS)}, {format_number(high, DIGITS)}]"


def curve(results: Results, _: Sequence[str]) -> str:
    """Accuracy by the pairs of an owner and the number of owners, by taste and over all, and its picture."""
    own = _with_alone_by_owners(results.benchmarks[CURVE].results)
    findings = _curve_findings(own)
    parts = [CURVE_PICTURE]
    for figure in OF_CURVE:
        rows = []
        for pairs, owners in product(PAIRS, OWNERS):
            finding = findings[figure, f"{pairs}x{owners}"]
            arms = {arm: f"{arm}-{pairs}x{owners}" for arm in ("alone", "federated", "groups", "pooled")}
            if not (seeds := len(_seeds_of_both(own, f"{pairs}x{owners}", figure))):
                continue
            both = _over_seeds_of(own, (arms["alone"], arms["federated"]), figure)
            means = {arm: mean_cell(both, name, figure, seeds) for arm, name in arms.items()}
            rows.append(
                {
                    "pairs": str(pairs),
                    "owners": str(owners),
                    "seeds": str(seeds),
                    **means,
                    "federated less alone": _with_interval(finding.value, finding.low, finding.high),
                    SPREADS: finding.spreads,
                    "verdict": f"**{finding.verdict}**",
                }
            )
        label = "all pairs of an owner" if figure == "accuracy" else alias_of(figure).label
        parts.append(f"{label.capitalize()}:\n\n{_table(rows) if rows else 'Not measured yet.'}")
    return "\n\n".join(parts)


def _curve_findings(own: BenchmarkResults) -> dict[tuple[str, str], Finding]:
    """Whether federating is better than training alone, by figure and size, such as 8x12."""
    cells = [(figure, f"{pairs}x{owners}") for figure, pairs, owners in product(OF_CURVE, PAIRS, OWNERS)]
    compared = [
        Claim(arm=f"federated-{size}", figure=figure, against=[f"alone-{size}"], above=0.0)
        for figure, size in cells
    ]
    return dict(zip(cells, check_claims(compared, own), strict=True))


def _curve_sizes(own: BenchmarkResults) -> list[str]:
    """The sizes with the most owners of which every figure was measured, alone and federated."""
    every = [f"{pairs}x{OWNERS[-1]}" for pairs in PAIRS]
    return [size for size in every if all(_seeds_of_both(own, size, figure) for figure in OF_CURVE)]


def _curve_clause(results: Results) -> str:
    """What is decided with the most owners, of the fewest pairs of which something is; else empty."""
    own = _with_alone_by_owners(results.benchmarks[CURVE].results)
    findings = _curve_findings(own)
    for size in _curve_sizes(own):
        pairs, _, owners = size.partition("x")
        decided = {
            verdict: " and ".join(
                label for name, label in OF_CURVE.items() if findings[name, size].verdict == verdict
            )
            for verdict in (HOLDS, FAILS)
        }
        if parts := [f"{MOVES[verdict]} in {labels}" for verdict, labels in decided.items() if labels]:
            return f"; one selector for {owners} owners with {pairs} pairs each is {', and '.join(parts)}"
    return ""


def _curve_words(results: Results) -> list[str]:
    """A sentence on the fewest, and one on the most pairs that were measured with the most owners."""
    own = _with_alone_by_owners(results.benchmarks[CURVE].results)
    sizes = _curve_sizes(own)
    words, findings = [], _curve_findings(own)
    for size in dict.fromkeys(sizes[:1] + sizes[-1:]):
        both = _over_seeds_of(own, (f"alone-{size}", f"federated-{size}"), "accuracy")
        alone, federated = (
            {name: np.mean(values_of(both.metrics[f"{arm}-{size}"], name)) for name in OF_CURVE}
            for arm in ("alone", "federated")
        )
        verdicts = {name: MOVES[findings[name, size].verdict] for name in OF_CURVE}
        moves = [f"from {alone[name]:.3f} to {federated[name]:.3f} ({verdicts[name]})" for name in OF_CURVE]
        seeds = len(both.metrics[f"alone-{size}"])
        pairs, _, owners = size.partition("x")
        words.append(
            f"With {pairs} pairs of each of {owners} owners, one selector for all in place of each owner's"
            f" own changes the accuracy on preferences that owners share {moves[0]}, on those that contradict"
            f" each other {moves[1]}, and on all pairs of an owner {moves[2]}, by {seeds}"
            f" {'seed' if seeds == 1 else 'seeds'}."
        )
    return [" ".join(words)] if words else []


def _with_alone_by_owners(own: BenchmarkResults) -> BenchmarkResults:
    """The results with clients alone by the number of owners: those that a federation of that size has.

    Common and own taste are known over all clients only.
    """
    name = alias_of("accuracy").metrics[0]
    metrics, units = dict(own.metrics), dict(own.units)
    for pairs, owners in product(PAIRS, OWNERS):
        size = f"{pairs}x{owners}"
        for seed, run in own.metrics.get(f"alone-{pairs}", {}).items():
            every = own.units.get(f"alone-{pairs}", {}).get(seed, {})
            federated = own.units.get(f"federated-{size}", {}).get(seed, {})
            run, of_run = dict(run), dict(every)
            if name in every and name in federated:
                values = every[name].strata[""]
                kept = {client: values[client] for client in federated[name].strata[""]}
                of_run[name] = Units(CLIENTS, {"": kept})
                run[name] = of_run[name].mean
            metrics.setdefault(f"alone-{size}", {})[seed] = run
            units.setdefault(f"alone-{size}", {})[seed] = of_run
    return replace(own, metrics=metrics, units=units)


def speed(results: Results, _: Sequence[str]) -> str:
    """The opening sentence of the page of performance, its picture, and the last values of each ratio.

    Raises:
        UserError: a ratio of the sentence was not recorded on a machine.
    """
    every = {machine: medians(_values(own)) for machine, own in results.speed.items()}

    def times(name: str) -> str:
        missing = [machine for machine, own in every.items() if name not in own]
        if missing or not every:
            where = f"{PUBLISHED / SPEED} lacks {name} of {' and of '.join(missing) or 'any machine'}"
            raise UserError(f"{where}: record it there by python -m perf peers and generation")
        return " and ".join(f"{own[name]:.1f}" for own in every.values())

    rows: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}  # by conditions
    for machine, own in results.speed.items():
        for name, (values, line) in own.items():
            rows.setdefault((line["recipe"], machine, short_commit(line["commit"])), []).append(
                {
                    "ratio": f"`{name}`",
                    "median": f"{every[machine][name]:.2f}",
                    "all": ", ".join(f"{value:.2f}" for value in values),
                }
            )
    tables = [
        f"Recipe `{recipe}`, {machine}, commit {commit}:\n\n{_table(own)}"
        for (recipe, machine, commit), own in rows.items()
    ]
    sentence = (
        f"A round of FedBis is {times(FLOWER)} times as fast as in a tuned Flower app, a client of FedDPO"
        f" {times(TRL)} times as fast as with TRL's trainer, and sampling {times(SAMPLING)} times as fast as"
        f" by transformers' batches ({'; '.join(every)})."
    )
    picture = "![Ratios and their medians](../images/results/performance.svg)"
    return "\n\n".join([sentence, picture, *tables])


def _values(own: Mapping[str, tuple[list[float], Line]]) -> dict[str, list[float]]:
    return {name: values for name, (values, _) in own.items()}


PARTS: Mapping[str, Callable[[Results, Sequence[str]], str]] = {
    "summary": summary,
    "overview": overview,
    "claims": claims,
    "choices": choices,
    "means": means,
    "policies": policies,
    "contests": contests,
    "runs": runs,
    "references": references,
    "methods": methods,
    "curve": curve,
    "speed": speed,
}


def counts_sentence(what: str, findings: Sequence[Finding]) -> str:
    """How many claims hold, fail, are undecided and are not measured, as a sentence."""
    counts = Counter(finding.verdict for finding in findings)
    unmeasured = sum(finding.value is None for finding in findings)
    undecided = counts[UNDECIDED] - unmeasured
    words = [
        f"{counts[HOLDS]} {'holds' if counts[HOLDS] == 1 else 'hold'}",
        f"{counts[FAILS]} {'fails' if counts[FAILS] == 1 else 'fail'}",
        f"{undecided} {'is' if undecided == 1 else 'are'} undecided",
    ]
    if unmeasured:
        words.append(f"{unmeasured} {'is' if unmeasured == 1 else 'are'} not measured")
    return f"Of {len(findings)} {what}, {', '.join(words[:-1])} and {words[-1]}."


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- pictures


def draw_claims(findings: Sequence[Finding]) -> bytes:
    """The interval of each measured claim beside its limit, the claims on one figure together, as SVG."""
    groups: dict[tuple[str, float], list[Finding]] = {}
    for finding in findings:
        if finding.value is not None:
            groups.setdefault((finding.figure, finding.limit), []).append(finding)
    if not groups:
        return _draw_nothing(f"{len(findings)} claims, none of them measured yet")
    heights = [len(group) + 2.2 for group in groups.values()]
    figure = Figure(figsize=(WIDTH, ROW * sum(heights) + 0.3), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for place, ((label, limit), group) in zip(axes, groups.items(), strict=True):
        _draw_group(place, label, limit, group)
    handles = [
        matplotlib.lines.Line2D([], [], color=color, marker=marker, label=verdict)
        for verdict, (color, marker) in VERDICTS.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, labelcolor=GREY
    )
    return _svg(figure)


def _draw_group(axes: Axes, label: str, limit: float, findings: Sequence[Finding]) -> None:
    for row, finding in enumerate(findings):
        color, marker = VERDICTS[finding.verdict]
        numbers = [math.nan if x is None else x for x in (finding.low, finding.value, finding.high)]
        low, value, high = np.round(numbers, DIGITS)
        axes.plot([low, high], [row, row], color=color, linewidth=2)
        axes.plot([value], [row], color=color, marker=marker, markersize=6)
    axes.axvline(limit, color=GREY, linestyle=":")
    names = [finding.claim.partition(":")[0] for finding in findings]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    words = findings[0].claim.rpartition(label)[2].strip()
    axes.set_title(f"{label}: claimed {words}", loc="left", fontsize="medium", color=GREY)
    _finish(axes)


def draw_curve(results: Results) -> bytes:
    """Accuracy by the pairs of an owner, alone, federated and pooled, a panel for each taste, as SVG."""
    own = results.benchmarks[CURVE].results
    if not own.metrics:
        return _draw_nothing("not measured yet")
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(OF_CURVE), sharey=True)
    series = [("alone", "alone-{}", GREY, "o")]
    series += [
        (f"federated, {n} owners", f"federated-{{}}x{n}", BLUE, marker)
        for n, marker in zip(OWNERS, "v^s", strict=True)
    ]
    series += [(f"groups, {OWNERS[-1]} owners", f"groups-{{}}x{OWNERS[-1]}", "#23916a", "D")]
    series += [(f"pooled, {OWNERS[-1]} owners", f"pooled-{{}}x{OWNERS[-1]}", "#d9822b", "P")]
    for axes, taste in zip(panels, OF_CURVE, strict=True):
        for number, (label, name, color, marker) in enumerate(series):
            places, values, errors = [], [], []
            for place, pairs in enumerate(PAIRS):
                runs = own.metrics.get(name.format(pairs), {})
                by_seed = {seed: one for seed, run in runs.items() if (one := named(run, taste)) is not None}
                if by_seed:
                    value = round(float(np.mean(list(by_seed.values()))), DIGITS)
                    ends = _arm_interval(own, name.format(pairs), taste, by_seed)
                    low, high = (value if end is None else round(end, DIGITS) for end in ends)
                    places.append(place + 0.06 * (number - len(series) / 2))
                    values.append(value)
                    errors.append([value - low, high - value])
            if places:
                spans = np.array(errors).T
                axes.errorbar(places, values, spans, color=color, marker=marker, linewidth=1, label=label)
        if rule := values_of(own.metrics.get("longer", {}), taste):
            height = round(float(np.mean(rule)), DIGITS)
            axes.axhline(height, color=GREY, linestyle=":", linewidth=1, label="the longer answer")
        axes.set_xticks(range(len(PAIRS)), [str(pairs) for pairs in PAIRS])
        axes.set_xlabel("pairs of an owner", color=GREY)
        label = "all pairs" if taste == "accuracy" else alias_of(taste).label
        axes.set_title(label, loc="left", fontsize="medium", color=GREY)
        axes.set_ylim(0.3, 1.02)
        axes.set_xlim(-0.4, len(PAIRS) - 0.6)
        _finish(axes)
    panels[0].set_ylabel("accuracy", color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=GREY)
    return _svg(figure)


def draw_overview(results: Results) -> bytes:
    """The number of claims by paper and verdict, as SVG."""
    papers = list(PAPERS)
    counts = [Counter(one.verdict for one in results.findings(names)) for _, names in PAPERS.values()]
    figure = Figure(figsize=(WIDTH, ROW * 1.6 * len(papers) + 0.8), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(papers))
    for verdict, (color, _) in VERDICTS.items():
        widths = np.array([own[verdict] for own in counts])
        bars = axes.barh(papers, widths, left=left, color=color, label=verdict, height=0.6)
        axes.bar_label(bars, [str(n) if n else "" for n in widths], label_type="center", color="white")
        left += widths
    axes.invert_yaxis()
    axes.set_xlabel("claims", color=GREY)
    _finish(axes)
    figure.legend(loc="outside lower center", ncols=len(VERDICTS), frameon=False, labelcolor=GREY)
    return _svg(figure)


def draw_speed(results: Results) -> bytes:
    """The ratios of each benchmark of time, as SVG."""
    names = list(dict.fromkeys(name for own in results.speed.values() for name in own if "against" in name))
    figure = Figure(figsize=(WIDTH, ROW * (len(names) + 3)), layout="constrained")
    axes = figure.subplots()
    for number, (machine, own) in enumerate(results.speed.items()):
        color, marker = MACHINES[number % len(MACHINES)]
        for row, name in enumerate(names):
            values = np.round(own[name][0] if name in own else [math.nan], DIGITS)
            place = row + 0.6 * number / len(results.speed)
            axes.plot(values, [place] * len(values), color=color, marker="|", markersize=10, linewidth=1)
            label = machine if row == 0 else None
            axes.plot([np.median(values)], [place], color=color, marker=marker, label=label, linestyle="")
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("times faster (points: medians)", color=GREY)
    axes.axvline(1.0, color=GREY, linestyle=":")
    _finish(axes)
    figure.legend(loc="outside lower center", ncols=len(results.speed), frameon=False, labelcolor=GREY)
    return _svg(figure)


def _finish(axes: Axes) -> None:
    axes.tick_params(colors=GREY)
    axes.grid(axis="x", color=GREY, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_nothing(text: str) -> bytes:
    figure = Figure(figsize=(WIDTH, 3 * ROW))
    figure.text(0.5, 0.5, text, ha="center", va="center", color=GREY)
    return _svg(figure)


def _svg(figure: Figure) -> bytes:
    """A figure without a background and without a date, so that equal figures are equal files."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


# --- files


@contextmanager
def own_settings() -> Iterator[None]:
    """Draw with Matplotlib's defaults, and name the parts of equal pictures alike."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "results"
        yield


@own_settings()
def files(results: Results) -> dict[Path, bytes]:
    """The content of each page and picture."""

    def filled(match: re.Match[str]) -> str:
        if match[0].count("<!-- results:") > 1:
            raise UserError(f"the comment `{match[2]}` of a page of results lacks its `end`")
        part, *names = match[2].split()
        return f"{match[1]}\n{PARTS[part](results, names)}\n\n{match[3]}"

    pattern = re.compile(r"(<!-- results: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    pages = [page for page, _ in PAPERS.values()]
    content = {
        FOLDER / page: pattern.sub(filled, (FOLDER / page).read_text(encoding="utf-8")).encode()
        for page in ("index.md", "performance.md", CURVE_PAGE[0], "log/index.md", *pages)
    }
    for page, names in PAPERS.values():
        content[PICTURES / f"{Path(page).stem}.svg"] = draw_claims(results.findings(names))
    content[PICTURES / "when-to-federate.svg"] = draw_curve(results)
    content[PICTURES / "performance.svg"] = draw_speed(results)
    return content | {PICTURES / "index.svg": draw_overview(results)}


def main() -> int:
    """Write the pages and pictures, or check that they are current; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate_results")
    parser.add_argument("--check", action="store_true", help="check that they are current")
    check = parser.parse_args().check
    content = files(Results())
    outdated = [path for path, own in content.items() if not path.is_file() or path.read_bytes() != own]
    if check and outdated:
        names = ", ".join(path.name for path in outdated)
        print(f"docs/results: {names} not current: run python -m docs.generate_results", file=sys.stderr)
        return 1
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in outdated:
        path.write_bytes(content[path])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
