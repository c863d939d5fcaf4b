"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev

from components.config import Recipe
from components.reporting.summary.lines import accuracy_line, shown_domains
from components.reporting.summary.optional_parts import alpaca_lines, format_percent, question_lines
from components.results import (
    AccuracyReport,
    AlignmentResult,
    ContestFigures,
    EvaluationResult,
    FederationResult,
    RoundEvaluation,
)

CONTESTS = {
    "aligned_vs_base": "aligned against base policy",
    "aligned_vs_human": "aligned against {references}",
    "base_vs_human": "base against {references}",
}
MARGIN_LABELS = {
    "summed": "by log-likelihood, summed",
    "per_token": "by log-likelihood per token",
    "explicit": "by the reward head",
}
"""Labels of accuracies by other margins than the implicit reward's."""


@dataclass(frozen=True)
class FinishedRun:
    """Input of the table of a run.

    Attributes:
        recipe: the recipe.
        federation, alignment, evaluation: results of the phases.
        prompts: number of held-out prompts.
        references: author of the references of the held-out prompts.
        adapters: folder of each exported adapter by name, and of the aligned policy as 'aligned'.
    """

    recipe: Recipe
    federation: FederationResult
    alignment: AlignmentResult
    evaluation: EvaluationResult
    prompts: int
    references: str
    adapters: Mapping[str, str]


def summarize_run(run: FinishedRun) -> str:
    """The table that a run ends with."""
    recipe = run.recipe
    federation = run.federation
    lines = [
        f"{recipe.name}, seed {recipe.seed}: {recipe.federation.method}, {federation.rounds} rounds",
        "",
        *_accuracy_lines(federation),
        "",
        *_contest_lines(run),
        *_alignment_lines(run),
        "",
        *_equal_length_lines(run),
        *_single_order_lines(run),
    ]
    if run.evaluation.questions:
        lines += ["", *question_lines(run.evaluation.questions)]
    if run.evaluation.alpaca_eval is not None:
        lines += ["", *alpaca_lines(run.evaluation.alpaca_eval)]
    return "\n".join([*lines, "", *_adapter_lines(run)])


def _accuracy_lines(federation: FederationResult) -> list[str]:
    before = federation.before.accuracy
    after = federation.after.accuracy
    best = federation.best
    shown = [before, after] if best is None else [before, after, best.accuracy]
    title = f"{federation.accuracy_label} on {after.pairs} held-out pairs"
    lines = [_header(title, best), *_accuracy_rows(shown)]
    for name in after.by_metric:
        summaries = [report.by_metric[name] for report in shown]
        lines.append(_row(MARGIN_LABELS.get(name, name), [summary.mean for summary in summaries]))
        lines.append(_row("  worst client", [summary.worst for summary in summaries]))
        lines.append(_row("  standard deviation over clients", [summary.spread for summary in summaries]))
    if federation.accuracy_note:
        lines.append(f"  {federation.accuracy_note}")
        margins = [report.margin for report in shown]
        by_client = [report.margins.values() for report in shown]
        lines.append(_row("reward margin over beta, mean (nats)", margins))
        lines.append(_row("  worst client", list(map(min, by_client))))
        lines.append(_row("  standard deviation over clients", list(map(pstdev, by_client))))
    if best is not None:
        lines.append(f"  best: after round {best.rounds_done}, chosen by these pairs")
    for name, measure in federation.after.measures.items():
        lines += ["", _header(f"{name.capitalize()}, measured on held-out prompts")]
        first_scalars = federation.before.measures[name].scalars
        for key, value in measure.scalars.items():
            lines.append(_row(key, [first_scalars[key], value]))
    if after.assigned is not None:
        lines.append("  with the adapter that each client is assigned")
        lines += _accuracy_rows([before, after.assigned])
    return lines


def _header(title: str, best: RoundEvaluation | None = None) -> str:
    return f"{title:<39}{'before':>8} {'after':>8}" + ("" if best is None else f" {'best':>8}")


def _accuracy_rows(reports: Sequence[AccuracyReport]) -> list[str]:
    """Rows of the accuracies before the rounds, after them, and after the best one."""
    rows = [
        _row("clients' mean", [report.mean for report in reports]),
        _row("worst client", [report.worst for report in reports]),
        _row("best client", [report.best for report in reports]),
        _row("standard deviation over clients", [report.spread for report in reports]),
    ]
    for name in shown_domains(reports[1]):
        rows.append(_row(_domain_label(name), [report.domains[name] for report in reports]))
    return rows


