"""A policy that stays on a device while it is trained and scored with different adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from components.config import PersonalModules, PolicyConfig
from components.config.modules import Pooling
from components.models.adapters import AdapterSlot
from components.models.head import check_lm_head, require_finite
from components.models.logprobs import (
    CompletionTokens,
    TokenRow,
    completion_features,
    completion_logprobs,
    completion_tokens,
)
from components.models.personalized import PersonalSlot, as_reference
from components.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ResidentPolicy:
    """A policy with an adapter slot, resident on a device; load an adapter before scoring."""

    def __init__(
        self, config: PolicyConfig, device: str, personal_modules: PersonalModules | None = None
    ) -> None:
        self.policy = Policy(config, device)
        check_lm_head(cast("PreTrainedModel", self.policy.model), config.backbone.name)
        self.model = self.policy.attach_lora(config.lora)
        self.personal = None if personal_modules is None else PersonalSlot(self.model, personal_modules)
        self._base = cast("PreTrainedModel", self.model.get_base_model())
        self._pad_token_id = cast(int, self.policy.tokenizer.pad_token_id)
        # That of the adapter which clients share.
        self.slot = AdapterSlot(self.model) if self.personal is None else self.personal.shared

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    def encode(self, prompt: str, *completions: str) -> TokenRow:
        """As `PolicyTexts.encode_texts`, as completions are trained on.

        A completion longer than policy.max_new_tokens is truncated, and loses its end.
        """
        prompt_ids, *encoded = self.policy.encode_texts(prompt, *completions)
        return prompt_ids, *(ids[: self.policy.config.max_new_tokens] for ids in encoded)

    def logprobs(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Summed log-probability of each completion under the adapter in the slot; [N, C] fp32."""
        return completion_logprobs(self._base, rows, self._pad_token_id)

    def logprobs_and_features(
        self, rows: Sequence[TokenRow], pooling: Pooling = "response"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `logprobs`, and the mean last hidden states that a reward head reads, [N, C, H]."""
        return completion_features(self._base, rows, self._pad_token_id, pooling)

    def tokens(
        self, rows: Sequence[TokenRow], reference: bool = False, temperature: float = 1.0
    ) -> CompletionTokens:
        """See `completion_tokens`; the reference is the frozen backbone without the adapter in the slot."""
        with self._reference_mode(reference):
            return completion_tokens(self._base, rows, self._pad_token_id, temperature)

    def score(self, rows: Sequence[TokenRow], batch_size: int, reference: bool = False) -> np.ndarray:
        """As `logprobs`, without gradients and in batches; [N, C] float64."""

        def compute(batch: list[TokenRow]) -> torch.Tensor:
            with self._reference_mode(reference):
                return self.logprobs(batch)

        scores = self.map_batches(rows, batch_size, compute)
        return require_finite(scores, f"the policy on '{self.policy.config.backbone.name}'")

    def map_batches(
        self, rows: Sequence[TokenRow], batch_size: int, compute: Callable[[list[TokenRow]], torch.Tensor]
    ) -> np.ndarray:
        """Apply a function to batches of rows of similar length, without gradients.

        The function makes a tensor [n, ...] of n rows; the result is [N, ...] float64 in the rows' order.
        """
        order = sorted(range(len(rows)), key=lambda i: (sum(map(len, rows[i])), i))
        self.model.eval()
        with torch.inference_mode():
            results = [
                compute([rows[i] for i in order[start : start + batch_size]]).cpu()
                for start in range(0, len(order), batch_size)
            ]
        values: np.ndarray = torch.cat(results).double().numpy()
        return values[np.argsort(order)]

    def _reference_mode(self, reference: bool) -> AbstractContextManager[None]:
        return as_reference(self.model) if reference else nullcontext()
