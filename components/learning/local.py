"""Local training of one client: K optimizer steps on minibatches, OPTIM(m, phi, K) of FedBiscuit.

The optimizer is built for each training and discarded afterwards, because clients keep no optimizer
state between rounds. The learning-rate schedule therefore covers the K steps of one training and
starts again in each round, as with a Trainer that is started in each round. Parameters, gradients
of the adapter and optimizer state are fp32 for any dtype of the backbone: in bf16, a step of 1e-5
would be lost to rounding. Only the moments of adamw_8bit have 8 bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from components.concurrency import concurrent_parts, run_concurrently
from components.config import OptimizerConfig, UserError
from components.models import eight_bit
from components.models.backbone import find_active_dropout
from components.models.checkpointing import checkpointed
from components.seeding import generator, seeded

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter, AdapterSlot

LossFunction = Callable[[np.ndarray], tuple["torch.Tensor", int]]
"""From the indices of n rows to their losses [n], and the number of tokens in the forward pass."""
Gradients = Sequence["torch.Tensor | None"]
"""Gradients of parameters, in their order; None for one that is frozen or not used."""
TrainingProgress = Callable[[int, float], None]
"""Called with (step, loss) after each optimizer step."""


class TrainingError(UserError, RuntimeError):
    """Training that cannot continue, e.g. because a loss is not finite."""


@dataclass(frozen=True)
class TrainingMetrics:
    """Metrics of a local training.

    Attributes:
        losses: mean loss of the minibatches of each step that was taken, before the step (nats).
        gradient_norms: global norm of the gradient of each step, before clipping.
        tokens: tokens that went through the model, without padding.
        seconds: wall time.
    """

    losses: list[float]
    gradient_norms: list[float]
    tokens: int
    seconds: float


@dataclass(frozen=True)
class LocalTraining:
    """Settings of one local training.

    Attributes:
        steps: optimizer steps.
        batch_size: rows per minibatch.
        optimizer: the optimizer, its schedule, and how many minibatches it accumulates per step.
        seed: the order of the rows, dropout and all other random numbers are functions of it.
        personal_lr: learning rate of private modules that are trained together with the shared
            adapter; None takes the optimizer's.
        proximal_weight: mu of the proximal term (mu / 2) |phi - phi_0|^2, where phi_0 are the
            initial values of the trained parameters (Li et al. 2020, FedProx, eq. 2); 0 adds none.
        progress: called with (step, loss) after each step.
        micro_batch_size: see `LoopOptions`.
    """

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    seed: int
    proximal_weight: float = 0.0
    personal_lr: float | None = None
    progress: TrainingProgress | None = None
    micro_batch_size: int | None = None

    @property
    def minibatches(self) -> int:
        """Minibatches of all steps."""
        return self.steps * self.optimizer.accumulation

    def draw_minibatches(self, rows: int) -> Iterator[np.ndarray]:
        """Draw the minibatches of a client with this number of rows; see `draw_minibatches`."""
        return draw_minibatches(rows, self.batch_size, self.minibatches, self.seed)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate of their own, whose gradient is clipped apart from the others'.

    Attributes:
        parameters: the parameters (fp32).
        lr: their learning rate; all else is that of the training's optimizer.
    """

    parameters: Sequence[torch.nn.Parameter]
    lr: float


