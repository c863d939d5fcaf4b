"""What a run says about itself: lines of its log, metrics, and the table at its end."""

import math
import re

import pytest

from components.data.report import (
    MarginSummary,
    PartitionSummary,
    PreparationReport,
    RowCounts,
    TreeCounts,
    ValidationSummary,
)
from components.reporting.summary import (
    FinishedRun,
    accuracy_line,
    accuracy_metrics,
    evaluation_metrics,
    margins_line,
    measure_line,
    partition_line,
    question_figures,
    questions_line,
    round_line,
    summarize_run,
)
from components.reporting.summary.optional_parts import alpaca_lines, question_lines
from components.results import (
    AccuracySummary,
    AlpacaEvalContest,
    AlpacaEvalFigures,
    AlpacaEvalResult,
    ContestFigures,
    CurvePoint,
    ExportedAdapter,
    Metrics,
    WinRate,
)
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


def numbers_of(text):
    """The numbers in a text, in their order."""
    return re.findall(r"\d[\d,.]*\d|\d", text)


def row_of(table, label):
    """The numbers of the row of a table that starts with a label."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(label)]
    return numbers_of(line.strip().removeprefix(label))


# --- Prepared data


def preparation(**values):
    """A report of prepared data with the partition of FedBiscuit's table 5."""
    every = PartitionSummary(samples=92858, clients=53, max=12985, min=1, std=2284.33)
    train = PartitionSummary(samples=65000, clients=53, max=9100, min=0, std=1600.5)
    defaults = {
        "rows": RowCounts(source=0, pairs=0, left_out={}, judge=0, prompts={}, dropped={}),
        "splits": {},
        "partition": every,
        "partition_train": train,
        "clients_without_train": [],
        "expectations": ValidationSummary(success=True, expectations=[]),
    }
    return PreparationReport(**defaults | values)


def test_the_partition_is_a_line_with_the_columns_of_table_5_over_all_pairs_and_over_training_pairs():
    every = ["92,858", "53", "12,985", "1", "2,284.33"]
    train = ["65,000", "9,100", "0", "1,600.50"]
    assert numbers_of(partition_line(preparation())) == [*every, *train]


def test_margins_of_thoughts_are_a_line_with_the_number_of_tied_siblings():
    rows = preparation().rows.model_copy(
        update={"trees": TreeCounts(pairs=3, questions=1, dropped={"same score": 7})}
    )
    report = preparation(rows=rows, margins=MarginSummary(pairs=1234, min=1, median=2, max=9))
    assert numbers_of(margins_line(report)) == ["1,234", "1", "2", "9", "7"]


def test_without_pairs_of_thoughts_the_line_of_margins_is_empty():
    assert margins_line(preparation()) == ""


# --- Accuracies


def test_the_accuracy_is_a_line_with_its_domains():
    line = accuracy_line(accuracy_report())
    assert numbers_of(line) == ["0.600", "0.400", "0.800", "0.200", "0.900", "0.500"]
    assert line.endswith("common 0.900, own 0.500")


def test_the_line_of_an_accuracy_over_many_domains_leaves_them_out():
    domains = {f"Question {n}?": 0.5 for n in range(36)}
    assert numbers_of(accuracy_line(accuracy_report(domains=domains))) == ["0.600", "0.400", "0.800", "0.200"]


def test_the_line_of_an_accuracy_also_has_that_of_assigned_adapters():
    assigned = accuracy_report(mean=0.7, domains={})
    line = accuracy_line(accuracy_report(domains={}, assigned=assigned))
    assert numbers_of(line) == ["0.600", "0.400", "0.800", "0.200", "0.700", "0.400", "0.800", "0.200"]


def test_an_accuracy_is_logged_by_mean_domain_and_other_metrics():
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
    }


def test_an_accuracy_of_assigned_adapters_is_logged_under_its_own_name():
    metrics = accuracy_metrics(accuracy_report(assigned=accuracy_report(mean=0.7)))
    assert metrics["accuracy/mean"] == 0.6
    assert metrics["accuracy_assigned/mean"] == 0.7


def test_measures_of_a_method_are_logged_under_its_names():
    metrics = evaluation_metrics(round_evaluation(0, measures={"rewards": {"helpful": 1.5}}))
    assert metrics["rewards/helpful"] == 1.5
    assert metrics["accuracy/mean"] == 0.6


