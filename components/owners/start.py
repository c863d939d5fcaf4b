"""The process that an owner starts: it waits for the server's requests until it is ended."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import socket
from importlib import import_module
from pathlib import Path

from components.config import UserError
from components.owners.home import (
    OwnerConfig,
    PresenceFile,
    check_socket_path,
    read_config,
    socket_path,
)
from components.owners.host import LIBRARIES, OwnerHost

log = logging.getLogger(__name__)
SOCKET_UMASK = 0o117
"""The owner and its group may connect, others may not."""


def start(home: Path) -> None:
    """Answer requests until SIGINT or SIGTERM; a job that is being carried out then is given up.

    Raises:
        UserError: the home is no owner's, or the owner runs already.
    """
    config = read_config(home)
    with (home / "start.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"owner {config.name} runs already: end that process first.") from None
        for left in (*home.glob(".replay-*"), *home.glob(".check-*")):  # of commands that were killed
            shutil.rmtree(left)
        _serve(home, config)


def _serve(home: Path, config: OwnerConfig) -> None:
    sockets = Path(config.sockets)
    path = socket_path(sockets, config.name)
    check_socket_path(path)
    for name in LIBRARIES:
        import_module(name)
    ended, end = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.write(end, b"."))
    presence = PresenceFile(config)
    if not sockets.is_dir():
        sockets.mkdir(mode=0o700, parents=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(SOCKET_UMASK)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(128)
        presence.tell()
        log.info("owner %s waits for requests (%s)", config.name, path)

        def tell(step: str, busy: bool) -> None:
            told = (presence.now.step, presence.now.busy)
            presence.tell(step=step, busy=busy)
            if told != (step, busy):
                log.info("%s %s", step, "..." if busy else "has ended")

        try:
            OwnerHost(listener, config.devices, ended, home.resolve(), config.server, tell).serve()
        finally:
            path.unlink(missing_ok=True)
            presence.tell(busy=False)
            log.info("owner %s has ended", config.name)
