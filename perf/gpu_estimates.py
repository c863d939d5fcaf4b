"""Estimated time of the recipes of paper scale on one GPU, as a table.

    python -m perf gpu-estimates [--bf16 989e12] [--tf32 494.7e12] [--fp32 67e12] [--bandwidth 3.35e12] ...

Nothing is measured, and no GPU is needed. The operations of training are those of
components/estimates.py; those of sampling, scoring, labeling and judging are counted here. All
sequences have full length. "Before" is without the fused LoRA layer in bf16
(components/models/fused_lora.py), where the factors were multiplied in fp32, and without TF32 in frozen
rewards (components/models/tf32.py).

Left out: loading, the accuracy on held-out pairs where the size of the data is not known, the scores by
which FedBiscuit assigns clients, the KL to the reference, and all elementwise operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from components.config import BackboneConfig, LoraConfig, MultiObjective, Recipe, SelectorConfig
from components.config.thoughts import ThoughtsConfig
from components.estimates import Stage, alignment_stage, rounds_stage, training_stages
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.federation.method import method_of
from components.models.key_values import SPARE_COLUMNS
from components.models.memory import ModelShape
from components.models.rewards.classifier import ClassifierReward
from components.recipes import load_recipe
from perf.products import (
    SINGLE,
    Gpu,
    Model,
    Precision,
    Products,
    add_up,
    cache_bytes,
    cache_passes,
    forward_products,
    time_of,
    training_products,
)

FOLDER = Path(__file__).parent
COLUMNS = (
    "stage",
    "rows",
    "operations (PFLOP)",
    "decoding reads (TB)",
    "hours before",
    "bound before",
    "hours",
    "bound",
)
HOUR = 3600
Rate = Annotated[float, typer.Option(help="Rate of dense matrix products in this type (FLOP per second).")]


@dataclass(frozen=True)
class Data:
    """Numbers of rows of a recipe's data; None where they are not known."""

    train: int | None = None  # pairs of all clients
    test: int | None = None
    align: int | None = None  # the server's prompts
    prompts: int | None = None  # held-out prompts


@dataclass(frozen=True)
class Part:
    """Passes of one kind through a model."""

    products: Sequence[Products]
    decoding_bytes: float = 0.0  # weights, keys and values that decoding reads


