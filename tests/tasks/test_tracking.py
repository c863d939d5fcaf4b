"""What MLflow holds of a run: equal values when logged twice, and adapters and policies to load."""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prefect.exceptions import TerminationSignal

from components.config.benchmark import Benchmark
from components.environment import PRIVATE_PREFECT
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy
from components.models.store import AdapterStore
from components.names import mlflow_key
from components.paths import tracking_uri
from components.recipes import load_recipe
from components.reporting.changes import find_changes
from components.reporting.claims import Finding
from components.results import ClientRecord, ClientTotal, Metrics, StepRecord, Traffic
from tasks.flow_runs import FlowRunLink
from tasks.runs import PHASES, contest_file, create_run, open_run
from tasks.tracking import run_tree
from tasks.tracking.client import RunLog, mlflow_client
from tasks.tracking.federate import FederationLog, client_rows, log_round_evaluation, log_steps, step_points
from tasks.tracking.phases import ALIAS, log_data, may_move_alias, register_policy, verdict_rows
from tasks.tracking.report import description, earlier_means, log_benchmark_report
from tasks.tracking.run_tree import PARENT_TAG, ending, open_run_tracking, phase_tracking
from tests.support import results
from tests.support.adapters import random_tensors
from tests.support.contests import LOSS, TIE, WIN, contest
from tests.support.preparation import preparation_report
from tests.support.recipes import with_section
from tests.support.results import round_evaluation

ODD = "after/accuracy/domain/a@b.org"
NIGHTLY = Benchmark(recipe="debug", seeds=[0], arms={"FedBis": []}, regressions={"accuracy": 0.02, ODD: 0.02})
LINK = FlowRunLink("flow-run", "http://127.0.0.1:4200/flow")


@pytest.fixture
def run(debug, tmp_path):
    return create_run(debug, tmp_path / "a-run")


@pytest.fixture
def client(mlflow_store):
    return mlflow_client()


@pytest.fixture
def parent(run, debug, client):
    return open_run_tracking.fn(run, debug, LINK)


@pytest.fixture
def phase(run, debug, parent):
    with phase_tracking(run, debug.tracking, "federate") as child:
        yield child


def client_record(loss, traffic=None, **series):
    scalars = {"loss": loss, "loss_first": 0.7, "loss_last": loss - 0.1, "tokens": 100, "seconds": 0.5}
    metrics = Metrics(scalars=scalars, series=series)
    return ClientRecord(adapter_name="selector", rows=8, metrics=metrics, traffic=traffic or Traffic())


def step_record(step, adapters=None, **fields):
    values = {
        "step": step,
        "round": step - 1,
        "phase": "train",
        "rounds_done": step,
        "logged_at": step,
        "clients": {"ada": client_record(0.7 / step), "bea": client_record(0.5)},
        "failed": {"cyd": "lost"},
        "refused": {},
        "adapters": adapters or {},
        "memory": {},
        "server": Metrics(scalars={"server_step": 0.1 * step, "odd": float("nan")}),
        "aggregation_seconds": 0.25,
    }
    return StepRecord(**values | fields)


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def records(store, random_adapter):
    """Records of three committed steps."""
    return [step_record(step, {"selector": store.put(random_adapter(step))}) for step in (1, 2, 3)]


@pytest.fixture
def target(phase, parent, debug, store):
    return FederationLog(phase, parent, debug, store, {})


def history(client, run_id, key):
    return sorted({(point.step, point.value) for point in client.get_metric_history(run_id, key)})


