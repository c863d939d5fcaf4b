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

    return cross_entropy(choice_logits.float(), labels.long(), reduction="none")


def sft_loss(logprobs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of a completion, per token.

    Args:
        logprobs: [N], summed log-probabilities of completions.
        lengths: [N], their tokens.

    Returns:
        [N] losses in nats a token.
    """
    return -logprobs / lengths


def dpo_loss(
    policy_chosen: torch.Tensor, policy_rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor, beta: float
) -> torch.Tensor:
    """Direct preference optimisation (FedBiscuit eq. 2; Rafailov et al. 2023, eq. 7).

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [N], summed log-probabilities of the completions.
        beta: inverse temperature of the implicit reward.

    Returns:
        [N] losses in nats.
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))


def pdpo_loss(
    implicit_margin: torch.Tensor, explicit_margin: torch.Tensor, scale: torch.Tensor | float, reward_weight: float, beta: float
) -> torch.Tensor:
    """Personalized DPO: the implicit margin of DPO with that of an explicit reward head beside it (FedPDPO eqs. 6 and 8).

    Args:
        implicit_margin: [N], log pi / pi_ref of the chosen completion less that of the rejected one (eq. 4).
        explicit_margin: [N], reward of the chosen completion less that of the rejected one (eq. 5).
        scale: s of eq. 7, see components/learning/pdpo.py; no gradient goes through it.
        reward_weight: w_r, 0 or more; with 0 it is DPO.
        beta: inverse temperature.

    Returns:
        [N] losses in nats.
    """
    import torch
    from torch.nn.functional import logsigmoid

    fixed = scale.detach() if isinstance(scale, torch.Tensor) else scale
    return -logsigmoid(beta * (implicit_margin + reward_weight * fixed * explicit_margin))