@dataclass(frozen=True)
class LoopOptions:
    """Options of the training loop.

    Attributes:
        seed: dropout is a function of it.
        dropout: whether dropout is active, as it is in training mode.
        micro_batch_size: rows that go through the model at once. The gradients of a minibatch's
            micro-batches are added, weighted by their rows. None takes the whole minibatch.
        progress: called with (step, loss) after each step.
        before_minibatch: called with the micro-batches of each minibatch, in their order, before the
            first of them. For losses that depend on the whole minibatch.
        before_step: called when a step's gradient is complete and the parameters have not changed
            yet.
        should_stop: called when the gradient of a step after the first is complete; if it returns
            true, the training ends and the step is not taken.
        concurrent: whether the loss may be computed in several threads at a time. On the CPU, without
            dropout, the halves of a minibatch are then computed concurrently.
        groups: parameters that are trained beside the others.
    """

    seed: int
    dropout: bool = True
    micro_batch_size: int | None = None
    progress: TrainingProgress | None = None
    before_minibatch: Callable[[Sequence[np.ndarray]], None] | None = None
    before_step: Callable[[], None] | None = None
    should_stop: Callable[[], bool] | None = None
    concurrent: bool = False
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True)
class Division:
    """How the rows of a minibatch are divided.

    Attributes:
        micro_batch_size: see `LoopOptions`.
        parts: parts of a micro-batch that are computed concurrently.
        before_minibatch: see `LoopOptions`.
    """

    micro_batch_size: int | None = None
    parts: int = 1
    before_minibatch: Callable[[Sequence[np.ndarray]], None] | None = None

    def micro_batches(self, indices: np.ndarray) -> list[np.ndarray]:
        """Consecutive micro-batches of a minibatch; the last one may be smaller."""
        size = self.micro_batch_size or len(indices)
        return [indices[start : start + size] for start in range(0, len(indices), size)]


