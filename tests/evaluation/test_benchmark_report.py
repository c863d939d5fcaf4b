"""Tables of a benchmark: means over seeds, win rates pooled over their prompts."""

import itertools

import pytest

from components.benchmarks import Claim
from components.evaluation.benchmark import (
    Contest,
    Picture,
    answer_figures,
    arm_figures,
    contests_table,
    counted,
    figures_tables,
    front_figures,
    judges_table,
    markdown,
    mean_and_spread,
    objectives_curve,
    page,
    pool,
    rand_curve,
    reward_curve,
    samples_table,
    weights_curves,
)
from components.evaluation.benchmark_pictures import accuracy_kinds, hacking_grid, picture, rand_picture, rewards_picture
from components.evaluation.claims import check_claims, claims_table
from components.evaluation.length_control import control_length
from components.evaluation.objective_pictures import fronts_picture, objectives_picture, weights_picture
from components.evaluation.winrate import Verdict

WIN, TIE, LOSS = Verdict.FIRST.value, Verdict.TIE.value, Verdict.SECOND.value
FEDERATED = {
    "after": {"worst": 0.4, "domains": {"common": 0.9, "own": 0.5}, "assigned": {"worst": 0.6, "domains": {"common": 0.8, "own": 0.7}}},
    "assigned": {"a": "s0", "b": "s0", "c": "s1"},
    "records": [{"phase": "train", "clients": {"a": {"seconds": 2.0}, "b": {"seconds": 3.0}}}, {"phase": "group", "clients": {"a": {"losses": [1]}}}]}
EVALUATED = {"rouge": {"aligned": {"rougeLsum": 0.2}}, "implicit_reward": {"mean": 0.55}}
FIGURES = {"FedBis": {0: {"common": 0.9, "own": 0.5}, 1: {"common": 0.8, "own": 0.6}}, "FedDPO": {0: {"common": 0.6}}}


def contest(verdicts: list[str], ours: int = 5, theirs: int = 5, consistency: float | None = None, prompts: str = "abcdefghijklmnopqrstuvwxyz") -> Contest:
    n = len(verdicts)
    return Contest(list(prompts[:n]), verdicts, [ours] * n, [theirs] * n, consistency)


CONTESTS = {"FedBis against raw policy": {0: contest([WIN, WIN, TIE]), 1: contest([LOSS])}}
POOLS = {name: pool(by_seed, 500) for name, by_seed in CONTESTS.items()}


def test_an_arms_figures_are_those_of_its_phases():
    figures = arm_figures(FEDERATED, {"metrics": {"kl_sequence": 1.5}}, EVALUATED, {"a": "x", "b": "x", "c": "y"}, local_steps=8)
    assert figures == {"common": 0.9, "common_assigned": 0.8, "own": 0.5, "own_assigned": 0.7, "worst": 0.4, "adjusted_rand_index": 1.0, "rougeLsum": 0.2, "kl": 1.5,
                       "implicit_reward": 0.55, "client_steps": 16.0, "train_seconds": 5.0}


def test_aggregation_is_the_mean_time_of_a_round_with_all_its_steps_and_is_shown_to_the_millisecond():
    records = [{"phase": "score", "round": 0, "seconds": 0.0012, "clients": {}}, *({"phase": "train", "round": n, "seconds": 0.02, "clients": {"a": {"seconds": 2.0}}} for n in (0, 1))]
    figures = arm_figures(FEDERATED | {"records": records}, {"metrics": {}}, EVALUATED, {"a": "x"}, local_steps=1)
    assert figures["aggregation_seconds"] == pytest.approx(0.0206) and figures["train_seconds"] == 4.0
    means, single = figures_tables({"A": {0: figures, 1: figures | {"aggregation_seconds": 0.0306}}, "old": {0: {"train_seconds": 4.0}}}, {})
    assert means.header[-2:] == single.header[-2:] == ["training (s)", "aggregation (s a round)"]
    assert [row[-1] for row in means.rows] == ["0.026 ± 0.007", "-"] and [row[-1] for row in single.rows] == ["0.021", "0.031", "-"]


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


