"""Estimated time of the recipes of paper scale on one GPU, as a table.

    python -m perf gpu-estimates [--bf16 989e12] [--tf32 494.7e12] [--fp32 67e12] [--bandwidth 3.35e12] ...

Nothing is measured, and no GPU is needed. The operations of training are those of
components/estimates.py; those of sampling, scoring, labeling and judging are counted here. All
sequences have full length.

Left out: loading, the accuracy on held-out pairs where the size of the data is not known, the scores by
which FedBiscuit assigns clients, the KL to the reference, and all elementwise operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
import yaml

from components.config import BackboneConfig, FrozenModel, LoraConfig, MultiObjective, Recipe
from components.config.thoughts import ThoughtsConfig
from components.estimates import Stage, alignment_stage, policy_model, rounds_stage, training_stages
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.federation.method import method_of
from components.models.memory import ModelShape
from components.models.rewards.classifier import ClassifierReward
from components.recipes import load_recipe
from perf.products import (
    Gpu,
    Model,
    Passes,
    Precision,
    add_up,
    forward_passes,
    read_configs,
    training_passes,
)

DATA = Path(__file__).with_name("paper_data.yaml")
COLUMNS = ("stage", "rows", "operations (PFLOP)", "decoding reads (TB)", "hours", "bound")
HOUR = 3600
Rate = Annotated[float, typer.Option(help="Rate of dense matrix products in this type (FLOP per second).")]


@dataclass(frozen=True)
class Data:
    """Numbers of rows of a recipe's data; None where they are not known."""

    train: int | None = None  # pairs of all clients
    test: int | None = None
    align: int | None = None  # the server's prompts
    prompts: int | None = None  # held-out prompts


@dataclass
class Estimate:
    """A stage of a run."""

    name: str
    rows: int
    passes: list[Passes] = field(default_factory=list)

    def figures(self, gpu: Gpu) -> list[str]:
        seconds = self.seconds(gpu)
        read = sum(passes.decoding_bytes for passes in self.passes)
        return [
            self.name,
            str(self.rows),
            two_digits(sum(passes.flops for passes in self.passes) / 1e15),
            two_digits(read / 1e12) if read else "-",
            two_digits(sum(seconds.values()) / HOUR),
            max(seconds, key=seconds.__getitem__),
        ]

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """Seconds by what bounds them."""
        return add_up(passes.seconds(gpu) for passes in self.passes)


class PaperModels:
    """The models of recipes of paper scale, by their published shapes."""

    def __init__(self) -> None:
        self._configs = read_configs()

    def model(
        self, backbone: BackboneConfig, lora: LoraConfig | None, precision: Precision = "bf16"
    ) -> Model:
        shape = ModelShape.from_config(self._configs[backbone.name], backbone)
        return Model(shape, lora, precision, backbone.quantization == "8bit")

    def trained(self, stage: Stage) -> Model:
        """What a stage trains, with the client's own head where it has one."""
        own_head = stage.modules is not None and stage.modules.head
        return replace(self.model(stage.backbone, stage.lora), own_head=own_head)

    def classifier(self, reward: ClassifierReward) -> Model:
        single: Precision = "tf32" if reward.tf32 else "fp32"
        precision = single if reward.dtype == "float32" else "bf16"
        return self.model(BackboneConfig(name=reward.name), None, precision)


def sampling_passes(model: Model, writer: FrozenModel, prompts: int, count: int) -> list[Passes]:
    """Passes over prompts, and decoding steps, one for each token of a batch of completions."""
    rows = min(writer.rows, prompts * count)
    prefilled = min(rows, prompts)
    prefill = forward_passes(model, prefilled, writer.tokens, writer.tokens / 2, prefilled)
    context = writer.tokens + writer.new_tokens / 2
    step = forward_passes(model, rows, 1, context, rows, cached=True)
    return [prefill.times(prompts / prefilled), step.times(prompts * count / rows * writer.new_tokens)]


def scoring_passes(model: Model, sequences: float, tokens: int, rows: int, positions: int = 1) -> Passes:
    """Passes over sequences of a length, of which so many positions have logits, in batches of rows."""
    return forward_passes(model, rows, tokens, tokens / 2, rows * positions).times(sequences / rows)


def estimates(recipe: Recipe, data: Data) -> list[Estimate]:
    """The stages of a recipe whose rows are known, in the order of a run."""
    stages: dict[str, Estimate] = {}
    for name, rows, passes in _passes(recipe, data, PaperModels()):
        stages.setdefault(name, Estimate(name, rows)).passes.append(passes)
    return list(stages.values())


Named = tuple[str, int, Passes]
"""The name of a stage, its rows at once, and passes of one kind."""


