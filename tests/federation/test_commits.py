"""Commits: a written state is read back unchanged, and a half-written one is never read."""

import json
import os
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from components import io
from components.federation.commits import CommitError, Commits
from components.federation.methods.fedbiscuit import GroupingMemory
from components.federation.protocol import Client, ServerState
from components.models.store import AdapterError
from components.results import Metrics
from tests.support.results import step_record

MEMORY = GroupingMemory(assignment={"ada": "selector-1"}, grouped_at=1, losses={"ada": [0.5]})


@pytest.fixture
def commits(tmp_path):
    return Commits(tmp_path / "federation", "recipe-1")


def make_state(commits, step=0, value=0.0, memory=None, metrics=None):
    digest = commits.store.put({"a": torch.full((3,), value)})
    clients = (
        Client(name="ada", training_pairs=3, validation_pairs=1, weight=0.75),
        Client(name="bea", training_pairs=1, validation_pairs=0, weight=0.25),
    )
    return ServerState(
        round=step,
        phase="train",
        step=step,
        seed=5,
        clients=clients,
        initial=digest,
        adapters={"selector": digest},
        memory=memory or GroupingMemory(),
        metrics=metrics or Metrics(),
    )


def make_record(step):
    return step_record(step=step, round=step - 1, rounds_done=step)


def latest(commits):
    return commits.latest(GroupingMemory)


def test_a_new_folder_has_no_commit(commits):
    assert latest(commits) is None


def test_a_state_is_read_back_unchanged_with_the_records_of_all_steps(commits):
    metrics = Metrics(scalars={"server_step": 0.1 + 0.2}, series={"lambda/a": [0.1, 0.7]})
    commits.write(make_state(commits), None)
    for step in (1, 2):
        commits.write(make_state(commits, step, step / 3, MEMORY, metrics), make_record(step))
    state, records = latest(Commits(commits.folder, "recipe-1"))
    assert state == make_state(commits, 2, 2 / 3, MEMORY, metrics)
    assert records == [make_record(1), make_record(2)]
    assert torch.equal(commits.store.get(state.adapters["selector"])["a"], torch.full((3,), 2 / 3))


def test_nan_in_the_memory_is_read_back(commits):
    memory = GroupingMemory(losses={"ada": [float("nan"), 1.0]})
    commits.write(make_state(commits, 1, memory=memory), make_record(1))
    read = latest(commits)[0].memory.losses["ada"]
    assert read[0] != read[0]
    assert read[1] == 1.0


def test_the_latest_of_more_than_ten_steps_is_read(commits):
    for step in range(12):
        commits.write(make_state(commits, step), make_record(step))
    assert latest(commits)[0].step == 11


def test_a_commit_names_its_adapters_by_hash_and_is_read_at_a_new_place(commits, tmp_path):
    state = make_state(commits, 1, 4.0)
    commits.write(state, make_record(1))
    content = (commits.folder / "commits" / "00001.json").read_text()
    assert str(commits.folder) not in content
    assert json.loads(content)["state"]["adapters"]["selector"] == state.adapters["selector"]
    commits.folder.rename(tmp_path / "elsewhere")
    moved = Commits(tmp_path / "elsewhere", "recipe-1")
    adapter = moved.store.get(latest(moved)[0].adapters["selector"])
    assert torch.equal(adapter["a"], torch.full((3,), 4.0))


@pytest.mark.parametrize("content", [b"", b'{"fingerprint": "recipe-1", "state": {"rou', b"\x00garbage"])
def test_the_scratch_file_of_a_killed_run_is_not_read(commits, content):
    commits.write(make_state(commits, 1), make_record(1))
    (commits.folder / "commits" / ".writing-abc123").write_bytes(content)
    (commits.store.root / ".writing-def456").write_bytes(content)
    assert latest(commits)[0].step == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_earlier_commit_and_no_scratch_file(commits, call):
    commits.write(make_state(commits, 1), make_record(1))
    later = make_state(commits, 2, 1.0)
    full = OSError("the disk is full")
    failing = SimpleNamespace(**vars(os) | {call: mock.Mock(side_effect=full)})
    with mock.patch.object(io, "os", failing), pytest.raises(OSError, match="disk is full"):
        commits.write(later, make_record(2))
    assert latest(commits)[0].step == 1
    assert os.listdir(commits.folder / "commits") == ["00001.json"]


