"""Tables of a benchmark's report, and the report as markdown and HTML."""

import pytest

from components.reporting.benchmark_plots import plot_overview
from components.reporting.html import to_html
from components.reporting.tables import (
    Image,
    contests_table,
    figures_tables,
    format_equal_length,
    format_mean,
    judges_table,
    samples_table,
    to_markdown,
)
from components.reporting.units import CLIENTS, PROMPTS, Units
from tests.support.contests import LOSS, TIE, WIN, contest, pools

FIGURES = {
    "FedBis": {0: {"common": 0.9, "own": 0.5}, 1: {"common": 0.8, "own": 0.6}},
    "FedDPO": {0: {"common": 0.6}},
}
CONTESTS = {"FedBis against base policy": {0: contest([WIN, WIN, TIE]), 1: contest([LOSS])}}
POOLS = pools(CONTESTS)
BASE = {0: {"rougeLsum": 0.2}, 1: {"rougeLsum": 0.4}}


# --- Figures


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.9, 0.8], "0.850 ± 0.071"), ([0.5], "0.500"), ([100.0, 300.0], "200 ± 141")],
)
def test_means_are_over_seeds_with_the_sample_standard_deviation(values, text):
    assert format_mean(values) == text


def test_the_means_have_a_row_for_each_arm_and_for_the_base_policy():
    means, _ = figures_tables(FIGURES, BASE, {})
    assert means.header == ["method", "seeds", "common taste", "own taste", "ROUGE-L"]
    assert means.rows == [
        ["FedBis", "2", "0.850 ± 0.071", "0.550 ± 0.071", "-"],
        ["FedDPO", "1", "0.600", "-", "-"],
        ["base policy", "2", "-", "-", "0.300 ± 0.141"],
    ]


def test_beside_a_mean_over_clients_are_the_worst_client_and_the_spread():
    figures = {"FedPer": {0: {"summed": 0.5, "kl": 1.0}, 1: {"summed": 0.6}}, "front": {0: {"rank": 1.0}}}
    clients = [{"ada": 0.4, "bea": 0.6}, {"ada": 0.2, "bea": 1.0}]
    units = {"FedPer": {seed: {"summed": Units(CLIENTS, {"": own})} for seed, own in enumerate(clients)}}
    means, single = figures_tables(figures, {}, units)
    assert means.header[2] == "accuracy by log-likelihood (worst client; spread)"
    assert [row[2] for row in means.rows] == ["0.550 ± 0.071 (0.300; 0.250)", "-"]
    assert [row[2] for row in single.rows] == ["0.500 (0.400; 0.100)", "0.600 (0.200; 0.400)", "-"]
    assert "standard deviation over the clients" in means.caption


def test_means_over_prompts_have_no_worst_client():
    units = {"FedPer": {0: {"characters": Units(PROMPTS, {"": {"a": 1.0, "b": 3.0}})}}}
    means, _ = figures_tables({"FedPer": {0: {"characters": 2.0}}}, {}, units)
    assert means.rows == [["FedPer", "1", "2.000"]]


def test_the_table_of_seeds_has_a_row_for_each_arm_and_seed():
    _, single = figures_tables(FIGURES, BASE, {})
    assert [row[:3] for row in single.rows] == [
        ["FedBis", "0", "0.900"],
        ["FedBis", "1", "0.800"],
        ["FedDPO", "0", "0.600"],
        ["base policy", "0", "-"],
        ["base policy", "1", "-"],
    ]


def test_times_of_aggregation_are_shown_to_the_millisecond():
    figures = {
        "A": {0: {"aggregation_seconds": 0.0206}, 1: {"aggregation_seconds": 0.0306}},
        "B": {0: {"train_seconds": 4.0}},
    }
    means, single = figures_tables(figures, {}, {})
    assert means.header[-2:] == ["training (s)", "aggregation (s per round)"]
    assert [row[-1] for row in means.rows] == ["0.026 ± 0.007", "-"]
    assert [row[-1] for row in single.rows] == ["0.021", "0.031", "-"]


def test_rewards_of_objectives_have_a_column_each_and_fronts_a_row_of_their_own():
    figures = {"FIRM": {0: {"reward:helpful": 0.5, "reward:clean": 2.5}}, "front": {0: {"hypervolume": 1.0}}}
    means, _ = figures_tables(figures, {}, {})
    assert means.header[2:] == ["hypervolume", "reward, clean", "reward, helpful"]
    assert means.rows == [
        ["FIRM", "1", "-", "2.500", "0.500"],
        ["front", "1", "1.000", "-", "-"],
    ]


# --- Contests and judges


def test_the_table_of_contests_has_the_pooled_rate_with_its_interval_and_each_seeds():
    (row,) = contests_table(CONTESTS, POOLS).rows
    assert row[:3] == ["FedBis against base policy", "4 (3)", "50.0% [0.0%, 100.0%] (2/1/1)"]
    assert row[3] == "0: 66.7% (2/1/0); 1: 0.0% (0/0/1)"


