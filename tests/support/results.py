"""Results of a run's phases with default numbers, of which a test sets those that it is about."""

from __future__ import annotations

from typing import Any

from components.config import Recipe
from components.reporting.metrics import RunResults
from components.results import (
    AccuracyReport,
    AlignmentResult,
    ClientRecord,
    EvaluationResult,
    FederationResult,
    Metrics,
    Outcome,
    QuestionFigures,
    QuestionResult,
    RoundEvaluation,
    StepRecord,
    Traffic,
)


def accuracy_report(**values: Any) -> AccuracyReport:
    """An accuracy over two clients."""
    defaults: dict[str, Any] = {
        "mean": 0.6,
        "worst": 0.4,
        "best": 0.8,
        "clients": {"ada": 0.4, "bea": 0.8},
        "domains": {"common": 0.9, "own": 0.5},
        "pairs": 20,
        "margin": 0.1,
        "margins": {"ada": 0.1, "bea": 0.1},
    }
    return AccuracyReport(**defaults | values)


def round_evaluation(rounds_done: int, **values: Any) -> RoundEvaluation:
    """A measurement after so many rounds; values are those of its accuracy, apart from `measures`."""
    measures = {name: Metrics(scalars=scalars) for name, scalars in values.pop("measures", {}).items()}
    return RoundEvaluation(rounds_done=rounds_done, accuracy=accuracy_report(**values), measures=measures)


def client_record(
    scalars: dict[str, float] | None = None,
    series: dict[str, list[float]] | None = None,
    losses: list[float] | None = None,
    **traffic: int,
) -> ClientRecord:
    """What a client did in a step; traffic in bytes (received, sent, kept)."""
    return ClientRecord(
        adapter_name="adapter",
        rows=8,
        losses=losses or [],
        metrics=Metrics(scalars=scalars or {}, series=series or {}),
        traffic=Traffic(**traffic),
    )


def step_record(
    round_index: int = 0, clients: dict[str, ClientRecord] | None = None, **values: Any
) -> StepRecord:
    """A committed step that ends its round; values are other fields, `server` its scalars."""
    defaults: dict[str, Any] = {
        "step": round_index + 1,
        "round": round_index,
        "phase": "train",
        "rounds_done": round_index + 1,
        "logged_at": round_index + 1,
        "clients": clients or {},
        "failed": {},
        "refused": {},
        "adapters": {},
        "memory": {},
        "aggregation_seconds": 0.0,
    }
    server = Metrics(scalars=values.pop("server", {}))
    return StepRecord(**defaults | values, server=server)


def federation_result(**values: Any) -> FederationResult:
    """Rounds of a method without anything of its own."""
    defaults: dict[str, Any] = {
        "outcome": Outcome(),
        "rounds": 1,
        "records": [step_record()],
        "evaluations": [round_evaluation(0), round_evaluation(1)],
        "adapters": {},
        "diagnostics": [],
    }
    return FederationResult(**defaults | values)


def alignment_result(**values: Any) -> AlignmentResult:
    """A single aligned policy."""
    defaults: dict[str, Any] = {
        "policy": Outcome(folder="final"),
        "reference": "base",
        "metrics": {},
    }
    return AlignmentResult(**defaults | values)


def evaluation_result(**values: Any) -> EvaluationResult:
    """An evaluation without contests."""
    defaults: dict[str, Any] = {
        "answers": {},
        "judge": "a judge",
        "judge_figures": {},
        "contests": {},
        "rouge": {"aligned": {}, "base": {}},
    }
    return EvaluationResult(**defaults | values)


def run_results(recipe: Recipe, **values: Any) -> RunResults:
    """All results of a run of a recipe."""
    defaults: dict[str, Any] = {
        "federation": federation_result(),
        "alignment": alignment_result(),
        "evaluation": evaluation_result(),
        "answers": [],
    }
    return RunResults(recipe, **defaults | values)


def question_result(
    accuracy: float, success: float | None = None, *, total: float | None = None
) -> QuestionResult:
    """Answers to questions of one set: the mean over the sets, and the accuracy over all questions."""
    mean = QuestionFigures(
        accuracy=accuracy, chance=0.25, unparsable_share=0.1, success=success, success_chance=0.4
    )
    every = QuestionFigures(
        accuracy=accuracy if total is None else total,
        chance=0.25,
        unparsable_share=0.1,
        low=0.2,
        high=0.9,
        questions=10,
        right=5,
        unparsable=1,
        cut=0,
    )
    return QuestionResult(samples=0 if success is None else 5, sets={"csqa": every}, all=every, mean=mean)
