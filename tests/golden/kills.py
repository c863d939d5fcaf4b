"""Kill runs by SIGKILL at random moments, resume them, and compare them with runs that were not killed.

    python -m tests.golden.kills FOLDER [--only VARIANT ...] [--kills 10] [--minutes 15] [--seed 0]
    python -m tests.golden.kills FOLDER --table

The recipe `debug` runs with each variant of tests/golden/variants.yaml: once as a whole, and as often as it
takes for so many kills. A process is killed at a random moment of the whole run, of the rounds, of the
alignment or of the evaluation. The next process resumes the run, or starts it anew where it was killed
before it had a folder. A run that reaches its end is compared with the whole one, and the next run has a
new home: a store of MLflow, a database of Prefect and a server of its own for its first process. Compared
are all adapters, the clients' private modules, the aligned policy, every metric (see
tests/golden/compare.py), and the bytes of the results of the phases.

A call ends after --minutes; the next call with the same FOLDER goes on. The exit status is 0 where all runs
are equal so far.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.runs import PHASES, Run
from tests.golden.compare import ROOT, VARIANTS, digest_run, prefect_server

RESULTS = [f"{phase}/result.json" for phase in ("federation", "alignment", "evaluation")]
TARGETS = ("", "federate", "federate", "align", "evaluate")
"""Phases in which a run is killed one after the other; empty: at a moment of the whole run."""
LONGEST = 0.9
"""Largest delay before a kill, as a share of the time of the whole run or phase."""


@dataclass(frozen=True)
class Trial:
    """Runs of a variant, and what is known of them.

    Attributes:
        name: of the variant.
        overrides: its settings.
        folder: of the trial.
        environment: of the processes, with the Prefect server that they share.
        seed: the moments of the kills are a function of it.
    """

    name: str
    overrides: list[str]
    folder: Path
    environment: dict[str, str]
    seed: int = 0

    def start(self, home: Path) -> subprocess.Popen[bytes]:
        """Start a process that runs the variant to its end, or resumes it."""
        run = find_run(home)
        environment = self.environment | {"FED_RLHF_HOME": str(home)}
        if not home.exists():  # the first process of a home makes its databases
            home.mkdir(parents=True)
            del environment["PREFECT_API_URL"]
        command = ["run", "debug", *self.overrides] if run is None else ["resume", str(run.folder)]
        with (home / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, home: Path) -> float:
        """Let a run end, and give its seconds.

        Raises:
            RuntimeError: it failed.
        """
        begin = time.monotonic()
        status = self.start(home).wait()
        if status:
            raise RuntimeError(f"{self.name}: exit status {status}, see {home / 'log.txt'}")
        return time.monotonic() - begin

    def kill(self, home: Path, phase: str, delay: float) -> str | None:
        """Start a process, and kill it some seconds after it has reached a phase.

        Args:
            home: of the run.
            phase: one that is not over; empty for the start of the process.
            delay: the seconds.

        Returns:
            the phase in which the run was killed; None if it had ended.
        """
        process = self.start(home)
        while phase and process.poll() is None and state_of(find_run(home)) != phase:
            time.sleep(0.05)
        try:
            status = process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return state_of(find_run(home))
        if status:
            raise RuntimeError(f"{self.name}: exit status {status}, see {home / 'log.txt'}")
        return None

    def steps(self, kills: int) -> Iterator[None]:
        """Work on the trial, and yield after each process until it has its kills; see record."""
        whole = self.folder / "whole"
        if not (self.folder / "seconds.json").is_file():
            shutil.rmtree(whole, ignore_errors=True)
            measured = {"": self.finish(whole), **phase_seconds(whole)}
            (self.folder / "seconds.json").write_text(json.dumps(measured))
            yield
        seconds = json.loads((self.folder / "seconds.json").read_text())
        expected = digest(whole)
        while True:
            done = self.read()
            count = sum(len(run["kills"]) for run in done)
            if count >= kills:
                return
            home = self.folder / f"run-{len(done)}"
            shutil.rmtree(home, ignore_errors=True)  # of a call that was itself stopped
            chance = random.Random(f"{self.name} {len(done)} {self.seed}")
            states: list[list[Any]] = []
            for phase in TARGETS[: kills - count]:
                if phase and is_over(phase, find_run(home)):
                    continue
                delay = chance.uniform(0, LONGEST * seconds[phase])
                state = self.kill(home, phase, delay)
                if state is None:
                    break
                states.append([phase, round(delay, 1), state])
            self.finish(home)
            differing = [part for part, value in digest(home).items() if value != expected[part]]
            with (self.folder / "runs.jsonl").open("a") as file:
                file.write(json.dumps({"kills": states, "differing": differing}) + "\n")
            if not differing:
                shutil.rmtree(home)
            yield

    def read(self) -> list[dict[str, Any]]:
        """The runs that have ended: their kills (phase, seconds from its begin, state), and what differs."""
        path = self.folder / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> int:
    """Go on with the trials, or print their table."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tests.golden.kills", description=summary)
    parser.add_argument("folder", type=Path, help="of the trials")
    parser.add_argument("--only", nargs="+", help="variants (default: all)")
    parser.add_argument("--kills", type=int, default=10, help="of each variant (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="of this call (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print what was done so far, in Markdown")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    variants = yaml.safe_load((ROOT / VARIANTS).read_text(encoding="utf-8"))
    folder = arguments.folder.resolve()
    names = [name for name in variants if not name.startswith("_") and name in (arguments.only or variants)]
    if arguments.table:
        print(table([Trial(name, variants[name], folder / name, {}) for name in names]))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with prefect_server(ROOT, folder) as environment:
        trials = [Trial(name, variants[name], folder / name, environment, arguments.seed) for name in names]
        for trial in trials:
            trial.folder.mkdir(exist_ok=True)
            for _ in trial.steps(arguments.kills):
                print(f"{trial.name}: {sum(len(run['kills']) for run in trial.read())} kills", flush=True)
                if time.monotonic() > end:
                    break
            if time.monotonic() > end:
                print("the time of this call is over; call again to go on")
                break
    return 1 if any(run["differing"] for trial in trials for run in trial.read()) else 0


def find_run(home: Path) -> Run | None:
    """The run of a home; None before it has a recipe."""
    folders = [path.parent for path in (home / "runs").glob("*/recipe.yaml")]
    return Run(folders[0].name, folders[0]) if folders else None


def state_of(run: Run | None) -> str:
    """The phase in which a run was killed."""
    return "start" if run is None else run.phase()


def phase_seconds(home: Path) -> dict[str, float]:
    """Wall time of each phase of a finished run."""
    run = find_run(home)
    seconds: dict[str, float] = {} if run is None else run.metadata()["seconds"]
    return seconds


def is_over(phase: str, run: Run | None) -> bool:
    """Whether a run has completed a phase."""
    return run is not None and run.is_done(phase)


def digest(home: Path) -> dict[str, Any]:
    """What a run wrote, by part."""
    run = find_run(home)
    if run is None:
        raise RuntimeError(f"{home} has no run")
    results = {name: (run.folder / name).read_text(encoding="utf-8") for name in RESULTS}
    return digest_run(run.folder, home / "mlflow.db") | results


def table(trials: list[Trial]) -> str:
    """A row for each variant: kills by phase, and whether all runs equal the whole one."""
    phases = ["start", *PHASES, "report"]
    lines = [["variant", "kills", *phases, "runs", "equal"]]
    for trial in trials:
        runs = trial.read()
        states = Counter(state for run in runs for *_, state in run["kills"])
        equal = sum(not run["differing"] for run in runs)
        row = [trial.name, states.total(), *(states[phase] for phase in phases), len(runs), equal]
        lines.append([str(cell) for cell in row])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
