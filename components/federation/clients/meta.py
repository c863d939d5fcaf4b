"""The trainer of Per-FedAvg, which adapts the server's adapter to each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import DpoObjective, PairPpoObjective, Recipe
from components.data.records import PairRow, Pairs
from components.federation.clients.base import ClientResult, unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.clients.policy import ResidentPolicyTrainer, training_metrics
from components.federation.clients.private import PrivateState
from components.federation.clients.rates import RateMemory
from components.federation.methods.perfedavg import Options
from components.federation.protocol import Job, TrainJob
from components.learning.preference_scores import PreferenceScores
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    from components.learning.local import LoopOptions, LossFunction
    from components.models.adapters import Adapter
    from components.models.policy import Policy


class MetaTrainer(ResidentPolicyTrainer):
    """Takes meta-steps (components/learning/meta.py), and adapts the server's adapter to a client."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        super().__init__(recipe, device)
        if not isinstance(recipe.federation.options, Options):
            raise TypeError("the trainer 'meta' needs the options of perfedavg")
        self._options = recipe.federation.options
        self._seed = recipe.seed

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Take the meta-steps of the round on the client's training pairs."""
        from components.learning.meta import MetaRates, group_meta_batches, train_meta
        from components.learning.offline_ppo import OfflinePPOLoss

        if not isinstance(job, TrainJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        config = self._federation
        minibatches = self._draw_minibatches(len(rows), job.seed)
        meta_batches = group_meta_batches(minibatches, self._options.inner_steps)
        self.resident.slot.load(context.load_adapter(job.adapter))
        loss = self._loss(rows, minibatches, context)
        previous = context.private_state()
        rates = RateMemory.of(previous.numbers if previous else {})
        outer = self.decayed_optimizer(rates).model_copy(update={"accumulation": 1})
        options = self._loop_options(loss, job.seed)
        if isinstance(loss, OfflinePPOLoss):
            options = replace(
                options, before_minibatch=loss.begin_minibatch, should_stop=lambda: loss.exceeds_target
            )
        adapter, metrics = train_meta(
            self.resident, loss, meta_batches, MetaRates(self._options.inner_lr, outer), options
        )
        # Steps are counted in gradients, so that they compare with those of other methods.
        taken = list(chain.from_iterable(meta_batches[: len(metrics.losses)]))
        scalars = {"steps": float(len(taken))}
        if isinstance(loss, OfflinePPOLoss):
            scalars["kl"] = loss.distances[-1]
            scalars["pairs"] = float(len(np.unique(np.concatenate(taken))))
            scalars["stopped"] = float(len(taken) < len(minibatches))
        kept_bytes = 0
        if config.rate_decay is not None:
            # The losses are those of the outer steps, after the adaptation.
            rates = rates.after_round(sum(metrics.losses) / len(metrics.losses), config.rate_decay)
            scalars["decay"] = rates.decay
            state = PrivateState({}, rates.numbers())
            kept_bytes = context.store.save(job.key(), job.previous_job_key, state).size
        numbers = training_metrics(metrics).merged(Metrics(scalars=scalars))
        return ClientResult(tensors=adapter, rows=len(rows), metrics=numbers, kept_bytes=kept_bytes)

    def _draw_minibatches(self, rows: int, seed: int) -> list[npt.NDArray[np.int64]]:
        """The minibatches of a round, one for each gradient, as methods without meta-steps have them."""
        from components.learning.local import draw_minibatches
        from components.learning.offline_ppo import draw_ppo_minibatches

        if isinstance(self._objective, PairPpoObjective):
            return draw_ppo_minibatches(rows, self._objective, seed)
        config = self._federation
        budget = self._options.gradient_evaluations(config, rows)
        return list(draw_minibatches(rows, config.batch_size, budget, seed))

    def score_client_pairs(self, pairs: Pairs, adapter: Adapter, context: ClientContext) -> PreferenceScores:
        """Scores by the adapter after the client's adaptation."""
        from components.learning.dpo import pair_logprobs

        self._adapt(adapter, context)
        logprobs = pair_logprobs(self.resident, pairs, self._score_batch_size)
        return self._preference_scores(pairs, logprobs[None], self.reference_logprobs(pairs))

    def client_policy(self, adapter: Adapter, context: ClientContext) -> Policy:
        """The resident policy after the client's adaptation."""
        self._adapt(adapter, context)
        return self.resident.policy

    def _adapt(self, adapter: Adapter, context: ClientContext) -> None:
        """Take the inner steps on the client's training pairs; the same ones each time."""
        from components.learning.local import draw_minibatches
        from components.learning.meta import adapt

        rows = context.rows("train")
        options = self._options
        seed = derive(self._seed, "adapt", context.client)
        objective = self._objective
        size = self._federation.batch_size
        if isinstance(objective, PairPpoObjective):
            size = objective.minibatch
        inner = list(draw_minibatches(len(rows), size, options.inner_steps, seed))
        self.resident.slot.load(adapter)
        loss = self._loss(rows, inner, context)
        adapt(self.resident, loss, inner, options.inner_lr, self._loop_options(loss, seed))

    def _loop_options(self, loss: LossFunction, seed: int) -> LoopOptions:
        """How steps are taken: PPO has no dropout, so that its ratio is 1 before the first step."""
        from components.learning.local import LoopOptions
        from components.learning.offline_ppo import OfflinePPOLoss

        return LoopOptions(
            seed=seed,
            dropout=not isinstance(loss, OfflinePPOLoss),
            micro_batch_size=self._federation.micro_batch_size,
        )

    def _loss(
        self,
        rows: Sequence[PairRow],
        minibatches: Sequence[npt.NDArray[np.int64]],
        context: ClientContext,
    ) -> LossFunction:
        """The loss of DPO, or of PPO against the adapter in the slot, without a value head."""
        from components.learning.dpo import build_dpo_loss
        from components.learning.offline_ppo import OfflinePPOLoss

        used = np.unique(np.concatenate(list(minibatches)))
        match self._objective:
            case DpoObjective():
                reference = self.reference_logprobs(rows, used)
                return build_dpo_loss(self.resident, rows, reference, self._objective.beta)
            case PairPpoObjective():
                data = self.scored_pairs(rows, context, used)
                return OfflinePPOLoss(self.resident, data, used, self._objective)
            case _:
                raise TypeError(f"{type(self).__name__} cannot train the objective '{self._objective.kind}'")
