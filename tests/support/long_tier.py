"""The long tests: which files have them, which a change concerns, and a program that runs them.

    python -m tests.support.long_tier BASE                  the files that changed since the commit BASE, or
                                                            of which a source did (tests/long.yaml)
    python -m tests.support.long_tier --run [FILE ...]      these files, or all; `make test-long`

The program runs two files at a time, those first that took longest, and writes a line of each to
docs/results/log/long-tier.md. Started again at the same commit, without names and changes, it leaves out the
files that have passed, until all have. Inputs and kills follow the line's seed, which `--seed` repeats.
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
    commit: str  # with + where something was not committed
    day: str
    machine: str

    def has_passed(self, commit: str) -> bool:
        """Whether tests have run at a commit, and none failed."""
        return self.commit == commit and not commit.endswith("+") and self.passed > 0 and not self.failed


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


def run_file(file: str, seed: int, commit: str) -> Line | None:
    """Run the long tests of a file in a process of its own; its output goes to a file of OUTPUT.

    None if it is interrupted.
    """
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
    if status == pytest.ExitCode.INTERRUPTED:
        return None
    summaries = re.findall(r"^(\d+ \w+.*) in [\d.]+s", output.read_text(encoding="utf-8"), re.MULTILINE)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", "".join(summaries[-1:]))}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    if status != pytest.ExitCode.OK:  # the process may have ended, or no test may be left
        failed = max(failed, 1)
    day = datetime.now(UTC).date().isoformat()
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    return Line(file, passed, failed, skipped, seconds, seed, commit, day, machine())


def waiting_files(commit: str) -> list[str]:
    """The files that have not passed at a commit; all where all have, or where something is not committed."""
    lines = read_lines()
    waiting = [name for name in long_files() if name not in lines or not lines[name].has_passed(commit)]
    return waiting or list(long_files())


def run(files: Collection[str], seed: int, commit: str) -> bool:
    """Run files, two at a time, and write their lines; whether all have passed."""
    known = read_lines()
    order = sorted(files, key=lambda file: -known[file].seconds if file in known else -LIMIT)
    writing = Lock()

    def run_one(file: str) -> bool:
        line = run_file(file, seed, commit)
        if line is None:
            return False
        with writing:
            lines = {name: old for name, old in read_lines().items() if name in long_files()}
            write_lines(lines | {file: line})
            words = f"{line.passed} passed, {line.failed} failed, {line.skipped} skipped"
            print(f"{file}: {words} in {line.seconds} s", flush=True)
        return not line.failed

    print(f"{commit}, seed {seed}: {len(order)} files", flush=True)
    with ThreadPoolExecutor(2) as pool:
        return all(list(pool.map(run_one, order)))


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
        changes = git("status", "--porcelain", "--", ".", f":!{PAGE.relative_to(ROOT)}")
        commit = git("rev-parse", "--short", "HEAD") + ("+" if changes else "")
        return int(not run(arguments.names or waiting_files(commit), arguments.seed, commit))
    (base,) = arguments.names
    print("\n".join(concerned(git("diff", "--name-only", "--no-renames", base, "HEAD").splitlines())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
