"""What figures are means of: the units' mean is the figure, for every figure that has units."""

import pytest

from components.reporting.figures import answer_figures, reward_curve, run_figures
from components.reporting.units import CLIENTS, QUESTIONS, Units, client_range, run_units
from components.results import AccuracySummary
from tests.support.results import (
    accuracy_report,
    alignment_result,
    evaluation_result,
    federation_result,
    question_result,
    round_evaluation,
)

SCALE = 0.5
ANSWERS = {"p1": "four", "p2": "seven77"}


def measured(rounds, ada, bea):
    """A measurement of two clients, all of whose figures differ."""
    mean = (ada + bea) / 2
    clients = {"ada": ada, "bea": bea}
    summed = AccuracySummary(
        mean=mean / 2, worst=ada / 2, best=bea / 2, clients={"ada": ada / 2, "bea": bea / 2}
    )
    return round_evaluation(
        rounds,
        mean=mean,
        clients=clients,
        margin=2 * mean,
        margins={name: 2 * value for name, value in clients.items()},
        reward=3 * mean,
        rewards={name: 3 * value for name, value in clients.items()},
        by_metric={"summed": summed, "explicit": summed},
    )


FEDERATION = federation_result(
    evaluations=[measured(0, 0.1, 0.2), measured(1, 0.6, 0.9), measured(2, 0.3, 0.5)]
)
EVALUATION = evaluation_result(implicit_reward=accuracy_report())


def question(name, number, answer, samples):
    return {
        "set": name,
        "id": str(number),
        "key": "A",
        "answer": answer,
        "samples": [{"answer": sample} for sample in samples],
    }


def test_the_mean_of_a_figures_units_is_the_figure():
    curve = reward_curve(FEDERATION, SCALE)
    figures = run_figures(FEDERATION, alignment_result(), EVALUATION, list(ANSWERS.values()), curve)
    units = run_units(FEDERATION, EVALUATION, ANSWERS, [], SCALE)
    assert set(units) == {
        "accuracy",
        "best_accuracy",
        "margin",
        "reward",
        "best_reward",
        "summed",
        "summed_best",
        "explicit",
        "implicit_reward",
        "characters",
    }
    for name, own in units.items():
        assert own.mean == pytest.approx(figures[name]), name


def test_selectors_have_no_units_of_implicit_rewards():
    units = run_units(federation_result(), evaluation_result(), {}, [], None)
    assert units == {}


def test_questions_are_units_by_set_and_every_set_counts_once():
    rows = [
        question("csqa", 1, "A", ["B", "A"]),
        question("csqa", 2, "B", ["B", "B"]),
        question("csqa", 3, "B", ["B", "B"]),
        question("boolq", 1, "A", ["A", "A"]),
    ]
    units = run_units(federation_result(), evaluation_result(), {}, rows, None)
    assert units["answer_accuracy"].unit == QUESTIONS
    assert units["answer_accuracy"].mean == pytest.approx((1 / 3 + 1) / 2)
    assert units["success"].mean == pytest.approx((1 / 3 + 1) / 2)
    assert units["answer_accuracy"].groups["csqa"] == {"1": 1.0, "2": 0.0, "3": 0.0}


def test_questions_without_samples_have_no_success():
    rows = [question("csqa", 1, "A", [])]
    result = evaluation_result(questions={"aligned": question_result(1.0)})
    assert set(run_units(federation_result(), result, {}, rows, None)) == {"answer_accuracy"}
    assert answer_figures(result, "aligned", [])["success"] is None


def test_the_range_of_clients_is_the_mean_over_seeds():
    runs = {
        0: {"summed": Units(CLIENTS, {"": {"ada": 0.4, "bea": 0.6}})},
        1: {"summed": Units(CLIENTS, {"": {"ada": 0.2, "bea": 1.0}})},
    }
    assert client_range(runs, "summed") == pytest.approx((0.3, 0.25))
    assert client_range(runs, "kl") is None
