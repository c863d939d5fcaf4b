"""The parts of PPO as functions of tensors (Schulman et al. 2017, Proximal Policy Optimization Algorithms; Schulman et al. 2016, Generalized Advantage Estimation).

Rows are completions, columns are their tokens; a mask says which are there. All means are over the tokens that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, rows: bool = False) -> torch.Tensor:
    """Mean over the tokens that are there: of all, or with `rows` of each row, [N].

    Args:
        values: [N, T].
        mask: [N, T] bool; each row has at least one.
    """
    kept = values * mask
    return kept.sum(1) / mask.sum(1) if rows else kept.sum() / mask.sum()


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of completions that end: A_t = sum over k of (gamma lam)^k delta_t+k, delta_t = r_t + gamma V_t+1 - V_t (eq. 16 of the latter).

    Args:
        rewards, values: [N, T]; V after the last token is 0.
        mask: [N, T] bool, the tokens of a completion at the front of its row.
        gamma, lam: discount, and the exponential weight.

    Returns:
        advantages [N, T] and returns [N, T] (advantages + values), 0 where no token is.
    """
    import torch

    values = values * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * following - values) * mask
    advantages, carried = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        carried = deltas[:, t] + gamma * lam * carried
        advantages[:, t] = carried
    return advantages * mask, (advantages + values) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and variance 1 over the tokens that are there; where all are the same, 0. [N, T]."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * (variance + 1e-8).rsqrt() * mask


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) for each token (eq. 7 of the former).

    Args:
        new, old: [N, T], log-probabilities; no gradient goes through the old ones or the advantages.
        advantages: [N, T].
        clip: epsilon.

    Returns:
        [N, T].
    """
    import torch

    ratio = (new - old.detach()).exp()
    fixed = advantages.detach()
    return -torch.minimum(ratio * fixed, ratio.clamp(1 - clip, 1 + clip) * fixed)


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of the value, the larger of that of the value and that of the value held within clip of the old one, for each token. [N, T]."""
    import torch

    held = old.detach() + (new - old.detach()).clamp(-clip, clip)
    fixed = returns.detach()
    return 0.5 * torch.maximum((new - fixed) ** 2, (held - fixed) ** 2)


def approximate_kl(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> float:
    """KL(old || new) in nats a token, estimated on tokens that the old policy would say: the mean of ratio - 1 - log ratio, which is never negative."""
    change = (new - old).detach()
    return float(masked_mean(change.exp() - 1 - change, mask))
