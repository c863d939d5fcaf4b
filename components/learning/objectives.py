"""Training objectives as functions of tensors, with no model inside; one loss per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def selector_loss(choice_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the binary choice (FedBiscuit eq. 3).

    Args:
        choice_logits: [N, 2], logits of ' A' and ' B'.
        labels: [N] integers, 0 where the completion shown as A is the preferred one, 1 where B is.

    Returns:
        [N] losses in nats.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(choice_logits.float(), labels, reduction="none")
