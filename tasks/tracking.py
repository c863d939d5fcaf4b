"""Tasks that log to MLflow, by a client bound to a run's id.

One parent run per flow run, one child per phase (prepare, federate, align, evaluate); the step of a metric is the
round. MLflow's active run is thread-local, so nothing here relies on it: everything names its run. Logging the same
step twice writes the same values, so a resumed run may log again what a killed one did.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from components.config import Recipe
from components.data.records import read_rows
from components.federation.clients import trained_model
from components.federation.strategy import build_strategy
from components.models.adapters import AdapterStore, export_adapter
from tasks.runs import PROJECT, Run, file_hash, git_commit, read_json
from tasks.uncached import task

PARENT = "mlflow.parentRunId"
PHASES = ("prepare", "federate", "align", "evaluate")


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file of the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{PROJECT / 'mlflow.db'}"


def artifact_root() -> Path:
    """Where artifacts lie: mlartifacts/ beside the SQLite file; a server named by MLFLOW_TRACKING_URI decides for itself."""
    uri = tracking_uri()
    return (Path(uri.removeprefix("sqlite:///")).resolve().parent if uri.startswith("sqlite:///") else PROJECT) / "mlartifacts"


def mlflow_client() -> Any:
    """A client of the tracking store, whose registry is in the same place."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri(), registry_uri=tracking_uri())


@task()
def open_tracking(run: Run, recipe: Recipe, flow_run_id: str | None, flow_run_url: str | None, parent: str | None = None) -> str:
    """The parent MLflow run of a flow run: made at the first time, taken up again when the run is resumed.

    As a part of a benchmark, whose MLflow run is its parent, it is one run for all of its phases.
    """
    client = mlflow_client()
    run.note(flow_run_id=flow_run_id, flow_run_url=flow_run_url)
    run.note_commit(commit := git_commit())
    notes = run.notes()
    tags = {"prefect.flow_run_id": flow_run_id or "", "prefect.flow_run_url": flow_run_url or "", "git.commit": commit, "fed_rlhf.run": run.id,
            "recipe": recipe.name, "method": recipe.federation.method, "fed_rlhf.folder": str(run.folder)}
    if is_known(notes.get("mlflow_run_id")):
        run_id = notes["mlflow_run_id"]
        client.update_run(run_id, status="RUNNING")
        for key, value in tags.items():
            client.set_tag(run_id, key, value)
        return run_id
    tags |= {PARENT: parent} if parent else {}
    run_id = client.create_run(_experiment(client, recipe.tracking.experiment), run_name=run.id, tags=tags).info.run_id
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, str(value)[:500]) for key, value in _flat(recipe.model_dump(mode="json"))])
    client.log_artifact(run_id, str(run.folder / "recipe.yaml"))
    run.note(mlflow_run_id=run_id, mlflow_phases=dict.fromkeys(PHASES, run_id) if parent else {})
    return run_id


@task()
def open_benchmark_tracking(run: Run, recipe: Recipe, flow_run_id: str | None, flow_run_url: str | None) -> str:
    """The MLflow run of a benchmark, in the experiment of its recipe: made at the first time, taken up again afterwards."""
    client = mlflow_client()
    tags = {"prefect.flow_run_id": flow_run_id or "", "prefect.flow_run_url": flow_run_url or "", "git.commit": git_commit(), "recipe": recipe.name, "fed_rlhf.folder": str(run.folder)}
    known = run.notes().get("mlflow_run_id")
    if is_known(known):
        client.update_run(known, status="RUNNING")
        for key, value in tags.items():
            client.set_tag(known, key, value)
        return known
    run_id = client.create_run(_experiment(client, recipe.tracking.experiment), run_name=run.id, tags=tags).info.run_id
    client.log_artifact(run_id, str(run.folder / "benchmark.yaml"))
    run.note(mlflow_run_id=run_id)
    return run_id


