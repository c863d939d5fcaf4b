"""Per-FedAvg: an adapter that a few steps turn into each client's own (Fallah et al. 2020), by DPO.

Clients take meta-steps (components/learning/meta_learning.py, first order), and the server averages. A
client uses the adapter that a few inner steps on its own pairs reach from the server's; it is
recomputed when it is needed, and never leaves the client.

FedPDPO D.3.1 names inner steps of 0.01 (5 of them), outer steps of 0.001, and AdamW for all
methods. We read this as AdamW for the outer steps and, as in Fallah et al., plain gradient descent
for the inner ones. The budget of a round counts gradients: a meta-step takes one minibatch for each
inner step, and one more. PPO is used without a critic. federation.rate_decay applies to the outer
steps; the adaptation, which clients also take when they use the adapter, keeps its rate.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.config import DpoObjective, FederationConfig, PairPpoObjective, Recipe, RecipeError, one_of
from components.federation.local import Adaptation, Local
from components.federation.method import AveragingMethod, Joining


class PerFedAvg(AveragingMethod):
    """Options of Per-FedAvg."""

    inner_lr: float = Field(0.01, gt=0)
    """Learning rate of the adaptation, by plain gradient descent; FedPDPO D.3.1: 0.01."""
    inner_steps: int = Field(5, ge=1)
    """Steps of the adaptation; FedPDPO D.3.1: 5. Each takes a minibatch of the round's local
    steps."""
    outer_lr: float = Field(1e-3, gt=0)
    """Learning rate of the meta-steps, in place of federation.optimizer.lr; FedPDPO D.3.1:
    0.001."""
    objective: Annotated[DpoObjective | PairPpoObjective, one_of(DpoObjective, PairPpoObjective)] = Field(
        default_factory=DpoObjective
    )
    """Local objective: dpo, or ppo with the recipe's one reward, without a critic."""

    def local(self) -> Local:
        return Local(
            self.objective,
            lr=self.outer_lr,
            decays_rates=True,
            own="modules",
            adaptation=Adaptation(self.inner_steps, self.inner_lr),
        )

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        """No step where the clients' models are made by the adaptation alone."""
        if self.adapters_by_client:
            return super().joining(config, pairs)
        note = f"the adaptation of the server's adapter by its inner steps on at most {pairs} own pairs"
        return Joining(config.rounds, 0, note)

    def check(self, recipe: Recipe) -> None:
        """Refuse a round without a complete meta-step too."""
        super().check(recipe)
        config = recipe.federation
        if isinstance(self.objective, PairPpoObjective) or config.local_epochs is not None:
            return
        gradients = self.local().gradient_evaluations(config, 0)
        if gradients < self.inner_steps + 1:
            raise RecipeError(
                f"federation.options.inner_steps is {self.inner_steps}, but a round has {gradients} gradient"
                " evaluations (federation.local_steps), of which one is that of the outer step: use at most"
                f" {gradients - 1} inner steps, or at least {self.inner_steps + 1} local steps."
            )
