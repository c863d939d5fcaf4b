"""The report of a run: its tables, charts and answers, and its summary for a terminal."""

import ast
import math
from dataclasses import replace

import pytest

from components.data.data_report import ClientCounts
from components.evaluation.winrate import Verdict
from components.recipes import load_recipe
from components.reporting.metrics import cost_metrics, verdict_words
from components.reporting.page import to_html
from components.reporting.run_page import (
    RunDescription,
    accuracy_table,
    alpaca_tables,
    clients_table,
    contests_table,
    headline_tables,
    questions_table,
    run_page,
    run_summary,
)
from components.results import (
    AccuracySummary,
    AlpacaEvalContest,
    AlpacaEvalFigures,
    AlpacaEvalResult,
    ClientTotal,
    ContestFigures,
    CurvePoint,
    ExportedAdapter,
    Outcome,
)
from tests.support.contests import LOSS, TIE, WIN, contest
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

CONTEST = contest([WIN, WIN, TIE, LOSS], prompts=["a", "b", "c", "d"], opposed=1)
ANSWERS = [
    {
        "prompt_id": name,
        "prompt": f"prompt {name}",
        "references": ["a reference"],
        "base": {"text": "one"},
        "aligned": {"text": "three"},
    }
    for name in "abcd"
]


def rows_of(table):
    """The cells of a table by the name of the row."""
    return {row[0]: row[1:] for row in table.rows}


def results_of(debug, evaluations=None, contests=None, **values):
    federation = {} if evaluations is None else {"evaluations": evaluations}
    contests = {"aligned_vs_base": CONTEST} if contests is None else contests
    evaluation = values.pop("evaluation", {})
    figures = {name: one.figures(500) for name, one in contests.items()}
    return run_results(
        debug,
        federation=federation_result(**federation | values.pop("federation", {})),
        evaluation=evaluation_result(contests=figures, **evaluation),
        answers=ANSWERS,
        contests=contests,
        **values,
    )


# --- accuracies


def test_accuracies_are_before_and_after_the_rounds(debug):
    table = accuracy_table(results_of(debug, [round_evaluation(0, mean=0.5), round_evaluation(1, worst=0.3)]))
    assert table.title == "Implicit reward on 20 held-out pairs"
    assert table.header == ["", "before", "after"]
    assert rows_of(table) == {
        "clients' mean": ["0.500", "0.600"],
        "worst client": ["0.400", "0.300"],
        "best client": ["0.800", "0.800"],
        "standard deviation over clients": ["0.200", "0.200"],
        "common-taste pairs": ["0.900", "0.900"],
        "own-taste pairs": ["0.500", "0.500"],
    }


def test_the_best_round_is_shown_among_those_in_which_the_clients_of_the_last_were_measured(debug):
    means = (0.9, 0.5, 0.8, 0.8, 0.6)
    table = accuracy_table(
        results_of(debug, [round_evaluation(n, mean=mean, worst=mean / 2) for n, mean in enumerate(means)])
    )
    assert table.header[1:] == ["before", "after", "best"]
    assert rows_of(table)["worst client"] == ["0.450", "0.300", "0.400"]
    assert table.caption == "best: after round 2, chosen by these pairs"
    # A round in which a weak client was away is no better for it.
    reports = [round_evaluation(n, mean=mean) for n, mean in enumerate((0.5, 0.9, 0.7, 0.6))]
    away = reports[1].accuracy
    absent = sorted(away.clients)[0]
    fewer = {name: value for name, value in away.clients.items() if name != absent}
    away = away.model_copy(update={"clients": fewer, "missing": {absent: "not connected"}})
    reports[1] = reports[1].model_copy(update={"accuracy": away})
    assert results_of(debug, reports).federation.best.rounds_done == 2


def test_clients_without_an_answer_to_a_measurement_are_named(debug):
    before, after = round_evaluation(0), round_evaluation(1)
    absent = after.accuracy.model_copy(update={"missing": {"zoe": "not connected"}})
    page = results_of(debug, [before, after.model_copy(update={"accuracy": absent})])
    clients = len(after.accuracy.clients)
    caption = accuracy_table(page).caption
    assert f"after: {clients} of {clients + 1} clients, without zoe" in caption
    assert "before:" not in caption


