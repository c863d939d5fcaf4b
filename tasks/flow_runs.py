"""Prefect's flow runs of a run: their names, their progress, and the end of those whose process has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import runtime
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from components.config import Recipe
from components.environment import PRIVATE_PREFECT
from components.paths import prefect_address, runs_root
from tasks.runs import Run

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


PROGRESS_SECONDS = 2.0
"""Between two updates of a progress artifact."""


@dataclass(frozen=True)
class FlowRunLink:
    """The Prefect flow run that works on a run."""

    id: str  # its id
    url: str | None  # its page in the Prefect UI, for a private server at `make prefect-ui`; None without one

    def tags(self) -> dict[str, str]:
        """The link as tags of an MLflow run, and as its description until the run is finished."""
        tags = {"prefect.flow_run_id": self.id, "prefect.flow_run_url": self.url or ""}
        if self.url:
            tags["mlflow.note.content"] = f"Not finished. Prefect: [flow run]({self.url})"
        return tags


def current_flow_run() -> FlowRunLink:
    """The flow run that calls."""
    url = runtime.flow_run.ui_url
    if url and os.environ.get(PRIVATE_PREFECT):  # the server ends with the run
        url = f"{prefect_address()}/{url.split('/', 3)[-1]}"
    return FlowRunLink(str(runtime.flow_run.id), url)


def superseded() -> State[Any] | None:
    """Cancelled, where the schedule of this flow run's deployment has a later flow run that is due too.

    After a pause of the worker only the last of the nights that were missed is run.
    """
    context = FlowRunContext.get()
    own = context.flow_run if context else None
    if own is None or own.deployment_id is None or not own.auto_scheduled or own.expected_start_time is None:
        return None
    due = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[own.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
        expected_start_time=FlowRunFilterExpectedStartTime(
            after_=own.expected_start_time + timedelta(seconds=1), before_=datetime.now(UTC)
        ),
    )
    with get_client(sync_client=True) as client:
        later = client.read_flow_runs(flow_run_filter=due, limit=1)
    if not later:
        return None
    return Cancelled(message="It is late, and a later flow run of the schedule is due and runs instead.")


def retried_run() -> Run | None:
    """The run or benchmark that an earlier attempt of this flow run began; None for a first attempt.

    A flow run has the name of its run, see claim_flow_run.
    """
    run = Run(str(runtime.flow_run.name), runs_root() / str(runtime.flow_run.name))
    begun = runtime.flow_run.run_count > 1 and (run.folder / run.plan_name).is_file()
    return run if begun else None


PLAN_TAGS = ("recipe:", "method:", "seed:", "arm:")
"""Beginnings of the tags that say what a flow run runs."""


def without_plan_tags(tags: Iterable[str]) -> set[str]:
    """The tags that do not say what a flow run runs."""
    return {tag for tag in tags if not tag.startswith(PLAN_TAGS)}


def recipe_tags(recipe: Recipe) -> list[str]:
    """Tags by which Prefect's pages find the flow runs of a recipe, a method and a seed."""
    return [f"recipe:{recipe.name}", f"method:{recipe.federation.method}", f"seed:{recipe.seed}"]


def claim_flow_run(run: Run, is_named: bool = True, plan_tags: Sequence[str] = ()) -> FlowRunLink:
    """Record this flow run in run.json, and give it the name of the run, and what it runs as tags.

    The earlier flow run of the run and its sub-flow runs end as Crashed if they have no end: the run is
    locked, so that their process has ended.

    Args:
        run: the run, the benchmark or the pipeline that this process has locked.
        is_named: False where the flow run has a name of its own.
        plan_tags: further tags of a flow run that is named.
    """
    link = current_flow_run()
    earlier = run.metadata().get("flow_run_id")
    if earlier is not None:
        crashed: State[Any] = Crashed(message="Its process has ended, and the run was resumed.")
        end_flow_runs(earlier, crashed, spared=link.id)
    if is_named:
        own = [*dict.fromkeys([*runtime.flow_run.tags, *plan_tags])]
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(link.id), name=run.id, tags=own)
    run.update_metadata(flow_run_id=link.id, flow_run_url=link.url)
    return link


def end_flow_runs(flow_run_id: str, state: State[Any], spared: str = "") -> None:
    """Set the state of a flow run and its sub-flow runs that have not ended.

    Args:
        flow_run_id: the flow run; another server's, which this one does not know, is left alone.
        state: the final state.
        spared: id of a flow run whose state stays.
    """
    with suppress(ObjectNotFound), get_client(sync_client=True) as client:
        parent = FlowRunFilterParentFlowRunId(any_=[UUID(flow_run_id)])
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
        for flow_run in [*children, client.read_flow_run(UUID(flow_run_id))]:
            ended = flow_run.state is not None and flow_run.state.is_final()
            if not ended and str(flow_run.id) != spared:
                client.set_flow_run_state(flow_run.id, state, force=True)


class ProgressBar:
    """A progress artifact of the flow run that calls, which the Prefect UI shows as a bar.

    Args:
        key: key of the artifact, of lowercase letters and dashes.
        description: what is done.
    """

    def __init__(self, key: str, description: str) -> None:
        self._id: Any = create_progress_artifact(0.0, key, description)
        self._updated = time.monotonic()

    def report(self, done: int, total: int) -> None:
        """Show how much is done; reports in quick succession are skipped, except the last."""
        now = time.monotonic()
        if done == total or now - self._updated >= PROGRESS_SECONDS:
            update_progress_artifact(self._id, 100 * done / total)
            self._updated = now
