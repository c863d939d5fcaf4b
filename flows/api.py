"""Flows that a script or a notebook calls without a Prefect server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker

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
                APILogWorker.drain_all(timeout=10)
                EventsWorker.drain_all(timeout=10)


def pipeline_flow(name: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Declare a flow of this class, whose result is not stored."""
    return lambda function: PipelineFlow(function, name=name, persist_result=False)