def test_domains_of_many_are_left_out_and_other_metrics_have_the_range_of_clients(debug):
    domains = {f"Question {n}?": 0.5 for n in range(36)}
    table = accuracy_table(results_of(debug, [round_evaluation(n, domains=domains) for n in range(2)]))
    assert len(table.rows) == 4
    summaries = [
        AccuracySummary(mean=mean, worst=mean - 0.1, best=1.0, clients={"ada": 0.5, "bea": 0.9})
        for mean in (0.5, 0.7)
    ]
    evaluations = [round_evaluation(n, by_metric={"summed": one}) for n, one in enumerate(summaries)]
    rows = rows_of(accuracy_table(results_of(debug, evaluations)))
    assert rows["by log-likelihood, summed: clients' mean"] == ["0.500", "0.700"]
    assert rows["by log-likelihood, summed: worst client"] == ["0.400", "0.600"]
    assert rows["by log-likelihood, summed: standard deviation over clients"] == ["0.200", "0.200"]


def test_where_clients_have_models_of_their_own_their_margins_and_a_note_are_shown(debug):
    recipe = load_recipe("debug", ["federation.method=feddpo", "federation.options={objective: {beta: 0.5}}"])
    own = Outcome(own="modules", adapters={"policy": "a"}, job_keys={"ada": "x", "bea": "y"})
    table = accuracy_table(results_of(recipe, federation={"outcome": own}))
    rows = rows_of(table)
    assert rows["reward margin, clients' mean (beta x nats)"] == ["0.050", "0.050"]
    assert rows["its worst client"] == ["0.050", "0.050"]
    assert rows["its standard deviation over clients"] == ["0.000", "0.000"]
    assert table.caption == "each client's own model from the server's adapter, on its own pairs"


def test_assigned_adapters_and_measures_of_the_method_have_tables(debug):
    evaluations = [
        round_evaluation(0, measures={"rewards": {"helpful": 1.0, "kl": 0.0, "prompts": 16}}),
        round_evaluation(
            1,
            assigned=accuracy_report(mean=0.7),
            measures={"rewards": {"helpful": 2.0, "kl": -0.0001, "prompts": 16}},
        ),
    ]
    _, assigned, rewards, *_ = headline_tables(results_of(debug, evaluations))
    assert rows_of(assigned)["clients' mean"] == ["0.600", "0.700"]
    assert rewards.title == "Rewards on 16 held-out prompts"
    assert rows_of(rewards) == {
        "helpful": ["1.000", "2.000"],
        "KL of these answers to the reference, nats per completion": ["0.000", "0.000"],
    }


# --- the policy


def test_a_contest_has_its_rate_counts_consistency_and_both_corrections(debug):
    table = contests_table(results_of(debug))
    (row,) = table.rows
    figures = CONTEST.figures(500)
    assert table.title == "Win rate on 4 held-out prompts"
    assert row[0] == "aligned against base policy"
    assert row[1] == "2/2/0"
    assert row[2].startswith("75.0% [")
    assert row[3].startswith(f"{figures.length_controlled:.1%}")
    assert row[4:6] == ["-", "-"]
    assert row[6].startswith("50.0% [")
    assert row[7] == "75.0%"
    assert row[8].startswith("75.0% [")


def test_a_contest_of_ties_alone_is_undecided_by_every_rate(debug):
    style = {"headings": [0] * 34, "list_items": [0] * 34, "bold": [0] * 34}
    tied = contest([TIE] * 34, [str(n) for n in range(34)], style=style)
    judge = {"judge_accuracy": 0.8, "judge_held_out_pairs": 98.0}
    results = results_of(debug, contests={"aligned_vs_base": tied}, evaluation={"judge_figures": judge})
    figures = {"aligned_vs_base": tied.figures(100, judge=judge)}
    evaluation = results.evaluation.model_copy(update={"contests": figures})
    (row,) = contests_table(replace(results, evaluation=evaluation)).rows
    half, none = "50.0% (undecided: all ties)", "0.0% (undecided: all ties)"
    assert row[1:] == ["0/34/0", half, half, half, half, none, "100.0%", none]


