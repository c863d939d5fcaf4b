"""Seeds that are added to a started benchmark."""

from pathlib import Path

import pytest

from components.config import RecipeError
from components.config.benchmark import Benchmark
from components.recipes import load_recipe
from components.recipes.benchmarks import read_benchmark
from tasks.benchmark_folder import add_seeds, arm_run, extend_plan, open_benchmark
from tests.support.sources import write_jsonl


@pytest.fixture
def pairs(tmp_path):
    return write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])


@pytest.fixture
def plan(pairs):
    """A benchmark of two arms on a file of pairs."""
    settings = ["data.source=jsonl", f"data.path={pairs}", "data.options={}", "data.partition=natural"]
    arms = {"one": [], "two": ["federation.rounds=2"]}
    return Benchmark(recipe="debug", seeds=[3, 5], settings=settings, arms=arms)


@pytest.fixture
def folder(plan, tmp_path, monkeypatch):
    """Its folder."""
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    return open_benchmark("plan", plan)


def test_new_seeds_come_after_those_of_the_benchmark(plan):
    assert extend_plan(plan, ["seeds=[1, 5, 3]"]).seeds == [3, 5, 1]
    assert extend_plan(plan, []) == plan


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["seeds=[3, 4]"], r"seeds=\[3, 4\] leaves out 5"),
        (["federation.rounds=9"], r"only takes more seeds, e.g. 'seeds=\[3, 5, 6\]'"),
        (["seeds=[3, 5, 7]", "recipe=demo"], "leave out the other overrides"),
        (["seeds=[3, 5, 5]"], "name each only once"),
        (["seeds=[3, 5, -1]"], "seeds"),
    ],
)
def test_other_changes_of_a_resumed_benchmark_are_refused(plan, overrides, sentence):
    with pytest.raises(RecipeError, match=sentence):
        extend_plan(plan, overrides)


def test_the_runs_of_new_seeds_have_the_recipes_of_the_others(folder, plan):
    add_seeds(folder, extend_plan(plan, ["seeds=[3, 5, 8]"]))
    assert read_benchmark(str(folder / "benchmark.yaml")).seeds == [3, 5, 8]
    for arm in plan.arms:
        old, new = (load_recipe(str(arm_run(folder, arm, seed).folder / "recipe.yaml")) for seed in (5, 8))
        assert new.seed == 8
        assert new.model_copy(update={"seed": 5}) == old


def test_the_runs_of_new_seeds_have_the_files_that_the_benchmark_started_with(folder, plan, pairs):
    write_jsonl(Path(pairs), [{"prompt": "other", "chosen": "a", "rejected": "b"}])
    add_seeds(folder, extend_plan(plan, ["seeds=[3, 5, 8]"]))
    old, new = (next(arm_run(folder, "one", seed).inputs.glob("*/pairs.jsonl")) for seed in (3, 8))
    assert new.parent.name == old.parent.name
    assert new.samefile(old)


def test_the_runs_that_exist_stay_as_they_are(folder, plan):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-seed-*/recipe.yaml")}
    add_seeds(folder, extend_plan(plan, ["seeds=[3, 5, 8]"]))
    assert len(before) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before
