"""Generates the tables and pictures of docs/results/ from the results of the campaign.

python -m docs.generate_results            # writes into docs/results/ and docs/images/results/
python -m docs.generate_results --check    # exit status 1 if a page or a picture is not current

The source is docs/results/data/<family>.jsonl, the collected lines of perf/campaign. What stands between
the comments `results: PART FAMILY` and `end` of a page is generated; PART is the name of a function of
PARTS.
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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from components.config import UserError
from components.config.benchmark import Benchmark
from components.paths import PACKAGE
from components.reporting.benchmark_page import commits_line, contests_table, metrics_tables, short_commit
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.claims import FAILS, HOLDS, UNDECIDED, Finding, check_claims
from components.reporting.formats import format_number
from components.reporting.page import Table, markdown_table
from perf.campaign.lines import PUBLISHED, RUN, Line, read_lines, read_results
from perf.campaign.plan import LIST, Campaign, read_campaign, runs_of
from perf.harness import medians

FOLDER = PACKAGE / "docs" / "results"
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
    "FIRM": ("multi-objective.md", ("multi-objective", "multi-objective-moving")),
}
"""By paper, the page of its claims, and the families that decide them."""
VERDICTS = {HOLDS: ("#23916a", "o"), FAILS: ("#cc4b5b", "X"), UNDECIDED: ("#7d858f", "D")}
"""Color and marker of each verdict; the colors have a contrast of 3 on a light and on a dark page."""
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
class FamilyResults:
    """A family of the campaign, and what was measured of it."""

    name: str
    benchmark: Benchmark
    minutes: float  # of a run, estimated
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
        seconds: dict[str, list[float]] = {}
        for line in self.lines:
            if line["kind"] == RUN:
                seconds.setdefault(line["arm"], []).append(line["seconds"])
        return seconds

    @cached_property
    def runs(self) -> list[tuple[str, int]]:
        """Arm and seed of all of its runs."""
        return runs_of(self.benchmark)

    @cached_property
    def missing(self) -> list[tuple[str, int]]:
        """Its runs that are not finished."""
        done = {(line["arm"], line["seed"]) for line in self.lines}
        return [run for run in self.runs if run not in done]

    @property
    def missing_hours(self) -> float:
        """Estimated hours of these, by the finished runs of the same arm or else by the family's estimate."""
        minutes = [np.mean(self.seconds.get(arm, [60 * self.minutes])) / 60 for arm, _ in self.missing]
        return float(sum(minutes)) / 60


class Results:
    """The results of all families of a campaign."""

    def __init__(self, campaign: Campaign, data: Path) -> None:
        self.families = {
            name: FamilyResults(
                name,
                campaign.benchmark(name),
                family.minutes,
                read_lines(data / f"{name}.jsonl"),
            )
            for name, family in campaign.families.items()
        }

        # By machine and ratio its values, and the line that has them; the last one counts.
        self.speed: dict[str, dict[str, tuple[list[float], Line]]] = {}
        for line in read_lines(data / SPEED):
            own = self.speed.setdefault(f"{line['processor']}, {line['cores']} cores", {})
            own |= {name: (values, line) for name, values in line["ratios"].items()}

    def findings(self, names: Sequence[str]) -> list[Finding]:
        """The checked claims of some families."""
        return [finding for name in names for finding in self.families[name].findings]


# --- parts of pages


def summary(results: Results, names: Sequence[str]) -> str:
    """The opening sentence of a page, and its picture."""
    paper, page = next((paper, page) for paper, (page, own) in PAPERS.items() if own == tuple(names))
    findings = results.findings(names)
    picture = f"../images/results/{Path(page).stem}.svg"
    return f"{counts_sentence(f'claims of {paper}', findings)}\n\n![The claims' intervals]({picture})"


