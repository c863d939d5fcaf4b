"""The report of a benchmark: its tables, charts and answers."""

import math
import re

import pytest

from components.config.benchmark import Benchmark
from components.recipes.benchmarks import read_benchmark
from components.reporting.benchmark_page import (
    accuracy_names,
    benchmark_page,
    benchmark_summary,
    commits_line,
    contests_table,
    judges_table,
    metrics_tables,
    policies_table,
    rank_correlation,
)
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.changes import find_changes
from components.reporting.claims import HOLDS, Finding
from components.reporting.formats import format_figure, format_mean
from components.reporting.metrics import alias_of
from components.reporting.page import to_html, to_markdown
from components.reporting.units import CLIENTS, PROMPTS, Units
from tests.support.contests import LOSS, TIE, WIN, contest

COMMON = "after/accuracy/domain/common"
OWN = "after/accuracy/domain/own"
SUMMED = "after/accuracy/summed/mean"
METRICS = {
    "FedBis": {0: {COMMON: 0.9, OWN: 0.5}, 1: {COMMON: 0.8, OWN: 0.6}},
    "FedDPO": {0: {COMMON: 0.6}},
}
CONTESTS = {"FedBis against base policy": {0: contest([WIN, WIN, TIE]), 1: contest([LOSS])}}
BASE = {0: {"rouge/aligned/rougeLsum": 0.2}, 1: {"rouge/aligned/rougeLsum": 0.4}}


# --- metrics


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.9, 0.8], "0.850 ± 0.071"), ([0.5], "0.500"), ([100.0, 300.0], "200 ± 141")],
)
def test_means_are_over_seeds_with_the_sample_standard_deviation(values, text):
    assert format_mean(values) == text


def test_the_means_have_a_row_for_each_arm_and_for_the_base_policy():
    means, single = metrics_tables(BenchmarkResults(metrics=METRICS, base=BASE))
    assert means.header == ["method", "seeds", "common taste", "own taste", "ROUGE-L"]
    assert means.rows == [
        ["FedBis", "2", "0.850 ± 0.071", "0.550 ± 0.071", "-"],
        ["FedDPO", "1", "0.600", "-", "-"],
        ["base policy", "2", "-", "-", "0.300 ± 0.141"],
    ]
    assert [row[:3] for row in single.rows] == [
        ["FedBis", "0", "0.900"],
        ["FedBis", "1", "0.800"],
        ["FedDPO", "0", "0.600"],
        ["base policy", "0", "-"],
        ["base policy", "1", "-"],
    ]


def test_what_claims_are_on_comes_first():
    means, _ = metrics_tables(BenchmarkResults(metrics=METRICS), ["own"])
    assert means.header[2:4] == ["own taste", "common taste"]


def test_a_mean_over_fewer_seeds_than_were_run_says_so():
    means, single = metrics_tables(
        BenchmarkResults(metrics={"FedBis": {0: {COMMON: 0.5, OWN: 0.25}, 1: {COMMON: 0.5}}})
    )
    assert means.rows == [["FedBis", "2", "0.500 ± 0.000", "0.250, 1 of 2 seeds"]]
    assert [row[3] for row in single.rows] == ["0.250", "-"]


def test_beside_a_mean_over_clients_are_the_worst_ones_the_spread_and_jains_index():
    metrics = {
        "FedPer": {0: {SUMMED: 0.5, "align/kl_sequence": 1.0}, 1: {SUMMED: 0.6}},
        "front": {0: {"front/rank": 1.0}},
    }
    clients = [{"ada": 0.4, "bea": 0.6}, {"ada": 0.2, "bea": 1.0}]
    units = {"FedPer": {seed: {SUMMED: Units(CLIENTS, {"": own})} for seed, own in enumerate(clients)}}
    means, single = metrics_tables(BenchmarkResults(metrics=metrics, units=units))
    assert means.header[2] == "accuracy by log-likelihood"
    assert [row[2] for row in means.rows] == ["0.550 ± 0.071 (0.300; 0.250; 0.827)", "-"]
    seeds = ["0.500 (0.400; 0.100; 0.962)", "0.600 (0.200; 0.400; 0.692)", "-"]
    assert [row[2] for row in single.rows] == seeds
    assert "standard deviation over the clients" in means.caption


