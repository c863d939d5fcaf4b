"""The home of an owner: what it has agreed with nobody but itself.

<home>/                    nobody but the owner may read it
    owner.yaml             OwnerConfig
    salt                   of the digests that the owner publishes
    secret                 of its noise in all runs, with federation.privacy
    runs/<run>/            see run_folder
    sent.jsonl             see sent_log
    error.txt              of a process that has ended by an error
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from components.config import Section, UserError
from components.config.name_checks import PlainName
from components.io import PRIVATE, write_atomically
from components.names import file_name
from components.paths import home as project_home
from components.results import Result

CONFIG = "owner.yaml"
SALT = "salt"
SECRET = "secret"
MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket, by unix(7)."""


class OwnerConfig(Section):
    """The file owner.yaml."""

    name: Annotated[PlainName, Field(min_length=1)]
    """What the server, Prefect and MLflow call the owner."""
    data: str = Field(min_length=1)
    """File or folder of its pairs: .jsonl, .parquet or .csv; a relative path starts at the home."""
    columns: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Names of columns in the file, by their names here: {prompt: question}."""
    drop_invalid: float = Field(0.0, ge=0, le=1)
    """Share of the rows that may be dropped because a column is missing, empty or of the wrong type."""
    messages: Literal["auto", "text", "messages"] = "auto"
    """How texts that are lists of messages as JSON are read, as data.messages of a recipe."""
    sockets: str = Field(min_length=1)
    """Folder of the socket by which the server reaches this owner."""
    server: int | None = Field(None, ge=0)
    """User (number) whose processes are answered; null: of all who may connect to the socket."""
    max_epsilon: float | None = Field(None, gt=0)
    """Largest epsilon of a verdict in a run (federation.privacy, unit label). Recipes without this section,
    and with a larger epsilon, are refused. null: all are accepted, so that the server decides."""
    devices: list[str] = Field(default_factory=lambda: ["cpu"], min_length=1)
    """Devices of the owner's process, of which it uses one at a time."""
    torch_threads: int = Field(1, ge=1, le=4096)
    """Threads of an operation on the CPU."""


class Presence(Result):
    """What an owner says of itself to the server's side, in a file beside its socket."""

    name: str
    version: str  # of the package
    devices: tuple[str, ...]
    at: datetime  # when it was written
    step: str = ""  # the last job, and when in its run
    busy: bool = False  # whether the job is carried out now


def sockets_root(configured: str | None) -> Path:
    """The folder of owners' sockets; None: sockets/ of the project's home."""
    return (project_home() / "sockets" if configured is None else Path(configured).expanduser()).absolute()


def socket_path(sockets: Path, name: str) -> Path:
    """Where the server reaches an owner."""
    return sockets / f"{file_name(name)}.sock"


def presence_path(sockets: Path, name: str) -> Path:
    """Where an owner says what it does."""
    return sockets / f"{file_name(name)}.json"


def create_home(home: Path, config: OwnerConfig) -> None:
    """Write the files of a new owner.

    Raises:
        UserError: the folder is not empty, or its socket's path would be too long.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise UserError(f"{home} is there already, and not empty: give a new folder as the owner's home.")
    check_socket_path(socket_path(Path(config.sockets), config.name))
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    write_atomically(home / SALT, secrets.token_bytes(32), PRIVATE)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_atomically(home / CONFIG, text.encode(), PRIVATE)


def check_socket_path(path: Path) -> None:
    """Refuse a path that no Unix socket can have."""
    if len(bytes(path)) > MAX_SOCKET_PATH:
        raise UserError(
            f"{path} has {len(bytes(path))} bytes, and a Unix socket's path has at most {MAX_SOCKET_PATH}:"
            " choose a shorter folder of sockets."
        )


def find_config(home: Path) -> OwnerConfig | None:
    """The owner of a home; None of a simulated owner, which has no rows but those that it is sent."""
    return read_config(home) if (home / CONFIG).is_file() else None


def read_config(home: Path) -> OwnerConfig:
    """The owner of a home.

    Raises:
        UserError: it has none, or the file cannot be read as one.
    """
    path = home / CONFIG
    if not path.is_file():
        raise UserError(f"{home} is no home of an owner: make one by `fed-rlhf owner init NAME --data FILE`.")
    try:
        return OwnerConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def find_secret(home: Path) -> Path | None:
    """The file of an owner's secret; None of a simulated owner, which has one for each run."""
    return home / SECRET if (home / CONFIG).is_file() else None


def salted_digest(home: Path, path: Path) -> str:
    """HMAC-SHA256 of a file by the owner's salt. Without the salt nobody can confirm a guessed file by it."""
    return hmac.digest((home / SALT).read_bytes(), path.read_bytes(), hashlib.sha256).hex()


class PresenceFile:
    """Keeps the file of an owner's presence."""

    def __init__(self, config: OwnerConfig) -> None:
        self._path = presence_path(Path(config.sockets), config.name)
        self.now = Presence(
            name=config.name,
            version=version("fed-rlhf"),
            devices=tuple(config.devices),
            at=datetime.now(UTC),
        )

    def tell(self, **changes: object) -> None:
        """Write what has changed, and the time."""
        self.now = self.now.model_copy(update={**changes, "at": datetime.now(UTC)})
        with suppress(OSError):  # a full disk ends no job
            write_atomically(self._path, self.now.model_dump_json().encode())


class OwnerState(Result):
    """An owner as the server's side sees it."""

    name: str
    state: Literal["connected", "busy", "away", "refused", "unknown"]
    presence: Presence | None = None

    @property
    def reason(self) -> str:
        """Why it does not answer, in words."""
        if self.state == "refused":
            return "this process may not open its socket: see the group of the folder of sockets"
        if self.presence is None:
            return "it was never started here (`fed-rlhf owner start`)"
        last = f", last {self.presence.step}" if self.presence.step else ""
        return f"it is away since {self.presence.at.astimezone():%Y-%m-%d %H:%M:%S}{last}"


def find_owner(sockets: Path, name: str) -> OwnerState:
    """The state of an owner, by its socket."""
    presence: Presence | None = None
    check_socket_path(socket_path(sockets, name))
    with suppress(OSError, ValueError):
        presence = Presence.model_validate_json(presence_path(sockets, name).read_bytes())
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(socket_path(sockets, name)))
    except PermissionError:
        return OwnerState(name=name, state="refused", presence=presence)
    except OSError:
        return OwnerState(name=name, state="unknown" if presence is None else "away", presence=presence)
    busy = presence is not None and presence.busy
    return OwnerState(name=name, state="busy" if busy else "connected", presence=presence)


def find_owners(sockets: Path) -> Iterator[OwnerState]:
    """The owners that were ever started with a folder of sockets, in the order of their names."""
    names = set()
    for path in sockets.glob("*.json"):
        with suppress(OSError, ValueError):
            names.add(Presence.model_validate_json(path.read_bytes()).name)
    for name in sorted(names):
        yield find_owner(sockets, name)
