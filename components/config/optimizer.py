"""Optimizers and their learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from components.config.section import Section


def _check_betas(betas: list[float]) -> list[float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("both must lie in [0, 1)")
    return betas


Betas = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_check_betas)]
"""Decay rates of the running averages of the gradient and of its square, in [0, 1)."""


class OptimizerConfig(Section):
    """A first-order optimizer and its schedule, both reinitialized for each client and round."""

    name: Literal["adamw", "adamw_8bit", "rmsprop", "sgd"] = "adamw"
    """FedBiscuit table 3: AdamW. adamw_8bit (DRIFT appendix A): AdamW of bitsandbytes, with 8-bit
    moments for tensors of at least 4,096 values; needs the extra 8bit. rmsprop divides by the root
    of the average of the squared gradient, whose decay rate is the second of betas."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate; FedBiscuit table 3: 1e-5."""
    betas: Betas = Field([0.9, 0.95])
    """Betas of AdamW; FedBiscuit table 3: (0.9, 0.95)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient over all parameters; null does not clip."""
    accumulation: int = Field(1, ge=1)
    """Minibatches whose gradients are averaged for one step. FedPDPO D.3: 2 of 8 pairs."""
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, over the steps of one local training: constant, or decaying
    to 0. DRIFT appendix A: cosine."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; fewer than a local training has. DRIFT appendix A: 4."""

    @model_validator(mode="after")
    def _check_weight_decay(self) -> Self:
        if self.name == "rmsprop" and self.weight_decay:
            raise ValueError(
                f"weight_decay is {self.weight_decay:g}, but rmsprop has no decoupled weight decay: set it"
                " to 0, or use adamw"
            )
        return self


class RateDecay(Section):
    """Decay of a client's learning rates when its loss rises (FedPDPO D.3.1), the same for all methods."""

    factor: float = Field(0.8, gt=0, lt=1)
    """Factor of the learning rates after a round in which the client's mean DPO loss was higher
    than in its previous one; FedPDPO D.3.1: 0.8."""
    min_lr: float = Field(1e-6, gt=0)
    """Learning rate below which none falls; FedPDPO D.3.1: 1e-6."""

    def apply(self, lr: float, decay: float) -> float:
        """A learning rate times the decay so far, but not below the minimum; a smaller rate stays."""
        return max(lr * decay, min(lr, self.min_lr))


def check_warmup(optimizer: OptimizerConfig, steps: int, key: str) -> None:
    """Refuse a warm-up that leaves no step at the full learning rate; the key is that of the steps."""
    if optimizer.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, but {key} is {steps}, so that no step"
            f" would have the full learning rate: use at most {steps - 1}"
        )
