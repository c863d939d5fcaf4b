"""Claims of a benchmark's file, checked against its figures and contests by intervals."""

import math

import pytest

from components.config.benchmark import Claim
from components.data.records import answer_id
from components.evaluation.winrate import Verdict
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.claims import (
    FAILS,
    HOLDS,
    MAY_BE_CHANCE,
    UNDECIDED,
    check_claims,
    claims_table,
)
from components.reporting.metrics import alias_of
from components.reporting.page import Page, PageSection, to_html
from components.reporting.units import CLIENTS, QUESTIONS, Units
from tests.support.contests import LOSS, TIE, WIN, contest

FIGURES = {
    "FedBis": {
        0: {"common": 0.9, "own": 0.5},
        1: {"common": 0.8, "own": 0.6},
        2: {"common": 0.85, "own": 0.6},
    },
    "FedDPO": {0: {"common": 0.6}, 1: {"common": 0.5}, 2: {"common": 0.55}},
}
CONTEST = "FedBis against base policy"
WINS = {"arm": "FedBis", "figure": "wins", "against": ["base policy"]}
COMMON = {"arm": "FedBis", "figure": "common"}


def by_metric(numbers):
    """What is given by arm, seed and alias, by the names of metrics."""

    def renamed(run):
        return {alias_of(name).metrics[0]: value for name, value in run.items()}

    return {arm: {seed: renamed(run) for seed, run in runs.items()} for arm, runs in numbers.items()}


def evidence(figures=FIGURES, units=None, contests=None, seeds=(0, 1, 2)):
    return BenchmarkResults(seeds, by_metric(figures), by_metric(units or {}), contests=contests or {})


def check(claim, figures=FIGURES, **parts):
    """The findings of one claim."""
    return check_claims([Claim(**claim)], evidence(figures, **parts))


def check_contest(claim, by_seed):
    """The finding of a claim on the wins of a contest with verdicts by seed."""
    (finding,) = check(WINS | claim, contests={CONTEST: by_seed}, seeds=tuple(by_seed))
    return finding


def by_client(figure, *seeds):
    """Figures and units of an arm, of the clients' values by seed."""
    units = {n: {figure: Units(CLIENTS, {"": clients})} for n, clients in enumerate(seeds)}
    figures = {n: {figure: own[figure].mean} for n, own in units.items()}
    return figures, units


HALF = 4.302653 * 0.05 / 3**0.5
"""Half the width of the interval of 0.9, 0.8 and 0.85."""

# --- verdicts


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        ({"at_least": 0.72}, HOLDS),
        ({"above": 0.73}, UNDECIDED),
        ({"above": 0.85}, UNDECIDED),
        ({"above": 0.98}, FAILS),
        ({"at_least": 0.97}, UNDECIDED),
    ],
)
def test_a_claim_is_decided_where_the_whole_interval_is_on_one_side(limit, verdict):
    """Three seeds with one value each have Student's interval of two degrees of freedom."""
    (finding,) = check(COMMON | limit)
    assert finding.verdict == verdict
    assert (finding.low, finding.high) == pytest.approx((0.85 - HALF, 0.85 + HALF))
    assert finding.by_seed == "0: 0.900; 1: 0.800; 2: 0.850"
    assert finding.overall == "mean 0.850"
    assert finding.value == pytest.approx(0.85)
    assert (finding.figure, finding.limit) == ("common taste", next(iter(limit.values())))
    assert finding.drawn == "3 seeds"


def test_a_claim_against_an_arm_is_on_the_difference_of_the_same_seed():
    """In binary, 0.9 - 0.6 is a little less than 0.3; the claim holds all the same."""
    (finding,) = check(COMMON | {"against": ["FedDPO"], "at_least": 0.3})
    assert finding.claim == "FedBis less FedDPO: common taste at least 0.3"
    assert finding.by_seed == "0: 0.900 - 0.600 = 0.300; 1: 0.800 - 0.500 = 0.300; 2: 0.850 - 0.550 = 0.300"
    assert finding.verdict == HOLDS
    assert str(finding) == "holds [0.300, 0.300]"


