"""A host of owners' processes in which the test says what happens to a client's job."""

from __future__ import annotations

import pytest

from tasks.owner_processes import ResidentHost
from tests.support.faults import Faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What happens to clients' jobs in processes that are started from now on."""
    with pytest.MonkeyPatch.context() as patch:
        yield Faults.install(tmp_path_factory.mktemp("faults"), patch)


@pytest.fixture(scope="module")
def host(faults):
    """A host, which starts with the first job."""
    host = ResidentHost()
    yield host
    host.end()
