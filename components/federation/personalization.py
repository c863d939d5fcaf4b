"""Shared base of personalized methods, whose clients keep private modules (FedPDPO, FedPer, FedRep).

    for r in 0 .. R-1:                           # FedPDPO algorithm 1
        A_r       = A clients sampled uniformly without replacement
        private_m = OPTIM(private_m; phi_r)      # personal stage: the modules in the client's store
        phi_m     = OPTIM(phi_r; private_m)      # shared stage: the received adapter
        phi_r+1   = combination of the phi_m

The two stages together have as many gradient evaluations as a round of any other method (see
components.federation.local.Local.gradient_evaluations). FedPer takes both stages at once, so each
of its gradients is one of the private and of the shared modules. private_m are the modules that the
papers call personal. They are in the client's private store, to which the server half, federated
averaging of the shared adapter, has no access.
"""

from __future__ import annotations

from components.config import PairPpoObjective, Recipe, RecipeError
from components.federation.method import AveragingMethod
from components.federation.pair_training import RatedMethod


class PersonalizedMethod(RatedMethod, AveragingMethod):
    """A method whose clients keep private modules."""

    def check(self, recipe: Recipe) -> None:
        """Refuse a round of one step too, where the method needs two."""
        super().check(recipe)
        config = recipe.federation
        local = self.local()
        is_ppo = isinstance(local.objective, PairPpoObjective)
        if local.stage and not is_ppo and config.local_epochs is None and config.local_steps < 2:
            raise RecipeError(
                f"federation.local_steps is {config.local_steps}, which federation.method '{config.method}'"
                " cannot divide between its personal and its shared stage: use at least 2."
            )
