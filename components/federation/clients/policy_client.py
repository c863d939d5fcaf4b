"""A resident policy that is measured on clients' pairs, and answers prompts as the client's own.

The policy is that of the rounds, or one that the server has aligned, whose reference may be an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from components.config import Recipe
from components.data.records import Pair
from components.federation.clients.context import ClientContext
from components.federation.clients.trainer import unsupported_job
from components.federation.protocol import ClientResult, GenerateJob, Generation, Job, MeasureJob
from components.learning.kl import kl_to_reference
from components.learning.pair_scores import (
    Array,
    PreferenceScores,
    pair_figures,
    pair_logprobs,
    policy_scores,
)
from components.learning.reference_cache import ReferenceCache
from components.models.resident import ResidentPolicy

if TYPE_CHECKING:
    from components.models.store import Adapter


REFERENCE = "reference"
"""Name of the reference's adapter in PEFT's model, beside the adapter 'default' of the slot."""


class PolicyClient:
    """Runs the jobs that train nothing: figures of the client's pairs, KL, and completions."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        """Load the policy, with the private modules that the method may have."""
        config, method = recipe.federation, recipe.federation.options
        policy = recipe.policy
        if method.trained_model == "selector":  # it is aligned at the server, and is not trained here
            policy = policy.model_copy(update={"lora": policy.lora.model_copy(update={"dropout": 0.0})})
        self.resident = ResidentPolicy(policy, device, method.local().personal)
        self.reference_cache = ReferenceCache()
        self._config, self._local, self._seed = config, method.local(), recipe.seed
        # Pairs per batch, of which one takes less memory than in training.
        self._score_batch_size = 2 * (config.micro_batch_size or config.batch_size)
        self._reference = recipe.base_adapter  # folder of the reference's adapter; None: the backbone alone
        if self._reference is not None:
            self.resident.model.load_adapter(Path(self._reference), REFERENCE)

    @property
    def model(self) -> torch.nn.Module:
        """The PEFT-wrapped backbone."""
        return self.resident.model

    def initial_adapter(self, seed: int) -> Adapter:
        """Initial values of the shared LoRA."""
        return self.resident.slot.initial_adapter(seed)

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        match job:
            case MeasureJob(losses=False):
                return self._measure(job, context)
            case GenerateJob():
                return self._generate(job, context)
            case _:
                raise unsupported_job(self, job)

    def load_client(self, adapter: Adapter, context: ClientContext) -> None:
        """Load a client's policy: the adapter, which the client uses as it is."""
        self.resident.slot.load(adapter)

    def score_pairs(
        self, pairs: Sequence[Pair], adapter: Adapter, context: ClientContext, batch_size: int | None = None
    ) -> PreferenceScores:
        """Log-ratios to the reference, and log-likelihoods, under the client's policy.

        An adapter whose factors B are all zero is the reference itself, and nothing is computed for it.
        """
        size = batch_size or self._score_batch_size
        reference = self._reference_logprobs(pairs, size)
        logprobs = reference
        if not self._is_reference(adapter):
            self.load_client(adapter, context)
            logprobs = pair_logprobs(self.resident, pairs, size)
        return policy_scores(self.resident, pairs, logprobs[None], reference)

    def _is_reference(self, adapter: Adapter) -> bool:
        """Whether all factors B of an adapter are zero, where the backbone alone is the reference."""
        return self._reference is None and not any(
            tensor.any() for name, tensor in adapter.items() if ".lora_B." in name
        )

    def _reference_logprobs(self, pairs: Sequence[Pair], batch_size: int) -> Array:
        """Summed log-probabilities of chosen and rejected under the reference, [N, 2]."""
        if self._reference is None:
            rows = [self.resident.encode(*pair.texts) for pair in pairs]
            return self.reference_cache.completion_logprobs(self.resident, rows, batch_size)
        self.resident.model.set_adapter(REFERENCE)
        try:
            return pair_logprobs(self.resident, pairs, batch_size)
        finally:
            self.resident.model.set_adapter("default")

    def _measure(self, job: MeasureJob, context: ClientContext) -> ClientResult:
        pairs = context.drawn_rows(job)
        scores = self.score_pairs(pairs, context.load_adapter(job.adapter), context, job.batch_size)
        figures = pair_figures(scores, pairs, flip=context.measured_flip)
        return ClientResult(rows=len(pairs), output=figures.model_dump(mode="json"))

    def measure_kl(self, generation: Generation) -> float:
        """KL of the loaded client's policy to the backbone (nats), a mean over the completions."""
        policy, own = self.resident.policy, generation
        return kl_to_reference(policy, own.prompts, own.seed, own.temperature)["kl_sequence"]

    def _generate(self, job: GenerateJob, context: ClientContext) -> ClientResult:
        self.load_client(context.load_adapter(job.adapter), context)
        self.model.eval()
        rows = sum(len(generation.prompts) for generation in job.generations)
        if job.kl:
            return ClientResult(rows=rows, output=[self.measure_kl(one) for one in job.generations])
        completions = [generation.complete(self.resident.policy) for generation in job.generations]
        texts: JsonValue = [
            [[asdict(one) | {"ids": list(one.ids)} for one in samples] for samples in prompts]
            for prompts in completions
        ]
        return ClientResult(rows=rows, output=texts)
