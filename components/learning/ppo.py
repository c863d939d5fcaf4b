"""Terms of PPO as functions of tensors.

Schulman et al. 2017, Proximal Policy Optimization Algorithms; Schulman et al. 2016,
High-Dimensional Continuous Control Using Generalized Advantage Estimation.

Rows are completions and columns are their tokens, padded to T; a mask is true at tokens and false
at padding. All means are over tokens.
"""

from __future__ import annotations

from typing import Literal

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, per_row: bool = False) -> torch.Tensor:
    """Mean over the tokens of values [N, T]: a scalar, or [N] per row, each of which has a token."""
    masked = values * mask
    return masked.sum(1) / mask.sum(1) if per_row else masked.sum() / mask.sum()


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) of completions that end.

    A_t = sum over k of (gamma lam)^k delta_t+k, with delta_t = r_t + gamma V_t+1 - V_t.

    The tokens of a completion are at the front of its row, and the value after the last one is 0.
    The advantages [N, T] and the returns [N, T] (advantages + values) are 0 at padding.
    """
    values = values * mask
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * next_values - values) * mask
    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages * mask, (advantages + values) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values [N, T] with mean 0 and variance 1 over the tokens; 0 at padding, and of equal values."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * (variance + 1e-8).rsqrt() * mask


def leave_one_out(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards [N] less the mean of the other samples of the prompt (Ahmadian et al. 2024, eq. 8).

    The samples of a prompt, at least 2, are next to each other; their sum is 0, and equal ones give 0.
    """
    groups = _from_first(rewards, samples)
    others = (groups.sum(1, keepdim=True) - groups) / (samples - 1)
    return (groups - others).reshape(-1)


def normalize_groups(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards [N] in standard deviations from the mean of the prompt's samples (Shao et al. 2024, 4.1.2).

    The samples of a prompt, at least 2, are next to each other; equal ones give 0.
    """
    groups = _from_first(rewards, samples)
    deviations = groups - groups.mean(1, keepdim=True)
    return (deviations / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1)


def _from_first(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards [N] less that of the prompt's first sample, [N / samples, samples].

    Advantages do not depend on it; the mean of equal rewards would differ from them in the last digit.
    """
    groups = rewards.reshape(-1, samples)
    return groups - groups[:, :1]


def estimate_kl(
    policy: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k3"]
) -> torch.Tensor:
    """KL(policy || reference) of tokens sampled by the policy, [N, T] nats (Schulman 2020).

    The arguments are log-probabilities [N, T]. k1 is log ratio; k3 is 1 / ratio - 1 + log ratio,
    which is never negative. Both have the KL as their mean, and are differentiable.
    """
    log_ratio = policy - reference
    return log_ratio if estimator == "k1" else (-log_ratio).exp() - 1 + log_ratio


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) of each token (Schulman et al. 2017, eq. 7).

    new and old are log-probabilities [N, T] under the policy, and under the one that computed the
    advantages; old and the advantages get no gradient.
    """
    ratio = (new - old.detach()).exp()
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Clipped squared error [N, T]: half the larger of the errors of the value and of the clipped value.

    new and old are values, old those before the update; old and the returns get no gradient. A
    clipped value is at most `clip` from the old one.
    """
    clipped = old.detach() + (new - old.detach()).clamp(-clip, clip)
    returns = returns.detach()
    return 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)


def approximate_kl(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> float:
    """Estimate KL(old || new) from tokens sampled by the old policy (nats per token).

    The estimate is the mean of ratio - 1 - log ratio, which is never negative (Schulman 2020,
    Approximating KL Divergence, estimator k3). new and old are log-probabilities [N, T].
    """
    log_ratio = (new - old).detach()
    return float(masked_mean(log_ratio.exp() - 1 - log_ratio, mask))
