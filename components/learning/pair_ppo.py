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

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from components.config import PairPpoObjective
from components.config.local_objectives import CriticAdvantage, OfflinePpoObjective
from components.learning.client_data import ClientData
from components.learning.loop import Loss, Part, RowLosses, Rows, Trained, Training, split_rows
from components.learning.ppo import (
    approximate_kl,
    compute_gae,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)
from components.learning.preference import count_tokens
from components.models.logprobs import CompletionTokens
from components.models.store import Adapter
from components.seeding import generator

PREFIX = "critic."
"""Beginning of the names of a critic's tensors among those that a client keeps."""


class PairPpoLoss(Loss):
    """The PPO loss of pairs by their indices, relative to the policy at construction.

    Each pair has two rows in the tensors, chosen before rejected; T is the longest completion.
    """

    dropout = False
    accumulates = False

    @classmethod
    def draw_minibatches(
        cls, objective: PairPpoObjective, rows: int, training: Training, part: Part, round_seed: int
    ) -> list[Rows]:
        """A part of the minibatches of `objective.epochs` passes over all pairs (FedPDPO D.3.1)."""
        return list(part(draw_minibatches(rows, objective, round_seed)))

    def __init__(self, data: ClientData) -> None:
        if not isinstance(data.objective, PairPpoObjective):
            raise TypeError(f"the loss of PPO has no objective '{data.objective.kind}'")
        self.config = data.objective
        self.resident = data.resident
        self.critic: Critic | None = None
        if isinstance(data.objective, OfflinePpoObjective) and data.objective.critic is not None:
            self.critic = Critic(data.objective.critic, data)
            self.parameter_groups = ((list(self.critic.head.parameters()), data.objective.critic.lr),)
        self.encoded = {int(n): self.resident.encode(*data.pairs[n].texts) for n in data.used}
        self.places = {int(n): place for place, n in enumerate(data.used)}
        self.distances: list[float] = []  # KL from the received policy of each minibatch (nats per token)
        self.stopped = False
        self._minibatches: list[Rows] = []  # of the steps that were taken
        self._minibatch_tokens = 0
        self._compute_rollout(data)

    def _compute_rollout(self, data: ClientData) -> None:
        """Evaluate the used pairs in batches of similar length; the last bits depend on the batch."""
        used = [int(n) for n in data.used]
        rows = [self.encoded[n] for n in used]
        order = sorted(range(len(rows)), key=lambda place: sum(map(len, rows[place])))
        old: list[torch.Tensor] = [torch.empty(0)] * (2 * len(rows))
        values = list(old)
        self.resident.model.eval()
        with torch.no_grad():
            for start in range(0, len(order), data.batch_size):
                batch = order[start : start + data.batch_size]
                tokens = self.resident.tokens([rows[place] for place in batch])
                sides = [2 * place + side for place in batch for side in (0, 1)]
                for side, row, mask in zip(sides, tokens.logprobs, tokens.mask, strict=True):
                    old[side] = row[mask]
                if self.critic is not None:
                    token_values = self.critic.values(tokens)
                    for side, row, mask in zip(sides, token_values, tokens.mask, strict=True):
                        values[side] = row[mask]
        reference = [row.to(old[0]) for pair in data.reference_tokens() for row in pair]
        penalties = [self.config.kl * (now - ref) for now, ref in zip(old, reference, strict=True)]
        scores = data.scores()
        self.old = pad_sequence(old, batch_first=True)  # [2 n, T], log-probabilities of the tokens
        self.mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in old], batch_first=True)
        if self.critic is None:
            self.advantages = sequence_advantages(scores, penalties)[:, None] * self.mask  # [2 n, T]
            return
        rewards = pad_sequence(_token_rewards(scores, penalties), batch_first=True)
        self.values = pad_sequence(values, batch_first=True)  # [2 n, T], of the critic
        gae_lambda = self.critic.config.gae_lambda
        advantages, self.returns = compute_gae(rewards, self.values, self.mask, 1.0, gae_lambda)
        self.advantages = whiten(advantages, self.mask)

    def __call__(self, rows: Rows) -> RowLosses:
        config = self.config
        encoded = [self.encoded[int(n)] for n in rows]
        places = self._rollout_rows(rows)
        tokens = self.resident.tokens(encoded)
        width = tokens.mask.shape[1]
        old = self.old[places, :width]
        share = int(tokens.mask.sum()) / self._minibatch_tokens
        self.distances[-1] += share * approximate_kl(tokens.logprobs, old, tokens.mask)
        losses = policy_loss(tokens.logprobs, old, self.advantages[places, :width], config.clip)
        losses = losses - config.entropy * tokens.entropies
        if self.critic is not None:
            before, returns = self.values[places, :width], self.returns[places, :width]
            value_losses = value_loss(self.critic.values(tokens), before, returns, config.clip)
            losses = losses + self.critic.config.value * value_losses
        pair_losses = masked_mean(losses, tokens.mask, per_row=True).reshape(len(rows), 2).mean(1)
        return RowLosses(pair_losses, count_tokens(encoded))

    def begin_minibatch(self, micro_batches: Sequence[Rows]) -> None:
        rows = np.concatenate(micro_batches)
        self._minibatch_tokens = int(self.mask[self._rollout_rows(rows)].sum())
        self._minibatches.append(rows)
        self.distances.append(0.0)

    def stops(self) -> bool:
        self.stopped = self.distances[-1] > self.config.target_kl
        if self.stopped:
            self._minibatches.pop()
        return self.stopped

    def metrics(self, trained: Trained) -> dict[str, float]:
        """Also `kl` of the last minibatch, `pairs`, the distinct pairs of the steps, and `stopped`."""
        return trained.metrics() | {
            "kl": self.distances[-1],
            "pairs": float(len(np.unique(np.concatenate(self._minibatches)))),
            "stopped": float(self.stopped),
        }

    def tensors(self) -> Adapter:
        return {} if self.critic is None else self.critic.read()

    def _rollout_rows(self, rows: Rows) -> list[int]:
        return [2 * self.places[int(n)] + side for n in rows for side in (0, 1)]