def test_a_measure_of_a_method_is_a_line():
    assert measure_line("rewards", Metrics(scalars={"helpful": 1.5, "kl": 0.25})) == (
        "rewards: helpful 1.500, kl 0.250"
    )


# --- Steps of the federation


def test_a_round_is_a_line_with_the_clients_their_mean_loss_and_the_servers_steps():
    clients = {"ada": client_record({"loss": 0.5}), "bea": client_record({"loss": 0.7})}
    line = round_line(step_record(clients=clients, server={"s0/server_step": 0.25, "s0/members": 2}))
    assert line == "2 clients, training loss 0.600, server moved 0.250"


def test_a_step_within_a_round_is_a_line_with_its_name_and_all_numbers_of_the_server():
    record = step_record(phase="grouping", rounds_done=0, server={"moved": 3.0, "loss_of_group": 0.5})
    assert round_line(record) == "grouping: 0 clients, moved 3, loss_of_group 0.5"


def test_clients_that_failed_or_were_refused_are_named_with_the_reason():
    line = round_line(step_record(failed={"ada": "no memory"}, refused={"bea": "NaN in A"}))
    assert line == "0 clients, failed: ada (no memory), refused: bea (NaN in A)"


# --- Questions


def test_the_answers_to_questions_are_a_line_with_the_means_over_sets_by_policy():
    line = questions_line({"base": question_result(0.3), "aligned": question_result(0.5, 0.8)})
    base, aligned = line.split(" | ")
    assert numbers_of(base) == ["0.300", "0.250", "0.100"]
    assert numbers_of(aligned) == ["0.500", "0.250", "5", "0.800", "0.400", "0.100"]


def test_the_figures_of_questions_are_by_set_over_all_and_as_means():
    result = question_result(0.5)
    assert question_figures(result) == {
        "csqa": result.all,
        "all": result.all,
        "mean": result.mean,
    }


def test_the_table_of_a_single_question_set_has_no_rows_of_totals():
    lines = question_lines({"base": question_result(0.3), "aligned": question_result(0.5)})
    assert [line.split()[0] for line in lines[1:]] == ["csqa", "csqa"]


def test_the_table_of_several_question_sets_has_rows_of_totals():
    result = question_result(0.5)
    several = result.model_copy(update={"sets": {"csqa": result.all, "piqa": result.all}})
    lines = question_lines({"aligned": several})
    assert len(lines) == 1 + 4
    assert "all questions (10), aligned" in lines[3]
    assert "mean over the sets, aligned" in lines[4]


def test_questions_that_were_cut_are_counted_with_the_remedy():
    result = question_result(0.5)
    cut = result.model_copy(update={"all": result.all.model_copy(update={"cut": 3})})
    last = question_lines({"aligned": cut})[-1]
    assert numbers_of(last) == ["3"]
    assert "policy.max_prompt_tokens" in last


# --- AlpacaEval


def alpaca_result(**values):
    figures = AlpacaEvalFigures(
        win_rate=12.345,
        standard_error=1.5,
        n_wins=1,
        n_wins_base=2,
        n_draws=3,
        n_total=6,
        discrete_win_rate=20.0,
        avg_length=1234,
        n_missing=0,
        equal_length_win_rate=30.0,
        equal_length_low=10.0,
        equal_length_high=math.nan,
    )
    contest = AlpacaEvalContest(baseline="base policy", figures=figures.model_copy(update=values))
    return AlpacaEvalResult(annotator="an annotator", contests={"aligned_vs_base": contest}, note=None)


def test_alpaca_evals_figures_are_shown_in_its_units_and_missing_ones_as_dashes():
    lines = alpaca_lines(alpaca_result())
    assert lines[1].split() == [
        *["aligned", "against", "base", "policy"],
        *["12.35", "1.50", "20.00", "-", "30.00", "[10.00,", "-]"],
    ]
    assert numbers_of(lines[2]) == ["1", "3", "2", "1,234"]


def test_rows_without_a_preference_are_counted():
    assert "4 without a preference" in alpaca_lines(alpaca_result(n_missing=4))[2]


# --- The table at the end


