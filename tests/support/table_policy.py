"""A policy with a known optimum: it answers every prompt with one of V tokens."""

from types import SimpleNamespace

import numpy as np
import torch

from components.models.logprobs import CompletionTokens


class TablePolicy:
    """A policy that answers every prompt with one of V tokens, in place of a ResidentPolicy.

    Args:
        reference: shares of the tokens, [V].
    """

    def __init__(self, reference):
        self.reference = torch.as_tensor(reference, dtype=torch.float32).log()
        self.logits = torch.nn.Parameter(self.reference.clone())
        self.model = torch.nn.Identity()
        self.hidden_size = 1
        self.slot = SimpleNamespace(parameters=[self.logits])
        self.policy = SimpleNamespace(device="cpu", generate=self.generate, encode=lambda prompt: [0])

    def generate(self, prompts, seed, temperature, count=1):
        shares = (self.logits / temperature).detach().double().softmax(0).numpy()
        samples = np.random.default_rng(seed).choice(len(shares), (len(prompts), count), p=shares)
        return [[SimpleNamespace(ids=(int(n),), text=str(n), finished=True) for n in row] for row in samples]

    def tokens(self, rows, reference=False, temperature=1.0):
        logits = (self.reference if reference else self.logits) / temperature
        logprobs = logits.log_softmax(0)[[completion[0] for _, completion in rows]][:, None]
        return CompletionTokens(
            logprobs=logprobs,
            entropies=torch.zeros_like(logprobs),
            states=torch.ones(len(rows), 1, 1),
            mask=torch.ones(len(rows), 1, dtype=torch.bool),
        )
