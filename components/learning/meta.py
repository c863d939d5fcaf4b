"""First-order meta-training of an adapter.

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
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from components.config import OptimizerConfig
from components.learning.local import LoopOptions, LossFunction, TrainingMetrics, train
from components.models.resident import ResidentPolicy
from components.seeding import derive

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter


def group_meta_batches(minibatches: Sequence[np.ndarray], inner_steps: int) -> list[list[np.ndarray]]:
    """Divide the minibatches of a round among meta-steps, so that each is used for one gradient.

    A meta-step takes one minibatch for each inner step, and one for its outer step. If their number
    is no multiple of this, the meta-steps differ in length by one, and some have fewer inner steps.

    Args:
        minibatches: index arrays; at least one.
        inner_steps: maximum number of inner steps per meta-step.

    Returns:
        for each meta-step, the index arrays of its inner steps and then that of its outer step.
    """
    count = math.ceil(len(minibatches) / (inner_steps + 1))
    sizes = [len(part) for part in np.array_split(np.arange(len(minibatches)), count)]
    remaining = iter(minibatches)
    return [list(islice(remaining, size)) for size in sizes]


def adapt(
    resident: ResidentPolicy, loss: LossFunction, minibatches: Sequence[np.ndarray], lr: float, seed: int
) -> TrainingMetrics:
    """Adapt the adapter in the slot to a client by gradient descent, one step per minibatch.

    Args:
        resident: the model; its adapter is changed in place.
        loss: loss of the client's pairs.
        minibatches: index arrays.
        lr: learning rate; gradients are not clipped.
        seed: dropout is a function of it.
    """
    sgd = OptimizerConfig(name="sgd", lr=lr, weight_decay=0.0, clip=None)
    options = LoopOptions(seed=seed)
    return train(resident.model, resident.slot.parameters, minibatches, loss, sgd, options)


@dataclass(frozen=True)
class MetaRates:
    """How far the steps of meta-training go.

    Attributes:
        inner_lr: learning rate of the inner steps, by plain gradient descent.
        outer: optimizer of the outer steps.
    """

    inner_lr: float
    outer: OptimizerConfig


def train_meta(
    resident: ResidentPolicy,
    loss: LossFunction,
    meta_batches: Sequence[Sequence[np.ndarray]],
    rates: MetaRates,
    options: LoopOptions,
) -> tuple[Adapter, TrainingMetrics]:
    """Train the adapter in the slot so that a few steps from it adapt it to a client.

    Args:
        resident: the model.
        loss: loss of the client's pairs.
        meta_batches: minibatches of each meta-step, see `group_meta_batches`.
        rates: of the inner and outer steps.
        options: of the loop over the outer steps.

    Returns:
        the trained adapter (fp32, CPU), and metrics: the losses of the outer steps, the tokens of
        all steps.
    """
    outer_loss = _OuterLoss(resident, loss, meta_batches, rates.inner_lr)
    metrics = train(
        resident.model,
        resident.slot.parameters,
        [np.array([step]) for step in range(len(meta_batches))],
        outer_loss,
        rates.outer,
        replace(options, seed=derive(options.seed, "meta"), before_step=outer_loss.restore),
    )
    return resident.slot.read(), replace(metrics, tokens=metrics.tokens + outer_loss.inner_tokens)


class _OuterLoss:
    """Loss of a meta-step: it takes the inner steps, then computes the outer minibatch's loss.

    Attributes:
        inner_tokens: tokens of the inner steps so far.
    """

    def __init__(
        self,
        resident: ResidentPolicy,
        loss: LossFunction,
        meta_batches: Sequence[Sequence[np.ndarray]],
        inner_lr: float,
    ) -> None:
        self.inner_tokens = 0
        self._parameters = resident.slot.parameters
        self._loss = loss
        self._meta_batches = meta_batches
        self._inner_lr = inner_lr
        self._initial: list[torch.Tensor] = []

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, int]:
        """The loss of a meta-step; indices is a one-element array with its number."""
        import torch

        (step,) = indices
        *inner, outer = self._meta_batches[step]
        self._initial = [parameter.detach().clone() for parameter in self._parameters]
        for minibatch in inner:
            losses, tokens = self._loss(minibatch)
            gradients = torch.autograd.grad(losses.mean(), self._parameters)
            with torch.no_grad():
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=self._inner_lr)
            self.inner_tokens += tokens
        return self._loss(outer)

    def restore(self) -> None:
        """Undo the inner steps, so that the outer step starts from the parameters before them."""
        import torch

        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._initial, strict=True):
                parameter.copy_(value)
