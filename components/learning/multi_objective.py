"""A client's local steps of FIRM (algorithm 1 and A.1): PPO on samples with several rewards.

    each step, from the current policy pi_old:
        y ~ pi_old(x) for a batch of prompts; each reward model scores every completion
        A_j, the advantages of each objective j       (components/learning/rollouts.py)
        epochs over the batch in minibatches:
            g_j = gradient of the clipped loss of A_j with respect to the LoRA
            lambda = MGDA(g_1 ... g_M);  step along the sum of lambda_j g_j
            value heads, if there are any, take a step of their own, on hidden states that get no
            gradient
        kl is moved towards its target (Ziegler et al. 2019, section 2.2)

One rollout and one forward pass serve all objectives; only the backward pass is repeated, M times.
The KL penalty is part of every objective's reward (or loss), so a combination whose weights sum to
1 contains it once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from components.config import MultiObjective, PpoConfig
from components.config.objectives import GaeEstimator, GrpoEstimator
from components.learning import mgda
from components.learning.loop import (
    Trained,
    Training,
    TrainingError,
    build_optimizer,
    clip_gradients,
    draw_minibatches,
    split_rows,
)
from components.learning.optimizer_state import load_moments, read_moments
from components.learning.ppo import approximate_kl, estimate_kl, masked_mean, policy_loss, value_loss
from components.learning.rollouts import PPOClientState, Rollout, Values, compute_values, sample_rollout
from components.models.checkpointing import checkpointed
from components.models.resident import ResidentPolicy
from components.models.rewards.base import RewardFunction
from components.seeding import derive, generator

if TYPE_CHECKING:
    import torch


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
class MultiObjectiveMetrics(Trained):
    """Metrics of a client's round.

    Attributes:
        weights: lambda of each step, by objective.
        scores: mean score of each rollout before normalization, by objective.
        finished: share of the completions of each rollout that ended by themselves.
        kl: KL to the reference of each rollout (nats per completion).
        kl_coefficient: coefficient of the penalty in each rollout.
        policy_kl: estimated KL from pi_old before each step (nats per token).
        value_loss: mean value loss over the objectives, of each step; empty without a critic.
    """

    weights: dict[str, list[float]]
    scores: dict[str, list[float]]
    finished: list[float]
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


def compute_objective_gradients(
    resident: ResidentPolicy,
    rollout: Rollout,
    indices: np.ndarray,
    ppo: PpoConfig,
    weights: np.ndarray | None = None,
    micro_batch_size: int | None = None,
) -> ObjectiveGradients:
    """Gradients of the clipped loss of M objectives, by one forward and M backward passes.

    Args:
        resident: the model; its policy may differ from the rollout's.
        rollout: of B completions.
        indices: [n], completions of the minibatch.
        ppo: the clip range, and the estimator, whose loss has means over tokens or completions.
        weights: [M]; if they are set, only the gradient of the weighted loss is computed, by one
            backward pass.
        micro_batch_size: completions that go through the model at once; None takes all. Gradients are
            weighted by tokens, or by completions for the estimator grpo.
    """
    micro_batches = split_rows(indices, micro_batch_size)
    with checkpointed(resident.model):
        parts = [
            _scaled_gradients(resident, rollout, micro_batch, ppo, weights, indices)
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
    ppo: PpoConfig,
    weights: np.ndarray | None,
    minibatch: np.ndarray,
) -> ObjectiveGradients:
    """Gradients, losses and KL of a micro-batch, times its share of the minibatch.

    The share is that of its tokens, or of its completions where the loss is a mean over completions.
    """
    import torch

    parameters = resident.slot.parameters
    by_completion = isinstance(ppo.estimator, GrpoEstimator)
    token_share = int(rollout.mask[indices].sum()) / int(rollout.mask[minibatch].sum())
    share = len(indices) / len(minibatch) if by_completion else token_share
    rows = [rollout.rows[n] for n in indices]
    tokens = resident.tokens(rows, temperature=rollout.temperature)
    width = tokens.mask.shape[1]
    old = rollout.old[indices, :width]
    penalty = rollout.advantages.penalty
    losses = []
    for advantages in rollout.advantages.values:
        token_losses = policy_loss(tokens.logprobs, old, advantages[indices, :width], ppo.clip)
        if penalty is not None:
            reference = penalty.reference[indices, :width]
            token_losses = token_losses + penalty.coefficient * estimate_kl(tokens.logprobs, reference, "k3")
        losses.append(masked_mean(token_losses, tokens.mask, by_completion).mean() * share)
    targets = losses if weights is None else [_weighted_sum(losses, weights)]
    gradients = []
    for j, target in enumerate(targets):
        parts = torch.autograd.grad(target, parameters, retain_graph=j + 1 < len(targets))
        gradients.append(torch.cat([part.reshape(-1).float() for part in parts]))
    return ObjectiveGradients(
        gradients=torch.stack(gradients),
        losses=[loss.item() for loss in losses],
        kl=approximate_kl(tokens.logprobs, old, tokens.mask) * token_share,
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
    training: Training,
) -> tuple[PPOClientState, MultiObjectiveMetrics]:
    """Train the adapter in the slot in a client's local steps.

    Dropout is off, because with it the ratio to the rollout's policy would be noisy.

    Args:
        resident: the model; the adapter in its slot is changed in place.
        prompts: the client's prompts.
        rewards: the reward of each objective.
        state: the client's state after its previous round.
        config: coefficients.
        training: each local step samples a rollout of `batch_size` completions, and the micro-batches
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
    batch_size = training.batch_size // config.ppo.estimator.samples
    batches = draw_minibatches(len(prompts), batch_size, training.steps, derive(seed, "prompts"))
    for number, batch in enumerate(batches):
        rollout, state = sample_rollout(
            resident,
            [prompts[n] for n in batch],
            rewards,
            replace(state, heads=trainer.read_heads()),
            config.ppo,
            derive(seed, "rollout", number),
        )
        trainer.record.add_rollout(rollout, state.kl)
        for epoch in range(config.ppo.epochs):
            order = generator(seed, "epoch", number, epoch).permutation(len(rollout.rows))
            for begin in range(0, len(order), config.ppo.minibatch):
                trainer.step(rollout, order[begin : begin + config.ppo.minibatch])
        if config.ppo.target_kl is not None:
            kl = update_kl_coefficient(
                state.kl, rollout.kl, config.ppo.target_kl, len(rollout.rows), config.ppo.horizon
            )
            state = replace(state, kl=kl)
    for parameter in resident.slot.parameters:
        parameter.grad = None
    state = replace(state, heads=trainer.read_heads(), optimizers=trainer.read_optimizers())
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
        self.finished: list[float] = []
        self.kl: list[float] = []
        self.kl_coefficient: list[float] = []
        self.policy_kl: list[float] = []
        self.value_loss: list[float] = []

    def add_rollout(self, rollout: Rollout, kl_coefficient: float) -> None:
        """Add the scores and the KL of a rollout."""
        self.finished.append(rollout.finished)
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
            finished=self.finished,
            kl=self.kl,
            kl_coefficient=self.kl_coefficient,
            policy_kl=self.policy_kl,
            value_loss=self.value_loss,
        )