def test_win_rates_are_pooled_over_the_answers_of_all_seeds_and_each_seed_stands_beside():
    found = POOLS["FedBis against raw policy"]
    assert (found.rate.rate, counted(found.rate), found.answers) == (0.5, "2/1/1", 4), "not the mean of 2/3 and 0"
    assert {seed: (rate.rate, counted(rate)) for seed, rate in found.by_seed.items()} == {0: (pytest.approx(2 / 3), "2/1/0"), 1: (0.0, "0/0/1")}
    assert found.prompts == 3, "seed 1 asks one of seed 0's prompts again"


def test_the_rate_at_equal_length_is_that_of_all_seeds_answers_together():
    verdicts, ours, theirs = [WIN, WIN, LOSS, TIE, WIN, LOSS], ["a" * n for n in (9, 8, 3, 4, 7, 5)], ["b" * n for n in (4, 5, 6, 4, 9, 5)]
    parts = [Contest(list("xyz"), verdicts[k:k + 3], [len(t) for t in ours[k:k + 3]], [len(t) for t in theirs[k:k + 3]]) for k in (0, 3)]
    found = pool({0: parts[0], 1: parts[1]}, 300, 7)
    assert found.even == control_length([Verdict(v) for v in verdicts], ours, theirs, 300, 7) and found.even.uncontrolled == pytest.approx(3.5 / 6)
    assert found.even.rate != found.even.uncontrolled and (found.ours, found.theirs) == (6.0, pytest.approx(5.5))
    (row,) = contests_table({"A against B": found}).rows
    assert f"{found.even.rate:.1%} [{found.even.low:.1%}, {found.even.high:.1%}]" in row and "58.3%" in row and "6, 6" in row


def test_the_table_of_contests_has_an_interval_its_caption_says_over_what_and_every_seed_stands_in_it():
    table = contests_table(POOLS)
    (row,) = table.rows
    assert row[:3] == ["FedBis against raw policy", "4 (3)", "50.0% [0.0%, 100.0%] (2/1/1)"] and row[3] == "0: 66.7% (2/1/0); 1: 0.0% (0/0/1)"
    assert "over the answers" in table.caption and "no other seed" in table.caption
    assert set(contests_table({"A against B": pool({0: contest([])}, 500)}).rows[0][2:]) == {"-", "0: -"}


def test_the_report_shows_every_figure_in_every_form(tmp_path):
    means, single = figures_tables(FIGURES, {0: {"rougeLsum": 0.2}, 1: {"rougeLsum": 0.4}})
    assert means.rows == [["FedBis", "2", "0.850 ± 0.071", "0.550 ± 0.071", "-"], ["FedDPO", "1", "0.600", "-", "-"], ["raw policy", "2", "-", "-", "0.300 ± 0.141"]]
    assert len(single.rows) == 5
    picture(FIGURES, POOLS, tmp_path / "p.png")
    parts = [means, contests_table(POOLS), Picture("seen", tmp_path / "p.png", "what <it> shows"), single]
    text, html = markdown("B", parts, ["a note"]), page("B <1>", parts, ["a note"])
    for cell in ("0.850 ± 0.071", "FedBis against raw policy", "(2/1/1)", "a note", "Intervals are"):
        assert cell in text and cell in html
    assert "B &lt;1&gt;" in html and "what &lt;it&gt; shows" in html and "data:image/png" in html and (tmp_path / "p.png").stat().st_size > 5000
    rules = [i for i, line in enumerate(text.splitlines()) if line.startswith("|---")]
    assert len(rules) == 3 and all(text.splitlines()[i].count("|") == text.splitlines()[i - 1].count("|") == text.splitlines()[i + 1].count("|") for i in rules)