def overview(results: Results, _: Sequence[str]) -> str:
    """The opening sentence of the index, its picture, and a row for each paper."""
    by_paper = {paper: results.findings(names) for paper, (_, names) in PAPERS.items()}
    every = [finding for findings in by_paper.values() for finding in findings]
    rows = []
    for paper, (page, names) in PAPERS.items():
        counts = Counter(finding.verdict for finding in by_paper[paper])
        families = [results.families[name] for name in names]
        missing = sum(len(family.missing) for family in families)
        every_run = sum(len(family.runs) for family in families)
        rows.append(
            {
                "paper": f"[{paper}]({page})",
                **{verdict: str(counts[verdict]) for verdict in VERDICTS},
                "runs finished": f"{every_run - missing} of {every_run}",
                "hours missing (estimate)": format_number(
                    sum(family.missing_hours for family in families), 0
                ),
            }
        )
    return "\n\n".join(
        [
            counts_sentence("claims of the four papers", every),
            "![Claims by paper and verdict](../images/results/index.svg)",
            _table(rows),
        ]
    )


def claims(results: Results, names: Sequence[str]) -> str:
    """The claims of families, and their verdicts."""
    rows = [
        {
            "claim": finding.claim,
            "verdict": f"**{finding.verdict}**" + (f" ({finding.reason})" if finding.reason else ""),
            "over all seeds": format_number(finding.value, DIGITS),
            "95% interval": "-"
            if finding.low is None
            else f"{format_number(finding.low, DIGITS)} to {format_number(finding.high, DIGITS)}",
            "interval over": finding.drawn,
        }
        for finding in results.findings(names)
    ]
    return _table(rows)


def means(results: Results, names: Sequence[str]) -> str:
    """Means over seeds of a family's arms."""
    table = metrics_tables(results.families[names[0]].results)[0].filled()
    header, *rows = zip(table.header, *table.rows, strict=True)  # a row for each figure
    turned = Table("", ["figure", *header[1:]], [[*row] for row in rows])
    return f"{markdown_table(turned)}\n\n{table.caption}"


def contests(results: Results, names: Sequence[str]) -> str:
    """The contests of a family."""
    table = contests_table(results.families[names[0]].results)
    notes = "\n\n".join(table.notes)
    return f'<div class="wide" markdown>\n\n{markdown_table(table)}\n\n</div>\n\n{notes}'


def runs(results: Results, names: Sequence[str]) -> str:
    """The finished runs of families, and the hours of the others; without names of all families."""
    rows = []
    for name in names or results.families:
        family = results.families[name]
        minutes = [seconds / 60 for own in family.seconds.values() for seconds in own]
        rows.append(
            {
                "family": f"`{name}`",
                "runs finished": f"{len(family.runs) - len(family.missing)} of {len(family.runs)}",
                "minutes of a run": f"{min(minutes):.0f} to {max(minutes):.0f}" if minutes else "-",
                "hours missing (estimate)": format_number(family.missing_hours, 0),
                "commits": commits_line(family.results.commits).partition(": ")[2] if minutes else "-",
            }
        )
    return _table(rows)


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
    "means": means,
    "contests": contests,
    "runs": runs,
    "speed": speed,
}


def counts_sentence(what: str, findings: Sequence[Finding]) -> str:
    """How many claims hold, fail and are undecided, as a sentence."""
    counts = Counter(finding.verdict for finding in findings)
    unmeasured = sum(finding.value is None for finding in findings)
    words = [
        f"{counts[HOLDS]} {'holds' if counts[HOLDS] == 1 else 'hold'}",
        f"{counts[FAILS]} {'fails' if counts[FAILS] == 1 else 'fail'}",
        f"{counts[UNDECIDED]} {'is' if counts[UNDECIDED] == 1 else 'are'} undecided",
    ]
    measured = (
        f", of which {unmeasured} {'was' if unmeasured == 1 else 'were'} not measured" if unmeasured else ""
    )
    return f"Of {len(findings)} {what}, {words[0]}, {words[1]} and {words[2]}{measured}."


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
        for page in ("index.md", "performance.md", *pages)
    }
    for page, names in PAPERS.values():
        content[PICTURES / f"{Path(page).stem}.svg"] = draw_claims(results.findings(names))
    content[PICTURES / "performance.svg"] = draw_speed(results)
    return content | {PICTURES / "index.svg": draw_overview(results)}


def main() -> int:
    """Write the pages and pictures, or check that they are current; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate_results")
    parser.add_argument("--check", action="store_true", help="check that they are current")
    check = parser.parse_args().check
    content = files(Results(read_campaign(LIST, Path("campaign")), PACKAGE / PUBLISHED))
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
