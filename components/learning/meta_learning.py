"""First-order meta-training of an adapter, as a loss around another one.

This is the first-order approximation of Fallah et al. 2020, Personalized Federated Learning with
Theoretical Guarantees, section 5:

    for each meta-step:                              # algorithm 1, for one client
        phi' = phi, then inner steps of gradient descent on minibatches of the client's pairs
        phi  = OPTIM(phi, gradient at phi' on another minibatch)

The gradient of the outer step is that at phi', without the second derivatives of the inner steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
import torch

from components.learning.loop import Accumulator, Loss, Parameters, Rows, Trained
from components.learning.wrapped_losses import WrappedLoss
from components.models.checkpointing import checkpointed
from components.seeding import seeded


def group_meta_batches(minibatches: Sequence[Rows], inner_steps: int) -> list[list[Rows]]:
    """Divide the minibatches of a round among meta-steps, so that each is used for one gradient.

    A meta-step takes one minibatch for each inner step, and one for its outer step. If their number
    is no multiple of this, the meta-steps differ in length by one, and some have fewer inner steps.

    Gives for each meta-step the minibatches of its inner steps, and then that of its outer step.
    """
    count = math.ceil(len(minibatches) / (inner_steps + 1))
    sizes = [len(part) for part in np.array_split(np.arange(len(minibatches)), count)]
    remaining = iter(minibatches)
    return [list(islice(remaining, size)) for size in sizes]


def descend(
    loss: Loss, minibatch: Rows, parameters: Parameters, lr: float, micro_batch_size: int | None
) -> int:
    """Take a step of plain gradient descent, without clipping; gives the number of tokens.

    The parameters are changed in place, and have no gradients before and afterwards.
    """
    accumulator = Accumulator(loss, parameters, micro_batch_size)
    _, tokens = accumulator.add([minibatch], "in an inner step: lower federation.options.inner_lr")
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)
                parameter.grad = None
    return tokens


def adapt(
    model: torch.nn.Module,
    parameters: Parameters,
    minibatches: Sequence[Rows],
    loss: Loss,
    lr: float,
    seed: int,
    micro_batch_size: int | None = None,
) -> None:
    """Adapt parameters to a client, one step of `descend` per minibatch; dropout is a function of seed."""
    model.train(loss.dropout)
    try:
        with seeded(str(parameters[0].device), seed), checkpointed(model):
            for minibatch in minibatches:
                descend(loss, minibatch, parameters, lr, micro_batch_size)
    finally:
        model.eval()


class MetaLoss(WrappedLoss):
    """Takes the inner steps before each outer minibatch, and undoes them before the outer step."""

    def __init__(
        self,
        loss: Loss,
        meta_batches: Sequence[Sequence[Rows]],
        parameters: Parameters,
        lr: float,
        micro_batch_size: int | None = None,
    ) -> None:
        """Wrap a loss; the batches are those of `group_meta_batches`, and lr is that of the inner steps."""
        super().__init__(loss)
        self.concurrent = self.accumulates = False
        self.tokens = 0  # of the inner steps
        self._meta_batches = meta_batches
        self._remaining = iter(meta_batches)
        self._parameters = parameters
        self._lr = lr
        self._micro_batch_size = micro_batch_size
        self._initial: list[torch.Tensor] = []

    @property
    def outer_minibatches(self) -> list[Rows]:
        """The minibatches of the outer steps."""
        return [minibatches[-1] for minibatches in self._meta_batches]

    def begin_minibatch(self, micro_batches: Sequence[Rows]) -> None:
        """Take the inner steps of the next meta-step."""
        *inner, _ = next(self._remaining)
        self._initial = [parameter.detach().clone() for parameter in self._parameters]
        for minibatch in inner:
            self.tokens += descend(self.loss, minibatch, self._parameters, self._lr, self._micro_batch_size)
        self.loss.begin_minibatch(micro_batches)

    def before_step(self) -> None:
        """Undo the inner steps, so that the outer step starts from the parameters before them."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._initial, strict=True):
                parameter.copy_(value)

    def metrics(self, trained: Trained) -> dict[str, float]:
        """As of the wrapped loss, with steps counted in gradients, as those of other methods are.

        The loss of DPO is that of the outer steps, after the adaptation.
        """
        taken = list(chain.from_iterable(self._meta_batches[: len(trained.losses)]))
        metrics = self.loss.metrics(trained)
        metrics |= {"steps": float(len(taken)), "tokens": trained.tokens + self.tokens}
        if "dpo" in metrics:
            metrics["dpo"] = metrics["loss"]
        if "pairs" in metrics:
            metrics["pairs"] = float(len(np.unique(np.concatenate(taken))))
        return metrics