@pytest.mark.parametrize("verdicts", [[WIN] * 4, [LOSS] * 4])
def test_a_contest_with_one_outcome_has_an_interval_of_no_width(verdicts):
    found = pool({0: contest(verdicts)}, 500)
    assert found.rate.low == found.rate.high == found.rate.rate


def test_the_raw_policys_figures_are_of_what_it_writes():
    evaluated = EVALUATED | {"rouge": {"aligned": {"rougeLsum": 0.2}, "raw": {"rougeLsum": 0.1}}, "questions": {"raw": {"mean": {"accuracy": 0.3}}, "aligned": {"mean": {"accuracy": 0.5}}}}
    assert answer_figures(evaluated, "raw", ["abc", "a"]) == {"rougeLsum": 0.1, "characters": 2.0, "answer_accuracy": 0.3}
    assert answer_figures(evaluated, "aligned", ["abc"]) == {"rougeLsum": 0.2, "characters": 3.0, "answer_accuracy": 0.5}


def test_the_judges_table_has_its_consistency_and_its_own_accuracy_with_the_number_of_pairs_where_that_was_recorded():
    contests = {"A against raw policy": {0: contest([WIN], consistency=0.75), 1: contest([WIN], consistency=0.5)}, "A against B": {0: contest([WIN])}}
    table = judges_table(contests, {0: {"judge_accuracy": 0.7, "judge_accuracy/own": 0.5, "judge_held_out_pairs": 84}, 1: {"judge_accuracy": 0.6}})
    assert table.header == ["", "seed 0", "seed 1"]
    assert table.rows == [["position consistency, A against raw policy", "0.750", "0.500"], ["own accuracy", "0.700", "0.600"], ["own accuracy, pairs of domain own", "0.500", "-"],
                          ["own accuracy, held-out pairs", "84", "not recorded"]]
    assert len(judges_table(contests, {0: {}, 1: {}}).rows) == 1, "a judge that was not trained has no accuracy"


def findings(claim: dict, pools=POOLS, figures=FIGURES, seeds=(0, 1)) -> list:
    return check_claims([Claim(**claim)], figures, pools, seeds)


@pytest.mark.parametrize(("limit", "says"), [
    ({"at_least": 0.8}, "holds in every seed"), ({"above": 0.8}, "holds on average"), ({"above": 0.85}, "does not hold"), ({"at_least": 0.85}, "holds on average"), ({"at_least": 0.86}, "does not hold")])
def test_a_claim_on_a_figure_is_held_against_each_seed_and_then_against_their_mean(limit, says):
    (found,) = findings({"arm": "FedBis", "figure": "common"} | limit)
    assert (found.says, found.by_seed, found.overall) == (says, "0: 0.900; 1: 0.800", "mean 0.850")


def test_a_claim_against_an_arm_is_on_the_difference_of_the_same_seed_and_says_how_many_seeds_have_it():
    (found,) = findings({"arm": "FedBis", "figure": "common", "against": ["FedDPO"], "at_least": 0.3})
    assert found.claim == "FedBis less FedDPO: common taste at least 0.3"
    assert (found.says, found.by_seed) == ("holds in every seed (1 of 2 seeds)", "0: 0.900 - 0.600 = 0.300"), "0.9 - 0.6 is a little less than 0.3 to a computer"
    (found,) = findings({"arm": "FedDPO", "figure": "own", "at_least": 0.1})
    assert (found.says, found.by_seed, found.overall) == ("not measured", "-", "-")


