"""Recipes by name or path, with 'key.path=value' overrides, checked down to the last option.

`components.config` has the models of the sections. A method, its aggregator, a judge and rewards
check a recipe themselves (`check`); what concerns several sections is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from components.config import (
    BackboneConfig,
    QuestionsConfig,
    Recipe,
    RecipeError,
    check_section,
    unknown_name,
)
from components.config.loading import apply_overrides, dump_yaml, leaves, merge, origin_of, read_yaml
from components.config.section import describe_type, section_model
from components.data.records import DataError
from components.inputs import check_inputs
from components.paths import is_file

if TYPE_CHECKING:
    from components.preview import DataPreview

RECIPES = Path(__file__).resolve().parent.parent / "flows" / "recipes"
STORED = re.compile(r"name: (.*)\n(?s:.*?)\nfederation:\n  method: (.*)\n")
"""The name and the method in what dump_recipe writes."""


def recipe_names() -> list[str]:
    """Names of the recipes of the package, e.g. 'summarization/demo'."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, and check it.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.
        overrides: 'key.path=value' settings.

    Raises:
        RecipeError: one line for each error, with key, value, what is allowed, and the nearest
            valid key.
    """
    return load_with_origins(name_or_path, overrides)[0]


def load_with_origins(name_or_path: str, overrides: Iterable[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """A recipe as `load_recipe` gives it, and where its values come from.

    Returns:
        the recipe, and by dotted key the file or the override that sets it; all others are defaults.

    Raises:
        RecipeError: see load_recipe; a line on a value names the file or the override that sets it.
    """
    path = find_recipe(name_or_path)
    tree, origins = _read_tree(path)
    overrides = list(overrides)
    apply_overrides(tree, overrides)
    for key in (override.partition("=")[0] for override in overrides):
        origins = {name: of for name, of in origins.items() if not name.startswith(f"{key}.")}
        origins[key] = f"override '{key}'"
    try:
        return parse_recipe(tree, str(path)), origins
    except RecipeError as error:
        lines = [_with_origin(line, str(path), origins) for line in str(error).splitlines()]
        raise RecipeError("\n".join(lines)) from None


def _read_tree(path: Path, extending: Sequence[Path] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a recipe's file and of those that it extends, and the file of each by dotted key."""
    sections = ", ".join(Recipe.model_fields)
    tree = read_yaml(path, f"a recipe is a mapping of sections ({sections})")
    base = tree.pop("extends", None)
    origins = {key: str(path) for key, _ in leaves(tree)}
    if base is None:
        return tree, origins
    chain = [*extending, path.resolve()]
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends is {describe_type(base)}, but names one recipe, or its file.")
    beside = path.parent / base
    found = beside if is_file(beside) else find_recipe(base)
    if found.resolve() in chain:
        names = " extends ".join(str(one) for one in [*chain, found.resolve()])
        raise RecipeError(f"{path}: a recipe extends itself ({names}): leave out one 'extends'.")
    base_tree, base_origins = _read_tree(found, chain)
    merged = merge(base_tree, tree)
    kept = {key for key, _ in leaves(merged)}
    return merged, {key: of for key, of in (base_origins | origins).items() if key in kept}


def _with_origin(line: str, path: str, origins: Mapping[str, str]) -> str:
    """A line of an error, which begins with the file or the override that sets its key."""
    sentence = line.removeprefix(f"{path}: ")
    named = re.match(r"(?:unknown )?key '([^']+)'|([a-z_]+(?:[.\[][\w\]-]+)+)", sentence)
    origin = named and origin_of(named[1] or named[2], origins)
    return f"{origin}: {sentence}" if origin and sentence != line else line


def read_settings(name_or_path: str, *keys: str) -> list[Any]:
    """Values of a valid recipe by their dotted keys, without its check, which imports what it names."""
    tree, _ = _read_tree(find_recipe(name_or_path))
    return [_setting(tree, key) for key in keys]


