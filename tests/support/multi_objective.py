"""PPO with several rewards on tiny models and on table policies."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from components.config import MultiObjective, OptimizerConfig, PpoConfig
from components.learning.loop import Training
from components.learning.multi_objective_ppo import MultiObjectivePpo
from tests.support.reward_functions import score_length, score_vowels
from tests.support.table_policy import TablePolicy

REWARDS = {"long": score_length, "vowels": score_vowels}
ADAMW = OptimizerConfig(name="adamw", lr=1e-2, betas=[0.9, 0.999], weight_decay=0.0, clip=None)


def build_ppo(
    resident: Any,
    rewards: Mapping[str, Any] = REWARDS,
    training: Training | None = None,
    kept: tuple[dict[str, float], dict[str, Any]] = ({}, {}),
    beta: float = 0.01,
    preference: dict[str, float] | None = None,
    weights: dict[str, float] | None = None,
    **ppo: Any,
) -> MultiObjectivePpo:
    """PPO of a client that kept these numbers and tensors; the penalty is constant by default."""
    objective = MultiObjective(
        objectives={name: [name] for name in rewards},
        ppo=PpoConfig(**{"target_kl": None} | ppo),
        beta=beta,
        preference=preference,
        weights=weights,
    )
    return MultiObjectivePpo(resident, rewards, objective, training or Training(1, 6, ADAMW, 5), *kept)


def train_table(
    reference: Sequence[float],
    rewards: Mapping[str, Sequence[float]],
    steps: int,
    lr: float = 0.05,
    **options: Any,
) -> tuple[np.ndarray, MultiObjectivePpo]:
    """Train a table policy on rewards by token; its distribution, and its PPO."""
    table = TablePolicy(reference)
    functions = {
        name: (lambda prompts, texts, scores=scores: np.array([scores[int(text)] for text in texts]))
        for name, scores in rewards.items()
    }
    training = Training(steps, 128, ADAMW.model_copy(update={"lr": lr}), seed=0)
    values = {"epochs": 2, "minibatch": 64, "normalize": False} | options
    ppo = build_ppo(table, functions, training, **values)
    ppo.train(["x"] * 128)
    temperature = values.get("temperature", 1.0)
    return (table.logits / temperature).detach().softmax(0).numpy(), ppo
