"""Checks of a recipe's models from their config.json and tokenizers, before a run starts.

They take seconds, and read no weights. A model of the hub that cannot be reached is not checked, nor
is an embedded one that the first run generates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from components.config import BackboneConfig, PolicyConfig, Recipe, SelectorConfig
from components.config.thoughts import EvaluatorOptions
from components.data.templates import load as load_template
from components.evaluation.judges.autoj import AutoJSection
from components.evaluation.judges.autoj import read_model_config as read_judge_config
from components.evaluation.judges.reward import RewardJudgeSection
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.learning.reward_model import TrainedReward
from components.models.backbone import (
    EMBEDDED,
    TINY,
    BackboneError,
    check_architecture,
    check_layers,
    check_weights,
    is_local,
    load_tokenizer,
    read_model_config,
)
from components.models.lora_targets import TargetError
from components.models.policy import check_prompts, used_ids
from components.models.rewards.classifier import ClassifierReward
from components.models.rewards.function import FunctionReward, find_reward_function
from components.models.rewards.reward_section import RewardSection
from components.models.selector import check_room, find_choice_tokens, template_ids
from components.models.store import AdapterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelUse:
    """A use of a backbone."""

    key: str  # of its section
    backbone: BackboneConfig  # the section
    length: int  # longest input, with what is generated (tokens)
    settings: str  # the keys that determine it
    # of the selector or the policy; None for other models.
    section: SelectorConfig | PolicyConfig | None = None


def check_models(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Refuse models that a run would fail with.

    Returns:
        names of the models of the hub that cannot be read from here, and were not checked; and what
        may be wrong with others, as sentences.

    Raises:
        UserError: names the key, what is wrong with the model, and what to do.
    """
    for key, reward in _rewards(recipe):
        if isinstance(reward, ClassifierReward) and is_local(reward.location):
            reward.check_files(key)
            reward.load_weights(device_map={"": "meta"})
            reward.check_template()
        if isinstance(reward, FunctionReward):
            find_reward_function(reward.name)
    judge = recipe.evaluation.judge
    if isinstance(judge, AutoJSection) and judge.base_url is None and is_local(judge.location):
        read_judge_config(judge)
    unread: dict[str, None] = {}
    warnings: list[str] = []
    for use in model_uses(recipe):
        try:
            config = read_model_config(use.backbone)
        except BackboneError:
            if is_local(use.backbone.location):
                raise
            if use.backbone.name not in (EMBEDDED, TINY):
                unread[use.backbone.name] = None
            continue
        _check_size(use, config)
        if use.backbone.name not in (EMBEDDED, TINY):  # they fit, and importing transformers takes seconds
            warnings += _check_model(use, config)
    return list(unread), warnings


def model_uses(recipe: Recipe) -> Iterator[ModelUse]:
    """The backbones that a recipe uses in this process, and how long their inputs are."""
    extra = recipe.federation.options.local().example_tokens
    if recipe.federation.options.trained_model == "selector":
        use = _selector_use("selector", recipe.selector)
        yield replace(use, length=use.length + extra)
        extra = 0
    for use in _policy_uses(recipe):
        yield replace(use, length=use.length + extra)
    judge = recipe.evaluation.judge
    if isinstance(judge, SelectorJudgeSection):
        yield _selector_use("evaluation.judge.selector", judge.selector)
    for key, reward in _rewards(recipe):
        if isinstance(reward, TrainedReward):
            backbone = reward.training.backbone
            yield ModelUse(f"{key}.training", backbone, reward.max_length, f"{key}.max_length")
    for writer in (judge, recipe.thoughts.evaluator if recipe.thoughts else None):
        if isinstance(writer, AutoJSection | EvaluatorOptions) and writer.base_url is None:
            settings = f"{writer.where}.max_prompt_tokens and {writer.where}.max_new_tokens"
            length = writer.max_prompt_tokens + writer.max_new_tokens
            yield ModelUse(writer.where, writer.local.backbone, length, settings)


def prompt_templates(recipe: Recipe) -> dict[str, str]:
    """The templates in which a run's selectors and policy read their inputs, by section."""
    templates = {use.key: str(use.section.template) for use in model_uses(recipe) if use.section}
    if recipe.evaluation.questions is not None:
        templates["evaluation.questions"] = str(recipe.evaluation.questions.template)
    return templates


def required_backbones(recipe: Recipe) -> list[str]:
    """Names of the backbones that a recipe uses, sorted."""
    backbones = [recipe.policy.backbone, recipe.trained.backbone]
    backbones += recipe.evaluation.judge.required_backbones()
    for reward in recipe.rewards.values():
        backbones += reward.required_backbones()
    names = {backbone.location for backbone in backbones}
    if recipe.thoughts is not None and recipe.thoughts.evaluator.base_url is None:
        names.add(recipe.thoughts.evaluator.location)
    return sorted(names)


