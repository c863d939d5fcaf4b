"""A post-processor, installed as a package, that lets a client's job hang, fail or kill its process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from components.config.federation import POSTPROCESSORS
from components.federation.postprocessing import Context, PostProcessor
from components.federation.protocol import ClientResult
from components.io import FullDiskError

FOLDER = "FED_RLHF_TEST_FAULTS"


class Fault(PostProcessor):
    """Does what the first line of the file of the client's name says, and removes the line."""

    kind: Literal["fault"] = "fault"

    def at_client(self, result: ClientResult, context: Context) -> ClientResult:
        path = Path(os.environ[FOLDER]) / context.client
        what, *others = path.read_text().splitlines() if path.is_file() else [""]
        if others:
            path.write_text("\n".join(others))
        else:
            path.unlink(missing_ok=True)
        if what == "hang":
            time.sleep(1000)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "full":
            raise FullDiskError(28, "no space is left for a file")
        elif what == "fail":
            raise ValueError("the text of a row")
        return result


@dataclass(frozen=True)
class Faults:
    """The faults of processes that have the package."""

    folder: Path

    @classmethod
    def install(cls, folder: Path, patch: pytest.MonkeyPatch) -> Faults:
        """Let processes that are started from now on have the package, which is in a folder."""
        info = folder / "fault-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: fault\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[fed_rlhf.postprocessors]\nfault = tests.support.faults:Fault\n"
        )
        root = Path(__file__).resolve().parents[2]
        patch.setenv("PYTHONPATH", f"{folder}:{root}")
        patch.setenv(FOLDER, str(folder))
        patch.setitem(POSTPROCESSORS.builtin, "fault", "tests.support.faults:Fault")  # of this process
        return cls(folder)

    def let(self, client: str, what: Literal["hang", "fail", "full", "kill"], times: int = 1) -> None:
        """Let this happen in the client's next jobs."""
        (self.folder / client).write_text("\n".join([what] * times))
