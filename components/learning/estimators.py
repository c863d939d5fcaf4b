"""How the scores of sampled completions become the advantages of several objectives (FIRM A.1).

With the estimator gae there is one completion of each prompt, and a value head for each objective:

    r_j = -kl k(pi_old, pi_ref) at each token, plus the score of objective j at the last
    A_j = GAE of r_j with the values of j's own head, whitened over the rollout

With rloo and grpo there are several completions of each prompt and no heads, and all tokens of a
completion have its advantage:

    rloo: R_j = score_j - kl sum of k(pi_old, pi_ref);  A_j = R_j - mean R_j of the prompt's others
    grpo: A_j = (score_j - mean) / deviation of the prompt's;  kl k3(pi, pi_ref) is part of the loss

Scores are normalized by the client's running moments (Chan et al. 1979), clipped, and reduced for
completions that did not end, as the options say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from components.config import PpoConfig
from components.config.local_objectives import GaeEstimator
from components.learning.ppo import (
    compute_gae,
    estimate_kl,
    leave_one_out,
    masked_mean,
    normalize_groups,
    value_loss,
    whiten,
)
from components.learning.rollouts import Rollout
from components.models.resident import ResidentPolicy
from components.models.rewards.reward_section import Scores

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RunningMoments:
    """Mean and squared deviations of a reward's scores so far (Chan et al. 1979)."""

    count: float = 0.0  # of scores
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared deviations from the mean

    def update(self, scores: Scores) -> RunningMoments:
        """The moments of the scores so far and of N more, [N]."""
        count = self.count + len(scores)
        difference = float(scores.mean()) - self.mean
        mean = self.mean + difference * len(scores) / count
        within = float(((scores - scores.mean()) ** 2).sum())
        between = difference**2 * self.count * len(scores) / count
        return RunningMoments(count, mean, self.squares + within + between)

    def normalize(self, scores: Scores) -> Scores:
        """Scores [N] in standard deviations from the mean; 0 if all scores so far are equal."""
        normalized: Scores = (scores - self.mean) / np.sqrt(self.squares / max(self.count, 1) + 1e-8)
        return normalized


MOMENTS = tuple(field.name for field in fields(RunningMoments))


