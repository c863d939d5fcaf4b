"""Every number of a run under one name: in MLflow, metrics.json, reports, claims and `fed-rlhf runs`.

A name is a path: `after/accuracy/worst` is the worst client's accuracy after the rounds,
`aligned_vs_base/win_rate` the win rate against the base policy. `before/`, `after/` and `best/` say
when it was measured; `largest/` is the largest value over the measured rounds, `cost/` is over all
rounds and clients. What a round or a step logs over time has the same name without the moment.

Benchmark files may name a metric by an alias (ALIASES), which also has its label in tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from components.charts import Point
from components.config import Recipe, implicit_reward_scale
from components.evaluation.contests import Contest
from components.evaluation.diagnostics.base import Summary
from components.federation.protocol import method_of
from components.results import (
    AccuracyReport,
    AlignmentResult,
    ContestFigures,
    EvaluationResult,
    FederationResult,
    QuestionFigures,
    QuestionResult,
    RoundEvaluation,
    StepRecord,
)

Metrics = dict[str, float]
"""Numbers by name."""
MetricsByArm = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Numbers by name, by arm and seed."""


@dataclass(frozen=True)
class Alias:
    """A short name of a metric in benchmark files, and its label in tables.

    Attributes:
        metrics: its names, of which the first one that a run has counts.
        label: heading of its column.
        is_exact: whether it is counted and not estimated: one seed is enough for a claim on it.
    """

    metrics: tuple[str, ...]
    label: str
    is_exact: bool = False


def _assigned(domain: str) -> tuple[str, ...]:
    return tuple(f"after/{kind}/domain/{domain}" for kind in ("accuracy_assigned", "accuracy"))


ALIASES: Mapping[str, Alias] = {
    "common": Alias(("after/accuracy/domain/common",), "common taste"),
    "common_assigned": Alias(_assigned("common"), "common taste, own adapter"),
    "own": Alias(("after/accuracy/domain/own",), "own taste"),
    "own_assigned": Alias(_assigned("own"), "own taste, own adapter"),
    "accuracy": Alias(("after/accuracy/mean",), "pair accuracy"),
    "worst": Alias(("after/accuracy/worst",), "worst client"),
    "best_accuracy": Alias(("best/accuracy/mean",), "pair accuracy, best round"),
    "margin": Alias(("after/reward_margin",), "reward margin"),
    "reward": Alias(("after/reward",), "reward"),
    "best_reward": Alias(("largest/reward",), "best reward"),
    "summed": Alias(("after/accuracy/summed/mean",), "accuracy by log-likelihood"),
    "summed_best": Alias(("largest/accuracy/summed/mean",), "accuracy by log-likelihood, best round"),
    "summed_worst": Alias(("after/accuracy/summed/worst",), "by log-likelihood, worst client"),
    "per_token": Alias(("after/accuracy/per_token/mean",), "accuracy by log-likelihood per token"),
    "per_token_best": Alias(
        ("largest/accuracy/per_token/mean",), "accuracy by log-likelihood per token, best round"
    ),
    "per_token_worst": Alias(
        ("after/accuracy/per_token/worst",), "by log-likelihood per token, worst client"
    ),
    "explicit": Alias(("after/accuracy/explicit/mean",), "accuracy by the reward head"),
    "hypervolume": Alias(("front/hypervolume",), "hypervolume"),
    "rank": Alias(("front/rank",), "rank correlation of preference and reward"),
    "answer_accuracy": Alias(("questions/aligned/mean/accuracy",), "answers to questions, accuracy"),
    "success": Alias(("questions/aligned/mean/success",), "answers to questions, success"),
    "rougeLsum": Alias(("rouge/aligned/rougeLsum",), "ROUGE-L"),
    "characters": Alias(("answers/aligned_characters",), "characters per answer"),
    "kl": Alias(("align/kl_sequence",), "KL (nats)"),
    "implicit_reward": Alias(("implicit_reward/mean",), "implicit reward"),
    "adjusted_rand_index": Alias(("grouping/adjusted_rand_index",), "adjusted Rand index"),
    "neighbors": Alias(("client_graph/neighbors",), "own-group neighbors"),
    "neighbors_chance": Alias(("client_graph/neighbors_chance",), "own-group neighbors by chance"),
    "mean_reward": Alias(("objectives/mean_reward",), "mean reward"),
    "sampled_kl": Alias(("after/rewards/kl",), "KL of sampled answers (nats)"),
    "lambda_drift": Alias(("objectives/lambda_drift",), "distance of clients' weights"),
    "mean_lambda_drift": Alias(("objectives/mean_lambda_drift",), "distance of their rounds' means"),
    "update_drift": Alias(("objectives/update_drift",), "distance of clients' updates"),
    "client_steps": Alias(("cost/client_steps",), "client steps", is_exact=True),
    "sent": Alias(("cost/sent_mb",), "MB sent", is_exact=True),
    "kept": Alias(("cost/kept_mb",), "MB kept by a client", is_exact=True),
    "train_seconds": Alias(("cost/train_seconds",), "training (s)"),
    "aggregation_seconds": Alias(("cost/aggregation_seconds",), "aggregation (s per round)"),
}
"""Short names of metrics, in the order of the columns of a benchmark's table.

Accuracies are on held-out pairs, of the selectors' majority or of the trained policy's implicit
reward; "own adapter": each client's pairs by the adapter that it uses. Pair accuracy is the
clients' mean. Reward and reward margin are implicit (beta log pi / pi_ref of the chosen completion,
and its difference to the rejected one's), the clients' mean on held-out pairs after the last round;
what is called best is the largest over the rounds that were measured, chosen by the reported pairs.
Accuracy by log-likelihood is FedPDPO's preference accuracy (section 5), by sums over a completion's
tokens or by their means. MB sent are of all clients over all rounds; kept is what never leaves a
client, the mean over clients after the last round that each took part in. Training time is the sum
over clients and rounds, aggregation time the server's mean per round (DRIFT table 6). Hypervolume
and rank correlation are of a front, which has a row of its own (Benchmark.fronts).
"""

