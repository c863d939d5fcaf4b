"""What metrics are means of: the units' mean is the metric, for every metric that has units."""

import pytest

from components.recipes import load_recipe
from components.reporting.units import CLIENTS, QUESTIONS, Units, client_range, run_units
from components.results import AccuracySummary
from tests.support.results import (
    accuracy_report,
    evaluation_result,
    federation_result,
    round_evaluation,
    run_results,
)

ANSWERS = [
    {"prompt_id": name, "aligned": {"text": text}, "base": {"text": ""}}
    for name, text in (("p1", "four"), ("p2", "seven77"))
]


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


def test_the_mean_of_a_metrics_units_is_the_metric():
    recipe = load_recipe("debug", ["federation.method=feddpo", "federation.options={}"])
    results = run_results(recipe, federation=FEDERATION, evaluation=EVALUATION, answers=ANSWERS)
    units = run_units(results, [])
    assert set(units) == {
        "after/accuracy/mean",
        "after/accuracy/summed/mean",
        "after/accuracy/explicit/mean",
        "after/reward",
        "after/reward_margin",
        "best/accuracy/mean",
        "largest/accuracy/summed/mean",
        "largest/reward",
        "implicit_reward/mean",
        "answers/aligned_characters",
    }
    for name, own in units.items():
        assert own.mean == pytest.approx(results.metrics[name]), name


def test_selectors_have_no_units_of_implicit_rewards(debug):
    assert set(run_units(run_results(debug), [])) == {"after/accuracy/mean"}


ACCURACY, SUCCESS = (f"questions/aligned/mean/{name}" for name in ("accuracy", "success"))


def test_questions_are_units_by_set_and_every_set_counts_once(debug):
    rows = [
        question("csqa", 1, "A", ["B", "A"]),
        question("csqa", 2, "B", ["B", "B"]),
        question("csqa", 3, "B", ["B", "B"]),
        question("boolq", 1, "A", ["A", "A"]),
    ]
    units = run_units(run_results(debug), rows)
    assert units[ACCURACY].unit == QUESTIONS
    assert units[ACCURACY].mean == pytest.approx((1 / 3 + 1) / 2)
    assert units[SUCCESS].mean == pytest.approx((1 / 3 + 1) / 2)
    assert units[ACCURACY].strata["csqa"] == {"1": 1.0, "2": 0.0, "3": 0.0}


def test_questions_without_samples_have_no_success(debug):
    assert SUCCESS not in run_units(run_results(debug), [question("csqa", 1, "A", [])])


def test_the_range_of_clients_is_the_mean_over_seeds():
    runs = {
        0: {"after/accuracy/summed/mean": Units(CLIENTS, {"": {"ada": 0.4, "bea": 0.6}})},
        1: {"after/accuracy/summed/mean": Units(CLIENTS, {"": {"ada": 0.2, "bea": 1.0}})},
    }
    jain = (1.0**2 / (2 * (0.16 + 0.36)) + 1.2**2 / (2 * (0.04 + 1.0))) / 2
    assert client_range(runs, "summed") == pytest.approx((0.3, 0.25, jain))
    assert client_range(runs, "kl") is None
