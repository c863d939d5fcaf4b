"""Training objectives as functions of tensors, without a model; one loss per row."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, logsigmoid


def corrected(losses: torch.Tensor, exchanged: torch.Tensor, flip: float) -> torch.Tensor:
    """Losses [N] whose expectation over exchanged verdicts is that of the true verdicts' losses.

    They are ((1 - p) l - p l') / (1 - 2 p), for l and l' of the given and the exchanged verdict and the
    probability p < 1/2 with which a verdict was exchanged (Natarajan et al. 2013, lemma 1; for DPO Chowdhury
    et al. 2024, eq. 12). They may be negative, and have no lower bound.
    """
    return ((1 - flip) * losses - flip * exchanged) / (1 - 2 * flip)


def selector_loss(choice_logits: torch.Tensor, labels: torch.Tensor, flip: float = 0.0) -> torch.Tensor:
    """Cross-entropy of the binary choice, [N] nats (FedBiscuit eq. 3).

    The logits are those of ' A' and ' B', [N, 2]; the labels, [N], are 0 if the completion shown as A is
    the preferred one, and 1 if B is. `flip` is that of `corrected`.
    """
    losses = cross_entropy(choice_logits.float(), labels.long(), reduction="none")
    if not flip:
        return losses
    exchanged = cross_entropy(choice_logits.float(), 1 - labels.long(), reduction="none")
    return corrected(losses, exchanged, flip)


def sft_loss(logprobs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of N completions, nats per token, from summed log-probabilities."""
    return -logprobs / lengths


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Direct preference optimization, [N] nats (FedBiscuit eq. 2; Rafailov et al. 2023, eq. 7).

    The arguments are summed log-probabilities [N] of completions, and beta, the inverse temperature of
    the implicit reward.
    """
    return dpo_margin_loss((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected), beta)


def dpo_margin_loss(implicit_margin: torch.Tensor, beta: float, flip: float = 0.0) -> torch.Tensor:
    """The loss of DPO, [N] nats, as a function of the implicit margin [N].

    That is log pi / pi_ref of the chosen completion minus that of the rejected one. `flip` is that of
    `corrected`.
    """
    losses = -logsigmoid(beta * implicit_margin)
    return corrected(losses, -logsigmoid(-beta * implicit_margin), flip) if flip else losses


def pdpo_loss(
    implicit_margin: torch.Tensor,
    explicit_margin: torch.Tensor,
    scale: torch.Tensor | float,
    reward_weight: float,
    beta: float,
    flip: float = 0.0,
) -> torch.Tensor:
    """Personalized DPO: the implicit margin plus that of a reward head, [N] nats (FedPDPO eqs. 6, 8).

    The margins, [N], are those of log pi / pi_ref (eq. 4) and of the reward (eq. 5), chosen minus
    rejected. The scale is s of eq. 7, which gets no gradient; the reward weight is w_r, at least 0. `flip`
    is that of `corrected`.
    """
    constant = scale.detach() if isinstance(scale, torch.Tensor) else scale
    return dpo_margin_loss(implicit_margin + reward_weight * constant * explicit_margin, beta, flip)
