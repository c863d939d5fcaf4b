"""What `make install` does in its virtual environment; run it with the environment's Python.

    .venv/bin/python infra/install.py

It installs the pinned dependencies, and then, side by side, generates the embedded and the random model with
an empty database for Prefect, and imports what a first run needs, so that Python stores the bytecode. The
bytecode of all 32,000 files would take longer than all of this. Only the standard library is imported here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

PIP = "pip>=25"
"""Those that Python 3.11 and 3.12 bring need twice the time."""
REQUIREMENT = ".[alpaca-eval,demo,dev,ray]"
GENERATE = (
    "from components.environment import configure_libraries; configure_libraries();"
    "from components.models.backbone import fetch_backbone;"
    "fetch_backbone('embedded'); fetch_backbone('tiny-random');"
    "from infra.stores import make_empty_prefect_database; make_empty_prefect_database()"
)
IMPORT = (
    "from components.environment import configure_libraries; configure_libraries();"
    "import flows.fed_rlhf, tasks.tracking, components.data.validation, components.alignment.dpo,"
    " prefect.server.api.server, mlflow.server, flows.terminal"
)
LAST_LINES = 40
"""Of pip's output, where it fails without a word on errors."""
LINE_SECONDS = 8.0
"""Time between two lines on what is being done."""


def main() -> int:
    """Install, and return the exit status."""
    start = time.monotonic()
    if int(version("pip").split(".")[0]) < int(PIP.rpartition("=")[2]):
        upgrade = [*_pip("install"), "--quiet", "--retries", "1", "--upgrade", PIP]
        # an index may lack it: the one at hand does it too
        with subprocess.Popen(upgrade, stderr=subprocess.DEVNULL) as update:
            _wait([update], lambda: "updating pip", start)
    found: list[str] = []
    command = [*_pip("install"), "--no-compile", "-c", "constraints.txt", "-e", REQUIREMENT]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        reader = Thread(target=found.extend, args=(pip.stdout,), daemon=True)
        reader.start()
        before = _installed()

        def describe() -> str:
            names = sum(line.startswith("Collecting ") for line in found)
            done = _installed() - before
            if done > 0:
                return f"{done} packages installed"
            return f"{names} packages found" if names else "resolving the dependencies"

        _wait([pip], describe, start)
        reader.join()
    if pip.returncode:
        errors = [n for n, line in enumerate(found) if re.match(r"\s*error", line, re.IGNORECASE)]
        print(*found[errors[0] if errors else -LAST_LINES :], sep="", end="", file=sys.stderr)
        if pip.returncode < 0:
            print(f"error: pip was ended by the signal {-pip.returncode}", file=sys.stderr)
        return 1
    steps = [subprocess.Popen([sys.executable, "-c", code]) for code in (GENERATE, IMPORT)]
    _wait(steps, lambda: "generating the embedded model, and compiling what a run imports", start)
    if steps[0].returncode == 0:
        print("  installed; in each shell: source .venv/bin/activate", flush=True)
    return int(steps[0].returncode != 0)  # without the bytecode, a first run takes longer


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", command]


def _installed() -> int:
    return sum(1 for _ in Path(sys.prefix).glob("lib/python*/site-packages/*.dist-info"))


def _wait(processes: Sequence[subprocess.Popen[Any]], describe: Callable[[], str], start: float) -> None:
    """Wait for processes, and say at once and then now and again what they do."""
    said = time.monotonic() - LINE_SECONDS
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            print(f"  {said - start:3.0f} s: {describe()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
