"""Whole runs whose owners are processes: the bytes of runs on threads, also when processes are killed."""

import time
from contextlib import suppress

import psutil
import pytest

PRIVATE = [
    "federation.method=fedpdpo",
    "federation.options={bottleneck: {width: 4}, reward_head: {width: 3}}",
    "federation.rounds=3",
    "alignment.dpo.kl_prompts=1",
    "policy.max_new_tokens=4",
]
PROCESSES = ["runtime.transport=processes", "runtime.retries=9", "runtime.cpu_workers=2"]
MOMENTS = 5

pytestmark = [pytest.mark.long, pytest.mark.pipeline]


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("owners")


@pytest.fixture(scope="module")
def on_threads(place):
    return place.run(*PRIVATE)


def private_files(run, *roots):
    """The files of the private stores of a run's clients by their path within the folder of stores."""
    found = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for root in roots
        for path in root.rglob("*")
        if path.is_file()
    }
    assert found, run.folder
    return found


def assert_same(run, on_threads):
    for name in ("federation/result.json", "alignment/result.json", "evaluation/result.json"):
        assert (run.folder / name).read_bytes() == (on_threads.folder / name).read_bytes(), name
    assert run.hashes == on_threads.hashes
    own = (run.folder / "owners").glob("*/runs/*/federation-clients")
    stores = private_files(run, *own)
    errors = {name for name in stores if "/errors/" in name}
    expected = private_files(on_threads, on_threads.folder / "federation-clients")
    assert {name: data for name, data in stores.items() if name not in errors} == expected


def owners_processes(process):
    """The processes of owners of a run's process, which are children of its host."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for host in psutil.Process(process.pid).children():
            if "components.owners.host" in host.cmdline():
                found += host.children()
    return found


def test_a_run_with_processes_has_the_bytes_of_one_on_threads(place, on_threads):
    run = place.run(*PRIVATE, *PROCESSES)
    assert_same(run, on_threads)
    assert not (run.folder / "federation-clients").exists(), "the server has no private store"


def test_owners_processes_that_are_killed_change_nothing(place, on_threads):
    process = place.start(*PRIVATE, *PROCESSES)
    killed = []
    while process.poll() is None and len(killed) < MOMENTS:
        for worker in owners_processes(process)[:1]:
            time.sleep(0.1 * len(killed))
            with suppress(psutil.NoSuchProcess):  # it has made room for another owner's
                worker.kill()
                killed.append(worker.pid)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert len(killed) == MOMENTS
    assert_same(place.newest(output), on_threads)


def test_a_flow_that_is_killed_with_or_without_its_owners_ends_with_the_same_bytes(place, on_threads):
    run = None
    for moment in range(MOMENTS):
        process = place.start(*([*PRIVATE, *PROCESSES] if run is None else ["resume", run.folder.name]))
        workers = []
        while not workers and process.poll() is None:
            workers = owners_processes(process)
            time.sleep(0.02)
        time.sleep(0.3 * moment)
        process.kill()
        for worker in workers if moment % 2 else []:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        process.communicate()
        run = run or place.newest()
    resumed = place.resume(run)
    assert_same(resumed, on_threads)
