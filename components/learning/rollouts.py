"""Completions that a client's policy samples, and their scores by the rewards of several objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from components.config import PpoConfig
from components.learning.ppo import estimate_kl
from components.models.logprobs import CompletionTokens, TokenRow
from components.models.resident import ResidentPolicy
from components.models.rewards.reward_section import RewardFunction, Scores, check_scores
from components.models.samples import Completion


@dataclass(frozen=True)
class Rollout:
    """B completions sampled by the current policy, with their scores by M objectives."""

    rows: list[TokenRow]  # prompts and completions; the completions of a prompt are consecutive
    texts: list[str]  # the completions
    finished: npt.NDArray[np.bool_]  # [B], whether a completion ended by itself
    scores: dict[str, Scores]  # [B] by objective, before normalization
    tokens: CompletionTokens  # under the policy that sampled, without gradients
    reference: torch.Tensor  # [B, T], log-probabilities under the reference
    token_kl: torch.Tensor  # [B, T], estimated KL to the reference (nats); 0 at padding

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt with its completion, [B]."""
        return np.array([len(prompt) + len(completion) for prompt, completion in self.rows])

    @property
    def kl(self) -> float:
        """Mean of the completions' estimated KL to the reference (nats per completion)."""
        return float(self.token_kl.sum(1).mean())

    def figures(self) -> dict[str, float]:
        """The KL, and the mean score of each objective."""
        scores = {f"score/{name}": float(scores.mean()) for name, scores in self.scores.items()}
        return {"kl": self.kl} | scores


def sample_rollout(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    rewards: Mapping[str, RewardFunction],
    ppo: PpoConfig,
    seed: int,
    count: int = 1,
) -> Rollout:
    """Sample `count` completions of each prompt with the adapter in the slot, and score them.

    The completions are a function of the seed. Errors as of `score_completions`.
    """
    resident.model.eval()
    answers = resident.policy.generate(prompts, seed, ppo.temperature, count=count)
    return score_completions(resident, prompts, answers, rewards, ppo)


def score_completions(
    resident: ResidentPolicy,
    prompts: Sequence[str],
    answers: Sequence[Sequence[Completion]],
    rewards: Mapping[str, RewardFunction],
    ppo: PpoConfig,
) -> Rollout:
    """The rollout of completions of each prompt, which the adapter in the slot has sampled.

    All go through the model at once. A reward that fails, or does not give one finite score per
    completion, is a UserError.
    """
    resident.model.eval()
    repeated = [prompt for prompt, answer in zip(prompts, answers, strict=True) for _ in answer]
    completions = list(chain.from_iterable(answers))
    texts = [completion.text for completion in completions]
    rows: list[TokenRow] = [
        (resident.policy.encode(prompt), list(completion.ids))
        for prompt, completion in zip(repeated, completions, strict=True)
    ]
    with torch.no_grad():
        tokens = resident.tokens(rows, temperature=ppo.temperature)
        reference = resident.tokens(rows, reference=True, temperature=ppo.temperature).logprobs
    return Rollout(
        rows=rows,
        texts=texts,
        finished=np.array([completion.finished for completion in completions]),
        scores={
            name: check_scores(f"the reward of objective '{name}'", reward, repeated, texts)
            for name, reward in rewards.items()
        },
        tokens=tokens,
        reference=reference,
        token_kl=estimate_kl(tokens.logprobs, reference, ppo.kl_estimator) * tokens.mask,
    )
