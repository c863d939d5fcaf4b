"""The trainer of the policy: on chosen completions, by DPO, or by PPO on the clients' own pairs.

The reference of DPO and PPO is the frozen backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import (
    DpoObjective,
    LocalObjective,
    OfflinePpoObjective,
    PersonalModules,
    Recipe,
    SftObjective,
)
from components.data.records import PairRow, Pairs
from components.federation.clients.base import ClientResult, unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.protocol import Job, TrainJob, method_of
from components.learning.local import LocalTraining, TrainingMetrics
from components.learning.preference_scores import Array, PreferenceScores
from components.learning.references import ReferenceCache
from components.models.eight_bit import check_support
from components.results import Metrics

if TYPE_CHECKING:
    import torch

    from components.learning.offline_ppo import OfflinePPOMetrics
    from components.models.adapters import Adapter
    from components.models.policy import Policy
    from components.models.resident import ResidentPolicy
    from components.models.selector import Comparison


class ResidentPolicyTrainer:
    """Shared base of the policy's trainers: the resident model, its reference, and scores of pairs.

    Attributes:
        resident: the resident policy.
        references: log-probabilities under the reference that were computed so far.
    """

    def __init__(self, recipe: Recipe, device: str, modules: PersonalModules | None = None) -> None:
        from components.models.resident import ResidentPolicy

        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        method = method_of(recipe.federation)
        self._federation = recipe.federation
        self._objective: LocalObjective = method.local_objective
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
        parameters: Sequence[torch.nn.Parameter],
        objective: OfflinePpoObjective,
        training: LocalTraining,
    ) -> OfflinePPOMetrics:
        """Train parameters by PPO on the client's pairs, from the values in the resident model.

        The passes over the pairs take as many pairs as the steps of `training` would.
        """
        from components.learning.offline_ppo import (
            ScoredPairs,
            draw_ppo_minibatches,
            train_offline_ppo,
            unique_rows,
        )

        used = unique_rows(draw_ppo_minibatches(len(rows), objective, training))
        scores = context.pair_scores(rows, self._reward)
        data = ScoredPairs(rows, scores, self.reference_token_logprobs(rows, used))
        return train_offline_ppo(self.resident, data, parameters, objective, training)

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

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Train on the client's training pairs."""
        if not isinstance(job, TrainJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        config = self._federation
        training = LocalTraining(
            config.local_steps_for(len(rows)),
            config.batch_size,
            config.optimizer,
            job.seed,
            self._proximal_weight,
            micro_batch_size=config.micro_batch_size,
        )
        adapter, metrics = self._train(rows, context, context.load_adapter(job.adapter), training)
        return ClientResult(tensors=adapter, rows=len(rows), metrics=metrics)

    def _train(
        self, rows: Sequence[PairRow], context: ClientContext, adapter: Adapter, training: LocalTraining
    ) -> tuple[Adapter, Metrics]:
        from components.learning.dpo import train_dpo
        from components.learning.sft import train_sft

        match self._objective:
            case SftObjective():
                trained, metrics = train_sft(self.resident, rows, adapter, training)
            case DpoObjective():
                reference = self.reference_logprobs(rows, drawn_rows(len(rows), training))
                beta = self._objective.beta
                trained, metrics = train_dpo(self.resident, rows, adapter, reference, beta, training)
            case OfflinePpoObjective():
                self.resident.slot.load(adapter)
                parameters = self.resident.slot.parameters
                ppo = self.train_ppo(rows, context, parameters, self._objective, training)
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
    """A training by PPO as a client's metrics."""
    ppo = Metrics(scalars={"kl": metrics.kl, "stopped": float(metrics.stopped)})
    return training_metrics(metrics).merged(ppo)
