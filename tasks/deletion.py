"""Deletion of runs and benchmarks: of one, or of those that nothing has written to for some time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import RecipeError, UserError
from components.io import DamagedFileError
from components.paths import runs_root
from tasks.run_table import RunStatus, benchmark_runs, is_locked, run_status
from tasks.runs import Run, list_runs_and_benchmarks, lock

if TYPE_CHECKING:
    from components.owners.jobs import Receipt

UNITS = {"h": "hours", "d": "days", "w": "weeks"}
"""Units of an age, by their letters."""


def delete_folder(
    run: Run,
    confirm: Callable[[Path], None],
    told: Callable[[str, Receipt | str], None],
    with_mlflow: bool = False,
    written_before: datetime | None = None,
) -> list[str]:
    """Delete the folder of a run or a benchmark, and let owners with rows of their own forget it.

    Args:
        run: the run or the benchmark.
        confirm: is called with the folder before it is deleted.
        told: is called with each such owner, and its receipt or why there is none.
        with_mlflow: whether to delete its runs in MLflow too, before the folder.
        written_before: refuse a run that was written to since then.

    Returns:
        sentences on what was deleted.

    Raises:
        RecipeError: it is outside of the folder of runs, a process works on it or has written to it, or the
            run belongs to a benchmark, which could not be resumed without it.
        TrackingError: MLflow's store cannot be reached; nothing is deleted.
    """
    from tasks.owners import forget_run

    folder = run.folder
    root = runs_root().resolve()
    if root not in folder.parents:
        raise RecipeError(
            f"{folder} is outside the folder of runs, {root}: only runs and benchmarks in it are deleted."
            " Remove the folder yourself."
        )
    if run.is_in_benchmark:
        raise RecipeError(
            f"run '{run.id}' belongs to benchmark {folder.parent.name}, which could not be resumed without"
            " it: delete the benchmark."
        )
    confirm(folder)
    with lock(Run(folder.name, folder)):
        for one in filter(is_locked, benchmark_runs(run)):
            raise RecipeError(f"another process works on run {one.id}: wait for it, or stop it.")
        if written_before is not None and run_status(run).written >= written_before:
            raise RecipeError(f"run {run.id} was written to meanwhile.")
        sentences = _delete_from_mlflow(run) if with_mlflow else []
        for path in (folder, *folder.glob("*/")):
            try:
                answers = forget_run(Run(path.name, path))
            except (UserError, DamagedFileError) as error:  # a run that cannot be read can be deleted
                answers = {"": str(error)}
            for owner, answer in answers.items():
                told(owner, answer)
        shutil.rmtree(folder)
    return [f"deleted {folder}", *sentences]


def _delete_from_mlflow(run: Run) -> list[str]:
    from tasks.tracking.run_tree import delete_tracked_runs

    return delete_tracked_runs([run, *benchmark_runs(run)])


def parse_age(text: str) -> timedelta:
    """An age such as 30d.

    Raises:
        UserError: it is no such age.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if match is None:
        raise UserError(
            f"--older-than {text!r}: expected a whole number from 1 to 99999 with the unit h (hours), d"
            " (days) or w (weeks), e.g. 30d."
        )
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def find_older(end: datetime) -> tuple[list[RunStatus], list[RunStatus]]:
    """Runs outside of benchmarks, and benchmarks, whose last write is before a moment.

    Returns:
        those that can be deleted, and those that a process works on.
    """
    root = runs_root().resolve()
    idle: list[RunStatus] = []
    working: list[RunStatus] = []
    for run in list_runs_and_benchmarks():
        if run.is_in_benchmark or root not in run.folder.parents:
            continue
        status = run_status(run)
        if status.written < end:
            is_working = any(map(is_locked, [run, *benchmark_runs(run)]))
            (working if is_working else idle).append(status)
    return idle, working
