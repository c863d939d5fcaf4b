"""A client's local steps of FIRM (algorithm 1 and A.1): PPO on samples with several rewards.

    each step, from the current policy pi_old:
        y ~ pi_old(x) for a batch of prompts; each reward model scores every completion
        for each objective j:
            r_j = -kl (log pi_old - log pi_ref) at each token, plus its normalized score at the last
            A_j = GAE of r_j with the values of j's own head, whitened over the batch
        epochs over the batch in minibatches:
            g_j = gradient of the clipped loss of A_j with respect to the LoRA
            lambda = MGDA(g_1 ... g_M);  step along the sum of lambda_j g_j
            the value heads take a step of their own, on hidden states that get no gradient
        kl is moved towards its target (Ziegler et al. 2019, section 2.2)

One rollout and one forward pass serve all objectives; only the backward pass is repeated, M times.
The penalty is part of every objective's reward, so a combination whose weights sum to 1 contains it
once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from components.config import MultiObjective
from components.learning import mgda
from components.learning.local import (
    Division,
    LocalTraining,
    TrainingError,
    TrainingMetrics,
    build_optimizer,
    clip_gradients,
    draw_minibatches,
)
from components.learning.ppo import (
    approximate_kl,
    compute_gae,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)
from components.models.checkpointing import checkpointed
from components.models.logprobs import TokenRow
from components.models.resident import ResidentPolicy
from components.models.rewards.base import RewardFunction, check_scores
from components.seeding import derive, generator

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
            objective.
        moments: moments of the scores of each objective.
        kl: coefficient of the penalty.
    """

    heads: dict[str, torch.Tensor]
    moments: dict[str, RunningMoments]
    kl: float

    @classmethod
    def initial(cls, objectives: Sequence[str], hidden_size: int, kl: float) -> PPOClientState:
        """The state before the first round: values of 0 and no scores."""
        import torch

        return cls(
            heads={name: torch.zeros(hidden_size + 1, dtype=torch.float32) for name in objectives},
            moments={name: RunningMoments() for name in objectives},
            kl=kl,
        )


@dataclass(frozen=True)
class Rollout:
    """B completions sampled by the current policy, evaluated for M objectives.

    Attributes:
        rows: token ids of prompts and completions.
        texts: the completions.
        scores: [B, M], scores of the rewards before normalization.
        old: [B, T], log-probabilities of the tokens.
        mask: [B, T] bool.
        values: [M, B, T], values of the tokens by the objectives' heads.
        advantages: [M, B, T], whitened.
        returns: [M, B, T], targets of the values.
        kl: mean of the completions' log pi_old - log pi_ref (nats per completion).
        temperature: temperature of both policies.
    """

    rows: list[TokenRow]
    texts: list[str]
    scores: np.ndarray
    old: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    kl: float
    temperature: float


@dataclass(frozen=True)
class ObjectiveGradients:
    """Gradients of a minibatch of n completions with respect to P trained values.

    Attributes:
        gradients: [M, P] fp32, one gradient per objective; [1, P] for the gradient of a weighted
            loss.
        losses: loss of each of the M objectives.
        kl: estimated KL from the rollout's policy (nats per token).
        states: [n, T, H], hidden states that the tokens were predicted from, detached.
        tokens: tokens that went through the model.
    """

    gradients: torch.Tensor
    losses: list[float]
    kl: float
    states: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class MultiObjectiveMetrics(TrainingMetrics):
    """Metrics of a client's round.

    Attributes:
        weights: lambda of each step, by objective.
        scores: mean score of each rollout before normalization, by objective.
        kl: KL to the reference of each rollout (nats per completion).
        kl_coefficient: coefficient of the penalty in each rollout.
        policy_kl: estimated KL from pi_old before each step (nats per token).
        value_loss: mean value loss over the objectives, of each step.
    """

    weights: dict[str, list[float]]
    scores: dict[str, list[float]]
    kl: list[float]
    kl_coefficient: list[float]
    policy_kl: list[float]
    value_loss: list[float]