def test_an_earlier_result_has_its_rate_without_an_interval(debug):
    stored = CONTEST.figures(100).model_dump(exclude={"ties_half_low", "ties_half_high"})
    results = results_of(debug)
    contests = {"aligned_vs_base": ContestFigures.model_validate(stored)}
    evaluation = results.evaluation.model_copy(update={"contests": contests})
    (row,) = contests_table(replace(results, evaluation=evaluation)).rows
    assert row[2] == "75.0%"


def corrected_table(debug, accuracy, verdicts=(WIN, WIN, TIE, LOSS)):
    """The table of a contest by a judge with this accuracy on 98 held-out pairs."""
    judge = {"judge_accuracy": accuracy, "judge_held_out_pairs": 98}
    results = results_of(debug, evaluation={"judge_figures": judge})
    figures = {"aligned_vs_base": contest(verdicts, [str(n) for n in range(60)]).figures(100, judge=judge)}
    evaluation = results.evaluation.model_copy(update={"contests": figures})
    return contests_table(replace(results, evaluation=evaluation))


def test_a_rate_has_the_one_without_the_judges_errors_beside_it_and_whether_it_decides(debug):
    """(62.5% + q - 1) / (2 q - 1) with q = (78.4 + 1) / 100."""
    table = corrected_table(debug, 0.8)
    ((*_, corrected, _, _, _),) = table.rows
    assert table.header[5] == "corrected [95%]"
    assert corrected.startswith(f"{(0.625 + 0.794 - 1) / (2 * 0.794 - 1):.1%} [")
    assert corrected.endswith("(undecided)")
    assert table.caption.splitlines()[1:] == [
        "undecided with the judge's errors, as the interval includes one half: aligned against base policy"
    ]
    decided = corrected_table(debug, 0.8, [WIN] * 60)
    assert decided.rows[0][5].startswith("100.0% [")
    assert len(decided.caption.splitlines()) == 1


def test_a_judge_at_chance_is_said_to_decide_nothing(debug):
    table = corrected_table(debug, 0.5)
    assert table.rows[0][5] == "the judge is not better than chance"
    note = "the judge is not better than chance on them, so that its verdicts decide nothing"
    assert table.caption.splitlines()[1:] == [note]


def test_a_rate_at_equal_style_and_its_coefficients_are_shown_where_they_are_computed(debug):
    style = {"headings": [1, 0, -1, 0], "list_items": [0, 1, 1, 0], "bold": [0, 0, 0, 0]}
    results = results_of(debug, contests={"aligned_vs_base": CONTEST.model_copy(update={"style": style})})
    figures = results.evaluation.contests["aligned_vs_base"]
    (row,) = contests_table(results).rows
    assert row[4].startswith(f"{figures.style_controlled:.1%} [")
    title = "Coefficients of length and style"
    (table,) = [one for one in headline_tables(results) if one.title == title]
    assert table.header == ["", "length", "headings", "list items", "bold"]
    headings = f"{figures.style_effects['headings']:.2f}"
    assert rows_of(table)["aligned against base policy"][1:4:2] == [headings, "0.00"]
    assert results.metrics["aligned_vs_base/style_controlled"] == figures.style_controlled
    assert results.metrics["aligned_vs_base/style_effects/bold"] == 0
    assert title not in [one.title for one in headline_tables(results_of(debug))]


@pytest.mark.parametrize(("verdict", "share"), [(Verdict.FIRST, "100.0%"), (Verdict.SECOND, "0.0%")])
def test_a_bootstrap_of_equal_verdicts_shows_no_interval(debug, verdict, share):
    table = contests_table(results_of(debug, contests={"aligned_vs_base": contest([verdict] * 4)}))
    cells = dict(zip(table.header, table.rows[0], strict=True))
    assert cells["ours first [95%]"] == cells["share of wins [95%]"] == share