def logged_models(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    return {model.name: model for model in client.search_logged_models([experiment])}


def test_a_deleted_run_of_a_phase_is_restored_and_one_that_is_gone_is_made_again(run, debug, client, parent):
    with phase_tracking(run, debug.tracking, "federate") as first:
        client.log_metric(first, "loss", 0.5)
    client.delete_run(first)
    with phase_tracking(run, debug.tracking, "federate") as resumed:
        assert client.get_run(resumed).info.status == "RUNNING"
    assert resumed == first
    assert client.get_run(first).data.metrics == {"loss": 0.5}
    run.update_metadata(mlflow_phases={"federate": "0" * 32})
    with phase_tracking(run, debug.tracking, "federate") as child:
        assert child != "0" * 32
        assert client.get_run(child).data.tags["phase"] == "federate"


def test_a_run_has_a_parent_with_its_recipe_and_a_child_for_each_phase(run, debug, client):
    parent = open_run_tracking.fn(run, debug, LINK)
    children = {}
    for phase in PHASES:
        with phase_tracking(run, debug.tracking, phase) as child:
            children[phase] = child
            assert client.get_run(child).info.status == "RUNNING"
        assert client.get_run(child).info.status == "FINISHED"
    data = client.get_run(parent).data
    assert data.params["federation.rounds"] == "3"
    assert data.params["selector.lora.r"] == "2"
    assert data.tags["recipe"] == "debug"
    assert data.tags["prefect.flow_run_url"] == LINK.url
    assert data.tags["git.commit"]
    assert {client.get_run(child).data.tags["mlflow.parentRunId"] for child in children.values()} == {parent}
    assert len(set(children.values())) == 4
    note = client.get_run(children["align"]).data.tags["mlflow.note.content"]
    assert note.startswith(f"The phase align of [{run.id}](http://127.0.0.1:5000/")
    assert [info.path for info in client.list_artifacts(parent)] == ["recipe.yaml"]


def test_a_resumed_run_reopens_its_mlflow_runs_and_records_a_new_commit(run, debug, client, monkeypatch):
    def work(commit, flow_run):
        monkeypatch.setattr(run_tree, "git_commit", lambda: commit)
        parent = open_run_tracking.fn(run, debug, FlowRunLink(flow_run, None))
        with ending(run), phase_tracking(run, debug.tracking, "federate") as child:
            yield parent, child

    first = work("abc", "one")
    opened = next(first)
    with pytest.raises(ValueError, match="a fault"):
        first.throw(ValueError("a fault"))
    assert {client.get_run(run_id).info.status for run_id in opened} == {"FAILED"}
    second = work("def", "two")
    assert next(second) == opened
    assert {client.get_run(run_id).info.status for run_id in opened} == {"RUNNING"}
    assert client.get_run(opened[0]).data.tags["prefect.flow_run_id"] == "two"
    assert client.get_run(opened[0]).data.tags["git.commit"] == "def"
    assert run.metadata()["commits"] == ["abc", "def"]
    assert next(second, None) is None
    assert {client.get_run(run_id).info.status for run_id in opened} == {"FINISHED"}


def test_the_main_curves_are_at_the_parent_with_the_range_of_clients_and_all_else_at_the_phase(
    target, client, records
):
    log_steps(target, records, 0)
    parent = target.parent
    assert dict(history(client, parent, "server/server_step")) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert dict(history(client, parent, "train/loss"))[2] == pytest.approx((0.35 + 0.5) / 2)
    assert dict(history(client, parent, "train/loss_min")) == pytest.approx({1: 0.5, 2: 0.35, 3: 0.7 / 3})
    assert dict(history(client, parent, "train/loss_max")) == pytest.approx({1: 0.7, 2: 0.5, 3: 0.5})
    assert history(client, target.run_id, "round/failed") == [(1, 1), (2, 1), (3, 1)]
    names = [set(client.get_run(run_id).data.metrics) for run_id in (parent, target.run_id)]
    assert not names[0] & names[1]
    assert not [name for name in names[1] if "ada" in name]


def test_the_table_of_clients_has_a_row_for_each_client_of_each_step(records):
    rows = client_rows(records)
    assert [row["round"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert [row["client"] for row in rows] == ["ada", "bea"] * 3
    assert [row["loss"] for row in rows[2:4]] == [0.35, 0.5]
    assert [row["steps"] for row in rows] == [None] * 6


def test_a_measure_between_rounds_is_logged_with_its_scalars_and_its_series(target, client):
    evaluation = round_evaluation(2)
    measures = {"rewards": Metrics(scalars={"mean": 0.5}, series={"prompts": [0.25, 0.75]})}
    log_round_evaluation(target, evaluation.model_copy(update={"measures": measures}))
    assert history(client, target.parent, "accuracy/mean") == [(2, 0.6)]
    assert history(client, target.run_id, "rewards/mean") == [(2, 0.5)]
    assert history(client, target.run_id, "rewards/after_round_2/prompts") == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize(
    ("phase_name", "rounds_done", "names"),
    [
        ("train", 1, ["train/new_min", "train/new", "server/new"]),
        ("gradients", 0, ["gradients/clients/new_max", "gradients/clients/new", "gradients/new"]),
    ],
)
def test_a_number_that_no_built_in_method_has_is_logged(target, client, phase_name, rounds_done, names):
    metrics = Metrics(scalars={"new": 0.25})
    clients = {"ada": ClientRecord(adapter_name="", rows=8, metrics=metrics, traffic=Traffic())}
    record = step_record(1, phase=phase_name, rounds_done=rounds_done, clients=clients, server=metrics)
    log_steps(target, [record], 0)
    logged = client.get_run(target.run_id).data.metrics
    assert {name: logged.get(name) for name in names} == dict.fromkeys(names, 0.25)


def test_a_value_that_is_not_finite_is_not_logged(target, client, records):
    log_steps(target, records, 0)
    assert not any("odd" in key for key in client.get_run(target.run_id).data.metrics)


def test_the_series_of_the_server_continue_over_the_rounds(target, client):
    records = [
        step_record(1, server=Metrics(series={"noise": [0.5, 0.25]})),
        step_record(2, server=Metrics(series={"noise": [0.125]})),
    ]
    log_steps(target, records[:1], 0)
    log_steps(target, records, 1)
    assert history(client, target.run_id, "server/series/noise") == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_bytes_sent_in_a_round_are_summed_over_its_steps_and_bytes_kept_are_not(target, client):
    """Each step is logged alone, as in a run, and reads the earlier steps of its round."""
    traffic = Traffic(sent=5, received=2, kept=7)
    gradients = {
        "ada": ClientRecord(adapter_name="", rows=8, traffic=Traffic(sent=20, received=2, kept=7)),
        "bea": ClientRecord(adapter_name="", rows=6, traffic=Traffic(sent=20, received=2)),
    }
    records = [
        step_record(1, clients={"ada": client_record(0.7, traffic)}),
        step_record(
            2,
            phase="gradients",
            rounds_done=1,
            logged_at=2,
            clients=gradients,
            server=Metrics(scalars={"lambda/clean": 0.25}),
        ),
        step_record(3, round=1, rounds_done=2, logged_at=2, clients={"ada": client_record(0.7, traffic)}),
    ]
    for start in range(3):
        log_steps(target, records[: start + 1], start)
    expected = {
        "round/bytes_received": [(1, 2), (2, 6)],
        "round/bytes_kept": [(1, 7), (2, 7)],
        "gradients/lambda/clean": [(2, 0.25)],
    }
    assert {name: history(client, target.run_id, name) for name in expected} == expected
    assert history(client, target.parent, "round/bytes_sent") == [(1, 5), (2, 45)]


def test_steps_that_are_logged_twice_have_the_values_of_steps_logged_once(target, client, records):
    """A run killed between commit and logging logs its last step again when it is resumed."""
    for _ in range(2):
        log_steps(target, records, 0)
    assert len(logged_models(client, target.run_id)) == 3
    assert [step for step, _ in history(client, target.parent, "train/loss")] == [1, 2, 3]
    paths = sorted(info.path for info in client.list_artifacts(target.run_id, "rounds"))
    assert paths == [f"rounds/{step:05d}.json" for step in (1, 2, 3)]


@pytest.mark.parametrize("adapters", [["selector"], ["selector-0", "selector-1"]])
def test_accuracy_is_linked_to_the_adapter_of_its_round_and_its_data_if_there_is_one_adapter(
    target, client, store, random_adapter, adapters
):
    recipe = with_section(target.recipe, "federation", keep_every=1)
    data = {"dataset_name": "pairs", "dataset_digest": "0a1b"}
    target = replace(target, recipe=recipe, data=data)
    record = step_record(2, {name: store.put(random_adapter(2)) for name in adapters})
    log_steps(target, [record], 0)
    log_round_evaluation(target, round_evaluation(2))
    linked = [
        (metric.key, metric.step, metric.dataset_name, metric.dataset_digest, metric.run_id)
        for model in logged_models(client, target.run_id).values()
        for metric in model.metrics or []
        if metric.key == "accuracy/mean"
    ]
    expected = [("accuracy/mean", 2, "pairs", "0a1b", target.parent)]
    assert linked == (expected if len(adapters) == 1 else [])
    assert history(client, target.parent, "accuracy/mean") == [(2, 0.6)]


@pytest.mark.parametrize(("every", "rounds"), [(1, {1, 2, 3}), (2, {2, 3}), (5, {3})])
def test_adapters_are_logged_at_the_recipes_cadence_and_after_the_last_round(
    target, client, records, every, rounds
):
    recipe = with_section(target.recipe, "federation", keep_every=every)
    log_steps(replace(target, recipe=recipe), records, 0)
    assert set(logged_models(client, target.run_id)) == {f"selector-round-{number}" for number in rounds}


ODD_NAMES = ["ada@x.org", "O'Brien", "$\\bad{$", "日本語", 'a/b:c%d "q"', "n" * 300, "../up", "zoe`;rm", "."]


def test_the_adapters_of_clients_of_any_name_are_logged_once_under_names_that_mlflow_takes(
    target, client, records
):
    digest = records[0].adapters["selector"]
    record = records[0].model_copy(update={"adapters": dict.fromkeys(ODD_NAMES, digest)})
    for _ in range(2):  # as a run does that was stopped while it logged
        log_steps(target, [record], 0)
    models = logged_models(client, target.run_id)
    assert len(models) == len(ODD_NAMES)
    assert {model.tags["adapter"] for model in models.values()} == set(ODD_NAMES)


def test_a_logged_adapter_is_a_peft_folder_that_gives_the_logits_of_the_committed_one(
    target, client, records, tiny_selector, tmp_path
):
    import mlflow
    from peft import PeftModel

    log_steps(target, records, 0)
    model = logged_models(client, target.run_id)["selector-round-3"]
    assert model.tags["sha256"] == records[2].adapters["selector"]
    assert model.params["round"] == "3"
    mlflow.set_tracking_uri(tracking_uri())
    folder = mlflow.artifacts.download_artifacts(
        artifact_uri=model.artifact_location, dst_path=str(tmp_path / "downloaded")
    )
    loaded = PeftModel.from_pretrained(load_backbone(target.recipe.selector.backbone, "cpu"), folder)
    digest = records[2].adapters["selector"]
    tiny_selector.slot.load(target.store.get(digest))
    ids = torch.tensor([[50, 51, 52]])
    with torch.no_grad():
        expected = tiny_selector.model(input_ids=ids).logits
        assert torch.allclose(loaded.eval()(input_ids=ids).logits, expected, atol=1e-6)


def test_a_table_that_is_logged_twice_is_stored_once_and_beside_the_sqlite_file(phase, client, tmp_path):
    assert client.get_run(phase).info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())
    for _ in range(2):
        RunLog.open(phase).log_table([{"prompt": "a"}, {"prompt": "b"}], "generations.json")
    experiment = client.get_run(phase).info.experiment_id
    assert len(client.load_table(experiment, "generations.json", run_ids=[phase])) == 2


@pytest.fixture
def prepared_copy(prepared, run):
    """The run's prepared folder, with the files of a preparation that the shared fixture lacks."""
    folder = run.prepared
    shutil.copytree(prepared, folder)
    (folder / "docs").mkdir()
    (folder / "docs" / "index.html").write_text("docs")
    (folder / "report.json").write_text("{}")
    return folder


def test_the_data_are_logged_as_data_sets_of_the_parent_and_the_partition_at_the_phase(
    run, phase, parent, debug, client, prepared_copy
):
    log_data.fn(phase, run, debug, preparation_report())
    data = client.get_run(phase).data
    digest = hashlib.sha256((prepared_copy / "pairs.parquet").read_bytes()).hexdigest()
    inputs = {one.dataset.name: one for one in client.get_run(parent).inputs.dataset_inputs}
    assert set(inputs) == {"pairs", "prompts", "judge"}
    assert inputs["pairs"].dataset.digest == digest[:36]
    assert inputs["pairs"].dataset.source_type == debug.data.source
    assert [(tag.key, tag.value) for tag in inputs["pairs"].tags] == [("mlflow.data.context", "training")]
    expected = {
        "partition/clients": 4,
        "partition/std": 2.24,
        "partition_train/samples": 20,
        "rows/train": 20,
        "prompts/align": 3,
    }
    assert {name: data.metrics[name] for name in expected} == expected
    paths = {info.path for info in client.list_artifacts(phase, "data")}
    assert paths == {"data/clients.json", "data/report.json", "data/docs"}


@pytest.fixture
def registered(phase, debug, tmp_path):
    """A registered policy with a random adapter, and the adapter's PEFT folder."""
    slot = AdapterSlot(attach_lora(load_backbone(debug.policy.backbone, "cpu"), debug.policy.lora))
    adapter = random_tensors(slot, seed=0, scale=0.5)
    folder = export_adapter(adapter, debug.policy.lora, debug.policy.backbone, tmp_path / "final")
    return register_policy.fn(phase, debug, "debug-policy", folder), folder


class LoggedError(Exception):
    """Ends a registration once its files are read."""


def test_mlflow_finds_an_adapter_in_a_folder_whose_name_has_an_escape(phase, debug, tmp_path, monkeypatch):
    import mlflow

    folder = tmp_path / "lamps_feature%2Flamp" / "final"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    copies = tmp_path / "copies"
    copies.mkdir()

    def log_model(artifacts, **_):
        for uri in artifacts.values():
            mlflow.artifacts.download_artifacts(uri, dst_path=str(copies))
        raise LoggedError

    monkeypatch.setattr(mlflow.pyfunc, "log_model", log_model)
    with pytest.raises(LoggedError):
        register_policy.fn(phase, debug, "debug-policy", folder)
    files = {path.relative_to(copies).as_posix() for path in copies.rglob("*.json")}
    assert files == {"final/adapter_config.json", "policy.json"}


def test_the_alias_moves_with_runs_of_one_experiment_and_stays_for_others_and_benchmarks(
    run, phase, parent, debug, client, tmp_path
):
    assert may_move_alias(client, "model", phase)
    client.create_registered_model("model")
    version = client.create_model_version("model", tmp_path.as_uri(), run_id=phase)
    client.set_registered_model_alias("model", ALIAS, version.version)
    experiment = client.get_run(phase).info.experiment_id
    other = client.create_experiment("other")

    def child(experiment, **tags):
        return client.create_run(experiment, tags={PARENT_TAG: parent} | tags).info.run_id

    assert may_move_alias(client, "model", child(experiment, phase="align"))
    assert not may_move_alias(client, "model", child(other, phase="align"))
    assert not may_move_alias(client, "model", child(experiment))  # in a benchmark


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*An input example was not provided")
def test_a_registered_policy_loads_with_pyfunc_and_gives_the_policys_completions(
    registered, phase, debug, client, tmp_path
):
    import mlflow
    import pandas as pd

    (uri, version), folder = registered
    assert uri == "models:/debug-policy/1"
    assert version == "1"
    assert str(client.get_model_version_by_alias("debug-policy", "latest-aligned").version) == "1"
    assert client.get_run(phase).info.status == "RUNNING"

    prompts = ["a paper on cats", "another one"]
    answers = mlflow.pyfunc.load_model(uri).predict(pd.DataFrame({"prompt": prompts}))
    expected = [answer[0].text for answer in Policy(debug.policy, "cpu", folder).generate(prompts, seed=0)]
    base = [answer[0].text for answer in Policy(debug.policy, "cpu").generate(prompts, seed=0)]
    assert list(answers["completion"]) == expected
    assert expected != base
    assert all(expected)
    packed = mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "packed"))
    files = [path.name for path in Path(packed).rglob("*") if path.is_file()]
    assert not [name for name in files if name.endswith((".pkl", ".pt", ".bin", ".pickle"))]
    assert "adapter_model.safetensors" in files