class Critic:
    """A linear value head, fp32, whose weights and bias are 0 before a client's first round."""

    def __init__(self, config: CriticAdvantage, data: ClientData) -> None:
        resident = data.resident
        self.config = config
        self.head = torch.nn.Linear(resident.hidden_size, 1, dtype=torch.float32)
        self.head.to(resident.policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        own = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in data.tensors.items()
            if name.startswith(PREFIX)
        }
        if own:
            self.head.load_state_dict(own)

    def read(self) -> Adapter:
        """The head's tensors by name, fp32 on the CPU."""
        return {
            f"{PREFIX}{name}": value.detach().cpu().clone() for name, value in self.head.state_dict().items()
        }

    def values(self, tokens: CompletionTokens) -> torch.Tensor:
        """Values [M, T] of the tokens of completions, without gradients of their hidden states."""
        values: torch.Tensor = self.head(tokens.states.detach())[..., 0]
        return values


def draw_minibatches(rows: int, config: PairPpoObjective, seed: int) -> list[Rows]:
    """Draw the minibatches of a round; the last one of a pass over the pairs may be shorter."""
    minibatches = []
    for epoch in range(config.epochs):
        order = generator(seed, "ppo epoch", epoch).permutation(rows)
        minibatches += split_rows(order, config.minibatch)
    return minibatches


def sequence_advantages(scores: np.ndarray, penalties: Sequence[torch.Tensor]) -> torch.Tensor:
    """Half the difference of the two rewards of each pair, with opposite signs, [2 n].

    The scores of chosen and rejected are [n, 2]; the penalties are those of each token of the 2 n
    completions, chosen before rejected.
    """
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