def _row(name: str, values: Sequence[float]) -> str:
    return f"  {name:<36} {' '.join(f'{value:>8.3f}' for value in values)}"


def _domain_label(name: str) -> str:
    labels = {
        "common": "common-taste pairs",
        "own": "own-taste pairs",
        "": "all pairs",
    }
    return labels.get(name, f"domain {name}")


def _contest_names(run: FinishedRun) -> dict[str, str]:
    return {name: label.format(references=run.references) for name, label in CONTESTS.items()}


def _contest_lines(run: FinishedRun) -> list[str]:
    samples = run.recipe.evaluation.answers_per_prompt
    header = f"Win rate on {run.prompts} held-out prompts" + (f" x {samples} answers" if samples > 1 else "")
    names = _contest_names(run)
    lines = [f"{header}         rate  [95% interval]  wins/ties/losses  consistency"]
    lines += [_contest_row(names[name], contest) for name, contest in run.evaluation.contests.items()]
    figures = run.evaluation.judge_figures
    accuracy = ""
    if "judge_accuracy" in figures:
        pairs = figures.get("judge_held_out_pairs")
        count = "its" if pairs is None else f"{pairs:.0f}"
        accuracy = f"; its own accuracy {figures['judge_accuracy']:.3f} on {count} held-out pairs"
    return [*lines, f"  judge: {run.evaluation.judge}{accuracy}"]


def _contest_row(name: str, contest: ContestFigures) -> str:
    counts = f"{contest.wins}/{contest.ties}/{contest.losses}"
    if contest.unparsable:
        counts += f" ({contest.unparsable} unparsable)"
    interval = f"[{contest.low:.1%}, {contest.high:.1%}]"
    consistency = format_percent(contest.consistency)
    return f"  {name:<36} {contest.win_rate:>6.1%}  {interval}  {counts:>12}  {consistency:>10}"


def _alignment_lines(run: FinishedRun) -> list[str]:
    lines = []
    kl = run.alignment.metrics.get("kl_sequence")
    if kl is not None:
        lines.append(f"  KL to the reference ({run.alignment.reference}): {kl:.2f} nats per completion")
    reward = run.evaluation.implicit_reward
    if reward is not None:
        lines.append(
            f"  implicit reward of the aligned policy on {reward.pairs} held-out pairs:"
            f" {accuracy_line(reward)}"
        )
    if run.evaluation.curve:
        points = [f"{point.step}: {point.proxy:.2f} / {point.judge:.2f}" for point in run.evaluation.curve]
        lines.append(f"  preferred to base over DPO (step: selectors / judge): {', '.join(points)}")
    rouge = run.evaluation.rouge
    if rouge["aligned"]:
        values = ", ".join(f"{policy} {kinds['rougeLsum']:.3f}" for policy, kinds in rouge.items())
        lines.append(f"  ROUGE-L against {run.references}: {values}")
    return lines


def _equal_length_lines(run: FinishedRun) -> list[str]:
    names = _contest_names(run)
    lines = ["Win rate at equal length (a tie is half a win)  uncorrected  at equal length  [95% interval]"]
    for name, contest in run.evaluation.contests.items():
        rate = format_percent(contest.length_controlled)
        low = format_percent(contest.length_controlled_low)
        high = format_percent(contest.length_controlled_high)
        lines.append(
            f"  {names[name]:<43} {format_percent(contest.ties_half):>12}  {rate:>15}  [{low}, {high}]"
        )
    return lines


def _single_order_lines(run: FinishedRun) -> list[str]:
    names = _contest_names(run)
    lines = ["", "Win rate, our answer shown first only              rate  [95% interval]  wins/ties/losses"]
    for name, contest in run.evaluation.contests.items():
        single = contest.single_order
        counts = f"{single.wins}/{single.ties}/{single.losses}"
        interval = f"[{format_percent(single.low)}, {format_percent(single.high)}]"
        rate = format_percent(single.win_rate)
        lines.append(f"  {names[name]:<43} {rate:>8}  {interval}  {counts:>16}")
    return lines if run.evaluation.contests else []


def _adapter_lines(run: FinishedRun) -> list[str]:
    lines = ["Adapters"]
    for name, adapter in run.federation.adapters.items():
        lines.append(f"  {name:<10}  {run.adapters[name]}  (sha256 {adapter.hash[:12]})")
    aligned = run.adapters["aligned"]
    return [*lines, f"  {'aligned':<10}  {aligned}  (registered as {run.alignment.model_uri})"]
