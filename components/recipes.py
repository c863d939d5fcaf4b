"""Reading recipes: by name or path, with 'key.path=value' overrides, checked to the last option.

The models of the sections are in components/config.py; the options of a data source, of a federated method and of a
judge are checked by the models that stand in their own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Any

import yaml

from components.config import JudgeConfig, Recipe, RecipeError, check_section, kind_of, unknown_name
from components.data.records import DataError

RECIPES = Path(__file__).resolve().parent.parent / "flows" / "recipes"


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-5 is a number, as in YAML 1.2 (PyYAML's 1.1 reads it as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789."))


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project, e.g. 'summarization/demo'."""
    return sorted(p.relative_to(RECIPES).with_suffix("").as_posix() for p in RECIPES.rglob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by name or path, apply 'key.path=value' overrides, and check it.

    The options of the data source, of the federated method and of the judge are checked too, by their own models.

    Raises:
        RecipeError: one line for each thing that is wrong: key, value, what is allowed, nearest valid key.
    """
    path = _locate(name_or_path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise RecipeError(f"{path}{line}: this is not valid YAML ({getattr(error, 'problem', None) or error}).") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections ({', '.join(Recipe.model_fields)}), but this file holds {kind_of(tree)}.")
    tree = _unshared(tree)
    for override in overrides:
        _apply(tree, override)
    return parse_recipe(tree, str(path))


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Check a recipe that has been read already; where names it in errors.

    Raises:
        RecipeError: as load_recipe.
    """
    recipe = _with_judges_reward(check_section(Recipe, tree, where), where)
    from components.data import sources, templates
    from components.data.questions import names as question_sets
    from components.federation import strategy
    from components.models.adapters import AdapterStore
    from components.models.reward_functions import find_reward_function

    sources.check(recipe.data, where)
    for key, prompts in (("data.align_prompts", recipe.data.align_prompts), ("data.test_prompts", recipe.data.test_prompts)):
        if prompts is not None:
            sources.check_prompts(prompts, key, where)
    check_section(strategy.options_model(recipe.federation.method, where), recipe.federation.options, where, "federation.options")
    by_ppo = recipe.federation.options.get("objective") == "ppo"
    if by_ppo and len(recipe.rewards) != 1:
        raise RecipeError(f"{where}: federation.options.objective 'ppo' needs one reward model, but rewards names {len(recipe.rewards) or 'none'}: give a section such as rewards: {{preference: {{kind: judge}}}}.")
    objectives = recipe.federation.options.get("objectives")
    if objectives is not None:
        _check_objectives(recipe, objectives, where)
    if recipe.rewards and not by_ppo and objectives is None:
        raise RecipeError(f"{where}: rewards names {', '.join(recipe.rewards)}, which nothing uses: leave the section out, or set federation.options.objective to 'ppo'.")
    for reward in recipe.rewards.values():
        if reward.kind == "function":
            _named(where, lambda name=reward.name: find_reward_function(name))
    answers = recipe.evaluation.questions
    for key, section in (("thoughts", recipe.thoughts), ("evaluation.questions", answers)):
        for questions in section.questions if section else ():
            if questions.set not in question_sets():
                raise RecipeError(f"{where}: {unknown_name(f'{key}.questions.set', questions.set, question_sets())}")
    _check_parts(recipe, where)
    judge = recipe.evaluation.judge
    _check_judge(judge, where)
    try:
        strategy.build_strategy(recipe.federation, AdapterStore(Path()))
        asked = [(answers.template, "answer")] if answers else []
        for name, kind in ((recipe.selector.template, "selector"), (recipe.policy.template, "policy"), (judge.selector.template, "selector"), *asked):
            templates.load(name, kind)
    except (RecipeError, DataError) as error:
        raise RecipeError(f"{where}: {error}") from None
    return recipe


def _named(where: str, check: Callable[[], Any]) -> None:
    """Carry out a check; what it refuses is said with where it comes from."""
    try:
        check()
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _with_judges_reward(recipe: Recipe, where: str) -> Recipe:
    """The recipe with the reward itself where evaluation.judge.options.reward names one of its own."""
    judge = recipe.evaluation.judge
    name = judge.options.get("reward")
    if judge.kind != "reward" or not isinstance(name, str):
        return recipe
    if name not in recipe.rewards:
        raise RecipeError(f"{where}: {unknown_name('evaluation.judge.options.reward', name, recipe.rewards)} A section such as those under rewards works too.")
    found = judge.model_copy(update={"options": judge.options | {"reward": recipe.rewards[name].model_dump(mode="json")}})
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"judge": found})})


def _check_judge(judge: JudgeConfig, where: str) -> None:
    """Refuse a judge that is not known, and options that are not its own."""
    from components.evaluation import judges

    try:
        check_section(judges.options_model(judge.kind, where), judge.options, where, "evaluation.judge.options")
    except RecipeError as error:
        own = judges.options_model(judge.kind, where).model_fields
        others = [kind for kind in sorted(judges.JUDGES) if not judge.options.keys() <= own.keys() and judge.options.keys() <= judges.options_model(kind, where).model_fields.keys()]
        hint = f" These are options of the judge '{others[0]}': with another kind give evaluation.judge.options={{}} too, or options of its own." if others else ""
        raise RecipeError(f"{error}{hint}") from None


