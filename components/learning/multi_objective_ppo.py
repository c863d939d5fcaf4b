"""A client's local steps of FIRM (algorithm 1 and A.1): PPO on samples with several rewards.

    each step, from the current policy pi_old:
        y ~ pi_old(x) for a batch of prompts; each reward model scores every completion
        A_j, the advantages of each objective j       (components/learning/estimators.py)
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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from components.config import MultiObjective
from components.learning import mgda
from components.learning.estimators import Estimator, Tensors
from components.learning.loop import (
    Rows,
    Trained,
    Training,
    TrainingError,
    build_optimizer,
    clip_gradients,
    draw_minibatches,
    split_rows,
)
from components.learning.ppo import approximate_kl, masked_mean, policy_loss
from components.learning.rollouts import Rollout, sample_rollout
from components.models.checkpointing import checkpointed
from components.models.resident import ResidentPolicy
from components.models.rewards.reward_section import RewardFunction
from components.seeding import derive, generator

LAST_METRICS = ("kl_coefficient", "policy_kl")
"""Metrics of a round that are the last values of it rather than their means."""


class ObjectiveGradients(NamedTuple):
    """Gradients of a minibatch of n completions with respect to P trained values."""

    gradients: torch.Tensor  # [M, P] fp32 by objective; [1, P], that of the weighted loss
    losses: list[float]  # of the M objectives
    kl: float  # estimated KL from the rollout's policy (nats per token)
    states: torch.Tensor  # [n, T, H], hidden states that the tokens were predicted from, detached


class MultiObjectivePpo:
    """A client's round of PPO with several rewards; dropout is off, see `Loss.dropout`.

    Each local step samples a rollout of `training.batch_size` completions, and the micro-batches divide
    the minibatches of PPO. The accumulation of the optimizer, the proximal term and the progress
    callback are not used. The adapter in the slot is changed in place. The numbers and tensors are
    those of the client's previous round.
    """

    def __init__(
        self,
        resident: ResidentPolicy,
        rewards: Mapping[str, RewardFunction],
        config: MultiObjective,
        training: Training,
        numbers: Mapping[str, float] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        build: type[Estimator] = resolve_name(config.ppo.estimator.implementation)
        self.estimator = build(config.ppo, list(rewards), resident, numbers or {}, tensors or {})
        self.weights: np.ndarray | None = None  # lambda, [M], if it is fixed; None if MGDA computes it
        if config.weights is not None:
            self.weights = np.array([config.weights.get(name, 0.0) for name in rewards])
        # Of each rollout `finished`, `kl`, `kl_coefficient` and `score/<objective>`; of each step
        # `policy_kl`, `lambda/<objective>`, and the metrics of the estimator's own step.
        self.history: dict[str, list[float]] = defaultdict(list)
        self._resident = resident
        self._rewards = rewards
        self._config = config
        self._ppo = config.ppo
        self._training = training
        policy = build_optimizer(resident.slot.parameters, training.optimizer)
        self._optimizers = {"policy": policy} | self.estimator.optimizers
        if config.ppo.keep_moments:
            for name, optimizer in self._optimizers.items():
                load_moments(optimizer, name, tensors or {})

    def train(self, prompts: Sequence[str]) -> Trained:
        """Take the local steps; a TrainingError if there are no prompts, or a gradient is not finite."""
        start = time.perf_counter()
        seed = self._training.seed
        steps: list[tuple[float, float]] = []  # loss and gradient norm of each
        tokens = 0
        for number, batch in enumerate(self._draw(prompts, self._training.steps)):
            rollout, advantages = self.sample(batch, derive(seed, "rollout", number))
            self._add(rollout.figures())
            self._add({"kl_coefficient": self.estimator.kl, "finished": float(rollout.finished.mean())})
            for epoch in range(self._ppo.epochs):
                order = generator(seed, "epoch", number, epoch).permutation(len(rollout.rows))
                for indices in split_rows(order, self._ppo.minibatch):
                    steps.append(self._step(rollout, advantages, indices, len(steps)))
            tokens += self._ppo.epochs * int(rollout.lengths.sum())
            self.estimator.update_coefficient(rollout)
        for parameter in self._resident.slot.parameters:
            parameter.grad = None
        losses, norms = zip(*steps, strict=True)
        return Trained(list(losses), list(norms), tokens, time.perf_counter() - start)

    def mean_gradients(self, prompts: Sequence[str]) -> tuple[torch.Tensor, Rollout]:
        """The objectives' gradients [M, P], averaged over one rollout, and the rollout."""
        (batch,) = self._draw(prompts, 1)
        rollout, advantages = self.sample(batch, derive(self._training.seed, "rollout"))
        count = len(rollout.rows)
        weighted = (
            self.gradients(rollout, advantages, indices).gradients * len(indices)
            for indices in split_rows(np.arange(count), self._ppo.minibatch)
        )
        return reduce(torch.add, weighted) / count, rollout

    def sample(self, prompts: Sequence[str], seed: int) -> tuple[Rollout, torch.Tensor]:
        """A rollout of prompts, and its advantages [M, B, T]."""
        count = self.estimator.samples
        rollout = sample_rollout(self._resident, prompts, self._rewards, self._ppo, seed, count)
        return rollout, self.estimator.advantages(rollout)

    def gradients(self, rollout: Rollout, advantages: torch.Tensor, indices: Rows) -> ObjectiveGradients:
        """Gradients of the clipped loss of M objectives, by one forward and M backward passes.

        With fixed weights, only the gradient of the weighted loss is computed, by one backward pass.
        Micro-batches are weighted by their tokens, or by their completions if the loss is a mean over
        these. The advantages are [M, B, T]; the indices, [n], are the completions of the minibatch. The
        policy may differ from that which sampled the rollout.
        """
        micro_batches = split_rows(indices, self._training.micro_batch_size)
        with checkpointed(self._resident.model):
            parts = [self._scaled_gradients(rollout, advantages, rows, indices) for rows in micro_batches]
        width = max(part.states.shape[1] for part in parts)
        states = [pad(part.states, (0, 0, 0, width - part.states.shape[1])) for part in parts]
        return ObjectiveGradients(
            gradients=sum((part.gradients for part in parts[1:]), start=parts[0].gradients),
            losses=[sum(losses) for losses in zip(*(part.losses for part in parts), strict=True)],
            kl=sum(part.kl for part in parts),
            states=torch.cat(states),
        )

    def metrics(self, trained: Trained) -> dict[str, float]:
        """Metrics of the round: means over its rollouts or steps, and the last values of LAST_METRICS."""
        means = {name: float(np.mean(values)) for name, values in self.history.items()}
        return trained.metrics() | means | {name: self.history[name][-1] for name in LAST_METRICS}

    def numbers(self) -> dict[str, float]:
        """Numbers for the client's next round."""
        return self.estimator.numbers()

    def tensors(self) -> Tensors:
        """Tensors for the client's next round, fp32 on the CPU."""
        tensors = self.estimator.tensors()
        if self._ppo.keep_moments:
            for name, optimizer in self._optimizers.items():
                tensors |= read_moments(optimizer, name)
        return tensors

    def _draw(self, prompts: Sequence[str], count: int) -> list[list[str]]:
        size = self._training.batch_size // self.estimator.samples
        batches = draw_minibatches(len(prompts), size, count, derive(self._training.seed, "prompts"))
        return [[prompts[n] for n in batch] for batch in batches]

    def _step(
        self, rollout: Rollout, advantages: torch.Tensor, indices: Rows, number: int
    ) -> tuple[float, float]:
        """Take a step of the policy and of the estimator; the loss, and the norm of the gradient."""
        parameters = self._resident.slot.parameters
        computed = self.gradients(rollout, advantages, indices)
        if not computed.gradients.isfinite().all():
            raise TrainingError(
                f"a gradient is NaN or infinite at step {number}: lower the learning rate, "
                "or inspect the rewards of this client"
            )
        weights, gradient = self.weights, computed.gradients[0]
        if weights is None:
            weights = solve_weights(computed.gradients, list(self._rewards), self._config)
            gradient = torch.as_tensor(weights).to(gradient) @ computed.gradients
        parts = torch.split(gradient, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape).to(parameter.dtype)
        norm = clip_gradients(parameters, self._training.optimizer.clip)
        self._optimizers["policy"].step()
        lambdas = {f"lambda/{name}": float(w) for name, w in zip(self._rewards, weights, strict=True)}
        self._add({"policy_kl": computed.kl} | lambdas)
        self._add(self.estimator.step(rollout, indices, computed.states))
        return float(np.dot(weights, computed.losses)), norm

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.history[name].append(value)

    def _scaled_gradients(
        self, rollout: Rollout, advantages: torch.Tensor, indices: Rows, minibatch: Rows
    ) -> ObjectiveGradients:
        """Gradients, losses and KL of a micro-batch, times its share of the minibatch."""
        estimator = self.estimator
        parameters = self._resident.slot.parameters
        mask = rollout.tokens.mask
        token_share = int(mask[indices].sum()) / int(mask[minibatch].sum())
        share = len(indices) / len(minibatch) if estimator.by_completion else token_share
        rows = [rollout.rows[n] for n in indices]
        tokens = self._resident.tokens(rows, temperature=self._ppo.temperature)
        width = tokens.mask.shape[1]
        old = rollout.tokens.logprobs[indices, :width]
        reference = rollout.reference[indices, :width]
        losses = []
        for own in advantages:
            token_losses = policy_loss(tokens.logprobs, old, own[indices, :width], self._ppo.clip)
            token_losses = estimator.add_penalty(token_losses, tokens.logprobs, reference)
            losses.append(masked_mean(token_losses, tokens.mask, estimator.by_completion).mean() * share)
        targets = losses
        if self.weights is not None:
            weighted = (float(weight) * loss for weight, loss in zip(self.weights, losses, strict=True))
            targets = [sum(weighted, start=losses[0].new_zeros(()))]
        gradients = []
        for j, target in enumerate(targets):
            parts = torch.autograd.grad(target, parameters, retain_graph=j + 1 < len(targets))
            gradients.append(torch.cat([part.reshape(-1).float() for part in parts]))
        return ObjectiveGradients(
            gradients=torch.stack(gradients),
            losses=[loss.item() for loss in losses],
            kl=approximate_kl(tokens.logprobs, old, tokens.mask) * token_share,
            states=tokens.states.detach(),
        )


