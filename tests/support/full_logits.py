"""What a model's own forward pass gives for a sequence without padding."""

from collections.abc import Sequence

import torch


def token_logprobs(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Log-softmax of the full logits after each token of a sequence, [L, V]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def completion_logprob(
    model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]
) -> torch.Tensor:
    """Log-probability of a completion after a prompt."""
    logprobs = token_logprobs(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    return logprobs[range(len(completion)), completion].sum()
