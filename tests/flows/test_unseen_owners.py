"""Clients that take part in no round, and clients that join or leave a stopped run, through the pipeline."""

import json

import pytest

from components.data.records import read_clients, read_pairs
from flows import fed_rlhf as flow
from tests.support.sources import write_jsonl

pytestmark = pytest.mark.long

CLUSTERS = [
    "federation.method=fedbiscuit",
    "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1}",
    "federation.rounds=4",
    "data.clients=6",
    "data.unseen_clients=2",
    "data.unseen_pairs=3",
]


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("unseen")


@pytest.fixture(scope="module")
def measured(place):
    return place.run(*CLUSTERS)


def test_unseen_clients_are_in_no_round_and_their_accuracy_is_in_every_report(measured):
    unseen = measured.federation.unseen
    names = set(read_clients(measured.folder / "prepared" / "unseen"))
    assert set(unseen.accuracy.clients) == names == set(unseen.own_pairs)
    assert set(unseen.own_pairs.values()) == {3}
    trained = {name for record in measured.federation.records for name in record.clients}
    assert len(names) == 2
    assert not names & trained
    assert not names & set(measured.federation.after.accuracy.clients)
    assert measured.metrics["unseen/accuracy/mean"] == pytest.approx(unseen.accuracy.mean)
    assert measured.metrics["unseen/accuracy/worst_tenth"] == min(unseen.accuracy.clients.values())
    assert measured.history(measured.mlflow_id, "unseen/accuracy/mean") == {4: unseen.accuracy.mean}
    assert "of 2 clients that took part in no round" in measured.summary
    assert "the selector with the least loss on at most 3 own pairs" in measured.summary
    assert f"client {min(names)}" in measured.summary
    assert not list((measured.folder / "federation" / "updates").glob("*.json"))


def test_a_run_stopped_before_this_measurement_resumes_with_the_same_bytes(place, measured):
    def end(*_):
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow.federation, "measure_unseen", end)
        place.fail(*CLUSTERS)
    stopped = place.newest()
    assert stopped.commits > 0
    assert not (stopped.folder / "federation" / "unseen.json").exists()
    resumed = place.resume(stopped)
    for name in ("federation/unseen.json", "federation/result.json"):
        assert (resumed.folder / name).read_bytes() == (measured.folder / name).read_bytes()


def test_unseen_clients_that_cannot_be_measured_end_a_run_before_its_rounds(place, tmp_path):
    splits = {"a": ("train", "test"), "b": ("train", "test"), "c": ("train", "validation")}
    own = [row | {"split": splits[row["client_id"]][n % 2]} for n, row in enumerate(rows("abc"))]
    path = write_jsonl(tmp_path / "pairs.jsonl", own)
    state, _ = place.fail(
        f"data={{source: jsonl, path: {path}, clients: null, max_equal: 1, unseen_clients: 1}}",
        "federation.clients_per_round=1",
        "federation.accuracy_split=validation",
    )
    assert "no unseen client has such pairs" in str(state.message)
    assert place.newest().commits == -1  # not even the initial state


# --- clients that join or leave


def rows(owners):
    """Pairs of each owner, as many of each."""
    return [
        {
            "prompt": f"Question {n} of {owner}?",
            "chosen": f"Yes {n}, says {owner}.",
            "rejected": f"No {n}{'!' * (n % 3)}",
            "client_id": owner,
        }
        for owner in owners
        for n in range(12)
    ]


@pytest.fixture(scope="module")
def stopped(place, tmp_path_factory):
    """A run on a file of owners, stopped within its rounds; and the file."""
    path = tmp_path_factory.mktemp("owners") / "pairs.jsonl"
    write_jsonl(path, rows("abc"))
    log_steps = flow.log_steps

    def end(target, records, start):
        if len(records) == 2:
            raise OSError("no space left on device")
        log_steps(target, records, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "log_steps", end)
        place.fail(
            "data={source: jsonl, path: " + json.dumps(str(path)) + ", clients: null, max_equal: 1}",
            "federation.clients_per_round=2",
        )
    return place.newest(), path


def test_a_resumed_run_names_who_joined_or_left_and_keeps_its_clients(place, stopped):
    run, path = stopped
    write_jsonl(path, rows("bcd"))
    resumed = place.resume(run)
    assert "since the run started: d joined and a left. The run goes on with its own copy" in resumed.output
    trained = {name for record in resumed.federation.records for name in record.clients}
    assert trained <= {"a", "b", "c"}
    assert {pair.client_id for pair in read_pairs(resumed.folder / "prepared" / "pairs.parquet")} == {*"abc"}