def contest_figures(**values):
    defaults = {
        "win_rate": 0.5,
        "low": 0.4,
        "high": 0.6,
        "wins": 5,
        "ties": 2,
        "losses": 3,
        "unparsable": 0,
        "consistency": 0.8,
        "ties_half": 0.6,
        "length_controlled": 0.55,
        "length_controlled_low": 0.45,
        "length_controlled_high": 0.65,
        "length_effect": 0.1,
        "single_order": WinRate(win_rate=0.9, low=0.7, high=1.0, wins=9, ties=1, losses=0, unparsable=0),
    }
    return ContestFigures(**defaults | values)


@pytest.fixture
def finished(debug):
    """A function that makes a finished run of results."""

    def make(federation=None, alignment=None, evaluation=None):
        return FinishedRun(
            debug,
            federation or federation_result(),
            alignment or alignment_result(),
            evaluation or evaluation_result(contests={"aligned_vs_base": contest_figures()}),
            prompts=10,
            references="human summaries",
            adapters={"adapter": "runs/1/adapter", "aligned": "runs/1/final"},
        )

    return make


def test_the_table_has_the_accuracies_before_and_after_the_rounds(finished):
    evaluations = [round_evaluation(0, mean=0.5), round_evaluation(1, mean=0.6, worst=0.3)]
    table = summarize_run(finished(federation_result(evaluations=evaluations)))
    assert row_of(table, "clients' mean") == ["0.500", "0.600"]
    assert row_of(table, "worst client") == ["0.400", "0.300"]
    assert row_of(table, "standard deviation over clients") == ["0.200", "0.200"]
    assert row_of(table, "common-taste pairs") == ["0.900", "0.900"]


def test_the_table_has_the_best_round_where_rounds_between_were_measured(finished):
    means = (0.9, 0.5, 0.8, 0.8, 0.6)
    evaluations = [round_evaluation(n, mean=mean, worst=mean / 2) for n, mean in enumerate(means)]
    table = summarize_run(finished(federation_result(evaluations=evaluations)))
    assert "before    after     best" in table
    assert row_of(table, "clients' mean") == ["0.900", "0.600", "0.800"]
    assert row_of(table, "worst client") == ["0.450", "0.300", "0.400"]
    assert "best: after round 2, chosen by these pairs" in table


def test_the_table_has_accuracies_by_other_metrics(finished):
    clients = {"ada": 0.5, "bea": 0.9}
    summaries = [
        AccuracySummary(mean=mean, worst=mean - 0.1, best=1.0, clients=clients) for mean in (0.5, 0.7)
    ]
    evaluations = [
        round_evaluation(rounds, by_metric={"summed": one}) for rounds, one in enumerate(summaries)
    ]
    table = summarize_run(finished(federation_result(evaluations=evaluations)))
    assert row_of(table, "by log-likelihood, summed") == ["0.500", "0.700"]
    after_metric = table.split("by log-likelihood, summed")[1]
    assert row_of(after_metric, "worst client") == ["0.400", "0.600"]
    assert row_of(after_metric, "standard deviation over clients") == ["0.200", "0.200"]


def test_the_table_has_the_measures_of_the_method(finished):
    evaluations = [
        round_evaluation(0, measures={"rewards": {"helpful": 1.0}}),
        round_evaluation(1, measures={"rewards": {"helpful": 2.0}}),
    ]
    table = summarize_run(finished(federation_result(evaluations=evaluations)))
    assert "Rewards, measured on held-out prompts" in table
    assert row_of(table, "helpful") == ["1.000", "2.000"]


def test_the_table_has_the_accuracies_of_assigned_adapters(finished):
    assigned = accuracy_report(mean=0.7)
    evaluations = [round_evaluation(0), round_evaluation(1, assigned=assigned)]
    table = summarize_run(finished(federation_result(evaluations=evaluations)))
    after_note = table.split("with the adapter that each client is assigned")[1]
    assert row_of(after_note, "clients' mean") == ["0.600", "0.700"]


def test_the_table_has_the_note_on_how_clients_are_measured_and_their_margins(finished):
    table = summarize_run(finished(federation_result(accuracy_note="each client by its own model")))
    assert "each client by its own model" in table
    assert row_of(table, "reward margin over beta, mean (nats)") == ["0.100", "0.100"]
    after_margin = table.split("reward margin over beta")[1]
    assert row_of(after_margin, "worst client") == ["0.100", "0.100"]
    assert row_of(after_margin, "standard deviation over clients") == ["0.000", "0.000"]


