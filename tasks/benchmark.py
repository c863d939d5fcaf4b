"""Tasks of a benchmark: sharing of the base policy's generations, and contests between arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.config import Recipe
from components.io import write_atomically
from components.models.selector import Comparison
from tasks.benchmark_folder import answers_by_prompt, arm_run, contest_path
from tasks.devices import Arguments, run_on_workers
from tasks.evaluation.judging import judge_pairs
from tasks.runs import Run


def share_generations(run: Run, others: list[Run]) -> list[str]:
    """Copy the base policy's generations and measures from runs of the same seed, data and policy.

    Returns:
        names of the copied files.
    """
    copied = []
    recipe = run.recipe()
    for other in others:
        for name in _shared_files(recipe, other):
            source = other.folder / name
            target = run.folder / name
            if source.is_file() and not target.is_file():
                write_atomically(target, source.read_bytes())
                copied.append(name)
    return copied


def _shared_files(recipe: Recipe, other: Run) -> list[str]:
    """Files of the base policy's generations, relative to the run folder, of a run with equal settings."""
    theirs = other.recipe()
    if recipe.fingerprint("data", "policy") != theirs.fingerprint("data", "policy"):
        return []
    if recipe.base_adapter != theirs.base_adapter:
        return []
    files = []
    keys = ("prompts", "completions", "temperature")
    if all(getattr(recipe.alignment, key) == getattr(theirs.alignment, key) for key in keys):
        files.append("alignment/completions.json")
    keys = ("prompts", "answers_per_prompt", "answer_temperature")
    if all(getattr(recipe.evaluation, key) == getattr(theirs.evaluation, key) for key in keys):
        files.append("evaluation/answers-base.json")
    if recipe.evaluation.questions == theirs.evaluation.questions:
        paths = sorted((other.evaluation / "questions").glob("base-*.json"))
        files += [f"evaluation/questions/{path.name}" for path in paths]
    measured, other_measured = (
        one.federation.options.sampling and one.federation.options.sampling.fingerprint(one)
        for one in (recipe, theirs)
    )
    if measured and measured == other_measured:
        names = sorted(path.name for path in other.federation.glob("*-00000.json"))  # before the first round
        files += [f"federation/{name}" for name in names if not name.startswith("evaluation-")]
    return files


def judge_arms(folder: Path, contests: Sequence[Sequence[str]], seed: int) -> None:
    """Judge the answers of two arms' policies in both orders, in each contest that is not judged yet.

    Each worker judges a contest, by the judge of its first arm.
    """
    paths = {(ours, theirs): contest_path(folder, ours, theirs, seed) for ours, theirs in contests}
    missing = [pair for pair, path in paths.items() if not path.is_file()]
    if not missing:
        return
    calls = [{**_contest(folder, *pair, seed), "path": paths[pair]} for pair in missing]
    recipe: Recipe = calls[0]["recipe"]
    run_on_workers(judge_pairs, calls, recipe.runtime, folder)


def _contest(folder: Path, ours: str, theirs: str, seed: int) -> Arguments:
    """The arguments of judge_pairs."""
    run = arm_run(folder, ours, seed)
    first = answers_by_prompt(run)
    second = answers_by_prompt(arm_run(folder, theirs, seed))
    pairs = {
        name: Comparison(first[name]["prompt"], first[name]["text"], second[name]["text"])
        for name in sorted(first.keys() & second.keys())
    }
    return {
        "run": run,
        "recipe": run.recipe(),
        "name": f"{ours} against {theirs}, seed {seed}",
        "pairs": pairs,
    }
