"""Completions that a client's policy samples, with the advantages of several objectives (FIRM A.1).

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from components.config import PpoConfig
from components.config.objectives import GaeEstimator, GrpoEstimator, RlooEstimator
from components.learning.ppo import compute_gae, estimate_kl, leave_one_out, normalize_groups, whiten
from components.models.logprobs import TokenRow
from components.models.resident import ResidentPolicy
from components.models.rewards.base import RewardFunction, check_scores

if TYPE_CHECKING:
    import torch

    from components.models.logprobs import CompletionTokens


@dataclass(frozen=True)
class RunningMoments:
    """Mean and squared deviations of a reward's scores so far (Chan et al. 1979).

    Attributes:
        count: number of scores.
        mean: their mean.
        squares: sum of their squared deviations from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, scores: np.ndarray) -> RunningMoments:
        """The moments of the scores so far and of N more, [N]."""
        count = self.count + len(scores)
        difference = float(scores.mean()) - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + difference * len(scores) / count,
            squares=self.squares
            + float(((scores - scores.mean()) ** 2).sum())
            + difference**2 * self.count * len(scores) / count,
        )

    def normalize(self, scores: np.ndarray) -> np.ndarray:
        """Scores [N] in standard deviations from the mean; 0 if all scores so far are equal."""
        normalized: np.ndarray = (scores - self.mean) / np.sqrt(self.squares / max(self.count, 1) + 1e-8)
        return normalized


@dataclass(frozen=True)
class PPOClientState:
    """State of a client between rounds.

    Attributes:
        heads: weight [H] and bias [1] of each objective's value head, as one tensor [H + 1], by
            objective; empty for estimators without a critic.
        moments: moments of the scores of each objective.
        kl: coefficient of the penalty.
        optimizers: tensors of the optimizers' states by name, if they are kept between rounds.
    """

    heads: dict[str, torch.Tensor]
    moments: dict[str, RunningMoments]
    kl: float
    optimizers: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def initial(cls, objectives: Sequence[str], hidden_size: int, ppo: PpoConfig) -> PPOClientState:
        """The state before the first round: values of 0 and no scores."""
        import torch

        names = objectives if isinstance(ppo.estimator, GaeEstimator) else []
        return cls(
            heads={name: torch.zeros(hidden_size + 1, dtype=torch.float32) for name in names},
            moments={name: RunningMoments() for name in objectives},
            kl=ppo.kl,
        )


@dataclass(frozen=True)
class Values:
    """What the critic of a rollout of B completions is trained on.

    Attributes:
        old: [M, B, T], values of the tokens by the objectives' heads.
        returns: [M, B, T], their targets.
    """

    old: torch.Tensor
    returns: torch.Tensor


@dataclass(frozen=True)
class LossPenalty:
    """The KL penalty as a term of the loss, at the tokens of a rollout of B completions.

    Attributes:
        reference: [B, T], log-probabilities under the reference.
        coefficient: of the penalty.
    """

    reference: torch.Tensor
    coefficient: float


@dataclass(frozen=True)
class Advantages:
    """The advantages of M objectives at the tokens of B completions, and what comes with them.

    Attributes:
        values: [M, B, T].
        critic: for GAE, else None.
        penalty: the KL penalty if it is a term of the loss (grpo) rather than of the rewards.
    """

    values: torch.Tensor
    critic: Values | None = None
    penalty: LossPenalty | None = None


@dataclass(frozen=True)
class Rollout:
    """B completions sampled by the current policy, evaluated for M objectives.

    Attributes:
        rows: token ids of prompts and completions; the completions of a prompt are consecutive.
        texts: the completions.
        finished: share of the completions that ended by themselves.
        scores: [B, M], scores of the rewards before normalization.
        old: [B, T], log-probabilities of the tokens.
        mask: [B, T] bool.
        advantages: of the objectives.
        kl: mean of the completions' estimated KL to the reference (nats per completion).
        temperature: temperature of both policies.
    """

    rows: list[TokenRow]
    texts: list[str]
    finished: float
    scores: np.ndarray
    old: torch.Tensor
    mask: torch.Tensor
    advantages: Advantages
    kl: float
    temperature: float


