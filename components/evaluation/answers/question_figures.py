"""Accuracy and success rate of answered questions, with intervals and the rates by chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.evaluation.answers.answered_questions import AnsweredQuestion
from components.evaluation.winrate import bootstrap_interval
from components.results import QuestionFigures, QuestionResult
from components.seeding import derive


def answer_figures(rows: Sequence[AnsweredQuestion], resamples: int, seed: int) -> QuestionResult:
    """Compute the accuracy and the success rate of a policy.

    Args:
        rows: answered questions; at least one.
        resamples, seed: of the bootstrap intervals.
    """
    names = sorted({row["set"] for row in rows})
    sets = {
        name: _figures([row for row in rows if row["set"] == name], resamples, derive(seed, name))
        for name in names
    }
    samples = len(rows[0]["samples"])
    return QuestionResult(
        samples=samples,
        sets=sets,
        all=_figures(rows, resamples, derive(seed, "")),
        mean=_mean(list(sets.values())),
    )


def _mean(figures: Sequence[QuestionFigures]) -> QuestionFigures:
    """Unweighted mean of the shares over sets."""
    success = [one.success for one in figures if one.success is not None]
    success_chance = [one.success_chance for one in figures if one.success_chance is not None]
    return QuestionFigures(
        accuracy=float(np.mean([one.accuracy for one in figures])),
        chance=float(np.mean([one.chance for one in figures])),
        unparsable_share=float(np.mean([one.unparsable_share for one in figures])),
        success=float(np.mean(success)) if success else None,
        success_chance=float(np.mean(success_chance)) if success_chance else None,
    )


def _figures(rows: Sequence[AnsweredQuestion], resamples: int, seed: int) -> QuestionFigures:
    right = [row["answer"] == row["key"] for row in rows]
    unparsable = sum(row["answer"] is None for row in rows)
    chance = np.array([1 / len(row["options"]) for row in rows])
    low, high = bootstrap_interval(right, resamples, seed)
    figures = QuestionFigures(
        accuracy=sum(right) / len(rows),
        chance=float(chance.mean()),
        unparsable_share=unparsable / len(rows),
        low=low,
        high=high,
        questions=len(rows),
        right=sum(right),
        unparsable=unparsable,
        cut=sum(row["cut"] for row in rows),
    )
    samples = len(rows[0]["samples"])
    return _add_success(figures, rows, samples, resamples, seed) if samples else figures


def _add_success(
    figures: QuestionFigures, rows: Sequence[AnsweredQuestion], samples: int, resamples: int, seed: int
) -> QuestionFigures:
    """The figures with the success rate of so many sampled answers."""
    chance = np.array([1 / len(row["options"]) for row in rows])
    succeeded = [any(sample["answer"] == row["key"] for sample in row["samples"]) for row in rows]
    success_low, success_high = bootstrap_interval(succeeded, resamples, derive(seed, "success"))
    return figures.model_copy(
        update={
            "succeeded": sum(succeeded),
            "success": sum(succeeded) / len(rows),
            "success_chance": float(np.mean(1 - (1 - chance) ** samples)),
            "success_low": success_low,
            "success_high": success_high,
        }
    )
