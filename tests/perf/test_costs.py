"""The cost benchmarks, in their smallest form."""

import pytest

import perf.costs
from perf import orchestration
from perf.__main__ import main
from perf.commands import MEASUREMENTS
from perf.costs import ARMS, compare_generation, compare_steps


def first_words(capsys):
    """The first words of the lines that were printed, without empty lines and rules."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [words[0] for words in lines if words and words[0].strip("─")]


@pytest.mark.long
def test_the_ways_of_a_selector_step_are_compared_on_the_same_rows(monkeypatch, capsys):
    costs = {}

    def measure(function, recipe, arm):
        costs[arm] = function(recipe, arm)
        return costs[arm]

    monkeypatch.setattr(perf.costs, "STEPS", 3)
    monkeypatch.setattr(perf.costs, "in_process", measure)
    ratios = compare_steps("debug", 1)
    assert {(cost["rows"], cost["tokens"]) for cost in costs.values()} == {(4, 1024)}
    assert first_words(capsys)[1:] == ["name", *ARMS, "times", *ratios]
    slow, fast = (costs[arm]["seconds"] for arm in ("whole-layer", "one-position"))
    assert ratios["selector_step/one_position_against_whole_layer"] == [slow / fast]


def test_four_ways_to_sample_completions_are_timed(capsys, monkeypatch):
    monkeypatch.setattr("components.models.onednn._is_amd_with_avx512", lambda: True)
    ratios = compare_generation("debug", 1)
    assert list(ratios) == [
        "generation/continuous_against_batches",
        "generation/merged_against_separate",
        "generation/onednn_against_mkl",
    ]
    assert first_words(capsys)[2:6] == ["continuous", "batches", "separate", "mkl"]


def test_nothing_is_measured_beside_other_work(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (1.4, 0.0, 0.0))
    with pytest.raises(SystemExit, match="2"):
        main(["generation"])
    assert "load average is 1.40" in capsys.readouterr().err


@pytest.mark.long
def test_a_round_is_run_through_the_flow_and_as_a_loop(new_workplace, monkeypatch, capsys):
    place = new_workplace("orchestration")
    ratios, _ = place.call(lambda: orchestration.compare_orchestration("debug", 1))
    assert list(ratios) == ["orchestration/flow_against_bare_loop"]
    assert first_words(capsys)[-6:] == ["A", "name", "loop", "flow", "times", *ratios]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_no_repetitions_are_refused(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([name, "--pairs", "0"])
    assert "'--pairs'" in capsys.readouterr().err
