"""PPO on pairs that are there already, the baseline of FedPDPO (D.3.1): a frozen reward model scores both completions of a pair, nothing is sampled.

    each round, from the policy pi_old that the client received:
        a completion's reward  = -kl (log pi_old - log pi_ref) at each token, and at its last token its score less the mean score of its pair,
                                 so that the two completions of a pair get half the difference of their scores, with opposite signs
        advantages             = GAE of these, whitened over the round's tokens
        epochs over the pairs in minibatches: clipped policy loss + value coefficient x clipped value loss - entropy coefficient x entropy,
        until the estimated KL from pi_old is above its target

The paper says "computing advantages from reward differences", and no more. The value head, on the states that tokens are chosen from, starts at 0 in each
round, as the optimiser does: clients keep no state between rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.config import OptimizerConfig
from components.learning.local import TrainingCurve, train
from components.learning.policy import Pair, ResidentPolicy, held_near
from components.learning.ppo import approximate_kl, gae, masked_mean, policy_loss, value_loss, whiten
from components.seeding import derive, generator

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ppo:
    """Coefficients; defaults and sources in components/federation/feddpo.py.

    Attributes:
        clip: epsilon of the ratio and of the value.
        kl: coefficient of the penalty to the reference, nats to reward.
        value, entropy: coefficients of these losses.
        lam: of GAE; rewards are not discounted.
        epochs: passes over the round's pairs.
        minibatch: pairs a step.
        target_kl: the round ends where the estimated KL of a minibatch from the received policy is above it.
    """

    clip: float
    kl: float
    value: float
    entropy: float
    lam: float
    epochs: int
    minibatch: int
    target_kl: float


@dataclass(frozen=True)
class PpoCurve(TrainingCurve):
    """A round of PPO.

    Attributes:
        kl: estimated KL from the received policy, of the last minibatch (nats a token).
        stopped: whether it ended before its last step.
    """

    kl: float
    stopped: bool


@dataclass(frozen=True)
class Rollout:
    """What the received policy says of the round's pairs; two rows a pair, chosen before rejected.

    Attributes:
        old, advantages, returns: [2 n, T].
        mask: [2 n, T] bool.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor


