"""Alternating calls, their ratios and tables, and functions in processes of their own."""

import json
import os
import sys

import pandas as pd
import pytest

from components.config import UserError
from components.environment import available_cores
from components.recipes import load_recipe
from perf import harness

FRAME = pd.DataFrame(
    [("slow", 0, 3.0, 1), ("fast", 0, 2.0, 1), ("fast", 1, 1.0, 5), ("slow", 1, 4.0, 1)],
    columns=["name", "repeat", "seconds", "tokens"],
)


def test_calls_alternate_and_may_give_their_own_seconds():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b") or {"seconds": 7.0, "tokens": 2}}
    frame = harness.alternate(calls, 2)
    assert order == ["a", "b", "b", "a"]
    assert frame["name"].tolist() == order
    assert frame["repeat"].tolist() == [0, 0, 1, 1]
    assert frame[frame["name"] == "b"]["seconds"].tolist() == [7.0, 7.0]
    assert (frame[frame["name"] == "a"]["seconds"] < 1).all()


def test_ratios_are_of_calls_of_the_same_repeat():
    assert harness.ratios(FRAME, "slow", "fast") == [1.5, 4.0]


def test_a_comparison_shows_medians_and_gives_the_ratios(capsys):
    ratios = harness.compare("Calls", FRAME, {"speed": ("slow", "fast")})
    assert ratios == {"speed": [1.5, 4.0]}
    assert harness.medians(ratios) == {"speed": 2.75}
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["Calls,", "medians", "of", "2"]
    assert lines[3] == ["slow", "3.5", "3,", "4", "1"]
    assert lines[4] == ["fast", "1.5", "2,", "1", "3"]
    assert lines[-1] == ["speed", "2.75", "1.5,", "4"]


def test_numbers_have_three_digits_and_missing_ones_are_empty(capsys):
    frame = pd.DataFrame([("[a]", 12345.6, 0.00012345, float("nan"))], columns=list("abcd"))
    harness.show("Title", frame)
    assert capsys.readouterr().out.split()[-3:] == ["[a]", "12,346", "0.000123"]


def test_what_was_measured_is_appended_with_its_conditions(tmp_path):
    path = tmp_path / "speed.jsonl"
    for value in (1.5, 2.0):
        harness.record(path, "steps", "debug", 0.25, {"speed": [value]})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first | {"ratios": {"speed": [2.0]}} == second
    assert first["measurement"] == "steps"
    assert first["load"] == 0.25
    assert first["recipe"] == "debug"
    assert first["sizes"] == load_recipe("debug").fingerprint(*harness.SIZES)
    assert first["processor"] == harness.processor_name()
    assert first["cores"] == str(available_cores())
    assert len(first["commit"].removesuffix("-dirty")) == 40


def test_a_function_runs_in_a_process_of_its_own_and_is_named_with_its_reason_if_it_fails(tmp_path):
    assert harness.in_process(os.getenv, "COLOR", variables={"COLOR": "blue"}) == "blue"
    assert harness.in_process(json.loads, json.dumps({"path": [1]})) == {"path": [1]}
    assert harness.in_process(os.path.basename, tmp_path / "name") == "name"
    with pytest.raises(
        UserError, match="json:loads could not be measured: json.decoder.JSONDecodeError: Exp"
    ):
        harness.in_process(json.loads, "{")


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [("", 3, "trl could not be measured: a reason"), ("no JSON", 0, "its last line is not JSON")],
)
def test_a_program_that_fails_is_a_clear_error(line, status, message, tmp_path):
    code = f"import sys; print({line!r}); print('a reason', file=sys.stderr); sys.exit({status})"
    with pytest.raises(UserError, match=message):
        harness.last_line("trl", [sys.executable, "-c", code], os.environ, tmp_path)