def _setting(tree: Mapping[str, Any], key: str) -> Any:
    """A value of a tree, or its default."""
    *sections, last = key.split(".")
    model: type[BaseModel] | None = Recipe
    for section in sections:
        tree = tree.get(section) or {}
        model = model and section_model(model.model_fields[section].annotation)
    return tree[last] if last in tree else model and model.model_fields[last].default


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    for candidate in (RECIPES / f"{name_or_path}.yaml", Path(name_or_path)):
        if is_file(candidate):
            return candidate
    raise RecipeError(
        f"{unknown_name('recipe', name_or_path, recipe_names())} A path to a YAML file works too."
    )


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Check a recipe that has been read already.

    Args:
        tree: its sections.
        where: the file that it comes from, for messages.

    Raises:
        RecipeError: as load_recipe.
    """
    recipe = check_section(Recipe, _resolve_judge_reward(tree, where), where)
    for check in (
        _check_columns,
        _check_question_sets,
        _check_question_parts,
        _check_method,
        _check_judge_and_rewards,
        _check_templates,
        _check_lora,
    ):
        _check(check, recipe, where)
    return recipe


def _check(check: Callable[[Recipe], None], recipe: Recipe, where: str) -> None:
    """Run a check; its errors name where the recipe comes from."""
    try:
        check(recipe)
    except (RecipeError, DataError) as error:
        message = "\n".join(
            line if line.startswith(f"{where}: ") else f"{where}: {line}" for line in str(error).splitlines()
        )
        raise RecipeError(message) from None


def _resolve_judge_reward(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sections with the named reward in place of its name in evaluation.judge.reward."""
    evaluation = tree.get("evaluation")
    judge = evaluation.get("judge") if isinstance(evaluation, Mapping) else None
    if (
        not isinstance(judge, Mapping)
        or judge.get("kind") != "reward"
        or not isinstance(judge.get("reward"), str)
    ):
        return dict(tree)
    name = judge["reward"]
    rewards = tree.get("rewards") or {}
    if name not in rewards:
        known = unknown_name("evaluation.judge.reward", name, rewards)
        raise RecipeError(f"{where}: {known} A section such as those under rewards works too.")
    resolved = {**judge, "reward": rewards[name]}
    return {**tree, "evaluation": {**dict(evaluation or {}), "judge": resolved}}


def _check_columns(recipe: Recipe) -> None:
    from components.data.sources import check_columns

    check_columns(recipe.data)


def _check_question_sets(recipe: Recipe) -> None:
    from components.data.questions import names

    for use in _question_uses(recipe):
        if use.section.set not in names():
            key = f"{use.key.partition('[')[0]}.set"
            raise RecipeError(unknown_name(key, use.section.set, names()))


@dataclass(frozen=True)
class _QuestionUse:
    """A use of a question set.

    Attributes:
        key: of the section.
        section: the set, and the part of it.
        trains: whether trees are grown from it, rather than questions answered.
    """

    key: str
    section: QuestionsConfig
    trains: bool


def _question_uses(recipe: Recipe) -> list[_QuestionUse]:
    grown = recipe.thoughts.questions if recipe.thoughts else []
    answered = recipe.evaluation.questions.questions if recipe.evaluation.questions else []
    uses = [_QuestionUse(f"thoughts.questions[{n}]", section, True) for n, section in enumerate(grown)]
    return uses + [
        _QuestionUse(f"evaluation.questions.questions[{n}]", section, False)
        for n, section in enumerate(answered)
    ]


def _check_question_parts(recipe: Recipe) -> None:
    """Refuse parts of question sets that share questions, as far as the recipe shows it.

    It shows parts of one file, or of the hub. What two files share is checked when they are read. A
    count does not matter, since two samples may share questions.
    """
    uses = _question_uses(recipe)
    grown = [use for use in uses if use.trains]
    answered = [use for use in uses if not use.trains]
    pairs = list(combinations(grown, 2))
    pairs += [
        (one, other) for one, other in combinations(answered, 2) if one.section.set == other.section.set
    ]
    pairs += list(product(answered, grown))
    for one, other in pairs:
        if _share_questions(one.section, other.section):
            same_set = one.section.set == other.section.set
            sets = (
                f"set {one.section.set}"
                if same_set
                else f"sets {one.section.set} and {other.section.set}, which ask the same questions,"
            )
            reason = (
                ""
                if one.trains == other.trains
                else ", and answers to questions that trees are grown from say nothing about new ones"
            )
            raise RecipeError(
                f"{one.key} and {other.key}: parts {one.section.part} and {other.section.part} of {sets}"
                f" have questions in common{reason}: give each a part of its own, such as part: [0, 2] and"
                " [1, 2]."
            )


def _share_questions(one: QuestionsConfig, other: QuestionsConfig) -> bool:
    from components.data.questions import parts_meet, pool, split_of

    if pool(one.set) != pool(other.set) or not parts_meet(one.part, other.part):
        return False
    if one.set == other.set and (one.revision, split_of(one)) != (other.revision, split_of(other)):
        return False
    return (one.path and Path(one.path)) == (other.path and Path(other.path))


def _check_method(recipe: Recipe) -> None:
    from components.federation.method import method_of

    method_of(recipe.federation).check(recipe)


def _check_judge_and_rewards(recipe: Recipe) -> None:
    recipe.evaluation.judge.check(recipe)
    for reward in recipe.rewards.values():
        reward.check(recipe)


