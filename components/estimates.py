"""Peak memory and disk of a recipe, from the configurations of its models.

Each stage is estimated with all models that are in memory at the same time: for one GPU, or for the CPU
where runtime.devices names it. Which devices this machine has matters to `check_fit` alone.
What a model's config.json does not tell is left out and said; nothing is guessed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from components.config import (
    BackboneConfig,
    FrozenModel,
    LocalObjective,
    LoraConfig,
    MultiObjective,
    PairPpoObjective,
    PersonalModules,
    Recipe,
    SelectorConfig,
    UserError,
)
from components.config.local_objectives import SftObjective
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.federation.method import method_of
from components.federation.personalization import PersonalizedMethod
from components.learning.reward_model import TrainedReward
from components.models.backbone import BackboneError, choose_devices, cuda_memory, read_model_config
from components.models.memory import (
    FP32,
    ForwardShape,
    MemoryEstimate,
    ModelShape,
    Precision,
    StepShape,
    TrainedValues,
    estimate_forward,
    estimate_step,
    step_flops,
)
from components.models.speed import flops_per_second
from components.progress import format_duration

GIGA = 10**9
TERMS = (
    "weights",
    "adapter",
    "gradients",
    "optimizer",
    "activations",
    "backward",
    "logits",
    "cache",
    "total",
)
"""Attributes of a MemoryEstimate."""
CHECKPOINTING = "{}.backbone.gradient_checkpointing"
GENERATION = "policy.generation_batch_size"
SCORING = "the rewards' batch_size"
COLUMNS = ("stage", "rows x tokens", *TERMS)
ARM_COLUMNS = ("arm", "peak", "stage", "on", "disk", "not estimated")


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
    frozen: tuple[FrozenModel, ...] = ()  # that are in memory; where nothing is trained, all models
    # Number of forward and backward passes of `step` in the whole run; None if it depends on the
    # pairs or on what the model samples.
    passes: int | None = None


@dataclass(frozen=True)
class DiskEstimate:
    """Terms of the disk space of a run's adapters, in bytes."""

    server: int  # those of the server in the run's folder: every keep_every rounds, and of two commits
    logged: int  # those that are logged to MLflow, every keep_every rounds
    updates: int  # updates of the clients of a round
    private: int  # modules that clients keep to themselves, after their last two rounds

    @property
    def total(self) -> int:
        """Sum of the terms."""
        return self.server + self.logged + self.updates + self.private


def training_stages(recipe: Recipe, prompts: int | None = None) -> list[Stage]:
    """The stages of a recipe that train a policy or a selector; prompts as of alignment_stage."""
    stages = [rounds_stage(recipe)]
    if recipe.federation.options.needs_server_prompts:
        stages.append(alignment_stage(recipe, prompts))
    judge = recipe.evaluation.judge
    if isinstance(judge, SelectorJudgeSection):
        section, optimizer = judge.selector, judge.optimizer
        step = _selector_step(section, judge.micro_batch_size or judge.batch_size)
        passes = judge.steps * optimizer.accumulation * _parts(judge.batch_size, step.rows)
        lower = f"evaluation.judge.micro_batch_size, {CHECKPOINTING.format('evaluation.judge.selector')}"
        stages.append(
            Stage("judge", section.backbone, step, lower, section.lora, optimizer.name, passes=passes)
        )
    return stages


