"""Flows that a script or a notebook calls without a Prefect server, and that a deployment runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from prefect import Flow, runtime
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker

from flows.stopping import stopping_without_server
from infra.servers import prefect_api

P = ParamSpec("P")
R = TypeVar("R")


class PipelineFlow(Flow[P, R]):
    """A flow that gives its caller's process a Prefect API while it runs, see infra.servers.prefect_api."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the flow."""
        if FlowRunContext.get() is not None:
            return super().__call__(*args, **kwargs)
        with prefect_api():
            try:
                return super().__call__(*args, **kwargs)
            finally:  # before a private server stops, since unsent events would be retried for a minute
                for worker in (APILogWorker, EventsWorker):
                    # In a thread: that of a notebook has an event loop, where Prefect gives a coroutine.
                    draining = Thread(target=worker.drain_all, kwargs={"timeout": 10})
                    draining.start()
                    draining.join()


def pipeline_flow(name: str, run_name: str | None = None) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Declare a flow of this class, whose result is not stored.

    The process of a deployment's run ends when the server of Prefect is lost, see stopping_without_server.
    """

    def declare(function: Callable[P, R]) -> Flow[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with stopping_without_server() if runtime.deployment.id else nullcontext():
                return function(*args, **kwargs)

        return PipelineFlow(run, name=name, flow_run_name=run_name, persist_result=False)

    return declare
