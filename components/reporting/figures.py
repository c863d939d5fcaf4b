"""The figures of a run: numbers by name, for tables over arms and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from components.evaluation.diagnostics import figure_labels
from components.evaluation.plotting import Point
from components.results import AlignmentResult, EvaluationResult, FederationResult, StepRecord

FIGURES = {
    "common": "common taste",
    "common_assigned": "common taste, own adapter",
    "own": "own taste",
    "own_assigned": "own taste, own adapter",
    "worst": "worst client",
    "accuracy": "pair accuracy",
    "best_accuracy": "pair accuracy, best round",
    "margin": "reward margin",
    "reward": "reward",
    "best_reward": "best reward",
    "summed": "accuracy by log-likelihood",
    "summed_best": "accuracy by log-likelihood, best round",
    "summed_worst": "by log-likelihood, worst client",
    "per_token": "accuracy by log-likelihood per token",
    "per_token_best": "accuracy by log-likelihood per token, best round",
    "per_token_worst": "by log-likelihood per token, worst client",
    "explicit": "accuracy by the reward head",
    "hypervolume": "hypervolume",
    "rank": "rank correlation of preference and reward",
    "sent": "MB sent",
    "kept": "MB kept by a client",
    "answer_accuracy": "answers to questions, accuracy",
    "success": "answers to questions, success",
    "rougeLsum": "ROUGE-L",
    "characters": "characters per answer",
    "kl": "KL (nats)",
    "implicit_reward": "implicit reward",
    "client_steps": "client steps",
    "train_seconds": "training (s)",
    "aggregation_seconds": "aggregation (s per round)",
}
"""Labels of the figures that any method may have; diagnostics of methods add theirs.

Accuracies are on held-out pairs, of the selectors' majority or of the trained policy's implicit
reward; "own adapter": each client's pairs by the adapter that it uses. Pair accuracy is the
clients' mean. Reward and reward margin are implicit (beta log pi / pi_ref of the chosen completion,
and its difference to the rejected one's), the clients' mean on held-out pairs after the last round;
best reward and the accuracies of the best round are the largest over the rounds that were measured,
chosen by the reported pairs, where some were measured between the rounds. Accuracy by log-likelihood is
FedPDPO's preference accuracy (section 5), by sums over a completion's tokens or by their means. MB
sent are of all clients over all rounds; kept is what never leaves a client, the mean over clients
after the last round that each took part in. Training time is the sum over clients and rounds,
aggregation time the server's mean per round (DRIFT table 6). Hypervolume and rank correlation are
of a front, which has a row of its own (Benchmark.fronts).
"""

EXACT_FIGURES = ("sent", "kept", "client_steps")
"""Figures that are counted and not estimated: one seed is enough for a claim on them."""

REWARD_PREFIX = "reward:"
"""Prefix of the figure of a single objective's reward."""


def all_figure_labels() -> dict[str, str]:
    """Labels of all figures, by name."""
    return FIGURES | figure_labels()


def figure_label(name: str) -> str:
    """Label of a figure in a table."""
    if name.startswith(REWARD_PREFIX):
        return f"reward, {name.removeprefix(REWARD_PREFIX)}"
    return all_figure_labels()[name]


def run_figures(
    federation: FederationResult,
    alignment: AlignmentResult,
    evaluation: EvaluationResult,
    answers: Sequence[str],
    curve: Sequence[Point],
) -> dict[str, float]:
    """The figures of a run, apart from those of its method's diagnostics.

    Args:
        federation, alignment, evaluation: results of the phases.
        answers: of the aligned policy to the held-out prompts.
        curve: implicit rewards by round, see reward_curve.
    """
    after = federation.after.accuracy
    assigned = after.assigned or after
    figures: dict[str, float | None] = {
        "common": after.domains.get("common"),
        "own": after.domains.get("own"),
        "worst": after.worst,
        "own_assigned": assigned.domains.get("own"),
        "common_assigned": assigned.domains.get("common"),
        "kl": alignment.metrics.get("kl_sequence"),
        "implicit_reward": evaluation.implicit_reward.mean if evaluation.implicit_reward else None,
    }
    if federation.best is not None:
        measured = [evaluation.accuracy for evaluation in federation.evaluations[1:]]
        figures["best_accuracy"] = federation.best.accuracy.mean
        for name in after.by_metric.keys() & {"summed", "per_token"}:
            figures[f"{name}_best"] = max(report.by_metric[name].mean for report in measured)
    for name, summary in after.by_metric.items():
        figures[name] = summary.mean
        if f"{name}_worst" in FIGURES:
            figures[f"{name}_worst"] = summary.worst
    if curve:
        figures["accuracy"] = after.mean
        figures["margin"] = curve[-1]["margin"]
        figures["reward"] = curve[-1]["reward"]
        figures["best_reward"] = max(point["reward"] for point in curve)
    all_figures = (
        figures | effort_figures(federation.records) | answer_figures(evaluation, "aligned", answers)
    )
    return {name: float(value) for name, value in all_figures.items() if value is not None}


def effort_figures(records: Sequence[StepRecord]) -> dict[str, float | None]:
    """Steps, time and bytes of all clients over all rounds."""
    steps = 0.0
    seconds = 0.0
    sent = 0
    kept_bytes: dict[str, int] = {}
    for record in records:
        for name, client in record.clients.items():
            seconds += client.metrics.scalars.get("seconds", 0.0)
            sent += client.traffic.sent
            if record.ends_round:
                steps += client.metrics.scalars.get("steps", 0.0)
                kept_bytes[name] = client.traffic.kept
    rounds = len({record.round for record in records})
    return {
        "client_steps": steps,
        "train_seconds": seconds,
        "aggregation_seconds": sum(record.aggregation_seconds for record in records) / rounds,
        "sent": sent / 1e6,
        "kept": float(np.mean(list(kept_bytes.values()))) / 1e6 if any(kept_bytes.values()) else None,
    }


def answer_figures(
    evaluation: EvaluationResult, policy: str, answers: Sequence[str]
) -> dict[str, float | None]:
    """The figures of what a policy writes; the only ones of the base policy.

    Args:
        evaluation: result of the phase.
        policy: aligned or base.
        answers: the policy's, to the held-out prompts.
    """
    questions = evaluation.questions.get(policy)
    return {
        "rougeLsum": evaluation.rouge.get(policy, {}).get("rougeLsum"),
        "characters": float(np.mean([len(text) for text in answers])) if answers else None,
        "answer_accuracy": questions.mean.accuracy if questions else None,
        "success": questions.mean.success if questions else None,
    }


def reward_curve(federation: FederationResult, beta: float) -> list[Point]:
    """Implicit reward of the chosen completions, its margin, and accuracies, by the rounds done.

    As in DRIFT section 7.1, figures 6 and 7, and FedPDPO figures 3 and 4. Empty where selectors
    were trained, which have no implicit reward.

    Args:
        federation: result of the rounds.
        beta: scale of the implicit reward.
    """
    curve: list[Point] = []
    for evaluation in federation.evaluations:
        accuracy = evaluation.accuracy
        if accuracy.reward is not None:
            curve.append(
                {
                    "round": evaluation.rounds_done,
                    "reward": beta * accuracy.reward,
                    "margin": beta * accuracy.margin,
                    "accuracy": accuracy.mean,
                    **{name: summary.mean for name, summary in accuracy.by_metric.items()},
                }
            )
    return curve


def mean_figures(runs: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Means over seeds of the figures of an arm, over the seeds that have them."""
    names = set[str]().union(*runs.values())
    values = {name: [run[name] for run in runs.values() if name in run] for name in sorted(names)}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