def test_a_commit_is_flushed_to_disk_before_it_is_renamed(commits, monkeypatch):
    state = make_state(commits, 1)
    calls = mock.Mock()
    own = {}
    for name in ("fsync", "replace"):
        own[name] = getattr(calls, name)
        own[name].side_effect = getattr(os, name)
    monkeypatch.setattr(io, "os", SimpleNamespace(**vars(os) | own))
    commits.write(state, None)
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]


def test_commits_with_another_fingerprint_are_refused_by_file_and_fingerprints(commits):
    commits.write(make_state(commits, 1), make_record(1))
    with pytest.raises(CommitError, match=r"00001\.json .*recipe-1, this run has recipe-2.*new run"):
        latest(Commits(commits.folder, "recipe-2"))


@pytest.mark.parametrize(
    ("now", "change"),
    [(["ada", "bea", "eve"], "eve joined"), ([], ""), (["bea"], "ada left"), (["eve", "fay"], None)],
)
def test_commits_of_other_clients_are_refused_by_who_joined_and_who_left(commits, now, change):
    clients = tuple(
        Client(name=name, training_pairs=1, validation_pairs=0, weight=0.5) for name in ("ada", "bea")
    )
    commits.write(make_state(commits, 1).model_copy(update={"clients": clients}), make_record(1))
    change = "eve, fay joined and ada, bea left" if change is None else change
    sentence = f"since it was written, {change}. A run keeps its clients" if change else "another recipe"
    with pytest.raises(CommitError, match=re.escape(sentence)):
        latest(Commits(commits.folder, "recipe-2", now))
    assert latest(Commits(commits.folder, "recipe-1", ["ada", "bea"]))[0].step == 1


def test_clearing_removes_commits_and_adapters(commits):
    commits.write(make_state(commits, 1), make_record(1))
    commits.clear()
    assert latest(commits) is None
    assert not commits.store.root.exists()


def test_a_damaged_adapter_is_refused_by_its_file_and_repaired_when_it_is_stored_again(commits):
    digest = make_state(commits, 1, 2.0).adapters["selector"]
    path = commits.store.path(digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match=f"{digest[:12]} is damaged: the bytes of .*{digest}"):
        commits.store.get(digest)
    assert commits.store.put({"a": torch.full((3,), 2.0)}) == digest
    assert torch.equal(commits.store.get(digest)["a"], torch.full((3,), 2.0))


def test_a_missing_adapter_is_refused_by_its_file(commits):
    digest = make_state(commits, 1, 2.0).adapters["selector"]
    commits.store.path(digest).unlink()
    with pytest.raises(AdapterError, match=f"{digest[:12]} is missing"):
        commits.store.get(digest)


@pytest.mark.parametrize("content", ["[]", "{}", '{"fingerprint": "recipe-1", "state": {"round": 1}}'])
def test_a_commit_of_another_form_is_refused_as_damaged(commits, content):
    commits.write(make_state(commits, 1), make_record(1))
    (commits.folder / "commits" / "00001.json").write_text(content)
    with pytest.raises(CommitError, match=r"00001\.json is damaged"):
        latest(commits)


def test_a_damaged_commit_is_refused_with_the_remedy_and_the_remedy_works(commits):
    commits.write(make_state(commits, 0), None)
    commits.write(make_state(commits, 1, 1.0), make_record(1))
    damaged = commits.folder / "commits" / "00001.json"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(CommitError, match=r"00001\.json is damaged: delete it"):
        latest(commits)
    damaged.unlink()
    assert latest(commits)[0].step == 0
