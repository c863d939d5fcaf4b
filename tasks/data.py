"""Tasks that get the backbones and the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from components.config import Recipe
from components.data.records import DataError
from components.models.adapters import write_atomically
from tasks.devices import POOL
from tasks.runs import file_hash, write_json
from tasks.uncached import task


@task(task_run_name="fetch backbone {name}")
def fetch_backbone(name: str) -> str:
    """Make sure that a backbone is there; gives what from_pretrained takes for it."""
    from components.models import backbone

    return backbone.fetch_backbone(name)


@task()
def check_eight_bit(recipe: Recipe) -> None:
    """Refuse 8 bits that a device of this run cannot do, before anything is grown or trained.

    Raises:
        EightBitError: naming the key that asks for them.
    """
    from components.federation.strategy import federated_sections
    from components.models.backbone import choose_device
    from components.models.eight_bit import PLAIN, check

    judge, asked = recipe.evaluation.judge, {"policy.backbone.quantization": recipe.policy.backbone.quantization, "federation.optimizer.name": recipe.federation.optimizer.name}
    if federated_sections(recipe)[0] == "selector":
        asked["selector.backbone.quantization"] = recipe.selector.backbone.quantization
    if judge.kind == "selector":
        asked |= {"evaluation.judge.selector.backbone.quantization": judge.selector.backbone.quantization, "evaluation.judge.optimizer.name": judge.optimizer.name}
    for key, value in asked.items():
        for device in choose_device(recipe.runtime.devices) if value in PLAIN else ():
            check(key, value, device)


@task()
def note_backbones(backbones: dict[str, str], path: Path) -> None:
    """Write down which backbones a recipe uses: the hashes of a local folder's files; of a hub id only the name."""
    write_json(path, {
        name: {file.name: file_hash(file) for file in sorted(Path(source).iterdir()) if file.is_file()} if Path(source).is_dir() else {}
        for name, source in backbones.items()})


@task()
def grow_trees(recipe: Recipe, folder: Path, shared: Path) -> dict[str, Any]:
    """Grow the recipe's trees of thoughts, as far as they are not there, and put those of its questions into a folder, a file a set.

    Args:
        recipe: its sections thoughts and policy are used.
        folder: written; only trees of this recipe's questions are in it afterwards.
        shared: where trees are kept for other runs; each is there as soon as it is whole.

    Returns:
        by set, the questions, and the rows of the set that were left out by reason.

    Raises:
        DataError: the questions cannot be read, or one is asked twice, in one set or in two, or is to be asked when the policy is measured.
    """
    from components.alignment.thoughts import build_models, grow_all, set_templates, settings_key, shorten
    from components.data.questions import load_section, render, shared_questions
    from components.data.templates import load as load_template
    from components.data.trees import tree_line
    from components.evaluation.answers import load_asked
    from components.models.backbone import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "done", *folder.glob("*.jsonl")):
        old.unlink(missing_ok=True)
    if recipe.thoughts is None:
        return {}
    log, config, report = get_run_logger(), recipe.thoughts, {}
    asked: dict[str, list[Any]] = {}
    for n, section in enumerate(config.questions):
        questions, dropped = load_section(section, recipe.seed, f"thoughts.questions[{n}]")
        asked.setdefault(section.set, []).extend(questions)
        report.setdefault(section.set, {"questions": 0, "dropped": {}})
        report[section.set]["questions"] += len(questions)
        report[section.set]["dropped"] = dict(Counter(report[section.set]["dropped"]) + Counter(dropped))
    if twice := shared_questions(f"{name}/{question.id}" for name, questions in asked.items() for question in questions):
        one, other = (name.partition("/")[0] for name in twice[0])
        raise DataError(f"thoughts.questions: sets {one} and {other} share {len(twice)} questions, e.g. {' and '.join(twice[0])}, so that one client could be measured by what another trains on: "
                        "give each set a part of its own, such as part: [0, 2] and [1, 2]")
    if recipe.evaluation.questions:
        load_asked(recipe.evaluation.questions.questions, recipe.seed, {f"{name}/{question.id}": render(question) for name, questions in asked.items() for question in questions})
    if config.max_question_tokens is not None:
        tokenizer = load_tokenizer(recipe.policy.backbone)
        asked = {name: [shorten(question, tokenizer, config.max_question_tokens) for question in questions] for name, questions in asked.items()}
    templates = {name: set_templates(name) for name in asked}
    turns = [load_template(recipe.policy.template, "policy"), load_template("thoughts/policy", "policy")]
    keys = {name: settings_key(config, recipe.policy.model_dump(mode="json", exclude={"lora"}), [*templates[name], *turns], recipe.seed) for name in asked}
    with POOL.borrow(recipe) as device:
        models: list[Any] = []

        def build() -> tuple[Any, Any]:
            models[:] = models or [build_models(recipe.policy, config, device)]
            return models[0]

        for name, questions in asked.items():
            if len({question.id for question in questions}) < len(questions):
                raise DataError(f"thoughts.questions: the parts of set {name} share questions; give each its own, such as part: [0, 2] and [1, 2]")
            trees = grow_all(questions, shared / f"{name}.jsonl", build, config, templates, keys, recipe.seed,
                             lambda done, total, name=name: log.info("trees of %s: %d of %d", name, done, total) if done % max(1, total // 30) == 0 or done == total else None)
            write_atomically(folder / f"{name}.jsonl", b"".join(tree_line(tree) for tree in trees))
    POOL.release()
    return report


@task()
def prepare_data(recipe: Recipe, folder: Path, trees: Path | None = None) -> dict[str, Any]:
    """Load, split, partition and validate the recipe's data into a folder; gives the report. Trees that the recipe grew are in a folder of their own."""
    from components.data.prepare import prepare
    from components.data.records import read_rows
    from components.evaluation.alpaca import check_alpaca_eval, check_prompts, instructions_of
    from components.evaluation.answers import grown_questions, load_asked
    from components.evaluation.judges import check_judge
    from components.federation.strategy import federated_sections

    if recipe.evaluation.alpaca_eval:
        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    if recipe.evaluation.questions:
        load_asked(recipe.evaluation.questions.questions, recipe.seed, grown_questions(recipe, trees or folder))
    data = recipe.data if recipe.thoughts is None else recipe.data.model_copy(update={"path" if recipe.data.source == "thoughts" else "trees": str(trees)})
    report = prepare(data, recipe.seed, folder)
    check_judge(recipe.evaluation.judge, folder)
    if recipe.evaluation.alpaca_eval:
        asked = read_rows(folder / "prompts.parquet", split="test")["prompt"]
        check_prompts(recipe.evaluation.alpaca_eval, asked, instructions_of(recipe, asked))
    prompts, splits = report["rows"]["prompts"], report["splits"]
    labels = federated_sections(recipe)[0] == "selector"  # a policy that clients train is not aligned afterwards
    for count, what, elsewhere in (
            *([(prompts.get("align", 0), "server prompts to align on", ", or take them from elsewhere (data.align_prompts)")] if labels else []),
            (prompts.get("test", 0), "held-out prompts to evaluate on", ", or take them from elsewhere (data.test_prompts)"),
            (splits.get("test", 0), "held-out pairs to measure the selector on", ""),
            (splits.get("train", 0), "pairs to train on", "")):
        if not count:
            raise DataError(f"source {recipe.data.source} leaves no {what}: see data.test, data.validation and data.options (e.g. align_share){elsewhere}.")
    return report
