"""Commits: what is written is read back, and nothing that is half written is."""

import json
import os

import pytest
import torch

from components.federation.commits import CommitError, Commits
from components.federation.strategy import Client, Federation, ServerState
from components.models import adapters
from components.models.adapters import AdapterError


@pytest.fixture
def commits(tmp_path):
    return Commits(tmp_path / "federation", "recipe-1")


def state_of(commits, step=0, value=0.0, **changes):
    ref = commits.store.put({"a": torch.full((3,), value)})
    federation = Federation((Client("ada", 3, 1, 0.75), Client("bea", 1, 0, 0.25)), ref)
    return ServerState(round=step, phase="train", step=step, seed=5, federation=federation, adapters={"selector": ref}, **changes)


def test_a_new_folder_has_no_commit(commits):
    assert commits.latest() is None


def test_a_state_is_read_back_as_it_was_written_with_all_records(commits):
    commits.write(state_of(commits), {})
    for step in (1, 2):
        commits.write(state_of(commits, step, step / 3, memory={"groups": [0, 1], "losses": {"ada": [0.5]}}, log={"server_step": 0.1 + 0.2}), {"step": step})
    state, records = Commits(commits.folder, "recipe-1").latest()
    assert state == state_of(commits, 2, 2 / 3, memory={"groups": [0, 1], "losses": {"ada": [0.5]}}, log={"server_step": 0.1 + 0.2})
    assert records == [{"step": 1}, {"step": 2}]
    assert torch.equal(commits.store.get(state.adapters["selector"])["a"], torch.full((3,), 2 / 3))


def test_the_newest_of_more_than_ten_steps_is_found(commits):
    for step in range(12):
        commits.write(state_of(commits, step), {"step": step})
    assert commits.latest()[0].step == 11


def test_a_folder_that_was_moved_is_read_where_it_is(commits, tmp_path):
    commits.write(state_of(commits, 1, 4.0), {"step": 1})
    commits.folder.rename(tmp_path / "elsewhere")
    moved = Commits(tmp_path / "elsewhere", "recipe-1")
    assert torch.equal(moved.store.get(moved.latest()[0].adapters["selector"])["a"], torch.full((3,), 4.0))


@pytest.mark.parametrize("left_over", [b"", b'{"fingerprint": "recipe-1", "state": {"rou', b"\x00garbage"])
def test_a_scratch_file_that_a_killed_run_left_behind_is_not_read(commits, left_over):
    commits.write(state_of(commits, 1), {"step": 1})
    (commits.folder / "commits" / ".writing-abc123").write_bytes(left_over)
    (commits.store.root / ".writing-def456").write_bytes(left_over)
    assert commits.latest()[0].step == 1


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_write_that_breaks_off_leaves_the_earlier_commit_and_no_file(commits, monkeypatch, moment):
    commits.write(state_of(commits, 1), {"step": 1})
    later = state_of(commits, 2, 1.0)

    def broken(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(adapters.os, moment, broken)
        with pytest.raises(OSError, match="disk is full"):
            commits.write(later, {"step": 2})
    assert commits.latest()[0].step == 1
    assert os.listdir(commits.folder / "commits") == ["00001.json"]


def test_a_commit_is_flushed_to_disk_before_it_gets_its_name(commits, monkeypatch):
    state, calls = state_of(commits, 1), []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(adapters.os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    commits.write(state, {})
    assert calls == ["fsync", "replace"]


def test_commits_of_another_recipe_or_other_data_are_refused(commits):
    commits.write(state_of(commits, 1), {"step": 1})
    with pytest.raises(CommitError, match=r"00001.json was written by another recipe, on other data, or by another version of this project \(fingerprint recipe-1, this run has recipe-2\)"):
        Commits(commits.folder, "recipe-2").latest()


def test_cleared_commits_are_gone_with_their_adapters(commits):
    commits.write(state_of(commits, 1), {"step": 1})
    commits.clear()
    assert commits.latest() is None and not commits.store.root.exists()


def test_a_commit_names_its_adapters_by_hash_and_holds_no_path(commits):
    commits.write(state_of(commits, 1, 2.0), {"step": 1})
    content = (commits.folder / "commits" / "00001.json").read_text()
    assert str(commits.folder) not in content
    assert json.loads(content)["state"]["adapters"]["selector"] == state_of(commits, 1, 2.0).adapters["selector"].hash


def test_an_adapter_whose_bytes_changed_is_refused_by_its_file(commits):
    state = state_of(commits, 1, 2.0)
    ref = state.adapters["selector"]
    data = bytearray(open(ref.path, "rb").read())
    data[-1] ^= 1
    open(ref.path, "wb").write(bytes(data))
    with pytest.raises(AdapterError, match=f"{ref!s} is damaged: the bytes of .*{ref.hash}"):
        commits.store.get(ref)
    assert commits.store.put({"a": torch.full((3,), 2.0)}) == ref
    assert torch.equal(commits.store.get(ref)["a"], torch.full((3,), 2.0)), "putting it again repairs it"
    os.unlink(ref.path)
    with pytest.raises(AdapterError, match="is missing: expected the file"):
        commits.store.get(ref)


def test_a_damaged_commit_is_named_and_the_way_back_is_said(commits):
    commits.write(state_of(commits, 0), {})
    commits.write(state_of(commits, 1, 1.0), {})
    damaged = commits.folder / "commits" / "00001.json"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(CommitError, match=r"00001.json is damaged: delete it"):
        commits.latest()
    damaged.unlink()
    assert commits.latest()[0].step == 0
