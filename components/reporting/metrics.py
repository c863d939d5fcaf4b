"""Every number of a run under one name: in MLflow, metrics.json, reports, claims and `fed-rlhf runs`.

A name is a path: `after/accuracy/worst` is the worst client's accuracy after the rounds,
`aligned_vs_base/ties_half` the win rate against the base policy with ties as 1/2. `before/`, `after/`
and `best/` say when it was measured; `largest/` is the largest value over the measured rounds, `cost/`
is over all rounds and clients. `unseen/` is of clients that took part in no round. What a round or a
step logs over time has the same name without the moment.

Benchmark files may name a metric by an alias (ALIASES), which also has its label in tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from components.config import Recipe
from components.config.local_objectives import implicit_reward_scale
from components.evaluation.charts import Point
from components.evaluation.contests import Contest
from components.evaluation.diagnostics.diagnostic import Summary
from components.evaluation.winrate import Verdict
from components.results import (
    AccuracyReport,
    AccuracySummary,
    AlignmentResult,
    EvaluationResult,
    FederationResult,
    PrivacySpent,
    QuestionFigures,
    QuestionResult,
    RoundEvaluation,
    StepRecord,
    UnseenResult,
)

Metrics = dict[str, float]
"""Numbers by name."""
MetricsByArm = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Numbers by name, by arm and seed."""


CONTESTS = {
    "aligned_vs_base": "aligned against base policy",
    "aligned_vs_human": "aligned against {answers_author}",
    "base_vs_human": "base against {answers_author}",
}
"""Labels of a run's contests, by name."""


@dataclass(frozen=True)
class Alias:
    """A short name of a metric in benchmark files, and its label in tables."""

    metrics: tuple[str, ...]  # its names, of which the first one that a run has counts
    label: str  # heading of its column
    is_exact: bool = False  # it is counted and not estimated: one seed is enough for a claim on it


def _assigned(domain: str) -> tuple[str, ...]:
    return tuple(f"after/{kind}/domain/{domain}" for kind in ("accuracy_assigned", "accuracy"))


def _of_policy(metric: str) -> tuple[str, ...]:
    """Of the aligned policy; where the clients have trained it, of the rounds."""
    return f"implicit_reward/{metric}/mean", f"after/accuracy/{metric}/mean"


