"""A run that asks for compiled steps: what it stores, and what its commits depend on."""

import logging

import pytest

from components.models.compiled import missing_tool
from components.recipes import load_recipe
from tasks.devices import choose_workers
from tasks.federation import open_commits
from tasks.runs import Run, create_run

COMPILED = "runtime.compile=true"


def test_a_recipe_does_not_compile_unless_it_asks_for_it():
    assert not choose_workers(load_recipe("debug")).runtime.compile


@pytest.mark.skipif(missing_tool("cpu") is not None, reason="no C++ compiler is installed")
def test_a_selector_is_compiled_where_there_is_a_compiler():
    assert choose_workers(load_recipe("debug", [COMPILED])).runtime.compile


def test_without_a_compiler_a_run_stores_that_it_does_not_compile(no_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = choose_workers(load_recipe("debug", [COMPILED]))
    assert not chosen.runtime.compile
    assert len(caplog.records) == 1
    assert "C++ compiler" in caplog.text


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
