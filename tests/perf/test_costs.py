"""The cost benchmarks, in their smallest form."""

from subprocess import Popen

import pytest

from components.config import RecipeError
from perf import objective_costs, orchestration, policy_costs, step_costs
from perf.__main__ import main
from perf.commands import MEASUREMENTS
from perf.harness import gemm_gigaflops


def first_words(capsys):
    """The first words of the lines that were printed, without empty lines and rules."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [words[0] for words in lines if words and words[0].strip("─")]


@pytest.fixture(autouse=True)
def threads():
    """Threads are restored afterwards."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def costs_by_arm(monkeypatch):
    """The costs of three steps of each arm, measured in this process, which has loaded the libraries."""
    costs = {}

    def measure(function, recipe, arm):
        if arm not in costs:
            costs[arm] = function(recipe, arm)
        return costs[arm]

    monkeypatch.setattr(step_costs, "STEPS", 3)
    monkeypatch.setattr(step_costs, "in_process", measure)
    return costs


@pytest.mark.long
def test_the_ways_of_a_selector_step_are_compared_on_the_same_rows(costs_by_arm, capsys):
    ratios = step_costs.compare_steps("debug", 1)
    arms = list(step_costs.ARMS)
    assert {(cost["rows"], cost["tokens"]) for cost in costs_by_arm.values()} == {(4, 1024)}
    assert first_words(capsys)[1:] == ["name", *arms, "times", *list(ratios)[1:]]
    assert ratios["selector_step/share_of_gemm"] == [costs_by_arm["concurrent"]["share of GEMM"]]
    slow, fast = (costs_by_arm[arm]["seconds"] for arm in ("full-logits", "one-position"))
    assert ratios["selector_step/one_position_against_full_logits"] == [slow / fast]
    gigaflops = [costs_by_arm[arm]["GFLOP"] for arm in arms]
    assert gigaflops[0] == gigaflops[1] < gigaflops[2] < gigaflops[3]


def test_a_step_of_dpo_has_a_share_of_the_gemm_rate(costs_by_arm, capsys):
    ratios = step_costs.compare_dpo_steps("debug", 1)
    concurrent, one = (costs_by_arm[arm] for arm in ("concurrent", "one-part"))
    assert ratios == {
        "dpo_step/share_of_gemm": [concurrent["share of GEMM"]],
        "dpo_step/concurrent_against_one_part": [one["seconds"] / concurrent["seconds"]],
    }
    assert 0 < concurrent["share of GEMM"] < 1
    assert concurrent["rows"] == one["rows"] == 2
    assert concurrent["GFLOP"] == one["GFLOP"] > 0
    assert first_words(capsys)[2:4] == ["concurrent", "one-part"]


def test_ways_to_wait_are_timed_alone_and_beside_a_busy_process(monkeypatch, capsys):
    """The short spin takes 1 s, sleep 1.5 s, and the long spin 4 s beside other work."""
    measured = []

    def measure(function, recipe, arm, variables):
        busy = bool(processes) and processes[-1].poll() is None
        measured.append((arm, busy, variables))
        if "OMP_WAIT_POLICY" in variables:
            return {"seconds": 1.5}
        return {"seconds": 4.0 if busy and variables["GOMP_SPINCOUNT"] == "300000" else 1.0}

    processes = []

    def start(*arguments, **options):
        processes.append(Popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(step_costs, "in_process", measure)
    monkeypatch.setattr(step_costs.subprocess, "Popen", start)
    ratios = step_costs.compare_waiting("debug", 1)
    assert [busy for _, busy, _ in measured] == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    assert [variables for *_, variables in measured[:3]] == list(step_costs.WAITING.values())
    assert all(process.poll() is not None for process in processes)
    assert ratios["waiting/one-position/alone/short_spin_against_asleep"] == [1.5]
    assert ratios["waiting/one-position/beside-a-busy-process/short_spin_against_long-spin"] == [4.0]
    assert "beside-a-busy-process" in capsys.readouterr().out


def test_four_ways_to_sample_completions_are_timed(capsys, monkeypatch):
    monkeypatch.setattr("components.models.onednn._is_amd_with_avx512", lambda: True)
    ratios = policy_costs.compare_generation("debug", 1)
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


def test_the_rate_of_a_matrix_product_is_a_positive_number():
    assert 0 < gemm_gigaflops("cpu", size=64, repeats=2) < 1e6


def test_both_solutions_of_mgda_agree(capsys):
    ratios = objective_costs.compare_solvers("debug", 1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()]
    rows = [row for row in rows if row[0].isdigit()]
    assert list(ratios) == [f"mgda/faces_against_cvxpy_for_{row[0]}" for row in rows]
    assert [row[0] for row in rows] == ["2", "3", "5", "8"]
    assert all(float(row[-1]) < 1e-4 for row in rows)


def test_a_recipe_with_one_objective_is_refused_for_the_cost_of_several():
    with pytest.raises(RecipeError, match=r"federation.method 'fedbis'.*multi-objective/demo"):
        objective_costs.compare_objectives("debug", 1)


@pytest.mark.long
def test_the_step_of_firm_is_measured_for_one_to_three_objectives(tmp_path, capsys):
    from components.recipes import dump_recipe, load_recipe

    overrides = [
        "policy={backbone: {name: tiny-random}, lora: {dropout: 0.0}, max_new_tokens: 8}",
        "runtime.torch_threads=1",
    ]
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dump_recipe(load_recipe("multi-objective/demo", overrides)))
    ratios = objective_costs.compare_objectives(str(recipe), 1)
    assert first_words(capsys)[2:5] == ["1", "2", "3"]
    assert list(ratios) == ["objectives/one_against_2", "objectives/one_against_3"]
    assert all(ratio > 0 for (ratio,) in ratios.values())


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
