"""Runs a flow in this process: starts a Prefect API, shows the run, and gives an exit status."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType
from typing import Any

from components.config import UserError
from components.environment import configure_libraries
from components.io import DamagedFileError, FullDiskError
from components.paths import without_credentials

FAILED = 1
WRONG_INPUT = 2
"""Exit status where the recipe, the data or the environment is wrong."""
Parameters = Mapping[str, Any]
"""Arguments of a flow by their names."""
LIBRARIES = ("great_expectations", "mlflow", "peft")
"""Packages that a run needs and that do not import Prefect; they are seconds to import."""


def exit_status(command: Callable[[], int | None]) -> int:
    """Run a command; a UserError, or a file that cannot be read, is printed as a sentence, with status 2."""
    configure_libraries()
    if isinstance(sys.stdout, TextIOWrapper):  # names and texts may have characters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or 0
    except FullDiskError as error:
        print(f"error: {error.strerror}", file=sys.stderr)
        return WRONG_INPUT
    except (UserError, DamagedFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return WRONG_INPUT


def import_libraries() -> None:
    """Import LIBRARIES, and what these import: torch, transformers, pandas."""
    for name in LIBRARIES:
        import_for_good(name)


def import_for_good(name: str) -> ModuleType:
    """Import a module; from then on the garbage collector leaves out all objects that there are.

    Imported libraries are a million objects, through which each full collection between two models would go.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        module = import_module(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    return module


def require_tracking_server() -> None:
    """Require that the MLflow server answers, if the environment names one.

    Raises:
        ServerError: it does not.
    """
    from infra.processes import ServerError
    from infra.servers import is_up

    tracking = without_credentials(os.environ.get("MLFLOW_TRACKING_URI", ""))  # health needs none
    if tracking.startswith("http") and not is_up(f"{tracking.rstrip('/')}/health"):
        raise ServerError(
            f"MLFLOW_TRACKING_URI is {tracking}, but no MLflow server answers there: start it, or unset the"
            " variable to use the project's own file."
        )


def run_flow(entrypoint: str, verbose: bool, parameters: Callable[[], Parameters]) -> tuple[int, Any]:
    """Call a flow with the Prefect API of the environment, or with a private one; see prefect_api.

    Args:
        entrypoint: 'module:name' of the flow. It is imported when the API is there, since Prefect reads
            its settings at that time. LIBRARIES are imported while a private one starts.
        verbose: log to the console in place of the view of the terminal.
        parameters: gives the arguments of the flow. It is called once the API is there.

    Returns:
        the exit status, and the flow's result; the error of a failed flow is printed, and its result is None.

    Raises:
        ServerError: a server that the environment names does not answer.
    """
    from infra.servers import prefect_api

    require_tracking_server()
    from flows.stopping import stop_runs, stopping_on_signals
    from flows.terminal import View  # imports Rich

    with ExitStack() as stack:
        view = None if verbose else stack.enter_context(View())
        stack.enter_context(prefect_api(import_libraries))
        end_view = view.end if view is not None else lambda: None
        stack.enter_context(stopping_on_signals(end_view))
        from prefect.exceptions import TerminationSignal

        from tasks.runs import is_stop

        if view is not None:
            view.replace_console_log()
        try:
            module, _, name = entrypoint.partition(":")
            state = getattr(import_for_good(module), name)(**parameters(), return_state=True)
        except TerminationSignal:  # Prefect takes SIGTERM while a flow runs
            stop_runs(end_view, 128 + signal.SIGTERM)
        result = state.result(raise_on_failure=False)
        if isinstance(result, Exception) and is_stop(result):
            stop_runs(end_view, 128 + signal.SIGTERM)
    if state.is_completed():
        return 0, result
    reason = result.strerror if isinstance(result, FullDiskError) else result or state.message
    print(f"error: the run ended {state.name}: {reason}", file=sys.stderr)
    return WRONG_INPUT if isinstance(result, UserError | FullDiskError) else FAILED, None
