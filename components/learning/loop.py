"""The training loop: K optimizer steps on minibatches of a client's rows, OPTIM(m, phi, K) of FedBiscuit.

    for each step, which has `accumulation` minibatches:
        for each minibatch:
            loss.begin_minibatch(micro-batches)
            add the gradients of the mean of loss(rows), micro-batch by micro-batch
        loss.before_step(); the training ends here if loss.stops()
        clip, and take a step of the optimizer and of its schedule

What is minimized is a value, a `Loss`; the loop knows no objective. The optimizer is built for each
training and discarded afterwards, because clients keep no optimizer state between rounds. The
learning-rate schedule therefore covers the K steps of one training and starts again in each round,
as with a `transformers.Trainer` that is started in each round. Parameters, gradients of the adapter
and optimizer state are fp32 for any dtype of the backbone: in bf16, a step of 1e-5 would be lost to
rounding. Only the moments of adamw_8bit have 8 bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import get_scheduler

from components.concurrency import concurrent_parts, run_concurrently
from components.config import OptimizerConfig, UserError
from components.models import eight_bit
from components.models.backbone import find_active_dropout
from components.models.checkpointing import checkpointed
from components.seeding import generator, seeded

Rows = npt.NDArray[np.int64]
"""Indices of a client's rows."""
Parameters = Sequence[torch.nn.Parameter]
ParameterGroup = tuple[Parameters, float]
"""Parameters (fp32) with a learning rate of their own, whose gradient is clipped apart from the others'."""
Part = Callable[[Sequence[Any]], Sequence[Any]]
"""Selects consecutive elements, such as a round's steps that train the private modules."""
Gradients = list[torch.Tensor | None]
"""Gradients of parameters, in their order; None for one that is frozen or not used."""


class TrainingError(UserError, RuntimeError):
    """Training that cannot continue, e.g. because a loss is not finite."""


class RowLosses(NamedTuple):
    """The losses of a micro-batch."""

    values: torch.Tensor  # [k], of the rows that count (nats); 0 of one that a minibatch excludes
    tokens: int  # that went through the model


class StepFigures(NamedTuple):
    """Figures of an optimizer step that was taken."""

    step: int  # from 0
    loss: float  # mean loss of its minibatches, before the step (nats)
    gradient_norm: float  # global norm of its gradient, before clipping
    learning_rate: float