def test_unparsable_verdicts_are_counted_and_the_judge_is_named_with_its_accuracy(debug):
    contests = {"base_vs_human": contest([Verdict.UNPARSABLE] * 2)}
    (row,) = contests_table(results_of(debug, contests=contests, answers_author="human summaries")).rows
    assert row == ["base against human summaries", "0/0/0 (2 unparsable)", *"-------"]
    figures = {"judge_accuracy": 0.75, "judge_held_out_pairs": 84}
    table = contests_table(results_of(debug, evaluation={"judge": "the judge", "judge_figures": figures}))
    assert table.caption == "judge: the judge; its own accuracy 0.750 on 84 held-out pairs"
    table = contests_table(results_of(debug, evaluation={"judge": "the judge"}))
    assert table.caption.splitlines() == [
        "judge: the judge",
        "no rate corrected for the judge's errors: the judge has no held-out pairs",
    ]


def test_the_policy_has_its_kl_rouge_reward_lengths_and_the_curve_over_dpo(debug):
    evaluation = {
        "implicit_reward": accuracy_report(pairs=12),
        "curve": [CurvePoint(step=4, prompts=3, proxy=0.6, judge=0.4)],
        "rouge": {"aligned": {"rougeLsum": 0.3}, "base": {"rougeLsum": 0.2}},
    }
    results = results_of(
        debug, evaluation=evaluation, alignment=alignment_result(metrics={"kl_sequence": 1.5})
    )
    (policy,) = [table for table in headline_tables(results) if table.title == "Policy"]
    assert rows_of(policy) == {
        "sequence-level KL to the reference policy (base) in nats, on up to 2 held-out prompts": ["", "1.50"],
        "ROUGE-L": ["0.200", "0.300"],
        "accuracy of its implicit reward, clients' mean on 12 pairs": ["", "0.600"],
        "its worst client": ["", "0.400"],
        "characters per answer": ["3", "5"],
        "step 4: preferred to base by selectors / judge": ["", "0.60 / 0.40"],
    }


def test_what_a_run_does_not_have_is_left_out(debug):
    titles = [table.title for table in headline_tables(results_of(debug))]
    assert titles == [
        "Implicit reward on 20 held-out pairs",
        "Win rate on 4 held-out prompts",
        "Policy",
    ]


# --- questions and AlpacaEval


def test_question_sets_have_totals_where_there_are_several_and_cut_ones_the_remedy():
    questions = {"base": question_result(0.3), "aligned": question_result(0.5)}
    table = questions_table(questions)
    assert [row[0] for row in table.rows] == ["csqa (10), base", "csqa (10), aligned"]
    assert table.rows[1][1:] == ["50.0% [20.0%, 90.0%]", "25.0%", "10.0%", "-", "-"]
    result = question_result(0.5, 0.8)
    cut = result.all.model_copy(update={"cut": 3})
    several = result.model_copy(update={"sets": {"csqa": result.all, "piqa": result.all}, "all": cut})
    table = questions_table({"aligned": several})
    assert [row[0] for row in table.rows[2:]] == [
        "all questions (10), aligned",
        "mean over the sets, aligned",
    ]
    assert table.rows[-1][4:] == ["80.0%", "40.0%"]
    assert table.caption.startswith("3 questions did not fit policy.max_prompt_tokens")


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
    return AlpacaEvalResult(annotator="an annotator", contests={"aligned_vs_base": contest}, note="a note")


def test_alpaca_evals_numbers_are_in_its_units_and_missing_ones_are_dashes():
    table, _ = alpaca_tables(alpaca_result(n_missing=4))
    assert table.rows == [
        [
            "aligned against base policy",
            *("12.35", "1.50", "20.00", "-", "30.00 [10.00, -]"),
            *("-", "1/3/2 (4 without a preference)", "1,234"),
        ]
    ]
    assert table.caption == "annotator: an annotator\na note"


# --- the page


def section_of(page, title):
    (section,) = [section for section in page.sections if section.title == title]
    return section


@pytest.fixture
def described():
    """What the report says about a run beside its results."""
    return RunDescription(
        id="run-1",
        clients={
            "ada": ClientCounts(train=12, validation=1, test=2, group="x"),
            "bea": ClientCounts(train=5, validation=1, test=2),
        },
        partition={"ada": {"news": 12}, "bea": {"news": 2, "mail": 3}},
        adapters={"adapter": "runs/1/adapter"},
        aligned="runs/1/final",
        links={"MLflow": "make mlflow-ui"},
        phases={"federate": 12.5},
        environment={"torch": "2.13.0"},
        recipe="seed: 0",
    )


