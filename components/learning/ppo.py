"""Terms of PPO as functions of tensors.

Schulman et al. 2017, Proximal Policy Optimization Algorithms; Schulman et al. 2016,
High-Dimensional Continuous Control Using Generalized Advantage Estimation.

Rows are completions and columns are their tokens, padded to T; a mask is true at tokens and false
at padding. All means are over tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, per_row: bool = False) -> torch.Tensor:
    """Mean over the tokens.

    Args:
        values: [N, T].
        mask: [N, T] bool; each row has at least one token.
        per_row: whether to compute the mean of each row.

    Returns:
        a scalar, or [N] with per_row.
    """
    masked = values * mask
    return masked.sum(1) / mask.sum(1) if per_row else masked.sum() / mask.sum()


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) of completions that end.

    A_t = sum over k of (gamma lam)^k delta_t+k, with delta_t = r_t + gamma V_t+1 - V_t.

    Args:
        rewards: [N, T].
        values: [N, T]; the value after the last token is 0.
        mask: [N, T] bool, the tokens of a completion at the front of its row.
        gamma: discount.
        lam: exponential weight lambda.

    Returns:
        advantages [N, T] and returns [N, T] (advantages + values), 0 at padding.
    """
    import torch

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
    """Normalize values to mean 0 and variance 1 over the tokens; equal values give 0.

    Args:
        values: [N, T].
        mask: [N, T] bool.

    Returns:
        [N, T], 0 at padding.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * (variance + 1e-8).rsqrt() * mask


def leave_one_out(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards less the mean of the other samples of the prompt (Ahmadian et al. 2024, eq. 8).

    Args:
        rewards: [N], the `samples` completions of a prompt next to each other.
        samples: completions of each prompt, at least 2.

    Returns:
        [N]; each prompt's sum is 0.
    """
    groups = rewards.reshape(-1, samples)
    others = (groups.sum(1, keepdim=True) - groups) / (samples - 1)
    return (groups - others).reshape(-1)


def normalize_groups(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards in standard deviations from the mean of the prompt's samples (Shao et al. 2024, section 4.1.2).

    Args:
        rewards: [N], the `samples` completions of a prompt next to each other.
        samples: completions of each prompt, at least 2.

    Returns:
        [N]; each prompt's sum is 0, and equal rewards give 0.
    """
    groups = rewards.reshape(-1, samples)
    deviations = groups - groups.mean(1, keepdim=True)
    return (deviations / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1)


def estimate_kl(
    policy: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k3"]
) -> torch.Tensor:
    """Estimates of KL(policy || reference) from tokens sampled by the policy (Schulman 2020).

    Args:
        policy: [N, T], log-probabilities under the policy.
        reference: [N, T], log-probabilities under the reference.
        estimator: k1 is log ratio; k3 is 1 / ratio - 1 + log ratio, which is never negative. Both
            have the KL as their mean.

    Returns:
        [N, T] nats; differentiable.
    """
    log_ratio = policy - reference
    return log_ratio if estimator == "k1" else (-log_ratio).exp() - 1 + log_ratio


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) of each token (Schulman et al. 2017, eq. 7).

    Args:
        new: [N, T], log-probabilities under the policy.
        old: [N, T], log-probabilities under the policy that computed the advantages; they get no
            gradient.
        advantages: [N, T]; they get no gradient.
        clip: epsilon.

    Returns:
        [N, T].
    """
    import torch

    ratio = (new - old.detach()).exp()
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Clipped squared error: half the larger of the errors of the value and of the clipped value.

    Args:
        new: [N, T], values.
        old: [N, T], values before the update; they get no gradient.
        returns: [N, T], targets; they get no gradient.
        clip: largest difference of the clipped value from the old value.

    Returns:
        [N, T].
    """
    import torch

    clipped = old.detach() + (new - old.detach()).clamp(-clip, clip)
    returns = returns.detach()
    return 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)


def approximate_kl(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> float:
    """Estimate KL(old || new) from tokens sampled by the old policy (nats per token).

    The estimate is the mean of ratio - 1 - log ratio, which is never negative (Schulman 2020,
    Approximating KL Divergence, estimator k3).

    Args:
        new: [N, T], log-probabilities under the new policy.
        old: [N, T], log-probabilities under the old policy.
        mask: [N, T] bool.
    """
    log_ratio = (new - old).detach()
    return float(masked_mean(log_ratio.exp() - 1 - log_ratio, mask))
