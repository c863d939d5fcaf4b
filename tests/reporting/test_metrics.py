"""Every number of a run under one name: what it is computed from, and when it is missing."""

import math

import pytest

from components.config.benchmark import OF_CONTESTS
from components.config.local_objectives import implicit_reward_scale
from components.recipes import load_recipe
from components.recipes.benchmarks import benchmark_names, read_benchmark
from components.reporting.metrics import (
    ALIASES,
    Alias,
    accuracy_metrics,
    alias_of,
    base_metrics,
    cost_metrics,
    evaluation_metrics,
    mean_metrics,
    named,
    question_figures,
)
from components.results import AccuracySummary
from tests.support.contests import LOSS, WIN, contest
from tests.support.results import (
    accuracy_report,
    alignment_result,
    client_record,
    evaluation_result,
    federation_result,
    question_result,
    round_evaluation,
    run_results,
    step_record,
)


def summary(mean, worst):
    return AccuracySummary(mean=mean, worst=worst, best=1.0, clients={"ada": worst, "bea": mean})


TRAINED = step_record(
    clients={
        "ada": client_record({"seconds": 2.0, "steps": 8}, sent=1_000_000, kept=0),
        "bea": client_record({"seconds": 3.0, "steps": 8}, sent=1_000_000, kept=0),
    },
    aggregation_seconds=0.02,
)


def metrics_of(debug, evaluations=(), records=(TRAINED,), **results):
    rounds = {"evaluations": list(evaluations)} if evaluations else {}
    federation = federation_result(records=list(records), **rounds)
    return run_results(debug, federation=federation, **results).metrics


# --- accuracies


def test_an_accuracy_has_a_mean_its_clients_range_its_domains_and_other_metrics():
    summed = AccuracySummary(mean=0.7, worst=0.6, best=0.9, clients={"ada": 0.5, "bea": 0.9})
    report = accuracy_report(domains={"": 0.5}, reward=2.0, by_metric={"summed": summed})
    assert accuracy_metrics(report) == {
        "accuracy/spread": pytest.approx(0.2),
        "accuracy/summed/spread": pytest.approx(0.2),
        "accuracy/mean": 0.6,
        "accuracy/worst": 0.4,
        "accuracy/best": 0.8,
        "accuracy/margin": 0.1,
        "accuracy/reward": 2.0,
        "accuracy/domain/all": 0.5,
        "accuracy/summed/mean": 0.7,
        "accuracy/summed/worst": 0.6,
        "accuracy/summed/best": 0.9,
        "accuracy/worst_tenth": 0.4,
        "accuracy/jain": pytest.approx(0.9),
        "accuracy/summed/worst_tenth": 0.5,
        "accuracy/summed/jain": pytest.approx(1.4**2 / (2 * (0.25 + 0.81))),
    }


def test_pairs_without_a_domain_and_those_of_a_domain_named_all_are_different_metrics(debug):
    metrics = accuracy_metrics(accuracy_report(domains={"": 0.5, "all": 0.7}))
    assert (metrics["accuracy/domain/"], metrics["accuracy/domain/all"]) == (0.5, 0.7)
    figures = [{"judge_accuracy/": 0.5}, {"judge_accuracy/": 0.5, "judge_accuracy/all": 0.7}]
    judges = [metrics_of(debug, evaluation=evaluation_result(judge_figures=one)) for one in figures]
    assert judges[0]["judge/accuracy/all"] == 0.5
    assert (judges[1]["judge/accuracy/"], judges[1]["judge/accuracy/all"]) == (0.5, 0.7)


def test_measures_of_a_method_are_metrics_under_its_names():
    metrics = evaluation_metrics(round_evaluation(0, measures={"rewards": {"helpful": 1.5}}))
    assert metrics["rewards/helpful"] == 1.5
    assert metrics["accuracy/mean"] == 0.6


def test_a_run_has_its_accuracies_before_and_after_the_rounds_and_after_the_best_one(debug):
    by_round = [{"summed": summary(mean, 0.1)} for mean in (0.9, 0.8, 0.5)]
    evaluations = [
        round_evaluation(n, mean=mean, by_metric=by_round[n]) for n, mean in enumerate((0.9, 0.7, 0.6))
    ]
    metrics = metrics_of(debug, evaluations)
    assert [metrics[f"{moment}/accuracy/mean"] for moment in ("before", "after", "best")] == [0.9, 0.6, 0.7]
    assert metrics["best/round"] == 1
    assert metrics["largest/accuracy/summed/mean"] == 0.8
    assert named(metrics, "best_accuracy") == 0.7
    assert named(metrics, "summed_best") == 0.8
    assert named(metrics, "summed") == 0.5
    assert named(metrics, "summed_worst") == 0.1
    without = metrics_of(debug, evaluations[1:])
    assert not [name for name in without if name.startswith(("best/", "largest/"))]


