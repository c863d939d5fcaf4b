"""Logging of the phases prepare, align and evaluate, and registration of the aligned policy."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import components
import tasks.policy_model
from components.config import Recipe
from components.data.data_report import PreparationReport
from components.data.records import read_rows
from components.data.templates import with_text
from components.evaluation.contests import Contest
from components.io import read_json
from components.models.policy import has_client_adapters
from components.paths import tracking_uri
from components.reporting.metrics import CONTESTS, result_metrics, verdict_words
from components.results import AlignmentResult, EvaluationResult, QuestionResult
from tasks.runs import RESULT, Run, contest_file
from tasks.tracking.client import (
    RunLog,
    TableRow,
    data_digest,
    explained_failures,
    log_curves,
    mlflow_client,
)
from tasks.tracking.run_tree import PARENT_TAG
from tasks.uncached import task

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOGGER = logging.getLogger(__name__)
ALIAS = "latest-aligned"
NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""Codes of MLflow where there is no run, or no version with an alias."""
SHOWN_PAIRS = 100
"""Labeled pairs of the logged table."""
PAIR_COLUMNS = ("prompt_id", "prompt", "chosen", "rejected", "label", "margin")
REQUIREMENTS = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "pydantic",
    "pyyaml",
    "gguf",
    "accelerate",
    "numpy",
)


