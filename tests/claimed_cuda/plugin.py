"""A plug-in of pytest with which tests find CUDA devices: `python -m pytest -p tests.claimed_cuda.plugin`.

CLAIMED_DEVICES is their number. The plug-in has a process of its own, since torch asks for the hooks of CUDA
when it is imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.claimed_cuda.hooks import LIBRARY, compile_hooks, load_hooks

FOLDER = tempfile.TemporaryDirectory(prefix="claimed-cuda-")
"""Of this process, since the library names the folder of the torch that it was compiled for."""

os.environ[LIBRARY] = compile_hooks(Path(FOLDER.name))
load_hooks(os.environ[LIBRARY])

import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def claimed_cuda() -> Iterator[Any]:
    from tests.claimed_cuda.devices import claimed_devices

    with claimed_devices(int(os.environ["CLAIMED_DEVICES"])) as record:
        yield record


@pytest.fixture(autouse=True)
def ran(claimed_cuda: Any) -> Iterator[Any]:
    """What ran on claimed devices.

    A test fails that mixes devices, also where the error is caught, or runs what has no deterministic kernel.
    """
    from tests.claimed_cuda.devices import MISMATCHES, UNREPEATABLE

    MISMATCHES.clear()
    UNREPEATABLE.clear()
    claimed_cuda.clear()
    yield claimed_cuda
    assert not MISMATCHES, MISMATCHES[0]
    assert not UNREPEATABLE, f"{UNREPEATABLE[0]} has no deterministic kernel on CUDA"
    assert claimed_cuda.operations, "nothing ran on a claimed device"
