"""Methods whose clients train one shared adapter on preference pairs (FedDPO, FedProx, FFA-LoRA, ...)."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

from pydantic import Field

from components.config import DpoObjective, FederationConfig, RecipeError, one_of
from components.config.local_objectives import OfflinePpoObjective
from components.federation.local import Local
from components.federation.method import AveragingMethod, Method

PairObjective = Annotated[DpoObjective | OfflinePpoObjective, one_of(DpoObjective, OfflinePpoObjective)]
"""Type of an option that takes DPO, or PPO on the same pairs."""


def require_plain_sgd(config: FederationConfig, clipped: bool = True) -> None:
    """Refuse what is no plain gradient descent at one constant rate, which some server steps assume.

    Args:
        config: has the optimizer.
        clipped: whether gradients may be clipped.

    Raises:
        RecipeError: naming the optimizer's keys.
    """
    needed = {"optimizer.name": "sgd", "optimizer.scheduler": "constant", "optimizer.warmup_steps": 0}
    values: dict[str, object] = needed | {"rate_decay": None} | ({} if clipped else {"optimizer.clip": None})
    wrong = {key: value for key, value in values.items() if attrgetter(key)(config) != value}
    if wrong:
        is_now = " and ".join(f"federation.{key} is {attrgetter(key)(config)}" for key in wrong)
        settings = " ".join(f"federation.{key}={'null' if v is None else v}" for key, v in wrong.items())
        raise RecipeError(
            f"{is_now}, but federation.method '{config.method}' needs plain gradient descent at one constant"
            f" rate{'' if clipped else ' without clipping'}: set {settings}."
        )


class RatedMethod(Method):
    """A method whose clients train on pairs, with a learning rate of the method's own."""

    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the clients' shared adapter; null: federation.optimizer.lr.",
    )


class PairTraining(RatedMethod):
    """A method whose clients train by DPO, or by PPO on the same pairs."""

    objective: PairObjective = Field(
        default_factory=DpoObjective, description="Local objective: dpo, or ppo with the recipe's one reward."
    )

    def local(self) -> Local:
        return Local(self.objective, lr=self.lr, decays_rates=True)


class AveragedPairTraining(PairTraining, AveragingMethod):
    """Clients train one shared adapter by DPO or PPO, and an aggregator combines the adapters."""
