"""A client's local steps of FIRM (its algorithm 1 and A.1): PPO on sampled completions with several rewards, whose gradients MGDA combines.

    each step, from the policy pi_old of now:
        y ~ pi_old(x) for a batch of prompts; each reward model scores every completion
        for each objective j:  r_j = -kl (log pi_old - log pi_ref) at each token, and at the last one its normalised score
                               A_j = GAE of r_j with the values of j's own head, whitened over the batch
        epochs over the batch in minibatches:
            g_j = gradient of the clipped loss of A_j with respect to the LoRA;  lambda = MGDA(g_1 ... g_M);  step along sum of lambda_j g_j
            the value heads take a step of their own, on hidden states that no gradient goes into
        kl is moved towards its target (Ziegler et al. 2019, section 2.2)

One rollout and one forward pass serve all objectives; the backward pass alone is repeated, M times. The penalty is in every objective's reward, so a
combination whose weights sum to 1 has it once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from components.config import Explained, OptimizerConfig
from components.learning import mgda
from components.learning.local import TrainingCurve, TrainingError, build_optimizer, minibatches
from components.learning.policy import ResidentPolicy, Row
from components.learning.ppo import approximate_kl, gae, masked_mean, policy_loss, value_loss, whiten
from components.models.reward_functions import RewardFunction
from components.seeding import derive, generator

if TYPE_CHECKING:
    import torch

@dataclass(frozen=True)
class Coefficients:
    """Of PPO and of MGDA; defaults and sources in components/federation/firm.py.

    Attributes:
        temperature: of the policy, that samples and whose log-probabilities are taken at it; and of the reference.
        clip: epsilon of the ratio and of the values.
        lam: of GAE; rewards are not discounted.
        epochs, minibatch: passes over a batch of completions, and completions a step.
        target_kl: what the controller holds the KL to the reference at (nats a completion); None leaves the coefficient as it is.
        horizon: completions over which the controller corrects an error.
        normalise: whether a reward's scores are divided by their standard deviation so far, less their mean so far.
        beta: of MGDA.
        preference: p of MGDA by objective; 1 where an objective is not named.
        weights: fixed weights by objective in place of MGDA's; they sum to 1.
    """

    temperature: float = 1.0
    clip: float = 0.2
    lam: float = 0.95
    epochs: int = 3
    minibatch: int = 8
    target_kl: float | None = None
    horizon: int = 10_000
    normalise: bool = True
    beta: float = 0.01
    preference: Mapping[str, float] | None = None
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Moments:
    """Of a reward's scores so far (Chan et al. 1979): how many there were, their mean, and the sum of squared deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def joined(self, scores: np.ndarray) -> Moments:
        """With more scores, [N]."""
        count, apart = self.count + len(scores), float(scores.mean()) - self.mean
        return Moments(
            count, self.mean + apart * len(scores) / count,
            self.squares + float(((scores - scores.mean()) ** 2).sum()) + apart**2 * self.count * len(scores) / count)

    def normalised(self, scores: np.ndarray) -> np.ndarray:
        """Scores less the mean, over the standard deviation; where all so far were the same, 0."""
        return (scores - self.mean) / np.sqrt(self.squares / max(self.count, 1) + 1e-8)


@dataclass(frozen=True)
class ClientState:
    """What a client keeps from round to round.

    Attributes:
        heads: weight [H] and bias [1] of each objective's value head, as one tensor [H + 1], by objective.
        moments: of each objective's scores.
        kl: coefficient of the penalty.
    """

    heads: dict[str, torch.Tensor]
    moments: dict[str, Moments]
    kl: float

    @classmethod
    def first(cls, objectives: Sequence[str], hidden: int, kl: float) -> ClientState:
        """Values of 0, and nothing seen."""
        import torch

        return cls({name: torch.zeros(hidden + 1, dtype=torch.float32) for name in objectives}, {name: Moments() for name in objectives}, kl)