def solve_weights(gradients: torch.Tensor, objectives: Sequence[str], config: MultiObjective) -> np.ndarray:
    """lambda, [M], of the gradients [M, P], by MGDA in float64; 1 for what the preference does not name."""
    wide = gradients.double()
    gram = (wide @ wide.T).cpu().numpy()
    preference = None
    if config.preference is not None:
        preference = [config.preference.get(name, 1.0) for name in objectives]
    return mgda.solve(gram, config.beta, preference)


def read_moments(optimizer: torch.optim.Optimizer, name: str) -> Tensors:
    """Copies on the CPU of an optimizer's state, which consists of tensors; empty before its first step.

    Their names are `optimizer/name/position of the parameter/key`, such as optimizer/policy/0/exp_avg.
    """
    tensors = {}
    for position, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer/{name}/{position}/{key}"] = value.detach().cpu().clone()
    return tensors


def load_moments(optimizer: torch.optim.Optimizer, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Continue an optimizer from the tensors of `read_moments`; its settings stay.

    Other tensors are left out; if there are none, the state begins at 0.
    """
    prefix = f"optimizer/{name}/"
    states: dict[int, dict[str, Any]] = defaultdict(dict)
    for path, tensor in tensors.items():
        if path.startswith(prefix):
            position, key = path.removeprefix(prefix).split("/")
            states[int(position)][key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(states), "param_groups": groups})
