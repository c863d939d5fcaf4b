"""Supervised training of a policy on the chosen completions of one client's pairs.

This is the objective of the baseline FedAvg (FedBiscuit section 7.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.learning.local import LocalTraining, TrainingMetrics, train_adapter
from components.learning.objectives import sft_loss
from components.models.resident import Pair, ResidentPolicy

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter


def train_sft(
    resident: ResidentPolicy, pairs: Sequence[Pair], adapter: Adapter, training: LocalTraining
) -> tuple[Adapter, TrainingMetrics]:
    """Train an adapter on the chosen completions of one client's pairs.

    Args:
        resident: the model; the adapter in its slot is replaced.
        pairs: records with prompt and chosen.
        adapter: initial values; it is not changed.
        training: a row of a minibatch is a pair.

    Returns:
        the trained adapter (fp32, CPU) and the metrics.

    Raises:
        AdapterError: the adapter does not fit.
        TrainingError: there are no pairs, or a loss is not finite.
    """
    import torch

    encoded = [resident.encode(pair["prompt"], pair["chosen"]) for pair in pairs]
    resident.slot.load(adapter)

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[i] for i in indices]
        logprobs = resident.logprobs(rows)[:, 0]
        lengths = torch.tensor([len(completion) for _, completion in rows], device=logprobs.device)
        tokens = sum(len(prompt) + len(completion) for prompt, completion in rows)
        return sft_loss(logprobs, lengths), tokens

    return train_adapter(resident.model, resident.slot, len(pairs), loss, training)
