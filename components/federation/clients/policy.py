"""The trainer of the policy: on chosen completions, by DPO, or by PPO on the clients' own pairs.

The reference of DPO and PPO is the frozen backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from components.config import (
    DpoObjective,
    LocalObjective,
    OfflinePpoObjective,
    OptimizerConfig,
    PersonalModules,
    Recipe,
    RecipeError,
    SftObjective,
)
from components.data.records import PairRow, Pairs
from components.federation.clients.base import ClientResult, unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.clients.private import PrivateState
from components.federation.clients.rates import RateMemory
from components.federation.protocol import Job, TrainJob, method_of
from components.learning.local import LocalTraining, TrainingMetrics
from components.learning.preference_scores import Array, PreferenceScores
from components.learning.references import ReferenceCache
from components.models.eight_bit import check_support
from components.results import Metrics

if TYPE_CHECKING:
    import torch

    from components.learning.offline_ppo import Critic, OfflinePPOMetrics, ScoredPairs, TrainedModules
    from components.models.adapters import Adapter
    from components.models.policy import Policy
    from components.models.resident import ResidentPolicy
    from components.models.selector import Comparison


CRITIC = "critic."
"""Prefix of the critic's tensors in a client's private store."""


class ResidentPolicyTrainer:
    """Shared base of the policy's trainers: the resident model, its reference, and scores of pairs.

    Attributes:
        adds_proximal_term: whether training adds the method's proximal term; a method with such a term
            is refused otherwise.
        resident: the resident policy.
        references: log-probabilities under the reference that were computed so far.

    Raises:
        RecipeError: the method has a proximal term, and the trainer adds none.
    """

    adds_proximal_term: ClassVar[bool] = False

    def __init__(self, recipe: Recipe, device: str, modules: PersonalModules | None = None) -> None:
        from components.models.resident import ResidentPolicy

        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        method = method_of(recipe.federation)
        if method.proximal_weight and not self.adds_proximal_term:
            raise RecipeError(
                f"federation.method={recipe.federation.method}: its trainer, {type(self).__name__}, adds no"
                f" proximal term, and the method's has the weight {method.proximal_weight:g}: use the trainer"
                " 'policy', or set the weight to 0"
            )
        self._federation = recipe.federation
        self._objective: LocalObjective = method.local_objective
        self._method = method
        self._proximal_weight = method.proximal_weight
        self._reward = next(iter(recipe.rewards), "")
        self.resident: ResidentPolicy = ResidentPolicy(recipe.policy, device, modules)
        for factor in method.frozen_factors:
            self.resident.slot.freeze(factor)
        self.references = ReferenceCache()

    @property
    def model(self) -> torch.nn.Module:
        """The PEFT-wrapped backbone."""
        return self.resident.model

    def initial_adapter(self, seed: int) -> Adapter:
        """Initial values of the shared LoRA."""
        return self.resident.slot.initial_adapter(seed)

    def score_pairs(self, pairs: Pairs, adapters: Sequence[Adapter]) -> PreferenceScores:
        """Log-ratios to the reference, and log-likelihoods, under each adapter.

        An adapter whose factors B are all zero is the reference itself, and nothing is computed for
        it.
        """
        from components.learning.dpo import pair_logprobs

        reference = self.reference_logprobs(pairs)
        logprobs = np.zeros((len(adapters), len(pairs), 2))
        for row, adapter in zip(logprobs, adapters, strict=True):
            if any(tensor.any() for name, tensor in adapter.items() if ".lora_B." in name):
                self.resident.slot.load(adapter)
                row[:] = pair_logprobs(self.resident, pairs, self._score_batch_size)
            else:
                row[:] = reference
        return self._preference_scores(pairs, logprobs, reference)

    def compare(self, comparisons: Sequence[Comparison], adapters: Sequence[Adapter]) -> Array:
        """Refused: a policy is no selector."""
        raise TypeError("a policy generates completions and does not compare any")

    def score_client_pairs(self, pairs: Pairs, adapter: Adapter, context: ClientContext) -> PreferenceScores:
        """Scores by the adapter, which the client uses as it is."""
        return self.score_pairs(pairs, [adapter])

    def resident_policy(self) -> Policy:
        """The resident policy."""
        return self.resident.policy

    def client_policy(self, adapter: Adapter, context: ClientContext) -> Policy:
        """The resident policy with the adapter, which the client uses as it is."""
        self.resident.slot.load(adapter)
        return self.resident.policy

    def reference_logprobs(self, pairs: Pairs, used: npt.NDArray[np.int64] | None = None) -> Array:
        """Summed log-probabilities of chosen and rejected under the reference, [N, 2].

        Args:
            pairs: N pairs.
            used: indices of the pairs that are needed, the others' values are NaN; None computes
                all.
        """
        rows = [self.resident.encode_pair(pair) for pair in pairs]
        needed = None if used is None else set(used.tolist())
        return self.references.completion_logprobs(self.resident, rows, self._score_batch_size, needed)

    def reference_token_logprobs(self, pairs: Pairs, used: npt.NDArray[np.int64]) -> list[list[torch.Tensor]]:
        """Log-probabilities of each token of chosen and of rejected under the reference.

        Empty for unused pairs.
        """
        rows = [self.resident.encode_pair(pair) for pair in pairs]
        needed = set(used.tolist())
        return self.references.token_logprobs(self.resident, rows, self._score_batch_size, needed)

    def train_ppo(
        self,
        rows: Sequence[PairRow],
        context: ClientContext,
        minibatches: Sequence[npt.NDArray[np.int64]],
        modules: TrainedModules,
        objective: OfflinePpoObjective,
        training: LocalTraining,
    ) -> OfflinePPOMetrics:
        """Train modules by PPO on the client's pairs, from the values in the resident model.

        Args:
            rows: the client's training pairs.
            context: has their scores.
            minibatches: index arrays, a step each.
            modules: what is trained.
            objective: the coefficients.
            training: optimizer and seed.
        """
        from components.learning.offline_ppo import train_offline_ppo, unique_rows

        data = self.scored_pairs(rows, context, unique_rows(minibatches))
        return train_offline_ppo(self.resident, data, minibatches, modules, objective, training)

    def scored_pairs(
        self, rows: Sequence[PairRow], context: ClientContext, used: npt.NDArray[np.int64]
    ) -> ScoredPairs:
        """The client's pairs with the reward's scores, and with the reference of those that are used."""
        from components.learning.offline_ppo import ScoredPairs

        scores = context.pair_scores(rows, self._reward)
        return ScoredPairs(rows, scores, self.reference_token_logprobs(rows, used))

    def decayed_optimizer(self, rates: RateMemory) -> OptimizerConfig:
        """The optimizer of a client's round, at the method's learning rate and the client's decay of it."""
        config = self._federation
        lr = rates.learning_rate(self._method.learning_rate(config), config.rate_decay)
        return config.optimizer.model_copy(update={"lr": lr})

    def load_critic(self, state: PrivateState | None) -> Critic | None:
        """The client's critic, as it was after its last accepted job; None without one."""
        from components.learning.offline_ppo import Critic

        config = self._objective.critic if isinstance(self._objective, OfflinePpoObjective) else None
        if config is None:
            return None
        hidden_size = int(self.resident.model.config.get_text_config().hidden_size)
        critic = Critic(config, hidden_size, self.resident.policy.device)
        if state is not None:
            critic.load(critic_tensors(state.tensors))
        return critic

    def _preference_scores(
        self, pairs: Pairs, logprobs: Array, reference: Array, explicit: Array | None = None
    ) -> PreferenceScores:
        """Scores from log-probabilities [U, N, 2], the reference's [N, 2], and explicit margins [U, N]."""
        completions = [self.resident.encode_pair(pair)[1:] for pair in pairs]
        lengths = np.array([[len(tokens) for tokens in pair] for pair in completions]).reshape(len(pairs), 2)
        ratios = logprobs - reference
        per_token = logprobs / lengths
        margins_by_metric = {
            "summed": logprobs[..., 0] - logprobs[..., 1],
            "per_token": per_token[..., 0] - per_token[..., 1],
        }
        if explicit is not None:
            margins_by_metric["explicit"] = explicit
        return PreferenceScores(ratios[..., 0] - ratios[..., 1], ratios[..., 0], margins_by_metric)

    @property
    def _score_batch_size(self) -> int:
        """Pairs per batch; scoring needs less memory than training."""
        return 2 * (self._federation.micro_batch_size or self._federation.batch_size)