def test_a_claim_may_be_that_a_figure_is_several_times_anothers():
    figures = {
        "free": {n: {"lambda_drift": value} for n, value in enumerate((0.4, 0.5, 0.5))},
        "FIRM": {n: {"lambda_drift": value} for n, value in enumerate((0.2, 0.3, 0.3))},
    }
    claim = {"arm": "free", "figure": "lambda_drift", "against": ["FIRM"], "times": 2.0, "at_least": 0.0}
    (finding,) = check(claim, figures)
    assert finding.claim == "free less 2 x FIRM: distance of clients' weights at least 0"
    assert (
        finding.by_seed
        == "0: 0.400 - 2 x 0.200 = 0.000; 1: 0.500 - 2 x 0.300 = -0.100; 2: 0.500 - 2 x 0.300 = -0.100"
    )
    half = 4.302653 * (0.1 / 3**0.5) / 3**0.5
    assert (finding.low, finding.high) == pytest.approx((-1 / 15 - half, -1 / 15 + half))
    assert finding.verdict == UNDECIDED


def test_a_factor_without_another_arm_is_refused():
    with pytest.raises(ValueError, match="times .*against"):
        Claim(arm="free", figure="lambda_drift", times=2.0, at_least=0.0)


def test_a_verdict_must_remain_after_the_correction_for_the_number_of_claims():
    """0.85 is above 0.72 with p 0.046 alone; of two such claims neither is decided."""
    claims = [Claim(**COMMON | {"above": 0.72}), Claim(**COMMON | {"above": 0.72})]
    first, second = check_claims(claims, evidence())
    assert first.verdict == second.verdict == UNDECIDED
    assert first.alone == HOLDS
    assert str(first) == "undecided [0.726, 0.974] (holds alone; p is 0.092 corrected for 2 claims)"
    sure = Claim(**COMMON | {"above": 0.1})  # p 0.0015
    assert [one.verdict for one in check_claims([sure, claims[0]], evidence())] == [HOLDS, HOLDS]
    counted = Claim(arm="FedBis", figure="sent", at_least=0.0)
    figures = {"FedBis": {n: run | {"sent": 1.0} for n, run in FIGURES["FedBis"].items()}}
    assert [one.verdict for one in check_claims([counted, claims[0]], evidence(figures))] == [HOLDS, HOLDS]


# --- what an interval is over


def test_a_mean_over_clients_is_drawn_by_clients_too():
    """The seeds are equal, and the clients are not: one value per seed would have no spread."""
    clients = {"a": 0.2, "b": 0.6, "c": 1.0}
    figures, units = by_client("summed", *[clients] * 3)
    claim = {"arm": "A", "figure": "summed", "above": 0.5}
    (finding,) = check(claim, {"A": figures}, units={"A": units})
    assert finding.verdict == UNDECIDED
    assert finding.low < 0.4
    assert finding.high > 0.8
    assert finding.drawn == "3 seeds x 3 clients"
    (alone,) = check(claim, {"A": figures})
    assert str(alone) == "undecided (equal with all seeds, so that nothing is known of what varies)"


def test_clients_of_both_arms_are_paired_by_their_names():
    # Each client gains 0.1, so that every resample of the same clients does.
    clients = {"a": 0.2, "b": 0.5, "c": 0.8}
    better = {name: value + 0.1 for name, value in clients.items()}
    ours, our_units = by_client("summed", *[better] * 3)
    theirs, their_units = by_client("summed", *[clients] * 3)
    claim = {"arm": "A", "figure": "summed", "against": ["B"], "above": 0.0}
    (finding,) = check(claim, {"A": ours, "B": theirs}, units={"A": our_units, "B": their_units})
    assert finding.verdict == HOLDS
    assert (finding.low, finding.high) == pytest.approx((0.1, 0.1))
    assert finding.drawn == "3 seeds x 3 clients, paired"
    # The same numbers as above, of other clients: their difference is within what clients vary.
    ours, our_units = by_client("summed", *[{"a": 0.3, "b": 0.6, "c": 0.9}] * 3)
    theirs, their_units = by_client("summed", *[{"x": 0.2, "y": 0.5, "z": 0.8}] * 3)
    (finding,) = check(claim, {"A": ours, "B": theirs}, units={"A": our_units, "B": their_units})
    assert finding.verdict == UNDECIDED
    assert finding.drawn == "3 seeds x 3 clients, not paired"


