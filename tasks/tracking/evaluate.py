"""Logging of the evaluation: figures, verdicts, sample generations and answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.evaluation.contests import Contest
from components.io import read_json
from components.reporting.summary import accuracy_metrics, question_figures
from components.results import EvaluationResult, QuestionResult
from tasks.runs import RESULT, contest_file
from tasks.tracking.client import RunLog
from tasks.uncached import task


@task()
def log_evaluation(run_id: str, folder: Path, result: EvaluationResult) -> None:
    """Log the figures of a result, its files, and tables of generations and answers."""
    log = RunLog.open(run_id)
    log.log_metrics(result_metrics(result), 0)
    for point in result.curve:
        log.log_metrics(
            {"reward_hacking/proxy": point.proxy, "reward_hacking/judge": point.judge}, point.step
        )
    log.set_tags({"judge": result.judge})
    if result.curve:
        log.log_file(folder / "reward-hacking.png", "evaluation")
    if result.alpaca_eval is not None:
        log.set_tags({"alpaca_eval": result.alpaca_eval.annotator})
        log.log_folder(folder / "alpaca_eval", "evaluation/alpaca_eval")
    if result.questions:
        log.log_folder(folder / "questions", "evaluation/questions")
        log.log_table(_question_columns(folder / "questions", result.questions), "question_answers.json")
    for name in (RESULT, "judgements.json"):
        if (folder / name).is_file():
            log.log_file(folder / name, "evaluation")
    for name in result.contests:
        log.log_file(contest_file(folder, name), "evaluation/contests")
    log.log_table(_generation_columns(folder, result), "generations.json")


def result_metrics(result: EvaluationResult) -> dict[str, Any]:
    """The figures of an evaluation as metrics."""
    metrics: dict[str, Any] = {f"answers/{name}": value for name, value in result.answers.items()}
    for name, value in result.judge_figures.items():
        metrics[f"judge/{name.removeprefix('judge_')}"] = value
    for contest, figures in result.contests.items():
        values = figures.model_dump()
        values |= {f"single_order/{name}": value for name, value in values.pop("single_order").items()}
        metrics |= {f"{contest}/{name}": value for name, value in values.items()}
    for policy, kinds in result.rouge.items():
        metrics |= {f"rouge/{policy}/{kind}": value for kind, value in kinds.items()}
    if result.alpaca_eval is not None:
        for contest, annotated in result.alpaca_eval.contests.items():
            values = annotated.figures.model_dump(exclude_none=True)
            metrics |= {f"alpaca_eval/{contest}/{name}": value for name, value in values.items()}
    for policy, answers in result.questions.items():
        for name, shares in question_figures(answers).items():
            values = shares.model_dump(exclude_none=True)
            metrics |= {f"questions/{policy}/{name}/{key}": value for key, value in values.items()}
    if result.implicit_reward is not None:
        for name, value in accuracy_metrics(result.implicit_reward).items():
            metrics[name.replace("accuracy", "implicit_reward", 1)] = value
    return metrics


def _question_columns(folder: Path, answers: Mapping[str, QuestionResult]) -> dict[str, list[Any]]:
    """The greedy answers of the policies to the same questions, side by side."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for policy, result in answers.items():
        rows[policy] = []
        for name in result.sets:
            rows[policy] += read_json(folder / f"{policy}-{name}.json")
    first = next(iter(rows.values()))
    columns = {key: [row[key] for row in first] for key in ("set", "id", "question", "key")}
    for policy, own in rows.items():
        columns[policy] = [row["text"] for row in own]
        columns[f"{policy} answer"] = [row["answer"] or "" for row in own]
        if "client_id" in own[0]:
            columns[f"{policy} client"] = [row["client_id"] for row in own]
    return columns


def _generation_columns(folder: Path, result: EvaluationResult) -> dict[str, list[Any]]:
    rows = read_json(folder / "answers.json")
    columns: dict[str, list[Any]] = {
        "prompt": [row["prompt"] for row in rows],
        "base": [row["base"]["text"] for row in rows],
        "aligned": [row["aligned"]["text"] for row in rows],
        "human": [row["references"][0] if row["references"] else "" for row in rows],
    }
    for name in result.contests:
        contest = Contest.read(contest_file(folder, name))
        verdicts = dict(zip(contest.prompts, contest.verdicts, strict=True))
        columns[name] = [str(verdicts.get(row["prompt_id"], "")) for row in rows]
    return columns
