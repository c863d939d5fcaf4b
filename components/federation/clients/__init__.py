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
        "aligned": "components.federation.clients.policy_client:AlignedPolicyClient",
        "meta": "components.federation.clients.meta_trainer:MetaTrainer",
        "multi-objective": "components.federation.clients.multi_objective_trainer:MultiObjectiveTrainer",
        "policy": "components.federation.clients.policy_trainer:PolicyTrainer",
        "selector": "components.federation.clients.selector_trainer:SelectorTrainer",
    },
)
"""Trainers by name: called with a recipe and a device.

A method names its trainer in `Method.trainer`; 'aligned' measures the policy that the server aligns.
"""