class _Critic:
    """The value heads of the objectives, with an optimizer of their own."""

    def __init__(self, state: PPOClientState, objectives: list[str], config: PpoConfig, device: str) -> None:
        import torch

        assert isinstance(config.estimator, GaeEstimator)
        heads = torch.stack([state.heads[name] for name in objectives])
        self.heads = torch.nn.Parameter(heads.to(device))
        self.optimizer = torch.optim.AdamW([self.heads], lr=config.estimator.critic_lr, weight_decay=0.0)
        self._clip = config.clip

    def step(self, values: Values, mask: torch.Tensor, indices: np.ndarray, states: torch.Tensor) -> float:
        """Take a step on a minibatch.

        Args:
            values: of the rollout's B completions.
            mask: [B, T].
            indices: [n], the minibatch.
            states: [n, T', H], detached.

        Returns:
            the mean value loss over the objectives.
        """
        import torch

        width = states.shape[1]
        losses = value_loss(
            compute_values(self.heads, states),
            values.old[:, indices, :width],
            values.returns[:, indices, :width],
            self._clip,
        )
        # A sum rather than a mean: the gradient of a head must not depend on the number of
        # objectives.
        means = (masked_mean(own, mask[indices, :width]) for own in losses)
        total = sum(means, start=losses.new_zeros(()))
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        self.optimizer.step()
        return total.item() / len(losses)


class _MultiObjectiveTrainer:
    """The optimizers of a round: that of the policy, and that of the value heads if there are any."""

    def __init__(
        self,
        resident: ResidentPolicy,
        objectives: list[str],
        state: PPOClientState,
        config: MultiObjective,
        training: Training,
    ) -> None:
        self.record = _Record(objectives)
        self._resident = resident
        self._objectives = objectives
        self._config = config
        self._max_norm = training.optimizer.clip
        self._micro_batch_size = training.micro_batch_size
        self._fixed_weights = fixed_weights(config, objectives)
        self._critic = None
        self._optimizers = {"policy": build_optimizer(resident.slot.parameters, training.optimizer)}
        if isinstance(config.ppo.estimator, GaeEstimator):
            self._critic = _Critic(state, objectives, config.ppo, resident.policy.device)
            self._optimizers["critic"] = self._critic.optimizer
        if config.ppo.keep_moments:
            for name, optimizer in self._optimizers.items():
                load_moments(optimizer, name, state.optimizers)

    def read_heads(self) -> dict[str, torch.Tensor]:
        """The value heads, by objective, on the CPU; empty without a critic."""
        if self._critic is None:
            return {}
        return {name: self._critic.heads[j].detach().cpu() for j, name in enumerate(self._objectives)}

    def read_optimizers(self) -> dict[str, torch.Tensor]:
        """The tensors of the optimizers' states, on the CPU, if they are kept between rounds."""
        if not self._config.ppo.keep_moments:
            return {}
        states: dict[str, torch.Tensor] = {}
        for name, optimizer in self._optimizers.items():
            states |= read_moments(optimizer, name)
        return states

    def step(self, rollout: Rollout, indices: np.ndarray) -> None:
        """Take a step of the policy and of the value heads on a minibatch of a rollout."""
        parameters = self._resident.slot.parameters
        gradients = compute_objective_gradients(
            self._resident,
            rollout,
            indices,
            self._config.ppo,
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
        self._optimizers["policy"].step()
        values = rollout.advantages.critic
        if self._critic is not None and values is not None:
            loss = self._critic.step(values, rollout.mask, indices, gradients.states)
            self.record.value_loss.append(loss)
        self.record.add_step(gradients, weights)

    def _combine(self, gradients: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """lambda, [M], and the combined gradient, [P]."""
        import torch

        if self._fixed_weights is not None:
            return self._fixed_weights, gradients[0]
        weights = solve_weights(gradients, self._objectives, self._config)
        factors = torch.as_tensor(weights, dtype=gradients.dtype, device=gradients.device)
        return weights, factors @ gradients


def _set_gradients(parameters: Sequence[torch.nn.Parameter], gradient: torch.Tensor) -> None:
    """Write a flat gradient into the parameters."""
    start = 0
    for parameter in parameters:
        part = gradient[start : start + parameter.numel()]
        parameter.grad = part.reshape(parameter.shape).to(parameter.dtype)
        start += parameter.numel()