@dataclass(frozen=True)
class Rollout:
    """B completions of the policy of now, and what M objectives make of them.

    Attributes:
        rows: token ids of prompts and completions.
        texts: the completions.
        scores: [B, M], of the rewards as they are.
        old: [B, T], log-probabilities.
        mask: [B, T] bool.
        values, advantages, returns: [M, B, T]; the advantages are whitened.
        kl: mean of the completions' log pi_old - log pi_ref (nats a completion).
        temperature: of both policies.
    """

    rows: list[Row]
    texts: list[str]
    scores: np.ndarray
    old: torch.Tensor
    mask: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    kl: float
    temperature: float


@dataclass(frozen=True)
class MultiCurve(TrainingCurve):
    """A client's round.

    Attributes:
        weights: lambda of each step, by objective.
        scores: mean score of each rollout, by objective, as the reward gives it.
        kl: KL to the reference of each rollout (nats a completion).
        coefficient: of the penalty in each rollout.
        drift: estimated KL from pi_old before each step (nats a token).
        value_loss: of each step, mean over the objectives.
    """

    weights: dict[str, list[float]]
    scores: dict[str, list[float]]
    kl: list[float]
    coefficient: list[float]
    drift: list[float]
    value_loss: list[float]


def next_coefficient(now: float, kl: float, target: float, completions: int, horizon: int) -> float:
    """kl (1 + e n / horizon), e = (KL - target) / target held within 0.2 (Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, section 2.2, with 0.1 as 1 / horizon a batch)."""
    return now * (1 + float(np.clip((kl - target) / target, -0.2, 0.2)) * completions / horizon)


def roll_out(
    resident: ResidentPolicy, prompts: Sequence[str], scorers: Mapping[str, RewardFunction], state: ClientState, config: Coefficients, seed: int, max_new_tokens: int | None = None,
) -> tuple[Rollout, ClientState]:
    """Sample a completion of each prompt by the policy in the slot, and score it.

    Args:
        resident: the model.
        prompts: B texts.
        scorers: the rewards, by objective.
        state: the client's; its heads give the values.
        config: coefficients.
        seed: the completions are a function of it.
        max_new_tokens: None takes the recipe's.

    Returns:
        the rollout; and the state with the scores' new moments.

    Raises:
        TrainingError: a reward gives a score that is not finite, or not one for each.
    """
    import torch

    resident.model.eval()
    answers = [some[0] for some in resident.policy.generate(prompts, seed, config.temperature, max_new_tokens=max_new_tokens)]
    rows: list[Row] = [(resident.policy.encode(prompt), list(answer.ids)) for prompt, answer in zip(prompts, answers, strict=True)]
    texts = [answer.text for answer in answers]
    scores = np.stack([checked_scores(f"the reward of objective '{name}'", scorer, prompts, texts) for name, scorer in scorers.items()], axis=1)
    moments = {name: state.moments[name].joined(scores[:, j]) for j, name in enumerate(scorers)}
    rewards = np.stack([moments[name].normalised(scores[:, j]) if config.normalise else scores[:, j] for j, name in enumerate(scorers)], axis=1)
    with torch.no_grad():
        now = resident.tokens(rows, temperature=config.temperature)
        away = (now.logprobs - resident.tokens(rows, reference=True, temperature=config.temperature).logprobs) * now.mask
        heads = torch.stack([state.heads[name] for name in scorers]).to(now.states.device)
        values = _values(heads, now.states) * now.mask
        last = now.mask.sum(1) - 1
        found = []
        for j in range(len(scorers)):
            given = -state.kl * away
            given[torch.arange(len(rows)), last] += torch.as_tensor(rewards[:, j], dtype=given.dtype, device=given.device)
            advantages, returns = gae(given, values[j], now.mask, 1.0, config.lam)
            found.append((whiten(advantages, now.mask), returns))
    advantages, returns = (torch.stack(each) for each in zip(*found, strict=True))
    return Rollout(rows, texts, scores, now.logprobs, now.mask, values, advantages, returns, float(away.sum(1).mean()), config.temperature), replace(state, moments=moments)


