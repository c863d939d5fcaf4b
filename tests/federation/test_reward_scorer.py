"""Scores of a client's training pairs by a reward, which stay with the client."""

from unittest import mock

import numpy as np
import pytest

from components.data.records import read_clients
from components.federation.clients.reward_scorer import RewardScorer
from components.federation.clients.worker import run_job
from components.federation.protocol import PairSums, ScorePairsJob
from components.federation.transport import InProcessTransport
from components.models.rewards.function import FunctionReward
from components.recipes import load_recipe
from tasks.rewards import score_pairs
from tasks.runs import Run

REWARD = "rewards={length: {kind: function, name: 'tests.support.reward_functions:score_length'}}"
PPO = ["federation.method=feddpo", "federation.options={objective: {kind: ppo}}", "policy.lora.dropout=0"]


@pytest.fixture
def scorer():
    return RewardScorer(load_recipe("debug", [REWARD, *PPO]), "cpu")


@pytest.fixture
def loads():
    """The calls by which rewards are loaded."""
    load = FunctionReward.load_pair_scorer
    with mock.patch.object(FunctionReward, "load_pair_scorer", autospec=True, side_effect=load) as calls:
        yield calls


def job(fingerprint):
    return ScorePairsJob(client="ada", round=0, seed=0, reward="length", fingerprint=fingerprint)


def test_a_client_keeps_its_scores_and_sends_sums(scorer, contexts, debug):
    update = run_job(job("one"), scorer, contexts, debug)
    context = contexts.open("ada")
    rows = context.rows("train")
    lengths = np.array([[len(row.chosen), len(row.rejected)] for row in rows])
    assert np.array_equal(context.pair_scores(rows, "length"), lengths)
    margins = lengths[:, 0] - lengths[:, 1]
    right = (margins > 0).sum() + 0.5 * (margins == 0).sum()
    assert PairSums.model_validate(update.output) == PairSums(
        pairs=len(rows), right=right, margin=margins.sum()
    )
    assert update.adapter is None


def test_pairs_are_scored_again_where_the_reward_or_the_pairs_are_others(scorer, contexts, loads):
    scorer.run(job("one"), contexts.open("ada"))
    assert RewardScorer(scorer._recipe, "cpu").run(job("one"), contexts.open("ada")).rows == 8
    assert loads.call_count == 1, "the scores were kept"
    RewardScorer(scorer._recipe, "cpu").run(job("other"), contexts.open("ada"))
    assert loads.call_count == 2
    path = contexts.open("ada").store.folder / "scores" / "length.json"
    path.write_text(path.read_text().replace(contexts.open("ada").rows("train")[0].pair_id, "gone"))
    RewardScorer(scorer._recipe, "cpu").run(job("other"), contexts.open("ada"))
    assert loads.call_count == 3
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_the_sums_of_all_clients_are_asked_for_once(scorer, contexts, tmp_path, prepared):
    (tmp_path / "prepared").symlink_to(prepared)
    run = Run("run", tmp_path)

    class Asked(InProcessTransport):
        steps = 0

        def run(self, jobs):
            Asked.steps += 1
            return super().run(jobs)

    transport = Asked(scorer._recipe, contexts)
    figures = score_pairs(run, scorer._recipe, "length", transport)
    assert figures["pairs"] == sum(splits["train"] for splits in read_clients(prepared).values())
    assert 0 <= figures["accuracy"] <= 1
    assert score_pairs(run, scorer._recipe, "length", transport) == figures
    assert Asked.steps == 1