def test_the_table_of_contests_has_the_rate_at_equal_length_and_mean_lengths():
    pool = POOLS["FedBis against base policy"]
    (row,) = contests_table(CONTESTS, POOLS).rows
    assert row[4:] == [
        f"{pool.ties_half:.1%}",
        format_equal_length(pool),
        "5, 5",
    ]


def test_the_caption_of_the_contests_states_over_what_the_intervals_are():
    caption = contests_table(CONTESTS, POOLS).caption
    assert "over the answers" in caption
    assert "no other seed" in caption


def test_a_contest_without_answers_has_dashes():
    empty = {"A against B": {0: contest([])}}
    (row,) = contests_table(empty, pools(empty)).rows
    assert set(row[2:]) == {"-", "0: -"}


JUDGED = {
    "A against base policy": {0: contest([WIN] * 4, opposed=1), 1: contest([WIN] * 4, opposed=2)},
    "A against B": {0: contest([WIN])},
}


def test_the_judges_table_has_its_consistency_and_its_own_accuracy_on_a_number_of_pairs():
    judges = {
        0: {
            "judge_accuracy": 0.7,
            "judge_accuracy/own": 0.5,
            "judge_held_out_pairs": 84,
        },
        1: {"judge_accuracy": 0.6},
    }
    table = judges_table(JUDGED, judges)
    assert table.header == ["", "seed 0", "seed 1"]
    assert table.rows == [
        ["position consistency, A against base policy", "0.750", "0.500"],
        ["position consistency, A against B", "1.000", "-"],
        ["own accuracy", "0.700", "0.600"],
        ["own accuracy, pairs of domain own", "0.500", "-"],
        ["own accuracy, held-out pairs", "84", "not recorded"],
    ]


def test_a_judge_that_was_not_trained_has_no_accuracy():
    assert len(judges_table(JUDGED, {0: {}, 1: {}}).rows) == 2


# --- Answers of a front's policies


def answers(text, prompts):
    """Rows of stored answers to prompts in any order."""
    return [
        {
            "prompt_id": prompt,
            "prompt": f"to {prompt} |\nline",
            "aligned": {"text": f"{text} {prompt}"},
            "base": {"text": f"base {prompt}"},
        }
        for prompt in prompts
    ]


@pytest.fixture
def samples_of_two():
    by_arm = {"FIRM-1-9": answers("one", "dbac"), "FIRM-9-1": answers("nine", "cab")}
    return samples_table("FIRM, seed 0", by_arm, max_prompts=2)


def test_a_fronts_policies_answer_the_first_prompts_that_all_answered_side_by_side(samples_of_two):
    assert samples_of_two.header == ["prompt", "base policy", "FIRM-1-9", "FIRM-9-1"]
    assert [row[1:] for row in samples_of_two.rows] == [
        ["base a", "one a", "nine a"],
        ["base b", "one b", "nine b"],
    ]


def test_of_several_answers_to_a_prompt_the_first_is_shown():
    by_arm = {"FIRM-1-9": answers("one", ["a", "a#1", "b"]), "FIRM-9-1": answers("nine", ["a", "a#1", "b"])}
    table = samples_table("FIRM, seed 0", by_arm, max_prompts=2)
    assert [row[1] for row in table.rows] == ["base a", "base b"]


def test_a_cell_with_several_lines_and_bars_is_one_cell_of_markdown(samples_of_two):
    lines = to_markdown("B", [samples_of_two], []).splitlines()
    assert "| to a \\| line | base a | one a | nine a |" in lines


# --- The report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of two arms, as markdown and as HTML."""
    plot = tmp_path_factory.mktemp("report") / "overview.png"
    plot_overview(FIGURES, CONTESTS, POOLS, plot)
    means, single = figures_tables(FIGURES, BASE, {})
    parts = [means, contests_table(CONTESTS, POOLS), Image("shown", plot, "what <it> shows"), single]
    return to_markdown("B", parts, ["a note"]), to_html("B <1>", parts, ["a note"])


@pytest.mark.parametrize(
    "text", ["0.850 ± 0.071", "FedBis against base policy", "(2/1/1)", "a note", "Intervals are"]
)
def test_figures_contests_notes_and_captions_are_in_both_forms_of_the_report(report, text):
    markdown, html = report
    assert text in markdown
    assert text in html


def test_the_html_report_embeds_its_plots_and_escapes_texts(report):
    _, html = report
    assert "B &lt;1&gt;" in html
    assert "what &lt;it&gt; shows" in html
    assert "data:image/png" in html


def test_rows_of_a_markdown_table_have_as_many_cells_as_its_header(report):
    lines = report[0].splitlines()
    rules = [n for n, line in enumerate(lines) if line.startswith("|---")]
    assert len(rules) == 3
    for n in rules:
        assert lines[n].count("|") == lines[n - 1].count("|")
        assert lines[n].count("|") == lines[n + 1].count("|")
