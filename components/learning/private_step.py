"""Steps that protect each pair (DP-SGD, Abadi et al. 2016), with a pair as the unit.

    batch     each pair independently with the rate q, which does not depend on the data
    step      (sum over its pairs of clip(gradient of the pair's loss, C) + noise of deviation sigma C) / q n

A pair's loss is the mean over its rows: both orders of a selector, for example. All rows of a pair are in
one micro-batch, so that its gradient is clipped as one. Pairs are computed one after the other, which is
right for any module. A batch may be empty; its step is one of noise. What follows, such as the optimizer,
its own clip and corrections of control variates, depends on data through the noised gradient alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from components.learning.loop import Gradients, Loss, Parameters, Rows, gradients_of
from components.privacy.noise import Stream, gaussian
from components.seeding import seeded

Streams = Callable[..., Stream]
"""The stream of a client's secret for a purpose, given as texts."""


@dataclass(frozen=True)
class PairProtection:
    """The noise of one training of a client."""

    clip: float  # C
    sigma: float  # standard deviation of the noise over C
    rate: float  # q
    pairs: int  # n, of the client
    streams: Streams

    @property
    def expected(self) -> float:
        """q n, which a step's sum is divided by."""
        return self.rate * self.pairs

    def accumulate(self, loss: Loss, parameters: Parameters) -> PairAccumulator:
        """What makes the gradients of the training's steps."""
        return PairAccumulator(loss, parameters, self)

    def draw(self, steps: int) -> list[Rows]:
        """The pairs of each step's batch, sorted; who does not know the secret cannot tell who is in one."""
        limit = min(math.ceil(self.rate * 2**64), 2**64 - 1)
        return [
            np.flatnonzero(self.streams("batch", str(step)).words(self.pairs) < np.uint64(limit))
            for step in range(steps)
        ]


class PairAccumulator:
    """Sets the gradients of a step to the noised mean of its pairs' clipped gradients."""

    def __init__(self, loss: Loss, parameters: Parameters, protection: PairProtection) -> None:
        """The accumulator of one training, whose steps it counts."""
        self._loss, self._parameters, self._protection = loss, parameters, protection
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._steps = count()

    def add(self, minibatches: Sequence[Rows], advice: str) -> tuple[float, int]:
        """Set the gradients of a step; gives the mean loss of its pairs (0 of none) and their tokens."""
        (pairs,) = minibatches
        step = str(next(self._steps))
        total = [torch.zeros_like(parameter) for parameter in self._trained]
        value, tokens = 0.0, 0
        device = str(self._trained[0].device)
        for pair in pairs.tolist():
            # Dropout of its own, so that no pair's gradient depends on which others are in the batch.
            seed = int(self._protection.streams("dropout", step, str(pair)).words(1)[0] >> np.uint64(1))
            with seeded(device, seed):
                losses = self._loss(self._loss.rows_of(pair))
                mean = losses.values.mean()
                gradients = gradients_of(mean, self._trained)
            add_clipped(total, gradients, self._protection.clip)
            value += mean.item() / len(pairs)
            tokens += losses.tokens
        content = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in total)).hexdigest()
        deviation = self._protection.sigma * self._protection.clip
        for number, (parameter, tensor) in enumerate(zip(self._trained, total, strict=True)):
            stream = self._protection.streams("noise", step, str(number), content)
            noise = torch.from_numpy(gaussian(stream, tensor.numel(), deviation)).reshape(tensor.shape)
            noised = (tensor.double().cpu() + noise) / self._protection.expected
            parameter.grad = noised.to(parameter.device, parameter.dtype)
        return value, tokens


def add_clipped(total: Sequence[torch.Tensor], gradients: Gradients, bound: float) -> float:
    """Add gradients of one pair, clipped to a norm over all of them; gives the norm before.

    Values that are not finite count as 0.
    """
    finite = [
        None if gradient is None else torch.nan_to_num(gradient.double(), nan=0.0, posinf=0.0, neginf=0.0)
        for gradient in gradients
    ]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in finite if gradient is not None))
    factor = min(1.0, bound / norm) if norm else 1.0
    for tensor, gradient in zip(total, finite, strict=True):
        if gradient is not None:
            tensor += (factor * gradient).to(tensor.dtype)
    return norm
