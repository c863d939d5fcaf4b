"""The trainer of methods with several objectives, by PPO with several rewards (FIRM, FedCMOO-A)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import Recipe
from components.data.records import PairRow
from components.federation.clients.base import unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.clients.policy import ResidentPolicyTrainer
from components.federation.clients.private import PrivateState
from components.federation.multi_objective import MultiObjectiveMethod, gradient_name, weight_series
from components.federation.protocol import ClientResult, GradientJob, Job, MeasureJob, TrainJob
from components.learning.loop import Training, TrainingError, draw_minibatches
from components.learning.multi_objective import (
    MultiObjectiveMetrics,
    compute_objective_gradients,
    train_multi_objective_ppo,
)
from components.learning.rollouts import PPOClientState, RunningMoments, measure_rewards, sample_rollout
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter
    from components.models.rewards.base import RewardFunction


OPTIMIZER_PREFIX = "optimizer/"
"""Beginning of the names of the optimizers' tensors in a client's private store."""


class MultiObjectiveTrainer(ResidentPolicyTrainer):
    """Trains the shared adapter, computes the objectives' gradients, and measures their rewards."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        super().__init__(recipe, device)
        if not isinstance(recipe.federation.options, MultiObjectiveMethod):
            raise TypeError("the trainer 'multi-objective' needs the options of a MultiObjectiveMethod")
        self._options = recipe.federation.options
        self._objectives = list(self._options.objectives)
        self._rewards = recipe.rewards
        self._recipe_seed = recipe.seed
        self._device = device
        self._loaded: dict[str, RewardFunction] = {}

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Train on the client's prompts, compute gradients, or measure rewards on held-out prompts."""
        match job:
            case TrainJob():
                return self._train(job, context)
            case GradientJob():
                return self._gradients(job, context)
            case MeasureJob():
                return self._measure(job, context)
            case _:
                raise unsupported_job(self, job)

    def _train(self, job: TrainJob, context: ClientContext) -> ClientResult:
        """The round's local steps; the private state is written before the update is sent."""
        rows = context.rows("train")
        prompts = unique_prompts(rows)
        config = self._config
        completions = len(prompts) * self._options.ppo.estimator.samples
        self.resident.slot.load(context.load_adapter(job.adapter))
        state, metrics = train_multi_objective_ppo(
            self.resident,
            prompts,
            self._client_rewards(context),
            self._client_state(context),
            self._options.build_objective(job.objective_weights),
            Training(
                config.local_steps_for(completions),
                config.batch_size,
                config.optimizer,
                job.seed,
                micro_batch_size=config.micro_batch_size,
            ),
        )
        saved = context.store.save(job.key(), job.previous_job_key, pack_state(state))
        return ClientResult(
            tensors=self.resident.slot.read(),
            rows=len(rows),
            metrics=multi_objective_metrics(metrics),
            kept_bytes=saved.size,
        )

    def _gradients(self, job: GradientJob, context: ClientContext) -> ClientResult:
        """The gradient of each objective at the adapter, averaged over one batch of completions.

        The client's state stays as it is.
        """
        start = time.perf_counter()
        rows = context.rows("train")
        prompts = unique_prompts(rows)
        objective = self._options.build_objective(())
        self.resident.slot.load(context.load_adapter(job.adapter))
        batch_size = self._config.batch_size // objective.ppo.estimator.samples
        (batch,) = draw_minibatches(len(prompts), batch_size, 1, derive(job.seed, "prompts"))
        rollout, _ = sample_rollout(
            self.resident,
            [prompts[n] for n in batch],
            self._client_rewards(context),
            self._client_state(context),
            objective.ppo,
            derive(job.seed, "rollout"),
        )
        total = None
        tokens = 0
        minibatch = objective.ppo.minibatch
        count = len(rollout.rows)
        for begin in range(0, count, minibatch):
            indices = np.arange(begin, min(begin + minibatch, count))
            part = compute_objective_gradients(
                self.resident,
                rollout,
                indices,
                objective.ppo,
                micro_batch_size=self._config.micro_batch_size,
            )
            weighted = part.gradients * len(indices)
            total = weighted if total is None else total + weighted
            tokens += part.tokens
        if total is None:
            raise TrainingError("there are no completions to compute gradients on")
        scores = {
            f"score/{name}": float(column.mean())
            for name, column in zip(self._objectives, rollout.scores.T, strict=True)
        }
        numbers = {
            "tokens": tokens,
            "kl": rollout.kl,
            "seconds": time.perf_counter() - start,
        }
        return ClientResult(
            tensors=self._split_gradients(total / count),
            rows=len(rows),
            metrics=Metrics(scalars=scores | numbers),
        )

    def _split_gradients(self, gradients: torch.Tensor) -> Adapter:
        """Gradients [M, P] as tensors by objective and name."""
        import torch

        slot = self.resident.slot
        sizes = [parameter.numel() for parameter in slot.parameters]
        tensors = {}
        for objective, row in zip(self._objectives, gradients.cpu(), strict=True):
            parts = torch.split(row, sizes)
            for name, parameter, part in zip(slot.names, slot.parameters, parts, strict=True):
                tensors[gradient_name(objective, name)] = part.reshape(parameter.shape).clone()
        return tensors

    def _measure(self, job: MeasureJob, context: ClientContext) -> ClientResult:
        """Mean score of each objective's first reward on completions of held-out prompts.

        `kl` is the KL to the reference (nats per completion), and `prompts` the number of prompts.
        """
        prompts = context.held_out_prompts(self._options.reward_prompts, self._recipe_seed)
        if not prompts:
            raise TrainingError(
                "there are no held-out prompts to measure rewards on: raise the source's own options for"
                " them, or data.test"
            )
        rewards = {
            name: self._load_reward(names[0], context.trained_reward(names[0]))
            for name, names in self._options.objectives.items()
        }
        self.resident.slot.load(context.load_adapter(job.adapter))
        scores = []
        kl = 0.0
        batch_size = self._config.batch_size  # as in training
        for begin in range(0, len(prompts), batch_size):
            batch = prompts[begin : begin + batch_size]
            part, part_kl = measure_rewards(
                self.resident, batch, rewards, self._options.ppo, derive(job.seed, begin)
            )
            scores.append(part)
            kl += part_kl * len(batch) / len(prompts)
        columns = np.concatenate(scores).T
        scalars = {name: float(column.mean()) for name, column in zip(self._objectives, columns, strict=True)}
        return ClientResult(
            rows=len(prompts), metrics=Metrics(scalars=scalars | {"kl": kl, "prompts": len(prompts)})
        )

    def _client_rewards(self, context: ClientContext) -> dict[str, RewardFunction]:
        """The client's reward of each objective."""
        rewards = {}
        for objective, names in self._options.objectives.items():
            name = context.assigned_reward(names)
            rewards[objective] = self._load_reward(name, context.trained_reward(name))
        return rewards

    def _load_reward(self, name: str, folder: Path | None) -> RewardFunction:
        from components.models.rewards.base import response_reward

        if name not in self._loaded:
            self._loaded[name] = response_reward(self._rewards[name]).load(self._device, folder)
        return self._loaded[name]

    def _client_state(self, context: ClientContext) -> PPOClientState:
        state = context.private_state()
        if state is None:
            return PPOClientState.initial(self._objectives, self._hidden_size, self._options.ppo)
        return unpack_state(state, self._objectives)

    @property
    def _hidden_size(self) -> int:
        return int(self.resident.model.config.get_text_config().hidden_size)