@dataclass
class Estimate:
    """A stage of a run, now and before."""

    name: str
    rows: int
    now: list[Part] = field(default_factory=list)
    before: list[Part] = field(default_factory=list)

    def figures(self, gpu: Gpu) -> list[str]:
        before, now = self.seconds(gpu)
        flops = sum(each.flops for part in self.now for each in part.products)
        read = sum(part.decoding_bytes for part in self.now)
        return [
            self.name,
            str(self.rows),
            two_digits(flops / 1e15),
            two_digits(read / 1e12) if read else "-",
            two_digits(sum(before.values()) / HOUR),
            max(before, key=before.__getitem__),
            two_digits(sum(now.values()) / HOUR),
            max(now, key=now.__getitem__),
        ]

    def seconds(self, gpu: Gpu) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds before and now, by what bounds them."""
        before, now = (
            add_up(time_of(part.products, gpu) for part in parts) for parts in (self.before, self.now)
        )
        return before, now


def read_configs() -> dict[str, dict[str, Any]]:
    """The published config.json of each model that a recipe of paper scale names."""
    configs: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "paper_backbones.yaml").read_text())
    return configs


class PaperModels:
    """The models of recipes of paper scale, by their published shapes."""

    def __init__(self, now: bool = True) -> None:
        self.now = now
        self._configs = read_configs()

    def model(
        self, backbone: BackboneConfig, lora: LoraConfig | None, precision: Precision = "bf16"
    ) -> Model:
        shape = ModelShape.from_config(self._configs[backbone.name], backbone)
        return Model(shape, lora, self.now, precision, backbone.quantization == "8bit")

    def classifier(self, reward: ClassifierReward) -> Model:
        """A frozen reward, which did not use TF32 before."""
        single: Precision = "tf32" if reward.tf32 and self.now else "fp32"
        precision = single if reward.dtype == "float32" else "bf16"
        return self.model(BackboneConfig(name=reward.name), None, precision)


@dataclass(frozen=True)
class Sampling:
    """Completions that are generated in calls of `prompts` prompts each."""

    rows: int  # at most, in a batch
    prompts: int
    count: int
    prompt_tokens: int
    new_tokens: int
    calls: int = 1

    def parts(self, model: Model) -> list[Part]:
        """Passes over the prompts, and decoding steps, one for each token of a batch of completions."""
        completions = self.prompts * self.count
        rows = min(self.rows, completions)
        prompts = min(rows, self.prompts)
        prefill = forward_products(model, prompts, self.prompt_tokens, self.prompt_tokens / 2, prompts)
        context = self.prompt_tokens + self.new_tokens / 2
        step = forward_products(model, rows, 1, context, rows, cached=True)
        steps = self.calls * completions / rows * self.new_tokens
        read = model.weights() + rows * context * cache_bytes(model) * cache_passes(model.shape)
        passes = self.calls * self.prompts / prompts
        return [
            Part([each.times(passes) for each in prefill]),
            Part([each.times(steps) for each in step], steps * read),
        ]

    def memory(self, model: Model) -> float:
        """Peak bytes of a batch beside the weights, see components/models/continuous_batch.py.

        They are the rows' cache with its spare columns, the prompts' keys and values that it is filled
        from, one layer's keys and values for all heads, three tensors of the MLP over all prompts, and
        the logits with the noise.
        """
        shape = model.shape
        rows = min(self.rows, self.prompts * self.count)
        columns = self.prompt_tokens + self.new_tokens + min(self.new_tokens, SPARE_COLUMNS)
        prompts = min(rows, self.prompts) * self.prompt_tokens
        cache = (rows * columns + prompts) * cache_bytes(model)
        repeated = 2 * rows * columns * shape.heads * shape.head_dim * model.value_bytes
        inner = 3 * prompts * shape.intermediate * model.value_bytes
        return cache + repeated + inner + 3 * SINGLE * rows * shape.vocabulary


def forward_part(model: Model, sequences: float, tokens: int, rows: int, positions: int = 1) -> Part:
    """A pass over sequences of a length, of which so many positions have logits, in batches of rows."""
    products = forward_products(model, rows, tokens, tokens / 2, rows * positions)
    return Part([each.times(sequences / rows) for each in products])


def estimates(recipe: Recipe, data: Data) -> list[Estimate]:
    """The stages of a recipe whose rows are known, in the order of a run."""
    stages = {name: Estimate(name, rows) for name, rows, _ in _parts(recipe, data, PaperModels())}
    for now in (True, False):
        for name, _, part in _parts(recipe, data, PaperModels(now)):
            (stages[name].now if now else stages[name].before).append(part)
    return list(stages.values())


Named = tuple[str, int, Part]


def _parts(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    if recipe.thoughts is not None:
        yield from _tree_parts(recipe, recipe.thoughts, models)
    objective = getattr(method_of(recipe.federation), "local_objective", None)
    if isinstance(objective, MultiObjective):
        yield from _multi_objective_parts(recipe, objective, models)
    else:
        yield from _rounds_parts(recipe, data, models)
    if recipe.federation.options.needs_server_prompts and data.align is not None:
        yield from _alignment_parts(recipe, data.align, models)
    yield from _evaluation_parts(recipe, data, models)


def _sampled(name: str, sampling: Sampling, model: Model) -> Iterator[Named]:
    for part in sampling.parts(model):
        yield name, min(sampling.rows, sampling.prompts * sampling.count), part


def _tree_parts(recipe: Recipe, thoughts: ThoughtsConfig, models: PaperModels) -> Iterator[Named]:
    """Growth of all trees, level by level, for question_batch_size questions at a time."""
    policy, evaluator = recipe.policy, thoughts.evaluator
    questions = sum(section.count or 0 for section in thoughts.questions)
    writer = models.model(policy.backbone, policy.lora)
    judge = models.model(BackboneConfig(name=evaluator.model), None)
    batch = min(thoughts.question_batch_size, questions)
    calls = math.ceil(questions / batch)
    frontier = 1
    for _ in range(thoughts.depth):
        written = Sampling(
            policy.generation_batch_size,
            batch * frontier,
            thoughts.children,
            policy.max_prompt_tokens,
            thoughts.max_thought_tokens,
            calls,
        )
        scored = Sampling(
            evaluator.batch_size,
            batch * frontier * thoughts.children,
            1,
            evaluator.max_prompt_tokens,
            evaluator.max_new_tokens,
            calls,
        )
        yield from _sampled("thoughts", written, writer)
        yield from _sampled("scores of thoughts", scored, judge)
        frontier = min(frontier * thoughts.children, thoughts.beam or frontier * thoughts.children)


def _rounds_parts(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    """Training in the rounds; of policies also the references and the accuracy of the pairs."""
    stage = rounds_stage(recipe)
    config = recipe.federation
    model = models.model(stage.backbone, stage.lora)
    passes = stage.passes
    if passes is None and data.train is not None:
        rows = data.train / (recipe.data.clients or config.clients_per_round)
        gradients = method_of(config).gradient_evaluations(config, math.ceil(rows))
        passes = config.rounds * config.clients_per_round * gradients
        passes *= math.ceil(config.batch_size / stage.step.rows)
    if passes is not None:
        yield "rounds", stage.step.rows, _training_part(model, stage, passes)
    if data.test is not None:
        rounds = _measures(recipe)
        rows = 2 * stage.step.rows
        positions = stage.step.logit_positions // stage.step.rows
        model = replace(model, own_head=stage.modules is not None and stage.modules.head)
        measured = data.test * rounds + (data.train or 0)  # each pair's reference is computed once
        yield "accuracy", rows, forward_part(model, measured, stage.step.tokens, rows, positions)


def _measures(recipe: Recipe) -> int:
    """Measurements of a run: before the first round, every evaluate_every rounds, and after the last one."""
    config = recipe.federation
    return 1 + (math.ceil(config.rounds / config.evaluate_every) if config.evaluate_every else 1)


def _training_part(model: Model, stage: Stage, passes: float, backwards: int = 1) -> Part:
    has_head = stage.modules is not None and stage.modules.head
    products = training_products(replace(model, own_head=has_head), stage.step, backwards)
    return Part([each.times(passes) for each in products])


def _multi_objective_parts(recipe: Recipe, objective: MultiObjective, models: PaperModels) -> Iterator[Named]:
    """Rollouts of all local steps, their scores, PPO, and the rewards of held-out prompts."""
    config, policy, ppo = recipe.federation, recipe.policy, objective.ppo
    stage = rounds_stage(recipe)
    model = models.model(policy.backbone, policy.lora)
    steps = config.rounds * config.clients_per_round * config.local_steps
    samples = ppo.estimator.samples
    lengths = (policy.max_prompt_tokens, policy.max_new_tokens)
    rollout = Sampling(
        policy.generation_batch_size, config.batch_size // samples, samples, *lengths, calls=steps
    )
    yield from _sampled("rollouts", rollout, model)
    measures = _measures(recipe)
    prompts: int = recipe.federation.options.reward_prompts  # type: ignore[attr-defined]
    held_out = Sampling(policy.generation_batch_size, prompts, 1, *lengths, calls=measures)
    yield from _sampled("held-out prompts", held_out, model)
    completions = steps * config.batch_size + measures * prompts
    # Log-probabilities of the policy and, without the adapter, of the reference.
    tokens = sum(lengths)
    for scored in (model, replace(model, lora=None)):
        part = forward_part(scored, completions, tokens, config.batch_size, policy.max_new_tokens)
        yield "log-probabilities", config.batch_size, part
    for reward in recipe.rewards.values():
        if isinstance(reward, ClassifierReward):
            length = min(tokens, reward.max_length)
            classifier = models.classifier(reward)
            part = forward_part(classifier, completions, length, reward.batch_size, positions=0)
            yield "rewards", reward.batch_size, part
    minibatches = ppo.epochs * math.ceil(config.batch_size / stage.step.rows)
    backwards = 1 if objective.weights is not None else len(objective.objectives)
    yield "rounds", stage.step.rows, _training_part(model, stage, steps * minibatches, backwards)


def _alignment_parts(recipe: Recipe, prompts: int, models: PaperModels) -> Iterator[Named]:
    """Completions of the server's prompts, their labels by each selector, and DPO."""
    config, policy, selector = recipe.alignment, recipe.policy, recipe.selector
    used = min(prompts, config.prompts or prompts)
    lengths = (policy.max_prompt_tokens, policy.max_new_tokens)
    sampled = Sampling(policy.generation_batch_size, used, config.completions, *lengths)
    yield from _sampled("completions", sampled, models.model(policy.backbone, None))
    shown = used * config.completions * (config.completions - 1) // 2 * (1 + (selector.orders == "both"))
    reads = shown * recipe.federation.options.server_adapters(recipe.federation)
    rows = 2 * selector.score_batch_size
    reader = models.model(selector.backbone, selector.lora)
    yield "labels", rows, forward_part(reader, reads, selector.max_length, rows)
    stage = alignment_stage(recipe, used)
    assert stage.passes is not None
    model = models.model(stage.backbone, stage.lora)
    yield "DPO", stage.step.rows, _training_part(model, stage, stage.passes)
    pairs = stage.passes * stage.step.rows / config.dpo.epochs
    rows = 2 * stage.step.rows
    positions = stage.step.logit_positions // stage.step.rows
    part = forward_part(replace(model, lora=None), pairs, stage.step.tokens, rows, positions)
    yield "DPO", stage.step.rows, part  # log-probabilities under the reference


