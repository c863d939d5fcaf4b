"""Tasks that fetch the backbones and prepare the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from prefect import get_run_logger

from components.config import InputFile, Recipe, ThoughtsConfig
from components.data.data_report import PreparationReport, read_report, write_report
from components.data.records import DataError, read_rows
from components.inputs import with_original_names
from components.io import file_hash, write_atomically, write_json
from components.progress import Work, progress
from tasks.devices import POOL
from tasks.uncached import task

if TYPE_CHECKING:
    from components.alignment.thoughts.growth import TreeSettings
    from components.data.questions import Question


@task(name="fetch backbone {name}")
def fetch_backbone(name: str) -> str:
    """Make sure that a backbone is present, and return its folder or hub id for from_pretrained."""
    from components.models import backbone

    return backbone.fetch_backbone(name)


def check_eight_bit(recipe: Recipe) -> None:
    """Refuse 8-bit settings that a device of this run does not support, before anything is trained.

    Raises:
        EightBitError: naming the key.
    """
    from components.models.backbone import choose_devices
    from components.models.eight_bit import check_support

    options = recipe.federation.options
    settings: dict[str, str] = {
        "policy.backbone.quantization": recipe.policy.backbone.quantization,
        "federation.optimizer.name": recipe.federation.optimizer.name,
        f"{options.trained_model}.backbone.quantization": options.trained_section(
            recipe
        ).backbone.quantization,
    }
    settings |= recipe.evaluation.judge.eight_bit_settings()
    for key, value in settings.items():
        for device in choose_devices(recipe.runtime.devices):
            check_support(key, value, device)


def record_backbones(backbones: dict[str, str], path: Path) -> None:
    """Record the hashes of the files of each backbone, by name; none for a hub id."""
    hashes: dict[str, dict[str, str]] = {}
    for name, source in backbones.items():
        files = sorted(Path(source).iterdir()) if Path(source).is_dir() else []
        hashes[name] = {file.name: file_hash(file) for file in files if file.is_file()}
    write_json(path, hashes)


@task()
def grow_trees(recipe: Recipe, folder: Path, shared: Path) -> dict[str, int]:
    """Grow the recipe's missing trees of thoughts, and write all of them, a file per set.

    Args:
        recipe: its sections thoughts and policy.
        folder: written; afterwards it has trees of this recipe's questions only.
        shared: trees for all runs; those of a batch of questions are written as soon as they are
            complete.

    Returns:
        the number of questions of each set.

    Raises:
        DataError: the questions cannot be read; or one is used twice, in one set or in two, or also
            evaluates the policy.
    """
    from components.alignment.thoughts.stored_trees import grow_missing_trees
    from components.alignment.thoughts.tree_models import build_models
    from components.data.trees import tree_line

    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "done", *folder.glob("*.jsonl")):
        old.unlink(missing_ok=True)
    thoughts = recipe.thoughts
    if thoughts is None:
        return {}
    questions_by_set = _load_tree_questions(recipe, thoughts)
    with POOL.borrow(recipe.runtime) as device:
        load = cache(lambda: build_models(recipe.policy, thoughts, device))  # when a tree is missing
        for name, questions in questions_by_set.items():
            settings = {name: _tree_settings(name, recipe, thoughts)}
            size = thoughts.question_batch_size
            path = shared / f"{name}.jsonl"
            trees = grow_missing_trees(questions, path, load, settings, size, _log_trees(name))
            write_atomically(folder / f"{name}.jsonl", b"".join(tree_line(tree) for tree in trees))
    POOL.release()
    return {name: len(questions) for name, questions in questions_by_set.items()}


def _tree_settings(name: str, recipe: Recipe, thoughts: ThoughtsConfig) -> TreeSettings:
    from components.alignment.thoughts.growth import TreeSettings
    from components.alignment.thoughts.stored_trees import load_thought_templates, settings_key
    from components.data.templates import load as load_template

    templates = load_thought_templates(name)
    turns = [load_template(recipe.policy.template, "policy"), load_template("thoughts/policy", "policy")]
    key = settings_key(thoughts, recipe.policy, [*templates, *turns], recipe.seed)
    return TreeSettings(thoughts, templates, key, recipe.seed)


def _load_tree_questions(recipe: Recipe, thoughts: ThoughtsConfig) -> dict[str, list[Question]]:
    """The questions that trees are grown for, by set, each once; long contexts are cut.

    Raises:
        DataError: see grow_trees.
    """
    from components.data.questions import load_section, render, truncate_context
    from components.evaluation.answers import load_evaluation_questions
    from components.models.backbone import load_tokenizer

    questions: dict[str, list[Question]] = {}
    for i, section in enumerate(thoughts.questions):
        loaded, _ = load_section(section, recipe.seed, f"thoughts.questions[{i}]")
        questions.setdefault(section.set, []).extend(loaded)
    _refuse_repeated_questions(questions)
    if recipe.evaluation.questions is not None:
        grown = {f"{name}/{one.id}": render(one) for name, own in questions.items() for one in own}
        load_evaluation_questions(recipe.evaluation.questions.questions, recipe.seed, grown)
    limit = thoughts.max_question_tokens
    if limit is None:
        return questions
    tokenizer = load_tokenizer(recipe.policy.backbone)
    return {name: [truncate_context(one, tokenizer, limit) for one in own] for name, own in questions.items()}


def _refuse_repeated_questions(questions_by_set: Mapping[str, Sequence[Question]]) -> None:
    from components.data.questions import shared_questions

    names = [f"{name}/{question.id}" for name, own in questions_by_set.items() for question in own]
    shared = shared_questions(names)
    if shared:
        one, other = (name.partition("/")[0] for name in shared[0])
        raise DataError(
            f"thoughts.questions: sets {one} and {other} share {len(shared)} questions, e.g."
            f" {' and '.join(shared[0])}, so that one client could be measured by what another trains on:"
            " give each set a part of its own, such as part: [0, 2] and [1, 2]"
        )
    for name, questions in questions_by_set.items():
        if len({question.id for question in questions}) < len(questions):
            raise DataError(
                f"thoughts.questions: the parts of set {name} share questions; give each its own, such as"
                " part: [0, 2] and [1, 2]"
            )


def _log_trees(name: str) -> Callable[[int, int], None]:
    log = get_run_logger()

    def log_tree(done: int, total: int) -> None:
        work = Work(f"trees of {name}", done, total)
        log.info("%s: %d of %d", work.name, done, total, extra=progress(work))

    return log_tree


@task()
def prepare_data(recipe: Recipe, folder: Path, trees: Path) -> PreparationReport:
    """Load, split, partition and validate the recipe's data into a folder.

    Args:
        recipe: the recipe.
        folder: written.
        trees: folder of the trees that the run grew.

    Returns:
        the report of the preparation.

    Raises:
        DataError: data are missing, a split that a phase needs is empty, or too many pairs are equal.
    """
    from components.data.prepare import check_rows, prepare
    from components.evaluation.alpaca_inputs import annotator_instructions, check_alpaca_eval, find_baseline
    from components.evaluation.answers import load_evaluation_questions, tree_questions
    from components.evaluation.control_tokens import with_control_tokens
    from components.evaluation.equal_pairs import (
        count_equal_completions,
        dialogue_warnings,
        equal_warnings,
        hidden_warnings,
    )
    from components.evaluation.judges.judge import JudgeSection

    if recipe.evaluation.alpaca_eval:
        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    if recipe.evaluation.questions:
        with_trees = tree_questions(recipe.data, trees if recipe.thoughts is not None else None)
        load_evaluation_questions(recipe.evaluation.questions.questions, recipe.seed, with_trees)
    data = recipe.data
    if recipe.thoughts is not None:
        key = "path" if data.source == "thoughts" else "trees"
        data = data.model_copy(update={key: InputFile(str(trees))})
    report = prepare(
        data, recipe.seed, folder, recipe.runtime.data_docs, partial(with_control_tokens, recipe)
    )
    cast(JudgeSection, recipe.evaluation.judge).check_data(folder)
    if recipe.evaluation.alpaca_eval:
        prompts = [row["prompt"] for row in read_rows(folder / "prompts.parquet", split="test")]
        instructions = annotator_instructions(
            prompts, recipe.policy.template, recipe.data.test_prompts, recipe.evaluation.alpaca_eval
        )
        find_baseline(recipe.evaluation.alpaca_eval, prompts, instructions)  # refuses unanswered prompts
    check_rows(recipe, report.splits, report.rows.prompts)
    hidden = hidden_warnings(recipe, read_rows(folder / "pairs.parquet"))
    counted = count_equal_completions(recipe, folder)
    warnings = [with_original_names(recipe, warning) for warning in report.warnings]
    warnings += [*hidden, *equal_warnings(counted), *dialogue_warnings(recipe, folder)]
    report = report.model_copy(update={"equal_completions": counted, "warnings": warnings})
    write_report(folder, report)
    return report


def check_pairs(recipe: Recipe, folder: Path) -> list[str]:
    """Check prepared pairs again for models whose sections have changed since, as stages of DVC may.

    However many they are, it is a warning: a run that goes on cannot change its recipe.

    Returns:
        a warning for each of these models that reads equal completions.
    """
    from components.evaluation.equal_pairs import count_equal_completions, equal_warnings

    known = read_report(folder).equal_completions
    counted = count_equal_completions(recipe, folder, known, refuse=False)
    return equal_warnings([counts for counts in counted if counts not in known])