def objective_gradients(
    resident: ResidentPolicy, rollout: Rollout, indices: np.ndarray, parameters: Sequence[torch.nn.Parameter], clip: float, mixed: np.ndarray | None = None,
) -> tuple[torch.Tensor, list[float], float, torch.Tensor, int]:
    """The M gradients of the clipped loss, by one forward pass and M backward ones.

    Args:
        resident: the model, whose policy may have moved from the rollout's.
        rollout: of B completions.
        indices: [n], those of the minibatch.
        parameters: with P values in all.
        clip: epsilon.
        mixed: weights of the objectives, [M], where the gradient of the weighted loss is all that is wanted: one backward pass.

    Returns:
        [M, P] fp32, or [1, P] of mixed ones; the M losses; the estimated KL from the rollout's policy (nats a token); the hidden states [n, T, H]; and the tokens that went through the model.
    """
    import torch

    rows = [rollout.rows[n] for n in indices]
    now = resident.tokens(rows, temperature=rollout.temperature)
    width = now.mask.shape[1]
    old = rollout.old[indices, :width]
    losses = [masked_mean(policy_loss(now.logprobs, old, advantages[indices, :width], clip), now.mask) for advantages in rollout.advantages]
    wanted, gradients = losses if mixed is None else [sum(float(weight) * loss for weight, loss in zip(mixed, losses, strict=True))], []
    for j, loss in enumerate(wanted):
        parts = torch.autograd.grad(loss, parameters, retain_graph=j + 1 < len(wanted))
        gradients.append(torch.cat([part.reshape(-1).float() for part in parts]))
    return torch.stack(gradients), [loss.item() for loss in losses], approximate_kl(now.logprobs, old, now.mask), now.states.detach(), sum(len(part) for row in rows for part in row)


def fixed_weights(objectives: Sequence[str], config: Coefficients) -> np.ndarray | None:
    """lambda, [M], where it does not depend on the gradients; 0 for an objective that is not named."""
    return None if config.weights is None else np.array([config.weights.get(name, 0.0) for name in objectives])


def combine(gradients: torch.Tensor, objectives: Sequence[str], config: Coefficients) -> np.ndarray:
    """lambda, [M], by MGDA of the gradients, [M, P]."""
    wide = gradients.double()
    return mgda.solve((wide @ wide.T).cpu().numpy(), config.beta, preference_list(config.preference, objectives))


def preference_list(preference: Mapping[str, float] | None, objectives: Sequence[str]) -> list[float] | None:
    """p in the order of the objectives, 1 for one that is not named; None where there is none."""
    return None if preference is None else [preference.get(name, 1.0) for name in objectives]