def test_the_own_adapters_accuracy_is_the_assigned_ones_where_clients_use_several(debug):
    assigned = accuracy_report(domains={"common": 0.8, "own": 0.7})
    several = metrics_of(debug, [round_evaluation(0), round_evaluation(1, assigned=assigned)])
    assert (named(several, "own"), named(several, "own_assigned")) == (0.5, 0.7)
    one = metrics_of(debug)
    assert named(one, "own_assigned") == named(one, "own") == 0.5
    assert not [name for name in one if "assigned" in name]


# --- the other phases


def test_numbers_of_the_other_phases_have_the_names_of_mlflow(debug):
    judge = {"judge_accuracy": 0.75, "judge_held_out_pairs": 84}
    evaluation = evaluation_result(
        answers={"aligned_tokens": 12.5},
        judge_figures=judge,
        contests={"aligned_vs_base": contest([WIN, LOSS, WIN, WIN]).figures(500, judge=judge)},
        rouge={"aligned": {"rougeLsum": 0.2}, "base": {"rougeLsum": 0.1}},
        implicit_reward=accuracy_report(mean=0.55),
        questions={"aligned": question_result(0.3, 0.8, total=0.5), "base": question_result(0.2)},
    )
    rows = [
        {"prompt_id": "p", "aligned": {"text": "abc"}, "base": {"text": "a"}},
        {"prompt_id": "q", "aligned": {"text": "a"}, "base": {"text": "a"}},
    ]
    metrics = metrics_of(
        debug, alignment=alignment_result(metrics={"kl_sequence": 1.5}), evaluation=evaluation, answers=rows
    )
    expected = {
        "answers/aligned_tokens": 12.5,
        "answers/aligned_characters": 2.0,
        "judge/accuracy": 0.75,
        "judge/held_out_pairs": 84,
        "aligned_vs_base/win_rate": 0.75,
        "aligned_vs_base/wins": 3,
        "aligned_vs_base/single_order/win_rate": 0.75,
        "aligned_vs_base/corrected": 1.0,  # (0.75 + q - 1) / (2 q - 1) with q = 64 / 86 is above 1
        "rouge/aligned/rougeLsum": 0.2,
        "implicit_reward/mean": 0.55,
        "questions/aligned/mean/accuracy": 0.3,
        "questions/aligned/mean/success": 0.8,
        "questions/aligned/all/accuracy": 0.5,
        "align/kl_sequence": 1.5,
    }
    assert expected.items() <= metrics.items()
    assert base_metrics(metrics) == {
        "rouge/aligned/rougeLsum": 0.1,
        "answers/aligned_characters": 1.0,
        **{
            name: metrics[name.replace("aligned", "base")]
            for name in base_metrics(metrics)
            if "questions" in name
        },
    }
    assert named(base_metrics(metrics), "answer_accuracy") == 0.2


def test_what_a_run_does_not_have_is_missing(debug):
    metrics = metrics_of(debug)
    for alias in (
        "kl",
        "implicit_reward",
        "rougeLsum",
        "answer_accuracy",
        "success",
        "characters",
        "margin",
        "kept",
    ):
        assert named(metrics, alias) is None, alias


def test_numbers_that_are_not_finite_are_missing(debug):
    assert "after/accuracy/mean" not in metrics_of(
        debug, [round_evaluation(0), round_evaluation(1, mean=math.nan)]
    )


def test_figures_of_questions_are_by_set_over_all_and_as_means():
    result = question_result(0.5)
    assert question_figures(result) == {"csqa": result.all, "all": result.all, "mean": result.mean}


# --- names


def test_no_number_of_a_run_has_two_names(debug):
    """Numbers that are all different are logged under as many names as there are numbers."""
    evaluations = [
        round_evaluation(
            n,
            mean=0.5 + n / 100,
            worst=0.3 + n / 1000,
            best=0.9 + n / 1000,
            domains={"common": 0.7 + n / 1000, "own": 0.61 + n / 1000},
            margin=0.11 + n / 1000,
            clients={"ada": 0.1 + n / 9, "bea": 0.9},
        )
        for n in range(2)
    ]
    evaluation = evaluation_result(judge_figures={"judge_accuracy": 0.751})
    metrics = metrics_of(debug, evaluations, evaluation=evaluation)
    values = [value for name, value in metrics.items() if not name.startswith(("cost/", "aligned_vs"))]
    assert len(set(values)) == len(values)


