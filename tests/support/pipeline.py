"""The pipeline in folders of a test's own: called inside the test process, or started as a command.

The files of a run are read here, so that few places in the tests of flows name them.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.mlflow_store import forget_stores

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun
    from prefect.states import State

    from components.results import AlignmentResult, EvaluationResult, FederationResult
    from tasks.runs import Run

ROOT = Path(__file__).resolve().parents[2]
NOISE = re.compile(
    r"^(?!.*two completions that are equal).*(?:Traceback|WARNING|Warning|ERROR|Error|Exception).*", re.M
)
"""Lines that a run without problems does not print. The recipe `debug` cuts completions to equal ones."""


def environment_without(*prefixes: str) -> dict[str, str]:
    """The environment variables whose names begin with none of the prefixes."""
    return {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}


@dataclass(frozen=True)
class PipelineRun:
    """A run that has ended, or was killed.

    Attributes:
        tracking: URI of the MLflow store.
        folder: of the run.
        output: its printed or logged lines.
    """

    tracking: str
    folder: Path
    output: str = ""

    @property
    def run(self) -> Run:
        """The run folder."""
        from tasks.runs import Run

        return Run(self.folder.name, self.folder)

    @cached_property
    def federation(self) -> FederationResult:
        """Result of the phase federate."""
        return self.run.federation_result()

    @cached_property
    def alignment(self) -> AlignmentResult:
        """Result of the phase align."""
        return self.run.alignment_result()

    @cached_property
    def evaluation(self) -> EvaluationResult:
        """Result of the phase evaluate."""
        return self.run.evaluation_result()

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of the report."""
        return json.loads((self.folder / "report" / "metrics.json").read_text())

    @property
    def summary(self) -> str:
        """The table that a run ends with."""
        return (self.folder / "report" / "summary.txt").read_text()

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Answers of the base and the aligned policy to each prompt."""
        return json.loads((self.folder / "evaluation" / "answers.json").read_text())

    @property
    def hashes(self) -> dict[str, str]:
        """Hash of each final adapter by name."""
        return {name: adapter.hash for name, adapter in self.federation.adapters.items()}

    @property
    def client_stores(self) -> Path:
        """The folder of the clients' private stores."""
        return self.folder / "federation-clients"

    @property
    def commits(self) -> int:
        """Number of the last committed step; -1 before the first."""
        return max(
            (int(p.stem) for p in (self.folder / "federation" / "commits").glob("[0-9]*.json")), default=-1
        )

    @property
    def mlflow_id(self) -> str:
        """Id of the run's MLflow run, the parent of those of its phases."""
        return json.loads((self.folder / "run.json").read_text())["mlflow_run_id"]

    @cached_property
    def mlflow(self) -> MlflowClient:
        """A client of the MLflow store."""
        from mlflow import MlflowClient

        return MlflowClient(self.tracking)

    def mlflow_runs(self) -> list[MlflowRun]:
        """All MLflow runs of the experiment `debug`."""
        (experiment,) = [e for e in self.mlflow.search_experiments() if e.name == "debug"]
        return list(self.mlflow.search_runs([experiment.experiment_id]))

    def phase_run(self, phase: str) -> MlflowRun:
        """The MLflow run of a phase."""
        (run,) = [run for run in self.mlflow_runs() if run.data.tags.get("phase") == phase]
        return run

    def history(self, mlflow_id: str, metric: str) -> dict[int, float]:
        """Values of an MLflow metric by step, in the order of the steps."""
        points = self.mlflow.get_metric_history(mlflow_id, metric)
        return {point.step: point.value for point in sorted(points, key=lambda point: point.step)}

    def artifacts(self, mlflow_id: str, folder: str = "") -> set[str]:
        """Paths of the artifacts in a folder of an MLflow run."""
        return {info.path for info in self.mlflow.list_artifacts(mlflow_id, folder)}


