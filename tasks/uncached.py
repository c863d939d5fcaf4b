"""Prefect's task decorator without its cache, and with names that people read.

Commits and result files record completed work, and a resumed run reads those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import prefect
from prefect import Task
from prefect.cache_policies import NO_CACHE

P = ParamSpec("P")
R = TypeVar("R")


def task(name: str | Callable[[], str] | None = None) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Declare a task.

    Args:
        name: name of its runs, with the task's parameters in braces, or a function that gives it;
            None: the words of the function's name.
    """

    def declare(function: Callable[P, R]) -> Task[P, R]:
        words = function.__name__.replace("_", " ")
        return prefect.task(cache_policy=NO_CACHE, task_run_name=name or words)(function)

    return declare
