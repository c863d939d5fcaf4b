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
from components.config import Recipe
from components.config.local_objectives import implicit_reward_scale
from components.evaluation.contests import Contest
from components.evaluation.diagnostics.diagnostic import Summary
from components.federation.method import method_of
from components.results import (
    AccuracyReport,
    AccuracySummary,
    AlignmentResult,
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
    """A short name of a metric in benchmark files, and its label in tables."""

    metrics: tuple[str, ...]  # its names, of which the first one that a run has counts
    label: str  # heading of its column
    is_exact: bool = False  # it is counted and not estimated: one seed is enough for a claim on it


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
    contest, is_contest, figure = name.partition("/")
    if is_contest and "_vs_" in contest:
        return Alias((name,), f"{figure}, {contest.replace('_vs_', ' against ')}".replace("_", " "))
    return Alias((name,), name)


def named(metrics: Mapping[str, Any], name: str) -> Any:
    """What belongs to a metric or alias in a mapping by metric; None if it is not there."""
    return next((metrics[metric] for metric in alias_of(name).metrics if metric in metrics), None)


def values_of(runs: Mapping[int, Mapping[str, Any]], name: str) -> list[Any]:
    """What belongs to a metric or alias in the runs by seed that have it."""
    return [value for run in runs.values() if (value := named(run, name)) is not None]


@dataclass(frozen=True)
class RunResults:
    """All results of a finished run."""

    recipe: Recipe
    federation: FederationResult
    alignment: AlignmentResult
    evaluation: EvaluationResult
    answers: Sequence[Mapping[str, Any]]  # rows of answers.json: prompt, references, both policies' texts
    diagnostics: Mapping[str, Summary] = field(default_factory=dict)  # by name of the diagnostic
    contests: Mapping[str, Contest] = field(default_factory=dict)  # verdicts of its own contests, by name

    @cached_property
    def metrics(self) -> Metrics:
        """Every finite number of the run, by name."""
        federation, curve = self.federation, self.curve
        metrics = flatten({moment: evaluation_metrics(one) for moment, one in self.moments.items()})
        if federation.best is not None:
            metrics["best/round"] = federation.best.rounds_done
        metrics |= {f"largest/accuracy/{name}/mean": one.mean for name, one in largest(federation).items()}
        if curve:
            metrics |= {"after/reward": curve[-1]["reward"], "after/reward_margin": curve[-1]["margin"]}
            metrics["largest/reward"] = max(point["reward"] for point in curve)
        metrics |= flatten({"align": self.alignment.metrics}) | result_metrics(self.evaluation)
        for policy in ("aligned", "base") if self.answers else ():
            lengths = [len(row[policy]["text"]) for row in self.answers]
            metrics[f"answers/{policy}_characters"] = float(np.mean(lengths))
        metrics |= flatten({name: summary.figures for name, summary in self.diagnostics.items()})
        metrics |= cost_metrics(federation.records)
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

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
        """See reward_curve."""
        return [] if self.scale is None else reward_curve(self.federation, self.scale)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Metrics:
    """Numbers of nested mappings by the path of their keys; None is left out."""
    metrics: Metrics = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            metrics |= flatten(value, f"{prefix}{name}/")
        elif value is not None:
            metrics[prefix + name] = value
    return metrics


def accuracy_metrics(accuracy: AccuracyReport) -> Metrics:
    """Held-out accuracy as metrics: of the majority, and of the clients' assigned adapters."""
    reports = {"accuracy": accuracy, "accuracy_assigned": accuracy.assigned}
    return flatten({name: _report_figures(one) for name, one in reports.items() if one is not None})


def _report_figures(report: AccuracyReport) -> dict[str, Any]:
    unnamed = "" if "all" in report.domains else "all"
    return {
        **_summary_figures(report),
        **{"margin": report.margin, "reward": report.reward},
        "domain": {domain or unnamed: value for domain, value in report.domains.items()},
        **{name: _summary_figures(summary) for name, summary in report.by_metric.items()},
    }


def _summary_figures(summary: AccuracySummary) -> dict[str, float]:
    return {name: getattr(summary, name) for name in ("mean", "worst", "best", "spread")}


def evaluation_metrics(evaluation: RoundEvaluation) -> Metrics:
    """An evaluation between two rounds, as metrics."""
    measures = {name: measure.scalars for name, measure in evaluation.measures.items()}
    return accuracy_metrics(evaluation.accuracy) | flatten(measures)


def largest(federation: FederationResult) -> dict[str, AccuracySummary]:
    """The largest accuracies by log-likelihood, where some were measured between the rounds."""
    if federation.best is None:
        return {}
    measured = [evaluation.accuracy.by_metric for evaluation in federation.evaluations[1:]]
    return {
        name: max((by_metric[name] for by_metric in measured), key=lambda summary: summary.mean)
        for name in ("summed", "per_token")
        if name in federation.after.accuracy.by_metric
    }


def reward_curve(federation: FederationResult, beta: float) -> list[Point]:
    """Implicit reward of the chosen completions, its margin, and accuracies, by the rounds done.

    As in DRIFT section 7.1, figures 6 and 7, and FedPDPO figures 3 and 4. Empty where selectors
    were trained, which have no implicit reward; beta is its scale.
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
    judge = {name.removeprefix("judge_"): value for name, value in result.judge_figures.items()}
    if "accuracy/" in judge and "accuracy/all" not in judge:  # of pairs without a domain
        judge["accuracy/all"] = judge.pop("accuracy/")
    contests = {name: figures.model_dump() for name, figures in result.contests.items()}
    alpaca = {} if result.alpaca_eval is None else result.alpaca_eval.contests
    questions = {
        policy: {name: figures.model_dump() for name, figures in question_figures(answers).items()}
        for policy, answers in result.questions.items()
    }
    metrics = flatten(
        {
            "answers": result.answers,
            "judge": judge,
            **contests,
            "rouge": result.rouge,
            "alpaca_eval": {name: contest.figures.model_dump() for name, contest in alpaca.items()},
            "questions": questions,
        }
    )
    if result.implicit_reward is not None:
        for name, value in accuracy_metrics(result.implicit_reward).items():
            metrics[name.replace("accuracy", "implicit_reward", 1)] = value
    return metrics


def question_figures(result: QuestionResult) -> dict[str, QuestionFigures]:
    """A policy's figures by set, over all questions, and as means over the sets."""
    return {**result.sets, "all": result.all, "mean": result.mean}


def cost_metrics(records: Sequence[StepRecord]) -> Metrics:
    """Steps, time (seconds) and bytes (MB) of all clients over all rounds."""
    updates = [update for record in records for update in record.clients.values()]
    ends = [record.clients for record in records if record.ends_round]
    kept = {name: update.traffic.kept for clients in ends for name, update in clients.items()}
    steps = [update.metrics.scalars.get("steps", 0.0) for clients in ends for update in clients.values()]
    metrics = {
        "cost/client_steps": sum(steps, 0.0),
    }
    aggregations = [one.aggregation_seconds for one in records if one.aggregation_seconds is not None]
    if aggregations:  # unknown of a result that was pulled with DVC
        train = sum((one.metrics.scalars.get("seconds", 0.0) for one in updates), 0.0)
        metrics["cost/train_seconds"] = train
        metrics["cost/aggregation_seconds"] = sum(aggregations) / len({record.round for record in records})
    metrics["cost/sent_mb"] = sum(update.traffic.sent for update in updates) / 1e6
    if any(kept.values()):
        metrics["cost/kept_mb"] = float(np.mean(list(kept.values()))) / 1e6
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
