"""The long tests: which files have them, which a change concerns, and a program that runs them.

    python -m tests.support.long_tier BASE                  the files that changed since the commit BASE, or
                                                            of which a source did (tests/long.yaml)
    python -m tests.support.long_tier --run [FILE ...]      these files, or all; `make test-long`

The program runs two files at a time, those first that took longest, and writes a line of each to
docs/results/log/long-tier.md. Started again at the same commit, it leaves out the files that have passed.
Random inputs and kills are drawn from the seed of the file's line, which `--seed` repeats.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock

import pytest
import yaml
from _pytest.mark import ParameterSet

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "log" / "long-tier.md"
OUTPUT = ROOT / "build" / "long-tier"
ALL = ("constraints.txt", "tests/conftest.py", "tests/support/pipeline.py")
"""A change of these concerns all files."""
INPUTS = 2000
"""Random inputs of each property."""
LIMIT = 3600
"""Seconds of a test."""
OPENING = """# Long tests

Each file with long tests has a line of its last run here.

`make test-long`, two files at a time; the seconds are elapsed ones, random inputs and kills follow the seed.

| file | passed | failed | skipped | seconds | seed | commit | day | machine |
|---|---|---|---|---|---|---|---|---|
"""


def long_files() -> dict[str, list[str]]:
    """The files with long tests, and patterns (as of fnmatch) of what they test."""
    files: dict[str, list[str]] = yaml.safe_load((ROOT / "tests" / "long.yaml").read_text(encoding="utf-8"))
    return files


def concerned(changed: Collection[str]) -> list[str]:
    """The files with long tests that are among changed files, or test one of them."""
    files = []
    for name, patterns in long_files().items():
        if any(fnmatch(path, pattern) for path in changed for pattern in (name, *ALL, *patterns)):
            files.append(name)
    return files


def with_examples(names: Iterable[str], examples: Collection[str]) -> list[ParameterSet]:
    """Cases of a test: the examples, which stay in `make test`, and all others, which are long."""
    cases = list(names)
    assert set(examples) <= set(cases), examples
    return [pytest.param(name, marks=[] if name in examples else pytest.mark.long) for name in cases]


def git(*arguments: str) -> str:
    """Output of a git command in this checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@dataclass(frozen=True)
class Line:
    """What is known of a file's last run."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    seed: int
    commit: str
    day: str
    machine: str


def read_lines() -> dict[str, Line]:
    """The lines of the page by file."""
    lines = {}
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    for row in re.findall(r"^\| (tests/.*) \|$", text, re.MULTILINE):
        file, *numbers, commit, day, machine = row.split(" | ")
        lines[file] = Line(file, *map(int, numbers), commit, day, machine)
    return lines


def write_lines(lines: dict[str, Line]) -> None:
    """Write the page, the longest first."""
    rows = sorted(lines.values(), key=lambda line: (-line.seconds, line.file))
    PAGE.write_text(
        OPENING + "".join(f"| {' | '.join(map(str, astuple(row)))} |\n" for row in rows), encoding="utf-8"
    )


def machine() -> str:
    """The cores and the processor."""
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def run_file(file: str, seed: int, commit: str) -> Line:
    """Run the long tests of a file in a process of its own; its output goes to a file of OUTPUT."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    output = OUTPUT / (file.replace("/", "-") + ".txt")
    command = [sys.executable, "-m", "pytest", "-m", "long", file, "-rfE", f"--hypothesis-seed={seed}"]
    command += [f"--timeout={LIMIT}", "-o", "faulthandler_timeout=0", "-p", "no:cacheprovider"]
    variables = {"FED_RLHF_EXAMPLES": str(INPUTS), "FED_RLHF_KILL_SEED": str(seed)}
    start = time.monotonic()
    with output.open("w", encoding="utf-8") as stream:
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, stdout=stream, stderr=subprocess.STDOUT
        ).returncode
    seconds = round(time.monotonic() - start)
    last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        failed = max(failed, 1)  # or the process has ended
    day = datetime.now(UTC).date().isoformat()
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    return Line(file, passed, failed, skipped, seconds, seed, commit, day, machine())


def run(files: Collection[str], seed: int) -> bool:
    """Run files, two at a time, and write their lines; whether all have passed."""
    commit = git("rev-parse", "--short", "HEAD")
    lines = {file: line for file, line in read_lines().items() if file in long_files()}
    done = {file for file, line in lines.items() if line.commit == commit and not line.failed}
    waiting = [file for file in files if file not in done]
    waiting.sort(key=lambda file: -lines[file].seconds if file in lines else -LIMIT)
    writing = Lock()

    def run_one(file: str) -> bool:
        line = run_file(file, seed, commit)
        with writing:
            lines[file] = line
            write_lines(lines)
            words = f"{line.passed} passed, {line.failed} failed, {line.skipped} skipped"
            print(f"{file}: {words} in {line.seconds} s", flush=True)
        return not line.failed

    print(f"seed {seed}; {len(waiting)} files, {len(done)} have passed at {commit}", flush=True)
    with ThreadPoolExecutor(2) as pool:
        return all(list(pool.map(run_one, waiting)))


def main() -> int:
    """Print or run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.long_tier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", action="store_true", help="run the named files, or all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("names", nargs="*", metavar="BASE or FILE")
    arguments = parser.parse_args()
    if arguments.run:
        return int(not run(arguments.names or list(long_files()), arguments.seed))
    (base,) = arguments.names
    print("\n".join(concerned(git("diff", "--name-only", "--no-renames", base, "HEAD").splitlines())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
