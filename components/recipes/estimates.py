"""Peak memory and disk of a recipe, from the configurations of its models.

Each stage is estimated with all models that are in memory at the same time: for one GPU, or for the CPU
where runtime.devices names it. Which devices this machine has matters to `check_fit` alone.
What a model's config.json does not tell is left out and said; nothing is guessed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.config import (
    BackboneConfig,
    FrozenModel,
    LoraConfig,
    MultiObjective,
    PairPpoObjective,
    PersonalModules,
    PolicyConfig,
    Recipe,
    SelectorConfig,
    UserError,
)
from components.config.local_objectives import SftObjective
from components.config.privacy import LabelPrivacy
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.learning.reward_model import TrainedReward
from components.models.backbone import BackboneError, cuda_memory, read_model_config
from components.models.memory import FP32, ModelShape, StepShape, inference_bytes, training_bytes
from components.reporting.page import Table, text_table

GIGA = 10**9
CHECKPOINTING = "backbone.gradient_checkpointing"
GENERATION = "policy.generation_batch_size"


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe that trains a model, or scores and generates by frozen ones."""

    name: str
    backbone: BackboneConfig  # that is trained, or that of the first frozen model
    step: StepShape  # what goes through it at once
    lower: str  # keys that lower its memory
    lora: LoraConfig = field(default_factory=LoraConfig)  # of what is trained
    optimizer: str = ""  # empty where nothing is trained
    modules: PersonalModules | None = None  # a client's own modules; None without
    frozen: Sequence[FrozenModel] = ()  # that are in memory; where nothing is trained, all models