class Loss:
    """What a training minimizes: the losses of rows, and what happens at the steps of the loop.

    A loss that an objective's section names is built from the ClientData of a training.
    """

    dropout = True  # PPO has none: the ratio to the policy that was received would be noisy
    concurrent = False  # whether two halves of a micro-batch may be computed at a time on the CPU
    accumulates = True  # whether a step has as many minibatches as the optimizer says, or one
    # Trained beside the model's parameters, such as a critic.
    parameter_groups: tuple[ParameterGroup, ...] = ()

    @classmethod
    def draw_minibatches(
        cls, objective: Any, rows: int, training: Training, part: Part, round_seed: int
    ) -> list[Rows]:
        """Draw the minibatches of a part of a client's round, for a client with this number of rows.

        The training has the steps of the whole round, and the seed of the part.
        """
        steps = len(part(range(training.steps)))
        return replace(training, steps=steps).draw_minibatches(rows)

    def __call__(self, rows: Rows) -> RowLosses:
        """The losses of a micro-batch; may be called in several threads if `concurrent`."""
        raise NotImplementedError

    def begin_minibatch(self, micro_batches: Sequence[Rows]) -> None:
        """Called before the first micro-batch, for losses that depend on the whole minibatch."""

    def before_step(self) -> None:
        """Called when a step's gradient is complete, before clipping; it may change the gradient in place."""

    def stops(self) -> bool:
        """Whether to end without the step whose gradient is complete; not asked before the first one."""
        return False

    def metrics(self, trained: Trained) -> dict[str, float]:
        """Metrics of a training with this loss."""
        return trained.metrics()

    def numbers(self) -> dict[str, float]:
        """Numbers that the client keeps for its next round."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that the client keeps for its next round, fp32 on the CPU."""
        return {}

    def sent(self, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that the client sends, of the trained adapter; all are fp32 on the CPU."""
        return adapter


@dataclass(frozen=True)
class Training:
    """Settings of one local training."""

    steps: int  # optimizer steps, of the whole round where a training is a part of it
    batch_size: int  # rows per minibatch
    optimizer: OptimizerConfig  # with its schedule, and the minibatches that it accumulates per step
    seed: int  # the order of the rows, and dropout, are functions of it
    micro_batch_size: int | None = None  # rows that go through the model at once; None: a minibatch
    # Called after each step; the training ends if it returns True.
    progress: Callable[[StepFigures], bool | None] | None = None

    def draw_minibatches(self, rows: int) -> list[Rows]:
        """The minibatches of all steps for a client with this number of rows."""
        count = self.steps * self.optimizer.accumulation
        return list(draw_minibatches(rows, self.batch_size, count, self.seed))


@dataclass(frozen=True)
class Trained:
    """Figures of a training."""

    losses: list[float]  # mean loss of the minibatches of each step that was taken, before it (nats)
    gradient_norms: list[float]  # global norm of the gradient of each step, before clipping
    tokens: int  # that went through the model, without padding
    seconds: float  # wall time

    def metrics(self) -> dict[str, float]:
        """The figures as a client's metrics."""
        return {
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "loss": sum(self.losses) / len(self.losses),
            "gradient_norm": sum(self.gradient_norms) / len(self.gradient_norms),
            "steps": len(self.losses),
            "tokens": self.tokens,
            "seconds": self.seconds,
        }


def draw_minibatches(rows: int, batch_size: int, count: int, seed: int) -> Iterator[Rows]:
    """Draw minibatches, [batch_size] each, in passes over the rows, each in a random order of its own.

    A minibatch may contain the end of one pass and the start of the next; no row is dropped.
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


def train(
    model: torch.nn.Module,
    parameters: Parameters,
    minibatches: Iterable[Rows],
    loss: Loss,
    training: Training,
    parameter_groups: tuple[ParameterGroup, ...] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Take one optimizer step per `accumulation` minibatches, whose gradients are averaged.

    The random generators of the process keep their state.

    Args:
        model: in evaluation mode afterwards.
        parameters: the parameters to train (fp32).
        minibatches: their number determines the length of the schedule.
        training: its steps and its batch size are not used.
        parameter_groups: further parameters of the model, at rates of their own.
        optimizer: over the parameters; None takes that of `build_optimizer`.

    Raises:
        TrainingError: a loss is not finite; the message names the step.
    """
    config = training.optimizer
    size = config.accumulation if loss.accumulates else 1
    batches = list(minibatches)
    steps = [batches[start : start + size] for start in range(0, len(batches), size)]
    optimizer = optimizer or build_optimizer(parameters, config)
    clipped = [parameters]
    for members, lr in (*parameter_groups, *loss.parameter_groups):
        optimizer.add_param_group({"params": list(members), "lr": lr})
        clipped.append(members)
    trained = list(chain.from_iterable(clipped))
    scheduler = build_scheduler(optimizer, config, len(steps))
    losses: list[float] = []
    norms: list[float] = []
    tokens = 0
    start = time.perf_counter()
    model.train(loss.dropout)
    halve = loss.concurrent and not (loss.dropout and find_active_dropout(model))
    parts = concurrent_parts(parameters[0].device) if halve else 1
    accumulator = Accumulator(loss, trained, training.micro_batch_size, parts)
    try:
        with seeded(str(parameters[0].device), training.seed), checkpointed(model):
            for step, step_batches in enumerate(steps):
                optimizer.zero_grad(set_to_none=True)
                value, step_tokens = accumulator.add(step_batches, f"at step {step}: lower the learning rate")
                tokens += step_tokens
                loss.before_step()
                if step and loss.stops():
                    break
                norms.append(math.hypot(*(clip_gradients(members, config.clip) for members in clipped)))
                rate = float(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                losses.append(value)
                if training.progress and training.progress(StepFigures(step, value, norms[-1], rate)):
                    break
    finally:
        model.eval()
        for parameter in trained:
            parameter.grad = None
    return Trained(losses, norms, tokens, time.perf_counter() - start)


@dataclass(frozen=True)
class Accumulator:
    """Adds the gradients of minibatches to those of parameters."""

    loss: Loss
    parameters: Parameters
    micro_batch_size: int | None
    parts: int = 1  # of a micro-batch that are computed concurrently

    def add(self, minibatches: Sequence[Rows], advice: str) -> tuple[float, int]:
        """Add the gradients of a step; gives the mean loss of its minibatches, and the number of tokens.

        The activations of a micro-batch are freed before the next one is computed. A loss that is not
        finite is a TrainingError, whose message has the advice.
        """
        total = 0.0
        tokens = 0
        for rows in minibatches:
            micro_batches = split_rows(rows, self.micro_batch_size)
            self.loss.begin_minibatch(micro_batches)
            for micro_batch in micro_batches:
                pieces = [piece for piece in np.array_split(micro_batch, self.parts) if len(piece)]
                shares = [len(piece) / len(rows) / len(minibatches) for piece in pieces]
                calls = [partial(self._compute, *call) for call in zip(pieces, shares, strict=True)]
                computed = run_concurrently(calls)
                value = sum(part[0] for part in computed)
                if not math.isfinite(value):
                    raise TrainingError(f"the loss is {value} {advice}, or inspect the rows of this client")
                for _, gradients, _ in computed:  # in the order of the pieces, whichever ended first
                    add_gradients(self.parameters, gradients)
                total += value
                tokens += sum(part[2] for part in computed)
        return total, tokens

    def _compute(self, rows: Rows, share: float) -> tuple[float, Gradients, int]:
        losses = self.loss(rows)
        value = losses.values.detach().mean() * share
        return value.item(), gradients_of(losses.values.mean() * share, self.parameters), losses.tokens


def split_rows(rows: Rows, size: int | None) -> list[Rows]:
    """Consecutive micro-batches of a minibatch; the last one may be smaller; None for a single one."""
    size = size or len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def gradients_of(value: torch.Tensor, parameters: Parameters) -> Gradients:
    """Gradients of a value; None for a parameter that is frozen or not used."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = iter(torch.autograd.grad(value, trained, allow_unused=True))
    return [next(gradients) if parameter.requires_grad else None for parameter in parameters]


def add_gradients(parameters: Parameters, gradients: Gradients) -> None:
    """Add gradients to those of parameters; None is not added."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is not None:
            parameter.grad += gradient
        elif gradient is not None:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)


def clip_gradients(parameters: Parameters, max_norm: float | None) -> float:
    """Scale gradients down to a global norm, in place; None does not. Returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm).item()


def build_optimizer(parameters: Parameters, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a recipe over fp32 parameters."""
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
    """
    name = "constant_with_warmup" if config.scheduler == "constant" else config.scheduler
    scheduler = get_scheduler(name, optimizer, min(config.warmup_steps, steps - 1), steps)
    return cast("torch.optim.lr_scheduler.LRScheduler", scheduler)