@task()
@explained_failures()
def log_data(run_id: str, run: Run, recipe: Recipe, report: PreparationReport) -> None:
    """Log the prepared files as data sets of the parent run, and the partition at the phase's run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    data = recipe.data
    source = str(data.path.name) if data.path is not None else data.source
    inputs = []
    for name, rows, context in (
        ("pairs", report.rows.pairs, "training"),
        ("prompts", sum(report.rows.prompts.values()), "evaluation"),
        ("judge", report.rows.judge, "judge"),
    ):
        dataset = Dataset(
            name,
            data_digest(run, recipe, name),
            source_type=data.source,
            source=json.dumps({"uri": source}),
            profile=json.dumps({"num_rows": rows}),
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    mlflow_client().log_inputs(run.metadata()["mlflow_run_id"], inputs)
    log = RunLog.open(run_id)
    for name in ("clients.json", "report.json"):
        log.log_file(run.prepared / name, "data")
    if (run.prepared / "docs").is_dir():
        log.log_folder(run.prepared / "docs", "data/docs")
    log.log_metrics(report.metrics(), 0)


@task()
@explained_failures()
def log_alignment(run_id: str, run: Run, result: AlignmentResult) -> None:
    """Log the curves of DPO, the KL to the reference, the labeled pairs, and the checkpoints' adapters.

    The loss and the margin of DPO are at the parent run.
    """
    log = RunLog.open(run_id)
    log.set_tags({"dpo.reference": result.reference})
    if result.model_uri:
        log.set_tags({"model_uri": result.model_uri})
    points: list[tuple[str, float, int]] = []
    for entry in result.history:
        step = int(entry["step"])
        points += [(f"dpo/{name}", value, step) for name, value in entry.items() if name != "step"]
    log_curves(run_id, run.metadata()["mlflow_run_id"], points)
    log.log_metrics({f"align/{name}": value for name, value in result.metrics.items()}, 0)
    for group, values in (("sampling", result.sampling), ("labelling", result.labelling)):
        if values is not None:
            log.log_metrics({f"{group}/{name}": value for name, value in values.model_dump().items()}, 0)
    for path in [*result.checkpoints, result.policy.folder]:
        log.log_folder(run.alignment / path, f"adapters/{Path(path).name}")
    if (run.alignment / "pairs.parquet").is_file():
        rows = read_rows(run.alignment / "pairs.parquet")[:SHOWN_PAIRS]
        log.log_table([{key: row[key] for key in PAIR_COLUMNS} for row in rows], "labelled_pairs.json")


@task()
@explained_failures()
def register_policy(run_id: str, recipe: Recipe, name: str, adapter: Path) -> tuple[str, str]:
    """Register the aligned policy as a version of a model that `mlflow.pyfunc.load_model` loads.

    The model holds the adapter, the recipe's policy section and this project's components; the
    backbone is fetched by its name when the model is loaded. The alias `latest-aligned` moves to it, unless
    the run belongs to a benchmark, or a run of another experiment has the alias.

    Returns:
        the version's URI, for `mlflow.pyfunc.load_model`, and its number.
    """
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    packages = [*REQUIREMENTS, *(["bitsandbytes"] if recipe.policy.backbone.quantization == "8bit" else [])]
    inputs = ["prompt", "client_id"] if has_client_adapters(adapter) else ["prompt"]
    mlflow.set_tracking_uri(tracking_uri())
    mlflow.set_registry_uri(tracking_uri())
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run_id):
        policy = Path(scratch) / "policy.json"
        section = recipe.policy.model_dump(mode="json")
        section["backbone"]["name"] = recipe.policy.backbone.location
        section["template"] = with_text(recipe.policy.template).dump()
        policy.write_text(json.dumps(section), encoding="utf-8")
        logged = mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(tasks.policy_model.__file__)),
            # addresses, since MLflow takes an escape such as %2F in a path for one of an address
            artifacts={"adapter": adapter.absolute().as_uri(), "policy": policy.as_uri()},
            code_paths=[str(Path(components.__file__).parent)],
            pip_requirements=[f"{package}=={version(package).split('+')[0]}" for package in packages],
            signature=ModelSignature(
                inputs=Schema([ColSpec("string", name) for name in inputs]),
                outputs=Schema([ColSpec("string", "completion")]),
            ),
        )
    client = mlflow_client()
    with contextlib.suppress(MlflowException):  # the model exists already
        client.create_registered_model(name)
    registered = client.create_model_version(
        name, logged.model_uri, run_id=run_id, model_id=logged.model_id, tags={"recipe": recipe.name}
    )
    if may_move_alias(client, name, run_id):
        client.set_registered_model_alias(name, ALIAS, registered.version)
    else:
        LOGGER.info("%s@%s stays where it is: see the guide Operations, MLflow", name, ALIAS)
    client.update_run(run_id, status="RUNNING")  # leaving start_run() has ended it
    return f"models:/{name}/{registered.version}", str(registered.version)


def may_move_alias(client: MlflowClient, name: str, run_id: str) -> bool:
    """Whether the alias of a model may move to a version of this run."""
    from mlflow.exceptions import MlflowException

    run = client.get_run(run_id)
    if PARENT_TAG in run.data.tags and "phase" not in run.data.tags:  # an arm of a benchmark
        return False
    try:
        holder = client.get_run(str(client.get_model_version_by_alias(name, ALIAS).run_id)).info
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        return True
    return holder.lifecycle_stage != "active" or holder.experiment_id == run.info.experiment_id


@task()
@explained_failures()
def log_evaluation(run_id: str, run: Run, result: EvaluationResult) -> None:
    """Log the figures of a result, its files, and tables of generations and answers."""
    folder = run.evaluation
    log = RunLog.open(run_id)
    log.log_metrics(result_metrics(result), 0)
    for point in result.curve:
        scores = {"reward_hacking/proxy": point.proxy, "reward_hacking/judge": point.judge}
        log.log_metrics(scores, point.step)
    log.set_tags({"judge": result.judge})
    if result.alpaca_eval is not None:
        log.set_tags({"alpaca_eval": result.alpaca_eval.annotator})
        log.log_folder(folder / "alpaca_eval", "evaluation/alpaca_eval")
    if result.questions:
        log.log_folder(folder / "questions", "evaluation/questions")
        log.log_table(_question_rows(folder / "questions", result.questions), "question_answers.json")
    for name in (RESULT, "judgements.json"):
        if (folder / name).is_file():
            log.log_file(folder / name, "evaluation")
    for name in result.contests:
        log.log_file(contest_file(folder, name), "evaluation/contests")
    answers = [
        {
            "prompt": row["prompt"],
            "base": row["base"]["text"],
            "aligned": row["aligned"]["text"],
            "human": row["references"][0] if row["references"] else "",
        }
        for row in read_json(folder / "answers.json")
    ]
    log.log_table(answers, "generations.json")
    if result.contests:
        log.log_table(verdict_rows(folder, result.contests), "verdicts.json")


def _question_rows(folder: Path, results: Mapping[str, QuestionResult]) -> list[TableRow]:
    """The greedy answers of the policies to the same questions, side by side."""
    rows: list[TableRow] = []
    for policy, result in results.items():
        answers: list[TableRow] = []
        for name in result.sets:
            answers += read_json(folder / f"{policy}-{name}.json")
        rows = rows or [{key: row[key] for key in ("set", "id", "question", "key")} for row in answers]
        for row, answer in zip(rows, answers, strict=True):
            row |= {policy: answer["text"], f"{policy} answer": answer["answer"] or ""}
            if "client_id" in answer:
                row[f"{policy} client"] = answer["client_id"]
    return rows


def verdict_rows(folder: Path, contests: Iterable[str]) -> list[TableRow]:
    """A row for each verdict of each contest: the two answers, who wrote the better one, and why.

    The reasons are the texts of a judge that writes, in both orders of presentation; empty for others.
    """
    answers = {row["prompt_id"]: row for row in read_json(folder / "answers.json")}
    written = folder / "judgements.json"
    texts = read_json(written) if written.is_file() else []
    rows = []
    for name in contests:
        contest = Contest.read(contest_file(folder, name))
        label = CONTESTS[name].format(answers_author="human")
        for answer, verdict in zip(contest.prompts, contest.verdicts, strict=True):
            row = answers[answer]
            prompt = row["prompt"]
            ours, theirs = (
                row["references"][0] if who == "human" else row[who]["text"] for who in name.split("_vs_")
            )
            rows.append(
                {
                    "contest": label,
                    "prompt": prompt,
                    "ours": ours,
                    "theirs": theirs,
                    "better": verdict_words(verdict, label),
                    "ours first": _reason(texts, prompt, ours, theirs),
                    "theirs first": _reason(texts, prompt, theirs, ours),
                }
            )
    return rows


def _reason(texts: Sequence[Mapping[str, str]], prompt: str, first: str, second: str) -> str:
    """What a judge wrote on two answers in this order; it saw the prompt within the policy's instruction."""
    for text in texts:
        if (text["response_1"], text["response_2"]) == (first, second) and prompt in text["prompt"]:
            return text["text"]
    return ""