@pytest.fixture
def complete(debug):
    """A run with losses, traffic and a history of DPO."""
    scalars = {"loss_first": 0.7, "loss_last": 0.5, "steps": 4.0}
    clients = {name: client_record(scalars, sent=2_000_000, received=3_000_000) for name in ("ada", "bea")}
    return results_of(
        debug,
        federation={
            "records": [step_record(n, clients, adapters={"adapter": "0" * 64}) for n in range(2)],
            "adapters": {"adapter": ExportedAdapter(hash="0123456789abcdef", folder="adapter")},
        },
        alignment=alignment_result(
            model_uri="models:/fed-rlhf/1",
            history=[{"step": n, "loss": 0.6, "rewards/margins": 0.1} for n in (1, 2)],
        ),
        answers_author="human summaries",
    )


def test_clients_have_a_row_with_their_pairs_accuracy_steps_and_bytes(complete, described):
    table = clients_table(complete, described.clients)
    assert table.rows[0] == ["ada", "x", "12", "0.400", "0.400", "8", "4.00", "6.00", "", ""]
    assert table.rows[1][:3] == ["bea", "", "5"]


def test_a_run_that_records_totals_has_no_figure_of_the_training_of_a_client(complete, described):
    records = [
        record.model_copy(update={"clients": {}, "total": ClientTotal.of(list(record.clients.values()))})
        for record in complete.federation.records
    ]
    federation = complete.federation.model_copy(update={"records": records})
    totals = replace(complete, federation=federation)
    table = clients_table(totals, described.clients)
    assert table.header == ["client", "group", "pairs", "before", "after", "adapter"]
    assert table.rows[0] == ["ada", "x", "12", "0.400", "0.400", ""]
    some = complete.federation.model_copy(update={"records": [records[0], *complete.federation.records[1:]]})
    assert clients_table(replace(complete, federation=some), described.clients).header == table.header
    costs = cost_metrics(records)
    assert costs == pytest.approx(cost_metrics(complete.federation.records))
    page, whole = run_page(totals, described), run_page(complete, described)
    assert section_of(page, "What left the clients") == section_of(whole, "What left the clients")


def test_the_sections_of_the_page_say_what_they_tell(complete, described):
    page = run_page(complete, described)
    assert page.subtitle == f"{complete.recipe.federation.method}, 1 rounds with 2 clients · run run-1"
    assert [section.title for section in page.sections] == [
        "Result",
        "Learning",
        "Answers",
        "Clients",
        "Method",
        "What left the clients",
        "Cost",
        "Use it",
        "Recipe and environment",
    ]
    assert all(section.lead.endswith(".") for section in page.sections)


def test_the_learning_section_has_accuracy_losses_and_dpo(complete, described):
    assert len(section_of(run_page(complete, described), "Learning").parts) == 3  # no line of two points
    evaluations = [round_evaluation(n) for n in range(3)]
    federation = complete.federation.model_copy(update={"evaluations": evaluations})
    section = section_of(run_page(replace(complete, federation=federation), described), "Learning")
    accuracy, losses, loss, margin = (part.figure for part in section.parts)
    means = [list(trace.y) for trace in accuracy.data if trace.name]
    assert means == [pytest.approx([mean] * 3) for mean in (0.6, 0.9, 0.5)]
    assert list(accuracy.data[0].y) == [0.8] * 3 + [0.4] * 3
    assert [list(trace.y) for trace in losses.data if trace.name] == [[0.7, 0.7], [0.5, 0.5]]
    assert (list(loss.data[0].y), list(margin.data[0].y)) == ([0.6, 0.6], [0.1, 0.1])


def test_the_learning_section_has_the_log_likelihoods_of_the_clients_pairs(complete, described):
    """Both may fall while their difference rises: the means of two clients after each of two rounds."""
    records = [
        step_record(
            n,
            {
                name: client_record({"logps_chosen": chosen - n, "logps_rejected": -50.0 - 3 * n})
                for name, chosen in (("ada", -40.0), ("bea", -42.0))
            },
        )
        for n in range(2)
    ]
    federation = complete.federation.model_copy(update={"records": records})
    section = section_of(run_page(replace(complete, federation=federation), described), "Learning")
    (chart,) = (part for part in section.parts if part.title.startswith("Log-likelihoods"))
    lines = {trace.name: list(trace.y) for trace in chart.figure.data if trace.name}
    label = "{}, mean and range over clients"
    assert lines == {label.format("chosen"): [-41.0, -42.0], label.format("rejected"): [-50.0, -53.0]}