@pytest.mark.parametrize(("name", "has"), [("unseen/accuracy/mean", True), ("after/accuracy/mean", False)])
def test_figures_of_clients_in_no_round_say_what_they_are_measured_after(name, has):
    means, _ = metrics_tables(BenchmarkResults(metrics={"FedPer": {0: {name: 0.5}}}))
    assert ("data.unseen_pairs pairs of such a client" in means.caption) == has


def test_means_over_prompts_have_no_worst_client():
    name = "answers/aligned_characters"
    units = {"FedPer": {0: {name: Units(PROMPTS, {"": {"a": 1.0, "b": 3.0}})}}}
    means, _ = metrics_tables(BenchmarkResults(metrics={"FedPer": {0: {name: 2.0}}}, units=units))
    assert means.rows == [["FedPer", "1", "2.000"]]


def test_times_of_aggregation_are_shown_to_the_millisecond():
    metrics = {
        "A": {0: {"cost/aggregation_seconds": 0.0206}, 1: {"cost/aggregation_seconds": 0.0306}},
        "B": {0: {"cost/train_seconds": 4.0}},
    }
    means, single = metrics_tables(BenchmarkResults(metrics=metrics))
    assert means.header[-2:] == ["training (s)", "aggregation (s per round)"]
    assert [row[-1] for row in means.rows] == ["0.026 ± 0.007", "-"]
    assert [row[-1] for row in single.rows] == ["0.021", "0.031", "-"]


def test_rewards_of_objectives_have_a_column_each_and_fronts_a_row_of_their_own():
    rewards = {"after/rewards/helpful": 0.5, "after/rewards/clean": 2.5, "after/rewards/kl": 0.1}
    metrics = {"FIRM": {0: rewards}, "front": {0: {"front/hypervolume": 1.0}}}
    means, _ = metrics_tables(BenchmarkResults(metrics=metrics))
    assert means.header[2:] == [
        "hypervolume",
        "KL of sampled answers (nats)",
        "reward, clean",
        "reward, helpful",
    ]
    assert means.rows == [
        ["FIRM", "1", "-", "0.100", "2.500", "0.500"],
        ["front", "1", "1.000", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([{COMMON: 0.9, OWN: 0.5, "after/accuracy/mean": 0.7}], ["common", "own"]),
        ([{OWN: 0.5, "after/accuracy_assigned/domain/own": 0.6}], ["own", "own_assigned"]),
        ([{"after/accuracy/mean": 0.7}, {SUMMED: 0.5}], ["accuracy", "summed"]),
        ([{"front/hypervolume": 1.0}], []),
    ],
)
def test_accuracies_are_shown_by_taste_if_they_have_tastes_and_none_twice(runs, names):
    assert accuracy_names(BenchmarkResults(metrics={"A": dict(enumerate(runs))})) == names


# --- contests and judges


def test_the_table_of_contests_has_the_pooled_rate_its_corrections_and_each_seed_or_dashes():
    judges = {seed: {"judge_accuracy": 0.9, "judge_held_out_pairs": 20.0} for seed in (0, 1)}
    results = BenchmarkResults(contests=CONTESTS, judges=judges)
    (row,) = contests_table(results).rows
    pool = results.pools["FedBis against base policy"]
    assert row[:3] == ["FedBis against base policy", "4 (3)", "2/1/1"]
    assert row[3] == format_figure(pool, "ties_half")
    assert row[3].startswith("62.5% [")
    corrected = "66.4% [0.0%, 100.0%] (undecided)"  # (62.5% + q - 1) / (2 q - 1) with q = 37 / 42
    assert row[4:7] == [format_figure(pool, "length_controlled"), "-", corrected]
    assert row[7] == "50.0% [0.0%, 100.0%]"
    assert row[8].startswith("0.589; "), "the deviation of 0.833 and 0"
    assert row[9] == "5, 5"
    assert row[10] == "0: 83.3% (2/1/0); 1: 0.0% (0/0/1)"
    caption = contests_table(BenchmarkResults(contests=CONTESTS)).caption
    assert "over seeds and prompts" in caption
    contests = {"A against B": {0: contest([])}}
    (row,) = contests_table(BenchmarkResults(contests=contests)).rows
    assert set(row[2:]) == {"-", "0: - (-)"}


