"""The databases in the project's home: checked before anything else, and made by the first run."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from components.io import write_new
from components.paths import artifact_root, home, runs_root, sqlite_file, tracking_uri
from infra.processes import DATABASES, ServerError, exclusive, state_folder


def check_writable(prefect_home: Path) -> None:
    """Require that this user may write what a run writes, before anything else is done.

    Raises:
        ServerError: names the first file or folder that cannot be written.
    """
    try:
        Path.home()
    except RuntimeError:
        raise ServerError(
            f"The user with id {os.geteuid()} has no home folder, which libraries look for: set the variable"
            " HOME to a folder of this user."
        ) from None
    artifacts = artifact_root(tracking_uri())
    paths = [home(), state_folder(), prefect_home, prefect_home / "prefect.db", runs_root(), artifacts]
    store = sqlite_file(tracking_uri())
    for path in [*paths, *([] if store is None else [store])]:
        existing = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
        needed = os.W_OK | (os.X_OK if existing.is_dir() else 0)
        if not os.access(existing, needed):
            raise ServerError(
                f"{existing} cannot be written by the user with id {os.geteuid()}: change its owner (chown"
                " -R) or its mode, or set FED_RLHF_HOME to a folder of your own."
            )


def prepare_tracking_store(uri: str) -> None:
    """Make MLflow's SQLite file, if the store is one and it is missing.

    It is made under another name, and renamed when it is complete: a process that is killed meanwhile leaves
    no store of half of the tables, and of two processes one makes it.

    Raises:
        ServerError: the file is no store of MLflow or was moved, or the store is a folder of files.
    """
    is_folder = urlsplit(uri).scheme in ("", "file") and uri != "databricks"
    if is_folder and not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
        folder = _local_folder(uri)
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
                _check_artifacts(path, artifact_root(uri))
            except sqlite3.Error as error:
                remedy = "end the process that has locked it" if "locked" in str(error) else "restore it"
                raise ServerError(
                    f"MLflow's store {path} cannot be read ({error}): {remedy}, or set MLFLOW_TRACKING_URI to"
                    " another store."
                ) from None
            return
        from mlflow import MlflowClient

        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.building")
        building.unlink(missing_ok=True)  # of a process that was killed
        MlflowClient(f"sqlite:///{building}").search_experiments(max_results=1)
        building.rename(path)


def empty_prefect_database() -> Path:
    """File of an empty database of the installed Prefect, which `make install` makes.

    A server that finds no database needs 13 s for the same one.
    """
    return Path(sys.prefix) / "share" / "fed-rlhf" / f"prefect-{version('prefect')}.db"


def prepare_prefect_database(prefect_home: Path) -> None:
    """Put a copy of the empty database, if there is one, where Prefect's server would make its own.

    A database that is there, or of which a file of SQLite is left, stays as it is. Whatever fails, the server
    makes it.
    """
    path = prefect_home / "prefect.db"
    own = [path.with_name(path.name + end) for end in ("", "-wal", "-shm", "-journal")]
    is_elsewhere = any(name.startswith("PREFECT_") and "DATABASE" in name for name in os.environ)
    if not is_elsewhere and not any(map(os.path.lexists, own)):
        with contextlib.suppress(OSError):
            write_new(path, empty_prefect_database().read_bytes())


def make_empty_prefect_database() -> None:
    """Make the empty database, unless there is one; a failure is said in a line."""
    path = empty_prefect_database()
    if path.is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            _migrate(Path(made))
            os.replace(Path(made) / "copied.db", path)
    except (OSError, sqlite3.Error, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        last = reason.rpartition("\n")[2]
        print(f"no empty database of Prefect could be made ({last}): the first run makes its own, in 13 s")


def _migrate(folder: Path) -> None:
    """Make the database copied.db in a folder, where no .env or prefect.toml changes Prefect's settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    own = {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
    }
    upgrade = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    subprocess.run(upgrade, env=inherited | own, cwd=folder, capture_output=True, text=True, check=True)
    with (
        contextlib.closing(sqlite3.connect(f"file:{folder}/prefect.db?mode=rw", uri=True)) as database,
        contextlib.closing(sqlite3.connect(folder / "copied.db")) as copy,
    ):
        database.backup(copy)  # with what SQLite may have written to another file


def _check_artifacts(store: Path, artifacts: Path) -> None:
    """Refuse a store that was moved or copied with its artifacts, since it has their absolute addresses."""
    with contextlib.closing(sqlite3.connect(store)) as database:
        locations = database.execute(
            "SELECT artifact_location FROM experiments WHERE artifact_location LIKE 'file://%'"
        ).fetchall()
    for folder in (_local_folder(location) for (location,) in locations):
        earlier = folder.parent
        is_moved = earlier.name == artifacts.name and earlier.resolve() != artifacts.resolve()
        if is_moved and (not earlier.exists() or (artifacts / folder.name).is_dir()):
            change = "copied" if earlier.exists() else "moved"
            link = "" if earlier.exists() else f", make {earlier} a link to {artifacts} (ln -s)"
            raise ServerError(
                f"MLflow's store {store} was {change}, but has its artifacts in {earlier}: use it where it"
                f" was{link}, or move the store away, so that a new one is made."
            )


def _local_folder(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))
