"""Policies that generate without a Prefect server."""

import logging

from tasks import policies


def without_prefect(monkeypatch):
    """Let the task that loads a shared policy run as a function."""
    monkeypatch.setattr(policies, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(
        type(policies.generate_on_server), "__call__", lambda self, *arguments: self.fn(*arguments)
    )