def is_known(run_id: str | None) -> bool:
    """Whether the tracking store has a run, so that it can be taken up again."""
    from mlflow.exceptions import MlflowException

    try:
        return run_id is not None and mlflow_client().get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException:
        return False


@task()
def tag_reused(run_id: str, run: Run) -> None:
    """Say at the parent run which phases were not done again, and in which run each was done before."""
    notes = run.notes()
    for phase, done_in in notes.get("reused", {}).items():
        if phase not in notes["mlflow_phases"]:
            mlflow_client().set_tag(run_id, f"reused.{phase}", done_in)


@task(task_run_name="open phase {phase}")
def open_phase(run: Run, recipe: Recipe, phase: str) -> str:
    """The child run of a phase: made at the first time, taken up again afterwards."""
    client = mlflow_client()
    notes = run.notes()
    phases = notes.get("mlflow_phases", {})
    if phase in phases:
        client.update_run(phases[phase], status="RUNNING")
        return phases[phase]
    tags = {PARENT: notes["mlflow_run_id"], "phase": phase, "fed_rlhf.run": run.id}
    child = client.create_run(_experiment(client, recipe.tracking.experiment), run_name=f"{run.id}/{phase}", tags=tags).info.run_id
    run.note(mlflow_phases=phases | {phase: child})
    return child


@task(task_run_name="close tracking {status}")
def close_run(run_id: str, status: str = "FINISHED") -> None:
    """End a run: FINISHED, FAILED or KILLED."""
    mlflow_client().set_terminated(run_id, status)


@task(task_run_name="close phase {phase_id}")
def close_phase(run: Run, phase_id: str) -> None:
    """End the run of a phase; in a benchmark the phases share the run of the arm, which goes on."""
    if phase_id != run.notes()["mlflow_run_id"]:
        mlflow_client().set_terminated(phase_id, "FINISHED")


@task()
def close_failed(run: Run) -> None:
    """End a run, and those of its phases that are still open, as FAILED."""
    client, notes = mlflow_client(), run.notes()
    for run_id in {*notes.get("mlflow_phases", {}).values(), notes["mlflow_run_id"]}:
        if run_id == notes["mlflow_run_id"] or client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "FAILED")


@task()
def log_metrics(run_id: str, metrics: dict[str, float], step: int = 0) -> None:
    """Log numbers at a step; what is not a finite number is left out."""
    log_numbers(mlflow_client(), run_id, [(name, value, step) for name, value in metrics.items()])


@task()
def log_data(run_id: str, prepared: Path, report: dict[str, Any]) -> None:
    """Log the partition (counts, picture, Data Docs) and the hashes of the prepared files."""
    client = mlflow_client()
    for name in ("pairs.parquet", "prompts.parquet", "judge.parquet"):
        client.set_tag(run_id, f"data.sha256.{name}", file_hash(prepared / name))
    for name in ("partition.png", "clients.json", "report.json"):
        client.log_artifact(run_id, str(prepared / name), "data")
    client.log_artifacts(run_id, str(prepared / "docs"), "data/docs")
    numbers = {f"{name}/{k}": v for name in ("partition", "partition_train", "margins") for k, v in report.get(name, {}).items()}
    numbers |= {f"rows/{k}": v for k, v in report["splits"].items()} | {f"prompts/{k}": v for k, v in report["rows"]["prompts"].items()}
    log_numbers(client, run_id, [(name, value, 0) for name, value in numbers.items()])


BYTES = ("bytes_received", "bytes_sent", "bytes_kept")
"""Of a client in a round, all its steps together: the adapter files that it is sent and sends; and what stays in its own store after it."""


