"""The cost benchmarks, in their smallest form."""

import pytest

from components.config import RecipeError
from perf import costs, objective_costs, orchestration, policy_costs, selector_costs
from perf.comparison import Comparison, gemm_gigaflops


@pytest.fixture
def debug_comparison():
    """The recipe `debug`, once of each kind; threads are restored afterwards."""
    import torch

    threads = torch.get_num_threads()
    yield Comparison("debug", 1)
    torch.set_num_threads(threads)


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure steps in the test process, which has loaded the libraries already."""

    def measure(recipe, arm):
        return selector_costs.StepCost(**selector_costs.time_step(recipe, arm))

    monkeypatch.setattr(selector_costs, "_measure_arm", measure)


@pytest.mark.slow
def test_both_kinds_of_a_selector_step_are_compared_on_the_same_rows(
    debug_comparison, in_this_process, capsys
):
    selector_costs.compare_steps(debug_comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "debug: 4 rows, 1024 tokens, 1 threads, cpu" in lines[0]
    arms = ["one-position", "two-rows", "full-logits"]
    assert [line.split()[0] for line in lines[2:]] == [*arms, "one-position", "one-position"]
    gigaflops = [cost["gigaflops"] for cost in (selector_costs.time_step("debug", arm) for arm in arms)]
    assert gigaflops == sorted(gigaflops)
    assert gigaflops[0] < gigaflops[1] < gigaflops[2]


@pytest.mark.slow
def test_both_dpo_trainers_are_timed_on_the_same_pairs(debug_comparison, capsys):
    policy_costs.compare_dpo_trainers(debug_comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "2 pairs in micro-batches of 2" in lines[0]
    assert {line.split()[0] for line in lines[1:3]} == {"packed", "trl"}
    assert "speed-up" in lines[3]


@pytest.mark.slow
def test_answers_with_a_merged_and_a_separate_adapter_are_timed(debug_comparison, capsys):
    policy_costs.compare_generation(debug_comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert {line.split()[0] for line in lines[1:3]} == {"merged", "separate"}
    assert "speed-up" in lines[3]


def test_nothing_is_measured_beside_other_work(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (1.4, 0.0, 0.0))
    assert costs.main([]) == 2
    assert "load average is 1.40" in capsys.readouterr().err


def test_the_rate_of_a_matrix_product_is_a_positive_number():
    assert 0 < gemm_gigaflops("cpu", size=64, repeats=2) < 1e6


@pytest.mark.slow
def test_scoring_in_one_batch_gives_the_losses_of_one_selector_after_the_other(debug_comparison, capsys):
    selector_costs.compare_scoring(debug_comparison, selectors=2, rows=2)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "2 validation pairs" in lines[0]
    assert "2 selectors" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["one", "swapped", "speed-up"]


def test_different_losses_of_the_two_computations_are_an_error():
    with pytest.raises(AssertionError, match="same losses"):
        selector_costs._require_equal_losses({"one batch": [0.7], "swapped": [0.6]}, "cpu")


@pytest.mark.slow
def test_both_solutions_of_mgda_agree(capsys):
    objective_costs.compare_solvers(1)
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [int(row[0]) for row in rows] == [2, 3, 5, 8]
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
    objective_costs.compare_objectives(Comparison(str(recipe), 1))
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2", "3"]


@pytest.mark.slow
def test_the_rounds_are_run_through_the_flow_and_as_a_loop(
    debug_comparison, new_workplace, monkeypatch, capsys
):
    place = new_workplace("orchestration")
    monkeypatch.setenv("PREFECT_API_URL", place.prefect_url)
    place.call(lambda: orchestration.compare_orchestration(debug_comparison, 1))
    lines = capsys.readouterr().out.strip().splitlines()
    assert "1 rounds of 2 clients" in lines[-4]
    assert [line.split()[0] for line in lines[-3:]] == ["flow", "loop", "orchestration"]


@pytest.mark.parametrize("option", ["--rounds", "--pairs"])
def test_no_repetitions_are_refused(option, capsys):
    assert costs.main([option, "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
