"""FIRM and FedCMOO-A through the flow: rewards ready before the rounds, measured beside accuracy, and nothing lost where a run is killed."""

import json
import random

import pytest
from mlflow import MlflowClient

from components.alignment.dpo import kl_to_reference
from components.models.policy import Policy
from components.recipes import load_recipe
from components.seeding import derive
from tasks.alignment import choose_prompts
from tests.flows.test_fed_rlhf import Workplace, result_of

OVERRIDES = [
    "federation.method=firm", "federation.options={objectives: {helpful: [helpful], clean: [clean]}, ppo: {minibatch: 2, epochs: 1, temperature: 0.6}, reward_prompts: 3}",
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


def test_the_last_kl_is_at_the_temperature_of_training(whole):
    recipe, (_, folder, _) = load_recipe("debug", OVERRIDES), whole
    prompts = [row["prompt"] for row in choose_prompts(folder / "prepared", "test", recipe.alignment.dpo.kl_prompts, recipe.seed)]
    policy = Policy(recipe.policy, "cpu", folder / "alignment" / "final")
    found, other = (kl_to_reference(policy, prompts, derive(recipe.seed, "dpo"), temperature)["kl_sequence"] for temperature in (0.6, 1.0))
    logged = json.loads((folder / "alignment" / "result.json").read_text())["metrics"]["kl_sequence"]
    assert logged == pytest.approx(found, rel=1e-3) and logged != pytest.approx(other, rel=1e-2)


def test_prompts_that_leave_no_room_are_refused_before_a_reward_is_trained(tmp_path):
    place = Workplace(tmp_path)
    process = place.start("--recipe", "debug", *OVERRIDES, "policy.max_prompt_tokens=8")
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0 and "max_prompt_tokens" in output.splitlines()[-1] and "reward helpful: accuracy" not in output


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
        logged = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "round/bytes_sent")}
        assert logged == {done: sum(sent[2 * done - 2 : 2 * done]) for done in range(1, 6)}, "a round's gradients and its adapters"
    place = Workplace(tmp_path)
    place.killed_after(random.Random(4).randrange(1, 4), "--recipe", "debug", *overrides)
    place.run("--resume", str(place.newest()))
    ours, theirs = result_of(place.newest()), result_of(folder)
    assert ours["adapters"]["policy"]["hash"] == theirs["adapters"]["policy"]["hash"] and ours["after"] == theirs["after"] and ours["last"] == theirs["last"]