@task()
def log_steps(run_id: str, recipe: Recipe, records: list[dict[str, Any]], store: Path, known: dict[str, str | None], start: int = 0) -> None:
    """Log committed steps: numbers of each client and their means, who failed or was refused, and the server's adapters.

    Args:
        run_id: the federate phase.
        recipe: its `keep_every` says which rounds' adapters are logged; the last round's always are.
        records: as committed, from the first on: what is sent in a round is the sum over its steps.
        store: the adapter store.
        known: the clients' groups where the source knows them, by client.
        start: how many of them are logged already.
    """
    client = mlflow_client()
    for place, record in enumerate(records[start:], start):
        step = record["rounds_done"]
        client.log_dict(run_id, record, f"rounds/{record['step']:05d}.json")
        if record["phase"] == "group":
            _log_grouping(client, run_id, record, known)
            continue
        if record["phase"] == "gradients":  # of the round that its training will end
            log_numbers(client, run_id, [(f"gradients/{key}", value, step + 1) for key, value in record["server"].items()])
            continue
        carried = _bytes_of_round(records[: place + 1])
        of_objectives = sorted({key for values in record["clients"].values() for key in values if key.partition("/")[0] in ("lambda", "score") or key in ("kl", "kl_coefficient")})
        numbers = [(f"clients/{name}/{key}", values[key], step) for name, values in record["clients"].items()
                   for key in ("loss", "gradient_norm", "seconds", "own/loss", "scale", *of_objectives) if key in values]
        numbers += [(f"clients/{name}/{key}", value, step) for name, values in carried.items() for key, value in values.items()]
        for key in ("loss", "loss_first", "loss_last", "gradient_norm", "tokens", "seconds", "own/loss", "scale", "decay", "excluded", *of_objectives):
            values = [v[key] for v in record["clients"].values() if key in v]
            if values:
                numbers.append((f"train/{key}", sum(values) / len(values), step))
        numbers += [(f"server/{key}", value, step) for key, value in record["server"].items()]
        numbers += [("round/participants", len(record["clients"]), step), ("round/failed", len(record["failed"]), step), ("round/refused", len(record["refused"]), step)]
        numbers += [("round/aggregation_seconds", record["seconds"], step)] if "seconds" in record else []
        numbers += [(f"round/{key}", sum(v[key] for v in carried.values() if key in v), step) for key in BYTES if any(key in v for v in carried.values())]
        log_numbers(client, run_id, numbers)
        if "graph" in record.get("memory", {}):
            _log_graph(client, run_id, record, known)
        if step == recipe.federation.rounds or step % recipe.federation.keep_every == 0:
            adapters = AdapterStore(store)
            for name, digest in record["adapters"].items():
                log_adapter(client, run_id, recipe, adapters, name, digest, step)


