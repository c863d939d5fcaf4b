"""Scores of a client's training pairs by the recipe's rewards, before the first round."""

from __future__ import annotations

from pathlib import Path

import torch

from components.config import Recipe
from components.federation.clients.context import ClientContext
from components.federation.clients.private import PairScores
from components.federation.clients.trainer import unsupported_job
from components.federation.protocol import ClientResult, Job, PairSums, ScorePairsJob
from components.learning.reference_cache import ReferenceCache
from components.models.rewards.reward_section import PairScorer
from components.models.store import Adapter


class RewardScorer:
    """Carries out ScorePairsJob; the reward of the last job stays loaded."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.model = torch.nn.Module()  # none of a client
        self.reference_cache = ReferenceCache()
        self._recipe = recipe
        self._device = device
        self._loaded: tuple[str, Path | None, PairScorer] | None = None

    def initial_adapter(self, seed: int) -> Adapter:
        """There is none."""
        raise TypeError("rewards have no adapter of clients")

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Score the client's training pairs and keep the scores, unless the same reward has scored them."""
        if not isinstance(job, ScorePairsJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        kept = context.store.load_scores(job.reward)
        ids = [row.pair_id for row in rows]
        if kept is None or kept.fingerprint != job.fingerprint or list(kept.scores) != ids:
            scores = self._scorer(job.reward, context)(rows).tolist()
            kept = PairScores(job.fingerprint, dict(zip(ids, map(tuple, scores), strict=True)))
            context.store.save_scores(job.reward, kept)
        margins = [chosen - rejected for chosen, rejected in kept.scores.values()]
        right = sum((margin > 0) + 0.5 * (margin == 0) for margin in margins)
        sums = PairSums(pairs=len(rows), right=right, margin=sum(margins))
        return ClientResult(rows=len(rows), output=sums.model_dump(mode="json"))

    def _scorer(self, name: str, context: ClientContext) -> PairScorer:
        folder = context.trained_reward(name)
        if self._loaded is None or self._loaded[:2] != (name, folder):
            self._loaded = None
            scorer = self._recipe.rewards[name].load_pair_scorer(self._recipe, self._device, folder)
            self._loaded = (name, folder, scorer)
        return self._loaded[2]
