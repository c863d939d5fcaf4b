"""A client's private store: what it holds, which state a job starts from, and what is refused."""

from unittest import mock

import pytest
import torch

from components.config import UserError
from components.federation.clients.context import ClientContexts, rewards_folder
from components.federation.clients.private import PrivateState, PrivateStore, private_root
from components.models.store import AdapterStore


def make_state(value: float, **numbers: float) -> PrivateState:
    return PrivateState({"head.weight": torch.full((2, 3), float(value))}, numbers)


def value_of(state: PrivateState | None) -> float:
    assert state is not None
    return float(state.tensors["head.weight"][0, 0])


@pytest.fixture
def store(tmp_path) -> PrivateStore:
    return PrivateStore(tmp_path, "ada")


def test_a_job_starts_from_the_state_after_the_job_that_it_names_and_without_one_from_none(store):
    saved = store.save("one", "", make_state(1.0, scale=2.5))
    store.save("two", "one", make_state(2.0))
    assert value_of(store.load("one")) == 1.0
    assert value_of(store.load("two")) == 2.0
    assert store.load("one").numbers == {"scale": 2.5}
    assert store.load("one").size == saved.size > 24
    assert store.load("") is None


def test_files_and_folders_are_their_owners_alone(tmp_path):
    store = PrivateStore(tmp_path / "clients", "ada")
    store.save("one", "", make_state(1.0))
    store.record_error(ValueError("a row"))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "clients").rglob("*") if path.is_file()}
    folders = [path for path in (tmp_path / "clients").rglob("*") if path.is_dir()]
    assert modes == {0o600}
    assert len(folders) == 3
    assert {path.stat().st_mode & 0o777 for path in [*folders, tmp_path / "clients"]} == {0o700}


def test_a_repeated_job_overwrites_its_own_state_and_not_the_one_it_starts_from(store):
    store.save("one", "", make_state(1.0))
    store.save("two", "one", make_state(2.0))
    store.save("two", "one", make_state(7.0))
    assert value_of(store.load("two")) == 7.0
    assert value_of(store.load("one")) == 1.0


def test_a_store_holds_a_jobs_state_and_the_one_that_it_started_from(store):
    previous = ""
    for number in range(5):
        key = f"job-{number}"
        store.save_personal_stage(key, make_state(number))
        store.save(key, previous, make_state(number + 0.5))
        previous = key
    assert sorted(path.name for path in store.folder.glob("*.json")) == ["job-3.json", "job-4.json"]
    assert len(list((store.folder / "modules").glob("*.safetensors"))) == 2


def test_the_state_of_a_refused_update_is_dropped_with_the_next_job(store):
    store.save("one", "", make_state(1.0))
    store.save("refused", "one", make_state(9.0))
    store.save("two", "one", make_state(2.0))
    assert value_of(store.load("one")) == 1.0
    assert sorted(path.stem for path in store.folder.glob("*.json")) == ["one", "two"]


def test_the_state_after_a_personal_stage_belongs_to_its_job_alone_until_it_is_complete(store):
    store.save_personal_stage("job", make_state(0.5))
    assert value_of(store.load_personal_stage("job")) == 0.5
    assert store.load_personal_stage("another") is None
    with pytest.raises(UserError):
        store.load("job")
    store.save("job", "", make_state(1.0))
    assert store.load_personal_stage("job") is None
    assert value_of(store.load("job")) == 1.0


@pytest.mark.parametrize("client", ["ada", "bea"])
def test_a_missing_state_is_refused_by_client_and_job_with_the_remedy(store, tmp_path, client):
    if client == "bea":
        store.save("one", "", make_state(1.0))
    with pytest.raises(UserError, match=rf"private state of client {client} .*\(one\).*new run"):
        PrivateStore(tmp_path, client).load("one")


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_unreadable_modules_are_refused_by_client_with_the_remedy(store, damage):
    store.save("job", "", make_state(1.0))
    (path,) = (store.folder / "modules").iterdir()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4] + b"oops")
    with pytest.raises(UserError, match=f"modules of client {store.client} .*is {damage}.*new run"):
        store.load("job")


def test_a_damaged_state_is_refused_by_its_file(store):
    store.save("job", "", make_state(1.0))
    (store.folder / "job.json").write_text("{")
    with pytest.raises(UserError, match=r"job\.json is damaged"):
        store.load("job")


def test_private_stores_lie_beside_the_federations_folder_and_scores_in_it(tmp_path):
    federation = tmp_path / "federation"
    assert private_root(federation) == tmp_path / "federation-clients"
    assert rewards_folder(federation) == federation / "rewards"
    contexts = ClientContexts(AdapterStore(federation / "adapters"), tmp_path / "pairs.parquet")
    context = contexts.open("ada")
    assert context.store.folder.parent == tmp_path / "federation-clients"
    assert context.rewards == federation / "rewards"


def test_a_state_whose_write_is_interrupted_leaves_the_previous_one(store):
    store.save("one", "", make_state(1.0))
    write = "components.federation.clients.private.write_atomically"
    with mock.patch(write, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.save("two", "one", make_state(2.0))
    assert value_of(store.load("one")) == 1.0
