"""Policies that generate without a Prefect server."""

import logging

from tasks import policies


def without_prefect(monkeypatch):
    """Let the task that loads a shared policy run as a function."""
    task = policies.generate_on_server
    monkeypatch.setattr(policies, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(policies, "generate_on_server", task)
    monkeypatch.setattr(type(task), "__call__", lambda self, *arguments: self.fn(*arguments))
