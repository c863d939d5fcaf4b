"""Logging of the evaluation: figures, verdicts, sample generations and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.evaluation.contests import Contest
from components.io import read_json
from components.reporting.metrics import result_metrics
from components.reporting.run import CONTESTS, verdict_words
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
    log.log_table(_generation_columns(folder), "generations.json")
    if result.contests:
        log.log_table(verdict_columns(folder, result.contests), "verdicts.json")


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


def _generation_columns(folder: Path) -> dict[str, list[Any]]:
    """The answers of the policies to the same prompts, side by side."""
    rows = read_json(folder / "answers.json")
    return {
        "prompt": [row["prompt"] for row in rows],
        "base": [row["base"]["text"] for row in rows],
        "aligned": [row["aligned"]["text"] for row in rows],
        "human": [row["references"][0] if row["references"] else "" for row in rows],
    }


def verdict_columns(folder: Path, contests: Iterable[str]) -> dict[str, list[Any]]:
    """A row for each verdict of each contest: the two answers, who wrote the better one, and why.

    The reasons are the texts of a judge that writes, in both orders of presentation; empty for others.
    """
    rows = {row["prompt_id"]: row for row in read_json(folder / "answers.json")}
    written = folder / "judgements.json"
    texts = read_json(written) if written.is_file() else []
    names = ("contest", "prompt", "ours", "theirs", "better", "ours first", "theirs first")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for name in contests:
        contest = Contest.read(contest_file(folder, name))
        label = CONTESTS[name].format(references="human")
        for answer, verdict in zip(contest.prompts, contest.verdicts, strict=True):
            row = rows[answer]
            ours, theirs = (_text_of(row, who) for who in name.split("_vs_"))
            values = (
                label,
                row["prompt"],
                ours,
                theirs,
                verdict_words(verdict, label),
                _reason(texts, row["prompt"], ours, theirs),
                _reason(texts, row["prompt"], theirs, ours),
            )
            for column, value in zip(names, values, strict=True):
                columns[column].append(value)
    return columns


def _reason(texts: Sequence[Mapping[str, str]], prompt: str, first: str, second: str) -> str:
    """What a judge wrote on two answers in this order; it saw the prompt within the policy's instruction."""
    for text in texts:
        if (text["response_1"], text["response_2"]) == (first, second) and prompt in text["prompt"]:
            return text["text"]
    return ""


def _text_of(row: Mapping[str, Any], who: str) -> str:
    """An answer of a policy, or the first reference."""
    return str(row["references"][0] if who == "human" else row[who]["text"])