def test_a_claim_on_wins_leaves_ties_apart_and_says_what_is_left_at_equal_length():
    (found,) = findings({"arm": "FedBis", "figure": "wins", "against": ["raw policy"], "above": 0.5})
    assert found.says == "holds on average, but at equal length it may be chance" and found.by_seed == "0: 2 to 0 (1.000); 1: 0 to 1 (0.000)"
    assert found.overall.startswith("2 to 1 (0.667); at equal length, a tie half, 62.5% [")
    better = {"FedBis against raw policy": pool({0: contest([WIN] * 9 + [TIE]), 1: contest([WIN] * 8 + [LOSS])}, 500)}
    (found,) = findings({"arm": "FedBis", "figure": "wins", "against": ["raw policy"], "above": 0.5}, better)
    assert found.says == "holds in every seed"
    longer = {"FedBis against raw policy": pool({0: Contest(list("abcdefgh"), [WIN, LOSS] * 3 + [WIN] * 2, [9, 1] * 3 + [9] * 2, [5] * 8)}, 500)}
    (found,) = findings({"arm": "FedBis", "figure": "wins", "against": ["raw policy"], "above": 0.5}, longer, seeds=(0,))
    assert found.says.endswith("may be chance")
    tied = {"FedBis against raw policy": pool({0: contest([TIE, TIE])}, 500)}
    (found,) = findings({"arm": "FedBis", "figure": "wins", "against": ["raw policy"], "at_least": 0.0}, tied, seeds=(0,))
    assert (found.says, found.by_seed) == ("does not hold", "0: 0 to 0")


def test_a_claim_that_names_several_is_one_each_and_the_page_marks_what_holds():
    found = findings({"arm": "FedBis", "figure": "wins", "against": ["raw policy", "FedDPO"], "above": 0.5})
    assert [f.says for f in found] == ["holds on average, but at equal length it may be chance", "not measured"]
    html = page("B", [claims_table(findings({"arm": "FedBis", "figure": "common", "at_least": 0.8}) + found)], [])
    assert "<td class=holds>holds in every seed</td>" in html and "<td class=partly>holds on average, but" in html


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


def test_groups_are_followed_over_the_rounds_and_drawn_where_the_true_ones_are_known(tmp_path):
    records = [{"phase": "train", "rounds_done": 1, "assigned": {}}, {"phase": "group", "rounds_done": 2, "assigned": {"a": "s0", "b": "s1", "c": "s0", "d": "s1"}},
               {"phase": "group", "rounds_done": 4, "assigned": {"a": "s0", "b": "s0", "c": "s1", "d": "s1"}}]
    known = {"a": "x", "b": "x", "c": "y", "d": "y"}
    curve = rand_curve(records, known)
    assert [(point["round"], point["index"]) for point in curve] == [(2, pytest.approx(-0.5)), (4, 1.0)] and rand_curve(records, dict.fromkeys(known)) == []
    rand_picture({"FedBiscuit": {0: curve, 1: curve}}, tmp_path / "groups.png")
    assert (tmp_path / "groups.png").stat().st_size > 5000


