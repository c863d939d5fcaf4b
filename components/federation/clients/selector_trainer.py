"""The trainer of the binary selector (FedBiscuit section 4), with the pairs in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

import numpy as np
import torch

from components.config import Recipe
from components.data.records import Pair
from components.federation.clients.context import ClientContext
from components.federation.clients.private import PrivateState
from components.federation.clients.trainer import unsupported_job
from components.federation.protocol import ClientResult, Job, MeasureJob, TrainJob
from components.learning.loop import Training, train
from components.learning.pair_scores import PreferenceScores, pair_figures
from components.learning.reference_cache import ReferenceCache
from components.learning.selector_training import SelectorLoss, score_pairs, validation_losses
from components.learning.wrapped_losses import LocalTraining
from components.models.eight_bit import check_support
from components.models.selector_model import Selector
from components.models.store import Adapter
from components.results import Metrics


class SelectorTrainer:
    """Trains the selector, and scores pairs by its log-odds."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        method = recipe.federation.options
        self._federation = recipe.federation
        self._local = method.local()
        build: type[Selector] = resolve_name(method.selector_model)
        self.selector = build.of(recipe, device)
        for factor in self._local.frozen:
            self.selector.slot.freeze(factor)
        self.reference_cache = ReferenceCache()  # not used: a selector has no reference

    @property
    def model(self) -> torch.nn.Module:
        return self.selector.model

    def initial_adapter(self, seed: int) -> Adapter:
        return self.selector.slot.initial_adapter(seed)

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        match job:
            case TrainJob():
                return self._train(job, context)
            case MeasureJob(losses=True):
                return self._measure_losses(job, context)
            case MeasureJob():
                return self._measure(job, context)
            case _:
                raise unsupported_job(self, job)

    def _train(self, job: TrainJob, context: ClientContext) -> ClientResult:
        """The round's local steps; what the method's loss keeps is written before the update is sent."""
        rows = context.rows("train")
        config, slot = self._federation, self.selector.slot
        training = Training(
            config.local_steps_for(len(rows)),
            config.batch_size,
            config.optimizer,
            job.seed,
            config.micro_batch_size,
        )
        own = SelectorLoss(self.selector, rows, context.loss_flip)
        slot.load(context.load_adapter(job.adapter))
        minibatches = training.draw_minibatches(len(own.encoded))
        state = context.private_state() or PrivateState({})
        attached = {name: context.load_adapter(digest) for name, digest in job.attached.items()}
        local = LocalTraining(slot.named, config.optimizer.lr, attached, state.tensors)
        loss = self._local.wrapped(own, local)
        trained = train(self.selector.model, slot.parameters, minibatches, loss, training)
        kept = loss.tensors()
        saved = context.store.save(job.key(), job.previous_job_key, PrivateState(kept)) if kept else None
        return ClientResult(
            tensors=loss.sent(slot.read()),
            rows=len(rows),
            metrics=Metrics(scalars=loss.metrics(trained)),
            kept_bytes=0 if saved is None else saved.size,
        )

    def _measure_losses(self, job: MeasureJob, context: ClientContext) -> ClientResult:
        rows = context.rows(job.split)
        adapters = [context.load_adapter(digest) for digest in job.adapters]
        losses = validation_losses(self.selector, rows, adapters, context.loss_flip)
        return ClientResult(losses=tuple(losses), rows=len(rows))

    def _measure(self, job: MeasureJob, context: ClientContext) -> ClientResult:
        pairs = context.drawn_rows(job)
        distinct = list(dict.fromkeys(job.adapters))
        scores = self.score_pairs(pairs, [context.load_adapter(digest) for digest in distinct])
        scores = scores.select([distinct.index(digest) for digest in job.adapters])
        figures = pair_figures(scores, pairs, job.assigned, context.measured_flip)
        return ClientResult(rows=len(pairs), output=figures.model_dump(mode="json"))

    def score_pairs(self, pairs: Sequence[Pair], adapters: Sequence[Adapter]) -> PreferenceScores:
        """Log-odds that the chosen completion is better, by each adapter, with it first and second."""
        margins = np.zeros((len(adapters), 2, len(pairs)))
        for rows, adapter in zip(margins, adapters, strict=True):
            self.selector.slot.load(adapter)
            rows[:] = score_pairs(self.selector, pairs)
        if self.selector.config.orders == "both":
            return PreferenceScores(margins[:, 0])
        return PreferenceScores(margins[:, 0], swapped=margins[:, 1])
