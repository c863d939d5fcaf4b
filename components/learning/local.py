"""The local loop: OPTIM(m, phi, K) of FedBiscuit, K optimiser steps on minibatches of one owner's rows.

The optimiser is built for each call and thrown away after it: clients keep no state between rounds. So the schedule of
the learning rate runs over the K steps of a call and begins anew for each client and round, as with a Trainer that is
started in each round. Parameters, gradients of the adapter and optimiser state are fp32, whatever the backbone's dtype
is; in bf16 a step of 1e-5 would vanish in rounding. Only the moments of adamw_8bit have 8 bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.config import Explained, OptimizerConfig
from components.models import eight_bit
from components.seeding import generator, seeded

if TYPE_CHECKING:
    import torch


class TrainingError(Explained, RuntimeError):
    """Training that cannot go on, e.g. a loss that is not finite."""


@dataclass(frozen=True)
class TrainingCurve:
    """What a local training did.

    Attributes:
        losses: mean loss of each step's minibatch, before the step (nats).
        gradient_norms: global norm of each step's gradient, before clipping.
        tokens: tokens that went through the model, padding not counted.
        seconds: wall time.
    """

    losses: list[float]
    gradient_norms: list[float]
    tokens: int
    seconds: float


def minibatches(rows: int, batch_size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Index arrays of `steps` minibatches: the rows in a seeded order, in a new one each time all were seen.

    A minibatch may run over the end of one pass into the next; no row is dropped.

    Raises:
        TrainingError: there are no rows.
    """
    if rows == 0:
        raise TrainingError("there are no rows to train on")
    queue = np.empty(0, dtype=np.int64)
    passes = 0
    for _ in range(steps):
        while len(queue) < batch_size:
            queue = np.concatenate([queue, generator(seed, "minibatches", passes).permutation(rows)])
            passes += 1
        yield queue[:batch_size]
        queue = queue[batch_size:]


def build_optimizer(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of a recipe over fp32 parameters.

    Raises:
        EightBitError: it needs bitsandbytes, which is not installed.
    """
    import torch

    if config.name == "adamw_8bit":
        eight = eight_bit.library("optimizer.name", config.name).optim
        return eight.AdamW8bit(parameters, lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate over a training of `steps` steps, by transformers' own schedules.

    With W warm-up steps, of which a training of so many steps or fewer has one less than it has steps, step s (from 0) has the rate lr s / W while s < W, so the first one has none; after that lr
    (constant), lr (steps - s) / (steps - W) (linear), or lr (1 + cos(pi (s - W) / (steps - W))) / 2 (cosine).
    """
    from transformers import get_scheduler

    return get_scheduler("constant_with_warmup" if config.scheduler == "constant" else config.scheduler, optimizer, min(config.warmup_steps, steps - 1), steps)


def train(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    batches: Iterable[np.ndarray],
    loss: Callable[[np.ndarray], tuple[torch.Tensor, int]],
    config: OptimizerConfig,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
    before_step: Callable[[], None] | None = None,
    until: Callable[[], bool] | None = None,
    dropout: bool = True,
) -> TrainingCurve:
    """Take one optimiser step per minibatch, or for as many as config.accumulation, whose gradients are averaged.

    Args:
        model: put into training mode for the duration, and back.
        parameters: what is trained (fp32).
        batches: index arrays, config.accumulation a step; the number of steps is the length of the schedule.
        loss: gives the rows' losses [N] and the number of real tokens for an index array.
        config: the optimiser and its schedule.
        seed: dropout is a function of it; the process's generators are left as they were.
        progress: called with (step, loss) after each step.
        before_step: called when a step's gradient is known and the parameters have not moved yet.
        until: asked before each step; where it says so, no more are taken.
        dropout: whether the model's dropout is on, as it is in training mode.

    Raises:
        TrainingError: a loss is not finite; says at which step.
    """
    import torch

    device, batches = parameters[0].device, list(batches)
    optimizer = build_optimizer(parameters, config)
    steps = [batches[i : i + config.accumulation] for i in range(0, len(batches), config.accumulation)]
    schedule = build_schedule(optimizer, config, len(steps))
    losses, norms, tokens, start = [], [], 0, time.perf_counter()
    model.train(dropout)
    try:
        with seeded(str(device), seed):
            for step, parts in enumerate(steps):
                if until is not None and until():
                    break
                optimizer.zero_grad(set_to_none=True)
                found = 0.0
                for indices in parts:
                    rows, count = loss(indices)
                    value = rows.mean() / len(parts)
                    if not value.isfinite():
                        raise TrainingError(f"the loss is {value.item()} at step {step}: lower the learning rate, or look at the rows of this client")
                    value.backward()
                    found += value.item()
                    tokens += count
                norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip if config.clip is not None else float("inf"))
                if before_step is not None:
                    before_step()
                optimizer.step()
                schedule.step()
                losses.append(found)
                norms.append(norm.item())
                if progress is not None:
                    progress(step, losses[-1])
    finally:
        model.eval()
        for parameter in parameters:
            parameter.grad = None
    return TrainingCurve(losses, norms, tokens, time.perf_counter() - start)