def test_the_judges_table_has_its_consistency_and_its_own_accuracy_on_a_number_of_pairs():
    contests = {"A against base policy": {0: contest([WIN] * 4, opposed=1), 1: contest([WIN] * 2, opposed=1)}}
    judges = {
        0: {"judge_accuracy": 0.7, "judge_accuracy/own": 0.5, "judge_held_out_pairs": 84},
        1: {"judge_accuracy": 0.6},
    }
    table = judges_table(BenchmarkResults(contests=contests, judges=judges))
    assert table.header == ["", "seed 0", "seed 1"]
    assert table.rows == [
        ["both orders agree, A against base policy", "0.750", "0.500"],
        ["own accuracy", "0.700", "0.600"],
        ["own accuracy, pairs of domain own", "0.500", "-"],
        ["own accuracy, held-out pairs", "84", "not recorded"],
    ]


def test_a_judge_that_was_not_trained_has_no_accuracy():
    table = judges_table(BenchmarkResults(contests=CONTESTS, judges={0: {}, 1: {}}))
    assert len(table.rows) == 1


# --- the page


def answers(text, prompts):
    """Rows of stored answers to prompts in any order."""
    return [
        {
            "prompt_id": prompt,
            "prompt": f"to {prompt}",
            "aligned": {"text": f"{text} {prompt}"},
            "base": {"text": f"base {prompt}"},
        }
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def page():
    """The report of two arms."""
    finding = Finding(
        "FedBis: own taste at least 0.5",
        "own taste",
        0.5,
        HOLDS,
        0.5,
        0.5,
        0.6,
        "",
        "2 seeds",
        "0: 0.5",
        "mean 0.5",
    )
    curve = [{"round": 0, "reward": 0.0}, {"round": 2, "reward": 1.0}]
    samples = {"one": answers("one", ["d", "a", "a#1", "b"]), "two": answers("two", ["a#1", "a"])}
    results = BenchmarkResults(
        metrics=METRICS,
        base=BASE,
        contests=CONTESTS,
        rewards={"FedDPO": {0: curve}},
        commits={"FedBis-seed-0": ["a" * 40, "b" * 40 + "-dirty"], "FedDPO-seed-0": []},
        answers={"FIRM, seed 0": samples},
    )
    changes = find_changes({"FedBis": {"after/accuracy/mean": 0.5}}, [], {"accuracy": 0.1})
    plan = read_benchmark("summarization")
    return benchmark_page("B <1>", plan, results, [finding], {}, changes, "c" * 40)


@pytest.mark.parametrize(
    "text", ["0.850 ± 0.071", "FedBis against base policy", "2/1/1", "cccccccccccc", "Intervals are", HOLDS]
)
def test_numbers_contests_notes_captions_and_verdicts_are_in_both_forms_of_the_report(page, text):
    assert text in to_markdown(page)
    assert text in to_html(page)


def test_sections_without_content_are_not_shown(page):
    html = to_html(page)
    assert 'id="claims"' in html
    assert 'id="curves"' in html


def test_policies_of_a_front_answer_the_first_prompts_that_all_answered(page):
    (section,) = [section for section in page.sections if section.title == "Answers"]
    assert [(part.prompt, part.texts) for part in section.parts] == [
        ("to a", {"base policy": "base a", "FIRM, seed 0: one": "one a", "FIRM, seed 0: two": "two a"})
    ]


def test_charts_show_accuracies_win_rates_and_rewards(page):
    charts = [part.figure for section in page.sections for part in section.parts if hasattr(part, "figure")]
    bars, rates, rewards = charts
    assert bars.data[0].y == pytest.approx((0.85, 0.6))
    assert rates.data[0].x == (0.625,)
    assert list(rewards.data[0].y) == [0.0, 1.0]


def test_the_commits_of_runs_are_listed_where_they_differ(page):
    runs = {"A-seed-0": ["a" * 40], "A-seed-1": ["a" * 40], "B-seed-0": ["b" * 40 + "-dirty"]}
    assert commits_line(runs) == (
        "commits of the runs: aaaaaaaaaaaa (A-seed-0, A-seed-1); bbbbbbbbbbbb-dirty (B-seed-0)"
    )
    assert commits_line({"A-seed-0": []}) == "commit of the runs: not recorded"


def test_the_assigned_adapters_have_a_column_where_some_are_assigned():
    assigned = "after/accuracy_assigned/domain/own"
    means, _ = metrics_tables(
        BenchmarkResults(metrics={"A": {0: {OWN: 0.5, assigned: 0.7}}, "B": {0: {OWN: 0.6}}})
    )
    assert means.header[2:] == ["own taste", "own taste, own adapter"]
    assert [row[2:] for row in means.rows] == [["0.500", "0.700"], ["0.600", "0.600"]]


def test_pair_accuracy_is_beside_that_of_the_policy_with_their_rank_correlation():
    figures = {"one": (0.6, 0.52), "two": (0.7, 0.51), "three": (0.8, 0.55), "four": (0.9, 0.56)}
    metrics = {
        arm: {0: {"after/accuracy/mean": pairs, "implicit_reward/summed/mean": policy}}
        for arm, (pairs, policy) in figures.items()
    }
    table = policies_table(BenchmarkResults(metrics=metrics | {"other": {0: {"after/accuracy/mean": 0.5}}}))
    assert [row[0] for row in table.rows] == list(figures)
    assert table.rows[0][1:] == ["0.600", "-", "0.520", "-"]
    assert "policy's accuracy by log-likelihood: 0.667." in table.caption  # 5 pairs agree, 1 does not
    assert math.isnan(rank_correlation([(0.1, 0.2), (0.3, 0.4)]))
    assert math.isnan(rank_correlation([(0.1, 0.2), (0.1, 0.3), (0.1, 0.4)]))
    assert policies_table(BenchmarkResults(metrics={"other": {0: {"after/accuracy/mean": 0.5}}})).rows == []


@pytest.mark.parametrize(
    ("asked", "headings"),
    [
        ([], ["own taste", "pair accuracy", "worst client", "Jain's index of pair accuracy"]),
        (
            ["summed", "after/accuracy/mean", "own", "kl", "accuracy"],
            [
                "accuracy by log-likelihood",
                "after/accuracy/mean",
                "own taste",
                "KL (nats)",
                "worst client",
            ],
        ),
    ],
)
def test_the_summary_has_every_figure_that_is_asked_and_four_of_a_file_that_asks_none(asked, headings):
    """The third seed lacks the accuracy by log-likelihood."""
    claims = [{"arm": "A", "figure": figure, "at_least": 0.1} for figure in asked]
    plan = Benchmark(recipe="debug", seeds=[0, 1, 2], arms={"A": []}, claims=claims)
    complete = {alias_of(name).metrics[0]: 0.5 for name in ("accuracy", "own", "worst", "jain", "kl")}
    both = complete | {SUMMED: 0.5}
    base = {0: {"rouge/aligned/rougeLsum": 0.1}}
    results = BenchmarkResults(metrics={"A": {0: both, 1: both, 2: complete}}, base=base)
    _, _, header, row, *others = benchmark_summary("x", plan, results, [], {}, []).splitlines()
    assert re.split("  +", header) == ["Means over seeds", "seeds", *headings]
    assert ("0.500 ± 0.000, 2 of 3 seeds" in row) == bool(asked)
    assert others == [], "the base policy has none of these figures"
