"""The virtual environment of the peers, which the benchmark makes and uses again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from components.config import UserError
from components.io import write_atomically
from components.paths import home

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SCRIPTS = Path(__file__).with_name("scripts")
"""The peers' programs, which import nothing of the project."""
VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of the peers, beside those of components/environment.py."""


def peers_python(folder: Path | None = None) -> Path:
    """The interpreter of the peers' environment, which is made if it is missing or outdated.

    Args:
        folder: of the environment; None takes build/peers of the project's home.

    Raises:
        UserError: the environment cannot be made, for example without a network.
    """
    folder = folder or home() / "build" / "peers"
    stamp = folder / "installed.txt"
    content = f"# Python {platform.python_version()}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content:
        return python
    print(f"installing the peers into {folder} (minutes the first time) ...", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], folder)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--requirement", str(REQUIREMENTS)], folder)
    write_atomically(stamp, content.encode())
    return python


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no reason was given"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise UserError(
            f"the peers could not be installed into {folder} ({reason.removeprefix('ERROR: ')}): check that"
            " PyPI can be reached, and run the command again."
        )


def peer_variables() -> dict[str, str]:
    """The environment of a peer's process: that of this process, for example how threads wait."""
    return dict(os.environ) | VARIABLES | {"PYTHONPATH": str(SCRIPTS)}
