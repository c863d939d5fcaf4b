"""The trainer of methods with several objectives, by PPO with several rewards (FIRM, FedCMOO-A)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from components.config import Recipe
from components.data.records import Pair
from components.federation.clients.context import ClientContext
from components.federation.clients.policy_client import PolicyClient
from components.federation.clients.private import PrivateState
from components.federation.multi_objective import MultiObjectiveMethod, gradient_name, weight_series
from components.federation.protocol import ClientResult, GradientJob, Job, TrainJob
from components.learning.loop import Training, TrainingError
from components.learning.multi_objective_ppo import MultiObjectivePpo
from components.learning.rollouts import score_completions
from components.models.backbone import choose_devices
from components.models.eight_bit import check_support
from components.models.rewards.reward_section import RewardFunction, response_reward
from components.models.samples import SampleKey
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.store import Adapter, AdapterHash


class MultiObjectiveTrainer(PolicyClient):
    """Trains the shared adapter, computes the objectives' gradients, and measures their rewards."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        super().__init__(recipe, device)
        if not isinstance(recipe.federation.options, MultiObjectiveMethod):
            raise TypeError("the trainer 'multi-objective' needs the options of a MultiObjectiveMethod")
        self._options = recipe.federation.options
        if self._local.wrap is not None:
            raise TypeError(
                f"{type(self).__name__} trains by PPO on completions, around which no loss is put"
            )
        self._rewards = recipe.rewards
        self._device = device
        runtime = recipe.runtime
        self._is_alone = runtime.task_runner == "ray" or len(choose_devices(runtime.devices)) == 1
        self._loaded: dict[str, tuple[Path | None, RewardFunction]] = {}  # with the folders of trained ones

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Train on the client's prompts, or compute gradients; other jobs as of all clients with policies."""
        match job:
            case TrainJob():
                return self._train(job, context)
            case GradientJob():
                return self._gradients(job, context)
            case _:
                return super().run(job, context)

    def _train(self, job: TrainJob, context: ClientContext) -> ClientResult:
        """The round's local steps; the private state is written before the update is sent."""
        rows = context.rows("train")
        prompts = unique_prompts(rows)
        ppo = self._load_ppo(job, context, len(prompts), job.objective_weights)
        trained = ppo.train(prompts)
        state = PrivateState(ppo.tensors(), ppo.numbers())
        saved = context.store.save(job.key(), job.previous_job_key, state)
        series = {weight_series(name): ppo.history[weight_series(name)] for name in self._options.objectives}
        return ClientResult(
            tensors=self.resident.slot.read(),
            rows=len(rows),
            metrics=Metrics(scalars=ppo.metrics(trained), series=series),
            kept_bytes=saved.size,
        )

    def _gradients(self, job: GradientJob, context: ClientContext) -> ClientResult:
        """The gradient of each objective at the adapter, averaged over one batch of completions.

        The client's state stays as it is.
        """
        start = time.perf_counter()
        rows = context.rows("train")
        prompts = unique_prompts(rows)
        ppo = self._load_ppo(job, context, len(prompts))
        gradients, rollout = ppo.mean_gradients(prompts)
        figures = {"tokens": int(rollout.lengths.sum()), "seconds": time.perf_counter() - start}
        return ClientResult(
            tensors=self._split_gradients(gradients),
            rows=len(rows),
            metrics=Metrics(scalars=rollout.figures() | figures),
        )

    def measure_rewards(self, adapter: AdapterHash, context: ClientContext) -> Metrics:
        """Mean score of each objective's first reward on completions of held-out prompts, of any adapter.

        `kl` is the KL to the reference (nats per completion), and `prompts` the number of prompts. The
        completions of all adapters have the same seed.
        """
        prompts = context.held_out_prompts(self._options.reward_prompts, self._seed)
        if not prompts:
            raise TrainingError(
                "there are no held-out prompts to measure rewards on: raise the source's own options for"
                " them, or data.test"
            )
        objectives = self._options.objectives
        rewards = {name: self._load_reward(names[0], context) for name, names in objectives.items()}
        self.resident.slot.load(context.load_adapter(adapter))
        scores = defaultdict(list)
        kl = 0.0
        ppo = self._options.ppo
        seed = derive(self._seed, "reward prompts")
        size = self._config.batch_size  # of the batches that are scored, as in training
        # The answers of all batches are sampled together, and are those of each batch by itself.
        keys = [SampleKey(derive(seed, n - n % size), n % size) for n in range(len(prompts))]
        self.resident.model.eval()
        answers = self.resident.policy.generate(prompts, keys, ppo.temperature)
        for begin in range(0, len(prompts), size):
            batch = prompts[begin : begin + size]
            rollout = score_completions(self.resident, batch, answers[begin : begin + size], rewards, ppo)
            for name, column in rollout.scores.items():
                scores[name].append(column)
            kl += rollout.kl * len(batch) / len(prompts)
        scalars = {name: float(np.concatenate(columns).mean()) for name, columns in scores.items()}
        return Metrics(scalars=scalars | {"kl": kl, "prompts": len(prompts)})

    def _load_ppo(
        self,
        job: TrainJob | GradientJob,
        context: ClientContext,
        prompts: int,
        weights: Sequence[float] = (),
    ) -> MultiObjectivePpo:
        """PPO at the job's adapter, from what the client kept; `prompts` is the number of its prompts."""
        config = self._config
        self.resident.slot.load(context.load_adapter(job.adapter))
        rewards = self._client_rewards(context)
        objective = self._options.build_objective(weights)
        state = context.private_state() or PrivateState({})
        training = Training(
            config.local_steps_for(prompts * self._options.ppo.estimator.samples),
            config.batch_size,
            config.optimizer,
            job.seed,
            config.micro_batch_size,
        )
        return MultiObjectivePpo(self.resident, rewards, objective, training, state.numbers, state.tensors)

    def _client_rewards(self, context: ClientContext) -> dict[str, RewardFunction]:
        """The client's reward of each objective."""
        return {
            objective: self._load_reward(context.assigned_reward(names), context)
            for objective, names in self._options.objectives.items()
        }

    def _load_reward(self, name: str, context: ClientContext) -> RewardFunction:
        folder = context.trained_reward(name)
        if name not in self._loaded or self._loaded[name][0] != folder:
            reward = response_reward(self._rewards[name])
            if not self._is_alone:
                reward = reward.without_tf32()
            self._loaded[name] = (folder, reward.load(self._device, folder))
        return self._loaded[name][1]

    def _split_gradients(self, gradients: torch.Tensor) -> Adapter:
        """Gradients [M, P] as tensors by objective and name."""
        named = self.resident.slot.named
        sizes = [parameter.numel() for parameter in named.values()]
        tensors = {}
        for objective, row in zip(self._options.objectives, gradients.cpu(), strict=True):
            for (name, parameter), part in zip(named.items(), torch.split(row, sizes), strict=True):
                tensors[gradient_name(objective, name)] = part.reshape(parameter.shape).clone()
        return tensors


def unique_prompts(rows: Sequence[Pair]) -> list[str]:
    """A client's distinct prompts, in the order of its pairs.

    Raises:
        TrainingError: it has none.
    """
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    if not prompts:
        raise TrainingError("there are no prompts to answer")
    return prompts
