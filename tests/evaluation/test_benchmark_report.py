"""Tables of a benchmark: means over seeds, win rates pooled over their prompts."""

import pytest

from components.evaluation.benchmark import (
    arm_figures,
    markdown,
    mean_and_spread,
    page,
    picture,
    pooled,
    reward_curve,
    rewards_picture,
    tables,
)
from components.evaluation.winrate import Verdict

WIN, TIE, LOSS = Verdict.FIRST.value, Verdict.TIE.value, Verdict.SECOND.value
FEDERATED = {
    "after": {"worst": 0.4, "domains": {"common": 0.9, "own": 0.5}, "assigned": {"worst": 0.6, "domains": {"common": 0.8, "own": 0.7}}},
    "assigned": {"a": "s0", "b": "s0", "c": "s1"},
    "records": [{"phase": "train", "clients": {"a": {"seconds": 2.0}, "b": {"seconds": 3.0}}}, {"phase": "group", "clients": {"a": {"losses": [1]}}}]}
EVALUATED = {"rouge": {"aligned": {"rougeLsum": 0.2}}, "implicit_reward": {"mean": 0.55}}
FIGURES = {"FedBis": {0: {"common": 0.9, "own": 0.5}, 1: {"common": 0.8, "own": 0.6}}, "FedDPO": {0: {"common": 0.6}}}
CONTESTS = {"FedBis against raw policy": {0: [WIN, WIN, TIE], 1: [LOSS]}}


def test_an_arms_figures_are_those_of_its_phases():
    figures = arm_figures(FEDERATED, {"metrics": {"kl_sequence": 1.5}}, EVALUATED, {"a": "x", "b": "x", "c": "y"}, local_steps=8)
    assert figures == {"common": 0.9, "common_assigned": 0.8, "own": 0.5, "own_assigned": 0.7, "worst": 0.4, "adjusted_rand_index": 1.0, "rougeLsum": 0.2, "kl": 1.5,
                       "implicit_reward": 0.55, "client_steps": 16.0, "train_seconds": 5.0}


def test_a_method_without_groups_has_no_rand_index_and_its_own_accuracy_is_that_of_its_one_adapter():
    plain = FEDERATED | {"assigned": {}, "after": {k: v for k, v in FEDERATED["after"].items() if k != "assigned"}}
    figures = arm_figures(plain, {"metrics": {}}, {"rouge": {"aligned": {}}}, {"a": "x"}, local_steps=1)
    assert "adjusted_rand_index" not in figures and figures["own_assigned"] == 0.5 and "kl" not in figures


def test_the_answers_to_questions_are_figures_where_a_run_has_them_and_the_success_rate_where_there_are_samples():
    known, asked = ({"metrics": {}}, {"a": "x"}), {"raw": {"mean": {"accuracy": 0.1}}, "aligned": {"mean": {"accuracy": 0.3, "success": 0.8}, "all": {"accuracy": 0.5}}}
    figures = arm_figures(FEDERATED, known[0], EVALUATED | {"questions": asked}, known[1], local_steps=1)
    assert (figures["answer_accuracy"], figures["success"]) == (0.3, 0.8), "the aligned policy's means over the sets"
    asked["aligned"]["mean"].pop("success")
    assert "success" not in arm_figures(FEDERATED, known[0], EVALUATED | {"questions": asked}, known[1], local_steps=1)
    assert "answer_accuracy" not in arm_figures(FEDERATED, known[0], EVALUATED, known[1], local_steps=1)


def test_means_are_over_seeds_with_the_sample_standard_deviation():
    assert mean_and_spread([0.9, 0.8]) == "0.850 ± 0.071" and mean_and_spread([0.5]) == "0.500" and mean_and_spread([100.0, 300.0]) == "200 ± 141"


def test_win_rates_are_pooled_over_the_prompts_of_all_seeds_and_not_averaged_over_seeds():
    assert pooled(list(CONTESTS["FedBis against raw policy"].values()), 500, 0).startswith("50.0% [") and pooled([[WIN, WIN, TIE], [LOSS]], 500, 0).endswith("(2/1/1)")
    assert pooled([[]], 500, 0) == "-"


