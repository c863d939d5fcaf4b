"""The parts of a run's table on answers to questions and on AlpacaEval."""

from __future__ import annotations

import math
from collections.abc import Mapping

from components.reporting.summary.metrics import question_figures
from components.results import AlpacaEvalResult, QuestionFigures, QuestionResult


def format_percent(share: float) -> str:
    """A share in percent; '-' if it is not finite."""
    return f"{share:.1%}" if math.isfinite(share) else "-"


def format_number(number: object) -> str:
    """A number with two digits; '-' if it is missing or not finite."""
    return f"{number:.2f}" if isinstance(number, int | float) and math.isfinite(number) else "-"


def question_lines(answers: Mapping[str, QuestionResult]) -> list[str]:
    """The answers to questions as lines of the table (DRIFT section 7.1)."""
    first = next(iter(answers.values()))
    header = (
        f"{'Answers to questions':<30} {'accuracy':>8}  {'[95% interval]':<16} {'chance':>6}"
        f" {'unparsable':>10}"
    )
    if first.samples:
        header += f"  {f'success at {first.samples}':>13}  {'[95% interval]':<16} {'chance':>6}"
    lines = [header]
    totals = {"all": "all questions", "mean": "mean over the sets"}
    for name in question_figures(first):
        if name in totals and len(first.sets) == 1:
            continue
        for policy, result in answers.items():
            figures = question_figures(result)[name]
            count = f" ({figures.questions})" if figures.questions is not None else ""
            lines.append(_question_row(f"{totals.get(name, name)}{count}, {policy}", figures))
    cut = max(result.all.cut or 0 for result in answers.values())
    if cut:
        lines.append(
            f"  {cut} questions did not fit policy.max_prompt_tokens and were cut: raise it, or set"
            " evaluation.questions.max_question_tokens"
        )
    return lines


def _question_row(label: str, figures: QuestionFigures) -> str:
    interval = _interval(figures.low, figures.high)
    line = (
        f"  {label:<28} {figures.accuracy:>8.1%}  {interval:<16} {figures.chance:>6.1%}"
        f" {figures.unparsable_share:>10.1%}"
    )
    if figures.success is not None and figures.success_chance is not None:
        interval = _interval(figures.success_low, figures.success_high)
        line += f"  {figures.success:>13.1%}  {interval:<16} {figures.success_chance:>6.1%}"
    return line.rstrip()


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{low:.1%}, {high:.1%}]"


def alpaca_lines(result: AlpacaEvalResult) -> list[str]:
    """AlpacaEval's figures as lines of the table, in the units of its leaderboard (percent)."""
    lines = [
        f"{'AlpacaEval (percent)':<40} {'win rate':>8}  {'s.e.':>5}  {'discrete':>8}"
        f"  {'length-controlled':>17}  at equal length  [95% interval]"
    ]
    for name, contest in result.contests.items():
        figures = contest.figures
        title = f"{name.partition('_')[0]} against {contest.baseline}"
        low = format_number(figures.equal_length_low)
        high = format_number(figures.equal_length_high)
        lines.append(
            f"  {title:<38} {format_number(figures.win_rate):>8}  {format_number(figures.standard_error):>5}"
            f"  {format_number(figures.discrete_win_rate):>8}"
            f"  {format_number(figures.length_controlled_winrate):>17}"
            f"  {format_number(figures.equal_length_win_rate):>15}  [{low}, {high}]"
        )
        missing = f", {figures.n_missing} without a preference" if figures.n_missing else ""
        lines.append(
            f"    {figures.n_wins} wins, {figures.n_draws} draws, {figures.n_wins_base} losses{missing};"
            f" {figures.avg_length:,} characters on average"
        )
    lines.append(f"  annotator: {result.annotator}")
    return [*lines, f"  {result.note}"] if result.note else lines