def draw_minibatches(rows: int, batch_size: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """Draw minibatches in passes over the rows, each in a random order of its own.

    A minibatch may contain the end of one pass and the start of the next; no row is dropped.

    Args:
        rows: number of rows.
        batch_size: rows per minibatch.
        count: number of minibatches.
        seed: the orders are functions of it.

    Yields:
        indices of the rows of each minibatch, [batch_size].

    Raises:
        TrainingError: there are no rows.
    """
    if rows == 0:
        raise TrainingError("there are no rows to train on")
    queue = np.empty(0, dtype=np.int64)
    passes = 0
    for _ in range(count):
        while len(queue) < batch_size:
            queue = np.concatenate([queue, generator(seed, "minibatches", passes).permutation(rows)])
            passes += 1
        yield queue[:batch_size]
        queue = queue[batch_size:]


def build_optimizer(
    parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer of a recipe over fp32 parameters.

    Raises:
        EightBitError: it needs bitsandbytes, which is not installed.
    """
    import torch

    beta1, beta2 = config.betas
    if config.name == "adamw_8bit":
        adamw_8bit = eight_bit.import_bitsandbytes("optimizer.name", config.name).optim.AdamW8bit
        optimizer = adamw_8bit(
            parameters, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay
        )
        return cast("torch.optim.Optimizer", optimizer)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=config.lr, alpha=beta2)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay, fused=True
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the learning-rate schedule of a training, one of transformers' own.

    With W warm-up steps, step s (from 0) has the rate

        s < W:     lr s / W, so the first step has the rate 0
        constant:  lr
        linear:    lr (steps - s) / (steps - W)
        cosine:    lr (1 + cos(pi (s - W) / (steps - W))) / 2

    W is at most steps - 1, so a training that is shorter than its warm-up reaches the full rate in
    its last step.

    Args:
        optimizer: the optimizer whose rate is scheduled.
        config: name of the schedule and number of warm-up steps.
        steps: steps of the training.
    """
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.scheduler == "constant" else config.scheduler
    scheduler = get_scheduler(name, optimizer, min(config.warmup_steps, steps - 1), steps)
    return cast("torch.optim.lr_scheduler.LRScheduler", scheduler)


def train(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    minibatches: Iterable[np.ndarray],
    loss: LossFunction,
    optimizer_config: OptimizerConfig,
    options: LoopOptions,
) -> TrainingMetrics:
    """Take one optimizer step per `accumulation` minibatches, whose gradients are averaged.

    The random generators of the process keep their state.

    Args:
        model: set to training mode during training, and to evaluation mode afterwards.
        parameters: the parameters to train (fp32).
        minibatches: index arrays; their number determines the length of the schedule.
        loss: loss of rows by their indices.
        optimizer_config: the optimizer, its schedule and its accumulation.
        options: seed, dropout, callbacks, and further parameters.

    Raises:
        TrainingError: a loss is not finite; the message names the step.
        EightBitError: see `build_optimizer`.
    """
    device = str(parameters[0].device)
    steps = _group(list(minibatches), optimizer_config.accumulation)
    optimizer = build_optimizer(parameters, optimizer_config)
    clipped = [parameters]
    for extra in options.groups:
        optimizer.add_param_group({"params": list(extra.parameters), "lr": extra.lr})
        clipped.append(extra.parameters)
    trained = [parameter for group in clipped for parameter in group]
    scheduler = build_scheduler(optimizer, optimizer_config, len(steps))
    losses: list[float] = []
    gradient_norms: list[float] = []
    tokens = 0
    start = time.perf_counter()
    model.train(options.dropout)
    halve = options.concurrent and not (options.dropout and find_active_dropout(model))
    parts = concurrent_parts(parameters[0].device) if halve else 1
    division = Division(options.micro_batch_size, parts, options.before_minibatch)
    try:
        with seeded(device, options.seed), checkpointed(model):
            for step, group in enumerate(steps):
                optimizer.zero_grad(set_to_none=True)
                step_loss, step_tokens = accumulate_gradients(loss, trained, group, step, division)
                tokens += step_tokens
                if options.before_step is not None:
                    options.before_step()
                if step and options.should_stop is not None and options.should_stop():
                    break
                norms = [clip_gradients(members, optimizer_config.clip) for members in clipped]
                optimizer.step()
                scheduler.step()
                gradient_norms.append(math.hypot(*norms))
                losses.append(step_loss)
                if options.progress is not None:
                    options.progress(step, step_loss)
    finally:
        model.eval()
        for parameter in trained:
            parameter.grad = None
    return TrainingMetrics(losses, gradient_norms, tokens, time.perf_counter() - start)


def train_adapter(
    model: torch.nn.Module,
    slot: AdapterSlot,
    rows: int,
    loss: LossFunction,
    training: LocalTraining,
    concurrent: bool = False,
) -> tuple[Adapter, TrainingMetrics]:
    """Train the adapter in a slot on minibatches of rows.

    Args:
        model: the model of the slot.
        slot: holds the initial values, and the trained ones afterwards.
        rows: number of rows.
        loss: loss of rows by their indices.
        training: settings; its proximal term is relative to the initial values.
        concurrent: see `LoopOptions`.

    Returns:
        the trained adapter (fp32, CPU) and the metrics.

    Raises:
        TrainingError: there are no rows, or a loss is not finite.
    """
    metrics = train(
        model,
        slot.parameters,
        training.draw_minibatches(rows),
        add_proximal_term(loss, slot.parameters, training.proximal_weight),
        training.optimizer,
        LoopOptions(
            seed=training.seed,
            micro_batch_size=training.micro_batch_size,
            progress=training.progress,
            concurrent=concurrent,
        ),
    )
    return slot.read(), metrics


def _group(minibatches: list[np.ndarray], size: int) -> list[list[np.ndarray]]:
    return [minibatches[i : i + size] for i in range(0, len(minibatches), size)]


def accumulate_gradients(
    loss: LossFunction,
    parameters: Sequence[torch.nn.Parameter],
    minibatches: list[np.ndarray],
    step: int,
    division: Division,
) -> tuple[float, int]:
    """Add the gradients of a step to those of parameters.

    The activations of a micro-batch are freed before the next one is computed.

    Args:
        loss: loss of rows by their indices.
        parameters: tensors that receive gradients.
        minibatches: indices of each minibatch; their mean losses are averaged.
        step: number of the step, for messages.
        division: how each minibatch is divided.

    Returns:
        the mean loss, and the number of tokens.

    Raises:
        TrainingError: the loss is not finite.
    """
    total = 0.0
    tokens = 0
    for indices in minibatches:
        micro_batches = division.micro_batches(indices)
        if division.before_minibatch is not None:
            division.before_minibatch(micro_batches)
        for micro_batch in micro_batches:
            pieces = [piece for piece in np.array_split(micro_batch, division.parts) if len(piece)]
            shares = [len(piece) / len(indices) / len(minibatches) for piece in pieces]
            calls = [
                partial(_gradients, loss, parameters, piece, share)
                for piece, share in zip(pieces, shares, strict=True)
            ]
            computed = run_concurrently(calls)
            value = sum(part.loss for part in computed)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} at step {step}: lower the learning rate, or inspect the rows "
                    "of this client"
                )
            for part in computed:  # in the order of the parts, whichever ended first
                add_gradients(parameters, part.gradients)
            total += value
            tokens += sum(part.tokens for part in computed)
    return total, tokens