def all_stages(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe that load models."""
    policy, method, judge = recipe.policy, recipe.federation.options, recipe.evaluation.judge
    tokens = policy.max_prompt_tokens, policy.max_new_tokens
    writer = FrozenModel("policy", policy.backbone, policy.generation_batch_size, *tokens, policy.lora)
    stages = [*_tree_stages(recipe, writer), *_reward_stages(recipe), rounds_stage(recipe)]
    if recipe.aligns_a_policy:
        stages.append(_alignment_stage(recipe))
    if isinstance(judge, SelectorJudgeSection):
        key, section = "evaluation.judge", judge.selector
        step = _trained_rows(section, judge.micro_batch_size or judge.batch_size)
        lower = f"{key}.micro_batch_size, {key}.selector.{CHECKPOINTING}"
        stages.append(Stage("judge", section.backbone, step, lower, section.lora, judge.optimizer.name))
    if method.sampling:
        lower = f"{GENERATION}, the rewards' batch_size"
        stages.append(_frozen_stage("rollouts", [writer, *_reward_models(recipe)], lower))
    stages.append(_frozen_stage("answers", [writer], GENERATION))
    if models := judge.frozen_models():
        stages.append(_frozen_stage("judge", models, "evaluation.judge"))
    return stages


def _frozen_stage(name: str, models: Sequence[FrozenModel], lower: str) -> Stage:
    first = models[0]
    step = StepShape(first.rows, first.tokens + first.new_tokens)
    return Stage(name, first.backbone, step, lower, frozen=models)


def _tree_stages(recipe: Recipe, writer: FrozenModel) -> list[Stage]:
    """The growth of trees of thoughts by the policy, whose thoughts an evaluator scores."""
    thoughts = recipe.thoughts
    if thoughts is None:
        return []
    writer = replace(writer, lora=None, new_tokens=thoughts.max_thought_tokens)
    models = [writer, *thoughts.evaluator.frozen_models()]
    lower = f"thoughts.loading (in_turn), thoughts.evaluator.batch_size, {GENERATION}"
    if thoughts.loading == "in_turn":
        return [_frozen_stage(f"trees: {model.name}", [model], lower) for model in models]
    return [_frozen_stage("trees", models, lower)]


def _reward_stages(recipe: Recipe) -> list[Stage]:
    """The training of rewards, and their scores of pairs before the rounds."""
    stages = []
    for name, reward in recipe.rewards.items():
        if isinstance(reward, TrainedReward):
            key, training = f"rewards.{name}.training", reward.training
            step = StepShape(2 * training.batch_size, reward.max_length)
            backbone = training.backbone.model_copy(update={"dtype": "float32"})
            lower = f"{key}.batch_size, {key}.{CHECKPOINTING}"
            stages.append(Stage(f"training of {name}", backbone, step, lower, training.lora, "adamw"))
        models = reward.frozen_models(f"reward {name}")
        if models and not recipe.federation.options.sampling:
            stages.append(_frozen_stage(f"reward {name}", models, f"rewards.{name}.batch_size"))
    return stages


def _reward_models(recipe: Recipe) -> list[FrozenModel]:
    return [model for name, one in recipe.rewards.items() for model in one.frozen_models(f"reward {name}")]


def rounds_stage(recipe: Recipe) -> Stage:
    """A client's local training."""
    config, method = recipe.federation, recipe.federation.options
    local, section = method.local(), recipe.trained
    objective = local.objective
    batch, completions = config.batch_size, 2
    if isinstance(objective, MultiObjective):
        batch, completions = objective.ppo.minibatch, 1
    elif isinstance(objective, PairPpoObjective):
        batch = objective.minibatch
    elif isinstance(objective, SftObjective):
        privacy = config.privacy
        corrects = isinstance(privacy, LabelPrivacy) and privacy.debias
        completions = 2 if corrects else 1  # the corrected loss is of both
    step = _trained_rows(section, min(batch, config.micro_batch_size or batch), completions)
    step = replace(step, entropies=isinstance(objective, MultiObjective | PairPpoObjective))
    lower = f"federation.micro_batch_size, {method.trained_model}.{CHECKPOINTING}"
    rewards = _reward_models(recipe) if method.sampling else ()
    optimizer = config.optimizer.name
    return Stage("rounds", section.backbone, step, lower, section.lora, optimizer, local.personal, rewards)


def _alignment_stage(recipe: Recipe) -> Stage:
    """DPO on the server, checkpointed on CUDA in any case."""
    policy, dpo = recipe.policy, recipe.alignment.dpo
    step = _trained_rows(policy, dpo.micro_batch_size)
    checkpointing = on_cuda(recipe) or policy.backbone.gradient_checkpointing
    backbone = policy.backbone.model_copy(update={"gradient_checkpointing": checkpointing})
    lower = "alignment.dpo.micro_batch_size"
    return Stage("alignment", backbone, step, lower, policy.lora, dpo.optimizer)


def _trained_rows(section: SelectorConfig | PolicyConfig, rows: int, completions: int = 2) -> StepShape:
    """Rows of comparisons, or of a prompt and its completions."""
    if isinstance(section, SelectorConfig):
        return StepShape(rows, section.max_length, one_position=True)
    written = completions * section.max_new_tokens
    tokens = section.max_prompt_tokens + written
    return StepShape(rows, tokens, logit_positions=rows * written, shared_prompts=completions > 1)


def on_cuda(recipe: Recipe) -> bool:
    """Whether the estimate is for a GPU: unless runtime.devices names the CPU."""
    return recipe.runtime.devices != ["cpu"]


class Shapes:
    """The shapes of backbones, from their config.json, each of which is read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str | None], Mapping[str, Any] | BackboneError] = {}

    def of(self, backbone: BackboneConfig, cuda: bool = True) -> ModelShape:
        """The shape of a backbone; a UserError says why it is not known, in one line."""
        key = (backbone.location, backbone.revision)
        if key not in self._read:
            try:
                self._read[key] = read_model_config(backbone)
            except BackboneError as error:
                self._read[key] = error
        config = self._read[key]
        if isinstance(config, BackboneError):
            raise config
        return ModelShape.from_config(config, backbone, cuda)


@dataclass(frozen=True)
class Peak:
    """The estimated peak memory of a stage, in bytes."""

    stage: Stage
    weights: list[tuple[str, BackboneConfig, int]]  # of all models that are in memory, by their names
    rest: int  # of what is computed and trained

    @property
    def total(self) -> int:
        return self.rest + sum(size for _, _, size in self.weights)


def estimate_memory(stage: Stage, shapes: Shapes, cuda: bool) -> Peak:
    """Peak memory of a stage; a UserError of one line if the shape of a model is not known."""
    frozen = [(model, shapes.of(model.backbone, cuda)) for model in stage.frozen]
    weights = [(model.name, model.backbone, shape.weight_bytes) for model, shape in frozen]
    if not stage.optimizer:  # the models compute one after the other
        return Peak(stage, weights, max(inference_bytes(shape, model) for model, shape in frozen))
    shape = shapes.of(stage.backbone, cuda)
    personal = personal_values(shape, stage.modules)
    rest = training_bytes(shape, stage.lora, stage.step, stage.optimizer, personal)
    return Peak(stage, [("the trained model", stage.backbone, shape.weight_bytes), *weights], rest)


def personal_values(shape: ModelShape, modules: PersonalModules | None) -> int:
    """Values of a client's own modules: its head, the bottleneck and the reward head."""
    if modules is None:
        return 0
    head = shape.vocabulary * shape.hidden
    bottleneck = (2 * shape.hidden + 1) * modules.bottleneck.width if modules.bottleneck else 0
    reward = (shape.hidden + 1) * modules.reward.width if modules.reward else 0
    return head + bottleneck + reward


def estimate_disk(recipe: Recipe, shapes: Shapes) -> int:
    """Bytes on disk of the adapters of a run; a UserError as of estimate_memory.

    They are those of the server, every keep_every rounds (also logged to MLflow) and of two commits, the
    updates of the clients of a round, and modules that clients keep to themselves after two rounds.
    """
    config = recipe.federation
    stage = rounds_stage(recipe)
    shape = shapes.of(stage.backbone, on_cuda(recipe))
    adapter = FP32 * shape.lora_values(stage.lora)
    per_round = config.options.server_adapters(config) * adapter
    kept = config.rounds // config.keep_every + 2 - (-config.rounds // config.keep_every)
    private = 2 * FP32 * personal_values(shape, stage.modules)
    clients = recipe.data.clients or config.clients_per_round
    return adapter + kept * per_round + config.clients_per_round * adapter + clients * private


@dataclass(frozen=True)
class Costs:
    """The estimates of a recipe."""

    place: str  # what the memory is of, as text
    memory: list[Peak]  # by stage
    disk: int | None  # bytes of the rounds; None if it is not known
    problems: dict[str, list[str]]  # why something is not estimated, and what


def estimate_costs(recipe: Recipe, shapes: Shapes) -> Costs:
    """The estimates of a recipe; what is not known is a problem."""
    cuda = on_cuda(recipe)
    memory, disk = [], None
    problems: dict[str, list[str]] = defaultdict(list)
    for stage in all_stages(recipe):
        try:
            memory.append(estimate_memory(stage, shapes, cuda))
        except UserError as error:
            problems[str(error)].append(stage.name)
    try:
        disk = estimate_disk(recipe, shapes)
    except UserError as error:
        problems[str(error)].append("disk of the rounds")
    return Costs("one GPU" if cuda else "the CPU", memory, disk, problems)


def check_fit(recipe: Recipe) -> None:
    """Refuse a recipe of which a stage needs more memory than a GPU of this machine has that it runs on.

    Raises:
        UserError: names the stage, its models, and what lowers its memory.
    """
    runtime = recipe.runtime
    if runtime.check_memory and runtime.ray_address is None and (problem := describe_misfit(recipe)):
        raise UserError(f"{recipe.name}: {problem}")


def describe_misfit(recipe: Recipe) -> str | None:
    """The stage that exceeds the memory of the smallest GPU that is visible here the most; None if all fit.

    Stages with a device_map are left out, since the weights on the device follow from what is free.
    """
    memory: dict[str, int] = {}
    if on_cuda(recipe):
        with contextlib.suppress(BackboneError):  # the run refuses a device that does not exist
            memory = cuda_memory(recipe.runtime.devices)
    if not memory:
        return None
    device = min(memory, key=lambda name: memory[name])
    peaks = [
        peak
        for peak in estimate_costs(recipe, Shapes()).memory
        if all(backbone.device_map is None for _, backbone, _ in peak.weights)
    ]
    peak = max(peaks, key=lambda one: one.total, default=None)
    if peak is None or peak.total <= memory[device]:
        return None
    sizes = ", ".join(f"{name} ({model.name}) {_gigabytes(size)}" for name, model, size in peak.weights)
    others = f", leaving {device} out of runtime.devices" if len(set(memory.values())) > 1 else ""
    return (
        f"the stage '{peak.stage.name}' needs an estimated {_gigabytes(peak.total)} GB, and {device} has"
        f" {_gigabytes(memory[device])} GB: weights of {sizes}, and {_gigabytes(peak.rest)} for what is"
        f" computed. Change {peak.stage.lower}, take smaller or quantized models or backbone.device_map, or"
        f" use a GPU with more memory{others}; the estimate has all rows at their full length, and"
        " runtime.check_memory=false leaves this check out."
    )


def describe_costs(recipe: Recipe) -> str:
    """The estimates as a table of gigabytes, for the command `check`; one line for each unknown model."""
    lines = _cost_lines(estimate_costs(recipe, Shapes()))
    if recipe.runtime.ray_address is not None and (misfit := describe_misfit(recipe)):
        lines.append(f"warning: if the GPUs of the cluster are like those of this machine, {misfit}")
    return "\n".join(lines)


def describe_arms(recipes: Mapping[str, Recipe]) -> str:
    """The estimates of the arm of a benchmark with the largest peak, and what is not estimated of any."""
    shapes = Shapes()
    costs = {arm: estimate_costs(recipe, shapes) for arm, recipe in recipes.items()}
    largest = max(costs, key=lambda arm: max((peak.total for peak in costs[arm].memory), default=0))
    problems = {problem: names for own in costs.values() for problem, names in own.problems.items()}
    heading = [f"the arm with the largest peak, {largest}:"] if costs[largest].memory else []
    return "\n".join([*heading, *_cost_lines(replace(costs[largest], problems=problems))])


def _cost_lines(costs: Costs) -> list[str]:
    lines = []
    if costs.memory:
        other = "" if costs.place == "the CPU" else "; with runtime.devices=[cpu] for the CPU"
        lines.append(f"peak memory by stage (GB), estimated for {costs.place}{other}")
        rows = []
        for peak in costs.memory:
            stage, sizes = peak.stage, (peak.total - peak.rest, peak.rest, peak.total)
            size = f"{stage.step.rows} x {stage.step.tokens:,}"
            rows.append([f"{stage.name} ({stage.backbone.name})", size, *map(_gigabytes, sizes)])
        lines += text_table(Table("  stage", ["", "batch x tokens", "weights", "rest", "total"], rows))
    if costs.disk is not None:
        lines.append(f"estimated disk of the rounds (GB): {_gigabytes(costs.disk)}")
    unknown = [f"not estimated: {', '.join(names)}: {problem}" for problem, names in costs.problems.items()]
    return lines + unknown


def _gigabytes(size: int) -> str:
    value = size / GIGA
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