def _bytes_of_round(records: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """BYTES of each client, by its name, in the round of the last record; of a client that took part in some of its steps, those."""
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record["round"] == records[-1]["round"]:
            for name, values in record["clients"].items():
                own = found.setdefault(name, {})
                own |= {key: values[key] + (own.get(key, 0) if key != "bytes_kept" else 0) for key in BYTES if key in values}
    return found


def _log_grouping(client: Any, run_id: str, record: dict[str, Any], known: dict[str, str | None]) -> None:
    """Log a grouping: its sizes, moves and failures, the adjusted Rand index where the true groups are known, the losses as a table and a heat map."""
    from components.evaluation.plots import loss_heatmap
    from components.federation.grouping import rand_index

    step, assigned = record["rounds_done"], record["assigned"]
    losses = {name: values["losses"] for name, values in record["clients"].items()}
    numbers = dict(record["server"]) | {"failed": len(record["failed"])}
    if any(known.values()):
        numbers["adjusted_rand_index"] = rand_index(assigned, known)
    log_numbers(client, run_id, [(f"grouping/{name}", value, step) for name, value in numbers.items()])
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / f"{record['step']:05d}.png"
        loss_heatmap(list(record["adapters"]), losses, assigned, known, picture)
        client.log_artifact(run_id, str(picture), "grouping")


def _log_graph(client: Any, run_id: str, record: dict[str, Any], known: dict[str, str | None]) -> None:
    """Log a client graph: node-link JSON, its pictures, and how much of the clients' aggregation is with their own group where that is known."""
    from components.evaluation.plots import client_graph_picture
    from components.federation.graph import own_group_share

    memory = record["memory"]
    client.log_dict(run_id, memory["graph"], f"graphs/{record['step']:05d}.json")
    if any(known.values()):
        shares = own_group_share(memory["weights"], known)
        log_numbers(client, run_id, [(f"graph/{name}", value, record["rounds_done"]) for name, value in shares.items()])
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / f"{record['step']:05d}.png"
        client_graph_picture(memory["graph"], memory["tree"], memory["weights"], known, picture)
        client.log_artifact(run_id, str(picture), "graphs")


@task()
def log_federation(run_id: str, recipe: Recipe, folder: Path) -> None:
    """Log accuracies before and after, the learning curves, of several objectives the rewards and every client's weights, and the final selectors."""
    from components.evaluation.benchmark import objectives_curve, weights_curves
    from components.evaluation.objective_pictures import objectives_picture, weights_picture
    from components.evaluation.plots import accuracy_picture, learning_curves
    from tasks.reporting import accuracy_metrics, measured_objectives

    client, result = mlflow_client(), read_json(folder / "result.json")
    for moment, step in (("before", 0), ("after", result["rounds"])):
        log_numbers(client, run_id, [(name, value, step) for name, value in accuracy_metrics(result[moment]).items()])
    learning_curves(result["records"], folder / "learning-curves.png")
    accuracy_picture(result["before"], result["after"], folder / "accuracy.png")
    names = ["learning-curves.png", "accuracy.png", "result.json"]
    if measured := measured_objectives(folder, result):
        objectives_picture({recipe.federation.method: {recipe.seed: objectives_curve(measured, result["records"])}}, folder / "objectives.png")
        weights_picture({recipe.federation.method: weights_curves(result["records"])}, folder / "weights.png")
        names += ["objectives.png", "weights.png"]
    for name in names:
        client.log_artifact(run_id, str(folder / name), "federation")
    client.log_artifacts(run_id, str(folder / "final"), "federation/adapters")


@task()
def log_alignment(run_id: str, recipe: Recipe, folder: Path) -> None:
    """Log TRL's curves, the KL to the named reference, the labelled pairs as a table, and the adapter of each epoch; what a method has of these."""
    client, result = mlflow_client(), read_json(folder / "result.json")
    client.set_tag(run_id, "dpo.reference", result["reference"])
    client.set_tag(run_id, "model_uri", result["model_uri"])
    log_numbers(client, run_id, [
        (f"dpo/{name}", value, int(entry["step"])) for entry in result["history"] for name, value in entry.items() if name != "step"])
    numbers = {"align": result["metrics"], "sampling": result.get("sampling", {}), "labelling": result.get("labelling", {})}
    log_numbers(client, run_id, [(f"{group}/{name}", value, 0) for group, values in numbers.items() for name, value in values.items()])
    for path in [*result["checkpoints"], result["adapter"]]:
        client.log_artifacts(run_id, path, f"adapters/{Path(path).name}")
    if not (folder / "pairs.parquet").is_file():
        return
    rows = read_rows(folder / "pairs.parquet").to_list()[:100]
    log_table(client, run_id, {key: [row[key] for row in rows] for key in ("prompt_id", "prompt", "chosen", "rejected", "label", "margin")}, "labelled_pairs.json")


@task()
def log_evaluation(run_id: str, folder: Path) -> None:
    """Log win rates, consistency, ROUGE, AlpacaEval's figures, the judge's own, those of the questions, and sample generations as tables."""
    from tasks.reporting import accuracy_metrics, question_figures

    client, result = mlflow_client(), read_json(folder / "result.json")
    numbers = [(f"{contest}/{name}", value, 0) for contest, values in result["contests"].items() for name, value in values.items()]
    numbers += [(f"rouge/{policy}/{kind}", value, 0) for policy, values in result["rouge"].items() for kind, value in values.items()]
    numbers += [(f"judge/{name.removeprefix('judge_')}", value, 0) for name, value in result["judge_figures"].items()]
    numbers += [(f"answers/{name}", value, 0) for name, value in result["answers"].items()]
    annotated = result.get("alpaca_eval")
    if annotated:
        numbers += [(f"alpaca_eval/{contest}/{name}", value, 0) for contest, values in annotated["contests"].items() for name, value in values.items()]
        client.set_tag(run_id, "alpaca_eval", annotated["annotator"])
        client.log_artifacts(run_id, str(folder / "alpaca_eval"), "evaluation/alpaca_eval")
    for policy, figures in result.get("questions", {}).items():
        numbers += [(f"questions/{policy}/{name}/{key}", value, 0) for name, values in question_figures(figures).items() for key, value in values.items()]
    log_numbers(client, run_id, numbers)
    if "questions" in result:
        client.log_artifacts(run_id, str(folder / "questions"), "evaluation/questions")
        log_table(client, run_id, _question_columns(folder / "questions", result["questions"]), "question_answers.json")
    if "implicit_reward" in result:
        log_numbers(client, run_id, [(name.replace("accuracy", "implicit_reward", 1), value, 0) for name, value in accuracy_metrics(result["implicit_reward"]).items()])
    for point in result.get("curve", []):
        log_numbers(client, run_id, [(f"reward_hacking/{name}", point[name], point["step"]) for name in ("proxy", "judge")])
    if "curve" in result:
        client.log_artifact(run_id, str(folder / "reward-hacking.png"), "evaluation")
    client.set_tag(run_id, "judge", result["judge"])
    for name in ("result.json", "judgements.json"):
        if (folder / name).is_file():
            client.log_artifact(run_id, str(folder / name), "evaluation")
    rows = read_json(folder / "answers.json")
    columns = {"prompt": [row["prompt"] for row in rows], "raw": [row["raw"]["text"] for row in rows], "aligned": [row["aligned"]["text"] for row in rows],
               "human": [row["references"][0] if row["references"] else "" for row in rows]}
    for contest, verdicts in result["verdicts"].items():
        columns[contest] = [verdicts.get(row["prompt_id"], "") for row in rows]
    log_table(client, run_id, columns, "generations.json")


def _question_columns(folder: Path, answered: dict[str, Any]) -> dict[str, list]:
    """The greedy answers of the policies to the same questions, side by side."""
    rows = {policy: [row for name in figures["sets"] for row in read_json(folder / f"{policy}-{name}.json")] for policy, figures in answered.items()}
    columns = {key: [row[key] for row in next(iter(rows.values()))] for key in ("set", "id", "question", "key")}
    for policy, given in rows.items():
        columns |= {policy: [row["text"] for row in given], f"{policy} answer": [row["answer"] or "" for row in given]}
        columns |= {f"{policy} client": [row["client_id"] for row in given]} if "client_id" in given[0] else {}
    return columns


@task()
def log_report(run_id: str, folder: Path) -> None:
    """Log the run's headline figures and its report at the parent run."""
    client = mlflow_client()
    log_numbers(client, run_id, [(name, value, 0) for name, value in _flat(read_json(folder / "metrics.json"))])
    client.log_artifacts(run_id, str(folder), "report")


def log_adapter(client: Any, run_id: str, recipe: Recipe, store: AdapterStore, name: str, digest: str, step: int) -> None:
    """Log an adapter as an MLflow model that holds PEFT's own files, once for each (run, step, name)."""
    from mlflow.entities import LoggedModelOutput

    experiment = client.get_run(run_id).info.experiment_id
    label = f"{name}-round-{step}"
    known = client.search_logged_models([experiment], filter_string=f"name = '{label}' AND source_run_id = '{run_id}'")
    if any(str(model.status).upper().endswith("READY") for model in known):
        return
    trained = trained_model(recipe, build_strategy(recipe.federation, store).trains)
    model = client.create_logged_model(
        experiment, name=label, source_run_id=run_id, model_type="adapter", tags={"sha256": digest},
        params={"backbone": trained.backbone.name, "layers": str(trained.backbone.layers or "all"), "round": str(step)})
    with tempfile.TemporaryDirectory() as scratch:
        export_adapter(store.get(store.ref(digest)), trained.lora, trained.backbone.name, Path(scratch))
        client.log_model_artifacts(model.model_id, scratch)
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])


