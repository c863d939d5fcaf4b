"""The client half of federated methods: one trainer for each kind of model and local objective.

Nothing of a client leaves this package except updates: the server half
(components/federation/methods) cannot import it.
"""

from __future__ import annotations

from collections.abc import Callable

from components.config import Recipe, Registry
from components.federation.clients.trainer import Trainer

TRAINERS: Registry[Callable[[Recipe, str], Trainer]] = Registry(
    "trainer",
    "fed_rlhf.trainers",
    {
        "few-shot": "components.federation.clients.few_shot_client:FewShotClient",
        "few-shot-selector": "components.federation.clients.few_shot_client:FewShotSelectorClient",
        "multi-objective": "components.federation.clients.multi_objective_trainer:MultiObjectiveTrainer",
        "rewards": "components.federation.clients.reward_scorer:RewardScorer",
        "policy": "components.federation.clients.policy_trainer:PolicyTrainer",
        "selector": "components.federation.clients.selector_trainer:SelectorTrainer",
    },
)
"""Trainers by name: called with a recipe and a device.

A method names its trainer in `Method.trainer`; 'policy' also measures the policy that the server aligns,
and 'rewards' scores pairs before the first round.
"""
