"""PPO on existing pairs that a frozen reward model scores, a baseline of FedPDPO (D.3.1).

    each round, from the policy pi_old that the client received:
        reward     = -kl (log pi_old - log pi_ref) at each token of a completion, plus at the last
                     one its score minus the mean score of its pair
        advantages = GAE of the rewards, whitened over the round's tokens
        epochs over the pairs in minibatches, until the estimated KL from pi_old exceeds its target:
            loss   = clipped policy loss + c1 x clipped value loss - c2 x entropy

The two completions of a pair thus get half the difference of their scores, with opposite signs. The
paper specifies only "computing advantages from reward differences". The value head reads the hidden
states that tokens are predicted from. It starts at 0 in each round, and so does the optimizer's
state, because clients have no state between rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from components.config import OfflinePpoObjective, PairPpoObjective
from components.learning.dpo import count_pair_tokens
from components.learning.local import (
    LocalTraining,
    LoopOptions,
    TrainingMetrics,
    add_proximal_term,
    train,
)
from components.learning.ppo import (
    approximate_kl,
    compute_gae,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)
from components.models.resident import Pair, ResidentPolicy
from components.seeding import derive, generator

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs with their scores and their log-probabilities under the reference.

    Attributes:
        pairs: N records with prompt, chosen and rejected.
        scores: [N, 2], scores of chosen and rejected.
        reference: for each pair, the log-probabilities of the tokens of chosen and of rejected
            under the reference. Entries of pairs that minibatches do not contain may be empty.
    """

    pairs: Sequence[Pair]
    scores: np.ndarray
    reference: Sequence[Sequence[torch.Tensor]]

    def select(self, indices: np.ndarray) -> ScoredPairs:
        """Some of the pairs, in the order of the indices."""
        return ScoredPairs(
            pairs=[self.pairs[n] for n in indices],
            scores=self.scores[indices],
            reference=[self.reference[n] for n in indices],
        )


@dataclass(frozen=True)
class OfflinePPOMetrics(TrainingMetrics):
    """Metrics of a round of PPO.

    Attributes:
        kl: estimated KL from the received policy in the last minibatch (nats per token).
        stopped: whether the round ended before its last step.
    """

    kl: float
    stopped: bool


@dataclass(frozen=True)
class OfflineRollout:
    """Completions of n pairs under the received policy; two rows per pair, chosen before rejected.

    Attributes:
        old: [2 n, T], log-probabilities of the tokens.
        advantages: [2 n, T], whitened.
        returns: [2 n, T].
        mask: [2 n, T] bool.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor


def draw_ppo_minibatches(rows: int, config: OfflinePpoObjective, training: LocalTraining) -> list[np.ndarray]:
    """Draw the minibatches of a round: `config.epochs` passes over a sample of the client's pairs.

    All passes together have at most as many rows as the steps of the training; the sample has at
    least one minibatch, if the client has as many pairs.

    Args:
        rows: number of pairs of the client.
        config: epochs and minibatch.
        training: steps and batch size determine how many pairs go through the model; the sample and
            its orders are functions of the seed.
    """
    budget = training.minibatches * training.batch_size
    count = min(rows, max(config.minibatch, budget // config.epochs))
    sample = generator(training.seed, "ppo pairs").permutation(rows)[:count]
    minibatches = []
    for epoch in range(config.epochs):
        order = sample[generator(training.seed, "ppo epoch", epoch).permutation(count)]
        minibatches += [
            order[start : start + config.minibatch] for start in range(0, count, config.minibatch)
        ]
    return minibatches


def unique_rows(minibatches: Iterable[np.ndarray]) -> np.ndarray:
    """The distinct rows of minibatches, sorted; [n]."""
    return np.unique(np.concatenate(list(minibatches)))


def compute_rollout(resident: ResidentPolicy, data: ScoredPairs, config: PairPpoObjective) -> OfflineRollout:
    """Evaluate n pairs under the policy in the resident model, with a value of 0 at every token."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    old: list[torch.Tensor] = []
    resident.model.eval()
    with torch.no_grad():
        for pair in data.pairs:  # one at a time, so that values do not depend on the other pairs
            tokens = resident.tokens([resident.encode_pair(pair)])
            old += [values[mask] for values, mask in zip(tokens.logprobs, tokens.mask, strict=True)]
    reference: list[torch.Tensor] = []
    for completions in data.reference:
        reference += completions
    rewards = [-config.kl * (now - ref.to(now)) for now, ref in zip(old, reference, strict=True)]
    centered = data.scores - data.scores.mean(axis=1, keepdims=True)
    for values, score in zip(rewards, centered.reshape(-1), strict=True):
        values[-1] += float(score)
    padded = pad_sequence(rewards, batch_first=True)
    mask = pad_sequence([torch.ones_like(values, dtype=torch.bool) for values in old], batch_first=True)
    advantages, returns = compute_gae(padded, torch.zeros_like(padded), mask, 1.0, config.gae_lambda)
    return OfflineRollout(
        old=pad_sequence(old, batch_first=True),
        advantages=whiten(advantages, mask),
        returns=returns,
        mask=mask,
    )