def update_kl_coefficient(
    coefficient: float, kl: float, target: float, completions: int, horizon: int
) -> float:
    """Update the coefficient of the penalty by a batch: coefficient (1 + e n / horizon).

    e is the relative error (KL - target) / target, clipped to [-0.2, 0.2] (Ziegler et al. 2019,
    Fine-Tuning Language Models from Human Preferences, section 2.2, where 1 / horizon is 0.1 per
    batch).

    Args:
        coefficient: coefficient in the batch.
        kl: KL to the reference of the batch (nats per completion).
        target: desired KL (nats per completion).
        completions: n, completions of the batch.
        horizon: completions over which an error is corrected.

    Returns:
        the coefficient of the next batch.
    """
    error = float(np.clip((kl - target) / target, -0.2, 0.2))
    return coefficient * (1 + error * completions / horizon)


def sample_rollout(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    rewards: Mapping[str, RewardFunction],
    state: PPOClientState,
    config: MultiObjective,
    seed: int,
) -> tuple[Rollout, PPOClientState]:
    """Sample a completion of each prompt with the adapter in the slot, and score it.

    Args:
        resident: the model.
        prompts: B texts.
        rewards: the reward of each objective.
        state: the client's state, whose heads compute the values.
        config: coefficients.
        seed: the completions are a function of it.

    Returns:
        the rollout, and the state with the moments updated by the rollout's scores.

    Raises:
        RewardError: a reward fails, or does not give one finite score per completion.
    """
    import torch

    resident.model.eval()
    completions = [samples[0] for samples in resident.policy.generate(prompts, seed, config.ppo.temperature)]
    rows: list[TokenRow] = [
        (resident.policy.encode(prompt), list(completion.ids))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    texts = [completion.text for completion in completions]
    scores, state = _score_objectives(rewards, prompts, texts, state)
    final_rewards = _final_rewards(scores, list(rewards), state, config)
    with torch.no_grad():
        tokens = resident.tokens(rows, temperature=config.ppo.temperature)
        reference = resident.tokens(rows, reference=True, temperature=config.ppo.temperature)
        log_ratio = (tokens.logprobs - reference.logprobs) * tokens.mask
        heads = torch.stack([state.heads[name] for name in rewards]).to(tokens.states.device)
        values = _compute_values(heads, tokens.states) * tokens.mask
        penalty = -state.kl * log_ratio
        advantages, returns = _estimate_advantages(
            tokens, penalty, final_rewards, values, config.ppo.gae_lambda
        )
    rollout = Rollout(
        rows=rows,
        texts=texts,
        scores=scores,
        old=tokens.logprobs,
        mask=tokens.mask,
        values=values,
        advantages=advantages,
        returns=returns,
        kl=float(log_ratio.sum(1).mean()),
        temperature=config.ppo.temperature,
    )
    return rollout, state


def _score_objectives(
    rewards: Mapping[str, RewardFunction],
    prompts: Sequence[str],
    texts: Sequence[str],
    state: PPOClientState,
) -> tuple[np.ndarray, PPOClientState]:
    """Scores [B, M], and the state with its moments updated by them."""
    columns = {
        name: check_scores(f"the reward of objective '{name}'", reward, prompts, texts)
        for name, reward in rewards.items()
    }
    moments = {name: state.moments[name].update(scores) for name, scores in columns.items()}
    return np.stack(list(columns.values()), axis=1), replace(state, moments=moments)


def _final_rewards(
    scores: np.ndarray, objectives: list[str], state: PPOClientState, config: MultiObjective
) -> np.ndarray:
    """Rewards at the last token of each completion, [B, M]."""
    if not config.ppo.normalize:
        return scores
    return np.stack(
        [state.moments[name].normalize(scores[:, j]) for j, name in enumerate(objectives)], axis=1
    )


def _estimate_advantages(
    tokens: CompletionTokens,
    penalty: torch.Tensor,
    final_rewards: np.ndarray,
    values: torch.Tensor,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened advantages and returns of M objectives, [M, B, T] each.

    Args:
        tokens: of B completions.
        penalty: [B, T], part of every objective's reward.
        final_rewards: [B, M], reward at the last token.
        values: [M, B, T].
        lam: lambda of GAE.
    """
    import torch

    completions = torch.arange(len(penalty))
    last = tokens.mask.sum(1) - 1
    advantages = []
    returns = []
    for j in range(len(values)):
        token_rewards = penalty.clone()
        token_rewards[completions, last] += torch.as_tensor(
            final_rewards[:, j], dtype=penalty.dtype, device=penalty.device
        )
        objective_advantages, objective_returns = compute_gae(token_rewards, values[j], tokens.mask, 1.0, lam)
        advantages.append(whiten(objective_advantages, tokens.mask))
        returns.append(objective_returns)
    return torch.stack(advantages), torch.stack(returns)


def compute_objective_gradients(
    resident: ResidentPolicy,
    rollout: Rollout,
    indices: np.ndarray,
    clip: float,
    weights: np.ndarray | None = None,
    micro_batch_size: int | None = None,
) -> ObjectiveGradients:
    """Gradients of the clipped loss of M objectives, by one forward and M backward passes.

    Args:
        resident: the model; its policy may differ from the rollout's.
        rollout: of B completions.
        indices: [n], completions of the minibatch.
        clip: epsilon.
        weights: [M]; if they are set, only the gradient of the weighted loss is computed, by one
            backward pass.
        micro_batch_size: completions that go through the model at once; None takes all. Losses are
            means over tokens, so gradients are weighted by tokens.
    """
    total = int(rollout.mask[indices].sum())
    micro_batches = Division(micro_batch_size).micro_batches(indices)
    with checkpointed(resident.model):
        parts = [
            _scaled_gradients(resident, rollout, micro_batch, clip, weights, total)
            for micro_batch in micro_batches
        ]
    return _sum_parts(parts)


def _sum_parts(parts: Sequence[ObjectiveGradients]) -> ObjectiveGradients:
    """The gradients of a minibatch from those of its micro-batches, which are scaled already."""
    import torch
    from torch.nn.functional import pad

    width = max(part.states.shape[1] for part in parts)
    states = [pad(part.states, (0, 0, 0, width - part.states.shape[1])) for part in parts]
    return ObjectiveGradients(
        gradients=sum((part.gradients for part in parts[1:]), start=parts[0].gradients),
        losses=[sum(losses) for losses in zip(*(part.losses for part in parts), strict=True)],
        kl=sum(part.kl for part in parts),
        states=torch.cat(states),
        tokens=sum(part.tokens for part in parts),
    )


def _scaled_gradients(
    resident: ResidentPolicy,
    rollout: Rollout,
    indices: np.ndarray,
    clip: float,
    weights: np.ndarray | None,
    total: int,
) -> ObjectiveGradients:
    """Gradients, losses and KL of a micro-batch, times its share of the minibatch's tokens."""
    import torch

    parameters = resident.slot.parameters
    share = int(rollout.mask[indices].sum()) / total
    rows = [rollout.rows[n] for n in indices]
    tokens = resident.tokens(rows, temperature=rollout.temperature)
    width = tokens.mask.shape[1]
    old = rollout.old[indices, :width]
    losses = []
    for advantages in rollout.advantages:
        token_losses = policy_loss(tokens.logprobs, old, advantages[indices, :width], clip)
        losses.append(masked_mean(token_losses, tokens.mask) * share)
    targets = losses if weights is None else [_weighted_sum(losses, weights)]
    gradients = []
    for j, target in enumerate(targets):
        parts = torch.autograd.grad(target, parameters, retain_graph=j + 1 < len(targets))
        gradients.append(torch.cat([part.reshape(-1).float() for part in parts]))
    return ObjectiveGradients(
        gradients=torch.stack(gradients),
        losses=[loss.item() for loss in losses],
        kl=approximate_kl(tokens.logprobs, old, tokens.mask) * share,
        states=tokens.states.detach(),
        tokens=sum(len(prompt) + len(completion) for prompt, completion in rows),
    )


def _weighted_sum(losses: Sequence[torch.Tensor], weights: np.ndarray) -> torch.Tensor:
    weighted = (float(weight) * loss for weight, loss in zip(weights, losses, strict=True))
    return sum(weighted, start=losses[0].new_zeros(()))


def fixed_weights(config: MultiObjective, objectives: Sequence[str]) -> np.ndarray | None:
    """lambda, [M], if it does not depend on the gradients; None if MGDA computes it."""
    if config.weights is None:
        return None
    return np.array([config.weights.get(name, 0.0) for name in objectives])


def solve_weights(gradients: torch.Tensor, objectives: Sequence[str], config: MultiObjective) -> np.ndarray:
    """lambda, [M], of the gradients [M, P], by MGDA in float64."""
    wide = gradients.double()
    gram = (wide @ wide.T).cpu().numpy()
    return mgda.solve(gram, config.beta, order_preference(config.preference, objectives))


def order_preference(preference: Mapping[str, float] | None, objectives: Sequence[str]) -> list[float] | None:
    """p in the order of the objectives, 1 for those that it does not name; None if it is None."""
    return None if preference is None else [preference.get(name, 1.0) for name in objectives]


def train_multi_objective_ppo(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    rewards: Mapping[str, RewardFunction],
    state: PPOClientState,
    config: MultiObjective,
    training: LocalTraining,
) -> tuple[PPOClientState, MultiObjectiveMetrics]:
    """Train the adapter in the slot in a client's local steps.

    Dropout is off, because with it the ratio to the rollout's policy would be noisy.

    Args:
        resident: the model; the adapter in its slot is changed in place.
        prompts: the client's prompts.
        rewards: the reward of each objective.
        state: the client's state after its previous round.
        config: coefficients.
        training: each local step samples a rollout of `batch_size` prompts, and the micro-batches
            divide the minibatches of PPO. The accumulation of the optimizer, the proximal term and
            the progress callback are not used.

    Returns:
        the client's state after the round, and the metrics.

    Raises:
        TrainingError: there are no prompts, or a gradient is not finite; the message names the
            step.
        RewardError: see `sample_rollout`.
    """
    start = time.perf_counter()
    trainer = _MultiObjectiveTrainer(resident, list(rewards), state, config, training)
    seed = training.seed
    resident.model.eval()
    batches = draw_minibatches(len(prompts), training.batch_size, training.steps, derive(seed, "prompts"))
    for number, batch in enumerate(batches):
        rollout, state = sample_rollout(
            resident,
            [prompts[n] for n in batch],
            rewards,
            replace(state, heads=trainer.read_heads()),
            config,
            derive(seed, "rollout", number),
        )
        trainer.record.add_rollout(rollout, state.kl)
        for epoch in range(config.ppo.epochs):
            order = generator(seed, "epoch", number, epoch).permutation(len(batch))
            for begin in range(0, len(order), config.ppo.minibatch):
                trainer.step(rollout, order[begin : begin + config.ppo.minibatch])
        if config.ppo.target_kl is not None:
            kl = update_kl_coefficient(
                state.kl, rollout.kl, config.ppo.target_kl, len(batch), config.ppo.horizon
            )
            state = replace(state, kl=kl)
    for parameter in resident.slot.parameters:
        parameter.grad = None
    state = replace(state, heads=trainer.read_heads())
    return state, trainer.record.to_metrics(time.perf_counter() - start)


class _Record:
    """Collects the metrics of a round."""

    def __init__(self, objectives: list[str]) -> None:
        self.objectives = objectives
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.tokens = 0
        self.weights: dict[str, list[float]] = {name: [] for name in objectives}
        self.scores: dict[str, list[float]] = {name: [] for name in objectives}
        self.kl: list[float] = []
        self.kl_coefficient: list[float] = []
        self.policy_kl: list[float] = []
        self.value_loss: list[float] = []

    def add_rollout(self, rollout: Rollout, kl_coefficient: float) -> None:
        """Add the scores and the KL of a rollout."""
        self.kl.append(rollout.kl)
        self.kl_coefficient.append(kl_coefficient)
        for j, name in enumerate(self.objectives):
            self.scores[name].append(float(rollout.scores[:, j].mean()))

    def add_step(self, gradients: ObjectiveGradients, weights: np.ndarray) -> None:
        """Add the weighted loss and the weights lambda [M] of a step."""
        self.losses.append(float(np.dot(weights, gradients.losses)))
        self.policy_kl.append(gradients.kl)
        self.tokens += gradients.tokens
        for name, weight in zip(self.objectives, weights, strict=True):
            self.weights[name].append(float(weight))

    def to_metrics(self, seconds: float) -> MultiObjectiveMetrics:
        """The metrics of the round, which took this wall time."""
        return MultiObjectiveMetrics(
            losses=self.losses,
            gradient_norms=self.gradient_norms,
            tokens=self.tokens,
            seconds=seconds,
            weights=self.weights,
            scores=self.scores,
            kl=self.kl,
            kl_coefficient=self.kl_coefficient,
            policy_kl=self.policy_kl,
            value_loss=self.value_loss,
        )


class _MultiObjectiveTrainer:
    """The optimizers of a round: that of the policy, and that of the value heads."""

    def __init__(
        self,
        resident: ResidentPolicy,
        objectives: list[str],
        state: PPOClientState,
        config: MultiObjective,
        training: LocalTraining,
    ) -> None:
        import torch

        heads = torch.stack([state.heads[name] for name in objectives])
        self.record = _Record(objectives)
        self._resident = resident
        self._objectives = objectives
        self._config = config
        self._max_norm = training.optimizer.clip
        self._micro_batch_size = training.micro_batch_size
        self._fixed_weights = fixed_weights(config, objectives)
        self._heads = torch.nn.Parameter(heads.to(resident.policy.device))
        self._actor = build_optimizer(resident.slot.parameters, training.optimizer)
        self._critic = torch.optim.AdamW([self._heads], lr=config.ppo.critic_lr, weight_decay=0.0)

    def read_heads(self) -> dict[str, torch.Tensor]:
        """The value heads, by objective, on the CPU."""
        return {name: self._heads[j].detach().cpu() for j, name in enumerate(self._objectives)}

    def step(self, rollout: Rollout, indices: np.ndarray) -> None:
        """Take a step of the policy and of the value heads on a minibatch of a rollout."""
        config = self._config
        parameters = self._resident.slot.parameters
        gradients = compute_objective_gradients(
            self._resident,
            rollout,
            indices,
            config.ppo.clip,
            self._fixed_weights,
            self._micro_batch_size,
        )
        if not gradients.gradients.isfinite().all():
            raise TrainingError(
                f"a gradient is NaN or infinite at step {len(self.record.losses)}: lower the learning rate, "
                "or inspect the rewards of this client"
            )
        weights, gradient = self._combine(gradients.gradients)
        _set_gradients(parameters, gradient)
        self.record.gradient_norms.append(clip_gradients(parameters, self._max_norm))
        self._actor.step()
        self.record.value_loss.append(self._step_critic(rollout, indices, gradients.states))
        self.record.add_step(gradients, weights)

    def _combine(self, gradients: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """lambda, [M], and the combined gradient, [P]."""
        import torch

        if self._fixed_weights is not None:
            return self._fixed_weights, gradients[0]
        weights = solve_weights(gradients, self._objectives, self._config)
        factors = torch.as_tensor(weights, dtype=gradients.dtype, device=gradients.device)
        return weights, factors @ gradients

    def _step_critic(self, rollout: Rollout, indices: np.ndarray, states: torch.Tensor) -> float:
        """Take a step of the value heads; returns the mean value loss over the objectives."""
        import torch

        width = states.shape[1]
        mask = rollout.mask[indices, :width]
        losses = value_loss(
            _compute_values(self._heads, states),
            rollout.values[:, indices, :width],
            rollout.returns[:, indices, :width],
            self._config.ppo.clip,
        )
        # A sum rather than a mean: the gradient of a head must not depend on the number of
        # objectives.
        total = sum((masked_mean(values, mask) for values in losses), start=losses.new_zeros(()))
        self._critic.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        self._critic.step()
        return total.item() / len(losses)


def _compute_values(heads: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Values [M, B, T] of heads [M, H + 1] on states [B, T, H]."""
    return (states @ heads[:, :-1].T + heads[:, -1]).movedim(-1, 0)


def _set_gradients(parameters: Sequence[torch.nn.Parameter], gradient: torch.Tensor) -> None:
    """Write a flat gradient into the parameters."""
    start = 0
    for parameter in parameters:
        part = gradient[start : start + parameter.numel()]
        parameter.grad = part.reshape(parameter.shape).to(parameter.dtype)
        start += parameter.numel()