ALIASES: Mapping[str, Alias] = {
    "common": Alias(("after/accuracy/domain/common",), "common taste"),
    "common_assigned": Alias(_assigned("common"), "common taste, own adapter"),
    "own": Alias(("after/accuracy/domain/own",), "own taste"),
    "own_assigned": Alias(_assigned("own"), "own taste, own adapter"),
    "accuracy": Alias(("after/accuracy/mean",), "pair accuracy"),
    "worst": Alias(("after/accuracy/worst",), "worst client"),
    "worst_tenth": Alias(("after/accuracy/worst_tenth",), "worst 10% of clients"),
    "jain": Alias(("after/accuracy/jain",), "Jain's index of pair accuracy"),
    "unseen": Alias(("unseen/accuracy/mean",), "clients in no round"),
    "unseen_worst_tenth": Alias(("unseen/accuracy/worst_tenth",), "worst 10% of clients in no round"),
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
    "implicit_reward": Alias(("implicit_reward/mean",), "policy's accuracy by implicit reward"),
    "policy_summed": Alias(_of_policy("summed"), "policy's accuracy by log-likelihood"),
    "policy_per_token": Alias(_of_policy("per_token"), "policy's accuracy per token"),
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
tokens or by their means; the policy's is that of the aligned policy, on the pairs of
evaluation.preference_pairs. MB sent are of all clients over all rounds; kept is what never leaves a
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
    answers_author: str = "human text"  # of the references of the held-out prompts

    @cached_property
    def metrics(self) -> Metrics:
        """Every finite number of the run, by name."""
        federation, curve = self.federation, self.curve
        metrics = flatten({moment: evaluation_metrics(one) for moment, one in self.moments.items()})
        if federation.unseen is not None:
            metrics |= unseen_metrics(federation.unseen)
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
        metrics |= cost_metrics(federation.records) | privacy_metrics(federation.privacy)
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
        return implicit_reward_scale(self.recipe.federation.options.local().objective)

    @property
    def curve(self) -> list[Point]:
        """Implicit reward of the chosen completions, its margin, and accuracies, by the rounds done.

        As in DRIFT section 7.1, figures 6 and 7, and FedPDPO figures 3 and 4. Empty where selectors were
        trained, which have no implicit reward.
        """
        curve: list[Point] = []
        for evaluation in self.federation.comparable:
            accuracy = evaluation.accuracy
            if accuracy.reward is not None and self.scale is not None:
                numbers = {"round": evaluation.rounds_done, "reward": self.scale * accuracy.reward}
                numbers |= {"margin": self.scale * accuracy.margin, "accuracy": accuracy.mean}
                curve.append(numbers | {name: one.mean for name, one in accuracy.by_metric.items()})
        return curve

    @property
    def contest_labels(self) -> dict[str, str]:
        """Labels of its contests, by name."""
        own = {name: label for name, label in CONTESTS.items() if name in self.evaluation.contests}
        return {name: label.format(answers_author=self.answers_author) for name, label in own.items()}


def verdict_words(verdict: Verdict, contest: str) -> str:
    """Who wrote the better answer by a verdict on a contest with the label 'ours against theirs'."""
    ours, _, theirs = contest.partition(" against ")
    return {Verdict.FIRST: ours, Verdict.SECOND: theirs}.get(verdict, verdict.value)


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
    figures = {}
    for name, report in {"accuracy": accuracy, "accuracy_assigned": accuracy.assigned}.items():
        if report is not None:
            unnamed = "" if "all" in report.domains else "all"
            figures[name] = {
                **_summary_figures(report),
                **{"margin": report.margin, "reward": report.reward},
                "domain": {domain or unnamed: value for domain, value in report.domains.items()},
                **{name: _summary_figures(summary) for name, summary in report.by_metric.items()},
            }
    return flatten(figures)


def _summary_figures(summary: AccuracySummary) -> dict[str, float]:
    names = ("mean", "worst", "best", "spread", "worst_tenth", "jain")
    return {name: getattr(summary, name) for name in names}


def evaluation_metrics(evaluation: RoundEvaluation) -> Metrics:
    """An evaluation between two rounds, as metrics."""
    measures = {name: measure.scalars for name, measure in evaluation.measures.items()}
    return accuracy_metrics(evaluation.accuracy) | flatten(measures)


def unseen_metrics(unseen: UnseenResult) -> Metrics:
    """Accuracy of clients that took part in no round, as metrics."""
    return flatten({"unseen": accuracy_metrics(unseen.accuracy)})


def largest(federation: FederationResult) -> dict[str, AccuracySummary]:
    """The largest accuracies by log-likelihood, where some were measured between the rounds."""
    if federation.best is None:
        return {}
    measured = [evaluation.accuracy.by_metric for evaluation in federation.comparable[1:]]
    return {
        name: max((by_metric[name] for by_metric in measured), key=lambda summary: summary.mean)
        for name in ("summed", "per_token")
        if name in federation.after.accuracy.by_metric
    }


def result_metrics(result: EvaluationResult) -> Metrics:
    """The numbers of the phase evaluate."""
    judge = {name.removeprefix("judge_"): value for name, value in result.judge_figures.items()}
    if "accuracy/" in judge and "accuracy/all" not in judge:  # of pairs without a domain
        judge["accuracy/all"] = judge.pop("accuracy/")
    alpaca = {} if result.alpaca_eval is None else result.alpaca_eval.contests
    questions = {
        policy: {name: figures.model_dump() for name, figures in question_figures(answers).items()}
        for policy, answers in result.questions.items()
    }
    metrics = flatten({"answers": result.answers, "judge": judge})
    metrics |= flatten({name: figures.model_dump() for name, figures in result.contests.items()})
    metrics |= flatten({"rouge": result.rouge})
    metrics |= flatten({"alpaca_eval": {name: one.figures.model_dump() for name, one in alpaca.items()}})
    metrics |= flatten({"questions": questions})
    if result.implicit_reward is not None:
        for name, value in accuracy_metrics(result.implicit_reward).items():
            metrics[name.replace("accuracy", "implicit_reward", 1)] = value
    return metrics


def question_figures(result: QuestionResult) -> dict[str, QuestionFigures]:
    """A policy's figures by set, over all questions, and as means over the sets."""
    return {**result.sets, "all": result.all, "mean": result.mean}


def cost_metrics(records: Sequence[StepRecord]) -> Metrics:
    """Steps, time (seconds) and bytes (MB) of all clients over all rounds."""
    ends = [record for record in records if record.ends_round]
    metrics = {"cost/client_steps": sum((record.scalar_sum("steps") for record in ends), 0.0)}
    aggregations = [one.aggregation_seconds for one in records if one.aggregation_seconds is not None]
    if aggregations:  # unknown of a result that was pulled with DVC
        metrics["cost/train_seconds"] = sum((record.scalar_sum("seconds") for record in records), 0.0)
        metrics["cost/aggregation_seconds"] = sum(aggregations) / len({record.round for record in records})
    sent = sum(update.traffic.sent for record in records for update in record.updates)
    metrics["cost/sent_mb"] = sent / 1e6
    kept: dict[str, float] = {}
    for record in ends:
        kept |= {name: client.traffic.kept for name, client in record.clients.items()}
        if record.total is not None:
            kept[""] = record.total.traffic.kept / record.total.clients
    if any(kept.values()):
        metrics["cost/kept_mb"] = float(np.mean(list(kept.values()))) / 1e6
    return metrics


def privacy_metrics(spent: PrivacySpent | None) -> Metrics:
    """Epsilon and delta; none where nothing is protected, or secrets are simulated."""
    if spent is None or spent.epsilon is None:
        return {}
    return {"privacy/epsilon": spent.epsilon, "privacy/delta": spent.delta}


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
