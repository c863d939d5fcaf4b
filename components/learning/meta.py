"""First-order meta-training of an adapter (Fallah et al. 2020, Personalized Federated Learning with Theoretical Guarantees, section 5: the first-order approximation).

    for each meta-step:                              # their algorithm 1, for one client
        phi' = phi, then inner steps of plain gradient descent on minibatches of the client's pairs
        phi  = OPTIM(phi, gradient at phi' on another minibatch)

The gradient of the outer step is that at phi', without the second derivatives of the inner steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.config import OptimizerConfig
from components.learning.local import TrainingCurve, minibatches, train
from components.learning.policy import ResidentPolicy

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter


def meta_batches(rows: int, batch_size: int, minibatches_in_all: int, inner_steps: int, seed: int) -> list[list[np.ndarray]]:
    """The minibatches of each meta-step: those of its inner steps, and one for its outer step.

    Args:
        rows: of the client.
        batch_size: rows a minibatch.
        minibatches_in_all: how many gradients may be computed; as many meta-steps as they are enough for, at least one.
        inner_steps: of a meta-step.
        seed: as of minibatches.
    """
    size = inner_steps + 1
    steps = max(1, minibatches_in_all // size)
    drawn = list(minibatches(rows, batch_size, steps * size, seed))
    return [drawn[step * size : (step + 1) * size] for step in range(steps)]


Loss = Callable[[np.ndarray], tuple["torch.Tensor", int]]
"""The loss of the rows with these indices, [n], and the tokens that go through the model."""


def adapt(resident: ResidentPolicy, loss: Loss, batches: Sequence[np.ndarray], rate: float, seed: int) -> TrainingCurve:
    """Take plain gradient steps from the adapter in the slot, one a minibatch; it is in the slot afterwards.

    Args:
        resident: the model.
        loss: of an owner's pairs.
        batches: index arrays.
        rate: of each step; the gradient is not clipped.
        seed: dropout is a function of it.
    """
    plain = OptimizerConfig(name="sgd", lr=rate, weight_decay=0.0, clip=None)
    return train(resident.model, resident.slot.parameters, batches, loss, plain, seed)


def train_meta(
    resident: ResidentPolicy, loss: Loss, batches: Sequence[Sequence[np.ndarray]], inner_rate: float, optimizer: OptimizerConfig, seed: int,
) -> tuple[Adapter, TrainingCurve]:
    """Train the adapter in the slot so that a few steps from it on one owner's pairs lead far.

    Args:
        resident: the model.
        loss: of the owner's pairs.
        batches: of each meta-step, see meta_batches.
        inner_rate: of the inner steps.
        optimizer: of the outer steps.
        seed: dropout is a function of it.

    Returns:
        the trained adapter (fp32, CPU), and the curve: losses of the outer steps, tokens of all steps.
    """
    import torch

    from components.seeding import derive

    parameters, inside = resident.slot.parameters, 0
    start: list[torch.Tensor] = []

    def after_inner_steps(numbered: np.ndarray) -> tuple[torch.Tensor, int]:
        nonlocal inside, start
        (step,) = numbered
        *inner, outer = batches[step]
        start = [parameter.detach().clone() for parameter in parameters]
        for indices in inner:
            values, tokens = loss(indices)
            gradients = torch.autograd.grad(values.mean(), parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=inner_rate)
            inside += tokens
        return loss(outer)

    def back() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)

    curve = train(resident.model, parameters, [np.array([n]) for n in range(len(batches))], after_inner_steps, optimizer, derive(seed, "meta"), before_step=back)
    return resident.slot.read(), TrainingCurve(curve.losses, curve.gradient_norms, curve.tokens + inside, curve.seconds)