@dataclass(frozen=True)
class _Part:
    """Mean loss of rows, times a share, its gradients, and tokens in the forward pass."""

    loss: float
    gradients: Gradients
    tokens: int


def _gradients(
    loss: LossFunction, parameters: Sequence[torch.nn.Parameter], indices: np.ndarray, share: float
) -> _Part:
    row_losses, tokens = loss(indices)
    value = row_losses.mean() * share
    return _Part(value.item(), compute_gradients(value, parameters), tokens)


def mean_gradients(
    loss: LossFunction,
    parameters: Sequence[torch.nn.Parameter],
    indices: np.ndarray,
    micro_batch_size: int | None = None,
) -> tuple[Gradients, int]:
    """Gradients of the mean loss of rows, in micro-batches, and the number of tokens.

    Args:
        loss: loss of rows by their indices.
        parameters: they keep their own gradients.
        indices: the rows.
        micro_batch_size: see `LoopOptions`.
    """
    micro_batches = Division(micro_batch_size).micro_batches(indices)
    parts = (_gradients(loss, parameters, part, len(part) / len(indices)) for part in micro_batches)
    first = next(parts)
    total = list(first.gradients)
    tokens = first.tokens
    for part in parts:
        total = [
            gradient if value is None else value if gradient is None else value + gradient
            for value, gradient in zip(total, part.gradients, strict=True)
        ]
        tokens += part.tokens
    return total, tokens


def compute_gradients(value: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> Gradients:
    """Gradients of a value; None for a parameter that is frozen or not used."""
    import torch

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = iter(torch.autograd.grad(value, trained, allow_unused=True))
    return [next(gradients) if parameter.requires_grad else None for parameter in parameters]


def add_gradients(parameters: Sequence[torch.nn.Parameter], gradients: Gradients) -> None:
    """Add gradients to those of parameters; None is not added."""
    import torch

    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            parameter.grad += gradient


def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients down to a global norm, in place.

    Args:
        parameters: with their gradients.
        max_norm: largest norm; None does not clip.

    Returns:
        the norm before clipping.
    """
    import torch

    limit = max_norm if max_norm is not None else float("inf")
    return torch.nn.utils.clip_grad_norm_(parameters, limit).item()


class RecordedLoss:
    """A loss that records its means.

    Attributes:
        mean: mean over all rows so far; NaN before the first.
    """

    def __init__(self, loss: LossFunction) -> None:
        self._sum = 0.0
        self._rows = 0
        self._loss = loss

    @property
    def mean(self) -> float:
        return self._sum / self._rows if self._rows else math.nan

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, int]:
        """The losses of rows by their indices, and the number of tokens."""
        losses, tokens = self._loss(indices)
        self._sum += losses.detach().sum().item()
        self._rows += len(losses)
        return losses, tokens


def add_proximal_term(
    loss: LossFunction, parameters: Sequence[torch.nn.Parameter], weight: float
) -> LossFunction:
    """Add (mu / 2) |phi - phi_0|^2 to the loss of each row (Li et al. 2020, FedProx, eq. 2).

    Args:
        loss: loss of rows by their indices.
        parameters: phi; their current values are phi_0.
        weight: mu; with 0 the loss is returned unchanged.
    """
    if not weight:
        return loss
    initial = [parameter.detach().clone() for parameter in parameters]

    def proximal_loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        row_losses, tokens = loss(indices)
        distance = sum((p - p0).square().sum() for p, p0 in zip(parameters, initial, strict=True))
        return row_losses + weight / 2 * distance, tokens

    return proximal_loss
