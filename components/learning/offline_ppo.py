"""PPO on existing pairs that a frozen reward model scores, a baseline of FedPDPO (D.3.1).

    each round, from the policy pi_old that the client received:
        reward    = score - kl (log pi_old(y|x) - log pi_ref(y|x)) of each completion
        advantage = plus and minus half the difference of the pair's two rewards, at every token
        epochs over all pairs in minibatches; each is a step along the gradient of
            loss  = clipped policy loss - c2 x entropy
        unless its minibatch shows that the KL from pi_old exceeds the target: then the round ends

The paper specifies only "computing advantages from reward differences", and a parameter of GAE.
With a critic, the KL penalty is a reward of each token, the score less the pair's mean score is one
of the last token, and the advantages are GAE of these, whitened over the round's tokens; the loss
of the value head is added. The value head is linear in the hidden states that tokens are predicted
from, and passes no gradient to them. It starts at 0 before a client's first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.config import CriticAdvantage, OfflinePpoObjective, PairPpoObjective
from components.learning.dpo import count_pair_tokens
from components.learning.local import (
    LocalTraining,
    LoopOptions,
    ParameterGroup,
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

    from components.models.adapters import Adapter
    from components.models.logprobs import CompletionTokens


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
        pairs: number of distinct pairs of the steps that were taken.
        stopped: whether the round ended before its last minibatch, since kl exceeded its target.
    """

    kl: float
    pairs: int
    stopped: bool


@dataclass(frozen=True)
class OfflineRollout:
    """Completions of n pairs under the received policy; two rows per pair, chosen before rejected.

    Attributes:
        old: [2 n, T], log-probabilities of the tokens.
        advantages: [2 n, T], 0 at padding.
        values: [2 n, T], of the critic; None without one.
        returns: [2 n, T], advantages before whitening + values; None without a critic.
        mask: [2 n, T] bool.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor | None
    returns: torch.Tensor | None
    mask: torch.Tensor


class Critic:
    """A linear value head and the options of its advantages.

    Attributes:
        config: lambda, coefficient and learning rate.
        head: the head, fp32.
    """

    def __init__(self, config: CriticAdvantage, hidden_size: int, device: str) -> None:
        """A head whose weights and bias are 0."""
        import torch

        self.config = config
        self.head = torch.nn.Linear(hidden_size, 1).to(device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def load(self, tensors: Adapter) -> None:
        """Replace the head's values by those that `read` returned."""
        self.head.load_state_dict(tensors)

    def read(self) -> Adapter:
        """The head's tensors by name, fp32 on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.head.state_dict().items()}

    def values(self, tokens: CompletionTokens) -> torch.Tensor:
        """Values [M, T] of the tokens of completions, without gradients of their hidden states."""
        values: torch.Tensor = self.head(tokens.states.detach())[..., 0]
        return values


@dataclass(frozen=True)
class TrainedModules:
    """What a training by PPO changes.

    Attributes:
        parameters: parameters of the policy, at the rate of the training's optimizer.
        groups: further parameters of the policy, at rates of their own.
        critic: the critic; None for sequence-level advantages.
    """

    parameters: Sequence[torch.nn.Parameter]
    groups: tuple[ParameterGroup, ...] = ()
    critic: Critic | None = None


def draw_ppo_minibatches(rows: int, config: PairPpoObjective, seed: int) -> list[np.ndarray]:
    """Draw the minibatches of a round: `config.epochs` passes over all pairs (FedPDPO D.3.1).

    Args:
        rows: number of pairs of the client.
        config: epochs and minibatch.
        seed: the order of each pass is a function of it.

    Returns:
        index arrays; the last one of a pass may be shorter.
    """
    minibatches = []
    for epoch in range(config.epochs):
        order = generator(seed, "ppo epoch", epoch).permutation(rows)
        minibatches += [order[start : start + config.minibatch] for start in range(0, rows, config.minibatch)]
    return minibatches


def unique_rows(minibatches: Iterable[np.ndarray]) -> np.ndarray:
    """The distinct rows of minibatches, sorted; [n]."""
    return np.unique(np.concatenate(list(minibatches)))


def compute_rollout(
    resident: ResidentPolicy, data: ScoredPairs, config: PairPpoObjective, critic: Critic | None = None
) -> OfflineRollout:
    """Evaluate n pairs under the policy in the resident model.

    Args:
        resident: the model.
        data: the pairs.
        config: coefficients.
        critic: gives the values of GAE; None for sequence-level advantages.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    old: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    resident.model.eval()
    with torch.no_grad():
        for pair in data.pairs:  # one at a time, so that values do not depend on the other pairs
            tokens = resident.tokens([resident.encode_pair(pair)])
            old += [row[mask] for row, mask in zip(tokens.logprobs, tokens.mask, strict=True)]
            if critic is not None:
                token_values = critic.values(tokens)
                values += [row[mask] for row, mask in zip(token_values, tokens.mask, strict=True)]
    reference = [row.to(old[0]) for completions in data.reference for row in completions]
    penalties = [config.kl * (now - ref) for now, ref in zip(old, reference, strict=True)]
    mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in old], batch_first=True)
    padded = pad_sequence(old, batch_first=True)
    if critic is None:
        advantages = sequence_advantages(data.scores, penalties)
        return OfflineRollout(padded, advantages[:, None] * mask, None, None, mask)
    rewards = pad_sequence(_token_rewards(data.scores, penalties), batch_first=True)
    padded_values = pad_sequence(values, batch_first=True)
    advantages, returns = compute_gae(rewards, padded_values, mask, 1.0, critic.config.gae_lambda)
    return OfflineRollout(padded, whiten(advantages, mask), padded_values, returns, mask)