def ppo_batches(rows: int, passes: int, config: Ppo, seed: int) -> list[np.ndarray]:
    """Minibatches of a round: as many pairs as the passes are enough for, at least a minibatch, each config.epochs times in a seeded order.

    Args:
        rows: of the client.
        passes: pairs that may go through the model, over all epochs.
        config: epochs and minibatch.
        seed: the pairs and their order are a function of it.
    """
    count = min(rows, max(config.minibatch, passes // config.epochs))
    drawn = generator(seed, "ppo pairs").permutation(rows)[:count]
    orders = [drawn[generator(seed, "ppo epoch", epoch).permutation(count)] for epoch in range(config.epochs)]
    return [order[start : start + config.minibatch] for order in orders for start in range(0, count, config.minibatch)]


def roll_out(
    resident: ResidentPolicy, pairs: Sequence[Pair], scores: np.ndarray, reference: Sequence[Sequence[torch.Tensor]], config: Ppo,
) -> Rollout:
    """Score pairs by the policy that is in the resident model, with a value of 0 everywhere.

    Args:
        resident: the model.
        pairs: n of them.
        scores: [n, 2], of the reward model, for chosen and rejected.
        reference: for each pair the reference's log-probabilities of the tokens of chosen and of rejected.
        config: coefficients.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    encoded, old = [resident.encode_pair(pair) for pair in pairs], []
    resident.model.eval()
    with torch.no_grad():
        for row in encoded:  # each by itself: what it gets depends on no other pair
            tokens = resident.tokens([row])
            old += [values[there] for values, there in zip(tokens.logprobs, tokens.mask, strict=True)]
    known = [values for row in reference for values in row]
    mask = pad_sequence([torch.ones_like(values, dtype=torch.bool) for values in old], batch_first=True)
    rewards = [-config.kl * (now - then.to(now)) for now, then in zip(old, known, strict=True)]
    centred = scores - scores.mean(axis=1, keepdims=True)
    for values, score in zip(rewards, centred.reshape(-1), strict=True):
        values[-1] += float(score)
    padded = pad_sequence(rewards, batch_first=True)
    advantages, returns = gae(padded, torch.zeros_like(padded), mask, 1.0, config.lam)
    return Rollout(pad_sequence(old, batch_first=True), whiten(advantages, mask), returns, mask)


def ppo_rows(
    resident: ResidentPolicy, pairs: Sequence[Pair], scores: np.ndarray, reference: Sequence[Sequence[torch.Tensor]], used: np.ndarray, config: Ppo, head: torch.nn.Linear | None = None,
) -> tuple[Callable[[np.ndarray], tuple[torch.Tensor, int]], list[float]]:
    """The loss of PPO as a function of the pairs' indices, against the policy that is in the resident model now.

    Args:
        resident, pairs, scores, reference: as in roll_out, N of each; those that are not used are not looked at.
        used: indices that may be asked for.
        config: coefficients.
        head: value head; None: values are 0, and have no loss.

    Returns:
        the loss of the rows, [n], with the tokens that go through the model; and a list to which each call adds the estimated KL from the policy of now.
    """
    rollout = roll_out(resident, [pairs[n] for n in used], scores[used], [reference[n] for n in used], config)
    encoded, place, distances = {int(n): resident.encode_pair(pairs[n]) for n in used}, {int(n): k for k, n in enumerate(used)}, []

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[int(n)] for n in indices]
        at = [2 * place[int(n)] + side for n in indices for side in (0, 1)]
        now = resident.tokens(rows)
        old, advantages, returns = (values[at, : now.mask.shape[1]] for values in (rollout.old, rollout.advantages, rollout.returns))
        distances.append(approximate_kl(now.logprobs, old, now.mask))
        each = policy_loss(now.logprobs, old, advantages, config.clip) - config.entropy * now.entropies
        if head is not None:
            values = head(now.states)[..., 0]
            each = each + config.value * value_loss(values, values.new_zeros(values.shape), returns, config.clip)
        return masked_mean(each, now.mask, rows=True).reshape(len(rows), 2).mean(1), sum(2 * len(p) + len(c) + len(r) for p, c, r in rows)

    return loss, distances


def train_offline_ppo(
    resident: ResidentPolicy, pairs: Sequence[Pair], scores: np.ndarray, reference: Sequence[Sequence[torch.Tensor]], parameters: Sequence[torch.nn.Parameter], config: Ppo,
    batches: Sequence[np.ndarray], optimizer: OptimizerConfig, seed: int, proximal: float = 0.0,
) -> PpoCurve:
    """Train some of a resident model's parameters by PPO on one owner's pairs, from what they are.

    Args:
        resident: the model; what is trained is changed in place.
        pairs, scores, reference: N of each, as in roll_out; those that no minibatch has are not looked at.
        parameters: what is trained.
        config: coefficients.
        batches: see ppo_batches; each is a step of its own.
        optimizer: of the steps; its accumulation is not used.
        seed: of the run; dropout is off, or the ratio to the received policy would be noise.
        proximal: as in train_dpo.
    """
    import torch

    head = torch.nn.Linear(resident.model.get_base_model().get_input_embeddings().embedding_dim, 1).to(resident.policy.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    loss, distances = ppo_rows(resident, pairs, scores, reference, np.unique(np.concatenate(list(batches))), config, head)
    curve = train(
        resident.model, [*parameters, *head.parameters()], batches, held_near(loss, parameters, proximal), optimizer.model_copy(update={"accumulation": 1}),
        derive(seed, "ppo"), until=lambda: bool(distances) and distances[-1] > config.target_kl, dropout=False)
    return PpoCurve(curve.losses, curve.gradient_norms, curve.tokens, curve.seconds, distances[-1], len(curve.losses) < len(batches))
