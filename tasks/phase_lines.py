"""The line of a finished phase: how long it took, and its main figure."""

from __future__ import annotations

from components.data.data_report import read_report
from components.progress import format_duration
from components.reporting.lines import left_out_line
from tasks.runs import Run


def phase_line(run: Run, phase: str) -> str:
    """What a phase did, in how long, and its main figure: '8 rounds in 42 s, accuracy 0.612 -> 0.750'.

    The time includes that of earlier processes, which were stopped.
    """
    done, figure = PHASE_FIGURES[phase](run)
    seconds = run.metadata()["seconds"][phase]
    return f"{done} in {format_duration(seconds)}" + (f", {figure}" if figure else "")


def _prepared(run: Run) -> tuple[str, str]:
    report = read_report(run.prepared)
    partition = report.partition
    return f"{partition.samples:,} pairs of {partition.clients:,} clients", left_out_line(report.rows)


def _federated(run: Run) -> tuple[str, str]:
    result = run.federation_result()
    before, after = result.before.accuracy.mean, result.after.accuracy.mean
    return _counted(result.rounds, "round"), f"accuracy {before:.3f} -> {after:.3f}"


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("s" if number != 1 else "")


def _aligned(run: Run) -> tuple[str, str]:
    result = run.alignment_result()
    done = _counted(len(result.history), "step") + " of DPO" if result.history else "the clients' policy"
    kl = result.metrics.get("kl_sequence")
    return done, "" if kl is None else f"KL to the reference {kl:.2f} nats per completion"


def _evaluated(run: Run) -> tuple[str, str]:
    contest = run.evaluation_result().contests.get("aligned_vs_base")
    if contest is None:
        return "evaluated", ""
    counts = f"{contest.wins} wins, {contest.ties} ties, {contest.losses} losses"
    contests = len(run.evaluation_result().contests)
    return _counted(contests, "contest") + " judged", f"{counts} against the base policy"


PHASE_FIGURES = {"prepare": _prepared, "federate": _federated, "align": _aligned, "evaluate": _evaluated}
