"""The trainer of Per-FedAvg, which adapts the server's adapter to each client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import DpoObjective, PairPpoObjective, Recipe
from components.data.records import PairRow, Pairs
from components.federation.clients.base import ClientResult, unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.clients.policy import ResidentPolicyTrainer, training_metrics
from components.federation.methods.perfedavg import Options
from components.federation.protocol import Job, TrainJob
from components.learning.preference_scores import PreferenceScores
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    from components.learning.local import LossFunction
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
        from components.learning.local import LoopOptions
        from components.learning.meta import MetaRates, draw_meta_batches, train_meta

        if not isinstance(job, TrainJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        config = self._federation
        budget = config.local_steps_for(len(rows)) * config.optimizer.accumulation
        meta_batches = draw_meta_batches(
            len(rows), config.batch_size, budget, self._options.inner_steps, job.seed
        )
        minibatches = list(chain.from_iterable(meta_batches))
        self.resident.slot.load(context.load_adapter(job.adapter))
        adapter, metrics = train_meta(
            self.resident,
            self._loss(rows, minibatches, context),
            meta_batches,
            MetaRates(
                self._options.inner_lr,
                config.optimizer.model_copy(update={"lr": self._options.outer_lr, "accumulation": 1}),
            ),
            LoopOptions(seed=job.seed, micro_batch_size=config.micro_batch_size),
        )
        # Steps are counted in gradients, so that they compare with those of other methods.
        steps = Metrics(scalars={"steps": len(minibatches)})
        return ClientResult(tensors=adapter, rows=len(rows), metrics=training_metrics(metrics).merged(steps))

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
        from components.learning.meta import adapt, draw_meta_batches

        rows = context.rows("train")
        options = self._options
        seed = derive(self._seed, "adapt", context.client)
        (meta_batch,) = draw_meta_batches(
            len(rows), self._federation.batch_size, options.inner_steps + 1, options.inner_steps, seed
        )
        inner = meta_batch[:-1]
        self.resident.slot.load(adapter)
        loss = self._loss(rows, inner, context)
        adapt(self.resident, loss, inner, options.inner_lr, seed, self._federation.micro_batch_size)

    def _loss(
        self,
        rows: Sequence[PairRow],
        minibatches: Sequence[npt.NDArray[np.int64]],
        context: ClientContext,
    ) -> LossFunction:
        """The loss of DPO, or of PPO against the adapter in the slot, without a value head."""
        from components.learning.dpo import build_dpo_loss
        from components.learning.offline_ppo import OfflinePPOLoss, ScoredPairs

        used = np.unique(np.concatenate(list(minibatches)))
        match self._objective:
            case DpoObjective():
                reference = self.reference_logprobs(rows, used)
                return build_dpo_loss(self.resident, rows, reference, self._objective.beta)
            case PairPpoObjective():
                scores = context.pair_scores(rows, self._reward)
                data = ScoredPairs(rows, scores, self.reference_token_logprobs(rows, used))
                return OfflinePPOLoss(self.resident, data, used, self._objective)
            case _:
                raise TypeError(f"{type(self).__name__} cannot train the objective '{self._objective.kind}'")
