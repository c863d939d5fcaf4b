"""Works through a campaign, one run at a time, each in a process of its own.

    <home>/
        .lock, state.json       of the process that works on the campaign
        PAUSE                   no further run is started while the file exists
        lines/<family>.jsonl    results, see lines.py
        logs/<family>/          output of the runs
        runs/<family>/          a benchmark's folder: <arm>-seed-<n>/ are ordinary runs, and report/ covers
                                the seeds whose arms are all finished

A run's folder follows from its family, arm and seed. Whatever was killed is resumed from there, by the
project's own resume. The processes end with the one that started them, and hold its lock until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, Any

import yaml

from components.benchmarks import arm_recipe
from components.config import UserError
from components.config.benchmark import Benchmark
from components.io import read_json, write_atomically, write_json
from components.paths import PACKAGE
from perf.campaign.lines import (
    CONTESTS,
    FAILED,
    FINISHED,
    RUN,
    CampaignError,
    Line,
    append_line,
    contest_results,
    read_lines,
    run_results,
)
from perf.campaign.plan import Campaign, Item, items, recipe_hash

LOWEST_PRIORITY = 19
POLL = 2.0
"""Seconds between two looks at a running process."""
STOPPED = 60.0
"""Seconds between two looks after which the process group must have been stopped."""
LOCK_PATIENCE = 10.0
"""Seconds in which the processes of a killed campaign end."""
GRACE = 30.0
"""Seconds that a process has to end after SIGTERM."""
TAIL = 2000
"""Characters of a failed process's output that its line has."""
OWN_PLACES = (
    "FED_RLHF_RUNS",
    "FED_RLHF_JUDGES",
    "FED_RLHF_TREES",
    "PREFECT_API_URL",
    "PREFECT_HOME",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
)
"""Variables that would lead runs out of the campaign's folder."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """The files of a campaign.

    Attributes:
        home: its folder.
    """

    home: Path

    @property
    def pause(self) -> Path:
        """While it exists, no further run is started."""
        return self.home / "PAUSE"

    @property
    def state(self) -> Path:
        """The process that works on the campaign, and what it runs."""
        return self.home / "state.json"

    @property
    def lines(self) -> Path:
        """Folder of the results."""
        return self.home / "lines"

    def lines_of(self, family: str) -> Path:
        """File of a family's results."""
        return self.lines / f"{family}.jsonl"

    def family(self, family: str) -> Path:
        """Folder of a family's runs."""
        return self.home / "runs" / family

    def log(self, family: str, name: str) -> Path:
        """File of the output of a process."""
        return self.home / "logs" / family / f"{name}.log"

    def enter(self) -> None:
        """Make all paths of this process and of its children those of the campaign."""
        self.home.mkdir(parents=True, exist_ok=True)
        for name in OWN_PLACES:
            os.environ.pop(name, None)
        os.environ["FED_RLHF_HOME"] = str(self.home)


@contextlib.contextmanager
def locked(place: Place, patience: float = LOCK_PATIENCE) -> Iterator[IO[str]]:
    """Lock a campaign for this process and its children.

    Raises:
        CampaignError: another process works on it.
    """
    with (place.home / ".lock").open("w") as file:
        deadline = time.monotonic() + patience
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise CampaignError(
                    f"a process already works on the campaign in {place.home}: see it with status; it must"
                    " end before another one starts"
                )
            time.sleep(0.2)
        yield file


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_running(place: Place) -> bool:
    """Whether a process works on the campaign."""
    if not (place.home / ".lock").is_file():
        return False
    with (place.home / ".lock").open() as file:
        return not _try_lock(file)


def signal_group(place: Place, number: signal.Signals) -> None:
    """Send a signal to the recorded process group, if it is still that of the campaign.

    Raises:
        CampaignError: no process works on the campaign.
    """
    state = read_json(place.state) if place.state.is_file() else {}
    if not is_running(place) or not _leads_group(state.get("pid", 0)):
        raise CampaignError(f"no process works on the campaign in {place.home}: start it with run")
    os.killpg(state["pid"], number)


def _leads_group(pid: int) -> bool:
    try:
        return pid > 1 and os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


