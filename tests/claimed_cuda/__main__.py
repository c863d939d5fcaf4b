"""Run the cases on claimed devices, and print a table.

python -m tests.claimed_cuda [--devices 1 2 8] [-k SELECTION]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1800
"""Seconds of a case, each of whose operations goes through Python; other work makes it slower still."""


def run_cases(devices: int, selection: str = "") -> subprocess.CompletedProcess[str]:
    """Run the cases, or a selection as of `pytest -k`, on so many devices in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.claimed_cuda.plugin", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider", "-k", selection, "--tb=short", "-s", "-rA", f"--timeout={LIMIT}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [*command, "tests/claimed_cuda/cases.py"],
        cwd=ROOT,
        env=environment | {"CLAIMED_DEVICES": str(devices)},
        capture_output=True,
        text=True,
    )


def reasons(output: str) -> str:
    """The errors of the failed cases, without the logs between them."""
    return "\n".join(line for line in output.splitlines() if re.match(r"E  |_{3,} |FAILED |ERROR ", line))


def main() -> int:
    """Print a row for each number of devices; the exit status is 1 if a case fails."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tests.claimed_cuda", description=summary)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("-k", dest="selection", default="", help="as of pytest")
    arguments = parser.parse_args()
    print("| devices | methods | methods on Ray | pipelines | other cases | planted | failed | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    failed = False
    gpus: dict[int, dict[str, set[int]]] = {}
    for devices in arguments.devices:
        begin = time.monotonic()
        done = run_cases(devices, arguments.selection)
        passed = re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.MULTILINE)
        kinds = ("the_rounds_of_a_method", "a_method_on_processes_of_ray", "pipeline", "found")
        counts = [sum(kind in name for name in passed) for kind in kinds]
        rounds, on_ray, pipelines, planted = counts
        others = len(passed) - sum(counts)
        used = gpus.setdefault(devices, defaultdict(set))
        for name, numbers in re.findall(r"GPUS ([a-z ]+): \[([\d, ]*)\]", done.stdout):
            used[name] |= {int(number) for number in numbers.split(",") if number}
        faults = len(re.findall(r"^(?:FAILED|ERROR) tests/", done.stdout, re.MULTILINE))
        seconds = time.monotonic() - begin
        cells = (devices, rounds, on_ray, pipelines, others, planted, faults, round(seconds))
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if done.returncode:
            failed = True
            print(reasons(done.stdout), file=sys.stderr)
    print("\n| task on Ray |" + "".join(f" GPUs, of {devices} |" for devices in gpus))
    print("|---|" + "---|" * len(gpus))
    for name in sorted(set().union(*gpus.values())):
        print(f"| {name} |" + "".join(f" {len(used[name])} |" for used in gpus.values()))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