def log_table(client: Any, run_id: str, columns: dict[str, list], file: str) -> None:
    """Log a table that the MLflow UI shows; one that is there already stays, for MLflow would append the rows again."""
    if file not in {info.path for info in client.list_artifacts(run_id)}:
        client.log_table(run_id, columns, file)


@task()
def register_policy(run_id: str, recipe: Recipe, adapter: Path) -> dict[str, str]:
    """Register the aligned policy as a model version that `mlflow.pyfunc.load_model` loads and that generates.

    The model holds the adapter, the recipe's policy section and this project's components; the backbone is had by
    name when it is loaded, as everywhere in the project.
    """
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    from components.models.policy import is_personal

    mlflow.set_tracking_uri(tracking_uri())
    mlflow.set_registry_uri(tracking_uri())
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run_id):
        policy = Path(scratch) / "policy.json"
        policy.write_text(json.dumps(recipe.policy.model_dump(mode="json")), encoding="utf-8")
        logged = mlflow.pyfunc.log_model(
            name="policy", python_model=str(PROJECT / "tasks" / "policy_model.py"), artifacts={"adapter": str(adapter), "policy": str(policy)},
            code_paths=[str(PROJECT / "components")], pip_requirements=_requirements(recipe),
            signature=ModelSignature(inputs=Schema([ColSpec("string", name) for name in ("prompt", *(["client_id"] if is_personal(adapter) else []))]), outputs=Schema([ColSpec("string", "completion")])))
    client, name = mlflow_client(), recipe.tracking.registered_model
    with contextlib.suppress(MlflowException):  # it is there already
        client.create_registered_model(name)
    version = client.create_model_version(name, logged.model_uri, run_id=run_id, model_id=logged.model_id, tags={"recipe": recipe.name}).version
    client.set_registered_model_alias(name, "latest-aligned", version)
    client.update_run(run_id, status="RUNNING")  # leaving start_run() above has ended it
    return {"model_uri": f"models:/{name}/{version}", "version": str(version)}


