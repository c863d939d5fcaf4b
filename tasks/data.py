"""Tasks that fetch the backbones and prepare the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger

from components.config import DataConfig, InputFile, Recipe, ThoughtsConfig
from components.data.data_report import (
    CLIENTS_FILE,
    PreparationReport,
    read_client_counts,
    write_report,
)
from components.data.records import UNSEEN, DataError, read_pairs, read_prompts
from components.data.sources.owners import has_owners
from components.data.splits import JUDGE
from components.federation.commits import changed_clients
from components.io import file_hash, write_atomically, write_json
from components.progress import Work, progress
from components.recipes.inputs import hash_path, with_original_names
from tasks.devices import POOL
from tasks.runs import Run
from tasks.uncached import task

if TYPE_CHECKING:
    from components.data.prepare import DataSet
    from components.data.questions import Question


@task(name="fetch backbone {name}")
def fetch_backbone(name: str) -> str:
    """Make sure that a backbone is present, and return its folder or hub id for from_pretrained."""
    from components.models import backbone

    return backbone.fetch_backbone(name)


def check_eight_bit(recipe: Recipe) -> None:
    """Refuse 8-bit settings that a device of this run does not support, before anything is trained.

    Raises:
        UserError: naming the key.
    """
    from components.models.backbone import choose_devices
    from components.models.eight_bit import check_support

    options = recipe.federation.options
    settings: dict[str, str] = {
        "policy.backbone.quantization": recipe.policy.backbone.quantization,
        "federation.optimizer.name": recipe.federation.optimizer.name,
        f"{options.trained_model}.backbone.quantization": recipe.trained.backbone.quantization,
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
    from components.alignment.thoughts.growth import TreeSettings
    from components.alignment.thoughts.stored_trees import (
        grow_missing_trees,
        load_thought_templates,
        settings_key,
    )
    from components.alignment.thoughts.tree_models import TreeModels
    from components.data.templates import load as load_template
    from components.data.trees import tree_line

    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "done", *folder.glob("*.jsonl")):
        old.unlink(missing_ok=True)
    thoughts = recipe.thoughts
    if thoughts is None:
        return {}
    questions_by_set = _load_tree_questions(recipe, thoughts)
    turns = [load_template(recipe.policy.template, "policy"), load_template("thoughts/policy", "policy")]
    with POOL.borrow(recipe.runtime) as device:
        load = cache(lambda: TreeModels(recipe.policy, thoughts, device))  # when a tree is missing
        for name, questions in questions_by_set.items():
            templates = load_thought_templates(name)
            key = settings_key(thoughts, recipe.policy, [*templates, *turns], recipe.seed)
            settings = {name: TreeSettings(thoughts, templates, key, recipe.seed)}
            size = thoughts.question_batch_size
            path = shared / f"{name}.jsonl"
            trees = grow_missing_trees(questions, path, load, settings, size, _log_trees(name))
            write_atomically(folder / f"{name}.jsonl", b"".join(tree_line(tree) for tree in trees))
    POOL.release()
    return {name: len(questions) for name, questions in questions_by_set.items()}


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
    from components.data.prepare import prepare
    from components.evaluation.control_tokens import with_control_tokens
    from components.evaluation.pair_warnings import reading_warnings
    from components.recipes.data_preview import assembled

    check_questions(recipe, trees)
    data = recipe.data
    if recipe.thoughts is not None:
        key = "path" if data.source == "thoughts" else "trees"
        data = data.model_copy(update={key: InputFile(str(trees))})

    def read(data: DataConfig, seed: int) -> DataSet:
        return with_control_tokens(recipe, assembled(data, seed))

    report = prepare(data, recipe.seed, folder, recipe.runtime.data_docs, read)
    check_prepared(recipe, folder, report)
    warnings = [with_original_names(recipe, warning) for warning in report.warnings]
    prompts = [row.prompt for row in read_prompts(folder)]
    warnings += reading_warnings(recipe, read_pairs(folder / "pairs.parquet"), prompts)
    report = report.model_copy(update={"warnings": warnings})
    write_report(folder, report)
    return report


def check_questions(recipe: Recipe, trees: Path | None) -> None:
    """Refuse evaluations whose data are missing or do not fit, before the pairs are prepared.

    Args:
        recipe: the recipe.
        trees: folder of the trees that the run grew.
    """
    from components.evaluation.alpaca_inputs import check_alpaca_eval
    from components.evaluation.answers import load_evaluation_questions, tree_questions

    if recipe.evaluation.alpaca_eval:
        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    if recipe.evaluation.questions:
        with_trees = tree_questions(recipe.data, trees if recipe.thoughts is not None else None)
        load_evaluation_questions(recipe.evaluation.questions.questions, recipe.seed, with_trees)


def check_prepared(recipe: Recipe, folder: Path, report: PreparationReport) -> None:
    """Refuse prepared data that lack what a later phase needs.

    Raises:
        DataError: naming what is missing.
    """
    from components.data.prepare import check_rows
    from components.evaluation.alpaca_inputs import annotator_instructions, find_baseline

    recipe.evaluation.judge.check_data(folder)
    if recipe.evaluation.alpaca_eval:
        prompts = [row.prompt for row in read_prompts(folder, "test")]
        instructions = annotator_instructions(
            prompts, recipe.policy.template, recipe.data.test_prompts, recipe.evaluation.alpaca_eval
        )
        find_baseline(recipe.evaluation.alpaca_eval, prompts, instructions)  # refuses unanswered prompts
    check_rows(recipe, report.splits, report.rows.prompts)
    if recipe.federation.privacy is not None and not has_owners(recipe):
        _refuse_judge_of_clients(recipe, folder)


def _refuse_judge_of_clients(recipe: Recipe, folder: Path) -> None:
    if JUDGE in {pair.client_id for pair in read_pairs(folder / "judge.parquet")}:
        raise DataError(
            f"source {recipe.data.source} gives the judge pairs of the clients' prompts, whose verdicts"
            " federation.privacy protects: set its share to 0 (data.options.judge_clients or judge_share) and"
            " use another judge, or bring the pairs of ten owners or more, some of whom are the judge's."
        )


def changed_clients_warning(run: Run, recipe: Recipe) -> str:
    """Who joined or left the file of pairs since the run copied it; empty where the clients are the same.

    Args:
        run: with its prepared data.
        recipe: of the run, whose file is the run's own copy.
    """
    from components.data.prepare import assemble

    data = recipe.data
    file, before = data.path, run.prepared
    if file is None or not (before / CLIENTS_FILE).is_file() or not Path(file.name).exists():
        return ""
    if hash_path(Path(file.name)) == file.sha256:
        return ""
    goes_on = "The run goes on with its own copy of the file, and with the clients that it started with"
    try:
        now = assemble(data.model_copy(update={"path": InputFile(file.name)}), recipe.seed)
    except DataError as error:
        return f"data.path {file.name} has changed, and cannot be used: {error}. {goes_on}."
    known = {*read_client_counts(before)}
    if (before / UNSEEN).is_dir():
        known |= {*read_client_counts(before / UNSEEN)}
    change = changed_clients(known, {*now.clients, *now.unseen})
    if not change:
        return ""
    return (
        f"data.path {file.name} has other clients since the run started: {change}. {goes_on}: start a new"
        " run to train with those of the file."
    )