def all_stages(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe that load models."""
    policy = policy_model(recipe)
    stages = [*tree_stages(recipe), *reward_stages(recipe), *training_stages(recipe)]
    if method_of(recipe.federation).scores_completions:
        stages.append(
            _frozen_stage("rollouts", [policy, *_reward_models(recipe)], f"{GENERATION}, {SCORING}")
        )
    stages.append(_frozen_stage("answers", [policy], GENERATION))
    judge = recipe.evaluation.judge
    if models := judge.frozen_models():
        stages.append(_frozen_stage("judge", models, "evaluation.judge"))
    return stages


def tree_stages(recipe: Recipe) -> list[Stage]:
    """The growth of trees of thoughts by the policy, whose thoughts an evaluator scores."""
    thoughts = recipe.thoughts
    if thoughts is None:
        return []
    writer = replace(policy_model(recipe), lora=None, new_tokens=thoughts.max_thought_tokens)
    models = [writer, *thoughts.evaluator.frozen_models()]
    lower = f"thoughts.loading (in_turn), thoughts.evaluator.batch_size, {GENERATION}"
    if thoughts.loading == "in_turn":
        return [_frozen_stage(f"trees: {model.name}", [model], lower) for model in models]
    return [_frozen_stage("trees", models, lower)]


def reward_stages(recipe: Recipe) -> list[Stage]:
    """The training of rewards, and their scores of pairs before the rounds."""
    stages = []
    for name, reward in recipe.rewards.items():
        if isinstance(reward, TrainedReward):
            training = reward.training
            rows = 2 * training.batch_size
            checkpointing = training.backbone.gradient_checkpointing
            step = StepShape(rows, reward.max_length, checkpointing=checkpointing)
            backbone = training.backbone.model_copy(update={"dtype": "float32"})
            lower = f"rewards.{name}.training.batch_size, {CHECKPOINTING.format(f'rewards.{name}.training')}"
            stages.append(Stage(f"training of {name}", backbone, step, lower, training.lora, "adamw"))
        models = reward.frozen_models(f"reward {name}")
        if models and not method_of(recipe.federation).scores_completions:
            stages.append(_frozen_stage(f"reward {name}", models, f"rewards.{name}.batch_size"))
    return stages


def policy_model(recipe: Recipe) -> FrozenModel:
    """The policy, as it answers prompts."""
    policy = recipe.policy
    return FrozenModel(
        "policy",
        policy.backbone,
        policy.generation_batch_size,
        policy.max_prompt_tokens,
        policy.max_new_tokens,
        policy.lora,
    )


def _reward_models(recipe: Recipe) -> list[FrozenModel]:
    models = [reward.frozen_models(f"reward {name}") for name, reward in recipe.rewards.items()]
    return list(chain.from_iterable(models))


def _frozen_stage(name: str, models: Sequence[FrozenModel], lower: str) -> Stage:
    first = models[0]
    step = StepShape(first.rows, first.tokens + first.new_tokens)
    return Stage(name, first.backbone, step, lower, frozen=tuple(models))


def rounds_stage(recipe: Recipe) -> Stage:
    """A client's local training."""
    config = recipe.federation
    method = method_of(config)
    section = method.trained_section(recipe)
    frozen: list[FrozenModel] = []
    if isinstance(section, SelectorConfig):
        step = _selector_step(section, config.micro_batch_size or config.batch_size)
    else:
        step = _policy_step(recipe, method.local_objective)
        if method.scores_completions:
            frozen = _reward_models(recipe)
    passes = None
    if config.local_epochs is None and not step.entropies:  # both depend on the pairs or the samples
        gradients = config.rounds * config.clients_per_round * method.gradient_evaluations(config, 0)
        passes = gradients * _parts(config.batch_size, step.rows)
    modules = method.personal_modules if isinstance(method, PersonalizedMethod) else None
    return Stage(
        "rounds",
        section.backbone,
        step,
        f"federation.micro_batch_size, {CHECKPOINTING.format(config.options.trained_model)}",
        section.lora,
        config.optimizer.name,
        modules,
        tuple(frozen),
        passes,
    )


def _parts(batch: int, rows: int) -> int:
    return -(-batch // rows)


def _selector_step(section: SelectorConfig, rows: int) -> StepShape:
    checkpointing = section.backbone.gradient_checkpointing
    return StepShape(rows, section.max_length, one_position=True, checkpointing=checkpointing)


def _policy_step(recipe: Recipe, objective: LocalObjective) -> StepShape:
    config, policy = recipe.federation, recipe.policy
    batch = config.batch_size
    if isinstance(objective, MultiObjective):
        batch = objective.ppo.minibatch
    elif isinstance(objective, PairPpoObjective):
        batch = objective.minibatch
    rows = min(batch, config.micro_batch_size or batch)
    completions = 1 if isinstance(objective, MultiObjective | SftObjective) else 2
    return StepShape(
        rows,
        policy.max_prompt_tokens + completions * policy.max_new_tokens,
        logit_positions=rows * completions * policy.max_new_tokens,
        entropies=isinstance(objective, MultiObjective | PairPpoObjective),
        shared_prompts=completions > 1,
        checkpointing=policy.backbone.gradient_checkpointing,
    )


def alignment_stage(recipe: Recipe, prompts: int | None = None) -> Stage:
    """DPO on the server, checkpointed on CUDA in any case; prompts: their number, None if not known."""
    policy, dpo = recipe.policy, recipe.alignment.dpo
    step = StepShape(
        dpo.micro_batch_size,
        policy.max_prompt_tokens + 2 * policy.max_new_tokens,
        logit_positions=2 * dpo.micro_batch_size * policy.max_new_tokens,
        shared_prompts=True,
        checkpointing=on_cuda(recipe) or policy.backbone.gradient_checkpointing,
    )
    passes = None
    if prompts is not None:
        config = recipe.alignment
        used = min(prompts, config.prompts or prompts)
        pairs = config.pairs_per_prompt or config.completions * (config.completions - 1) // 2
        passes = dpo.epochs * _parts(used * pairs, dpo.micro_batch_size)
    lower = "alignment.dpo.micro_batch_size"
    return Stage("alignment", policy.backbone, step, lower, policy.lora, dpo.optimizer, passes=passes)


def on_cuda(recipe: Recipe) -> bool:
    """Whether the estimate is for a GPU: unless runtime.devices names the CPU."""
    return recipe.runtime.devices != ["cpu"]


class Shapes:
    """The shapes of backbones, from their config.json, each of which is read once."""

    def __init__(self) -> None:
        self._known: dict[str, ModelShape | UserError] = {}

    def read(self, backbone: BackboneConfig) -> ModelShape:
        """The shape of a backbone; a UserError says why it is not known, in one line."""
        key = backbone.model_dump_json()
        if key not in self._known:
            try:
                self._known[key] = ModelShape.from_config(read_model_config(backbone), backbone)
            except UserError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, UserError):
            raise known
        return known


def estimate_memory(stage: Stage, shapes: Shapes, cuda: bool) -> MemoryEstimate:
    """Peak memory of a stage; a UserError of one line if the shape of a model is not known."""
    frozen = [_estimate_frozen(model, shapes, cuda) for model in stage.frozen]
    resident = sum(estimate.weights for estimate in frozen)
    if not stage.optimizer:
        # The models compute one after the other.
        largest = max(frozen, key=lambda estimate: estimate.total - estimate.weights)
        return replace(largest, weights=resident)
    shape = shapes.read(stage.backbone)
    personal = 0 if stage.modules is None else personal_values(shape, stage.modules)
    trained = TrainedValues(stage.optimizer, personal=personal, resident_bytes=resident)
    return estimate_step(shape, stage.lora, Precision.of(stage.backbone, cuda), stage.step, trained)


def _estimate_frozen(model: FrozenModel, shapes: Shapes, cuda: bool) -> MemoryEstimate:
    shape = shapes.read(model.backbone)
    forward = ForwardShape(model.rows, model.tokens, model.new_tokens)
    return estimate_forward(shape, Precision.of(model.backbone, cuda), forward, model.lora)


def personal_values(shape: ModelShape, modules: PersonalModules) -> int:
    """Values of a client's own modules: its head, the bottleneck and the reward head."""
    head = shape.vocabulary * shape.hidden if modules.head else 0
    bottleneck = (2 * shape.hidden + 1) * modules.bottleneck.width if modules.bottleneck else 0
    reward = (shape.hidden + 1) * modules.reward.width if modules.reward else 0
    return head + bottleneck + reward


def estimate_disk(recipe: Recipe, shapes: Shapes) -> DiskEstimate:
    """Disk space of the adapters of a run; a UserError as of estimate_memory."""
    config = recipe.federation
    stage = rounds_stage(recipe)
    shape = shapes.read(stage.backbone)
    adapter = FP32 * shape.lora_values(stage.lora)
    per_round = config.options.server_adapters(config) * adapter
    personal = 0 if stage.modules is None else FP32 * personal_values(shape, stage.modules)
    return DiskEstimate(
        server=adapter + (config.rounds // config.keep_every + 2) * per_round,
        logged=-(-config.rounds // config.keep_every) * per_round,
        updates=config.clients_per_round * adapter,
        private=2 * personal * (recipe.data.clients or config.clients_per_round),
    )


@dataclass(frozen=True)
class Costs:
    """The estimates of a recipe."""

    place: str  # what the memory is of, as text
    memory: list[tuple[Stage, MemoryEstimate]]  # by stage
    disk: DiskEstimate | None  # of the rounds; None if it is not known
    problems: dict[str, list[str]]  # why something is not estimated, and what

    @property
    def peak(self) -> tuple[Stage, MemoryEstimate] | None:
        """The stage with the largest memory; None if no stage is known."""
        return max(self.memory, key=lambda row: row[1].total, default=None)


def estimate_costs(recipe: Recipe, shapes: Shapes) -> Costs:
    """The estimates of a recipe; what is not known is a problem."""
    cuda = on_cuda(recipe)
    memory: list[tuple[Stage, MemoryEstimate]] = []
    disk = None
    problems: dict[str, list[str]] = defaultdict(list)
    for stage in all_stages(recipe):
        known = []
        for model in stage.frozen:
            try:
                shapes.read(model.backbone)
                known.append(model)
            except UserError as error:
                problems[str(error)].append(f"{stage.name}, {model.name}" if stage.optimizer else stage.name)
        if len(known) < len(stage.frozen) and not stage.optimizer:
            continue
        stage = replace(stage, frozen=tuple(known))
        try:
            memory.append((stage, estimate_memory(stage, shapes, cuda)))
        except UserError as error:
            problems[str(error)].append(stage.name)
    try:
        disk = estimate_disk(recipe, shapes)
    except UserError as error:
        problems[str(error)].append("disk of the rounds")
    return Costs("one GPU" if cuda else "the CPU", memory, disk, problems)


class FitError(UserError, RuntimeError):
    """A stage that needs more memory than a device has."""


def check_fit(recipe: Recipe) -> None:
    """Refuse a recipe of which a stage needs more memory than a GPU of this machine has that it runs on.

    Raises:
        FitError: names the stage, its models, and what lowers its memory.
    """
    runtime = recipe.runtime
    if runtime.check_memory and runtime.ray_address is None and (problem := describe_misfit(recipe)):
        raise FitError(f"{recipe.name}: {problem}")


def describe_misfit(recipe: Recipe) -> str | None:
    """The stage that exceeds the memory of the smallest GPU that is visible here the most; None if all fit.

    Stages with a device_map are left out, since the weights on the device follow from what is free.
    """
    if not on_cuda(recipe):
        return None
    try:
        memory = cuda_memory(recipe.runtime.devices)
    except BackboneError:  # the run refuses a device that does not exist
        return None
    if not memory:
        return None
    shapes = Shapes()
    estimates = [
        (stage, estimate) for stage, estimate in estimate_costs(recipe, shapes).memory if not _is_split(stage)
    ]
    device = min(memory, key=lambda name: memory[name])
    stage, estimate = max(estimates, key=lambda row: row[1].total, default=(None, None))
    if stage is None or estimate is None or estimate.total <= memory[device]:
        return None
    models = [(model.name, model.backbone) for model in stage.frozen]
    if stage.optimizer:
        models.insert(0, ("the trained model", stage.backbone))
    others = f", leaving {device} out of runtime.devices" if len(set(memory.values())) > 1 else ""
    sizes = []
    for name, backbone in models:
        size = shapes.read(backbone).weight_bytes(Precision.of(backbone, on_cuda=True))
        sizes.append(f"{name} ({backbone.name}) {_gigabytes(size)}")
    return (
        f"the stage '{stage.name}' needs an estimated {_gigabytes(estimate.total)} GB, and {device} has"
        f" {_gigabytes(memory[device])} GB: weights of {', '.join(sizes)}, and"
        f" {_gigabytes(estimate.total - estimate.weights)} for what is computed. Change {stage.lower}, take"
        f" smaller or quantized models or backbone.device_map, or use a GPU with more memory{others}; the"
        " estimate has all rows at their full length, and runtime.check_memory=false leaves this check out."
    )


def _is_split(stage: Stage) -> bool:
    backbones = [stage.backbone, *(model.backbone for model in stage.frozen)]
    return any(backbone.device_map is not None for backbone in backbones)


@dataclass(frozen=True)
class TrainingTime:
    """How long training takes on this machine with sequences of full length."""

    device: str  # such as 'cpu' or 'cuda:0'
    rate: float  # its floating-point operations per second, as measured
    # By stage whose model and number of passes are known; empty without the recipe's devices.
    seconds: dict[str, float]


def training_time(recipe: Recipe, prompts: int | None) -> TrainingTime:
    """Estimate the time of a recipe's training, on one of its devices; prompts as of alignment_stage.

    Sampling, labeling and evaluation are not included.
    """
    shapes = Shapes()
    flops: dict[str, int] = {}
    for stage in training_stages(recipe, prompts):
        if stage.passes is not None:
            with contextlib.suppress(UserError):  # the model is among the problems of estimate_costs
                shape = shapes.read(stage.backbone)
                flops[stage.name] = stage.passes * step_flops(shape, stage.lora, stage.step)
    device = ""
    if flops:
        with contextlib.suppress(BackboneError):
            device = choose_devices(recipe.runtime.devices)[0]
    if not device:
        return TrainingTime("", 1.0, {})
    rate = flops_per_second(device)
    return TrainingTime(device, rate, {name: one / rate for name, one in flops.items()})


def describe_time(time: TrainingTime) -> str:
    """The estimate as a line."""
    stages = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in time.seconds.items())
    return (
        f"estimated time of training on {time.device} ({time.rate / GIGA:,.0f} GFLOP/s), with sequences of"
        f" full length: {stages}; sampling, labeling and evaluation are not included"
    )


def describe_costs(recipe: Recipe) -> str:
    """The estimates as a table of gigabytes, for the command `check`; one line for each unknown model."""
    costs = estimate_costs(recipe, Shapes())
    lines = _cost_lines(costs)
    lines += [f"not estimated: {', '.join(names)}: {problem}" for problem, names in costs.problems.items()]
    if recipe.runtime.ray_address is not None and (misfit := describe_misfit(recipe)):
        lines.append(f"warning: if the GPUs of the cluster are like those of this machine, {misfit}")
    return "\n".join(lines)


def describe_arms(recipes: Mapping[str, Recipe]) -> str:
    """The estimates of a benchmark: a line for each arm, and the table of the one with the largest peak."""
    shapes = Shapes()
    costs = {arm: estimate_costs(recipe, shapes) for arm, recipe in recipes.items()}
    lines = ["estimates by arm (GB): the peak memory of a stage, and the disk of the rounds"]
    rows = [_arm_row(arm, own) for arm, own in costs.items()]
    lines += _align([ARM_COLUMNS, *rows], left=("arm", "stage", "on", "not estimated"))
    peaks = {arm: own.peak[1].total for arm, own in costs.items() if own.peak is not None}
    if peaks:
        largest = max(peaks, key=lambda arm: peaks[arm])
        lines += [f"the arm with the largest peak, {largest}:", *_cost_lines(costs[largest])]
    problems = dict.fromkeys(chain.from_iterable(own.problems for own in costs.values()))
    return "\n".join([*lines, *(f"not estimated: {problem}" for problem in problems)])


def _arm_row(arm: str, costs: Costs) -> list[str]:
    unknown = ", ".join(chain.from_iterable(costs.problems.values()))
    disk = "-" if costs.disk is None else _gigabytes(costs.disk.total)
    peak, name = "-", "-"
    if costs.peak is not None:
        stage, memory = costs.peak
        peak, name = _gigabytes(memory.total), f"{stage.name} ({stage.backbone.name})"
    return [arm, peak, name, costs.place, disk, unknown or "-"]


def _cost_lines(costs: Costs) -> list[str]:
    lines = []
    if costs.memory:
        other = "" if costs.place == "the CPU" else "; with runtime.devices=[cpu] for the CPU"
        lines.append(f"peak memory by stage (GB), estimated for {costs.place}{other}")
        lines += _align([COLUMNS, *(_memory_row(stage, memory) for stage, memory in costs.memory)])
    if costs.disk is not None:
        lines.append(_disk_line(costs.disk))
    return lines


def _memory_row(stage: Stage, estimate: MemoryEstimate) -> list[str]:
    terms = [_gigabytes(getattr(estimate, term)) for term in TERMS]
    return [f"{stage.name} ({stage.backbone.name})", f"{stage.step.rows} x {stage.step.tokens:,}", *terms]


def _disk_line(estimate: DiskEstimate) -> str:
    parts = [
        f"the server's adapters {_gigabytes(estimate.server)}",
        f"logged to MLflow {_gigabytes(estimate.logged)}",
        f"a round's updates {_gigabytes(estimate.updates)}",
    ]
    if estimate.private:
        parts.append(f"private modules {_gigabytes(estimate.private)}")
    return f"estimated disk of the rounds (GB): {_gigabytes(estimate.total)} ({', '.join(parts)})"


def _gigabytes(size: int) -> str:
    value = size / GIGA
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _align(rows: Sequence[Sequence[str]], left: Sequence[str] = ("stage",)) -> list[str]:
    """Lines of a table, of which the first row is the header and these columns are aligned on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify: list[Callable[[str, int], str]] = [str.ljust if name in left else str.rjust for name in rows[0]]
    lines = []
    for row in rows:
        cells = [side(cell, width) for side, cell, width in zip(justify, row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