def test_the_reward_hacking_curves_are_one_panel_an_arm_and_seed(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    curve = [{"step": 4, "prompts": 3, "proxy": 0.6, "judge": 0.4}]
    hacking_grid({"FedBis": {0: curve, 1: curve}, "FedBiscuit": {1: curve}}, tmp_path / "h.png")
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["FedBis, seed 0", "FedBis, seed 1", "FedBiscuit, seed 0", "FedBiscuit, seed 1"]
    assert [[float(v) for v in line.get_ydata()] for line in figure.axes[0].get_lines()[1:]] == [[0.5, 0.6], [0.5, 0.4]]


OBJECTIVES = {"helpful": 0.5, "clean": 2.5, "kl": 3.0, "prompts": 8}
RECORDS = [
    {"phase": "gradients", "rounds_done": 0, "clients": {"a": {"bytes_sent": 2_000_000}}, "server": {"lambda/helpful": 0.5}},
    {"phase": "train", "rounds_done": 1, "clients": {"a": {"seconds": 1.0, "bytes_sent": 1_000_000, "bytes_kept": 0, "lambda/helpful": 0.25, "lambda/clean": 0.75, "lambda_steps": {"helpful": [0.5, 0.0], "clean": [0.5, 1.0]}}}, "server": {"lambda_drift": 0.2, "mean_lambda_drift": 0.1, "update_drift": 1.0}},
    {"phase": "train", "rounds_done": 2, "clients": {"b": {"seconds": 1.0, "bytes_sent": 1_000_000, "bytes_kept": 0, "lambda/helpful": 0.5, "lambda/clean": 0.5, "lambda_steps": {"helpful": [0.5], "clean": [0.5]}}}, "server": {"lambda_drift": 0.4, "mean_lambda_drift": 0.3, "update_drift": 3.0}}]


def test_figures_of_several_objectives_are_the_rewards_the_distances_and_all_that_was_sent():
    federated = FEDERATED | {"after": FEDERATED["after"] | {"objectives": OBJECTIVES}, "records": RECORDS}
    figures = arm_figures(federated, {"metrics": {}}, EVALUATED, {}, 8)
    wanted = {"reward:helpful": 0.5, "reward:clean": 2.5, "mean_reward": 1.5, "sampled_kl": 3.0, "lambda_drift": pytest.approx(0.3), "update_drift": 2.0, "sent": 4.0}
    assert {name: figures[name] for name in wanted} == wanted
    means, _ = figures_tables({"FIRM": {0: figures}, "front": {0: {"hypervolume": 1.0}}}, {})
    assert {"reward, helpful", "reward, clean", "mean reward", "hypervolume"} <= set(means.header) and means.rows[1].count("-") == len(means.header) - 3


def test_a_fronts_figures_are_its_volume_and_its_least_rank_correlation():
    points = {"a": {"x": 3.0, "y": 1.0}, "b": {"x": 2.0, "y": 2.0}, "c": {"x": 1.0, "y": 3.0}}
    liked = {"a": {"x": 9.0, "y": 1.0}, "b": {"x": 2.0, "y": 2.0}, "c": {"x": 1.0, "y": 4.0}}
    assert front_figures(points, liked, {"x": 0.0, "y": 0.0}) == {"hypervolume": pytest.approx(6.0), "rank": pytest.approx(1.0)}
    assert front_figures(points | {"c": {"x": 2.5, "y": 3.0}}, liked, {"x": 0.0, "y": 0.0})["rank"] == pytest.approx(0.5)
    three = {arm: scores | {"z": 1.0 + scores["x"]} for arm, scores in points.items()}
    assert front_figures(three, {arm: {"x": share, "y": 1 - share, "z": 1.0} for arm, share in (("a", 0.9), ("b", 0.5), ("c", 0.1))}, {"x": 0.0, "y": 0.0, "z": 0.0})["rank"] == pytest.approx(1.0)     # of z all shares are the same
    still = {arm: scores | {"y": 1.0} for arm, scores in points.items()}
    assert front_figures(still, liked, {"x": 0.0, "y": 0.0})["rank"] == 0   # y does not follow its weight at all
    shares = {"a": {"x": 0.6, "y": 0.3, "z": 0.1}, "b": {"x": 0.45, "y": 0.45, "z": 0.1}, "c": {"x": 0.3, "y": 0.6, "z": 0.1}}
    assert len({sum(share.values()) for share in shares.values()}) > 1 and front_figures(three, shares, {"x": 0.0, "y": 0.0, "z": 0.0})["rank"] == pytest.approx(1.0)
    assert set(front_figures(points, {arm: {"x": 1.0, "y": 1.0} for arm in points}, {"x": 0.0, "y": 0.0})) == {"hypervolume"}


@pytest.mark.parametrize(("runs", "kinds"), [
    ([{"common": 0.9, "own": 0.5, "own_assigned": 0.5, "accuracy": 0.7}], ["common", "own"]), ([{"own": 0.5, "own_assigned": 0.6}], ["own", "own_assigned"]),
    ([{"accuracy": 0.7, "per_token": 0.6}, {"summed": 0.5}], ["accuracy", "summed", "per_token"]), ([{"hypervolume": 1.0}], [])])
def test_the_picture_shows_accuracies_by_taste_where_there_are_tastes_and_none_twice(tmp_path, runs, kinds):
    assert accuracy_kinds(runs) == kinds
    picture({"a method": dict(enumerate(runs)), "front": {0: {"rank": 1.0}}}, {}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_fronts_policies_answer_the_same_prompts_side_by_side_in_a_line_each():
    def rows(arm: str, prompts: str):
        return [{"prompt_id": p, "prompt": f"to {p} |\nline", "aligned": {"text": f"{arm} {p}"}, "raw": {"text": f"raw {p}"}} for p in prompts]

    table = samples_table("FIRM, seed 0", {"FIRM-1-9": rows("one", "dbac"), "FIRM-9-1": rows("nine", "cab")}, most=2)
    assert table.header == ["prompt", "raw policy", "FIRM-1-9", "FIRM-9-1"] and [row[1:] for row in table.rows] == [["raw a", "one a", "nine a"], ["raw b", "one b", "nine b"]]
    assert "| to a \\| line | raw a | one a | nine a |" in markdown("B", [table], []).splitlines()


def test_objectives_are_followed_over_the_rounds_and_drawn(tmp_path, monkeypatch):
    from matplotlib import pyplot

    curve = objectives_curve({0: OBJECTIVES, 2: OBJECTIVES | {"clean": 3.0}}, RECORDS)
    assert [point["round"] for point in curve] == [0, 1, 2] and curve[2]["reward, clean"] == 3.0 and curve[1] == {"round": 1, "distance of clients' weights": 0.2, "distance of clients' updates": 1.0}
    assert objectives_curve({}, RECORDS) == []
    weights = weights_curves(RECORDS)
    assert weights == {"helpful": {"a": [(0.5, 0.5), (1.0, 0.0)], "b": [(2.0, 0.5)]}, "clean": {"a": [(0.5, 0.5), (1.0, 1.0)], "b": [(2.0, 0.5)]}}
    objectives_picture({"FIRM": {0: curve, 1: curve}, "other": {0: curve}}, tmp_path / "o.png")
    weights_picture({"FIRM": weights}, tmp_path / "w.png")
    points = {"a": {"x": 3.0, "y": 1.0}, "b": {"x": 2.0, "y": 2.0}, "c": {"x": 1.0, "y": 1.0}, "raw policy": {"x": 0.0, "y": 0.0}}
    drawn = []
    with monkeypatch.context() as patched:
        patched.setattr(pyplot, "close", drawn.append)
        fronts_picture({"FIRM": {0: points, 1: points}, "FedCMOO-A": {1: points}}, tmp_path / "f.png")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["FIRM", "raw policy", "FedCMOO-A"], "a front that a seed lacks, too"
    assert [axes.get_title() for axes in drawn[0].axes] == ["seed 0", "seed 1"] and [len(line.get_xdata()) for line in drawn[0].axes[1].get_lines()] == [2, 2], "the dominated one is on no line"
    names = drawn[0].axes[1].texts
    boxes = [name.get_window_extent() for name in names]
    assert [(name.get_text(), name.get_color()) for name in names] == [(arm, color) for color in ("C0", "C1") for arm in "abc"]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), "names of two fronts with the same points"
    pyplot.close(drawn[0])
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "owf")


def test_a_claim_may_be_that_a_figure_is_several_times_anothers():
    figures = {"free": {0: {"lambda_drift": 0.4}, 1: {"lambda_drift": 0.5}}, "FIRM": {0: {"lambda_drift": 0.2}, 1: {"lambda_drift": 0.3}}}
    (found,) = findings({"arm": "free", "figure": "lambda_drift", "against": ["FIRM"], "times": 2.0, "at_least": 0.0}, figures=figures)
    assert found.claim == "free less 2 x FIRM: distance of clients' weights at least 0" and found.says == "does not hold" and "0.400 - 2 x 0.200 = 0.000; 1: 0.500 - 2 x 0.300 = -0.100" in found.by_seed
    with pytest.raises(ValueError, match="times is of a figure's difference"):
        Claim(arm="free", figure="lambda_drift", times=2.0, at_least=0.0)
