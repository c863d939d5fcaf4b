"""What MLflow holds of a run: logged once or twice it is the same, and adapters and policies can be opened from it."""

import json
from pathlib import Path

import pytest
import torch

from components.models.adapters import AdapterStore, export_adapter
from tasks import tracking
from tasks.runs import claim_folder


@pytest.fixture
def run(debug, tmp_path):
    return claim_folder(debug, tmp_path / "a-run")


@pytest.fixture
def client(mlflow_store):
    return tracking.mlflow_client()


@pytest.fixture
def phase(run, debug, client):
    tracking.open_tracking.fn(run, debug, "flow-run", "http://127.0.0.1:4200/flow")
    return tracking.open_phase.fn(run, debug, "federate")


@pytest.fixture
def steps(tmp_path, random_adapter):
    """Three committed steps' records, and the store of their adapters."""
    store, records = AdapterStore(tmp_path / "adapters"), []
    for step in (1, 2, 3):
        values = {"loss": 0.7 / step, "loss_first": 0.7, "loss_last": 0.6 / step, "gradient_norm": 1.0, "tokens": 100, "seconds": 0.5}
        records.append({
            "step": step, "round": step - 1, "phase": "train", "rounds_done": step, "clients": {"ada": values, "bea": values | {"loss": 0.5}}, "failed": {"cyd": "lost"}, "refused": {},
            "server": {"server_step": 0.1 * step, "odd": float("nan")}, "adapters": {"selector": store.put(random_adapter(step)).hash}})
    return records, store


def history(client, run_id, key):
    return sorted({(m.step, m.value) for m in client.get_metric_history(run_id, key)})


