"""The figures of a run: what they are computed from, and when they are missing."""

import pytest

from components.benchmarks import REWARD_PREFIX
from components.reporting.figures import (
    FIGURES,
    all_figure_labels,
    answer_figures,
    effort_figures,
    figure_label,
    mean_figures,
    reward_curve,
    run_figures,
)
from components.results import AccuracySummary
from tests.support.results import (
    accuracy_report,
    alignment_result,
    client_record,
    evaluation_result,
    federation_result,
    question_result,
    round_evaluation,
    step_record,
)


def summary(mean, worst):
    return AccuracySummary(mean=mean, worst=worst, best=1.0, clients={})


TRAINED = step_record(
    clients={
        "ada": client_record({"seconds": 2.0, "steps": 8}, sent=1_000_000, kept=0),
        "bea": client_record({"seconds": 3.0, "steps": 8}, sent=1_000_000, kept=0),
    },
    aggregation_seconds=0.02,
)


def figures_of(federation=None, alignment=None, evaluation=None, curve=(), answers=()):
    return run_figures(
        federation or federation_result(records=[TRAINED]),
        alignment or alignment_result(),
        evaluation or evaluation_result(),
        list(answers),
        list(curve),
    )


def test_accuracies_are_those_of_tastes_after_the_rounds():
    figures = figures_of()
    assert figures["common"] == 0.9
    assert figures["own"] == 0.5
    assert figures["worst"] == 0.4


def test_accuracies_of_assigned_adapters_are_their_own_figures():
    assigned = accuracy_report(worst=0.6, domains={"common": 0.8, "own": 0.7})
    evaluations = [round_evaluation(0), round_evaluation(1, assigned=assigned)]
    figures = figures_of(federation_result(records=[TRAINED], evaluations=evaluations))
    assert figures["common"] == 0.9
    assert figures["common_assigned"] == 0.8
    assert figures["own_assigned"] == 0.7


def test_a_method_with_one_adapter_has_the_same_accuracy_with_the_assigned_one():
    figures = figures_of()
    assert figures["common_assigned"] == figures["common"]
    assert figures["own_assigned"] == figures["own"]


def test_figures_of_the_other_phases_are_taken_from_their_results():
    evaluation = evaluation_result(
        rouge={"aligned": {"rougeLsum": 0.2}}, implicit_reward=accuracy_report(mean=0.55)
    )
    figures = figures_of(alignment=alignment_result(metrics={"kl_sequence": 1.5}), evaluation=evaluation)
    assert figures["kl"] == 1.5
    assert figures["implicit_reward"] == 0.55
    assert figures["rougeLsum"] == 0.2


def test_figures_that_a_run_does_not_have_are_missing():
    missing = {"kl", "implicit_reward", "rougeLsum", "answer_accuracy", "success", "characters", "margin"}
    assert not missing & figures_of().keys()


def test_accuracies_by_other_metrics_have_a_mean_and_a_worst_client():
    by_metric = {"summed": summary(0.7, 0.6), "explicit": summary(0.8, 0.5)}
    evaluations = [round_evaluation(0), round_evaluation(1, by_metric=by_metric)]
    figures = figures_of(federation_result(records=[TRAINED], evaluations=evaluations))
    assert figures["summed"] == 0.7
    assert figures["summed_worst"] == 0.6
    assert figures["explicit"] == 0.8
    assert "explicit_worst" not in figures


def test_the_accuracies_of_the_best_round_are_the_largest_between_the_first_and_the_last():
    by_round = [{"summed": summary(mean, 0.1)} for mean in (0.9, 0.8, 0.5)]
    evaluations = [
        round_evaluation(n, mean=mean, by_metric=by_round[n]) for n, mean in enumerate((0.9, 0.6, 0.7))
    ]
    figures = figures_of(federation_result(records=[TRAINED], evaluations=evaluations))
    assert (figures["best_accuracy"], figures["summed_best"], figures["summed"]) == (0.7, 0.8, 0.5)
    first_and_last = federation_result(records=[TRAINED], evaluations=evaluations[1:])
    assert not {"best_accuracy", "summed_best"} & figures_of(first_and_last).keys()


def test_all_figures_of_a_run_have_a_label():
    by_metric = {name: summary(0.7, 0.6) for name in ("summed", "per_token", "explicit")}
    evaluations = [round_evaluation(n, by_metric=by_metric, reward=1.0) for n in range(3)]
    federation = federation_result(records=[TRAINED], evaluations=evaluations)
    evaluation = evaluation_result(questions={"aligned": question_result(0.3, 0.8)})
    figures = figures_of(federation, evaluation=evaluation, curve=reward_curve(federation, 0.1))
    assert figures.keys() <= FIGURES.keys()


