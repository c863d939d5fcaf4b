"""FedPDPO, whose clients have private modules, through the whole pipeline."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

OVERRIDES = [
    "federation.method=fedpdpo",
    "federation.options={personal: {lr: 1e-2}, bottleneck: {width: 4}, reward_head: {width: 3}}",
    "federation.clients_per_round=3",
    "federation.rounds=3",
    "federation.local_steps=4",
    "federation.evaluate_every=2",
    "evaluation.preference_pairs=6",
]


@pytest.fixture(scope="module")
def complete(new_workplace):
    return new_workplace("private").run(*OVERRIDES)


@pytest.fixture
def clients(complete):
    return set(complete.federation.outcome.job_keys)


def tensor_names(path):
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def test_the_rounds_end_with_a_shared_adapter_and_clients_are_measured_with_private_modules(
    complete, clients
):
    outcome = complete.federation.outcome
    assert (outcome.own, outcome.has_client_policies) == ("modules", False)
    assert list(outcome.adapters) == ["policy"]
    assert list(complete.federation.adapters) == ["policy"]
    assert len(clients) == 4
    result = complete.federation
    assert result.before.accuracy.margin == pytest.approx(0, abs=1e-4)
    assert abs(result.after.accuracy.margin) > 1e-4
    assert "each client's own model from the server's adapter, on its own pairs" in complete.summary


def test_clients_are_measured_by_log_likelihood_and_reward_head_and_answer_round_robin(complete, clients):
    accuracy = complete.federation.after.accuracy
    assert accuracy.by_metric.keys() == {"summed", "per_token", "explicit"}
    assert accuracy.by_metric["summed"].clients.keys() == clients
    for line in ("by log-likelihood, summed", "by log-likelihood per token", "by the reward head"):
        assert line in complete.summary, line
    assert complete.metrics["after/accuracy/summed/worst"] == accuracy.by_metric["summed"].worst
    assert {row["aligned"]["client_id"] for row in complete.answers} == clients
    assert all("client_id" not in row["base"] for row in complete.answers)
    assert set(complete.evaluation.implicit_reward.clients) <= clients


def test_no_private_module_is_outside_the_clients_stores_or_in_mlflow(complete, tmp_path):
    stored = list(complete.client_stores.rglob("*.safetensors"))
    modules = set()
    for path in stored:
        modules.update(name.split(".")[0] for name in tensor_names(path))
    assert modules == {"head", "bottleneck", "reward"}
    for run in complete.mlflow_runs():
        (tmp_path / run.info.run_id).mkdir()
        complete.mlflow.download_artifacts(run.info.run_id, "", str(tmp_path / run.info.run_id))
    files = [*complete.folder.rglob("*.safetensors"), *tmp_path.rglob("*.safetensors")]
    public = [path for path in files if complete.client_stores not in path.parents]
    assert len(public) > 5
    for path in public:
        assert all(".lora_" in name for name in tensor_names(path)), path


@pytest.mark.parametrize("kind", ["sent", "received", "kept"])
def test_bytes_are_metrics_by_round_and_in_the_table_of_clients(complete, kind):
    federate = complete.phase_run("federate").info.run_id
    run = complete.mlflow_id if kind == "sent" else federate
    totals = {
        record.rounds_done: sum(getattr(update.traffic, kind) for update in record.clients.values())
        for record in complete.federation.records
    }
    assert complete.history(run, f"round/bytes_{kind}") == totals
    assert min(totals.values()) > 0
    table = json.loads(Path(complete.mlflow.download_artifacts(federate, "clients.json")).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    by_round = {n: sum(row[kind] for row in rows if row["round"] == n) for n in totals}
    assert by_round == totals


def test_losses_of_private_modules_and_accuracies_at_the_rounds_of_the_recipe_are_metrics(complete):
    names = {"train/personal/loss", "train/scale", "train/decay"}
    assert names <= complete.phase_run("federate").data.metrics.keys()
    federate = complete.phase_run("federate")
    names = {"accuracy/summed/mean", "accuracy/explicit/worst"}
    assert names <= federate.data.metrics.keys()
    assert list(complete.history(federate.info.run_id, "accuracy/summed/mean")) == [0, 2, 3]
