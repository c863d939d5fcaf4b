"""A run that asks for compiled steps: what it stores, and what its commits depend on."""

import logging
import os
import subprocess
import sys

import pytest

from components.config import RecipeError
from components.models.compiled import missing_tool
from components.recipes import load_recipe
from tasks.devices import can_compile, choose_workers
from tasks.federation import open_commits
from tasks.runs import Run, create_run

COMPILED = "runtime.compile=true"
CONCURRENT = ["runtime={devices: [cpu], torch_threads: 2}", "selector.lora.dropout=0.0"]
"""With these, two clients train at a time unless their steps are compiled."""

needs_compiler = pytest.mark.skipif(missing_tool("cpu") is not None, reason="no C++ compiler is installed")


@pytest.mark.parametrize(("value", "compiled"), [("true", True), ("True", True), ("false", False)])
def test_a_switch_of_yaml_is_read(value, compiled):
    assert load_recipe("debug", [f"runtime.compile={value}"]).runtime.compile is compiled


@pytest.mark.parametrize("value", ["auto", "null", "2", "on", "off"])
def test_a_value_that_is_not_a_switch_is_refused(value):
    with pytest.raises(RecipeError, match=r"runtime\.compile"):
        load_recipe("debug", [f"runtime.compile={value}"])


def test_a_recipe_does_not_compile_unless_it_asks_for_it():
    assert not choose_workers(load_recipe("debug")).runtime.compile


@needs_compiler
def test_a_selector_is_compiled_where_there_is_a_compiler():
    assert choose_workers(load_recipe("debug", [COMPILED])).runtime.compile


def test_without_a_compiler_a_run_stores_that_it_does_not_compile(no_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = choose_workers(load_recipe("debug", [COMPILED]))
    assert not chosen.runtime.compile
    assert len(caplog.records) == 1
    assert "C++ compiler" in caplog.text


@pytest.mark.slow
def test_a_process_that_finds_no_compiler_logs_it_once_and_does_not_compile():
    program = (
        "from components.recipes import load_recipe; from tasks.devices import choose_workers;"
        f" print(choose_workers(load_recipe('debug', ['{COMPILED}'])).runtime.compile)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
    assert done.stderr.count("no C++ compiler is installed") == 1


@needs_compiler
def test_one_client_trains_at_a_time_where_its_steps_are_compiled():
    assert choose_workers(load_recipe("debug", CONCURRENT)).runtime.cpu_workers == 2
    runtime = choose_workers(load_recipe("debug", [*CONCURRENT, COMPILED])).runtime
    assert runtime.compile
    assert runtime.cpu_workers == 1


def test_without_a_compiler_two_clients_train_at_a_time(no_compiler):
    runtime = choose_workers(load_recipe("debug", [*CONCURRENT, COMPILED])).runtime
    assert not runtime.compile
    assert runtime.cpu_workers == 2


def test_concurrent_clients_with_compiled_steps_are_refused():
    with pytest.raises(
        RecipeError, match=r"cpu_workers is 2.*one client trains at a time.*leave cpu_workers"
    ):
        load_recipe("debug", [COMPILED, "runtime.cpu_workers=2"])


def test_clients_on_several_devices_are_not_compiled(caplog):
    with caplog.at_level(logging.WARNING):
        assert not can_compile(load_recipe("debug", [COMPILED]), ["cuda:0", "cuda:1"])
    assert "2 devices at a time" in caplog.text


def test_a_quantized_selector_is_not_compiled(caplog):
    recipe = load_recipe("debug", [COMPILED, "selector.backbone.quantization=8bit"])
    with caplog.at_level(logging.WARNING):
        assert not can_compile(recipe, ["cuda:0"])
    assert "selector.backbone.quantization" in caplog.text


@needs_compiler
def test_a_run_stores_that_it_compiles(tmp_path):
    run = create_run(choose_workers(load_recipe("debug", [COMPILED])), tmp_path / "run")
    stored = Run("run", run.folder).recipe()
    assert stored.runtime.compile
    assert choose_workers(stored) == stored


def test_a_method_without_a_selector_does_not_compile(caplog):
    with caplog.at_level(logging.WARNING):
        chosen = choose_workers(load_recipe("debug", [COMPILED, "federation.method=feddpo"]))
    assert not chosen.runtime.compile
    assert "feddpo" in caplog.text


def test_commits_of_compiled_steps_differ_from_others(prepared, tmp_path):
    fingerprints = set()
    for index, overrides in enumerate(([], [COMPILED])):
        recipe = load_recipe("debug", overrides)
        run = create_run(recipe, tmp_path / str(index))
        run.prepared.symlink_to(prepared)
        fingerprints.add(open_commits(Run(run.id, run.folder), recipe).fingerprint)
    assert len(fingerprints) == 2
