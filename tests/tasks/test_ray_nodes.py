"""The temporary folders with the files that clients on Ray are sent."""

import os
import tempfile

from tasks import ray_nodes
from tasks.ray_nodes import PREFIX


def test_folders_of_processes_that_have_ended_are_removed_on_their_node_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = 2**22 + 1  # above the largest id of a process
    kept = [f"{PREFIX}sender-here-{os.getpid()}", f"{PREFIX}sender-there-{ended}", f"{PREFIX}copy-here-x"]
    for name in [*kept, f"{PREFIX}sender-here-{ended}"]:
        (tmp_path / name / "prepared").mkdir(parents=True)
    ray_nodes._remove_abandoned_folders("here")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_the_folders_of_a_sender_are_removed_when_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("one-here-1", "one-here-2", "other-here-1"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    ray_nodes.remove_folders("one")
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}other-here-1"]
