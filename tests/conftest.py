"""Fixtures of all tests: the environment, the recipe `debug`, prepared data, a Prefect server."""

import atexit
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from components.environment import configure_libraries
from tests.support import mlflow_store
from tests.support.pipeline import Workplace
from tests.support.prefect_server import prefect_settings, shared_server
from tests.support.prepared import write_prepared

# Test processes do not compete for cores, and sums are split in one way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PREFECT_HOME" not in os.environ:
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="fed-rlhf-prefect-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
configure_libraries()
os.environ.setdefault("FED_RLHF_ALLOW_CODE", "tests.support.reward_functions, builtins, math")

ROOT = Path(__file__).resolve().parent.parent


def _writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


if "FED_RLHF_BACKBONES" not in os.environ and not _writable(ROOT / "data" / "backbone"):
    os.environ["FED_RLHF_BACKBONES"] = tempfile.mkdtemp(prefix="fed-rlhf-backbones-")


pytest_plugins = ["tests.support.costs", "tests.support.network", "tests.support.unstable"]
PIPELINE = frozenset({"prefect_session", "prepared", "migrated_store"})
"""A Prefect server, the data of federations, and a tracking store."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a fixture of the pipeline."""
    for item in items:
        if not PIPELINE.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.pipeline)


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup() -> None:
    """Each test begins with one thread for CPU operations, also after one that has set more."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def samples() -> Path:
    """The real samples beside the repository; a test that needs them is skipped without them."""
    folder = Path(os.environ.get("FED_RLHF_SAMPLES", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the real samples are not at {folder} (set FED_RLHF_SAMPLES)")
    return folder


@pytest.fixture
def two_threads() -> None:
    """Two threads for CPU operations."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def debug():
    """The debug recipe: a tiny random model."""
    from components.recipes import load_recipe

    return load_recipe("debug")


@pytest.fixture(scope="session")
def tiny_selector(debug):
    """The debug recipe's selector without dropout; tests load their own adapters."""
    from components.models.selector_model import Selector

    config = debug.selector.model_copy(
        update={"lora": debug.selector.lora.model_copy(update={"dropout": 0.0})}
    )
    return Selector(config, "cpu")


@pytest.fixture(scope="session")
def random_adapter(tiny_selector):
    """A maker of adapters that change the tiny selector's answers: all tensors are random, B too."""
    import torch

    def make(seed: int, scale: float = 0.2) -> dict:
        numbers = torch.Generator().manual_seed(seed)
        return {
            n: scale * torch.randn(p.shape, generator=numbers) for n, p in tiny_selector.slot.named.items()
        }

    return make


@pytest.fixture(scope="session")
def resident_policy(debug):
    """The debug recipe's policy with completions of up to 20 tokens, one for the session."""
    from components.models.resident import ResidentPolicy

    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 20}), "cpu")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A prepared folder: clients with shares of 0.4, 0.3, 0.2 and 0.1, a judge, server prompts."""
    return write_prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of runs, of the test's own; it does not exist yet."""
    folder: Path = tmp_path / "runs"
    monkeypatch.setenv("FED_RLHF_RUNS", str(folder))
    return folder


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory) -> Path:
    """A folder that all workers of this session share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "session"


@pytest.fixture(scope="session")
def prefect_session(session_folder) -> Iterator[str]:
    """URL of the session's Prefect API, which flows and tasks in this process use."""
    with shared_server(session_folder / "prefect") as url, prefect_settings(url):
        yield url


@pytest.fixture(scope="session")
def migrated_store(session_folder) -> Path:
    """An empty MLflow store to copy."""
    return mlflow_store.migrated_store(session_folder / "mlflow")


@pytest.fixture(scope="session")
def fill_home(prefect_session, session_folder, migrated_store) -> Callable[[Path], Path]:
    """A function that gives a home of the project empty databases, which take seconds to make."""

    def fill(home: Path) -> Path:
        databases = {session_folder / "prefect" / "home" / "prefect.db": ".prefect/prefect.db"}
        databases[migrated_store] = "mlflow.db"
        for source, name in databases.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(home / name)) as copy:
                database.backup(copy)
        return home

    return fill


@pytest.fixture(scope="session")
def new_workplace(prefect_session, migrated_store, tmp_path_factory) -> Callable[[str], Workplace]:
    """A maker of places for runs of the pipeline."""
    return lambda name: Workplace(tmp_path_factory.mktemp(name), prefect_session, migrated_store)
