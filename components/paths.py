"""Where the project keeps what it writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder that holds the packages: a checkout, or site-packages."""


def in_checkout() -> bool:
    """Whether the packages are in a checkout of the project."""
    return (PACKAGE / "pyproject.toml").is_file() and (PACKAGE / "prefect.yaml").is_file()


def home() -> Path:
    """The folder of runs, databases and caches: FED_RLHF_HOME, the checkout, or the working folder."""
    configured = os.environ.get("FED_RLHF_HOME")
    if configured:
        return Path(configured).expanduser().resolve()
    return PACKAGE if in_checkout() else Path.cwd()


def runs_root() -> Path:
    """Folder of all runs: FED_RLHF_RUNS, or runs/ of the project's home."""
    return Path(os.environ.get("FED_RLHF_RUNS", home() / "runs"))


def tracking_uri() -> str:
    """MLflow's store: MLFLOW_TRACKING_URI, or the SQLite file of the project's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def without_credentials(uri: str) -> str:
    """An address without the user and the password in it, as it is shown and stored."""
    return re.sub(r"(?<=://)[^/\s]*@", "", uri)


def is_file(path: Path) -> bool:
    """Whether there is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:  # e.g. longer than the file system allows
        return False
