"""The expectations on a recipe's data, checked in a process beside the rest of a check.

To import Great Expectations takes as long as all else that a check does.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from threading import RLock, Thread
from typing import TYPE_CHECKING

from components.config import UserError
from components.data.data_report import Limits
from components.environment import configure_libraries

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import pandas as pd

    Data = tuple[dict[str, pd.DataFrame], Limits]


class ValidationProcess:
    """A process that imports Great Expectations once, and checks data. It ends with this one."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._process: BaseProcess | None = None
        self._data: Data | None = None  # those that it has not answered yet
        if "great_expectations" in sys.modules:
            return
        context = get_context("spawn")
        resource_tracker.ensure_running()  # it would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits it
        try:
            self._connection, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        except OSError:
            self._connection = self._process = None  # they are checked here
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that can be asked."""
        return self._process is not None and self._process.is_alive()

    def start(self, tables: Mapping[str, pd.DataFrame], limits: Limits) -> None:
        """Give the tables of a prepared folder to the process."""
        with suppress(UserError):
            self.warnings()  # of data whose check failed before it waited for them
        self._data = dict(tables), limits
        # The process reads once it has imported its library, and a pipe holds few bytes.
        Thread(target=self._send, args=(self._data,), daemon=True).start()

    def _send(self, data: Data) -> None:
        with suppress(OSError):  # the process is gone; see warnings
            if self._connection is not None:
                self._connection.send(data)

    def warnings(self) -> list[str]:
        """Wait for what they say of the data that were given.

        Raises:
            ExpectationsFailed: see validate.
        """
        if self._data is None:
            return []
        answer: list[str] | UserError | None = None
        with suppress(EOFError, OSError):  # it was ended, e.g. for want of memory
            if self._connection is not None:
                answer = self._connection.recv()
        data, self._data = self._data, None
        if answer is None:
            answer = _find_warnings(*data)
        if isinstance(answer, UserError):
            raise answer
        return answer


_beside: list[ValidationProcess] = []


def validation_process() -> ValidationProcess:
    """The process of an earlier check of this one, or a new one."""
    if not (_beside and _beside[0].is_alive):
        _beside[:] = [ValidationProcess()]
    return _beside[0]


def _serve(connection: Connection) -> None:
    configure_libraries()
    from tqdm import tqdm

    tqdm.set_lock(RLock())  # its own has a semaphore, which a process that is terminated leaves to the system
    import components.data.validation  # noqa: F401

    with suppress(EOFError, OSError):  # nobody asks, or waits
        while True:
            data = connection.recv()
            try:
                connection.send(_find_warnings(*data))
            except UserError as error:
                connection.send(error)


def _find_warnings(tables: Mapping[str, pd.DataFrame], limits: Limits) -> list[str]:
    from components.data.validation import validate

    return validate(tables, limits, None).warnings
