"""The databases in the project's home: who may write them, and how they are made by the first run."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

from components.paths import artifact_root, home, runs_root, sqlite_file, tracking_uri
from infra.processes import DATABASES, ServerError, exclusive, state_folder

LOGGER = logging.getLogger(__name__)
LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow's store that have addresses of artifacts."""


def check_writable(prefect_home: Path) -> None:
    """Require that this user may write what a run writes, before anything else is done.

    Raises:
        ServerError: names the first file or folder that cannot be written, and its owner.
    """
    try:
        Path.home()
    except RuntimeError:
        raise ServerError(
            f"{_user_name(os.geteuid()).capitalize()} has no home folder, which libraries look for: set the"
            " variable HOME to a folder of this user."
        ) from None
    artifacts = artifact_root(tracking_uri())
    paths = [home(), state_folder(), prefect_home, prefect_home / "prefect.db", runs_root(), artifacts]
    store = sqlite_file(tracking_uri())
    for path in [*paths, *([] if store is None else [store])]:
        existing = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
        needed = os.W_OK | (os.X_OK if existing.is_dir() else 0)
        if not os.access(existing, needed):
            owner = existing.stat().st_uid
            reason = "its mode or its file system does not allow it. Change these"
            if owner != os.geteuid():
                reason = (
                    f"it belongs to {_user_name(owner)}, and this process is of {_user_name(os.geteuid())}."
                    " Change its owner (chown -R)"
                )
            raise ServerError(
                f"{existing} cannot be written: {reason}, or set FED_RLHF_HOME to a folder of your own."
            )


def _user_name(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # a container may have users without an entry
        return f"the user with id {uid}"


def prepare_tracking_store(uri: str) -> None:
    """Make MLflow's SQLite file, if the store is one and it is missing; see relocate_artifacts for others.

    It is made under another name, and renamed when it is complete: a process that is killed meanwhile leaves
    no store of half of the tables, and of two processes one makes it.

    Raises:
        ServerError: the file is no store of MLflow, or the store is a folder of files.
    """
    is_folder = urlsplit(uri).scheme in ("", "file") and uri != "databricks"
    if is_folder and not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
        folder = local_folder(uri)
        raise ServerError(
            f"MLFLOW_TRACKING_URI is the folder {folder}, and MLflow keeps no runs in folders any more: unset"
            " the variable, or set it to a database, for which `mlflow migrate-filestore --source"
            f" {folder} --target sqlite:///mlflow.db` copies the runs of the folder."
        )
    path = sqlite_file(uri)
    if path is None:
        return
    with exclusive(DATABASES):
        if path.is_file() and path.stat().st_size:
            try:
                relocate_artifacts(path, artifact_root(uri))
            except sqlite3.Error as error:
                if "locked" in str(error):
                    raise ServerError(
                        f"MLflow's store {path} is locked by another process: wait until that has ended."
                    ) from None
                raise ServerError(
                    f"MLflow's store {path} cannot be read ({error}): set MLFLOW_TRACKING_URI to another"
                    " one, or move the file away, so that a new one is made."
                ) from None
            return
        from mlflow import MlflowClient

        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.building")
        building.unlink(missing_ok=True)  # of a process that was killed
        MlflowClient(f"sqlite:///{building}").search_experiments(max_results=1)
        building.rename(path)


def local_folder(uri: str) -> Path:
    """The folder of a file: URI."""
    return Path(unquote(urlsplit(uri).path))


def relocate_artifacts(store: Path, artifacts: Path) -> None:
    """Let MLflow find the artifacts beside a SQLite store that was moved or copied with them.

    MLflow stores absolute addresses. Those of a folder `mlartifacts` at another place are changed where this
    place has the experiment's folder, or the other one is gone.

    Args:
        store: the SQLite file.
        artifacts: the folder `mlartifacts` of the store.
    """
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        experiments = database.execute(
            "SELECT artifact_location FROM experiments WHERE artifact_location LIKE 'file://%'"
        ).fetchall()
        for (location,) in experiments:
            root, _, name = location.rpartition("/")
            earlier = local_folder(root)
            is_moved = earlier.name == artifacts.name and earlier.resolve() != artifacts.resolve()
            if not is_moved or (earlier.exists() and not (artifacts / unquote(name)).is_dir()):
                continue
            start = len(location) + 1
            for table, column in LOCATIONS:
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                    f" WHERE substr({column} || '/', 1, ?) = ?",
                    (f"{artifacts.as_uri()}/{name}", start, start, f"{location}/"),
                )
            LOGGER.warning(
                "artifacts in %s were moved to %s, and MLflow's store with them", earlier, artifacts
            )