REWARD_ALIAS = "reward:"
"""Prefix of the alias of a single objective's reward, e.g. reward:helpfulness."""


def alias_of(name: str) -> Alias:
    """The alias of a name in a benchmark's file: an alias, `reward:OBJECTIVE`, or a metric's own name."""
    if name in ALIASES:
        return ALIASES[name]
    if name.startswith(REWARD_ALIAS):
        objective = name.removeprefix(REWARD_ALIAS)
        return Alias((f"after/rewards/{objective}",), f"reward, {objective}")
    return Alias((name,), name)


def named(metrics: Mapping[str, Any], name: str) -> Any:
    """What belongs to a metric or alias in a mapping by metric; None if it is not there."""
    return next((metrics[metric] for metric in alias_of(name).metrics if metric in metrics), None)


def values_of(runs: Mapping[int, Mapping[str, Any]], name: str) -> list[Any]:
    """What belongs to a metric or alias in the runs by seed that have it."""
    return [value for run in runs.values() if (value := named(run, name)) is not None]


@dataclass(frozen=True)
class RunResults:
    """All results of a finished run.

    Attributes:
        recipe: the recipe.
        federation, alignment, evaluation: results of the phases.
        answers: rows of answers.json: prompt, references, and the texts of both policies.
        diagnostics: summaries by the diagnostics of its method, by name.
        contests: verdicts of its own contests, by name.
    """

    recipe: Recipe
    federation: FederationResult
    alignment: AlignmentResult
    evaluation: EvaluationResult
    answers: Sequence[Mapping[str, Any]]
    diagnostics: Mapping[str, Summary] = field(default_factory=dict)
    contests: Mapping[str, Contest] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> Metrics:
        """See run_metrics."""
        return run_metrics(self)

    @property
    def moments(self) -> dict[str, RoundEvaluation]:
        """What was measured before and after the rounds, and after the best one."""
        federation = self.federation
        moments = {"before": federation.before, "after": federation.after}
        return moments if federation.best is None else moments | {"best": federation.best}

    @property
    def scale(self) -> float | None:
        """Scale beta of the implicit reward; None where selectors were trained, which have none."""
        return implicit_reward_scale(method_of(self.recipe.federation).local_objective)

    @property
    def curve(self) -> list[Point]:
        """See reward_curve; empty where selectors were trained."""
        return [] if self.scale is None else reward_curve(self.federation, self.scale)


def run_metrics(results: RunResults) -> Metrics:
    """Every finite number of a finished run, by name."""
    metrics: Metrics = {}
    for moment, measured in results.moments.items():
        metrics |= {f"{moment}/{name}": value for name, value in evaluation_metrics(measured).items()}
    if results.federation.best is not None:
        metrics["best/round"] = results.federation.best.rounds_done
    metrics |= _largest(results.federation) | _reward_metrics(results.curve)
    metrics |= {f"align/{name}": value for name, value in results.alignment.metrics.items()}
    metrics |= result_metrics(results.evaluation) | _answer_lengths(results.answers)
    for name, summary in results.diagnostics.items():
        metrics |= {f"{name}/{key}": value for key, value in summary.figures.items()}
    metrics |= cost_metrics(results.federation.records)
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def accuracy_metrics(accuracy: AccuracyReport) -> Metrics:
    """Held-out accuracy as metrics: of the majority, and of the clients' assigned adapters."""
    metrics = _accuracy_metrics("accuracy", accuracy)
    if accuracy.assigned is not None:
        metrics |= _accuracy_metrics("accuracy_assigned", accuracy.assigned)
    return metrics


