"""Runs a flow in this process: checks its arguments, starts a Prefect API, and gives an exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config import RecipeError, UserError
from components.environment import configure_libraries
from components.recipes import load_recipe, recipe_names, validate_environment
from infra.processes import ServerError
from infra.servers import is_up, prefect_api

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

DEFAULT_RECIPE = "summarization/demo"
DEFAULT_BENCHMARK = "summarization"
FAILED = 1
WRONG_INPUT = 2
"""Exit status where the recipe, the data or the environment is wrong."""


@dataclass(frozen=True)
class RunRequest:
    """What to run.

    Attributes:
        recipe: name or path; None for a resumed run.
        overrides: 'key.path=value' settings on top of it.
        resume: id or folder of the run to resume.
    """

    recipe: str | None
    overrides: tuple[str, ...] = ()
    resume: str | None = None


def main(entrypoint: str, arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments of `python -m flows.fed_rlhf`, and run its flow.

    Args:
        entrypoint: module path of the flow, by which Prefect loads it once its API is there.
        arguments: None takes those of the process.

    Returns:
        exit status: 0 done, 1 failed, 2 the recipe, the data or the environment is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flows.fed_rlhf",
        description="Align a language model with private preferences by federated training.",
    )
    parser.add_argument(
        "--recipe", help=f"name or path (default: {DEFAULT_RECIPE}); one of: {', '.join(recipe_names())}"
    )
    parser.add_argument(
        "--resume", metavar="RUN", help="resume a run, by its id or folder, with its own recipe"
    )
    parser.add_argument("--check", action="store_true", help="check the recipe and stop")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="settings on top of the recipe, e.g. federation.rounds=10",
    )
    parsed = parser.parse_intermixed_args(arguments)
    request = RunRequest(parsed.recipe, tuple(parsed.overrides), parsed.resume)

    def call(name: str) -> State[Any]:
        from prefect.flows import Flow, load_flow_from_entrypoint

        flow: Flow[..., Any] = load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
        state = flow(recipe=name, overrides=list(request.overrides), resume=request.resume, return_state=True)
        return cast("State[Any]", state)

    return exit_status(lambda: check_recipe(request) if parsed.check else run_recipe(request, call))


def exit_status(command: Callable[[], int]) -> int:
    """Run a command; a UserError is printed as a sentence, and gives status 2."""
    configure_libraries()
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT


def check_recipe(request: RunRequest) -> int:
    """Check the recipe of a request, and what it needs, and print an estimate of its costs."""
    name, unread = resolve_recipe(request)
    print(f"{name}: the recipe is valid")
    if unread:
        print(f"not checked, since they cannot be read from here: model and tokenizer of {', '.join(unread)}")
    if request.resume is None:
        from components.estimates import describe_costs

        print(describe_costs(load_recipe(name, request.overrides)))
    return 0


def resolve_recipe(request: RunRequest) -> tuple[str, list[str]]:
    """Check the recipe of a request, and what it needs.

    Returns:
        the recipe's name or path, and the names of the models that could not be checked.

    Raises:
        RecipeError, DataError: naming what is wrong.
    """
    if request.resume is None:
        name = request.recipe or DEFAULT_RECIPE
        return name, validate_environment(load_recipe(name, request.overrides))
    if request.recipe or request.overrides:
        raise RecipeError(
            "a resumed run continues with its own recipe: leave out the recipe and the overrides, or"
            " start a new run."
        )
    from tasks.runs import RESULT, find_run

    run = find_run(request.resume)
    recipe = run.recipe()
    complete = (run.evaluation / RESULT).is_file()
    return recipe.name, [] if complete else validate_environment(recipe)


def run_recipe(request: RunRequest, call: Callable[[str], State[Any]]) -> int:
    """Check a request, run its flow, and print the table of the finished run.

    Args:
        request: what to run.
        call: runs the flow with the recipe's name or path, and gives its final state.
    """
    name, _ = resolve_recipe(request)
    status, folder = run_flow(lambda: call(name))
    if status == 0:
        print("\n" + (Path(folder) / "report" / "summary.txt").read_text(encoding="utf-8"))
    return status


def run_flow(call: Callable[[], State[Any]]) -> tuple[int, Any]:
    """Call a flow with the Prefect API of the environment, or with a private one; see prefect_api.

    Args:
        call: imports the flow, runs it, and gives its final state. It imports Prefect, which reads
            its settings at that time.

    Returns:
        the exit status, and the flow's result; the error of a failed flow is printed, and its result is None.

    Raises:
        ServerError: a server that the environment names does not answer.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tracking = os.environ.get("MLFLOW_TRACKING_URI", "")
    if tracking.startswith("http") and not is_up(f"{tracking.rstrip('/')}/health"):
        raise ServerError(
            f"MLFLOW_TRACKING_URI is {tracking}, but no MLflow server answers there: start it, or unset the"
            " variable to log to the project's own file."
        )
    print("starting ...", flush=True)
    with prefect_api():
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        try:
            state = call()
        finally:  # before a private server stops, since unsent events would be retried for a minute
            APILogWorker.drain_all(timeout=10)
            EventsWorker.drain_all(timeout=10)
        if state.is_completed():
            return 0, state.result()
        error = state.result(raise_on_failure=False)
        print(f"error: the run ended {state.name}: {error or state.message}", file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UserError) else FAILED, None
