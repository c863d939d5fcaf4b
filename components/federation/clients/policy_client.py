"""A resident policy that is measured on clients' pairs, and answers prompts as the client's own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from components.config import PersonalModules, PolicyConfig, Recipe
from components.data.records import Pairs
from components.federation.clients.context import ClientContext
from components.federation.clients.trainer import unsupported_job
from components.federation.protocol import ClientResult, GenerateJob, Job, KlJob, PairsJob
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
    from components.models.store import Adapter, AdapterHash


REFERENCE = "reference"
"""Name of the reference's adapter in PEFT's model, beside the adapter 'default' of the slot."""


class PolicyClient:
    """Runs the jobs that train nothing: figures of the client's pairs, KL, and completions."""

    def __init__(
        self, policy: PolicyConfig, device: str, batch_size: int, personal: PersonalModules | None = None
    ) -> None:
        """Load the policy; `batch_size` is that of scored pairs."""
        self.resident = ResidentPolicy(policy, device, personal)
        self.reference_cache = ReferenceCache()
        self._score_batch_size = batch_size

    @property
    def model(self) -> torch.nn.Module:
        """The PEFT-wrapped backbone."""
        return self.resident.model

    def initial_adapter(self, seed: int) -> Adapter:
        """Initial values of the shared LoRA."""
        return self.resident.slot.initial_adapter(seed)

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        match job:
            case PairsJob():
                return self._measure(job, context)
            case KlJob():
                return self._measure_kl(job, context)
            case GenerateJob():
                return self._generate(job, context)
            case _:
                raise unsupported_job(self, job)

    def load_client(self, adapter: Adapter, context: ClientContext) -> None:
        """Load a client's policy: the adapter, which the client uses as it is."""
        self.resident.slot.load(adapter)

    def score_pairs(
        self, pairs: Pairs, adapter: Adapter, context: ClientContext, batch_size: int | None = None
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
        """Whether all factors B of an adapter are zero."""
        return not any(tensor.any() for name, tensor in adapter.items() if ".lora_B." in name)

    def _reference_logprobs(self, pairs: Pairs, batch_size: int) -> Array:
        """Summed log-probabilities of chosen and rejected under the reference, [N, 2]."""
        rows = [self.resident.encode_pair(pair) for pair in pairs]
        return self.reference_cache.completion_logprobs(self.resident, rows, batch_size)

    def _measure(self, job: PairsJob, context: ClientContext) -> ClientResult:
        (digest,) = job.adapters
        pairs = context.chosen_rows(job.split, job.positions)
        scores = self.score_pairs(pairs, context.load_adapter(digest), context, job.batch_size)
        return ClientResult(rows=len(pairs), output=pair_figures(scores, pairs).model_dump(mode="json"))

    def _load_for_inference(self, digest: AdapterHash, context: ClientContext) -> None:
        self.load_client(context.load_adapter(digest), context)
        self.model.eval()

    def _measure_kl(self, job: KlJob, context: ClientContext) -> ClientResult:
        self._load_for_inference(job.adapter, context)
        values = [
            kl_to_reference(self.resident.policy, [prompt], seed, job.temperature)["kl_sequence"]
            for prompt, seed in zip(job.prompts, job.seeds, strict=True)
        ]
        return ClientResult(rows=len(values), output=list(values))

    def _generate(self, job: GenerateJob, context: ClientContext) -> ClientResult:
        self._load_for_inference(job.adapter, context)
        completions = [generation.complete(self.resident.policy) for generation in job.generations]
        rows = sum(len(generation.prompts) for generation in job.generations)
        texts: JsonValue = [
            [[asdict(one) | {"ids": list(one.ids)} for one in samples] for samples in prompts]
            for prompts in completions
        ]
        return ClientResult(rows=rows, output=texts)


class AlignedPolicyClient(PolicyClient):
    """Measures the policy that the server has aligned, whose reference may have an adapter of its own.

    The recipe's LoRA section is that of the aligned adapter.
    """

    def __init__(self, recipe: Recipe, device: str) -> None:
        lora = recipe.policy.lora.model_copy(update={"dropout": 0.0})  # nothing is trained
        policy = recipe.policy.model_copy(update={"lora": lora})
        super().__init__(policy, device, recipe.evaluation.score_batch_size)
        self._has_adapter = recipe.base_adapter is not None
        if recipe.base_adapter is not None:
            self.resident.model.load_adapter(Path(recipe.base_adapter), REFERENCE)

    def _is_reference(self, adapter: Adapter) -> bool:
        return not self._has_adapter and super()._is_reference(adapter)

    def _reference_logprobs(self, pairs: Pairs, batch_size: int) -> Array:
        if not self._has_adapter:
            return super()._reference_logprobs(pairs, batch_size)
        self.resident.model.set_adapter(REFERENCE)
        try:
            return pair_logprobs(self.resident, pairs, batch_size)
        finally:
            self.resident.model.set_adapter("default")