@dataclass(frozen=True)
class _Samples:
    """B sampled completions, and their log-probabilities under the policy and the reference."""

    rows: list[TokenRow]
    texts: list[str]
    finished: np.ndarray
    tokens: CompletionTokens
    reference: torch.Tensor

    def kl(self, estimator: Literal["k1", "k3"]) -> torch.Tensor:
        """Estimated KL to the reference at each token, [B, T]; 0 at padding."""
        return estimate_kl(self.tokens.logprobs, self.reference, estimator) * self.tokens.mask


def sample_rollout(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    rewards: Mapping[str, RewardFunction],
    state: PPOClientState,
    ppo: PpoConfig,
    seed: int,
) -> tuple[Rollout, PPOClientState]:
    """Sample completions of each prompt with the adapter in the slot, and score them.

    Args:
        resident: the model.
        prompts: texts.
        rewards: the reward of each of M objectives.
        state: the client's state, whose heads compute the values.
        ppo: the estimator of advantages, with its number of completions per prompt, and coefficients.
        seed: the completions are a function of it.

    Returns:
        the rollout, and the state with the moments updated by the rollout's scores.

    Raises:
        RewardError: a reward fails, or does not give one finite score per completion.
    """
    import torch

    samples = _sample(resident, prompts, ppo, ppo.estimator.samples, seed)
    columns = _score(rewards, prompts, ppo.estimator.samples, samples.texts)
    moments = {name: state.moments[name].update(column) for name, column in columns.items()}
    final_rewards = _final_rewards(columns, moments, samples.finished, ppo)
    with torch.no_grad():
        kl = samples.kl(ppo.kl_estimator)
        advantages = _estimate_advantages(samples, kl, final_rewards, state, ppo)
    rollout = Rollout(
        rows=samples.rows,
        texts=samples.texts,
        finished=float(samples.finished.mean()),
        scores=np.stack(list(columns.values()), axis=1),
        old=samples.tokens.logprobs,
        mask=samples.tokens.mask,
        advantages=advantages,
        kl=float(kl.sum(1).mean()),
        temperature=ppo.temperature,
    )
    return rollout, replace(state, moments=moments)


def measure_rewards(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    rewards: Mapping[str, RewardFunction],
    ppo: PpoConfig,
    seed: int,
) -> tuple[np.ndarray, float]:
    """Scores of one completion of each prompt, sampled with the adapter in the slot.

    Args:
        resident: the model.
        prompts: B texts.
        rewards: the reward of each of M objectives.
        ppo: temperature and the estimator of the KL.
        seed: the completions are a function of it.

    Returns:
        scores [B, M], and the mean estimated KL to the reference (nats per completion).

    Raises:
        RewardError: a reward fails, or does not give one finite score per completion.
    """
    samples = _sample(resident, prompts, ppo, 1, seed)
    columns = _score(rewards, prompts, 1, samples.texts)
    return np.stack(list(columns.values()), axis=1), float(samples.kl(ppo.kl_estimator).sum(1).mean())


def _sample(
    resident: ResidentPolicy, prompts: Sequence[str], ppo: PpoConfig, count: int, seed: int
) -> _Samples:
    """`count` completions of each prompt, next to each other."""
    import torch

    resident.model.eval()
    generated = resident.policy.generate(prompts, seed, ppo.temperature, count=count)
    completions = [completion for group in generated for completion in group]
    encoded = [resident.policy.encode(prompt) for prompt in prompts for _ in range(count)]
    rows: list[TokenRow] = [
        (prompt, list(completion.ids)) for prompt, completion in zip(encoded, completions, strict=True)
    ]
    with torch.no_grad():
        tokens = resident.tokens(rows, temperature=ppo.temperature)
        reference = resident.tokens(rows, reference=True, temperature=ppo.temperature)
    return _Samples(
        rows=rows,
        texts=[completion.text for completion in completions],
        finished=np.array([completion.finished for completion in completions]),
        tokens=tokens,
        reference=reference.logprobs,
    )


