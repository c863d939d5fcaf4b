"""The distance of a policy to its reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from components.models.adapters import AdapterSlot
from components.models.head import apply_lm_head
from components.models.personalized import as_reference
from components.models.policy import Policy
from components.models.store import Adapter

if TYPE_CHECKING:
    from peft import PeftModel


def kl_to_reference(
    policy: Policy,
    prompts: Sequence[str],
    seed: int,
    temperature: float = 1.0,
    reference: Adapter | None = None,
) -> dict[str, float]:
    """Estimate KL(policy || reference) in nats on completions that the policy samples.

    At each position of a sampled completion the KL of the two next-token distributions is summed
    exactly over the vocabulary (the Rao-Blackwellized estimator of the sequence KL), so that one
    sample per prompt suffices. kl_sequence is the mean over completions, kl_token that over tokens;
    both are missing without prompts.

    Args:
        seed: determines the samples.
        temperature: divides the logits of the policy and of the reference.
        reference: adapter of the reference; None for the backbone.
    """
    if not prompts:
        return {}
    model = cast("PeftModel", policy.model)
    completions = [samples[0] for samples in policy.generate(prompts, seed, temperature)]
    total = 0.0
    tokens = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt_ids = policy.encode(prompt)
        ids = torch.tensor([[*prompt_ids, *completion.ids]], device=policy.device)
        with torch.no_grad():
            policy_logprobs = _next_token_logprobs(model, ids, len(prompt_ids), temperature)
            with as_dpo_reference(model, reference):
                reference_logprobs = _next_token_logprobs(model, ids, len(prompt_ids), temperature)
        total += float((policy_logprobs.exp() * (policy_logprobs - reference_logprobs)).sum())
        tokens += len(completion.ids)
    return {"kl_sequence": total / len(prompts), "kl_token": total / max(tokens, 1)}


def kl_to_plain_prompts(policy: Policy, prompt: str, seed: int, temperature: float = 1.0) -> float:
    """KL of a policy that reads examples before a prompt to the same one without them, as above (nats)."""
    (samples,) = policy.generate([prompt], seed, temperature)
    completion = samples[0]
    examples = policy.examples
    shown = policy.encode(prompt)
    try:
        policy.examples = ()
        alone = policy.encode(prompt)
    finally:
        policy.examples = examples
    model = cast("PeftModel", policy.model)
    with torch.no_grad():
        logprobs, reference = (
            _next_token_logprobs(
                model, torch.tensor([[*ids, *completion.ids]], device=policy.device), len(ids), temperature
            )
            for ids in (shown, alone)
        )
    return float((logprobs.exp() * (logprobs - reference)).sum())


@contextmanager
def as_dpo_reference(model: PeftModel, adapter: Adapter | None) -> Iterator[None]:
    """Use the reference of a model: another adapter, or its backbone where that is None."""
    if adapter is None:
        with as_reference(model):
            yield
        return
    slot = AdapterSlot(model)
    trained = slot.read()
    slot.load(adapter)
    try:
        yield
    finally:
        slot.load(trained)


def _next_token_logprobs(
    model: PeftModel, ids: torch.Tensor, prompt_length: int, temperature: float
) -> torch.Tensor:
    """Log-probabilities [T, V] of the next token at each of the completion's T positions, in fp32."""
    base: Any = model.get_base_model()
    hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = apply_lm_head(base, hidden[0, prompt_length - 1 : -1])
    return logits.div(temperature).log_softmax(-1)