LOAD = """
import sys, mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
import components
assert sys.argv[2] in components.__file__, components.__file__
print(model.predict(pandas.DataFrame({"prompt": ["a paper on cats"]}))["completion"][0])
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*An input example was not provided")
def test_a_registered_policy_keeps_its_backbone_in_the_users_cache(registered, debug, tmp_path):
    (uri, _), folder = registered
    artifacts = tmp_path / "mlartifacts"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    before = set(artifacts.rglob("*"))
    assert before
    variables = {"PATH", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"} & os.environ.keys()
    environment = {name: os.environ[name] for name in variables} | {"HOME": str(tmp_path / "user")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, uri, str(artifacts)],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
    )
    expected = Policy(debug.policy, "cpu", folder).generate(["a paper on cats"], seed=0)[0][0].text
    assert done.stdout == f"{expected}\n", done.stderr
    written = {path.name for path in set(artifacts.rglob("*")) - before if path.suffix != ".pyc"}
    assert written <= {"__pycache__", "registered_model_meta"}  # MLflow writes the latter
    assert list(elsewhere.iterdir()) == []
    cached = tmp_path / "user" / ".cache" / "fed-rlhf" / "backbone" / "tiny-random"
    assert (cached / "config.json").is_file()


def test_clients_of_the_recipe_are_parameters_under_names_that_mlflow_accepts(run, client):
    names = ["anna.o@example.com", "$\\bad{$", 'a/b:c%d "q"', "x" * 300, "研究者-一", ".."]
    owners = {name: [str(number)] for number, name in enumerate(names)}
    settings = ["data.source=jsonl", "data.path=pairs.jsonl", "data.options={}", "data.clients=null"]
    settings += ["data.partition=column", "data.column=domain", f"data.column_clients={json.dumps(owners)}"]
    recipe = load_recipe("debug", settings)
    params = client.get_run(open_run_tracking.fn(run, recipe, LINK)).data.params
    for name, values in owners.items():
        assert params[mlflow_key(f"data.column_clients.{name}")] == str(values)


def test_no_environment_variable_is_logged_as_a_parameter_or_a_tag(run, debug, client, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_word")
    data = client.get_run(open_run_tracking.fn(run, debug, LINK)).data
    assert "hf_secret_word" not in json.dumps([data.params, data.tags])
    assert "hf_secret_word" not in (run.folder / "recipe.yaml").read_text()


def test_metrics_of_any_client_or_domain_get_names_of_their_own_that_mlflow_accepts(client, phase):
    odd = [
        "accuracy/domain/",
        "accuracy/domain/all",
        "clients/c/0 é/loss",
        "clients/../loss",
        "clients/a%b/loss",
    ]
    names = [mlflow_key(name) for name in odd]
    assert len(set(names)) == len(odd)
    RunLog.open(phase).log_metrics(dict.fromkeys(odd, 1.0), 0)
    metrics = client.get_run(phase).data.metrics
    assert {name: metrics[name] for name in names} == dict.fromkeys(names, 1.0)
    names = [mlflow_key(f"clients/{'é' * 60}{end}/loss") for end in "ab"]
    assert max(len(name) for name in names) <= 250
    assert names[0] != names[1]
    RunLog.open(phase).log_metrics(dict.fromkeys(names, 1.0), 0)
    assert set(names) <= set(client.get_run(phase).data.metrics)


class Caused(RuntimeError):
    def __init__(self):
        self.__cause__ = TerminationSignal(signal=15)


def raise_in_handler(handled, error):
    try:
        raise handled
    except BaseException:
        raise error  # noqa: B904


@pytest.mark.parametrize(
    ("error", "handled", "status"),
    [
        (RuntimeError, ValueError, "FAILED"),
        (KeyboardInterrupt, ValueError, "KILLED"),
        (SystemExit, ValueError, "KILLED"),
        (RuntimeError, TerminationSignal(signal=15), "KILLED"),
        (Caused, ValueError, "KILLED"),
        (RuntimeError, asyncio.CancelledError, "FAILED"),  # of a request that took too long
    ],
)
def test_a_run_that_fails_or_is_stopped_ends_its_open_mlflow_runs(
    run, debug, client, parent, error, handled, status
):
    with phase_tracking(run, debug.tracking, "prepare") as done:
        pass
    with pytest.raises(error), ending(run), phase_tracking(run, debug.tracking, "federate") as child:
        raise_in_handler(handled, error)
    assert [client.get_run(run_id).info.status for run_id in (parent, child, done)] == [
        status,
        status,
        "FINISHED",
    ]


def test_a_benchmarks_claims_are_tags_with_their_intervals_whose_bounds_are_metrics(
    run, debug, client, tmp_path
):
    parent = open_run_tracking.fn(run, debug, LINK)
    decided = Finding(
        "A less B: summed above 0",
        "summed",
        0.0,
        "holds",
        0.2,
        0.1,
        0.25,
        "",
        "2 seeds x 3 clients",
        "-",
        "-",
    )
    unknown = Finding(
        "A: own above 0", "own", 0.0, "undecided", None, None, None, "not measured: A", "-", "-", "-"
    )
    (tmp_path / "report").mkdir()
    means = {"A": {"summed": 0.5}}
    log_benchmark_report.fn(parent, NIGHTLY, tmp_path / "report", means, [decided, unknown], [])
    data = client.get_run(parent).data
    note = data.tags["mlflow.note.content"]
    assert "/artifacts/report/report.html?workflowType=machine_learning" in note
    assert "- A less B: summed above 0: holds [0.100, 0.250]" in note
    assert data.tags["claim/1"] == "A less B: summed above 0: holds [0.100, 0.250]"
    assert data.tags["claim/2"] == "A: own above 0: undecided (not measured: A)"
    assert {name: value for name, value in data.metrics.items() if name.startswith("claim")} == {
        "claim/1/low": 0.1,
        "claim/1/high": 0.25,
    }


@pytest.fixture
def nights(debug, client, tmp_path):
    """A function that logs a finished run of a benchmark, and gives the id of its MLflow run."""
    (tmp_path / "report").mkdir()

    def log(number, plan, accuracy):
        run_id = open_run_tracking.fn(create_run(debug, tmp_path / f"night-{number}"), debug, LINK)
        means = {"FedBis": {"after/accuracy/mean": accuracy, ODD: accuracy / 2}}
        changes = find_changes(means, earlier_means(run_id, plan), {"accuracy": 0.02})
        log_benchmark_report.fn(run_id, plan, tmp_path / "report", means, [], changes)
        client.set_terminated(run_id)
        return run_id

    return log


def test_the_name_of_a_run_tells_its_method_and_seed_first_and_its_settings_last(
    debug, client, tmp_path, monkeypatch
):
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path))
    seeded = debug.model_copy(update={"seed": 1})
    run = open_run(seeded, ["federation.rounds=2", "seed=1"])
    run_id = open_run_tracking.fn(run, seeded, LINK)
    name = f"fedbis seed 1 {run.id} federation.rounds=2 seed=1"
    assert client.get_run(run_id).info.run_name == name
    long = open_run(debug, ["x=" + "9" * 500])
    assert len(run_tree.run_name(long, debug)) == 120


def test_the_name_of_an_arms_run_is_its_id_which_begins_with_the_arm_and_seed(debug, client, tmp_path):
    parent = open_run_tracking.fn(create_run(debug, tmp_path / "benchmark"), debug, LINK)
    run = create_run(debug, tmp_path / "FedBis-seed-0")
    run_id = open_run_tracking.fn(run, debug, LINK, parent)
    assert client.get_run(run_id).info.run_name == "FedBis-seed-0"


def test_a_benchmark_is_compared_with_its_last_finished_runs_of_the_same_arms_and_seeds(nights, client):
    longer = NIGHTLY.model_copy(update={"seeds": [0, 1]})
    first, *_ = nights(1, NIGHTLY, 0.7), nights(2, longer, 0.9), nights(3, NIGHTLY, 0.8)
    client.set_terminated(nights(4, NIGHTLY, 0.1), "FAILED")
    last = nights(5, NIGHTLY, 0.6)
    assert [run["FedBis"] for run in earlier_means(last, NIGHTLY)] == [
        {"after/accuracy/mean": 0.8, ODD: 0.4},
        {"after/accuracy/mean": 0.7, ODD: 0.35},
    ]
    assert earlier_means(first, NIGHTLY) == []
    assert client.get_run(last).data.tags["regressions"] == (
        "FedBis, pair accuracy: 0.600 instead of 0.750 (median of 2 earlier runs)"
    )
    assert client.get_run(first).data.tags["regressions"] == "none"


def test_the_description_of_a_run_has_links_to_its_report_its_phases_and_prefect(run, phase, monkeypatch):
    run.update_metadata(flow_run_url=LINK.url)
    run.report.mkdir()
    figures = {"before/accuracy/mean": 0.5, "after/accuracy/mean": 0.75}
    (run.report / "metrics.json").write_text(json.dumps(figures), encoding="utf-8")
    text = description(run, "a summary")
    assert text.startswith("accuracy 0.500 -> 0.750\n")
    assert "report/report.html?workflowType=machine_learning" in text
    assert f"/runs/{phase}?workflowType=machine_learning)" in text
    assert "[flow run](http://127.0.0.1:4200/flow)" in text
    assert text.endswith("a summary\n```")
    monkeypatch.setenv(PRIVATE_PREFECT, "1")
    assert "[flow run, after `make prefect-ui`](http://127.0.0.1:4200/flow)" in description(run, "a summary")


def test_the_table_of_verdicts_has_both_answers_the_better_one_and_the_judges_reasons(tmp_path):
    rows = [
        {
            "prompt_id": name,
            "prompt": f"prompt {name}",
            "references": ["human text"],
            "base": {"text": "short"},
            "aligned": {"text": "long"},
        }
        for name in "ab"
    ]
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    texts = [
        ("a", "long", "short", "why"),
        ("a", "short", "long", "why not"),
        ("b", "long", "short", "other"),
    ]
    written = [
        {"prompt": f"Answer: prompt {name}", "response_1": first, "response_2": second, "text": text}
        for name, first, second, text in texts
    ]
    (tmp_path / "judgements.json").write_text(json.dumps(written))
    contest([WIN, LOSS], prompts="ab").write(contest_file(tmp_path, "aligned_vs_base"))
    contest([TIE], prompts="a").write(contest_file(tmp_path, "base_vs_human"))
    table = verdict_rows(tmp_path, ["aligned_vs_base", "base_vs_human"])
    assert [row["better"] for row in table] == ["aligned", "base policy", "tie"]
    assert [row["ours"] for row in table] == ["long", "long", "short"]
    assert [row["theirs"] for row in table] == ["short", "short", "human text"]
    assert [row["ours first"] for row in table] == ["why", "other", ""]
    assert [row["theirs first"] for row in table] == ["why not", "", ""]


def test_a_step_that_records_totals_has_no_range_over_clients_and_the_same_means_and_bytes():
    losses = {"ada": 1.0, "bea": 3.0}
    clients = {name: results.client_record({"loss": loss}, sent=5, kept=2) for name, loss in losses.items()}
    known = results.step_record(clients=clients)
    unknown = results.step_record(total=ClientTotal.of(list(clients.values())))
    points, totals = ({name: value for name, value, _ in step_points([one])} for one in (known, unknown))
    assert {**totals, "train/loss_min": 1.0, "train/loss_max": 3.0} == points
    assert (totals["train/loss"], totals["round/participants"]) == (2.0, 2)
    assert (totals["round/bytes_sent"], totals["round/bytes_kept"]) == (10, 4)
    assert client_rows([unknown]) == []
    assert client_rows([known, unknown]) == [], "of some steps they would be taken for the whole"