def _passes(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    if recipe.thoughts is not None:
        yield from _tree_passes(recipe, recipe.thoughts, models)
    objective = method_of(recipe.federation).local_objective
    if isinstance(objective, MultiObjective):
        yield from _multi_objective_passes(recipe, objective, models)
    else:
        yield from _rounds_passes(recipe, data, models)
    if recipe.federation.options.needs_server_prompts and data.align is not None:
        yield from _alignment_passes(recipe, data.align, models)
    yield from _evaluation_passes(recipe, data, models)


def _sampled(
    name: str, models: PaperModels, writer: FrozenModel, prompts: int, count: int = 1, calls: int = 1
) -> Iterator[Named]:
    """Completions of prompts that are generated in so many calls."""
    model = models.model(writer.backbone, writer.lora)
    for passes in sampling_passes(model, writer, prompts, count):
        yield name, min(writer.rows, prompts * count), passes.times(calls)


def _trained(models: PaperModels, stage: Stage, passes: float, backwards: int = 1) -> Named:
    training = training_passes(models.trained(stage), stage.step, backwards)
    return stage.name, stage.step.rows, training.times(passes)


def _tree_passes(recipe: Recipe, thoughts: ThoughtsConfig, models: PaperModels) -> Iterator[Named]:
    """Growth of all trees, level by level, for question_batch_size questions at a time."""
    questions = sum(section.count or 0 for section in thoughts.questions)
    batch = min(thoughts.question_batch_size, questions)
    calls = math.ceil(questions / batch)
    writer = replace(policy_model(recipe), lora=None, new_tokens=thoughts.max_thought_tokens)
    frontier = 1
    for _ in range(thoughts.depth):
        written = frontier * thoughts.children
        yield from _sampled("thoughts", models, writer, batch * frontier, thoughts.children, calls)
        for evaluator in thoughts.evaluator.frozen_models():
            yield from _sampled("scores of thoughts", models, evaluator, batch * written, calls=calls)
        frontier = min(written, thoughts.beam or written)


def _rounds_passes(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    """Training in the rounds; of policies also the references and the accuracy of the pairs."""
    stage = rounds_stage(recipe)
    config = recipe.federation
    passes = stage.passes
    if passes is None and data.train is not None:
        rows = data.train / (recipe.data.clients or config.clients_per_round)
        gradients = method_of(config).gradient_evaluations(config, math.ceil(rows))
        passes = config.rounds * config.clients_per_round * gradients
        passes *= math.ceil(config.batch_size / stage.step.rows)
    if passes is not None:
        yield _trained(models, stage, passes)
    if data.test is not None:
        pairs = data.test * _measurements(recipe) + (data.train or 0)  # each reference is computed once
        yield "accuracy", 2 * stage.step.rows, _pair_passes(models.trained(stage), stage, pairs)


def _pair_passes(model: Model, stage: Stage, pairs: float) -> Passes:
    """Log-probabilities of pairs, in batches of twice the rows of training."""
    step = stage.step
    return scoring_passes(model, pairs, step.tokens, 2 * step.rows, step.logit_positions // step.rows)


def _measurements(recipe: Recipe) -> int:
    """Measurements of a run: before the first round, every evaluate_every rounds, and after the last one."""
    config = recipe.federation
    return 1 + (math.ceil(config.rounds / config.evaluate_every) if config.evaluate_every else 1)


def _multi_objective_passes(
    recipe: Recipe, objective: MultiObjective, models: PaperModels
) -> Iterator[Named]:
    """Rollouts of all local steps, their scores, PPO, and the rewards of held-out prompts."""
    config, ppo = recipe.federation, objective.ppo
    stage = rounds_stage(recipe)
    policy = policy_model(recipe)
    rows = config.batch_size
    steps = config.rounds * config.clients_per_round * config.local_steps
    samples = ppo.estimator.samples
    yield from _sampled("rollouts", models, policy, rows // samples, samples, steps)
    measurements = _measurements(recipe)
    prompts: int = config.options.reward_prompts  # type: ignore[attr-defined]
    yield from _sampled("held-out prompts", models, policy, prompts, calls=measurements)
    completions = steps * rows + measurements * prompts
    tokens = policy.tokens + policy.new_tokens
    for lora in (policy.lora, None):  # the policy and the reference
        model = models.model(policy.backbone, lora)
        passes = scoring_passes(model, completions, tokens, rows, policy.new_tokens)
        yield "log-probabilities", rows, passes
    for reward in recipe.rewards.values():
        if isinstance(reward, ClassifierReward):
            length, batch = min(tokens, reward.max_length), reward.batch_size
            passes = scoring_passes(models.classifier(reward), completions, length, batch, positions=0)
            yield "rewards", batch, passes
    minibatches = ppo.epochs * math.ceil(rows / stage.step.rows)
    backwards = 1 if objective.weights is not None else len(objective.objectives)
    yield _trained(models, stage, steps * minibatches, backwards)


def _alignment_passes(recipe: Recipe, prompts: int, models: PaperModels) -> Iterator[Named]:
    """Completions of the server's prompts, their labels by each selector, and DPO."""
    config, selector = recipe.alignment, recipe.selector
    used = min(prompts, config.prompts or prompts)
    base = replace(policy_model(recipe), lora=None)
    yield from _sampled("completions", models, base, used, config.completions)
    shown = used * config.completions * (config.completions - 1) // 2 * (1 + (selector.orders == "both"))
    reads = shown * recipe.federation.options.server_adapters(recipe.federation)
    rows = 2 * selector.score_batch_size
    reader = models.model(selector.backbone, selector.lora)
    yield "labels", rows, scoring_passes(reader, reads, selector.max_length, rows)
    stage = alignment_stage(recipe, used)
    assert stage.passes is not None
    _, rows, training = _trained(models, stage, stage.passes)
    reference = models.model(stage.backbone, None)
    pairs = stage.passes * stage.step.rows / config.dpo.epochs
    yield "DPO", rows, training
    yield "DPO", rows, _pair_passes(reference, stage, pairs)


def _evaluation_passes(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    """Answers of the base and the aligned policy to questions and prompts, and the judge."""
    config = recipe.evaluation
    policies = [replace(policy_model(recipe), lora=lora) for lora in (None, recipe.policy.lora)]
    if config.questions is not None:
        for section in config.questions.questions:
            for count in (1, config.questions.samples):
                for policy in policies:
                    writer = replace(policy, new_tokens=config.questions.max_new_tokens)
                    yield from _sampled("questions", models, writer, section.count or 0, count)
    prompts = config.prompts if data.prompts is None else min(data.prompts, config.prompts or data.prompts)
    if prompts is not None:
        for policy in policies:
            yield from _sampled("answers", models, policy, prompts, config.answers_per_prompt)
    judge = config.judge
    if isinstance(judge, SelectorJudgeSection):
        stage = next(stage for stage in training_stages(recipe) if stage.name == "judge")
        assert stage.passes is not None
        yield _trained(models, stage, stage.passes)
        if prompts is not None:  # answers of the aligned and the base policy, in both orders
            selector = judge.selector
            rows = 2 * selector.score_batch_size
            passes = scoring_passes(models.trained(stage), 2 * prompts, selector.max_length, rows)
            yield stage.name, stage.step.rows, passes


def two_digits(value: float) -> str:
    """A positive number with two significant digits, without an exponent."""
    if not value:
        return "0"
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def paper_recipes() -> dict[str, Data]:
    """The recipes of paper scale, with the sizes of their data."""
    stored = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {name: Data(**sizes) for name, sizes in stored.items()}


def table(gpu: Gpu) -> str:
    """A Markdown table for each recipe."""
    lines = [describe(gpu)]
    for name, data in paper_recipes().items():
        stages = estimates(load_recipe(name), data)
        total = sum(sum(stage.seconds(gpu).values()) for stage in stages)
        rows = [COLUMNS, ["---"] * len(COLUMNS), *(stage.figures(gpu) for stage in stages)]
        rows.append(["**all**", "", "", "", two_digits(total / HOUR), ""])
        lines += ["", f"### {name}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def describe(gpu: Gpu) -> str:
    """The assumptions as a line."""
    return (
        f"Assumed: {gpu.bf16 / 1e12:.4g} TFLOP/s in bf16, {gpu.tf32 / 1e12:.4g} in TF32,"
        f" {gpu.fp32 / 1e12:.4g} in fp32 and {gpu.bandwidth / 1e12:.4g} TB/s (the defaults are of NVIDIA's"
        f" data sheet of the H100 SXM), of which {gpu.product_share:.0%} for products and"
        f" {gpu.bandwidth_share:.0%} of the bandwidth are reached; {gpu.launch * 1e6:.4g} µs of the host per"
        " product; all sequences have full length."
    )


def show_estimates(
    bf16: Rate = Gpu.bf16,
    tf32: Rate = Gpu.tf32,
    fp32: Rate = Gpu.fp32,
    bandwidth: Annotated[
        float, typer.Option(help="Bandwidth of the GPU's memory (bytes per second).")
    ] = Gpu.bandwidth,
    product_share: Annotated[
        float, typer.Option(help="Share of the rates that is reached, from 0 to 1.")
    ] = Gpu.product_share,
    bandwidth_share: Annotated[
        float, typer.Option(help="Share of the bandwidth that is reached, from 0 to 1.")
    ] = Gpu.bandwidth_share,
    launch: Annotated[
        float,
        typer.Option(help="Time of the host per matrix product, with what is between two of them (seconds)."),
    ] = Gpu.launch,
) -> None:
    """Estimated time of the recipes of paper scale on one GPU. Nothing is measured."""
    print(table(Gpu(bf16, tf32, fp32, bandwidth, product_share, bandwidth_share, launch)))
