"""Claims of a benchmark's file, checked against its figures and contests."""

import pytest

from components.config.benchmark import Claim
from components.reporting.claims import (
    FAILS,
    HOLDS,
    HOLDS_ON_AVERAGE,
    MAY_BE_CHANCE,
    NOT_MEASURED,
    check_claims,
    claims_table,
)
from components.reporting.contests import ContestVerdicts, pool_contest
from components.reporting.html import to_html
from tests.support.contests import LOSS, TIE, WIN, contest

FIGURES = {
    "FedBis": {0: {"common": 0.9, "own": 0.5}, 1: {"common": 0.8, "own": 0.6}},
    "FedDPO": {0: {"common": 0.6}},
}
CONTEST = "FedBis against base policy"
POOLS = {CONTEST: pool_contest({0: contest([WIN, WIN, TIE]), 1: contest([LOSS])}, 500)}
WINS = {
    "arm": "FedBis",
    "figure": "wins",
    "against": ["base policy"],
}


def check(claim, pools=POOLS, figures=FIGURES, seeds=(0, 1)):
    """The findings of one claim."""
    return check_claims([Claim(**claim)], figures, pools, seeds)


def check_contest(claim, by_seed):
    """The finding of a claim on the wins of a contest with verdicts by seed."""
    pools = {CONTEST: pool_contest(by_seed, 500)}
    (finding,) = check(WINS | claim, pools, seeds=tuple(by_seed))
    return finding


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        ({"at_least": 0.8}, HOLDS),
        ({"above": 0.8}, HOLDS_ON_AVERAGE),
        ({"above": 0.85}, FAILS),
        ({"at_least": 0.85}, HOLDS_ON_AVERAGE),
        ({"at_least": 0.86}, FAILS),
    ],
)
def test_a_claim_on_a_figure_is_checked_against_each_seed_and_then_against_their_mean(limit, verdict):
    (finding,) = check({"arm": "FedBis", "figure": "common"} | limit)
    assert finding.verdict == verdict
    assert finding.by_seed == "0: 0.900; 1: 0.800"
    assert finding.overall == "mean 0.850"


def test_a_claim_against_an_arm_is_on_the_difference_of_the_same_seed():
    """In binary, 0.9 - 0.6 is a little less than 0.3; the claim holds all the same."""
    (finding,) = check(
        {
            "arm": "FedBis",
            "figure": "common",
            "against": ["FedDPO"],
            "at_least": 0.3,
        }
    )
    assert finding.claim == "FedBis less FedDPO: common taste at least 0.3"
    assert finding.by_seed == "0: 0.900 - 0.600 = 0.300"


def test_a_verdict_states_how_many_seeds_were_measured_where_some_are_missing():
    (finding,) = check(
        {
            "arm": "FedBis",
            "figure": "common",
            "against": ["FedDPO"],
            "at_least": 0.3,
        }
    )
    assert finding.verdict == f"{HOLDS} (1 of 2 seeds)"


def test_a_claim_on_a_figure_that_no_run_has_is_not_measured():
    (finding,) = check(
        {
            "arm": "FedDPO",
            "figure": "own",
            "at_least": 0.1,
        }
    )
    assert finding.verdict == NOT_MEASURED
    assert finding.by_seed == "-"
    assert finding.overall == "-"


def test_a_claim_on_wins_leaves_ties_out():
    (finding,) = check(WINS | {"above": 0.5})
    assert finding.by_seed == "0: 2 to 0 (1.000); 1: 0 to 1 (0.000)"
    assert finding.overall.startswith("2 to 1 (0.667)")


def test_a_claim_on_wins_states_the_rate_at_equal_length_and_whether_it_may_be_chance():
    (finding,) = check(WINS | {"above": 0.5})
    assert "at equal length, a tie half, 62.5% [" in finding.overall
    assert finding.verdict == HOLDS_ON_AVERAGE + MAY_BE_CHANCE


def test_wins_that_also_hold_at_equal_length_hold():
    finding = check_contest({"above": 0.5}, {0: contest([WIN] * 9 + [TIE]), 1: contest([WIN] * 8 + [LOSS])})
    assert finding.verdict == HOLDS


def test_wins_by_length_alone_may_be_chance():
    """Of eight answers, the five longer ones win and the three shorter ones lose."""
    lengths = [9, 1, 9, 1, 9, 1, 9, 9]
    longer = ContestVerdicts(list("abcdefgh"), [WIN, LOSS] * 3 + [WIN] * 2, lengths, [5] * 8)
    assert check_contest({"above": 0.5}, {0: longer}).verdict.endswith(MAY_BE_CHANCE)


def test_a_claim_on_wins_does_not_hold_where_all_answers_are_tied():
    finding = check_contest({"at_least": 0.0}, {0: contest([TIE, TIE])})
    assert finding.verdict == FAILS
    assert finding.by_seed == "0: 0 to 0"


def test_a_claim_against_several_arms_is_one_finding_each():
    findings = check(WINS | {"against": ["base policy", "FedDPO"], "above": 0.5})
    assert [finding.verdict for finding in findings] == [HOLDS_ON_AVERAGE + MAY_BE_CHANCE, NOT_MEASURED]


def test_the_html_report_marks_verdicts_by_class():
    findings = check(
        {
            "arm": "FedBis",
            "figure": "common",
            "at_least": 0.8,
        }
    )
    findings += check(WINS | {"above": 0.5})
    findings += check(
        {
            "arm": "FedBis",
            "figure": "common",
            "at_least": 0.86,
        }
    )
    html = to_html("B", [claims_table(findings)], [])
    assert f"<td class=holds>{HOLDS}</td>" in html
    assert f"<td class=partly>{HOLDS_ON_AVERAGE}, but" in html
    assert f"<td class=fails>{FAILS}</td>" in html


def test_the_table_of_claims_has_a_row_for_each_finding():
    findings = check(
        {
            "arm": "FedBis",
            "figure": "common",
            "at_least": 0.8,
        }
    )
    (row,) = claims_table(findings).rows
    assert row == ["FedBis: common taste at least 0.8", HOLDS, "0: 0.900; 1: 0.800", "mean 0.850"]


def test_a_claim_may_be_that_a_figure_is_several_times_anothers():
    figures = {
        "free": {0: {"lambda_drift": 0.4}, 1: {"lambda_drift": 0.5}},
        "FIRM": {0: {"lambda_drift": 0.2}, 1: {"lambda_drift": 0.3}},
    }
    claim = {
        "arm": "free",
        "figure": "lambda_drift",
        "against": ["FIRM"],
        "times": 2.0,
        "at_least": 0.0,
    }
    (finding,) = check(claim, figures=figures)
    assert finding.claim == "free less 2 x FIRM: distance of clients' weights at least 0"
    assert finding.verdict == FAILS
    assert "0.400 - 2 x 0.200 = 0.000; 1: 0.500 - 2 x 0.300 = -0.100" in finding.by_seed


def test_a_factor_without_another_arm_is_refused():
    with pytest.raises(ValueError, match="times .*against"):
        Claim(arm="free", figure="lambda_drift", times=2.0, at_least=0.0)
