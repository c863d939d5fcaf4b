"""Contests between two policies' answers: verdicts of both orders, figures, and pools over seeds."""

import json
import math

import pytest

from components.config import UserError
from components.data.records import answer_id
from components.evaluation.contests import Contest, pooled_figures, ties_half
from components.evaluation.length_control import fit_length_controlled_rate
from components.evaluation.winrate import Verdict, win_rate
from tests.support.contests import LOSS, TIE, WIN, contest

FIRST, SECOND, TIED, UNPARSABLE = Verdict


# --- the record


def stored(tmp_path, **changes):
    """Path of a stored contest whose JSON has other values."""
    path = tmp_path / "contest.json"
    contest([WIN, LOSS]).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_a_contest_is_read_as_it_was_written(tmp_path):
    written = contest([WIN, TIE, LOSS], opposed=1).write(tmp_path / "contests" / "a.json")
    assert Contest.read(tmp_path / "contests" / "a.json") == written


def test_a_contest_with_another_number_of_verdicts_than_prompts_is_refused_by_its_path(tmp_path):
    path = stored(tmp_path, original=["tie"])
    with pytest.raises(UserError, match=r"'prompts': 2, 'original': 1.*start a new run") as error:
        Contest.read(path)
    assert str(path) in str(error.value)


def test_a_contest_of_an_earlier_version_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "seed-0.json"
    path.write_text('{"prompts": ["p"], "verdicts": ["tie"], "consistency": 1.0}')
    with pytest.raises(UserError, match=r"schema_version None.*the version that wrote it, or start a new"):
        Contest.read(path)


ORDERS = [
    (FIRST, SECOND, FIRST),
    (SECOND, FIRST, SECOND),
    (FIRST, FIRST, TIED),
    (SECOND, SECOND, TIED),
    (TIED, TIED, TIED),
    (FIRST, TIED, TIED),
    (TIED, FIRST, TIED),
    (FIRST, UNPARSABLE, UNPARSABLE),
    (UNPARSABLE, SECOND, UNPARSABLE),
    (UNPARSABLE, UNPARSABLE, UNPARSABLE),
]
"""Verdict on the original order, verdict on the swapped order, verdict of both."""


@pytest.fixture
def both_orders():
    original, swapped, _ = map(list, zip(*ORDERS, strict=True))
    count = len(ORDERS)
    return Contest(
        prompts=list("abcdefghij"),
        original=original,
        swapped=swapped,
        equal=[False] * count,
        ours=[5] * count,
        theirs=[5] * count,
    )


def test_verdicts_on_both_orders_are_combined_and_their_consistency_is_over_parsed_ones(both_orders):
    # The second verdict is on swapped responses, so that its 'response 2' is our response 1.
    assert both_orders.verdicts == [row[2] for row in ORDERS]
    assert both_orders.consistency == pytest.approx(3 / 7)
    equal = [n == 4 for n in range(len(ORDERS))]
    assert both_orders.model_copy(update={"equal": equal}).consistency == pytest.approx(2 / 6)


# --- figures

VERDICTS = [WIN, WIN, LOSS, TIE, WIN, LOSS]
OURS = [9, 8, 3, 4, 7, 5]
THEIRS = [4, 5, 6, 4, 9, 5]


def test_the_figures_are_those_of_the_verdicts_of_both_orders_and_of_the_first_alone(both_orders):
    figures = both_orders.figures(300, 2)
    rate = win_rate([row[2] for row in ORDERS], 300, 2)
    assert figures.model_dump(include=set(type(rate).model_fields)) == rate.model_dump()
    assert figures.single_order == win_rate([row[0] for row in ORDERS], 300, 2)
    assert figures.consistency == both_orders.consistency


def test_verdicts_become_labels_of_the_rate_at_equal_length_and_unparsable_ones_are_left_out():
    verdicts = [*VERDICTS, UNPARSABLE]
    figures = contest(verdicts, ours=[*OURS, 99], theirs=[*THEIRS, 1]).figures(300, 7)
    expected = fit_length_controlled_rate([1, 1, 0, 0.5, 1, 0], OURS, THEIRS, 300, 7)
    assert figures.ties_half == expected.uncontrolled == pytest.approx(3.5 / 6)
    assert figures.length_controlled == expected.rate != figures.ties_half
    assert (figures.length_controlled_low, figures.length_controlled_high) == (expected.low, expected.high)
    assert figures.length_effect == expected.effect


