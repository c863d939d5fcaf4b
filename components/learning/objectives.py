"""Training objectives as functions of tensors, without a model; one loss per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def selector_loss(choice_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the binary choice (FedBiscuit eq. 3).

    Args:
        choice_logits: [N, 2], logits of ' A' and ' B'.
        labels: [N] integers, 0 if the completion shown as A is the preferred one, 1 if B is.

    Returns:
        [N] losses in nats.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(choice_logits.float(), labels.long(), reduction="none")


def sft_loss(logprobs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of a completion, per token.

    Args:
        logprobs: [N], summed log-probabilities of completions.
        lengths: [N], their numbers of tokens.

    Returns:
        [N] losses in nats per token.
    """
    return -logprobs / lengths


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Direct preference optimization (FedBiscuit eq. 2; Rafailov et al. 2023, eq. 7).

    Args:
        policy_chosen: [N], summed log-probabilities of the chosen completions under the policy.
        policy_rejected: [N], those of the rejected completions.
        ref_chosen: [N], those of the chosen completions under the reference.
        ref_rejected: [N], those of the rejected completions under the reference.
        beta: inverse temperature of the implicit reward.

    Returns:
        [N] losses in nats.
    """
    return dpo_margin_loss((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected), beta)


def dpo_margin_loss(implicit_margin: torch.Tensor, beta: float) -> torch.Tensor:
    """The loss of DPO as a function of the implicit margin.

    Args:
        implicit_margin: [N], log pi / pi_ref of the chosen completion minus that of the rejected
            one.
        beta: inverse temperature of the implicit reward.

    Returns:
        [N] losses in nats.
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * implicit_margin)


def pdpo_loss(
    implicit_margin: torch.Tensor,
    explicit_margin: torch.Tensor,
    scale: torch.Tensor | float,
    reward_weight: float,
    beta: float,
) -> torch.Tensor:
    """Personalized DPO: the implicit margin plus that of a reward head (FedPDPO eqs. 6 and 8).

    Args:
        implicit_margin: [N], log pi / pi_ref of the chosen completion minus that of the rejected
            one (eq. 4).
        explicit_margin: [N], reward of the chosen completion minus that of the rejected one (eq.
            5).
        scale: s of eq. 7, see components/learning/preference.py; it gets no gradient.
        reward_weight: w_r, at least 0; with 0 the loss is that of DPO.
        beta: inverse temperature.

    Returns:
        [N] losses in nats.
    """
    import torch
    from torch.nn.functional import logsigmoid

    constant = scale.detach() if isinstance(scale, torch.Tensor) else scale
    return -logsigmoid(beta * (implicit_margin + reward_weight * constant * explicit_margin))