def _check_templates(recipe: Recipe) -> None:
    from components.data import templates

    templates.load(recipe.selector.template, "selector")
    templates.load(recipe.policy.template, "policy")
    if recipe.evaluation.questions is not None:
        templates.load(recipe.evaluation.questions.template, "answer")


def _check_lora(recipe: Recipe) -> None:
    from components.models.lora_targets import TargetError, check_target_names

    try:
        check_target_names(recipe)
    except TargetError as error:
        raise RecipeError(str(error)) from None


def validate_environment(recipe: Recipe, with_expectations: bool = False) -> tuple[list[str], DataPreview]:
    """Refuse a recipe whose files, models, or AlpacaEval package, annotator or key are missing or do not fit.

    It is called before a run starts. load_recipe does not call it, since it also reads recipes of
    finished runs. Data of local files are read, see preview_data.

    Args:
        recipe: the recipe.
        with_expectations: whether the expectations on the data are checked too, see preview_data.

    Returns:
        names of the models of the hub that cannot be read from here, and were not checked; and the data.

    Raises:
        UserError: in one sentence; of a file, a model, its tokenizer, LoRA's targets, the reference
            adapter of DPO, or a GPU's memory.
    """
    from components.checks import check_models
    from components.estimates import check_fit
    from components.preview import preview_data

    if recipe.evaluation.alpaca_eval:
        from components.evaluation.alpaca_inputs import check_alpaca_eval

        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    check_inputs(recipe)
    _check_adapters(recipe)
    preview = preview_data(recipe, with_expectations)
    unread, warnings = check_models(recipe)
    preview = replace(preview, warnings=(*preview.warnings, *warnings))
    check_fit(recipe)
    return unread, preview


def _check_adapters(recipe: Recipe) -> None:
    """Refuse target modules that backbones do not have, and a reference adapter that cannot be used."""
    from components.models.lora_targets import check_target_families
    from components.models.peft_folder import check_adapter_folder

    check_target_families(recipe)
    folder = recipe.alignment.dpo.reference_adapter
    if folder is not None and recipe.federation.options.needs_server_prompts:
        check_adapter_folder(Path(folder), "alignment.dpo.reference_adapter", recipe.policy.backbone)


def required_backbones(recipe: Recipe) -> list[str]:
    """Names of the backbones that a recipe uses, sorted."""
    backbones = [recipe.policy.backbone]
    backbones += recipe.federation.options.required_backbones(recipe)
    backbones += recipe.evaluation.judge.required_backbones()
    for reward in recipe.rewards.values():
        backbones += reward.required_backbones()
    names = {backbone.location for backbone in backbones}
    if recipe.thoughts is not None and recipe.thoughts.evaluator.base_url is None:
        names.add(recipe.thoughts.evaluator.location)
    return sorted(names)


def set_chat_dates(recipe: Recipe, day: date) -> Recipe:
    """The recipe with the day that each chat template prints which asks for the present one.

    A day that the recipe sets stays. A recipe whose chat templates print no day is returned as it is,
    so nothing of its run depends on the day.

    Raises:
        BackboneError: the tokenizer of such a model cannot be loaded.
    """
    from components.models.chat_template import reads_clock

    text = day.isoformat()
    policy = recipe.policy
    if policy.chat_date is None and policy.chat != "none" and reads_clock(policy.backbone):
        policy = policy.model_copy(update={"chat_date": text})
    judge = recipe.evaluation.judge.with_chat_date(text)
    evaluation = recipe.evaluation.model_copy(update={"judge": judge})
    thoughts = recipe.thoughts
    if thoughts is not None and thoughts.evaluator.base_url is None and thoughts.evaluator.chat_date is None:
        evaluator = thoughts.evaluator
        if reads_clock(BackboneConfig(name=evaluator.model, revision=evaluator.revision)):
            evaluator = evaluator.model_copy(update={"chat_date": text})
            thoughts = thoughts.model_copy(update={"evaluator": evaluator})
    return recipe.model_copy(update={"policy": policy, "evaluation": evaluation, "thoughts": thoughts})


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, with defaults."""
    return dump_yaml(recipe.model_dump(mode="json"))


def name_and_method(path: Path) -> tuple[str, str]:
    """The name and the method of a recipe that dump_recipe wrote, of another version too, without its check.

    Raises:
        RecipeError: the file has none.
    """
    try:
        stored = STORED.match(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    if stored is None:
        raise RecipeError(f"{path} is no recipe of a run: it names no method.")
    name, method = (re.sub(r"^'(.*)'$", r"\1", text).replace("''", "'") for text in stored.groups())
    return name, method
