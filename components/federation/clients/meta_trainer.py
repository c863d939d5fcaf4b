"""The trainer of Per-FedAvg, which adapts the server's adapter to each client."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from components.config import PairPpoObjective, Recipe
from components.data.records import Pairs
from components.federation.clients.context import ClientContext
from components.federation.clients.policy_trainer import PolicyTrainer
from components.federation.methods.perfedavg import PerFedAvg
from components.learning.loop import Loss, ParameterGroup, Parameters, Rows, Training, draw_minibatches
from components.learning.meta_learning import MetaLoss, adapt, group_meta_batches
from components.learning.pair_scores import PreferenceScores, pair_logprobs, policy_scores
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.store import Adapter


class MetaTrainer(PolicyTrainer):
    """Takes meta-steps (learning/meta_learning.py), and adapts the server's adapter to a client."""

    adds_proximal_term = False

    def __init__(self, recipe: Recipe, device: str) -> None:
        super().__init__(recipe, device)
        if not isinstance(recipe.federation.options, PerFedAvg):
            raise TypeError("the trainer 'meta' needs the options of perfedavg")
        self._options = recipe.federation.options

    def _minimize(
        self,
        loss: Loss,
        minibatches: list[Rows],
        training: Training,
        parameters: Parameters,
        parameter_groups: tuple[ParameterGroup, ...],
    ) -> dict[str, float]:
        """Take meta-steps on the minibatches."""
        meta_batches = group_meta_batches(minibatches, self._options.inner_steps)
        inner_lr, size = self._options.inner_lr, training.micro_batch_size
        meta_loss = MetaLoss(loss, meta_batches, parameters, inner_lr, size)
        training = replace(training, seed=derive(training.seed, "meta"))
        return super()._minimize(
            meta_loss, meta_loss.outer_minibatches, training, parameters, parameter_groups
        )

    def score_pairs(
        self, pairs: Pairs, adapter: Adapter, context: ClientContext, batch_size: int | None = None
    ) -> PreferenceScores:
        """Scores by the adapter after the client's adaptation."""
        size = batch_size or self._score_batch_size
        self.load_client(adapter, context)
        logprobs = pair_logprobs(self.resident, pairs, size)
        return policy_scores(self.resident, pairs, logprobs[None], self._reference_logprobs(pairs, size))

    def load_client(self, adapter: Adapter, context: ClientContext) -> None:
        """Load the adapter and take the inner steps on the client's training pairs, the same each time."""
        config, options = self._config, self._options
        rows = context.rows("train")
        seed = derive(self._seed, "adapt", context.client)
        objective = self._objective
        size = objective.minibatch if isinstance(objective, PairPpoObjective) else config.batch_size
        inner = list(draw_minibatches(len(rows), size, options.inner_steps, seed))
        self.resident.slot.load(adapter)
        loss = self._build_loss(context, rows, inner)
        parameters = self.resident.slot.parameters
        adapt(self.resident.model, parameters, inner, loss, options.inner_lr, seed, config.micro_batch_size)