class Workplace:
    """Run folders and an MLflow store of a test's own.

    Args:
        folder: of the runs and of the store.
        prefect_url: API for all runs here.
        store: migrated, empty MLflow store (SQLite), which is copied.
    """

    def __init__(self, folder: Path, prefect_url: str, store: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.prefect_url = prefect_url
        shutil.copy(store, folder / "mlflow.db")
        self.tracking = f"sqlite:///{folder / 'mlflow.db'}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that lead a run here."""
        return {
            "FED_RLHF_RUNS": str(self.runs),
            "MLFLOW_TRACKING_URI": self.tracking,
            "PREFECT_API_URL": self.prefect_url,
        }

    def run(self, *overrides: str, recipe: str = "debug") -> PipelineRun:
        """Run a recipe to its end, in this process."""
        from flows.fed_rlhf import fed_rlhf

        folder, output = self.call(lambda: fed_rlhf(recipe=recipe, overrides=list(overrides)))
        return PipelineRun(self.tracking, Path(folder), output)

    def fail(self, *overrides: str) -> tuple[State[str], str]:
        """Final state and output of a run of the recipe `debug` that fails, in this process."""
        from flows.fed_rlhf import fed_rlhf

        state, output = self.call(
            lambda: fed_rlhf(recipe="debug", overrides=list(overrides), return_state=True)
        )
        assert state.is_failed(), output
        return state, output

    def resume(self, run: PipelineRun) -> PipelineRun:
        """Resume a run, in this process."""
        from flows.fed_rlhf import fed_rlhf

        folder, output = self.call(lambda: fed_rlhf(resume=run.folder.name))
        assert Path(folder) == run.folder
        return PipelineRun(self.tracking, run.folder, output)

    def call(self, flow: Callable[[], Any]) -> tuple[Any, str]:
        """Result and log of a call of a flow, with the variables of this workplace set."""
        import_libraries()
        gc.collect()
        gc.freeze()  # flows collect garbage between models; imported modules are left out
        with (
            process_settings(self.variables),
            without_private_server(),
            waiting_for_the_server(),
            captured_log() as lines,
        ):
            returned = flow()
        return returned, "\n".join(lines)

    def main(self, command: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
        """Exit status and output of a function of the command line, called in this process."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            status, log = self.call(lambda: command(list(arguments)))
        return status, log + printed.getvalue()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command with the recipe `debug`, or to resume a run.

        Args:
            arguments: overrides, or `resume` and a run.
        """
        inherited = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_")
        if "FED_RLHF_BACKBONES" in os.environ:
            inherited["FED_RLHF_BACKBONES"] = os.environ["FED_RLHF_BACKBONES"]
        home = {"PREFECT_HOME": str(self.folder / "prefect"), "OMP_NUM_THREADS": "1"}
        command = [] if "resume" in arguments else ["run", "debug"]
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *command, *arguments],
            cwd=ROOT,
            env=inherited | home | self.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def newest(self, output: str = "") -> PipelineRun:
        """The run that was opened last."""
        folder = max((p.parent for p in self.runs.glob("*/recipe.yaml")), key=lambda p: p.stat().st_mtime)
        return PipelineRun(self.tracking, folder, output)

    def kill_when(
        self,
        is_reached: Callable[[PipelineRun], bool],
        *arguments: str,
        wait: float = 0.0,
        number: signal.Signals = signal.SIGKILL,
    ) -> PipelineRun:
        """A run of the command that gets a signal.

        Args:
            is_reached: whether the run has reached the place of the signal.
            arguments: of the command, see start.
            wait: seconds from that place to the signal.
            number: the signal; the process must end within a minute of it.
        """
        process = self.start(*arguments)
        output: list[str] = []
        reader = threading.Thread(target=lambda: output.extend(process.stdout or []))
        reader.start()
        deadline = time.monotonic() + 200
        try:
            while not list(self.runs.glob("*/recipe.yaml")) or not is_reached(self.newest()):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    reader.join()
                    raise AssertionError(f"the place of the kill was not reached: {''.join(output)}")
                time.sleep(0.01)
            time.sleep(wait)
            process.send_signal(number)
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            reader.join()
        return self.newest("".join(output))


@cache
def import_libraries() -> None:
    """Import the libraries that flows import while they run."""
    for name in ("great_expectations", "mlflow.pyfunc", "peft", "trl", "transformers"):
        importlib.import_module(name)


@contextmanager
def process_settings(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore variables, MLflow's stores and signals at the end."""
    environment = dict(os.environ)
    termination = signal.getsignal(signal.SIGTERM)
    for name in ("FED_RLHF_JUDGES", "FED_RLHF_TREES", "MLFLOW_REGISTRY_URI"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        forget_stores()
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, termination)


@contextmanager
def without_private_server() -> Iterator[None]:
    """Fail a flow that would start a Prefect server of its own, which takes ten seconds of a processor."""
    from infra import servers

    def refuse(*_: object) -> None:
        raise AssertionError(
            "a flow starts a Prefect server of its own: set PREFECT_API_URL to the session's"
        )

    start, servers._start_guarded = servers._start_guarded, refuse
    try:
        yield
    finally:
        servers._start_guarded = start


@contextmanager
def waiting_for_the_server() -> Iterator[None]:
    """Let flows wait while the server does not answer, e.g. for a disk; they would end this process."""
    from flows import stopping

    seconds, stopping.LOST_SECONDS = stopping.LOST_SECONDS, math.inf
    try:
        yield
    finally:
        stopping.LOST_SECONDS = seconds


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """The records that Prefect's handler of the terminal would print, each with its level."""
    from prefect.logging.handlers import PrefectConsoleHandler

    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    root = logging.getLogger()
    collector = Collector()
    terminals = [handler for handler in root.handlers if isinstance(handler, PrefectConsoleHandler)]
    for handler in terminals:
        root.removeHandler(handler)
    root.addHandler(collector)
    try:
        yield lines
    finally:
        root.removeHandler(collector)
        for handler in terminals:
            root.addHandler(handler)