def test_questions_are_drawn_within_their_set_and_every_set_counts_once():
    """A set whose answers are all right adds half of the figure, and nothing to the interval."""
    csqa = {str(n): float(n % 2) for n in range(40)}
    strata = {"boolq": {"1": 1.0}, "csqa": csqa}
    units = {n: {"answer_accuracy": Units(QUESTIONS, strata)} for n in range(3)}
    claim = {"arm": "A", "figure": "answer_accuracy", "above": 0.4}
    (finding,) = check(claim, {"A": {n: {"answer_accuracy": 0.75} for n in units}}, units={"A": units})
    half = 2.022691 * (0.25 / 39) ** 0.5 / 2  # Student's quantile with 39 degrees of freedom
    assert (finding.low, finding.high) == pytest.approx((0.75 - half, 0.75 + half))
    assert finding.verdict == HOLDS


# --- no interval


def test_one_seed_or_two_with_one_value_each_are_undecided():
    (finding,) = check(COMMON | {"at_least": 0.1}, {"FedBis": {0: {"common": 0.9}}}, seeds=(0,))
    assert finding.verdict == UNDECIDED
    assert (finding.low, finding.high) == (None, None)
    assert str(finding) == "undecided (one seed)"
    figures, units = by_client("summed", {"a": 0.6, "b": 0.7, "c": 0.8})
    claim = {"arm": "A", "figure": "summed", "above": 0.5}
    (finding,) = check(claim, {"A": figures}, units={"A": units}, seeds=(0,))
    assert str(finding) == "undecided (one seed)"
    assert str(check_contest({"above": 0.5}, {0: contest([WIN] * 20)})) == "undecided (one seed)"
    figures = {"FedBis": FIGURES["FedBis"], "FedDPO": {1: {"common": 0.5}}}
    (finding,) = check(COMMON | {"against": ["FedDPO"], "above": 0.0}, figures)
    assert str(finding) == "undecided (one seed, 1 of 3 seeds)"
    figures = {"FedBis": {0: {"common": 0.9}, 1: {"common": 0.8}}}
    (finding,) = check(COMMON | {"at_least": 0.1}, figures, seeds=(0, 1))
    assert str(finding) == "undecided (one value per seed, which needs 3 seeds)"
    figures, units = by_client("summed", {"a": 0.6}, {"a": 0.7})
    claim = {"arm": "A", "figure": "summed", "above": 0.5}
    (finding,) = check(claim, {"A": figures}, units={"A": units}, seeds=(0, 1))
    assert str(finding) == "undecided (one value per seed, which needs 3 seeds)"


def test_a_figure_that_is_not_the_mean_of_its_units_has_no_interval():
    figures, units = by_client("summed", *[{"a": 0.6, "b": 0.8}] * 3)
    figures[1] = {"summed": 0.71}
    claim = {"arm": "A", "figure": "summed", "above": 0.5}
    (finding,) = check(claim, {"A": figures}, units={"A": units})
    assert str(finding) == "undecided (not the mean of its units with seed 1)"


def test_common_clients_of_many_seeds_are_no_further_clients():
    """As wide with ten seeds as with three: the seeds have the same clients with the same values."""
    clients = {"a": 0.2, "b": 0.6, "c": 1.0}
    widths = []
    for count in (3, 10):
        figures, units = by_client("summed", *[clients] * count)
        claim = {"arm": "A", "figure": "summed", "above": 0.5}
        (finding,) = check(claim, {"A": figures}, units={"A": units}, seeds=range(count))
        widths.append(finding.high - finding.low)
    assert widths == pytest.approx([2 * 4.302653 * 0.4 / 3**0.5] * 2)


def test_one_seed_is_enough_for_what_is_counted():
    figures = {"FedCMOO-A": {0: {"sent": 30.0}}, "FIRM": {0: {"sent": 10.0}}}
    claim = {"arm": "FedCMOO-A", "figure": "sent", "against": ["FIRM"], "times": 2.0, "at_least": 0.0}
    (finding,) = check(claim, figures, seeds=(0,))
    assert str(finding) == "holds [10.000, 10.000]"


def test_a_verdict_states_how_many_seeds_were_measured_where_some_are_missing():
    (finding,) = check(COMMON | {"at_least": 0.3}, seeds=(0, 1, 2, 3))
    assert str(finding) == "holds [0.726, 0.974] (3 of 4 seeds)"