def _rewards(recipe: Recipe) -> Iterator[tuple[str, RewardSection]]:
    """The rewards of a recipe and that of its judge, with their keys."""
    for name, reward in recipe.rewards.items():
        yield f"rewards.{name}", reward
    judge = recipe.evaluation.judge
    if isinstance(judge, RewardJudgeSection) and judge.reward not in recipe.rewards.values():
        yield "evaluation.judge.reward", judge.reward


def _selector_use(key: str, section: SelectorConfig) -> ModelUse:
    return ModelUse(key, section.backbone, section.max_length, f"{key}.max_length", section)


def _policy_uses(recipe: Recipe) -> Iterator[ModelUse]:
    """The policy answers prompts and questions, and writes thoughts."""
    policy = recipe.policy
    answers = {"policy.max_new_tokens": policy.max_new_tokens}
    if recipe.evaluation.questions is not None:
        answers["evaluation.questions.max_new_tokens"] = recipe.evaluation.questions.max_new_tokens
    if recipe.thoughts is not None:
        answers["thoughts.max_thought_tokens"] = recipe.thoughts.max_thought_tokens
    key, longest = max(answers.items(), key=lambda item: item[1])
    settings = f"policy.max_prompt_tokens and {key}"
    yield ModelUse("policy", policy.backbone, policy.max_prompt_tokens + longest, settings, policy)


def _check_size(use: ModelUse, config: Mapping[str, Any]) -> None:
    """Refuse inputs longer than the positions, and more layers than the model has."""
    depth = config.get("num_hidden_layers", config.get("n_layer", config.get("num_layers")))
    if isinstance(depth, int):
        check_layers(use.backbone, depth)
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(positions, int) and use.length > positions:
        raise BackboneError(
            f"{use.key}.backbone '{use.backbone.name}' has {positions} positions, but its inputs have up to"
            f" {use.length} tokens ({use.settings}): lower these settings, or use another backbone."
        )


def _check_model(use: ModelUse, config: Mapping[str, Any]) -> Iterator[str]:
    """Refuse a kind of model, a tokenizer or files that a run would fail with; what else may be wrong."""
    from components.models.adapters import AdapterSlot, attach_lora

    check_architecture(use.backbone.name, config)
    tokenizer = load_tokenizer(use.backbone)
    _check_tokens(use, config, tokenizer)
    if is_local(use.backbone.location):
        model, unused = check_weights(use.backbone)
        if unused:
            yield (
                f"{use.key}.backbone '{use.backbone.name}': its files have {len(unused)} weights that the"
                f" model does not use, such as {unused[0]}: see whether config.json belongs to them."
            )
        if use.section is not None:
            try:  # attached on the meta device
                AdapterSlot(attach_lora(model, use.section.lora))
            except (TargetError, AdapterError) as error:
                targets = f"{use.key}.lora.target_modules"
                raise TargetError(str(error).replace("lora.target_modules", targets)) from None


def _check_tokens(use: ModelUse, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse texts that do not fit, and tokens beyond the rows of the embedding that are used.

    They are special tokens and those of a template; other tokens may be there and unused.
    """
    rows = config.get("vocab_size")
    for role in ("bos_token", "eos_token", "pad_token"):
        token_id = getattr(tokenizer, f"{role}_id")
        if isinstance(rows, int) and token_id is not None and token_id >= rows:
            raise BackboneError(
                f"{use.key}.backbone '{use.backbone.name}': {role} {getattr(tokenizer, role)!r} has the"
                f" id {token_id}, but the embedding has {rows} rows: resize the embedding and save the model"
                f" again, or remove {role} from tokenizer_config.json."
            )
    if isinstance(use.section, PolicyConfig):
        day = use.section.chat_date or date.today().isoformat()  # a run without one begins by choosing it
        section = use.section.model_copy(update={"chat_date": day})
        check_prompts(section)
        used = used_ids(section)
    elif use.section is not None:
        template = load_template(use.section.template, "selector")
        check_room(tokenizer, template, use.section.max_length)
        used = {*find_choice_tokens(tokenizer, template.pieces[-1]), *template_ids(tokenizer, template)}
    else:
        return
    beyond = sorted(token for token in used if isinstance(rows, int) and token >= rows)
    if beyond:
        raise BackboneError(
            f"{use.key}.backbone '{use.backbone.name}': its inputs have the token"
            f" {tokenizer.convert_ids_to_tokens(beyond[0])!r} of the id {beyond[0]}, but the embedding has"
            f" {rows} rows: resize the embedding and save the model again, or use another template."
        )