def test_labels_include_those_of_the_methods_diagnostics_and_of_objectives():
    assert all_figure_labels().keys() >= {*FIGURES, "adjusted_rand_index", "neighbors", "lambda_drift"}
    assert figure_label(f"{REWARD_PREFIX}clean") == "reward, clean"
    assert figure_label("common") == "common taste"


# --- Effort


def test_steps_seconds_and_bytes_are_sums_over_clients_and_rounds():
    records = [
        step_record(clients={"ada": client_record({"seconds": 0.5}, sent=2_000_000)}, rounds_done=0),
        TRAINED,
    ]
    figures = effort_figures(records)
    assert figures["train_seconds"] == 5.5
    assert figures["client_steps"] == 16
    assert figures["sent"] == 4.0


def test_steps_within_a_round_add_no_optimizer_steps():
    within = step_record(clients={"ada": client_record({"steps": 5.0})}, rounds_done=0)
    assert effort_figures([within, TRAINED])["client_steps"] == 16


def test_the_time_of_aggregation_is_the_mean_over_rounds_with_all_their_steps():
    records = [
        step_record(0, rounds_done=0, aggregation_seconds=0.0012),
        step_record(0, aggregation_seconds=0.02),
        step_record(1, aggregation_seconds=0.02),
    ]
    assert effort_figures(records)["aggregation_seconds"] == pytest.approx(0.0206)


def test_private_modules_are_measured_after_the_last_round_of_each_client():
    records = [
        step_record(0, {"ada": client_record(kept=9_000_000), "bea": client_record(kept=2_000_000)}),
        step_record(1, {"ada": client_record(kept=4_000_000)}),
    ]
    assert effort_figures(records)["kept"] == 3.0


def test_clients_without_private_modules_have_no_figure_of_them():
    assert effort_figures([TRAINED])["kept"] is None


# --- Answers


def test_the_figures_of_answers_are_those_of_the_named_policy():
    evaluation = evaluation_result(
        rouge={"aligned": {"rougeLsum": 0.2}, "base": {"rougeLsum": 0.1}},
        questions={"base": question_result(0.3), "aligned": question_result(0.5)},
    )
    base = answer_figures(evaluation, "base", ["abc", "a"])
    aligned = answer_figures(evaluation, "aligned", ["abc"])
    assert base == {
        "rougeLsum": 0.1,
        "characters": 2.0,
        "answer_accuracy": 0.3,
        "success": None,
    }
    assert aligned == {
        "rougeLsum": 0.2,
        "characters": 3.0,
        "answer_accuracy": 0.5,
        "success": None,
    }


def test_the_figures_of_questions_are_means_over_the_sets():
    evaluation = evaluation_result(questions={"aligned": question_result(0.3, 0.8, total=0.5)})
    figures = figures_of(evaluation=evaluation)
    assert figures["answer_accuracy"] == 0.3
    assert figures["success"] == 0.8


def test_without_samples_there_is_no_success_rate():
    evaluation = evaluation_result(questions={"aligned": question_result(0.3)})
    assert "success" not in figures_of(evaluation=evaluation)


# --- Rewards over the rounds


@pytest.fixture
def rewarded():
    """Rounds whose largest reward is in their middle."""
    return federation_result(
        records=[TRAINED],
        evaluations=[
            round_evaluation(0, reward=0.0, margin=0.0, mean=0.5),
            round_evaluation(2, reward=5.0, margin=1.0, mean=0.6, by_metric={"summed": summary(0.7, 0.6)}),
            round_evaluation(4, reward=3.0, margin=2.0, mean=0.7),
        ],
    )


def test_rewards_are_beta_times_the_log_ratios_by_the_rounds_done(rewarded):
    assert reward_curve(rewarded, 0.2) == [
        {
            "round": 0,
            "reward": 0.0,
            "margin": 0.0,
            "accuracy": 0.5,
        },
        {
            "round": 2,
            "reward": 1.0,
            "margin": 0.2,
            "accuracy": 0.6,
            "summed": 0.7,
        },
        {
            "round": 4,
            "reward": pytest.approx(0.6),
            "margin": 0.4,
            "accuracy": 0.7,
        },
    ]


def test_selectors_have_no_reward():
    assert reward_curve(federation_result(), 0.2) == []


def test_the_figures_of_rewards_are_the_last_ones_and_the_best_is_the_largest(rewarded):
    figures = figures_of(rewarded, curve=reward_curve(rewarded, 0.2))
    assert figures["margin"] == 0.4
    assert figures["reward"] == pytest.approx(0.6)
    assert figures["best_reward"] == 1.0
    assert figures["accuracy"] == 0.7


def test_means_over_seeds_are_over_the_seeds_that_have_a_figure():
    runs = {0: {"common": 0.5, "kl": 1.0}, 1: {"common": 0.7}}
    assert mean_figures(runs) == {"common": pytest.approx(0.6), "kl": 1.0}