def _score(
    rewards: Mapping[str, RewardFunction], prompts: Sequence[str], count: int, texts: Sequence[str]
) -> dict[str, np.ndarray]:
    """Scores [B] of the completions, by objective; each prompt has `count` of them."""
    repeated = [prompt for prompt in prompts for _ in range(count)]
    return {
        name: check_scores(f"the reward of objective '{name}'", reward, repeated, texts)
        for name, reward in rewards.items()
    }


def _final_rewards(
    columns: Mapping[str, np.ndarray],
    moments: Mapping[str, RunningMoments],
    finished: np.ndarray,
    ppo: PpoConfig,
) -> dict[str, np.ndarray]:
    """Rewards [B] of the completions without the KL penalty, by objective."""
    rewards = {}
    for name, scores in columns.items():
        values = moments[name].normalize(scores) if ppo.normalize else scores
        if ppo.max_reward is not None:
            values = values.clip(-ppo.max_reward, ppo.max_reward)
        rewards[name] = values - ppo.missing_eos_penalty * ~finished
    return rewards


def _estimate_advantages(
    samples: _Samples,
    kl: torch.Tensor,
    final_rewards: Mapping[str, np.ndarray],
    state: PPOClientState,
    ppo: PpoConfig,
) -> Advantages:
    """Advantages of M objectives by the estimator of the options.

    Args:
        samples: B completions.
        kl: [B, T], estimated KL to the reference.
        final_rewards: rewards [B] without the penalty, by objective.
        state: the client's state.
        ppo: the estimator.
    """
    import torch

    mask = samples.tokens.mask
    scores = torch.as_tensor(np.stack(list(final_rewards.values())), dtype=kl.dtype, device=kl.device)
    match ppo.estimator:
        case GaeEstimator(gae_lambda=lam):
            heads = torch.stack([state.heads[name] for name in final_rewards])
            return _generalized_advantages(samples.tokens, -state.kl * kl, scores, heads, lam)
        case RlooEstimator(samples=count):
            rows = [leave_one_out(column - state.kl * kl.sum(1), count) for column in scores]
            return Advantages(torch.stack(rows)[:, :, None] * mask)
        case GrpoEstimator(samples=count):
            rows = [normalize_groups(column, count) for column in scores]
            penalty = LossPenalty(samples.reference, state.kl)
            return Advantages(torch.stack(rows)[:, :, None] * mask, penalty=penalty)


def _generalized_advantages(
    tokens: CompletionTokens,
    penalty: torch.Tensor,
    scores: torch.Tensor,
    heads: torch.Tensor,
    lam: float,
) -> Advantages:
    """Whitened advantages and the critic's targets, by GAE.

    Args:
        tokens: of B completions.
        penalty: [B, T], part of every objective's reward.
        scores: [M, B], reward at the last token.
        heads: [M, H + 1].
        lam: lambda of GAE.
    """
    import torch

    values = compute_values(heads.to(tokens.states.device), tokens.states) * tokens.mask
    completions = torch.arange(len(penalty))
    last = tokens.mask.sum(1) - 1
    advantages = []
    returns = []
    for own_values, column in zip(values, scores, strict=True):
        token_rewards = penalty.clone()
        token_rewards[completions, last] += column
        objective_advantages, objective_returns = compute_gae(
            token_rewards, own_values, tokens.mask, 1.0, lam
        )
        advantages.append(whiten(objective_advantages, tokens.mask))
        returns.append(objective_returns)
    return Advantages(torch.stack(advantages), critic=Values(values, torch.stack(returns)))


def compute_values(heads: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Values [M, B, T] of heads [M, H + 1] on states [B, T, H]."""
    return (states @ heads[:, :-1].T + heads[:, -1]).movedim(-1, 0)