def _accuracy_metrics(prefix: str, accuracy: AccuracyReport) -> Metrics:
    metrics = {
        "mean": accuracy.mean,
        "worst": accuracy.worst,
        "best": accuracy.best,
        "spread": accuracy.spread,
        "margin": accuracy.margin,
    }
    if accuracy.reward is not None:
        metrics["reward"] = accuracy.reward
    metrics |= {f"domain/{domain or 'all'}": value for domain, value in accuracy.domains.items()}
    for name, summary in accuracy.by_metric.items():
        metrics |= {
            f"{name}/mean": summary.mean,
            f"{name}/worst": summary.worst,
            f"{name}/best": summary.best,
            f"{name}/spread": summary.spread,
        }
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def evaluation_metrics(evaluation: RoundEvaluation) -> Metrics:
    """An evaluation between two rounds, as metrics."""
    metrics = accuracy_metrics(evaluation.accuracy)
    for name, measure in evaluation.measures.items():
        metrics |= {f"{name}/{key}": value for key, value in measure.scalars.items()}
    return metrics


def _largest(federation: FederationResult) -> Metrics:
    """The largest accuracies by log-likelihood, where some were measured between the rounds."""
    if federation.best is None:
        return {}
    measured = [evaluation.accuracy for evaluation in federation.evaluations[1:]]
    names = federation.after.accuracy.by_metric.keys() & {"summed", "per_token"}
    return {
        f"largest/accuracy/{name}/mean": max(report.by_metric[name].mean for report in measured)
        for name in names
    }


def _reward_metrics(curve: Sequence[Point]) -> Metrics:
    if not curve:
        return {}
    return {
        "after/reward": curve[-1]["reward"],
        "after/reward_margin": curve[-1]["margin"],
        "largest/reward": max(point["reward"] for point in curve),
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


def result_metrics(result: EvaluationResult) -> Metrics:
    """The numbers of the phase evaluate."""
    metrics: Metrics = {f"answers/{name}": value for name, value in result.answers.items()}
    for name, value in result.judge_figures.items():
        metrics[f"judge/{name.removeprefix('judge_')}"] = value
    for contest, figures in result.contests.items():
        metrics |= {f"{contest}/{name}": value for name, value in contest_metrics(figures).items()}
    for policy, kinds in result.rouge.items():
        metrics |= {f"rouge/{policy}/{kind}": value for kind, value in kinds.items()}
    if result.alpaca_eval is not None:
        for contest, annotated in result.alpaca_eval.contests.items():
            values = annotated.figures.model_dump(exclude_none=True)
            metrics |= {f"alpaca_eval/{contest}/{name}": value for name, value in values.items()}
    for policy, answers in result.questions.items():
        for name, shares in question_figures(answers).items():
            values = shares.model_dump(exclude_none=True)
            metrics |= {f"questions/{policy}/{name}/{key}": value for key, value in values.items()}
    if result.implicit_reward is not None:
        for name, value in accuracy_metrics(result.implicit_reward).items():
            metrics[name.replace("accuracy", "implicit_reward", 1)] = value
    return metrics


def contest_metrics(contest: ContestFigures) -> Metrics:
    """The numbers of a contest."""
    metrics = contest.model_dump()
    single = metrics.pop("single_order")
    return metrics | {f"single_order/{name}": value for name, value in single.items()}


def question_figures(result: QuestionResult) -> dict[str, QuestionFigures]:
    """A policy's figures by set, over all questions, and as means over the sets."""
    return {**result.sets, "all": result.all, "mean": result.mean}


def _answer_lengths(answers: Sequence[Mapping[str, Any]]) -> Metrics:
    """Mean lengths of the policies' answers (characters)."""
    policies = ("aligned", "base") if answers else ()
    return {
        f"answers/{policy}_characters": float(np.mean([len(row[policy]["text"]) for row in answers]))
        for policy in policies
    }


def cost_metrics(records: Sequence[StepRecord]) -> Metrics:
    """Steps, time (seconds) and bytes (MB) of all clients over all rounds."""
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
    metrics = {
        "cost/client_steps": steps,
        "cost/train_seconds": seconds,
        "cost/aggregation_seconds": sum(record.aggregation_seconds for record in records) / rounds,
        "cost/sent_mb": sent / 1e6,
    }
    if any(kept_bytes.values()):
        metrics["cost/kept_mb"] = float(np.mean(list(kept_bytes.values()))) / 1e6
    return metrics


def base_metrics(metrics: Mapping[str, float]) -> Metrics:
    """The numbers of what the base policy writes, under the names of the aligned policy's."""
    return {
        name.replace("base", "aligned", 1): value
        for name, value in metrics.items()
        if name.startswith(("rouge/base/", "questions/base/")) or name == "answers/base_characters"
    }


def mean_metrics(runs: Mapping[int, Mapping[str, float]]) -> Metrics:
    """Means over the seeds that have a metric, of an arm."""
    names = set[str]().union(*runs.values())
    values = {name: [run[name] for run in runs.values() if name in run] for name in sorted(names)}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
