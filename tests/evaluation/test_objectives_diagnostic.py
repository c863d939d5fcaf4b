"""The diagnostic of several objectives: rewards, weights, disagreement, the point in a front."""

import pytest

from components.evaluation.diagnostics.diagnostic import DiagnosedRun, Summary
from components.evaluation.diagnostics.objective_figures import (
    ObjectivesDiagnostic,
    rewards_curve,
    weight_curves,
)
from tests.support.results import client_record, federation_result, round_evaluation, step_record

BEFORE = {
    "helpful": 0.5,
    "clean": 2.5,
    "kl": 0.0,
    "prompts": 8.0,
}
AFTER = {
    "helpful": 1.0,
    "clean": 3.0,
    "kl": 3.0,
    "prompts": 8.0,
}
GRADIENTS = step_record(
    0, {"a": client_record({"seconds": 1.0})}, rounds_done=0, server={"lambda/helpful": 0.5}
)
FIRST = step_record(
    0,
    {
        "a": client_record(
            series={
                "lambda/helpful": [0.5, 0.0],
                "lambda/clean": [0.5, 1.0],
                "loss": [1.0],
            }
        )
    },
    server={
        "lambda_drift": 0.2,
        "mean_lambda_drift": 0.1,
        "update_drift": 1.0,
    },
)
SECOND = step_record(
    1,
    {"b": client_record(series={"lambda/helpful": [0.5], "lambda/clean": [0.5]})},
    server={
        "lambda_drift": 0.4,
        "mean_lambda_drift": 0.3,
        "update_drift": 3.0,
    },
)
RUN = DiagnosedRun("FIRM", 0, {}, {"helpful": 1.0, "clean": 9.0})
WEIGHTS = {
    "helpful": [("a", 0.5, 0.5), ("a", 1.0, 0.0), ("b", 2.0, 0.5)],
    "clean": [("a", 0.5, 0.5), ("a", 1.0, 1.0), ("b", 2.0, 0.5)],
}


@pytest.fixture(scope="module")
def result():
    """Two rounds, measured before the first and after the last one."""
    return federation_result(
        records=[GRADIENTS, FIRST, SECOND],
        evaluations=[
            round_evaluation(0, measures={"rewards": BEFORE}),
            round_evaluation(2, measures={"rewards": AFTER}),
        ],
    )


@pytest.fixture(scope="module")
def summary(result):
    return ObjectivesDiagnostic().summarize(result, RUN)


def test_the_summary_has_the_mean_reward_the_disagreement_of_clients_and_a_point_in_a_front(summary):
    assert summary.figures["mean_reward"] == 2.0
    assert summary.figures["lambda_drift"] == pytest.approx(0.3)
    assert summary.figures["mean_lambda_drift"] == pytest.approx(0.2)
    assert summary.figures["update_drift"] == 2.0
    assert summary.front.scores == {"helpful": 1.0, "clean": 3.0}
    assert summary.front.base_scores == {"helpful": 0.5, "clean": 2.5}
    assert summary.front.preferences == {"helpful": 1.0, "clean": 9.0}


def test_rewards_are_followed_where_they_were_measured_and_the_disagreement_after_each_round(result):
    assert rewards_curve(result) == [
        {
            "round": 0,
            "reward, helpful": 0.5,
            "reward, clean": 2.5,
            "KL (nats)": 0.0,
        },
        {
            "round": 1,
            "distance of clients' weights": 0.2,
            "distance of clients' updates": 1.0,
        },
        {
            "round": 2,
            "reward, helpful": 1.0,
            "reward, clean": 3.0,
            "KL (nats)": 3.0,
            "distance of clients' weights": 0.4,
            "distance of clients' updates": 3.0,
        },
    ]


def test_weights_are_followed_by_objective_client_and_local_step(result):
    assert weight_curves(result) == WEIGHTS


def titles_of(charts):
    return [chart.layout.title.text for chart in charts]


def test_the_report_of_a_run_has_its_rewards_its_disagreement_and_its_weights(result):
    assert titles_of(ObjectivesDiagnostic().run_charts(result, RUN)) == [
        "Reward, helpful",
        "Reward, clean",
        "KL (nats)",
        "Distance of clients' weights",
        "Distance of clients' updates",
        "FIRM, seed 0: weight of helpful",
        "FIRM, seed 0: weight of clean",
    ]


CURVE = [{"round": 0, "KL (nats)": 0.0, "reward, helpful": 0.5}, {"round": 2, "KL (nats)": 3.0}]


def test_a_benchmark_has_the_rewards_of_all_seeds_and_the_weights_of_clients_in_the_first():
    summary = Summary(data=(CURVE, {"helpful": WEIGHTS["helpful"]}))
    summaries = {"FIRM": {1: summary, 2: summary}, "other": {2: summary}}
    charts = ObjectivesDiagnostic().benchmark_charts(summaries)
    assert titles_of(charts) == ["KL (nats)", "Reward, helpful", "FIRM, seed 1: weight of helpful"]
    assert [trace.name for trace in charts[0].data if trace.name] == ["FIRM", "other"]
    charts = ObjectivesDiagnostic().benchmark_charts({"FIRM": {0: Summary(data=([], WEIGHTS))}})
    assert titles_of(charts) == ["FIRM, seed 0: weight of helpful", "FIRM, seed 0: weight of clean"]
    assert [[trace.name for trace in chart.data] for chart in charts] == [["a", "b"], ["a", "b"]]