def test_every_claim_and_choice_of_the_benchmarks_names_an_alias():
    for name in benchmark_names():
        benchmark = read_benchmark(name)
        names = {claim.figure for claim in benchmark.claims} | {
            one.figure for one in benchmark.choices.values()
        }
        assert all(one in ALIASES or one.startswith("reward:") for one in names - {*OF_CONTESTS}), name


def test_a_name_is_an_alias_an_objectives_reward_or_a_metric():
    assert alias_of("reward:clean") == Alias(("after/rewards/clean",), "reward, clean")
    assert alias_of("judge/accuracy") == Alias(("judge/accuracy",), "judge/accuracy")
    assert [name for name, alias in ALIASES.items() if alias.is_exact] == ["client_steps", "sent", "kept"]


# --- cost


def test_steps_seconds_and_bytes_are_sums_over_clients_and_rounds():
    records = [
        step_record(
            clients={"ada": client_record({"seconds": 0.5, "steps": 5.0}, sent=2_000_000)}, rounds_done=0
        ),
        TRAINED,
    ]
    metrics = cost_metrics(records)
    assert metrics["cost/train_seconds"] == 5.5
    assert metrics["cost/client_steps"] == 16  # a step within a round adds none
    assert metrics["cost/sent_mb"] == 4.0


def test_the_time_of_aggregation_is_the_mean_over_rounds_and_no_metric_where_it_is_unknown():
    records = [
        step_record(0, rounds_done=0, aggregation_seconds=0.0012),
        step_record(0, aggregation_seconds=0.02),
        step_record(1, aggregation_seconds=0.02),
    ]
    assert cost_metrics(records)["cost/aggregation_seconds"] == pytest.approx(0.0206)
    metrics = cost_metrics([step_record(0, aggregation_seconds=None)])
    assert not [name for name in metrics if "seconds" in name]


def test_private_modules_are_measured_after_the_last_round_of_each_client():
    records = [
        step_record(0, {"ada": client_record(kept=9_000_000), "bea": client_record(kept=2_000_000)}),
        step_record(1, {"ada": client_record(kept=4_000_000)}),
    ]
    assert cost_metrics(records)["cost/kept_mb"] == 3.0
    assert "cost/kept_mb" not in cost_metrics([TRAINED])


# --- rewards over the rounds


@pytest.fixture
def rewarded():
    """Measurements whose largest reward is in their middle."""
    return [
        round_evaluation(0, reward=0.0, margin=0.0, mean=0.5),
        round_evaluation(2, reward=5.0, margin=1.0, mean=0.6, by_metric={"summed": summary(0.7, 0.6)}),
        round_evaluation(4, reward=3.0, margin=2.0, mean=0.7),
    ]


def test_rewards_are_beta_times_the_log_ratios_by_the_rounds_done(rewarded):
    options = "federation.options={objective: {beta: 0.2}}"
    recipe = load_recipe("debug", ["federation.method=feddpo", options])
    results = run_results(recipe, federation=federation_result(evaluations=rewarded))
    assert results.curve == [
        {"round": 0, "reward": 0.0, "margin": 0.0, "accuracy": 0.5},
        {"round": 2, "reward": 1.0, "margin": 0.2, "accuracy": 0.6, "summed": 0.7},
        {"round": 4, "reward": pytest.approx(0.6), "margin": 0.4, "accuracy": 0.7},
    ]


@pytest.fixture
def debug_policy():
    """A recipe whose clients train the policy."""
    return load_recipe("debug", ["federation.method=feddpo", "federation.options={}"])


def test_selectors_have_no_reward(debug):
    assert run_results(debug).curve == []
    assert named(metrics_of(debug), "reward") is None


def test_the_metrics_of_rewards_are_the_last_ones_and_the_best_is_the_largest(rewarded, debug_policy):
    metrics = metrics_of(debug_policy, rewarded)
    beta = implicit_reward_scale(debug_policy.federation.options.local().objective)
    assert named(metrics, "margin") == pytest.approx(2 * beta)
    assert named(metrics, "reward") == pytest.approx(3 * beta)
    assert named(metrics, "best_reward") == pytest.approx(5 * beta)
    assert named(metrics, "accuracy") == 0.7


def test_means_over_seeds_are_over_the_seeds_that_have_a_metric():
    runs = {0: {"after/accuracy/mean": 0.5, "kl": 1.0}, 1: {"after/accuracy/mean": 0.7}}
    assert mean_metrics(runs) == {"after/accuracy/mean": pytest.approx(0.6), "kl": 1.0}
