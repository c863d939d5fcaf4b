"""Policies that generate without a Prefect server."""

import logging

from prefect import Task

from tasks import policies


def without_prefect(monkeypatch):
    """Let the tasks that load a policy or selectors run as functions."""
    monkeypatch.setattr(policies, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(Task, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))