def test_figures_that_are_missing_or_no_numbers_are_undecided_and_named():
    (finding,) = check({"arm": "FedBis", "figure": "own", "against": ["FedDPO"], "at_least": 0.1})
    assert str(finding) == "undecided (not measured: FedDPO)"
    assert finding.by_seed == "-"
    assert finding.overall == "-"
    figures = {"FedBis": {0: {"common": 0.9}}, "FedDPO": {1: {"common": 0.6}}}
    (finding,) = check(COMMON | {"against": ["FedDPO"], "above": 0.0}, figures)
    assert str(finding) == "undecided (no seed has both arms)"
    figures = {"FedBis": {0: {"common": 0.9}, 1: {"common": math.nan}}}
    (finding,) = check(COMMON | {"at_least": 0.1}, figures, seeds=(0, 1))
    assert str(finding) == "undecided (not a finite number with seed 1)"
    assert finding.by_seed == "0: 0.900; 1: nan"


# --- wins


def test_a_claim_on_wins_leaves_ties_out():
    finding = check_contest({"above": 0.5}, {0: contest([WIN, WIN, TIE]), 1: contest([LOSS])})
    assert finding.by_seed == "0: 2 to 0 (1.000); 1: 0 to 1 (0.000)"
    assert finding.overall.startswith("2 to 1 (0.667); length-controlled, a tie half, 62.5% [")
    assert finding.verdict == UNDECIDED
    assert finding.drawn == "2 seeds x 1 to 3 prompts"


def test_wins_on_nearly_all_prompts_of_all_seeds_hold_and_losses_fail():
    seeds = [contest([WIN] * 9 + [TIE]), contest([WIN] * 8 + [LOSS]), contest([WIN] * 9)]
    finding = check_contest({"above": 0.5}, dict(enumerate(seeds)))
    assert finding.verdict == HOLDS
    assert finding.low > 0.5
    assert finding.reason == ""
    assert check_contest({"above": 0.5}, {n: contest([LOSS] * 9 + [WIN]) for n in range(3)}).verdict == FAILS


@pytest.mark.parametrize("verdict", [WIN, LOSS])
def test_two_seeds_decide_nothing_but_counts(verdict):
    finding = check_contest({"above": 0.5}, {n: contest([verdict] * 20) for n in range(2)})
    assert (finding.verdict, finding.reason) == (UNDECIDED, "2 seeds")
    assert finding.low is not None
    figures, units = by_client("summed", *[{"a": 0.6, "b": 0.8}] * 2)
    claim = {"arm": "A", "figure": "summed", "above": 0.5}
    (finding,) = check(claim, {"A": figures}, units={"A": units}, seeds=(0, 1))
    assert str(finding).startswith("undecided [-")
    assert str(finding).endswith(" (2 seeds)")
    (finding,) = check(claim, {"A": figures}, units={"A": units}, seeds=(0, 1, 2))
    assert str(finding).endswith(" (2 of 3 seeds)")
    figures = {"FIRM": {0: {"sent": 10.0}, 1: {"sent": 10.0}}}
    (finding,) = check({"arm": "FIRM", "figure": "sent", "at_least": 0.0}, figures, seeds=(0, 1))
    assert str(finding) == "holds [10.000, 10.000]"


@pytest.mark.parametrize("limit", [{"above": 0.5}, {"at_least": 0.1}])
@pytest.mark.parametrize("verdicts", [[TIE, TIE], []])
def test_0_wins_to_0_losses_are_undecided(verdicts, limit):
    finding = check_contest(limit, {0: contest(verdicts)})
    assert str(finding) == "undecided (0 wins to 0 losses)"
    assert finding.by_seed == "0: 0 to 0"


@pytest.mark.parametrize(("wins", "verdict"), [(1, UNDECIDED), (4, UNDECIDED), (6, HOLDS)])
def test_a_few_wins_to_0_losses_are_undecided(wins, verdict):
    assert check_contest({"above": 0.5}, {n: contest([WIN] * wins) for n in range(3)}).verdict == verdict


def test_the_same_prompts_with_several_seeds_are_no_further_prompts():
    assert check_contest({"above": 0.5}, {n: contest([WIN] * 4) for n in range(3)}).verdict == UNDECIDED


def test_wins_by_length_alone_may_be_chance():
    """Of 18 longer answers 16 win, of 4 shorter ones one does."""
    verdicts = [WIN] * 16 + [LOSS] * 2 + [WIN] + [LOSS] * 3
    longer = contest(verdicts, ours=[9] * 18 + [1] * 4)
    finding = check_contest({"above": 0.5}, dict.fromkeys(range(3), longer))
    assert finding.verdict == HOLDS
    assert finding.reason == MAY_BE_CHANCE


