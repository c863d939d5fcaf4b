"""The stores of adapters that the tests of federations share."""

import pytest

from components.federation.clients.context import ClientContexts
from components.models.store import AdapterStore


@pytest.fixture
def store(tmp_path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def contexts(prepared, tmp_path) -> ClientContexts:
    """Opens the contexts of the clients of `prepared`."""
    return ClientContexts(AdapterStore(tmp_path / "federation" / "adapters"), prepared / "pairs.parquet")