class Estimator:
    """Estimates advantages, and holds what a client keeps for it from round to round.

    The numbers and tensors are those after the client's previous round, and empty before the first one.
    """

    by_completion = False  # whether the loss is a mean over completions, or over tokens

    def __init__(
        self,
        ppo: PpoConfig,
        objectives: Sequence[str],
        resident: ResidentPolicy,
        numbers: Mapping[str, float],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._ppo = ppo
        self.samples = ppo.estimator.samples  # completions of each prompt
        self.kl = ppo.kl  # coefficient of the penalty
        self.moments = {name: RunningMoments() for name in objectives}
        if numbers:
            self.kl = numbers["kl"]
            for name in objectives:
                self.moments[name] = RunningMoments(*(numbers[f"{name}/{key}"] for key in MOMENTS))
        self.optimizers: dict[str, torch.optim.Optimizer] = {}  # of what it trains itself
        self._start(ppo.estimator, resident, tensors)

    def _start(self, section: Any, resident: ResidentPolicy, tensors: Mapping[str, torch.Tensor]) -> None:
        """Build what it trains itself."""

    def advantages(self, rollout: Rollout) -> torch.Tensor:
        """Advantages [M, B, T] at the tokens of a rollout, whose scores the moments include."""
        ppo, kl = self._ppo, rollout.token_kl
        columns = []  # the rewards of each objective, without the KL penalty
        for name, rewards in rollout.scores.items():
            self.moments[name] = self.moments[name].update(rewards)
            if ppo.normalize:
                rewards = self.moments[name].normalize(rewards)
            if ppo.max_reward is not None:
                rewards = rewards.clip(-ppo.max_reward, ppo.max_reward)
            columns.append(rewards - ppo.missing_eos_penalty * ~rollout.finished)
        return self._estimate(rollout, torch.as_tensor(np.stack(columns), dtype=kl.dtype, device=kl.device))

    def _estimate(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages [M, B, T] from the rewards [M, B] without the KL penalty."""
        raise NotImplementedError

    def add_penalty(
        self, losses: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor
    ) -> torch.Tensor:
        """The losses of tokens with the KL penalty, where that is a term of the loss; all are [n, T]."""
        return losses

    def step(self, rollout: Rollout, indices: np.ndarray, states: torch.Tensor) -> dict[str, float]:
        """Train what is the estimator's own, if there is something; metrics of the step.

        The rollout is that of the last `advantages`, the indices are n completions, and the states,
        [n, T', H], are their hidden states, detached.
        """
        return {}

    def update_coefficient(self, rollout: Rollout) -> None:
        """Move the coefficient of the penalty towards the KL that the options aim at."""
        ppo = self._ppo
        if ppo.target_kl is not None:
            completions = len(rollout.rows)
            self.kl = update_kl_coefficient(self.kl, rollout.kl, ppo.target_kl, completions, ppo.horizon)

    def numbers(self) -> dict[str, float]:
        """The coefficient `kl`, and `<objective>/count`, `mean` and `squares` of the moments."""
        numbers = {"kl": self.kl}
        for name, moments in self.moments.items():
            numbers |= {f"{name}/{key}": value for key, value in asdict(moments).items()}
        return numbers

    def tensors(self) -> Tensors:
        """What it trains itself, fp32 on the CPU."""
        return {}


class Gae(Estimator):
    """GAE with a value head for each objective, which has an optimizer of its own."""

    def _start(
        self, section: GaeEstimator, resident: ResidentPolicy, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._lambda = section.gae_lambda
        initial = torch.zeros(resident.hidden_size + 1, dtype=torch.float32)
        heads = torch.stack([tensors[f"value/{name}"] if tensors else initial for name in self.moments])
        # [M, H + 1], weight and bias of each head
        self.heads = torch.nn.Parameter(heads.to(resident.policy.device))
        optimizer = torch.optim.AdamW([self.heads], lr=section.critic_lr, weight_decay=0.0)
        self.optimizers = {"critic": optimizer}
        # [M, B, T], of the last rollout, and their targets
        self.values = self.returns = torch.empty(0, dtype=torch.float32)

    def _estimate(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        mask = rollout.tokens.mask
        self.values = compute_values(self.heads.detach(), rollout.tokens.states) * mask
        penalty = -self.kl * rollout.token_kl
        completions = torch.arange(len(penalty))
        last = mask.sum(1) - 1
        advantages, returns = [], []
        for values, column in zip(self.values, rewards, strict=True):
            token_rewards = penalty.clone()
            token_rewards[completions, last] += column
            own_advantages, own_returns = compute_gae(token_rewards, values, mask, 1.0, self._lambda)
            advantages.append(whiten(own_advantages, mask))
            returns.append(own_returns)
        self.returns = torch.stack(returns)
        return torch.stack(advantages)

    def step(self, rollout: Rollout, indices: np.ndarray, states: torch.Tensor) -> dict[str, float]:
        width = states.shape[1]
        values = compute_values(self.heads, states)
        old, returns = self.values[:, indices, :width], self.returns[:, indices, :width]
        mask = rollout.tokens.mask[indices, :width]
        means = [masked_mean(losses, mask) for losses in value_loss(values, old, returns, self._ppo.clip)]
        # A sum rather than a mean: the gradient of a head must not depend on the number of objectives.
        total = sum(means, start=values.new_zeros(()))
        optimizer = self.optimizers["critic"]
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        optimizer.step()
        return {"value_loss": total.item() / len(means)}

    def tensors(self) -> Tensors:
        heads = self.heads.detach().cpu().clone()
        return {f"value/{name}": head for name, head in zip(self.moments, heads, strict=True)}


class Rloo(Estimator):
    """The reward of a completion, less the mean reward of the other completions of its prompt."""

    def _estimate(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        penalty = self.kl * rollout.token_kl.sum(1)
        rows = [leave_one_out(column - penalty, self.samples) for column in rewards]
        return torch.stack(rows)[:, :, None] * rollout.tokens.mask


class Grpo(Estimator):
    """The reward of a completion in standard deviations from the mean of its prompt's completions."""

    by_completion = True

    def _estimate(self, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        rows = [normalize_groups(column, self.samples) for column in rewards]
        return torch.stack(rows)[:, :, None] * rollout.tokens.mask

    def add_penalty(
        self, losses: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor
    ) -> torch.Tensor:
        return losses + self.kl * estimate_kl(logprobs, reference, "k3")


def compute_values(heads: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Values [M, B, T] of heads [M, H + 1] on states [B, T, H]."""
    return (states @ heads[:, :-1].T + heads[:, -1]).movedim(-1, 0)


def update_kl_coefficient(
    coefficient: float, kl: float, target: float, completions: int, horizon: int
) -> float:
    """The coefficient of the penalty after a batch: coefficient (1 + e n / horizon).

    e is the relative error (KL - target) / target, clipped to [-0.2, 0.2], of the batch's KL to the
    reference (nats per completion), and n the batch's completions (Ziegler et al. 2019, Fine-Tuning
    Language Models from Human Preferences, section 2.2, where 1 / horizon is 0.1 per batch).
    """
    error = float(np.clip((kl - target) / target, -0.2, 0.2))
    return coefficient * (1 + error * completions / horizon)
