"""Benchmarks that take hours, in the background: `python -m perf campaign run`; see CONTRIBUTING.md.

    <home>/
        .lock           has the id of the process that works on the campaign
        logs/<family>   output of its processes
        runs/<family>/  a benchmark's folder: `fed-rlhf benchmark --resume` continues it after a stop

Seeds whose lines are published are left out.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from components.config import UserError
from components.config.benchmark import Benchmark
from components.io import DamagedFileError, FullDiskError
from components.paths import PACKAGE
from flows.process import FAILED
from perf.campaign.lines import (
    PUBLISHED,
    RUN,
    CampaignError,
    Line,
    is_complete,
    own_lines,
    publish,
    read_lines,
    read_results,
)
from perf.campaign.plan import LIST, Campaign, read_campaign, runs_of

LOWEST_PRIORITY = 19
TRIES = 2
"""Of a family that fails: a connection may have been lost while its processes were stopped."""
PATIENCE = 1.0
"""Seconds for which the lock may be taken by status, or by processes that end."""
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

SAME = ("recipe", "settings", "arms", "contests")
"""Keys of a benchmark that must not change while it runs."""

ListOption = Annotated[Path, typer.Option("--list", help="File of families.")]
HomeOption = Annotated[Path, typer.Option(help="Folder of the campaign.")]

app = typer.Typer(no_args_is_help=True, help="Benchmarks that take hours, in the background.")


@app.command()
def run(families: ListOption = LIST, home: HomeOption = PACKAGE / "campaign") -> None:
    """Work through the list at the lowest priority; what was stopped is resumed."""
    campaign = read_campaign(families.resolve(), home.expanduser().resolve())
    os.nice(LOWEST_PRIORITY - os.nice(0))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # a signal to the group reaches its processes, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = False
    with locked(campaign.home) as lock:
        for name in campaign.families:
            try:
                run_family(campaign, name, lock)
            except (UserError, DamagedFileError, FullDiskError) as error:
                print(f"{name}: {error}", flush=True)
                failed = True
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def status(families: ListOption = LIST, home: HomeOption = PACKAGE / "campaign") -> None:
    """Finished runs of each family, and the process that works on the campaign."""
    campaign = read_campaign(families.resolve(), home.expanduser().resolve())
    for name in campaign.families:
        runs = runs_of(campaign.benchmark(name))
        done = {(line["arm"], line["seed"]) for line in finished(campaign, name) if line["kind"] == RUN}
        waiting = "" if chosen_benchmark(campaign, name) else ", waits for its settings"
        print(f"{name}: {sum(run in done for run in runs)} of {len(runs)} runs finished{waiting}")
    print(f"process {pid} works on it" if (pid := owner(campaign.home)) else "no process works on it")


@app.command()
def collect(
    checkout: Annotated[Path, typer.Argument(help="Whose docs/results/data/ gets the lines.")],
    families: ListOption = LIST,
    home: HomeOption = PACKAGE / "campaign",
) -> None:
    """Publish the results of finished runs and contests, each once.

    Raises:
        CampaignError: it is no checkout of the project.
    """
    if not (checkout / "pyproject.toml").is_file() or not (checkout / "docs" / "results").is_dir():
        raise CampaignError(
            f"{checkout} is no checkout of the project: name the folder that has pyproject.toml"
        )
    campaign = read_campaign(families.resolve(), home.expanduser().resolve())
    for name in campaign.families:
        count = publish(checkout, name, started_lines(campaign, name))
        print(f"{name}: {count} new lines")


def run_family(campaign: Campaign, name: str, lock: IO[str]) -> None:
    """Run what is missing of a family, unless its settings are not chosen yet.

    Raises:
        CampaignError: a process failed, or the family was started with other settings.
    """
    benchmark = chosen_benchmark(campaign, name)
    if benchmark is None:
        raise CampaignError(f"waits for the choices of {campaign.families[name].chosen_from}")
    lines = finished(campaign, name)
    if all(is_complete(lines, benchmark, seed) for seed in benchmark.seeds):
        return
    published = read_lines(PACKAGE / PUBLISHED / f"{name}.jsonl")
    seeds = [seed for seed in benchmark.seeds if not is_complete(published, benchmark, seed)]
    folder = campaign.folder(name)
    if prepare := [campaign.expand(word) for word in campaign.families[name].prepare]:
        prepared = folder / "prepared"
        if not prepared.is_file():
            call(campaign, name, prepare, lock)
            folder.mkdir(parents=True, exist_ok=True)
            prepared.touch()
    seeds = open_folder(folder, benchmark, seeds)
    call(campaign, name, ["flows.cli", "benchmark", "--resume", str(folder), f"seeds={seeds}"], lock, TRIES)


def open_folder(folder: Path, benchmark: Benchmark, seeds: Sequence[int]) -> list[int]:
    """Create the folder of a benchmark if there is none; gives the seeds that it has then, and the new ones.

    Raises:
        CampaignError: it was started with other settings.
    """
    from components.benchmarks import read_benchmark
    from tasks.benchmark_folder import create_benchmark

    plan = folder / "benchmark.yaml"
    if not plan.is_file():
        create_benchmark(folder, benchmark.model_copy(update={"seeds": [*seeds]}))
        return [*seeds]
    started = read_benchmark(str(plan))
    if any(getattr(started, key) != getattr(benchmark, key) for key in SAME):
        raise CampaignError(
            f"{folder} was started with other settings than the list has now: give the family a new name in"
            " the list, or delete the folder"
        )
    return [*started.seeds, *(seed for seed in seeds if seed not in started.seeds)]


def call(campaign: Campaign, name: str, command: Sequence[str], lock: IO[str], tries: int = 1) -> None:
    """Run a module of the project, whose process has the lock until it ends.

    It ends with this one, unless that is killed.

    Args:
        tries: how often it is started again after exit status 1.

    Raises:
        CampaignError: it failed.
    """
    log = campaign.home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {key: value for key, value in os.environ.items() if key not in OWN_PLACES}
    variables |= {"FED_RLHF_HOME": str(campaign.home)}
    for left in reversed(range(tries)):
        print(f"{name}: {' '.join(command)}", flush=True)
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=PACKAGE,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
            )
            try:
                code = process.wait()
            finally:
                process.terminate()
                process.wait()
        if code == 0:
            return
        if code != FAILED or not left:
            own = log.read_bytes()[start:].decode(errors="replace").splitlines()
            errors = [line for line in own if line.startswith("error: ")]
            raise CampaignError(f"exit status {code}, see {log}{': ' + errors[-1] if errors else ''}")


def chosen_benchmark(campaign: Campaign, name: str) -> Benchmark | None:
    """The benchmark of a family; None before the settings of its arms are chosen."""
    source = campaign.families[name].chosen_from
    if source is None:
        return campaign.benchmark(name)
    from components.reporting.choices import choose_arms

    rates = campaign.benchmark(source)
    metrics = read_results(finished(campaign, source), rates).metrics
    chosen = {each.name: each.arm for each in choose_arms(rates.choices, metrics, {}, rates.seeds)}
    return campaign.benchmark(name, chosen) if all(chosen.values()) else None


def finished(campaign: Campaign, name: str) -> list[Line]:
    """The lines of a family, published ones first."""
    return [*read_lines(PACKAGE / PUBLISHED / f"{name}.jsonl"), *started_lines(campaign, name)]


def started_lines(campaign: Campaign, name: str) -> Iterator[Line]:
    """The lines of what is finished in a family's folder."""
    from components.benchmarks import read_benchmark

    plan = campaign.folder(name) / "benchmark.yaml"
    if plan.is_file():
        measure = campaign.families[name].measure
        yield from own_lines(campaign.folder(name), read_benchmark(str(plan)), measure)


@contextmanager
def locked(home: Path) -> Iterator[IO[str]]:
    """Lock a campaign for this process and those that it starts.

    Raises:
        CampaignError: another process works on it.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("a+") as file:
        deadline = time.monotonic() + PATIENCE
        while not _lock(file, fcntl.LOCK_EX):
            if (process := owner(home)) and time.monotonic() > deadline:
                raise CampaignError(
                    f"process {process} works on the campaign in {home}: wait for it, or end it and those"
                    f" that it started by `kill -- -{process}` first"
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file


def owner(home: Path) -> int | None:
    """The id of the process that works on a campaign, or did before those that it started end."""
    path = home / ".lock"
    if not path.is_file():
        return None
    with path.open() as file:
        return None if _lock(file, fcntl.LOCK_SH) else int(file.read() or 0)


def _lock(file: IO[str], kind: int) -> bool:
    """Lock a file, unless another process has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