def _experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    location = None if tracking_uri().startswith("http") else (artifact_root() / name.replace("/", "-")).as_uri()
    try:
        return client.create_experiment(name, artifact_location=location)
    except MlflowException:  # another run made it in the meantime
        return client.get_experiment_by_name(name).experiment_id


def metric_name(name: str) -> str:
    """A name that MLflow takes for any client or domain: other characters by their code point, an empty part as 'all'."""
    parts = (re.sub(r"[^A-Za-z0-9_. :-]", lambda odd: f"_u{ord(odd[0]):x}_", part) for part in name.split("/"))
    return "/".join("_" + part if set(part) == {"."} else part or "all" for part in parts)


def log_numbers(client: Any, run_id: str, numbers: list[tuple[str, Any, int]]) -> None:
    """Log (name, value, step) triples in batches; what is not a finite number is left out."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [Metric(metric_name(name), float(value), now, step) for name, value, step in numbers if isinstance(value, int | float) and math.isfinite(value)]
    for start in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[start : start + 1000])


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for key, value in tree.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]
    return rows


def _requirements(recipe: Recipe) -> list[str]:
    from importlib.metadata import version

    quantised = ["bitsandbytes"] if recipe.policy.backbone.quantization == "8bit" else []
    return [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers", "peft", "safetensors", "pydantic", "pyyaml", "gguf", "accelerate", "numpy", *quantised)]
