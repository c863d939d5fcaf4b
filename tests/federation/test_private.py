"""A client's own store: what is written when, from where a job starts, and what is refused."""

import pytest
import torch

from components.federation.private import (
    PrivateState,
    PrivateStore,
    PrivateStoreError,
    client_folder,
    home_of,
    rewards_beside,
    stores_beside,
)
from components.models.adapters import AdapterError, AdapterStore


def state(value: float, **numbers) -> PrivateState:
    return PrivateState({"head.weight": torch.full((2, 3), float(value))}, numbers)


def value_of(found: PrivateState) -> float:
    return float(found.tensors["head.weight"][0, 0])


@pytest.fixture
def store(tmp_path) -> PrivateStore:
    return PrivateStore(tmp_path, "ada")


def test_a_job_starts_from_the_state_after_the_one_that_it_names_and_from_nothing_where_it_names_none(store):
    assert store.after("") is None
    saved = store.save("one", "", state(1.0, scale=2.5))
    store.save("two", "one", state(2.0))
    assert value_of(store.after("one")) == 1.0 and value_of(store.after("two")) == 2.0 and store.after("") is None
    assert store.after("one").numbers == {"scale": 2.5} and store.after("one").size == saved.size > 24


def test_a_job_that_is_run_again_overwrites_its_own_state_and_not_that_it_starts_from(store):
    store.save("one", "", state(1.0))
    store.save("two", "one", state(2.0))
    store.save("two", "one", state(7.0))
    assert value_of(store.after("two")) == 7.0 and value_of(store.after("one")) == 1.0


def test_only_a_jobs_state_and_the_one_that_it_started_from_are_kept(store):
    before = ""
    for round in range(5):
        store.save(f"job-{round}", before, state(round), half=True)
        store.save(f"job-{round}", before, state(round + 0.5))
        before = f"job-{round}"
    assert sorted(path.name for path in store.folder.glob("*.json")) == ["job-3.json", "job-4.json"]
    assert len(list((store.folder / "parts").glob("*.safetensors"))) == 2


def test_an_update_that_the_server_did_not_accept_leaves_the_client_where_it_was(store):
    store.save("one", "", state(1.0))
    store.save("refused", "one", state(9.0))
    store.save("two", "one", state(2.0))
    assert value_of(store.after("one")) == 1.0 and sorted(path.stem for path in store.folder.glob("*.json")) == ["one", "two"]


def test_a_half_belongs_to_its_job_and_is_no_state_that_another_starts_from(store):
    store.save("job", "", state(0.5), half=True)
    assert value_of(store.half("job")) == 0.5 and store.half("another") is None
    with pytest.raises(PrivateStoreError):
        store.after("job")
    store.save("job", "", state(1.0))
    assert store.half("job") is None and value_of(store.after("job")) == 1.0


def test_a_state_that_is_not_there_is_refused_and_not_begun_anew(store, tmp_path):
    with pytest.raises(PrivateStoreError, match=r"what client ada has kept to itself since its last job \(one\) is not here.*start a new run"):
        store.after("one")
    store.save("one", "", state(1.0))
    with pytest.raises(PrivateStoreError, match="client bea"):
        PrivateStore(tmp_path, "bea").after("one")


def test_damage_is_named(store):
    store.save("job", "", state(1.0))
    (path,) = (store.folder / "parts").iterdir()
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    with pytest.raises(AdapterError, match="is damaged"):
        store.after("job")
    (store.folder / "job.json").write_text("{")
    with pytest.raises(PrivateStoreError, match=r"job\.json is damaged"):
        store.after("job")


def test_two_clients_never_share_a_folder(tmp_path):
    names = ["ada", "Ada", "a/da", "a_da", "..", "x" * 200, "x" * 201]
    folders = [client_folder(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names) and all("/" not in folder and len(folder) < 80 and folder.strip(".") for folder in folders)
    adapters = AdapterStore(tmp_path / "federation" / "adapters")
    assert stores_beside(adapters) == tmp_path / "federation-clients" and rewards_beside(adapters) == tmp_path / "federation" / "rewards"
    assert home_of("ada", adapters, tmp_path / "pairs.parquet", "").store.folder.parent == tmp_path / "federation-clients"


def test_a_state_that_is_cut_off_while_it_is_written_leaves_the_last_one(store, monkeypatch):
    store.save("one", "", state(1.0))
    monkeypatch.setattr("components.federation.private.write_atomically", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.save("two", "one", state(2.0))
    assert value_of(store.after("one")) == 1.0