@pytest.mark.parametrize("figure", ["wins", "wins_equal_length"])
def test_seeds_without_a_verdict_that_counts_are_no_seeds(figure):
    unknown = contest([Verdict.UNPARSABLE] * 9)
    nothing = contest([TIE] * 9) if figure == "wins" else unknown
    one = check_contest({"above": 0.5, "figure": figure}, {0: contest([WIN] * 9), 1: nothing, 2: unknown})
    assert (one.verdict, one.low) == (UNDECIDED, None)
    assert one.reason == "one seed, 1 of 3 seeds"
    two = check_contest(
        {"above": 0.5, "figure": figure}, {0: contest([WIN] * 9), 1: contest([WIN] * 9), 2: nothing}
    )
    assert (two.verdict, two.reason) == (UNDECIDED, "2 of 3 seeds")


@pytest.mark.parametrize("limit", [{"above": 0.0}, {"at_least": 1.0}, {"above": 50.0}])
def test_a_limit_of_a_share_is_between_0_and_1(limit):
    with pytest.raises(ValueError, match="a share is between 0 and 1"):
        Claim(**WINS | limit)


def test_a_claim_may_be_on_the_rate_at_equal_length():
    """Half of the pairs of equal length are wins, and all those where our answer is longer."""
    verdicts = [WIN] * 20 + [WIN, LOSS] * 10
    prompts = [f"p{n}" for n in range(40)]
    seeds = dict.fromkeys(range(3), contest(verdicts, prompts, ours=[9] * 20 + [5] * 20))
    wins, equal = (
        check_contest({"above": 0.5, "figure": figure}, seeds) for figure in ("wins", "wins_equal_length")
    )
    assert wins.verdict == HOLDS
    assert equal.claim == "FedBis against base policy: length-controlled rate, a tie half a win above 0.5"
    assert equal.value < wins.value - 0.05
    assert equal.low < equal.value < equal.high
    assert equal.low > 0
    (nothing,) = check(WINS | {"figure": "wins_equal_length", "above": 0.5})
    assert str(nothing) == "undecided (not measured)"


def test_a_claim_against_several_arms_is_one_finding_each():
    claim = WINS | {"against": ["base policy", "FedDPO"], "above": 0.5}
    seeds = [contest([WIN] * 8 + [TIE]), contest([WIN] * 9), contest([WIN] * 9)]
    findings = check(claim, contests={CONTEST: dict(enumerate(seeds))})
    assert [finding.verdict for finding in findings] == [HOLDS, UNDECIDED]
    assert str(findings[1]) == "undecided (not measured)"


# --- the report


def test_the_table_has_the_interval_in_the_cell_of_the_verdict():
    (row,) = claims_table(check(COMMON | {"at_least": 0.7})).rows
    assert row == [
        "FedBis: common taste at least 0.7",
        "holds [0.726, 0.974]",
        "3 seeds",
        "0.050; -",
        "0.165",
        "0: 0.900; 1: 0.800; 2: 0.850",
        "mean 0.850",
    ]


def test_the_html_report_marks_verdicts_by_class():
    findings = check(COMMON | {"at_least": 0.7})
    findings += check(COMMON | {"at_least": 0.85})
    findings += check(COMMON | {"at_least": 0.99})
    findings += check(WINS | {"above": 0.5})
    html = to_html(Page("B", "", [PageSection("Claims", "", [claims_table(findings)])]))
    for verdict in (HOLDS, UNDECIDED, FAILS):
        assert f'<td class="{verdict}">{verdict} [0.726, 0.974]</td>' in html
    assert '<td class="undecided">undecided (not measured)</td>' in html


def test_a_claim_draws_prompts_and_not_their_answers():
    answers = [answer_id(prompt, number) for prompt in "abcdefgh" for number in range(4)]
    verdicts = [WIN] * 24 + [LOSS] * 8
    repeated = {seed: contest(verdicts, answers) for seed in range(3)}
    apart = {seed: contest(verdicts, [f"{n}" for n in range(32)]) for seed in range(3)}
    finding = check_contest({"above": 0.5}, repeated)
    independent = check_contest({"above": 0.5}, apart)
    assert finding.drawn == "3 seeds x 8 prompts"
    assert finding.low < independent.low - 0.05
    assert "24 to 8" in finding.by_seed