def unique_prompts(rows: Sequence[PairRow]) -> list[str]:
    """A client's distinct prompts, in the order of its pairs.

    Raises:
        TrainingError: it has none.
    """
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    if not prompts:
        raise TrainingError("there are no prompts to answer")
    return prompts


def pack_state(state: PPOClientState) -> PrivateState:
    """A client's state as its private store keeps it."""
    numbers = {"kl": state.kl}
    for name, moments in state.moments.items():
        numbers[f"{name}/count"] = float(moments.count)
        numbers[f"{name}/mean"] = moments.mean
        numbers[f"{name}/squares"] = moments.squares
    tensors = {f"value/{name}": head for name, head in state.heads.items()}
    tensors |= {f"{OPTIMIZER_PREFIX}{name}": tensor for name, tensor in state.optimizers.items()}
    return PrivateState(tensors, numbers)


def unpack_state(state: PrivateState, objectives: Sequence[str]) -> PPOClientState:
    """A client's state from its private store."""
    numbers = state.numbers
    moments = {
        name: RunningMoments(
            int(numbers[f"{name}/count"]), numbers[f"{name}/mean"], numbers[f"{name}/squares"]
        )
        for name in objectives
    }
    tensors = state.tensors
    heads = {name: tensors[f"value/{name}"] for name in objectives if f"value/{name}" in tensors}
    optimizers = {
        name.removeprefix(OPTIMIZER_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(OPTIMIZER_PREFIX)
    }
    return PPOClientState(heads, moments, numbers["kl"], optimizers)


def multi_objective_metrics(metrics: MultiObjectiveMetrics) -> Metrics:
    """A client's round as metrics.

    Scalars are means over the local steps; the KL coefficient and the KL from the rollout's policy
    are the last ones. lambda of each step is a series.
    """
    scalars = {
        "kl": float(np.mean(metrics.kl)),
        "kl_coefficient": metrics.kl_coefficient[-1],
        "policy_kl": metrics.policy_kl[-1],
        "finished": float(np.mean(metrics.finished)),
    }
    if metrics.value_loss:
        scalars["value_loss"] = float(np.mean(metrics.value_loss))
    scalars |= {f"lambda/{name}": float(np.mean(values)) for name, values in metrics.weights.items()}
    scalars |= {f"score/{name}": float(np.mean(values)) for name, values in metrics.scores.items()}
    series = {weight_series(name): values for name, values in metrics.weights.items()}
    return Metrics(scalars=metrics.metrics() | scalars, series=series)
