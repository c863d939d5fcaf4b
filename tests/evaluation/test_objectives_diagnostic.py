"""The diagnostic of several objectives: rewards, weights, disagreement, the point in a front."""

import pytest

from components.evaluation.diagnostics.base import DiagnosedRun, Summary
from components.evaluation.diagnostics.objectives import (
    ObjectivesData,
    ObjectivesDiagnostic,
    plot_objectives,
    plot_weights,
    rewards_curve,
    weight_curves,
)
from tests.support.diagnostics import RecordingSink
from tests.support.plots import drawn_figure
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
    "helpful": {"a": [(0.5, 0.5), (1.0, 0.0)], "b": [(2.0, 0.5)]},
    "clean": {"a": [(0.5, 0.5), (1.0, 1.0)], "b": [(2.0, 0.5)]},
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


def test_the_figures_are_the_rewards_after_the_rounds_and_their_mean(summary):
    assert summary.figures["reward:helpful"] == 1.0
    assert summary.figures["reward:clean"] == 3.0
    assert summary.figures["mean_reward"] == 2.0
    assert summary.figures["sampled_kl"] == 3.0


def test_the_disagreement_of_the_clients_is_the_mean_over_rounds(summary):
    assert summary.figures["lambda_drift"] == pytest.approx(0.3)
    assert summary.figures["mean_lambda_drift"] == pytest.approx(0.2)
    assert summary.figures["update_drift"] == 2.0


def test_the_runs_point_in_a_front_has_its_scores_those_of_the_base_policy_and_its_preferences(summary):
    assert summary.front.scores == {"helpful": 1.0, "clean": 3.0}
    assert summary.front.base_scores == {"helpful": 0.5, "clean": 2.5}
    assert summary.front.preferences == {"helpful": 1.0, "clean": 9.0}


def test_all_figures_of_named_numbers_have_a_label(summary):
    own = {name for name in summary.figures if not name.startswith("reward:")}
    assert own == ObjectivesDiagnostic.figure_labels.keys()


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


def test_a_run_is_logged_with_a_plot_of_its_rewards_and_one_of_its_weights(result):
    sink = RecordingSink()
    ObjectivesDiagnostic().log_result(result, RUN, sink)
    assert sink.plots == ["federation/objectives.png", "federation/weights.png"]
    assert sink.metrics == {}


CURVE = [{"round": 0, "KL (nats)": 0.0, "reward, helpful": 0.5}, {"round": 2, "KL (nats)": 3.0}]


@pytest.mark.slow
def test_the_benchmark_has_the_rewards_of_all_seeds_and_the_weights_of_the_first(tmp_path):
    summary = Summary(data=ObjectivesData(CURVE, {"helpful": WEIGHTS["helpful"]}))
    summaries = {"FIRM": {1: summary, 2: summary}, "other": {2: summary}}
    images = ObjectivesDiagnostic().plot_benchmark(summaries, tmp_path)
    assert all(image.path.is_file() for image in images)
    assert [image.path.name for image in images] == ["objectives.png", "weights.png"]
    assert images[1].title.endswith("seed 1")


@pytest.mark.slow
def test_the_plot_of_rewards_has_a_panel_for_each_number_and_a_line_for_each_arm(tmp_path):
    curves = {"FIRM": {0: CURVE, 1: CURVE}, "other": {0: CURVE[:1]}}
    figure = drawn_figure(lambda: plot_objectives(curves, tmp_path / "objectives.png"))
    assert [axes.get_title() for axes in figure.axes] == ["KL (nats)", "reward, helpful"]
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["FIRM", "other"]


def test_the_plot_of_weights_has_a_line_for_each_client(tmp_path):
    figure = drawn_figure(lambda: plot_weights({"FIRM": WEIGHTS}, tmp_path / "weights.png"))
    assert [axes.get_title() for axes in figure.axes] == ["FIRM: helpful", "FIRM: clean"]
    assert [len(axes.get_lines()) for axes in figure.axes] == [2, 2]