def _check_objectives(recipe: Recipe, objectives: dict[str, list[str]], where: str) -> None:
    """Refuse objectives whose rewards are not there or cannot score a response, and rewards that no objective has."""
    from components.federation.strategy import options_of

    optimizer, dropout = recipe.federation.optimizer, recipe.policy.lora.dropout
    for key, value, wanted in (("federation.optimizer.scheduler", optimizer.scheduler, "constant"), ("federation.optimizer.warmup_steps", optimizer.warmup_steps, 0),
                               ("federation.optimizer.accumulation", optimizer.accumulation, 1), ("policy.lora.dropout", dropout, 0.0)):
        if value != wanted:
            raise RecipeError(f"{where}: {key} is {value}, which PPO on sampled completions does not use: set it to {wanted}.")
    ppo, batch = options_of(recipe.federation).ppo, recipe.federation.batch_size
    if ppo.target_kl is not None and ppo.horizon <= batch / 5:
        raise RecipeError(f"{where}: federation.options.ppo.horizon is {ppo.horizon}, with which one batch of {batch} completions (federation.batch_size) could turn the penalty to the reference negative: set it above a fifth of the batch, or target_kl to null.")
    asked = [name for given in objectives.values() for name in given]
    for name in asked:
        if name not in recipe.rewards:
            raise RecipeError(f"{where}: {unknown_name('federation.options.objectives: reward', name, recipe.rewards)}")
        if recipe.rewards[name].kind == "judge":
            raise RecipeError(f"{where}: rewards.{name} is of kind 'judge', which compares two responses; an objective needs the score of one: use kind trained, classifier or function.")
    unused = sorted(set(recipe.rewards) - set(asked))
    if unused:
        raise RecipeError(f"{where}: rewards names {', '.join(unused)}, which no objective of federation.options.objectives has: leave it out, or name it there.")


def _check_parts(recipe: Recipe, where: str) -> None:
    """Refuse parts of question sets that have questions in common and must not, as far as the recipe shows it: those of one file, or of the hub.

    What two files have in common is seen when they are read. A count changes nothing: two samples may share questions.

    Raises:
        RecipeError: naming the first two.
    """
    from components.data.questions import parts_meet, pool

    grown = [(f"thoughts.questions[{n}]", section) for n, section in enumerate(recipe.thoughts.questions if recipe.thoughts else ())]
    asked = [(f"evaluation.questions.questions[{n}]", section) for n, section in enumerate(recipe.evaluation.questions.questions if recipe.evaluation.questions else ())]
    why = ", and answers to questions that trees are grown for say nothing of new ones"
    pairs = [*((*both, "") for both in combinations(grown, 2)), *((*both, "") for both in combinations(asked, 2) if both[0][1].set == both[1][1].set), *((*both, why) for both in product(asked, grown))]
    for (key, one), (other_key, other), reason in pairs:
        if pool(one.set) != pool(other.set) or (one.set == other.set and one.revision != other.revision) or not parts_meet(one.part, other.part):
            continue
        if (one.path and Path(one.path)) == (other.path and Path(other.path)):
            of = f"set {one.set}" if one.set == other.set else f"sets {one.set} and {other.set}, which ask the same questions,"
            raise RecipeError(f"{where}: {key} and {other_key}: parts {one.part} and {other.part} of {of} have questions in common{reason}: give each a part of its own, such as part: [0, 2] and [1, 2].")


def check_surroundings(recipe: Recipe) -> None:
    """Refuse what a recipe names outside itself and is not here: AlpacaEval's package, annotator, key and files.

    It is asked before a run is begun. load_recipe does not ask, for it also reads recipes of runs that are over.

    Raises:
        DataError: in one sentence.
    """
    if recipe.evaluation.alpaca_eval:
        from components.evaluation.alpaca import check_alpaca_eval

        check_alpaca_eval(recipe.evaluation.alpaca_eval)


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _locate(name_or_path: str) -> Path:
    for candidate in (RECIPES / f"{name_or_path}.yaml", Path(name_or_path)):
        if candidate.is_file():
            return candidate
    raise RecipeError(f"{unknown_name('recipe', name_or_path, recipe_names())} A path to a YAML file works too.")


def _unshared(node: Any) -> Any:
    """YAML with each alias as a value of its own, so that an override of one place changes no other."""
    if isinstance(node, dict):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override '{override}': expected key.path=value, e.g. federation.rounds=10.")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise RecipeError(f"override '{override}': the value is not valid YAML.") from None
    *sections, last = key.split(".")
    node = tree
    for depth, section in enumerate(sections):
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"override '{override}': {'.'.join(sections[: depth + 1])} is {kind_of(child)}, not a section with keys of its own.")
        node = child
    node[last] = value