@pytest.mark.parametrize("verdicts", [[UNPARSABLE], []])
def test_without_a_parsed_verdict_no_rate_is_determined(verdicts):
    figures = contest(verdicts).figures(100)
    assert math.isnan(figures.win_rate)
    assert math.isnan(figures.ties_half)
    assert math.isnan(figures.length_controlled)
    assert figures.unparsable == len(verdicts)


@pytest.mark.parametrize("verdict", [WIN, LOSS])
def test_a_contest_with_one_outcome_has_an_interval_without_width(verdict):
    figures = contest([verdict] * 4).figures(500)
    assert figures.low == figures.win_rate
    assert figures.high == figures.win_rate


def test_several_answers_to_a_prompt_are_one_unit_of_the_intervals():
    answers = [answer_id(prompt, number) for prompt in "abcdefgh" for number in range(4)]
    verdicts = [WIN] * 16 + [LOSS] * 16
    lengths = list(range(32))
    figures = contest(verdicts, answers, lengths).figures()
    independent = contest(verdicts, list(map(str, range(32))), lengths).figures()
    assert figures.win_rate == independent.win_rate == 0.5
    assert figures.high - figures.low > 1.5 * (independent.high - independent.low)
    assert figures.length_controlled == independent.length_controlled
    assert figures.length_controlled_low != independent.length_controlled_low
    assert figures.single_order.low == figures.low


STYLE = {"headings": [1, 0, -1, 0, 2, 0], "list_items": [0] * 6, "bold": [0, 3, 0, 0, -1, 1]}


def test_a_contest_with_differences_of_style_has_its_rate_at_equal_style_too():
    plain = contest([*VERDICTS, UNPARSABLE], ours=[*OURS, 99], theirs=[*THEIRS, 1])
    style = {name: [*values, 9] for name, values in STYLE.items()}
    figures = plain.model_copy(update={"style": style}).figures(300, 7)
    expected = fit_length_controlled_rate([1, 1, 0, 0.5, 1, 0], OURS, THEIRS, 300, 7, style=STYLE)
    assert figures.style_controlled == expected.rate != figures.length_controlled
    assert (figures.style_controlled_low, figures.style_controlled_high) == (expected.low, expected.high)
    assert figures.style_effects == {"length": expected.effect} | expected.style_effects
    without = {"style_controlled", "style_controlled_low", "style_controlled_high", "style_effects"}
    assert figures.model_dump(exclude=without) == plain.figures(300, 7).model_dump(exclude=without)
    assert plain.figures(300, 7).style_controlled is None


def test_the_differences_of_style_are_stored_with_one_value_for_each_pair(tmp_path):
    written = contest(VERDICTS, ours=OURS, theirs=THEIRS, style=STYLE).write(tmp_path / "contest.json")
    assert Contest.read(tmp_path / "contest.json") == written
    assert written.combined()["style"] == STYLE
    assert "style" not in contest(VERDICTS).combined()
    with pytest.raises(UserError, match="'bold': 1"):
        Contest.read(stored(tmp_path, style={"bold": [1]}))


def test_a_judge_that_is_measured_gives_the_rate_without_its_errors():
    """62.5% of wins with ties half, 9 of 10 held-out pairs right: q is 10 / 12."""
    judge = {"judge_accuracy": 0.9, "judge_held_out_pairs": 10.0}
    figures = contest([WIN, WIN, TIE, LOSS]).figures(100, judge=judge)
    assert figures.corrected == pytest.approx((0.625 + 10 / 12 - 1) / (2 * 10 / 12 - 1))
    assert figures.corrected_low < 0.5 < figures.corrected_high
    assert contest([WIN, WIN, TIE, LOSS]).figures(100).corrected is None
    at_chance = judge | {"judge_accuracy": 0.5}
    assert contest([WIN, WIN, TIE, LOSS]).figures(100, judge=at_chance).corrected is None