class Worker:
    """Works through a campaign.

    Args:
        campaign: the list.
        place: its files.
        lock: the open lock, which children inherit.
        retry_failed: whether failed runs are resumed.
    """

    def __init__(self, campaign: Campaign, place: Place, lock: IO[str], retry_failed: bool = False) -> None:
        self.campaign = campaign
        self.place = place
        self.retry_failed = retry_failed
        self._lock = lock
        self._commit = _commit()
        self._tried: set[tuple[str, str, int]] = set()

    def work(self) -> None:
        """Run everything that is not finished."""
        self._record_state(None)
        for name, family in self.campaign.families.items():
            if not family.disabled:
                self._work_on(name)
        self._record_state(None)

    def _work_on(self, name: str) -> None:
        try:
            benchmark = family_benchmark(self.campaign, self.place, name)
            if benchmark is None:
                print(
                    f"{name}: waits for the choices of {self.campaign.families[name].chosen_from}", flush=True
                )
                return
            self._prepare(name)
        except UserError as error:
            print(f"{name}: {error}", flush=True)
            self._record(name, "", -1, RUN, FAILED, {"error": str(error)})
            return
        for seed in benchmark.seeds:
            runs = [item for item in items(name, benchmark) if item.seed == seed]
            for item in runs:
                self._work_on_run(item, benchmark)
            if all(self._status(item.family, item.arm, item.seed) == FINISHED for item in runs):
                self._judge_contests(name, benchmark, seed)

    # --- runs

    def _work_on_run(self, item: Item, benchmark: Benchmark) -> None:
        """A run, if it is neither finished nor failed."""
        if not self._is_wanted(item.family, item.arm, item.seed):
            return
        self._wait_while_paused()
        print(item, flush=True)
        self._record_state(item)
        started = _now()
        try:
            folder, recipe = self._open(item, benchmark)
            self._share(item, benchmark)
            self._run(item, folder)
            line = run_results(
                self.place.family(item.family),
                benchmark,
                item.arm,
                item.seed,
                self.campaign.families[item.family].measure,
            )
        except (UserError, OSError, ValueError, KeyError) as error:
            message = str(error) or repr(error)
            print(f"{item}: failed: {message}", flush=True)
            self._record(item.family, item.arm, item.seed, RUN, FAILED, {"error": message})
            return
        session = read_json(folder / "campaign.json")
        line |= {
            "recipe": recipe,
            "settings": [*benchmark.settings, *benchmark.arms[item.arm]],
            "started": session["started"],
            "ended": _now(),
            "seconds": round(session["seconds"]),
            "last_session": started,
        }
        self._record(item.family, item.arm, item.seed, RUN, FINISHED, line)

    def _open(self, item: Item, benchmark: Benchmark) -> tuple[Path, str]:
        """The folder of a run, which is created if there is none, and the hash of its recipe.

        Raises:
            CampaignError: the run was started with other settings.
        """
        from tasks.benchmark_folder import arm_run
        from tasks.devices import choose_workers
        from tasks.runs import create_run

        recipe = arm_recipe(benchmark, item.arm, item.seed)
        hashed = recipe_hash(recipe)
        run = arm_run(self.place.family(item.family), item.arm, item.seed)
        session = run.folder / "campaign.json"
        if not session.is_file():
            create_run(choose_workers(recipe), run.folder, self._day(item.family))
            write_json(session, {"recipe": hashed, "started": _now(), "seconds": 0.0})
        elif read_json(session)["recipe"] != hashed:
            raise CampaignError(
                f"{run.folder} was started with other settings than the list has now: give the family a new"
                " name in the list, or delete the folder"
            )
        return run.folder, hashed

    def _share(self, item: Item, benchmark: Benchmark) -> None:
        """Copy generations of the base policy from finished runs of the same seed."""
        from tasks.benchmark import share_generations
        from tasks.benchmark_folder import arm_run

        folder = self.place.family(item.family)
        others = [arm_run(folder, arm, item.seed) for arm in benchmark.arms if arm != item.arm]
        finished = [run for run in others if run.is_done("report")]
        share_generations(arm_run(folder, item.arm, item.seed), finished)

    def _run(self, item: Item, folder: Path) -> None:
        """Run a folder to its end, unless it is there.

        Raises:
            CampaignError: the run failed; with the end of its output.
        """
        if (folder / "report.done").is_file():
            return
        log = self.place.log(item.family, folder.name)
        command = ["flows.cli", "resume", str(folder)]
        status, was_stopped = self._call(command, log, folder / "campaign.json")
        if status and was_stopped:  # a connection may have timed out meanwhile
            status, _ = self._call(command, log, folder / "campaign.json")
        _check_status(status, log)

    # --- once per family, and per seed

    def _prepare(self, name: str) -> None:
        """Run the family's preparation, once.

        Raises:
            CampaignError: it failed.
        """
        command = [self.campaign.expand(word) for word in self.campaign.families[name].prepare]
        done = self.place.family(name) / "prepared"
        if not command or done.is_file():
            return
        self._wait_while_paused()
        log = self.place.log(name, "prepare")
        status, _ = self._call(command, log)
        _check_status(status, log)
        write_atomically(done, b"")

    def _judge_contests(self, name: str, benchmark: Benchmark, seed: int) -> None:
        """Judge the contests of a seed, and write the report of all complete seeds."""
        if not benchmark.contests or not self._is_wanted(name, "", seed, CONTESTS):
            return
        self._wait_while_paused()
        print(f"{name}: contests of seed {seed}", flush=True)
        folder = self.place.family(name)
        complete = [
            other
            for other in benchmark.seeds
            if all(self._status(name, arm, other) == FINISHED for arm in benchmark.arms)
        ]
        content = benchmark.model_copy(update={"seeds": complete}).model_dump(mode="json")
        write_atomically(folder / "benchmark.yaml", yaml.safe_dump(content, sort_keys=False).encode())
        log = self.place.log(name, f"contests-seed-{seed}")
        started = _now()
        try:
            status, _ = self._call(["flows.cli", "benchmark", "--resume", str(folder)], log)
            _check_status(status, log)
            line = contest_results(folder, benchmark, seed)
        except (UserError, OSError, ValueError) as error:
            self._record(name, "", seed, CONTESTS, FAILED, {"error": str(error)})
            return
        line |= {"started": started, "ended": _now()}
        self._record(name, "", seed, CONTESTS, FINISHED, line)

    def _day(self, family: str) -> date:
        """The day that chat templates print in all runs of a family: that of its first one."""
        path = self.place.family(family) / "first-day"
        if not path.is_file():
            write_atomically(path, date.today().isoformat().encode())
        return date.fromisoformat(path.read_text(encoding="utf-8"))

    # --- processes

    def _call(self, command: Sequence[str], log: Path, session: Path | None = None) -> tuple[int, bool]:
        """Run a module in a process that ends with this one.

        Args:
            command: the module, and its arguments.
            log: the output is appended.
            session: JSON file whose `seconds` the time is added to; None counts none.

        Returns:
            the exit status, and whether the process group was stopped meanwhile.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=PACKAGE,
                env=os.environ | {"PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock.fileno()],
                preexec_fn=_end_with_parent,
            )
        try:
            return self._wait_for(process, session)
        except BaseException:
            _end(process)
            raise

    def _wait_for(self, process: subprocess.Popen[bytes], session: Path | None) -> tuple[int, bool]:
        last = time.monotonic()
        was_stopped = False
        status: int | None = None
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=POLL)
            now = time.monotonic()
            was_stopped = was_stopped or now - last > STOPPED
            if session is not None:
                values = read_json(session)
                write_json(session, {**values, "seconds": values["seconds"] + min(now - last, 2 * POLL)})
            last = now
        return status, was_stopped

    def _wait_while_paused(self) -> None:
        if self.place.pause.exists():
            print(f"paused: delete {self.place.pause}, or use the command continue", flush=True)
        while self.place.pause.exists():
            time.sleep(POLL)

    # --- records

    def _is_wanted(self, family: str, arm: str, seed: int, kind: str = RUN) -> bool:
        """Whether something is neither finished nor failed; with retry_failed a failed run is tried once."""
        status = self._status(family, arm, seed, kind)
        if status != FAILED:
            return status is None
        key = (family, f"{kind} {arm}", seed)
        again = self.retry_failed and key not in self._tried
        self._tried.add(key)
        return again

    def _status(self, family: str, arm: str, seed: int, kind: str = RUN) -> str | None:
        """The last recorded status of a run or of contests."""
        return last_statuses(self.place, family).get((kind, arm, seed))

    def _record(self, family: str, arm: str, seed: int, kind: str, status: str, line: Line) -> None:
        head = {"kind": kind, "family": family, "arm": arm, "seed": seed, "status": status}
        own = {"commit": self._commit, "recorded": _now()}
        append_line(self.place.lines_of(family), head | own | line)

    def _record_state(self, item: Item | None) -> None:
        write_json(
            self.place.state,
            {
                "pid": os.getpid(),
                "commit": self._commit,
                "running": str(item) if item else "",
                "since": _now(),
            },
        )


def family_benchmark(campaign: Campaign, place: Place, name: str) -> Benchmark | None:
    """The benchmark of a family; None before the settings of its arms are chosen.

    Raises:
        RecipeError: see Campaign.benchmark.
    """
    source = campaign.families[name].chosen_from
    if source is None:
        return campaign.benchmark(name)
    from components.reporting.choices import choose_arms

    plan = campaign.benchmark(source)
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for line in read_lines(place.lines_of(source)):
        if line["kind"] == RUN and line["status"] == FINISHED:
            measured = {key: value for key, value in line["metrics"].items() if value is not None}
            figures.setdefault(line["arm"], {})[line["seed"]] = measured
    chosen = {choice.name: choice.arm for choice in choose_arms(plan.choices, figures, {}, plan.seeds)}
    return campaign.benchmark(name, chosen) if all(chosen.values()) else None


def last_statuses(place: Place, family: str) -> Mapping[tuple[str, str, int], str]:
    """The last recorded status, by kind, arm and seed."""
    return {
        (line["kind"], line["arm"], line["seed"]): line["status"]
        for line in read_lines(place.lines_of(family))
    }


def _check_status(status: int, log: Path) -> None:
    if status == 0:
        return
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    errors = [text for text in tail.splitlines() if text.startswith("error: ")]
    raise CampaignError(f"{how}, see {log}: {errors[-1] if errors else tail}")


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process, and wait for it."""
    process.terminate()
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))


def _commit() -> str:
    from tasks.runs import git_commit

    return git_commit()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def lower_priority() -> None:
    """Give this process, and those that it starts, the lowest priority and a process group of their own."""
    os.nice(LOWEST_PRIORITY - os.nice(0))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