def models(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    return {m.name: m for m in client.search_logged_models([experiment])}


def test_a_run_has_a_parent_with_its_recipe_and_a_child_for_each_phase(run, debug, client):
    parent = tracking.open_tracking.fn(run, debug, "flow-run", "http://127.0.0.1:4200/flow")
    children = {phase: tracking.open_phase.fn(run, debug, phase) for phase in ("prepare", "federate", "align", "evaluate")}
    data = client.get_run(parent).data
    assert data.params["federation.rounds"] == "3" and data.params["selector.lora.r"] == "2"
    assert data.tags["recipe"] == "debug" and data.tags["prefect.flow_run_url"] == "http://127.0.0.1:4200/flow" and data.tags["git.commit"]
    assert {client.get_run(child).data.tags["mlflow.parentRunId"] for child in children.values()} == {parent} and len(set(children.values())) == 4
    assert [info.path for info in client.list_artifacts(parent)] == ["recipe.yaml"]


def test_a_resumed_run_takes_its_mlflow_runs_up_again_and_notes_a_new_commit(run, debug, client, monkeypatch):
    monkeypatch.setattr(tracking, "git_commit", lambda: "abc")
    first = tracking.open_tracking.fn(run, debug, "one", None), tracking.open_phase.fn(run, debug, "federate")
    for run_id in first:
        tracking.close_run.fn(run_id, "FAILED")
    monkeypatch.setattr(tracking, "git_commit", lambda: "def")
    second = tracking.open_tracking.fn(run, debug, "two", None), tracking.open_phase.fn(run, debug, "federate")
    assert first == second and all(client.get_run(r).info.status == "RUNNING" for r in second)
    assert client.get_run(first[0]).data.tags["prefect.flow_run_id"] == "two"
    assert client.get_run(first[0]).data.tags["git.commit"] == "def" and run.notes()["commits"] == ["abc", "def"]
    tracking.close_run.fn(first[0])
    assert client.get_run(first[0]).info.status == "FINISHED"


def test_the_step_of_a_metric_is_the_round_and_clients_are_series_of_one_run(phase, debug, client, steps):
    records, store = steps
    tracking.log_steps.fn(phase, debug, records, store.root, {})
    assert dict(history(client, phase, "server/server_step")) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert dict(history(client, phase, "clients/ada/loss")) == pytest.approx({1: 0.7, 2: 0.35, 3: 0.7 / 3})
    assert dict(history(client, phase, "train/loss"))[2] == pytest.approx((0.35 + 0.5) / 2)
    assert history(client, phase, "round/failed") == [(1, 1), (2, 1), (3, 1)]
    assert not any("odd" in key for key in client.get_run(phase).data.metrics), "what is not a number is left out"


def test_what_is_sent_in_a_round_is_the_sum_over_its_steps_and_what_is_kept_is_not(phase, debug, client, steps):
    (first, second, _), store = steps
    moved = {"bytes_sent": 5, "bytes_received": 2, "bytes_kept": 7}
    first |= {"clients": {"ada": first["clients"]["ada"] | moved}}
    asked = first | {"step": 2, "round": 1, "phase": "gradients", "clients": {"ada": {"bytes_sent": 20, "bytes_received": 2, "bytes_kept": 7}, "bea": {"bytes_sent": 20, "bytes_received": 2}}, "server": {"lambda/clean": 0.25}}
    second |= {"step": 3, "clients": {"ada": second["clients"]["ada"] | moved}}
    for start in (0, 1, 2):     # the last step is logged with those of its round before it, though they are not logged again
        tracking.log_steps.fn(phase, debug, [first, asked, second], store.root, {}, start)
    assert history(client, phase, "clients/ada/bytes_sent") == [(1, 5), (2, 25)] and history(client, phase, "clients/ada/bytes_kept") == [(1, 7), (2, 7)]
    assert history(client, phase, "round/bytes_sent") == [(1, 5), (2, 45)] and history(client, phase, "round/bytes_received") == [(1, 2), (2, 6)]
    assert history(client, phase, "round/bytes_kept") == [(1, 7), (2, 7)] and history(client, phase, "gradients/lambda/clean") == [(2, 0.25)]


def test_logging_the_same_steps_twice_changes_nothing(phase, debug, client, steps):
    """A run that was killed between commit and logging logs the step when it is resumed, and may have done so before."""
    records, store = steps
    for _ in range(2):
        tracking.log_steps.fn(phase, debug, records, store.root, {})
    assert len(client.search_logged_models([client.get_run(phase).info.experiment_id])) == 3
    assert [step for step, _ in history(client, phase, "train/loss")] == [1, 2, 3]
    assert sorted(info.path for info in client.list_artifacts(phase, "rounds")) == [f"rounds/0000{i}.json" for i in (1, 2, 3)]


@pytest.mark.parametrize(("every", "rounds"), [(1, {1, 2, 3}), (2, {2, 3}), (5, {3})])
def test_adapters_are_logged_at_the_recipes_cadence_and_the_last_one_always(phase, debug, client, steps, every, rounds):
    records, store = steps
    recipe = debug.model_copy(update={"federation": debug.federation.model_copy(update={"keep_every": every})})
    tracking.log_steps.fn(phase, recipe, records, store.root, {})
    assert set(models(client, phase)) == {f"selector-round-{r}" for r in rounds}


def test_a_logged_adapter_is_a_peft_folder_that_opens_and_answers_as_the_committed_one(phase, debug, client, steps, tiny_selector, tmp_path):
    import mlflow
    from peft import PeftModel

    from components.models.backbone import load_backbone

    records, store = steps
    tracking.log_steps.fn(phase, debug, records, store.root, {})
    model = models(client, phase)["selector-round-3"]
    assert model.tags["sha256"] == records[2]["adapters"]["selector"] and model.params["round"] == "3"
    mlflow.set_tracking_uri(tracking.tracking_uri())
    folder = mlflow.artifacts.download_artifacts(artifact_uri=model.artifact_location, dst_path=str(tmp_path / "got"))
    opened = PeftModel.from_pretrained(load_backbone(debug.selector.backbone, "cpu"), folder).eval()
    tiny_selector.slot.load(store.get(store.ref(records[2]["adapters"]["selector"])))
    ids = torch.tensor([[50, 51, 52]])
    with torch.no_grad():
        assert torch.allclose(opened(input_ids=ids).logits, tiny_selector.model(input_ids=ids).logits, atol=1e-6)


def test_artifacts_lie_beside_the_sqlite_store(phase, client, tmp_path):
    assert client.get_run(phase).info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


def test_a_table_that_was_logged_is_not_doubled(phase, client):
    for _ in range(2):
        tracking.log_table(client, phase, {"prompt": ["a", "b"], "raw": ["c", "d"]}, "generations.json")
    assert len(client.load_table(client.get_run(phase).info.experiment_id, "generations.json", run_ids=[phase])) == 2


def test_the_data_are_logged_with_their_hashes_and_the_partition(phase, client, prepared, tmp_path):
    import hashlib
    import shutil

    folder = tmp_path / "prepared"
    shutil.copytree(prepared, folder)
    (folder / "docs").mkdir()
    (folder / "docs" / "index.html").write_text("docs")
    for name in ("partition.png", "report.json"):
        (folder / name).write_text("{}")
    report = {"partition": {"clients": 4, "std": 2.24}, "partition_train": {"samples": 20}, "splits": {"train": 20}, "rows": {"prompts": {"align": 3}}}
    tracking.log_data.fn(phase, folder, report)
    found = client.get_run(phase).data
    assert found.tags["data.sha256.pairs.parquet"] == hashlib.sha256((folder / "pairs.parquet").read_bytes()).hexdigest()
    logged = {"partition/clients": 4, "partition/std": 2.24, "partition_train/samples": 20, "rows/train": 20, "prompts/align": 3}
    assert {name: found.metrics[name] for name in logged} == logged
    assert {info.path for info in client.list_artifacts(phase, "data")} == {"data/partition.png", "data/clients.json", "data/report.json", "data/docs"}


@pytest.mark.filterwarnings("ignore:.*An input example was not provided")
def test_a_registered_policy_loads_with_pyfunc_and_generates_what_the_policy_does(phase, debug, client, tmp_path):
    import mlflow
    import pandas as pd

    from components.models.adapters import AdapterSlot, attach
    from components.models.backbone import load_backbone
    from components.models.policy import Policy

    slot, numbers = AdapterSlot(attach(load_backbone(debug.policy.backbone, "cpu"), debug.policy.lora)), torch.Generator().manual_seed(0)
    adapter = {n: 0.5 * torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)}
    folder = export_adapter(adapter, debug.policy.lora, "tiny-random", tmp_path / "final")
    registered = tracking.register_policy.fn(phase, debug, folder)
    assert registered["model_uri"] == "models:/debug-policy/1"
    assert str(client.get_model_version_by_alias("debug-policy", "latest-aligned").version) == registered["version"] == "1"
    assert client.get_run(phase).info.status == "RUNNING"

    prompts = ["a paper on cats", "another one"]
    answers = mlflow.pyfunc.load_model(registered["model_uri"]).predict(pd.DataFrame({"prompt": prompts}))
    expected = [c[0].text for c in Policy(debug.policy, "cpu", folder).generate(prompts, seed=0)]
    plain = [c[0].text for c in Policy(debug.policy, "cpu").generate(prompts, seed=0)]
    assert list(answers["completion"]) == expected != plain and all(expected)
    packed = mlflow.artifacts.download_artifacts(registered["model_uri"], dst_path=str(tmp_path / "packed"))
    files = [p.name for p in Path(packed).rglob("*") if p.is_file()]
    assert not [name for name in files if name.endswith((".pkl", ".pt", ".bin", ".pickle"))] and "adapter_model.safetensors" in files


def test_no_environment_variable_reaches_parameters_or_tags(run, debug, client, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_word")
    parent = tracking.open_tracking.fn(run, debug, "flow-run", None)
    data = client.get_run(parent).data
    assert "hf_secret_word" not in json.dumps([data.params, data.tags]) and "hf_secret_word" not in (run.folder / "recipe.yaml").read_text()


def test_metrics_of_any_client_or_domain_get_a_name_that_mlflow_takes(client, phase):
    odd = ["accuracy/domain/", "clients/c/0 é/loss", "clients/c/0 è/loss", "clients/../loss", "clients/a%b/loss"]
    names = [tracking.metric_name(name) for name in odd]
    assert len(set(names)) == len(odd) and names[0] == "accuracy/domain/all"
    tracking.log_metrics.fn(phase, dict.fromkeys(odd, 1.0))
    assert {name: client.get_run(phase).data.metrics[name] for name in names} == dict.fromkeys(names, 1.0)


def test_a_failed_run_closes_its_open_phases_as_failed_too(run, client, phase):
    tracking.close_failed.fn(run)
    notes = run.notes()
    assert {client.get_run(r).info.status for r in (phase, notes["mlflow_run_id"])} == {"FAILED"}