def test_answers_stand_side_by_side_with_the_names_of_the_winners(complete, described):
    section = section_of(run_page(complete, described), "Answers")
    first, *_, last = section.parts
    assert first.texts == {"base": "one", "aligned": "three", "human summaries": "a reference"}
    assert first.verdicts == {"aligned against base policy": "aligned"}
    assert last.verdicts == {"aligned against base policy": "tie"}


def test_what_left_the_clients_is_counted_by_the_phase_of_a_round(complete, described):
    section = section_of(run_page(complete, described), "What left the clients")
    assert section.parts[0].rows == [
        ["train", "4", "2.000", "number of rows, training loss, optimizer steps"],
    ]


@pytest.mark.parametrize(
    ("own", "words", "call"),
    [
        ({}, "The aligned policy is", '{"prompt": ["..."]}'),
        (
            {"assignment": {"ada": "ada"}},
            "Each client has an aligned policy of its own",
            '"client_id": ["ada"]}',
        ),
        (
            {"own": "modules", "job_keys": {"ada": "x"}},
            "private modules, which stay with the client",
            '{"prompt": ["..."]}',
        ),
    ],
)
def test_how_to_use_the_policy_is_said_for_each_kind_of_it(own, words, call, complete, described):
    outcome = complete.federation.outcome.model_copy(update=own)
    federation = complete.federation.model_copy(update={"outcome": outcome})
    section = section_of(run_page(replace(complete, federation=federation), described), "Use it")
    assert words in section.lead
    assert call in section.parts[0].text


def test_names_of_clients_and_adapters_are_shown_where_they_are_used(complete, described):
    name = 'O\'Brien "q" \\bad{ 研究者'
    outcome = complete.federation.outcome.model_copy(update={"assignment": {name: name}})
    results = replace(complete, federation=complete.federation.model_copy(update={"outcome": outcome}))
    run = replace(described, clients={name: ClientCounts(train=1, validation=1, test=1)})
    code = ast.parse(section_of(run_page(results, run), "Use it").parts[0].text)
    assert name in [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]
    run = replace(described, adapters={"aligned": "runs/1/of-a-client"})
    table = section_of(run_page(complete, run), "Use it").parts[1]
    assert table.rows == [["aligned", "runs/1/of-a-client"], ["aligned", "runs/1/final"]]


def test_the_page_has_the_recipe_the_versions_and_how_to_load_the_policy(complete, described):
    html = to_html(run_page(complete, described))
    for text in ("seed: 0", "2.13.0", "models:/fed-rlhf/1", "runs/1/final", "phase federate", "12.5 s"):
        assert text in html


def test_the_summary_ends_with_the_adapters_and_where_to_look_next(complete, described):
    lines = run_summary(complete, described).splitlines()
    assert lines[0] == f"debug, seed 0: {complete.recipe.federation.method}, 1 rounds"
    end = [line.split() for line in lines[-6:]]
    assert end == [
        ["Adapters"],
        ["adapter", "runs/1/adapter", "(sha256", "0123456789ab)"],
        ["aligned", "runs/1/final", "(registered", "as", "models:/fed-rlhf/1)"],
        [],
        ["Open", "this", "run"],
        ["MLflow:", "make", "mlflow-ui"],
    ]


def test_a_policy_that_was_pulled_is_shown_without_a_registered_model(complete, described):
    pulled = replace(complete, alignment=alignment_result())
    assert "registered" not in run_summary(pulled, described)
    assert "load_model" not in to_html(run_page(pulled, described))
    assert "load_model" in to_html(run_page(complete, described))


@pytest.mark.parametrize(
    ("verdict", "words"),
    [(WIN, "aligned"), (LOSS, "base policy"), (TIE, "tie"), (Verdict.UNPARSABLE, "unparsable")],
)
def test_a_verdict_names_who_wrote_the_better_answer(verdict, words):
    assert verdict_words(verdict, "aligned against base policy") == words