def _evaluation_parts(recipe: Recipe, data: Data, models: PaperModels) -> Iterator[Named]:
    """Answers of the base and the aligned policy to questions and prompts, and the judge."""
    config, policy = recipe.evaluation, recipe.policy
    both = [models.model(policy.backbone, lora) for lora in (None, policy.lora)]
    if config.questions is not None:
        for section in config.questions.questions:
            for count in (1, config.questions.samples):
                asked = Sampling(
                    policy.generation_batch_size,
                    section.count or 0,
                    count,
                    policy.max_prompt_tokens,
                    config.questions.max_new_tokens,
                )
                for model in both:
                    yield from _sampled("questions", asked, model)
    prompts = config.prompts if data.prompts is None else min(data.prompts, config.prompts or data.prompts)
    if prompts is not None:
        lengths = (policy.max_prompt_tokens, policy.max_new_tokens)
        answered = Sampling(policy.generation_batch_size, prompts, config.answers_per_prompt, *lengths)
        for model in both:
            yield from _sampled("answers", answered, model)
    judge = config.judge
    if isinstance(judge, SelectorJudgeSection):
        stage = next(stage for stage in training_stages(recipe) if stage.name == "judge")
        assert stage.passes is not None
        model = models.model(stage.backbone, stage.lora)
        yield "judge", stage.step.rows, _training_part(model, stage, stage.passes)
        if prompts is not None:
            yield "judge", stage.step.rows, _judged_part(model, judge.selector, prompts)


def _judged_part(model: Model, selector: SelectorConfig, prompts: int) -> Part:
    """Comparisons of the aligned policy's answers with those of the base policy, in both orders."""
    return forward_part(model, 2 * prompts, selector.max_length, 2 * selector.score_batch_size)


def two_digits(value: float) -> str:
    """A positive number with two significant digits, without an exponent."""
    if not value:
        return "0"
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def paper_recipes() -> dict[str, Data]:
    """The recipes of paper scale, with the sizes of their data."""
    stored = yaml.safe_load((FOLDER / "paper_data.yaml").read_text())
    return {name: Data(**sizes) for name, sizes in stored.items()}


def table(gpu: Gpu) -> str:
    """A Markdown table for each recipe."""
    lines = [describe(gpu)]
    for name, data in paper_recipes().items():
        rows = estimates(load_recipe(name), data)
        sides = zip(*(row.seconds(gpu) for row in rows), strict=True)
        before, now = (two_digits(sum(add_up(side).values()) / HOUR) for side in sides)
        lines += ["", f"### {name}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row.figures(gpu)) for row in rows]
        lines.append(_line(["**all**", "", "", "", before, "", now, ""]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
