"""Results of a run as metrics by name."""

from __future__ import annotations

from components.results import AccuracyReport, QuestionFigures, QuestionResult, RoundEvaluation


def accuracy_metrics(accuracy: AccuracyReport) -> dict[str, float]:
    """Held-out accuracy as metrics: of the majority, and of the clients' assigned adapters."""
    metrics = _accuracy_metrics("accuracy", accuracy)
    if accuracy.assigned is not None:
        metrics |= _accuracy_metrics("accuracy_assigned", accuracy.assigned)
    return metrics


def _accuracy_metrics(prefix: str, accuracy: AccuracyReport) -> dict[str, float]:
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


def evaluation_metrics(evaluation: RoundEvaluation) -> dict[str, float]:
    """An evaluation between two rounds, as metrics."""
    metrics = accuracy_metrics(evaluation.accuracy)
    for name, measure in evaluation.measures.items():
        metrics |= {f"{name}/{key}": value for key, value in measure.scalars.items()}
    return metrics


def question_figures(result: QuestionResult) -> dict[str, QuestionFigures]:
    """A policy's figures by set, over all questions, and as means over the sets."""
    return {**result.sets, "all": result.all, "mean": result.mean}