def test_the_report_shows_every_figure_in_every_form(tmp_path):
    parts = tables(FIGURES, CONTESTS, 500)
    assert [title for title, _, _ in parts] == ["Means over seeds (± sample standard deviation)", "Win rates over the prompts of all seeds", "Each seed"]
    assert parts[0][2] == [["FedBis", "2", "0.850 ± 0.071", "0.550 ± 0.071"], ["FedDPO", "1", "0.600", "-"]]
    picture(FIGURES, CONTESTS, tmp_path / "p.png")
    text, html = markdown("B", parts, ["a note"]), page("B <1>", parts, ["a note"], [tmp_path / "p.png"])
    for cell in ("0.850 ± 0.071", "FedBis against raw policy", "(2/1/1)", "a note"):
        assert cell in text and cell in html
    assert "B &lt;1&gt;" in html and (tmp_path / "p.png").stat().st_size > 5000
    assert all(line.count("|") == text.splitlines()[i - 1].count("|") for i, line in enumerate(text.splitlines()) if line.startswith("|---"))


def test_the_same_win_rate_is_never_given_without_its_interval():
    (_, header, rows), = [part for part in tables(FIGURES, CONTESTS, 500) if "Win" in part[0]]
    assert "interval" in header[2] and rows[0][2].count("%") == 3


@pytest.mark.parametrize("verdicts", [[WIN] * 4, [LOSS] * 4])
def test_a_contest_with_one_outcome_has_an_interval_of_no_width(verdicts):
    assert "[100.0%, 100.0%]" in pooled([verdicts], 500, 0) or "[0.0%, 0.0%]" in pooled([verdicts], 500, 0)


MEASURED = {4: {"reward": 3.0, "margin": 2.0, "mean": 0.7}, 0: {"reward": 0.0, "margin": 0.0, "mean": 0.5}, 2: {"reward": 5.0, "margin": 1.0, "mean": 0.6}}


def test_a_policys_rewards_are_beta_times_the_log_ratios_by_round_and_the_best_is_the_greatest_of_them():
    curve = reward_curve(MEASURED, 0.2)
    assert [(point["round"], point["reward"], point["margin"], point["accuracy"]) for point in curve] == [(0, 0, 0, 0.5), (2, 1.0, 0.2, 0.6), (4, pytest.approx(0.6), 0.4, 0.7)]
    assert reward_curve({0: {"margin": 1.0, "mean": 0.5}}, 0.2) == [], "selectors have no reward"
    figures = arm_figures(FEDERATED | {"personal": True, "after": FEDERATED["after"] | {"mean": 0.7}}, {"metrics": {}}, EVALUATED, {}, local_steps=8, curve=curve)
    assert (figures["margin"], figures["reward"], figures["best_reward"], figures["accuracy"]) == (0.4, pytest.approx(0.6), 1.0, 0.7)


def test_own_group_neighbours_are_the_mean_over_rounds_beside_what_chance_would_give():
    weights = [{"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}, "c": {"c": 0.5, "a": 0.5}}, {"a": {"a": 0.5, "b": 0.5}, "b": {"b": 0.5, "a": 0.5}, "c": {"c": 1.0}}]
    records = [record | {"memory": {"weights": given}} for record, given in zip([FEDERATED["records"][0]] * 2, weights, strict=True)]
    figures = arm_figures(FEDERATED | {"records": records}, {"metrics": {}}, EVALUATED, {"a": "x", "b": "x", "c": "y"}, local_steps=8)
    assert figures["neighbours"] == 0.75 and figures["neighbours_chance"] == pytest.approx(2 / 6)


def test_rewards_are_drawn_by_round_for_every_arm(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rewards_picture({"DRIFT": {0: reward_curve(MEASURED, 0.2), 1: reward_curve(MEASURED, 0.4)}, "FedAvg": {0: reward_curve(MEASURED, 0.1)}}, tmp_path / "rewards.png")
    (figure,) = drawn
    lines = [(line.get_label(), [float(v) for v in line.get_ydata()]) for line in figure.axes[0].get_lines()]
    assert lines == [("DRIFT", pytest.approx([0, 1.5, 0.9])), ("FedAvg", pytest.approx([0, 0.5, 0.3]))] and (tmp_path / "rewards.png").stat().st_size > 10_000