class OfflinePPOLoss:
    """The PPO loss of pairs by their indices, relative to the policy at construction.

    Attributes:
        distances: estimated KL from that policy of each minibatch so far (nats per token).
    """

    def __init__(
        self,
        resident: ResidentPolicy,
        data: ScoredPairs,
        rows: np.ndarray,
        config: PairPpoObjective,
        value_head: torch.nn.Linear | None = None,
        value_weight: float = 0.0,
    ) -> None:
        """Compute the rollout.

        Args:
            resident: the model.
            data: N pairs.
            rows: indices of the pairs that minibatches may contain; the other pairs are not used.
            config: coefficients.
            value_head: head on the hidden states [..., H]; with None, values are 0 and have no
                loss.
            value_weight: coefficient of the value loss (c1).
        """
        self.distances: list[float] = []
        self._resident = resident
        self._config = config
        self._value_head = value_head
        self._value_weight = value_weight
        self._rollout = compute_rollout(resident, data.select(rows), config)
        self._encoded = {int(n): resident.encode_pair(data.pairs[n]) for n in rows}
        self._places = {int(n): place for place, n in enumerate(rows)}
        self._remaining_rows = 0
        self._minibatch_tokens = 0

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, int]:
        """The losses [n] of n pairs by their indices, and the number of tokens."""
        config = self._config
        rows = [self._encoded[int(n)] for n in indices]
        places = self._rollout_rows(indices)
        tokens = self._resident.tokens(rows)
        width = tokens.mask.shape[1]
        old = self._rollout.old[places, :width]
        advantages = self._rollout.advantages[places, :width]
        if not self._remaining_rows:
            self.begin_minibatch([indices])
        self._remaining_rows -= len(indices)
        share = int(tokens.mask.sum()) / self._minibatch_tokens
        self.distances[-1] += share * approximate_kl(tokens.logprobs, old, tokens.mask)
        losses = policy_loss(tokens.logprobs, old, advantages, config.clip)
        losses = losses - config.entropy * tokens.entropies
        if self._value_head is not None:
            values = self._value_head(tokens.states)[..., 0]
            returns = self._rollout.returns[places, :width]
            old_values = values.new_zeros(values.shape)
            losses = losses + self._value_weight * value_loss(values, old_values, returns, config.clip)
        pair_losses = masked_mean(losses, tokens.mask, per_row=True).reshape(len(rows), 2).mean(1)
        return pair_losses, count_pair_tokens(rows)

    def begin_minibatch(self, micro_batches: Sequence[np.ndarray]) -> None:
        """Begin a minibatch, whose distance is that of all tokens of its micro-batches.

        Args:
            micro_batches: indices of the pairs, in the order of the calls that follow.
        """
        indices = np.concatenate(micro_batches)
        self._remaining_rows = len(indices)
        self._minibatch_tokens = int(self._rollout.mask[self._rollout_rows(indices)].sum())
        self.distances.append(0.0)

    def _rollout_rows(self, indices: np.ndarray) -> list[int]:
        """Rows of the rollout with chosen and rejected of each pair."""
        rows = []
        for n in indices:
            place = self._places[int(n)]
            rows += [2 * place, 2 * place + 1]
        return rows


def train_offline_ppo(
    resident: ResidentPolicy,
    data: ScoredPairs,
    parameters: Sequence[torch.nn.Parameter],
    config: OfflinePpoObjective,
    training: LocalTraining,
) -> OfflinePPOMetrics:
    """Train parameters of a resident model by PPO on one client's pairs, in place.

    Dropout is off, because with it the ratio to the received policy would be noisy.

    Args:
        resident: the model; it holds the received policy.
        data: N pairs; only those that `draw_ppo_minibatches` draws are used.
        parameters: the parameters to train.
        config: coefficients.
        training: see `draw_ppo_minibatches`. Each minibatch is a step, so the optimizer's
            accumulation is not used.

    Raises:
        TrainingError: a loss is not finite.
    """
    minibatches = draw_ppo_minibatches(len(data.pairs), config, training)
    value_head = _build_value_head(resident)
    loss = OfflinePPOLoss(resident, data, unique_rows(minibatches), config, value_head, config.value)
    metrics = train(
        resident.model,
        [*parameters, *value_head.parameters()],
        minibatches,
        add_proximal_term(loss, parameters, training.proximal_weight),
        training.optimizer.model_copy(update={"accumulation": 1}),
        LoopOptions(
            seed=derive(training.seed, "ppo"),
            dropout=False,
            micro_batch_size=training.micro_batch_size,
            progress=training.progress,
            before_minibatch=loss.begin_minibatch,
            should_stop=lambda: bool(loss.distances) and loss.distances[-1] > config.target_kl,
        ),
    )
    return OfflinePPOMetrics(
        losses=metrics.losses,
        gradient_norms=metrics.gradient_norms,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        kl=loss.distances[-1],
        stopped=len(metrics.losses) < len(minibatches),
    )


def _build_value_head(resident: ResidentPolicy) -> torch.nn.Linear:
    """A value head whose weights and bias are 0."""
    import torch

    base = cast("PreTrainedModel", resident.model.get_base_model())
    embeddings = cast(torch.nn.Embedding, base.get_input_embeddings())
    head = torch.nn.Linear(embeddings.embedding_dim, 1).to(resident.policy.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head
