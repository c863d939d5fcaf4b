"""The databases in the project's home: who may write them, and how they are made by the first run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.paths import home, runs_root, tracking_uri
from infra.processes import ServerError, state_folder


def check_writable(prefect_home: Path) -> None:
    """Require that this user may write what a run writes, before anything else is done.

    Raises:
        ServerError: names the first file or folder that cannot be written, and its owner.
    """
    artifacts = home() / "mlartifacts"
    paths = [home(), state_folder(), prefect_home, prefect_home / "prefect.db", runs_root(), artifacts]
    store = sqlite_file(tracking_uri())
    for path in [*paths, *([] if store is None else [store])]:
        existing = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
        needed = os.W_OK | (os.X_OK if existing.is_dir() else 0)
        if not os.access(existing, needed):
            raise ServerError(
                f"{existing} cannot be written: it belongs to {_owner(existing)}, and this process is of"
                f" {_user_name(os.geteuid())}. Change its owner (chown -R), or set FED_RLHF_HOME to a"
                " folder of your own."
            )


def _owner(path: Path) -> str:
    return _user_name(path.stat().st_uid)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # a container may have users without an entry
        return f"the user with id {uid}"


@contextmanager
def first_use() -> Iterator[None]:
    """Hold the lock under which one process at a time makes or migrates databases."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with (state_folder() / "databases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create_tracking_store(uri: str) -> None:
    """Make MLflow's SQLite file, if the store is one and it is missing.

    It is made under another name, and renamed when it is complete: a process that is killed meanwhile leaves
    no store of half of the tables, and of two processes one makes it.
    """
    path = sqlite_file(uri)
    if path is None or path.is_file():
        return
    with first_use():
        if path.is_file():
            return
        from mlflow import MlflowClient

        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.building")
        building.unlink(missing_ok=True)  # of a process that was killed
        MlflowClient(f"sqlite:///{building}").search_experiments(max_results=1)
        building.rename(path)


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None
