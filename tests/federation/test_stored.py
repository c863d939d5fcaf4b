"""Folders of runs that were stopped within a round, as commit d32a20e wrote them, are still read.

`stored/` holds federations of the clients ada, bea and cyd, with 3, 1 and 2 training pairs. Their
adapters are two tensors of 2 x 2 values, and the training of client number n adds n / 7 to the values.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch

from components.federation.clients.private import PrivateStore, private_root
from components.federation.clients.worker import finished_update
from components.federation.commits import Commits
from components.federation.protocol import GradientJob, RewardsJob, ScoreJob, TrainJob
from tests.support.bound_methods import bind_method

STORED = Path(__file__).parent / "stored"
OPTIONS = {"selectors": 3, "warmup_rounds": 1, "regroup_every": 1}
INITIAL = torch.tensor([[1.0, -2.0], [0.5, 0.0]])


def read(run, method, **options):
    """The commits, the last state, the records, and the finished updates of the step that follows."""
    commits = Commits(run / "federation", "stored")
    bound = bind_method(commits.store, method, 2, rounds=6, **options)
    state, records = commits.latest(bound.memory_type)
    updates = {job.client: finished_update(job, commits.store) for job in bound.plan(state)}
    return commits, state, records, updates


def read_fedbiscuit(phase, run=None):
    return read(run or STORED / f"fedbiscuit-{phase}", "fedbiscuit", **OPTIONS)


def test_a_state_is_read_with_its_clients_adapters_memory_and_metrics():
    commits, state, _, _ = read_fedbiscuit("training")
    assert (state.round, state.phase, state.step, state.seed, state.logged_at) == (3, "train", 4, 11, 3)
    assert state.federation.weights == {"ada": 3 / 6, "bea": 1 / 6, "cyd": 2 / 6}
    assert [client.training_pairs for client in state.federation.clients] == [3, 1, 2]
    assert [client.validation_pairs for client in state.federation.clients] == [1, 1, 0]
    assert torch.equal(commits.store.get(state.federation.initial)["a"], INITIAL)
    trained = commits.store.get(state.adapters["selector-1"])
    torch.testing.assert_close(trained["a"], INITIAL + (3 / 5 * 1 + 2 / 5 * 3) / 7)
    assert sorted(state.adapters) == ["selector-0", "selector-1", "selector-2"]
    assert state.memory.assignment == {"ada": "selector-0", "bea": "selector-1", "cyd": "selector-2"}
    assert state.memory.grouped_at == 3
    assert state.memory.losses["ada"] == [0.25, 0.5, 1 / 3]
    assert state.memory.losses["bea"] == [math.inf, 0.1 + 0.2, 0.7]
    assert [math.isnan(loss) for loss in state.memory.losses["cyd"]] == [True, True, True]
    assert state.metrics.scalars["loss_of_group"] == 0.275


def test_the_records_of_all_steps_are_read():
    _, _, records, _ = read_fedbiscuit("training")
    assert [(record.step, record.round, record.phase) for record in records] == [
        (1, 0, "train"),
        (2, 1, "train"),
        (3, 2, "train"),
        (4, 3, "grouping"),
    ]
    assert records[0].clients["cyd"].adapter_name == "selector-0"
    assert records[0].clients["cyd"].traffic.received == 160
    assert records[0].clients["cyd"].metrics.series == {"loss_by_step": [0.1, 0.3]}
    assert records[3].clients["bea"].losses == [math.inf, 0.1 + 0.2, 0.7]


def test_finished_training_is_read_with_its_adapter_metrics_and_bytes():
    commits, state, _, updates = read_fedbiscuit("training")
    assert sorted(updates) == ["ada", "cyd"]
    start = commits.store.get(state.adapters["selector-2"])
    trained = commits.store.get(updates["cyd"].adapter)
    torch.testing.assert_close(trained["a"], start["a"] + 3 / 7)
    assert updates["cyd"].rows == 2
    assert updates["cyd"].metrics.scalars["loss"] == 1 / 3
    assert math.isnan(updates["cyd"].metrics.scalars["grad_norm"])
    assert updates["cyd"].traffic.model_dump() == {"received": 160, "sent": 160, "kept": 0}


def test_finished_training_of_a_cluster_is_aggregated_into_its_selector(tmp_path):
    shutil.copytree(STORED / "fedbiscuit-training", tmp_path / "run")
    commits, state, _, updates = read_fedbiscuit("training", tmp_path / "run")
    bound = bind_method(commits.store, "fedbiscuit", 2, rounds=6, **OPTIONS)
    new = bound.aggregate(state, list(updates.values()))
    assert new.adapters["selector-1"] == state.adapters["selector-1"]
    for adapter_name, client in {"selector-0": "ada", "selector-2": "cyd"}.items():
        trained = commits.store.get(updates[client].adapter)
        torch.testing.assert_close(commits.store.get(new.adapters[adapter_name]), trained)


def test_finished_scores_are_read_with_losses_that_are_not_finite():
    _, _, _, updates = read_fedbiscuit("grouping")
    assert list(updates["ada"].losses) == [0.25, 0.5, 1 / 3]
    assert list(updates["bea"].losses) == [math.inf, 0.1 + 0.2, 0.7]
    assert [math.isnan(loss) for loss in updates["cyd"].losses] == [True, True, True]
    assert {update.adapter for update in updates.values()} == {None}


def test_clients_continue_from_the_private_state_after_their_last_accepted_job():
    commits, state, _, updates = read(STORED / "fedpdpo", "fedpdpo")
    assert {name: update.traffic.kept for name, update in updates.items()} == {"bea": 88, "cyd": 88}
    for name, value in {"ada": 1.0, "bea": 2.0, "cyd": 6.0}.items():
        kept = PrivateStore(private_root(commits.folder), name).load(state.memory.job_keys[name])
        assert torch.equal(kept.tensors["head"], torch.full((2, 2), value))
        assert kept.numbers == {"scale": value / 3, "decay": 1.0}
        assert kept.size == 88


FIRST = "ab" * 32
SECOND = "cd" * 32


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (
            TrainJob(
                client="ada", round=3, seed=12345678901234567890, adapter_name="selector-0", adapter=FIRST
            ),
            "f8b61be16ec9edc88a87b607",
        ),
        (
            TrainJob(
                client="bea",
                round=0,
                seed=1,
                processing='{"kind":"clip"}',
                adapter=SECOND,
                previous_job_key="0123456789abcdef01234567",
                objective_weights=(0.1 + 0.2, 1.0),
            ),
            "a1f9562aecf9d674c42a1daa",
        ),
        (
            GradientJob(client="ada", round=1, seed=2, adapter=FIRST, previous_job_key="x"),
            "b841b626675b5d73cc01493b",
        ),
        (
            ScoreJob(client="né", round=1, seed=2, adapters=(FIRST, SECOND, FIRST)),
            "2848f6f39d0d9127da977fa5",
        ),
        (
            RewardsJob(client="", round=1, seed=2, name="rewards", adapter_name="policy", adapter=SECOND),
            "9cca1ff61c507cc4c50c85f3",
        ),
    ],
    ids=["train", "train-further", "gradients", "score", "measure"],
)
def test_the_key_of_a_job_is_that_of_earlier_versions(job, key):
    assert job.key() == key
