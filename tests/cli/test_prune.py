"""`fed-rlhf prune` on folders of runs."""

import os
import shutil
import time
from datetime import timedelta

import pytest

from components.recipes import load_recipe
from tasks.deletion import parse_age
from tasks.runs import Run, create_run, lock
from tests.support.command_line import fed_rlhf, refusal


@pytest.fixture
def runs(runs):
    """Folder of runs: an old run, an old benchmark, and a run of now."""
    create_run(load_recipe("debug"), runs / "old-1")
    create_run(load_recipe("debug"), runs / "nightly-1" / "one-seed-0")
    (runs / "nightly-1" / "benchmark.yaml").write_text("recipe: debug\n")
    for name in ("old-1", "nightly-1"):
        make_old(runs / name, days=10)
    create_run(load_recipe("debug"), runs / "new-1")
    return runs


def make_old(folder, days):
    """Set the last write of the files of a folder."""
    moment = time.time() - 86400 * days
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_old_runs_and_benchmarks_are_listed_and_deleted_after_one_question(runs):
    result = fed_rlhf("prune", "--older-than", "9d", answer="y\n")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[:3]] == ["run", "old-1", "nightly-1"]
    assert "MB" in result.stdout or "kB" in result.stdout
    assert result.stdout.count("Delete these 2 folders (") == 1
    assert f"deleted {runs / 'old-1'}" in result.stdout
    assert f"deleted {runs / 'nightly-1'}" in result.stdout
    assert names(runs) == ["new-1"]


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_nothing_is_pruned_without_a_confirmation(runs, answer):
    result = fed_rlhf("prune", "--older-than", "9d", answer=answer)
    assert result.exit_code == 1
    assert names(runs) == ["new-1", "nightly-1", "old-1"]


def test_yes_prunes_without_a_question(runs):
    result = fed_rlhf("prune", "--older-than", "9d", "--yes")
    assert result.exit_code == 0
    assert "?" not in result.stdout
    assert names(runs) == ["new-1"]


def test_the_age_is_that_of_the_last_write_of_any_file(runs):
    (runs / "nightly-1" / "one-seed-0" / "run.json").touch()
    fed_rlhf("prune", "--older-than", "9d", "--yes")
    assert names(runs) == ["new-1", "nightly-1"]


def test_without_old_runs_nothing_is_asked(runs):
    result = fed_rlhf("prune", "--older-than", "11d")
    assert result.exit_code == 0
    assert result.stdout == (f"there are no runs to delete under {runs} (last written more than 11d ago)\n")


@pytest.mark.parametrize("locked", ["nightly-1", "nightly-1/one-seed-0"])
def test_running_ones_stay_and_are_named(runs, locked):
    with lock(Run(locked, runs / locked)):
        make_old(runs / locked, days=10)
        result = fed_rlhf("prune", "--older-than", "9d", "--yes")
    assert result.exit_code == 0
    assert "running, and not deleted: nightly-1\n" in result.stdout
    assert names(runs) == ["new-1", "nightly-1"]


def test_a_benchmark_with_a_running_run_is_not_deleted(runs):
    with lock(Run("one", runs / "nightly-1" / "one-seed-0")):
        error = refusal("delete", "nightly-1", "--yes")
    assert "another process works on run nightly-1/one-seed-0" in error
    assert (runs / "nightly-1" / "one-seed-0" / "recipe.yaml").is_file()


def test_a_run_that_starts_after_the_question_stays_and_the_others_are_deleted(runs, monkeypatch):
    held = lock(Run("old-1", runs / "old-1"))
    monkeypatch.setattr("typer.confirm", lambda *_, **__: held.__enter__())
    result = fed_rlhf("prune", "--older-than", "9d")
    held.__exit__(None, None, None)
    assert result.exit_code == 1
    assert "not deleted: another process works on run old-1" in result.stderr
    assert names(runs) == ["new-1", "old-1"]


def test_a_run_that_is_resumed_and_ends_before_the_answer_stays(runs, monkeypatch):
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (runs / "old-1" / "report.done").touch())
    result = fed_rlhf("prune", "--older-than", "9d")
    assert result.exit_code == 1
    assert "not deleted: run old-1 was written to meanwhile" in result.stderr
    assert names(runs) == ["new-1", "old-1"]


def test_a_lock_alone_does_not_make_a_run_newer(runs):
    with lock(Run("old-1", runs / "old-1")):
        pass
    fed_rlhf("prune", "--older-than", "9d", "--yes")
    assert names(runs) == ["new-1"]


def test_one_that_cannot_be_deleted_does_not_keep_the_others(runs, monkeypatch):
    def fail(folder):
        if folder.name == "nightly-1":
            raise PermissionError(f"not permitted: {folder.name}")
        delete(folder)

    delete = shutil.rmtree
    monkeypatch.setattr("tasks.deletion.shutil.rmtree", fail)
    result = fed_rlhf("prune", "--older-than", "9d", "--yes")
    assert result.exit_code == 1
    assert "not deleted: not permitted: nightly-1" in result.stderr
    assert names(runs) == ["new-1", "nightly-1"]


def test_a_link_to_a_folder_elsewhere_is_not_pruned(runs, tmp_path):
    outside = create_run(load_recipe("debug"), tmp_path / "outside")
    make_old(outside.folder, days=10)
    (runs / "link").symlink_to(outside.folder)
    assert fed_rlhf("prune", "--older-than", "9d", "--yes").exit_code == 0
    assert (outside.folder / "recipe.yaml").is_file()


@pytest.mark.parametrize(
    ("text", "age"),
    [("12h", timedelta(hours=12)), ("30d", timedelta(days=30)), ("8w", timedelta(weeks=8))],
)
def test_an_age_is_in_hours_days_or_weeks(text, age):
    assert parse_age(text) == age


@pytest.mark.parametrize(
    "text", ["", "30", "d", "0d", "-1d", "1.5d", "30 d", "1m", "30D", "١d", "100000w", "1d\n"]
)
def test_a_wrong_age_is_refused_with_what_is_expected(runs, text):
    error = refusal("prune", f"--older-than={text}", "--yes")
    assert "a whole number from 1 to 99999 with the unit h (hours), d (days) or w (weeks), e.g. 30d" in error
    assert names(runs) == ["new-1", "nightly-1", "old-1"]


def test_the_largest_age_finds_nothing(runs):
    assert fed_rlhf("prune", "--older-than", "99999w").exit_code == 0