def test_the_rate_with_ties_as_half_has_an_interval_over_prompts_unless_it_has_no_width():
    figures = contest([WIN] * 6 + [TIE] * 3 + [LOSS]).figures(100)
    expected = ties_half([contest([WIN] * 6 + [TIE] * 3 + [LOSS])]).interval()
    assert (figures.ties_half_low, figures.ties_half_high) == expected
    assert figures.ties_half_low < figures.ties_half == figures.ties_as_half == 0.75 < figures.ties_half_high
    tied = contest([TIE] * 10).figures(100)
    assert tied.ties_half == 0.5
    assert tied.ties_half_low is tied.ties_half_high is None
    seeds = {n: contest([one] * 10) for n, one in enumerate((WIN, LOSS, LOSS))}
    assert pooled_figures(seeds, 100).ties_half_low == ties_half(list(seeds.values())).interval()[0]


# --- seeds


@pytest.fixture(scope="module")
def pooled():
    """Two wins and a tie with seed 0, a loss with seed 1 on one of the same prompts."""
    return Contest.pooled({0: contest([WIN, WIN, TIE]), 1: contest([LOSS], ours=[7])})


def test_the_pooled_rate_is_over_the_answers_of_all_seeds_with_each_a_unit_of_its_own(pooled):
    rate = pooled.win_rate(500)
    assert rate.win_rate == 0.5
    assert (rate.wins, rate.ties, rate.losses) == (2, 1, 1)
    assert pooled.ours == [5, 5, 5, 7]
    assert len(set(pooled.units)) == 4
    assert Contest.pooled({0: contest([WIN], ["a#1"])}).units == Contest.pooled({0: contest([WIN])}).units


def test_intervals_of_several_seeds_are_over_the_seeds_too():
    """Each of three seeds has one outcome on all of its prompts, so that the seeds alone vary."""
    prompts = [f"p{n}" for n in range(40)]
    seeds = {n: contest([one] * 40, prompts, ours=[5, 7] * 20) for n, one in enumerate((WIN, LOSS, LOSS))}
    figures = pooled_figures(seeds, 500)
    assert figures.win_rate == pytest.approx(1 / 3)
    for low, high in (
        (figures.low, figures.high),
        (figures.length_controlled_low, figures.length_controlled_high),
        (figures.single_order.low, figures.single_order.high),
    ):
        assert low < 0.01
        assert high > 0.99
    assert Contest.pooled(seeds).figures(500).high < 0.5, "as one seed with more prompts"


def test_the_figures_of_one_seed_pooled_are_its_own():
    one = contest(VERDICTS, ours=OURS, theirs=THEIRS, style=STYLE)
    judge = {"judge_accuracy": 0.9, "judge_held_out_pairs": 10.0}
    assert pooled_figures({3: one}, 300, 7, [judge]) == one.figures(300, 7, judge)


def test_the_rate_at_equal_style_is_that_of_all_seeds_answers_with_an_interval_over_seeds():
    prompts = [f"p{n}" for n in range(60)]
    headings = {"headings": [1, 0, -1] * 20, "list_items": [0, 1] * 30, "bold": [0] * 60}
    seeds = {
        n: contest([one, TIE, LOSS] * 20, prompts, ours=[5, 7, 6, 3] * 15, style=headings)
        for n, one in enumerate((WIN, LOSS, LOSS))
    }
    figures = pooled_figures(seeds, 200)
    alone = Contest.pooled(seeds).figures(200)
    assert figures.style_controlled == alone.style_controlled
    assert figures.style_effects == alone.style_effects
    assert figures.style_controlled_low < alone.style_controlled_low, "the seeds vary too"
    mixed = pooled_figures(seeds | {3: contest([WIN] * 60, prompts)}, 200)
    assert mixed.style_controlled is None, "a seed without differences of style"


def test_the_rate_at_equal_length_is_that_of_all_seeds_answers_together():
    seeds = {
        seed: contest(VERDICTS[part], "xyz", OURS[part], THEIRS[part])
        for seed, part in enumerate((slice(3), slice(3, 6)))
    }
    together = contest(VERDICTS, ours=OURS, theirs=THEIRS)
    assert Contest.pooled(seeds).figures(300, 7) == together.figures(300, 7)
