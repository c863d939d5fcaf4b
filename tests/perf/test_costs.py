"""The cost benchmarks, in their smallest form."""

from subprocess import Popen
from types import SimpleNamespace

import pytest

from components.config import RecipeError
from perf import costs, objective_costs, orchestration, policy_costs, selector_costs, thread_costs
from perf.comparison import Comparison, gemm_gigaflops


@pytest.fixture
def debug_comparison():
    """The recipe `debug`, once of each kind; threads are restored afterwards."""
    import torch

    threads = torch.get_num_threads()
    yield Comparison("debug", 1)
    torch.set_num_threads(threads)


@pytest.fixture
def costs_by_arm(monkeypatch):
    """The costs of three steps of each arm, measured in this process, which has loaded the libraries."""
    costs = {}

    def measure(recipe, arm, variables=None):
        if arm not in costs:
            costs[arm] = selector_costs.StepCost(**selector_costs.time_step(recipe, arm))
        return costs[arm]

    monkeypatch.setattr(selector_costs, "STEPS", 3)
    monkeypatch.setattr(selector_costs, "measure_arm", measure)
    return costs


@pytest.mark.slow
def test_both_kinds_of_a_selector_step_are_compared_on_the_same_rows(debug_comparison, costs_by_arm, capsys):
    ratios = selector_costs.compare_steps(debug_comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "debug: 4 rows, 1024 tokens, 1 threads, cpu" in lines[0]
    arms = ["concurrent", "one-position", "two-rows", "full-logits"]
    assert [line.split()[0] for line in lines[2:]] == [*arms, "concurrent", "one-position", "one-position"]
    assert f"speed-up {ratios['selector_step/concurrent_against_one_position']:.2f}x" in lines[-3]
    assert f"speed-up {ratios['selector_step/one_position_against_two_rows']:.2f}x" in lines[-2]
    assert f"speed-up {ratios['selector_step/one_position_against_full_logits']:.2f}x" in lines[-1]
    assert f"{ratios['selector_step/share_of_gemm']:.0%}" in lines[2].split()
    gigaflops = [costs_by_arm[arm].gigaflops for arm in arms]
    assert gigaflops[0] == gigaflops[1] < gigaflops[2] < gigaflops[3]


def test_ways_to_wait_are_timed_alone_and_beside_a_busy_process(debug_comparison, monkeypatch, capsys):
    """The short spin takes 1 s, sleep 1.5 s, and the long spin 4 s beside other work."""
    measured = []

    def measure(recipe, arm, variables):
        busy = bool(processes) and processes[-1].poll() is None
        measured.append((arm, busy, dict(variables)))
        if "OMP_WAIT_POLICY" in variables:
            return SimpleNamespace(seconds=1.5)
        return SimpleNamespace(seconds=4.0 if busy and variables["GOMP_SPINCOUNT"] == "300000" else 1.0)

    processes = []

    def start(*arguments, **options):
        processes.append(Popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(thread_costs, "measure_arm", measure)
    monkeypatch.setattr(thread_costs.subprocess, "Popen", start)
    ratios = thread_costs.compare_waiting(debug_comparison)
    assert [busy for _, busy, _ in measured] == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    assert [variables for *_, variables in measured[:3]] == list(map(dict, thread_costs.WAITING.values()))
    assert all(process.poll() is not None for process in processes)
    assert ratios["waiting/one-position/alone/short_spin_against_asleep"] == 1.5
    assert ratios["waiting/one-position/beside-a-busy-process/short_spin_against_long-spin"] == 4.0
    assert "beside-a-busy-process" in capsys.readouterr().out


@pytest.mark.slow
def test_three_ways_to_sample_completions_are_timed(debug_comparison, capsys):
    ratios = policy_costs.compare_generation(debug_comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["continuous", "batches", "separate"]
    assert f"speed-up {ratios['generation/continuous_against_batches']:.2f}x" in lines[4]
    assert f"speed-up {ratios['generation/merged_against_separate']:.2f}x" in lines[5]


def test_nothing_is_measured_beside_other_work(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (1.4, 0.0, 0.0))
    assert costs.main([]) == 2
    assert "load average is 1.40" in capsys.readouterr().err


def test_the_rate_of_a_matrix_product_is_a_positive_number():
    assert 0 < gemm_gigaflops("cpu", size=64, repeats=2) < 1e6


@pytest.mark.slow
def test_both_solutions_of_mgda_agree(capsys):
    ratios = objective_costs.compare_solvers(1)
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [int(row[0]) for row in rows] == [2, 3, 5, 8]
    assert list(ratios) == [f"mgda/faces_against_cvxpy_for_{row[0]}" for row in rows]
    assert all(float(row[-1]) < 1e-4 for row in rows)


def test_a_recipe_with_one_objective_is_refused_for_the_cost_of_several(debug_comparison):
    with pytest.raises(RecipeError, match=r"federation.method 'fedbis'.*multi-objective/demo"):
        objective_costs.compare_objectives(debug_comparison)


@pytest.mark.slow
def test_the_step_of_firm_is_measured_for_one_to_three_objectives(debug_comparison, tmp_path, capsys):
    from components.recipes import dump_recipe, load_recipe

    overrides = [
        "policy={backbone: {name: tiny-random}, lora: {dropout: 0.0}, max_new_tokens: 8}",
        "runtime.torch_threads=1",
    ]
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dump_recipe(load_recipe("multi-objective/demo", overrides)))
    ratios = objective_costs.compare_objectives(Comparison(str(recipe), 1))
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert list(ratios) == ["objectives/one_against_2", "objectives/one_against_3"]
    for ratio, row in zip(ratios.values(), rows[1:], strict=True):
        assert 1 / ratio == pytest.approx(float(row[-1]), abs=0.006)


@pytest.mark.slow
def test_the_rounds_are_run_through_the_flow_and_as_a_loop(
    debug_comparison, new_workplace, monkeypatch, capsys
):
    place = new_workplace("orchestration")
    monkeypatch.setenv("PREFECT_API_URL", place.prefect_url)
    ratios, _ = place.call(lambda: orchestration.compare_orchestration(debug_comparison, 1))
    lines = capsys.readouterr().out.strip().splitlines()
    assert "1 rounds of 2 clients" in lines[-4]
    assert [line.split()[0] for line in lines[-3:]] == ["flow", "loop", "orchestration"]
    assert f"costs {1 / ratios['orchestration/flow_against_bare_loop'] - 1:+.1%}" in lines[-1]


@pytest.mark.parametrize("option", ["--rounds", "--pairs"])
def test_no_repetitions_are_refused(option, capsys):
    assert costs.main([option, "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
