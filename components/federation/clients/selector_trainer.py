"""The trainer of the binary selector (FedBiscuit section 4), with the pairs in both orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from components.config import Recipe
from components.data.records import Pairs
from components.federation.clients.context import ClientContext
from components.federation.clients.trainer import check_no_local_step, unsupported_job
from components.federation.method import method_of
from components.federation.protocol import ClientResult, Job, MeasureJob, ScoreJob, TrainJob
from components.learning.loop import Training
from components.learning.pair_scores import PreferenceScores, pair_figures
from components.learning.reference_cache import ReferenceCache
from components.learning.selector_training import score_pairs, train_selector, validation_losses
from components.models.eight_bit import check_support
from components.models.selector_model import Selector
from components.models.store import Adapter
from components.results import Metrics


class SelectorTrainer:
    """Trains the selector, and scores pairs by its log-odds."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        method = method_of(recipe.federation)
        check_no_local_step(self, method)
        self._federation = recipe.federation
        self._proximal_weight = method.proximal_weight
        self.selector = Selector(recipe.selector, device)
        for factor in method.frozen_factors:
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
            case ScoreJob():
                return self._score(job, context)
            case MeasureJob():
                return self._measure(job, context)
            case _:
                raise unsupported_job(self, job)

    def _train(self, job: TrainJob, context: ClientContext) -> ClientResult:
        rows = context.rows("train")
        config = self._federation
        training = Training(
            config.local_steps_for(len(rows)),
            config.batch_size,
            config.optimizer,
            job.seed,
            config.micro_batch_size,
            self._proximal_weight,
        )
        adapter, trained = train_selector(self.selector, rows, context.load_adapter(job.adapter), training)
        return ClientResult(tensors=adapter, rows=len(rows), metrics=Metrics(scalars=trained.metrics()))

    def _score(self, job: ScoreJob, context: ClientContext) -> ClientResult:
        rows = context.rows("validation")
        adapters = [context.load_adapter(digest) for digest in job.adapters]
        return ClientResult(losses=tuple(validation_losses(self.selector, rows, adapters)), rows=len(rows))

    def _measure(self, job: MeasureJob, context: ClientContext) -> ClientResult:
        pairs = context.chosen_rows(job.split, job.positions)
        distinct = list(dict.fromkeys(job.adapters))
        scores = self.score_pairs(pairs, [context.load_adapter(digest) for digest in distinct])
        scores = scores.select([distinct.index(digest) for digest in job.adapters])
        figures = pair_figures(scores, pairs, job.assigned)
        return ClientResult(rows=len(pairs), output=figures.model_dump(mode="json"))

    def score_pairs(self, pairs: Pairs, adapters: Sequence[Adapter]) -> PreferenceScores:
        """Log-odds that the chosen completion is better, by each adapter, with it first and second."""
        margins = np.zeros((len(adapters), 2, len(pairs)))
        for rows, adapter in zip(margins, adapters, strict=True):
            self.selector.slot.load(adapter)
            rows[:] = score_pairs(self.selector, pairs)
        if self.selector.config.orders == "both":
            return PreferenceScores(margins[:, 0])
        return PreferenceScores(margins[:, 0], swapped=margins[:, 1])