def train_multi(
    resident: ResidentPolicy, prompts: Sequence[str], scorers: Mapping[str, RewardFunction], state: ClientState, parameters: Sequence[torch.nn.Parameter], config: Coefficients,
    rollouts: int, batch_size: int, optimizer: OptimizerConfig, critic_lr: float, seed: int, max_new_tokens: int | None = None,
) -> tuple[ClientState, MultiCurve]:
    """A client's local steps, from what is in the resident model; the parameters are changed in place.

    Args:
        resident: the model; dropout is off, or the ratio to the rollout's policy would be noise.
        prompts: the client's own.
        scorers: the rewards, by objective.
        state: what the client has kept.
        parameters: what is trained.
        config: coefficients.
        rollouts: local steps, each with a batch of completions of its own.
        batch_size: prompts a rollout.
        optimizer: of the policy; its accumulation is not used.
        critic_lr: learning rate of the value heads, by AdamW.
        seed: everything drawn is a function of it.
        max_new_tokens: None takes the recipe's.

    Raises:
        TrainingError: there are no prompts, or gradients are not finite; says at which step.
    """
    import torch

    objectives, start, tokens = list(scorers), time.perf_counter(), 0
    heads = torch.nn.Parameter(torch.stack([state.heads[name] for name in objectives]).to(resident.policy.device))
    actor, critic = build_optimizer(parameters, optimizer), torch.optim.AdamW([heads], lr=critic_lr, weight_decay=0.0)
    losses, norms, drift, missed, kls, coefficients = [], [], [], [], [], []
    shares: dict[str, list[float]] = {name: [] for name in objectives}
    means: dict[str, list[float]] = {name: [] for name in objectives}
    fixed = fixed_weights(objectives, config)
    resident.model.eval()
    for number, drawn in enumerate(minibatches(len(prompts), batch_size, rollouts, derive(seed, "prompts"))):
        state = replace(state, heads={name: heads[j].detach().cpu() for j, name in enumerate(objectives)})
        rollout, state = roll_out(resident, [prompts[n] for n in drawn], scorers, state, config, derive(seed, "rollout", number), max_new_tokens)
        kls.append(rollout.kl)
        coefficients.append(state.kl)
        for j, name in enumerate(objectives):
            means[name].append(float(rollout.scores[:, j].mean()))
        for epoch in range(config.epochs):
            order = generator(seed, "epoch", number, epoch).permutation(len(drawn))
            for begin in range(0, len(order), config.minibatch):
                indices = order[begin : begin + config.minibatch]
                gradients, found, moved, states, count = objective_gradients(resident, rollout, indices, parameters, config.clip, fixed)
                if not gradients.isfinite().all():
                    raise TrainingError(f"a gradient is NaN or infinite at step {len(losses)}: lower the learning rate, or look at the rewards of this client")
                weights = combine(gradients, objectives, config) if fixed is None else fixed
                _set_gradients(parameters, gradients[0] if fixed is not None else torch.as_tensor(weights, dtype=gradients.dtype, device=gradients.device) @ gradients)
                norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip if optimizer.clip is not None else float("inf"))))
                actor.step()
                missed.append(_critic_step(heads, critic, rollout, indices, states, config.clip))
                losses.append(float(np.dot(weights, found)))
                drift.append(moved)
                tokens += count
                for j, name in enumerate(objectives):
                    shares[name].append(float(weights[j]))
        if config.target_kl is not None:
            state = replace(state, kl=next_coefficient(state.kl, rollout.kl, config.target_kl, len(drawn), config.horizon))
    for parameter in parameters:
        parameter.grad = None
    state = replace(state, heads={name: heads[j].detach().cpu() for j, name in enumerate(objectives)})
    return state, MultiCurve(losses, norms, tokens, time.perf_counter() - start, shares, means, kls, coefficients, drift, missed)


def checked_scores(name: str, scorer: RewardFunction, prompts: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """A reward's scores, [N] float64.

    Args:
        name: what it is called where something is wrong with it.
        scorer: the reward.
        prompts, texts: N of each.

    Raises:
        TrainingError: it failed, or did not give a finite number for each.
    """
    try:
        scores = np.asarray(scorer(list(prompts), list(texts)), dtype=np.float64)
    except Explained:
        raise
    except Exception as error:  # of somebody else's function
        raise TrainingError(f"{name} failed on {len(texts)} responses: {type(error).__name__}: {error}") from error
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise TrainingError(f"{name} gave {scores.shape} scores for {len(texts)} responses, {int((~np.isfinite(scores)).sum())} of them NaN or infinite: it must give one finite number for each")
    return scores


def _values(heads: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[M, B, T], of heads [M, H + 1] on states [B, T, H]."""
    return (states @ heads[:, :-1].T + heads[:, -1]).movedim(-1, 0)


def _critic_step(heads: torch.nn.Parameter, critic: torch.optim.Optimizer, rollout: Rollout, indices: np.ndarray, states: torch.Tensor, clip: float) -> float:
    width = states.shape[1]
    mask = rollout.mask[indices, :width]
    each = value_loss(_values(heads, states), rollout.values[:, indices, :width], rollout.returns[:, indices, :width], clip)
    loss = sum(masked_mean(one, mask) for one in each)  # a head's gradient is that of its own objective, however many there are
    critic.zero_grad(set_to_none=True)
    loss.backward()
    critic.step()
    return loss.item() / len(each)


def _set_gradients(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].reshape(parameter.shape).to(parameter.dtype)
        start += parameter.numel()
