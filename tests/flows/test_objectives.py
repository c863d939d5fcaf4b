"""FIRM and FedCMOO-A through the flow: rewards ready before the rounds, measured beside accuracy, and nothing lost where a run is killed."""

import json
import random

import pytest
from mlflow import MlflowClient

from tests.flows.test_fed_rlhf import Workplace, result_of

OVERRIDES = [
    "federation.method=firm", "federation.options={objectives: {helpful: [helpful], clean: [clean]}, ppo: {minibatch: 2, epochs: 1}, reward_prompts: 3}",
    "rewards={helpful: {kind: trained, template: '{prompt}|{response}', max_length: 96, training: {backbone: {name: tiny-random}, steps: 4}}, clean: {kind: function, name: clean}}",
    "federation.clients_per_round=3", "federation.batch_size=4", "federation.local_steps=2", "federation.rounds=5", "federation.evaluate_every=2", "policy.max_new_tokens=8",
    "policy.lora={r: 2, alpha: 4, dropout: 0.0}", "runtime={cpu_workers: 2, torch_threads: 2}", "seed=3", "evaluation.judge.kind=reward", "evaluation.judge.options={reward: helpful}"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("objectives")).finished("--recipe", "debug", *OVERRIDES)


def test_rewards_are_trained_before_the_rounds_and_the_policy_is_measured_by_them(whole):
    _, folder, output = whole
    result = result_of(folder)
    for moment in ("before", "after"):
        found = result[moment]["objectives"]
        assert found == json.loads((folder / "federation" / f"rewards-{moment}.json").read_text()) and found["prompts"] == 3 and {"helpful", "clean", "kl"} <= set(found)
    assert result["before"]["objectives"]["kl"] == pytest.approx(0, abs=1e-5) and result["after"]["objectives"] != result["before"]["objectives"]
    assert output.index("reward helpful: accuracy") < output.index("round 1 of 5") and "Rewards on 3 held-out prompts" in output and "KL to the reference (nats)" in output
    assert result["adapters"].keys() == {"policy"} and not result["personal"] and not result["private"]
    assert "judge: reward model, tiny-random, all layers, trained centrally" in output and "judge: training step" not in output     # it is the one of the objective


def test_weights_rewards_and_disagreement_are_metrics(whole):
    place, folder, _ = whole
    client = MlflowClient(place.tracking)
    run = next(r for e in client.search_experiments() for r in client.search_runs([e.experiment_id]) if r.data.tags.get("phase") == "federate")
    name = next(iter(result_of(folder)["records"][0]["clients"]))
    history = client.get_metric_history(run.info.run_id, f"clients/{name}/lambda/helpful")
    assert all(0 <= metric.value <= 1 for metric in history) and len(history) == sum(name in record["clients"] for record in result_of(folder)["records"])
    assert {"server/lambda_drift", "server/update_drift", "rewards/helpful", "rewards/clean", "rewards/kl", f"clients/{name}/bytes_kept"} <= run.data.metrics.keys()
    assert sorted(metric.step for metric in client.get_metric_history(run.info.run_id, "rewards/clean")) == [0, 2, 4, 5]
    assert {"federation/objectives.png", "federation/weights.png"} <= {found.path for found in client.list_artifacts(run.info.run_id, "federation")}


@pytest.mark.parametrize("method", ["firm", "fedcmoo"])
def test_killed_within_the_rounds_it_ends_with_the_same_bytes(whole, tmp_path, method):
    _, folder, _ = whole
    overrides = [setting.replace("method=firm", f"method={method}") for setting in OVERRIDES]
    if method != "firm":
        (tmp_path / "whole").mkdir()
        other = Workplace(tmp_path / "whole")
        other.run("--recipe", "debug", *overrides)
        folder = other.newest()
        sent = [sum(metrics["bytes_sent"] for metrics in record["clients"].values()) for record in result_of(folder)["records"]]
        client = MlflowClient(other.tracking)
        run = next(r for e in client.search_experiments() for r in client.search_runs([e.experiment_id]) if r.data.tags.get("phase") == "federate")
        for name, wanted in (("gradients/bytes_sent", sent[::2]), ("round/bytes_sent", sent[1::2])):
            assert {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)} == dict(enumerate(wanted, 1))
    place = Workplace(tmp_path)
    place.killed_after(random.Random(4).randrange(1, 4), "--recipe", "debug", *overrides)
    place.run("--resume", str(place.newest()))
    ours, theirs = result_of(place.newest()), result_of(folder)
    assert ours["adapters"]["policy"]["hash"] == theirs["adapters"]["policy"]["hash"] and ours["after"] == theirs["after"] and ours["last"] == theirs["last"]