def test_the_table_has_each_contest_with_its_interval_counts_and_consistency(finished):
    win_rates, _ = summarize_run(finished()).split("Win rate at equal length")
    rates = ["50.0", "40.0", "60.0"]
    counts = ["5", "2", "3"]
    assert row_of(win_rates, "aligned against base policy") == [*rates, *counts, "80.0"]


def test_the_table_has_each_contest_at_equal_length(finished):
    table, _ = summarize_run(finished()).split("Win rate, our answer shown first only")
    _, at_equal_length = table.split("Win rate at equal length")
    assert row_of(at_equal_length, "aligned against base policy") == ["60.0", "55.0", "45.0", "65.0"]


def test_the_table_has_the_verdicts_of_the_first_order_alone(finished):
    (lines,) = summarize_run(finished()).split("our answer shown first only")[1:]
    assert row_of(lines, "aligned against base policy") == ["90.0", "70.0", "100.0", "9", "1", "0"]


def test_the_table_has_no_verdicts_of_one_order_without_a_contest(finished):
    assert "shown first only" not in summarize_run(finished(evaluation=evaluation_result()))


def test_the_table_counts_unparsable_verdicts_and_shows_missing_rates_as_dashes(finished):
    contest = contest_figures(unparsable=4, consistency=math.nan, length_controlled=math.nan)
    table = summarize_run(finished(evaluation=evaluation_result(contests={"base_vs_human": contest})))
    assert "base against human summaries" in table
    assert "5/2/3 (4 unparsable)" in table
    assert [line.split()[-1] for line in table.splitlines() if "(4 unparsable)" in line] == ["-"]


def test_the_table_has_the_judge_and_its_accuracy(finished):
    figures = {"judge_accuracy": 0.75, "judge_held_out_pairs": 84}
    table = summarize_run(finished(evaluation=evaluation_result(judge="the judge", judge_figures=figures)))
    assert row_of(table, "judge: the judge") == ["0.750", "84"]


def test_the_table_has_the_figures_of_the_alignment(finished):
    evaluation = evaluation_result(
        implicit_reward=accuracy_report(pairs=12),
        curve=[CurvePoint(step=4, prompts=3, proxy=0.6, judge=0.4)],
        rouge={"aligned": {"rougeLsum": 0.3}, "base": {"rougeLsum": 0.2}},
    )
    table = summarize_run(
        finished(alignment=alignment_result(metrics={"kl_sequence": 1.5}), evaluation=evaluation)
    )
    assert row_of(table, "KL to the reference (base):") == ["1.50"]
    assert row_of(table, "implicit reward of the aligned policy on")[0] == "12"
    assert row_of(table, "preferred to base over DPO (step: selectors / judge):") == ["4", "0.60", "0.40"]
    assert row_of(table, "ROUGE-L against human summaries:") == ["0.300", "0.200"]


def test_figures_that_a_run_does_not_have_are_left_out_of_its_table(finished):
    table = summarize_run(finished())
    for label in ("KL to", "implicit reward", "preferred to base over DPO", "ROUGE", "AlpacaEval", "Answers"):
        assert label not in table


def test_the_table_has_questions_and_alpaca_eval_where_a_run_has_them(finished):
    evaluation = evaluation_result(questions={"aligned": question_result(0.5)}, alpaca_eval=alpaca_result())
    table = summarize_run(finished(evaluation=evaluation))
    assert "Answers to questions" in table
    assert "AlpacaEval (percent)" in table


def test_the_table_ends_with_the_adapters_and_their_hashes(finished):
    adapters = {"adapter": ExportedAdapter(hash="0123456789abcdef", folder="adapter")}
    alignment = alignment_result(model_uri="models:/fed-rlhf/1")
    table = summarize_run(finished(federation_result(adapters=adapters), alignment))
    lines = table.splitlines()[-2:]
    assert lines[0].split() == ["adapter", "runs/1/adapter", "(sha256", "0123456789ab)"]
    assert lines[1].split() == ["aligned", "runs/1/final", "(registered", "as", "models:/fed-rlhf/1)"]