def sequence_advantages(scores: np.ndarray, penalties: Sequence[torch.Tensor]) -> torch.Tensor:
    """Half the difference of the two rewards of each pair, with opposite signs.

    Args:
        scores: [n, 2], scores of chosen and rejected.
        penalties: KL penalty of each token of the 2 n completions, chosen before rejected.

    Returns:
        [2 n], advantages of the completions.
    """
    import torch

    sums = torch.stack([row.sum() for row in penalties])
    rewards = (torch.as_tensor(scores).to(sums).reshape(-1) - sums).reshape(-1, 2)
    return (rewards - rewards.mean(1, keepdim=True)).reshape(-1)


def _token_rewards(scores: np.ndarray, penalties: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Minus the penalty at each token, and at the last one plus the score less the pair's mean score."""
    centered = scores - scores.mean(axis=1, keepdims=True)
    rewards = [-row for row in penalties]
    for row, score in zip(rewards, centered.reshape(-1), strict=True):
        row[-1] += float(score)
    return rewards


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
        critic: Critic | None = None,
    ) -> None:
        """Compute the rollout.

        Args:
            resident: the model.
            data: N pairs.
            rows: indices of the pairs that minibatches may contain; the other pairs are not used.
            config: coefficients.
            critic: see `compute_rollout`; its loss is added.
        """
        self.distances: list[float] = []
        self._resident = resident
        self._config = config
        self._critic = critic
        self._rollout = compute_rollout(resident, data.select(rows), config, critic)
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
        if self._critic is not None:
            losses = losses + self._critic.config.value * self._value_losses(self._critic, tokens, places)
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

    @property
    def exceeds_target(self) -> bool:
        """Whether the last minibatch shows a policy beyond the target KL."""
        return bool(self.distances) and self.distances[-1] > self._config.target_kl

    def _value_losses(self, critic: Critic, tokens: CompletionTokens, places: list[int]) -> torch.Tensor:
        rollout = self._rollout
        if rollout.values is None or rollout.returns is None:
            raise TypeError("the rollout has no values")
        width = tokens.mask.shape[1]
        old, returns = rollout.values[places, :width], rollout.returns[places, :width]
        return value_loss(critic.values(tokens), old, returns, self._config.clip)

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
    minibatches: Sequence[np.ndarray],
    modules: TrainedModules,
    config: OfflinePpoObjective,
    training: LocalTraining,
) -> OfflinePPOMetrics:
    """Train modules of a resident model by PPO on one client's pairs, in place.

    Dropout is off, because with it the ratio to the received policy would be noisy.

    Args:
        resident: the model; it holds the received policy.
        data: N pairs; only those of the minibatches are used.
        minibatches: index arrays, a step each; see `draw_ppo_minibatches`.
        modules: the parameters to train, and the critic, whose gradient is clipped apart.
        config: coefficients.
        training: optimizer, seed and proximal term; its steps, its batch size and the optimizer's
            accumulation are not used.

    Raises:
        TrainingError: a loss is not finite.
    """
    critic = modules.critic
    loss = OfflinePPOLoss(resident, data, unique_rows(minibatches), config, critic)
    groups = list(modules.groups)
    if critic is not None:
        groups.append(ParameterGroup(list(critic.head.parameters()), critic.config.lr))
    policy = [*modules.parameters, *(p for group in modules.groups for p in group.parameters)]
    metrics = train(
        resident.model,
        modules.parameters,
        minibatches,
        add_proximal_term(loss, policy, training.proximal_weight),
        training.optimizer.model_copy(update={"accumulation": 1}),
        LoopOptions(
            seed=derive(training.seed, "ppo"),
            dropout=False,
            micro_batch_size=training.micro_batch_size,
            progress=training.progress,
            before_minibatch=loss.begin_minibatch,
            should_stop=lambda: loss.exceeds_target,
            groups=tuple(groups),
        ),
    )
    steps = len(metrics.losses)
    return OfflinePPOMetrics(
        losses=metrics.losses,
        gradient_norms=metrics.gradient_norms,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        kl=loss.distances[-1],
        pairs=len(unique_rows(minibatches[:steps])),
        stopped=steps < len(minibatches),
    )