class PolicyTrainer(ResidentPolicyTrainer):
    """Trains the shared adapter by the method's local objective."""

    adds_proximal_term = True

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Train on the client's training pairs."""
        if not isinstance(job, TrainJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        config = self._federation
        previous = context.private_state()
        rates = RateMemory.of(previous.numbers if previous else {})
        training = LocalTraining(
            config.local_steps_for(len(rows)),
            config.batch_size,
            self.decayed_optimizer(rates),
            job.seed,
            self._proximal_weight,
            micro_batch_size=config.micro_batch_size,
        )
        critic = self.load_critic(previous)
        adapter, metrics = self._train(rows, context, context.load_adapter(job.adapter), training, critic)
        kept_bytes = 0
        if self._method.keeps_client_state(config):
            if config.rate_decay is not None:
                rates = rates.after_round(metrics.scalars["dpo"], config.rate_decay)
                metrics = metrics.merged(Metrics(scalars={"decay": rates.decay}))
            state = PrivateState(pack_critic(critic), rates.numbers())
            kept_bytes = context.store.save(job.key(), job.previous_job_key, state).size
        return ClientResult(tensors=adapter, rows=len(rows), metrics=metrics, kept_bytes=kept_bytes)

    def _train(
        self,
        rows: Sequence[PairRow],
        context: ClientContext,
        adapter: Adapter,
        training: LocalTraining,
        critic: Critic | None,
    ) -> tuple[Adapter, Metrics]:
        from components.learning.dpo import train_dpo
        from components.learning.offline_ppo import TrainedModules, draw_ppo_minibatches
        from components.learning.sft import train_sft

        match self._objective:
            case SftObjective():
                trained, metrics = train_sft(self.resident, rows, adapter, training)
            case DpoObjective():
                reference = self.reference_logprobs(rows, drawn_rows(len(rows), training))
                beta = self._objective.beta
                trained, dpo = train_dpo(self.resident, rows, adapter, reference, beta, training)
                return trained, training_metrics(dpo).merged(Metrics(scalars={"dpo": dpo.dpo_loss}))
            case OfflinePpoObjective():
                self.resident.slot.load(adapter)
                modules = TrainedModules(self.resident.slot.parameters, critic=critic)
                minibatches = draw_ppo_minibatches(len(rows), self._objective, training.seed)
                ppo = self.train_ppo(rows, context, minibatches, modules, self._objective, training)
                return self.resident.slot.read(), ppo_metrics(ppo)
            case _:
                raise TypeError(f"{type(self).__name__} cannot train the objective '{self._objective.kind}'")
        return trained, training_metrics(metrics)


def drawn_rows(rows: int, training: LocalTraining) -> npt.NDArray[np.int64]:
    """Sorted indices of the rows that a training draws."""
    return np.unique(np.concatenate(list(training.draw_minibatches(rows))))


def training_metrics(metrics: TrainingMetrics) -> Metrics:
    """A local training as a client's metrics."""
    return Metrics(
        scalars={
            "loss_first": metrics.losses[0],
            "loss_last": metrics.losses[-1],
            "loss": sum(metrics.losses) / len(metrics.losses),
            "gradient_norm": sum(metrics.gradient_norms) / len(metrics.gradient_norms),
            "steps": len(metrics.losses),
            "tokens": metrics.tokens,
            "seconds": metrics.seconds,
        }
    )


def ppo_metrics(metrics: OfflinePPOMetrics) -> Metrics:
    """A training by PPO as a client's metrics.

    `steps` are those that were taken, `pairs` the distinct pairs of these, and `stopped` is 1 if the
    training ended at the target KL.
    """
    scalars = {"kl": metrics.kl, "pairs": float(metrics.pairs), "stopped": float(metrics.stopped)}
    return training_metrics(metrics).merged(Metrics(scalars=scalars))


def pack_critic(critic: Critic | None) -> Adapter:
    """The tensors of a critic as the client's private store names them; none without a critic."""
    return {} if critic is None else {f"{CRITIC}{name}": value for name, value in critic.read().items()}


def critic_tensors(tensors: Adapter) -> Adapter:
    """The tensors of the critic among those of a private store, by the critic's own names."""
    return {name.removeprefix(CRITIC): value for name, value in tensors.items() if name.startswith(CRITIC)}
