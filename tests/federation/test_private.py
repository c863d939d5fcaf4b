"""A client's own store: what is written when, from where a round starts, and what is refused."""

import json

import pytest
import torch

from components.federation.private import PrivateState, PrivateStore, PrivateStoreError, client_folder, stores_beside
from components.models.adapters import AdapterError, AdapterStore


def state(value: float, **numbers) -> PrivateState:
    return PrivateState({"head.weight": torch.full((2, 3), float(value))}, numbers)


def value_of(found: PrivateState) -> float:
    return float(found.tensors["head.weight"][0, 0])


@pytest.fixture
def store(tmp_path) -> PrivateStore:
    return PrivateStore(tmp_path, "ada")


def test_a_round_starts_from_the_newest_state_of_an_earlier_round_in_which_the_client_took_part(store):
    assert store.before(0) is None and store.before(5) is None
    store.save(1, "one", state(1.0, scale=2.5))
    store.save(4, "four", state(4.0))
    assert store.before(1) is None and value_of(store.before(2)) == value_of(store.before(4)) == 1.0 and value_of(store.before(5)) == 4.0
    assert store.before(2).numbers == {"scale": 2.5} and store.before(2).size == store.save(1, "one", state(1.0)).size > 24


def test_a_round_that_is_run_again_overwrites_its_own_state_and_starts_from_the_one_before(store):
    for round in range(3):
        store.save(round, str(round), state(round))
    assert value_of(store.before(2)) == 1.0
    store.save(2, "2", state(7.0))
    assert value_of(store.before(3)) == 7.0 and value_of(store.before(2)) == 1.0


def test_only_the_last_two_states_are_kept(store):
    for round in range(5):
        store.save(round, str(round), state(round), half=True)
        store.save(round, str(round), state(round + 0.5))
    assert sorted(path.name for path in store.folder.glob("*.json")) == ["00003.json", "00004.json"]
    assert len(list((store.folder / "parts").glob("*.safetensors"))) == 2


def test_a_half_belongs_to_its_job(store):
    store.save(0, "job", state(0.5), half=True)
    assert value_of(store.half(0, "job")) == 0.5 and store.half(0, "another") is None and store.half(1, "job") is None
    assert store.before(1) is None, "a half is no state that a round starts from"
    store.save(0, "job", state(1.0))
    assert store.half(0, "job") is None


def test_a_round_whose_start_is_gone_is_refused_and_not_begun_anew(store):
    for round in range(4):
        store.save(round, str(round), state(round))
    with pytest.raises(PrivateStoreError, match=r"parts from before round 2 are gone \(those after round 3 are there\).*start a new run"):
        store.before(1)
    assert value_of(store.before(3)) == 2.0


def test_damage_is_named(store):
    store.save(0, "job", state(1.0))
    (path,) = (store.folder / "parts").iterdir()
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    with pytest.raises(AdapterError, match="is damaged"):
        store.before(1)
    (store.folder / "00000.json").write_text("{")
    with pytest.raises(PrivateStoreError, match=r"00000\.json is damaged"):
        store.before(1)


def test_two_clients_never_share_a_folder(tmp_path):
    names = ["ada", "Ada", "a/da", "a_da", "..", "x" * 200, "x" * 201]
    folders = [client_folder(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names) and all("/" not in folder and len(folder) < 80 and folder.strip(".") for folder in folders)
    assert stores_beside(AdapterStore(tmp_path / "federation" / "adapters")) == tmp_path / "federation-clients"


def test_a_state_that_is_cut_off_while_it_is_written_leaves_the_last_one(store, monkeypatch):
    store.save(0, "zero", state(1.0))
    monkeypatch.setattr("components.federation.private.write_atomically", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.save(1, "one", state(2.0))
    assert value_of(store.before(2)) == 1.0 and json.loads((store.folder / "00000.json").read_text())["first"]
