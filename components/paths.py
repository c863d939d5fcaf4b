"""Where the project keeps what it writes."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder that holds the packages: a checkout, or site-packages."""


def in_checkout() -> bool:
    """Whether the packages are in a checkout of the project."""
    return (PACKAGE / "pyproject.toml").is_file() and (PACKAGE / "prefect.yaml").is_file()


def home() -> Path:
    """The folder of runs and databases: FED_RLHF_HOME, the checkout, or the working folder."""
    return _own_folder() or Path.cwd()


def backbone_root() -> Path:
    """Folder of the generated backbones.

    FED_RLHF_BACKBONES, or data/backbone of FED_RLHF_HOME or of the checkout. An installed package and
    a model that MLflow loads have neither: there it is in the user's cache, which all working folders share.
    """
    configured = os.environ.get("FED_RLHF_BACKBONES")
    if configured:
        return Path(configured).expanduser().absolute()
    if (folder := _own_folder()) is not None:
        return folder / "data" / "backbone"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fed-rlhf" / "backbone"


def _own_folder() -> Path | None:
    configured = os.environ.get("FED_RLHF_HOME")
    if configured:
        return Path(configured).expanduser().resolve()
    return PACKAGE if in_checkout() else None


def runs_root() -> Path:
    """Folder of all runs: FED_RLHF_RUNS, or runs/ of the project's home."""
    return Path(os.environ.get("FED_RLHF_RUNS", home() / "runs"))


def tracking_uri() -> str:
    """MLflow's store: MLFLOW_TRACKING_URI, or the SQLite file of the project's home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def prefect_address() -> str:
    """Address of the Prefect server of `fed-rlhf up`, which prefect.toml gives to `prefect` commands too."""
    settings = PACKAGE / "prefect.toml"  # in a checkout only
    if not settings.is_file():
        return "http://127.0.0.1:4200"
    url: str = tomllib.loads(settings.read_text(encoding="utf-8"))["api"]["url"]
    return url.rstrip("/").removesuffix("/api")


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite store; None for other stores."""
    path = uri.partition("?")[0].removeprefix("sqlite:///")
    return Path(path).absolute() if uri.startswith("sqlite:///") else None


def artifact_root(uri: str) -> Path:
    """Folder of the artifacts of a store: mlartifacts/ beside a SQLite file, else of the project's home.

    A tracking server chooses its own.
    """
    store = sqlite_file(uri)
    return (home() if store is None else store.resolve().parent) / "mlartifacts"


def without_credentials(uri: str) -> str:
    """An address without the user, the password and the query in it, as it is shown and stored."""
    return re.sub(r"(?<=://)([^/\s@]*:\S*|[^/\s]*)@|(?<=[^\s?])\?\S+=\S*", "", uri)


def is_file(path: Path) -> bool:
    """Whether there is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:  # e.g. longer than the file system allows
        return False
