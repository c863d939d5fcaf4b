"""An owner's folder of a run: the files that it is sent, and those that it keeps."""

import hashlib
import stat

import pytest

from components.federation.clients.worker import update_path
from components.federation.protocol import TrainJob, Update
from components.owners.codec import CodecError, OwnerRequest
from components.owners.run_folder import OwnerRunFolder
from components.results import Traffic


@pytest.fixture
def folder(tmp_path):
    return OwnerRunFolder(tmp_path / "home" / "runs" / "run-1")


def request(files, *jobs):
    return OwnerRequest(
        run="run-1",
        recipe={},
        exchange="federation",
        pairs="prepared/pairs.parquet",
        jobs=jobs,
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )


def receive(folder, files, *jobs):
    """Let the folder receive files; those that it has asked for."""
    contents = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
    asked = []

    def fetch(digests):
        asked.extend(digests)
        return [contents[digest] for digest in digests]

    folder.receive(request(files, *jobs), fetch)
    return sorted(contents[digest] for digest in asked)


def test_a_file_is_sent_once_and_replaced_where_it_changes(folder):
    one = {"prepared/pairs.parquet": b"rows", "inputs/a/file": b"same", "inputs/b/file": b"same"}
    assert receive(folder, one) == [b"rows", b"same"]
    assert receive(folder, one) == []
    two = one | {"prepared/pairs.parquet": b"other rows"}
    assert receive(folder, two) == [b"other rows"]
    for name, data in two.items():
        assert (folder.folder / name).read_bytes() == data


def test_what_only_earlier_requests_have_named_is_removed_and_private_stores_are_kept(folder):
    receive(folder, {"federation/adapters/old.safetensors": b"old", "prepared/pairs.parquet": b"rows"})
    private = folder.folder / "federation-clients" / "ada" / "state.json"
    private.parent.mkdir(parents=True)
    private.write_text("{}")
    receive(folder, {"federation/adapters/new.safetensors": b"new", "prepared/pairs.parquet": b"rows"})
    assert {path.name for path in (folder.folder / "federation" / "adapters").iterdir()} == {
        "new.safetensors"
    }
    assert len(list((folder.folder / "files").iterdir())) == 2
    receive(folder, {"inputs/other/file": b"other"})
    assert not (folder.folder / "prepared" / "pairs.parquet").exists(), "it was another name of the file"
    assert private.is_file()


def test_the_answers_to_the_requests_jobs_are_kept_and_others_are_removed(folder):
    jobs = [TrainJob(client="ada", round=number, seed=0, adapters=("a" * 64,)) for number in range(2)]
    store = folder.contexts(request({})).adapters
    store.root.mkdir(parents=True)
    for job in jobs:
        data = f"adapter of round {job.round}".encode()
        update = Update(
            job=job.key(), client="ada", rows=1, traffic=Traffic(received=0, sent=0), losses=[0.5]
        )
        update_path(job, store).parent.mkdir(exist_ok=True)
        update_path(job, store).write_text(update.model_dump_json())
        store.path(hashlib.sha256(data).hexdigest()).write_bytes(data)
    receive(folder, {}, jobs[1])
    assert [path.name for path in (store.root.parent / "updates").iterdir()] == [f"{jobs[1].key()}.json"]
    assert list(store.root.iterdir()) == [], "no update names them"


def test_nobody_else_can_read_it(folder):
    receive(folder, {"prepared/pairs.parquet": b"rows"})
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.folder / "prepared" / "pairs.parquet").stat().st_mode) == 0o600


def test_a_file_with_other_bytes_than_its_name_says_is_refused(folder):
    wanted = request({"prepared/pairs.parquet": b"rows"})
    with pytest.raises(CodecError, match="has not the hash"):
        folder.receive(wanted, lambda digests: [b"others"])
    assert not (folder.folder / "prepared").exists()
