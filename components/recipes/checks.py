"""Checks of a recipe across its sections, which read no files but templates.

A method, its aggregator, a judge and rewards check a recipe themselves (`check`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from components.config import QuestionsConfig, Recipe, RecipeError, unknown_name
from components.recipes.privacy_checks import check_privacy, prompts_needed


def _check_question_sets(recipe: Recipe) -> None:
    from components.data.questions import names

    for use in _question_uses(recipe):
        if use.section.set not in names():
            key = f"{use.key.partition('[')[0]}.set"
            raise RecipeError(unknown_name(key, use.section.set, names()))


@dataclass(frozen=True)
class _QuestionUse:
    """A use of a question set."""

    key: str  # of the section
    section: QuestionsConfig  # the set, and the part of it
    trains: bool  # whether trees are grown from it, rather than questions answered


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


def _check_pooled(recipe: Recipe) -> None:
    """Refuse methods whose clients have models of their own, where one client has all pairs."""
    if recipe.data.pooled and recipe.federation.options.has_own_models:
        raise RecipeError(
            f"data.pooled has one client, but federation.method '{recipe.federation.method}' ends with a"
            " model for each client: use a method with one model for all, such as feddpo or fedbis."
        )


def _check_unseen(recipe: Recipe) -> None:
    """Refuse clients in no round where rounds need all, or where they would train by rewards."""
    data, config = recipe.data, recipe.federation
    if not data.unseen_clients:
        if data.unseen_pairs != type(data).model_fields["unseen_pairs"].default:
            raise RecipeError(
                f"data.unseen_pairs is {data.unseen_pairs}, but data.unseen_clients is 0, so that no client"
                " is left out of the rounds: set data.unseen_clients, or leave out data.unseen_pairs."
            )
        return
    if data.clients is not None and data.clients - data.unseen_clients < config.clients_per_round:
        raise RecipeError(
            f"data.clients is {data.clients}, of which data.unseen_clients leaves"
            f" {data.clients - data.unseen_clients} to train, but federation.clients_per_round is"
            f" {config.clients_per_round}: use more clients, or fewer in a round."
        )
    if recipe.rewards and config.options.has_own_models:
        raise RecipeError(
            f"data.unseen_clients is {data.unseen_clients}, and federation.method '{config.method}' would"
            f" train their models by rewards ({', '.join(recipe.rewards)}), which only clients of rounds"
            " have: set data.unseen_clients to 0, or use an objective without rewards."
        )


KEYS_OF_ROWS = (
    "path",
    "revision",
    "trees",
    "min_margin",
    "clients",
    "columns",
    "max_pairs",
    "unseen_clients",
    "pooled",
    "drop_invalid",
    "messages",
)
"""Keys of the section data that say what is done with rows which the run has."""


def _check_owners(recipe: Recipe) -> None:
    """Refuse settings that need the rows, where these stay with their owners."""
    from components.data.sources.owners import Owners, owner_names

    data, names = recipe.data, owner_names(recipe)
    if any(isinstance(part.options, Owners) for part in getattr(data.options, "sources", ())):
        raise RecipeError(
            "data.options.sources names the source 'owners', which has no rows to mix: leave it out."
        )
    if not names:
        if recipe.runtime.sockets is not None:
            raise RecipeError(
                "runtime.sockets is for data.source 'owners': leave it out, or use this source."
            )
        return
    if recipe.runtime.transport == "prefect":
        raise RecipeError(
            "data.source 'owners' needs runtime.transport 'processes', which reaches the owners' processes."
        )
    if data.partition != "natural" or recipe.thoughts is not None:
        key = "thoughts" if recipe.thoughts is not None else "data.partition"
        raise RecipeError(
            f"{key} would mix rows of owners, which data.source 'owners' keeps apart: leave it out."
        )
    for key in KEYS_OF_ROWS:
        field = type(data).model_fields[key]
        if getattr(data, key) != field.get_default(call_default_factory=True):
            raise RecipeError(
                f"data.{key} is not used with data.source 'owners', which keep their rows: leave it out."
            )
    _check_servers_data(recipe)
    config = recipe.federation
    if config.options.local().own == "examples":
        raise RecipeError(
            f"federation.method '{config.method}' puts pairs of clients into prompts, and answers may quote"
            " them to the server: use another method with data.source 'owners'."
        )
    if config.clients_per_round > len(names):
        raise RecipeError(
            f"federation.clients_per_round is {config.clients_per_round}, but data.options.owners names"
            f" {len(names)}: use at most {len(names)}."
        )


def _check_servers_data(recipe: Recipe) -> None:
    """Refuse a server without prompts, or without pairs that a judge or a reward is trained on."""
    data = recipe.data
    for key in prompts_needed(recipe):
        if getattr(data, key) is None:
            raise RecipeError(
                f"data.{key} is missing: with data.source 'owners' the server's prompts come from a data set"
                " of its own, since no owner gives any."
            )
    readers = {"evaluation.judge": recipe.evaluation.judge.uses_judge_pairs}
    readers |= {f"rewards.{name}": reward.uses_judge_pairs for name, reward in recipe.rewards.items()}
    untrained = [key for key, reads in readers.items() if reads]
    if untrained and getattr(data.options, "judge", None) is None:
        raise RecipeError(
            f"data.options.judge is missing: {untrained[0]} is trained on pairs, and no owner gives any. Give"
            " a file of the server's own."
        )


def check_sections(recipe: Recipe) -> None:
    """Refuse sections that do not fit together.

    Raises:
        RecipeError, DataError: of the first that does not fit.
    """
    from components.data import templates
    from components.data.sources import check_columns
    from components.models.lora_targets import TargetError, check_target_names

    check_columns(recipe.data)
    _check_question_sets(recipe)
    _check_question_parts(recipe)
    recipe.federation.options.check(recipe)
    _check_pooled(recipe)
    _check_unseen(recipe)
    _check_owners(recipe)
    check_privacy(recipe)
    recipe.evaluation.judge.check(recipe)
    for reward in recipe.rewards.values():
        reward.check(recipe)
    templates.load(recipe.selector.template, "selector")
    templates.load(recipe.policy.template, "policy")
    if recipe.evaluation.questions is not None:
        templates.load(recipe.evaluation.questions.template, "answer")
    try:
        check_target_names(recipe)
    except TargetError as error:
        raise RecipeError(str(error)) from None
