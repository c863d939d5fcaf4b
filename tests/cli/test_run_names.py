"""How commands find a run or a benchmark by what the user types."""

import os

import pytest

from components.config import RecipeError
from tasks.runs import find_benchmark, find_run, find_run_or_benchmark
from tests.support.command_line import fed_rlhf, refusal


@pytest.fixture
def runs(runs, tmp_path, monkeypatch):
    """The folder of runs, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return runs


@pytest.fixture
def start(runs):
    """A function that makes runs or benchmarks with these ids, each started after those before it."""
    plans = []

    def make(*ids, plan="recipe.yaml"):
        for run_id in ids:
            path = runs / run_id / plan
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            plans.append(path)
            os.utime(path, (len(plans), len(plans)))

    return make


@pytest.fixture
def benchmark(start):
    """A benchmark with two runs."""
    start("nightly-1/one-seed-0", "nightly-1/two-seed-0")
    start("nightly-1", plan="benchmark.yaml")


def test_latest_is_the_run_that_was_started_last_whatever_was_written_last(start, runs):
    start("debug-2", "debug-1")
    (runs / "debug-2" / "prepare.done").touch()
    assert find_run("latest").id == "debug-1"
    assert find_run_or_benchmark("latest").id == "debug-1"


def test_what_a_benchmark_has_created_before_its_plan_is_not_the_latest_run(start):
    start("debug-1", "nightly-1/one-seed-0")
    assert find_run("latest").id == "debug-1"


def test_a_link_to_a_run_is_that_run(start, runs):
    start("debug-1")
    (runs / "best").symlink_to(runs / "debug-1")
    assert find_run("deb").id == find_run("best").id == "debug-1"


def test_the_latest_ones_that_a_refusal_names_are_of_both_kinds(start):
    start("debug-1", "debug-2", "debug-3")
    start("nightly-1", plan="benchmark.yaml")
    with pytest.raises(RecipeError, match=r"Latest: debug-2, debug-3, nightly-1\.$"):
        find_run_or_benchmark("other")


def test_latest_is_no_run_of_a_benchmark_and_for_a_benchmark_the_latest_of_these(start, benchmark):
    with pytest.raises(RecipeError, match="there is no run 'latest'"):
        find_run("latest")
    assert find_run_or_benchmark("latest").id == "nightly-1"
    assert find_benchmark("latest").name == "nightly-1"
    start("debug-1")
    start("nightly-2/one-seed-0")
    start("nightly-2", plan="benchmark.yaml")
    assert find_run("latest").id == "debug-1"
    assert find_run_or_benchmark("latest").id == "debug-1"
    assert find_benchmark("latest").name == "nightly-2"


def test_a_run_that_is_named_latest_is_meant_by_it(start):
    start("latest", "debug-1")
    assert find_run("latest").id == "latest"


def test_the_beginning_of_one_id_suffices_and_a_whole_id_is_no_beginning(start):
    start("debug-1", "debug-10", "other-1")
    assert find_run("o").id == "other-1"
    assert find_run("debug-1").id == "debug-1"
    assert find_run("debug-10").id == "debug-10"


def test_the_beginning_of_several_ids_is_refused_with_five_of_them(start):
    start(*(f"debug-{n}" for n in range(1, 6)))
    sentence = "'debug' is the beginning of several ids: debug-1, debug-2, debug-3, debug-4, debug-5"
    with pytest.raises(RecipeError) as refused:
        find_run("debug")
    assert str(refused.value) == f"{sentence}. Give more of one."
    start("debug-6", "debug-7")
    with pytest.raises(RecipeError) as refused:
        find_run("debug")
    assert str(refused.value) == f"{sentence} and 2 others. Give more of one."


def test_the_beginning_of_a_benchmark_is_the_benchmark_and_not_its_runs(benchmark):
    assert find_run_or_benchmark("night").id == "nightly-1"
    assert find_benchmark("night").name == "nightly-1"
    assert find_run("nightly-1/t").id == "nightly-1/two-seed-0"
    with pytest.raises(RecipeError, match="there is no run 'nightly-1'"):
        find_run("nightly-1")


@pytest.mark.parametrize("name", ["", "ebug-1", "debug-2"])
def test_what_begins_no_id_is_refused_with_the_latest_ids(start, name):
    start("debug-1")
    with pytest.raises(RecipeError, match=f"there is no run '{name}' under .*Latest: debug-1"):
        find_run(name)


def test_a_run_is_shown_by_the_beginning_of_its_id(start):
    start("debug-1")
    assert fed_rlhf("show", "deb").stdout.startswith("debug-1: ")
    assert fed_rlhf("show", "latest").stdout.startswith("debug-1: ")


@pytest.mark.parametrize("name", ["deb", "latest"])
def test_deletion_without_a_question_takes_a_whole_id(start, runs, name):
    start("debug-1")
    assert "'debug-1'" in refusal("delete", name, "--yes")
    assert (runs / "debug-1" / "recipe.yaml").is_file()
    result = fed_rlhf("delete", name, answer="y\n")
    assert result.exit_code == 0
    assert f"Delete {runs / 'debug-1'}?" in result.stdout
    assert not (runs / "debug-1").exists()
