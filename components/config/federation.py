"""The federated rounds: the method, its options, and what all methods share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from components.config.optimizer import OptimizerConfig, RateDecay, check_warmup
from components.config.privacy import UNITS, AnyPrivacy
from components.config.registry import (
    Registry,
    registered_name,
    registered_options,
    registered_section,
)
from components.config.section import KindSection, Section

if TYPE_CHECKING:
    from components.federation.aggregators import Aggregator
    from components.federation.method import Method
    from components.federation.postprocessing import PostProcessor
else:  # a plain section, which the registered class replaces when a recipe names it
    Method, PostProcessor = Section, KindSection


METHODS: Registry[type[Method]] = Registry(
    "federation.method",
    "fed_rlhf.methods",
    {
        "drift": "components.federation.methods.drift:Drift",
        "fedamp": "components.federation.methods.fedamp:FedAmp",
        "fedavg": "components.federation.methods.fedavg:FedAvg",
        "fedbis": "components.federation.methods.fedbis:FedBis",
        "fedbiscuit": "components.federation.methods.fedbiscuit:FedBiscuit",
        "fedcda": "components.federation.methods.fedcda:FedCda",
        "fedcmoo": "components.federation.methods.fedcmoo:FedCmoo",
        "feddpo": "components.federation.methods.feddpo:FedDpo",
        "fednova": "components.federation.methods.fednova:FedNova",
        "fedopt": "components.federation.methods.fedopt:FedOpt",
        "fedpdpo": "components.federation.methods.fedpdpo:FedPdpo",
        "fedper": "components.federation.methods.fedper:FedPer",
        "fedprox": "components.federation.methods.fedprox:FedProx",
        "fedrep": "components.federation.methods.fedrep:FedRep",
        "few_shot": "components.federation.methods.few_shot:FewShot",
        "few_shot_selector": "components.federation.methods.few_shot_selector:FewShotSelector",
        "ffa_lora": "components.federation.methods.ffa_lora:FfaLora",
        "firm": "components.federation.methods.firm:Firm",
        "perfedavg": "components.federation.methods.perfedavg:PerFedAvg",
        "rule": "components.federation.methods.rule:Rule",
        "scaffold": "components.federation.methods.scaffold:Scaffold",
    },
    "components.federation.method:Method",
)


AGGREGATORS: Registry[type[Aggregator]] = Registry(
    "federation.options.aggregator",
    "fed_rlhf.aggregators",
    {
        "exact": "components.federation.aggregators:ExactMean",
        "expected": "components.federation.aggregators:ExpectedMean",
        "paper": "components.federation.aggregators:PaperMean",
        "participation": "components.federation.aggregators:ParticipationMean",
        "trimmed": "components.federation.aggregators:TrimmedMean",
        "uniform": "components.federation.aggregators:UniformMean",
    },
    "components.federation.aggregators:Aggregator",
)


POSTPROCESSORS: Registry[type[PostProcessor]] = Registry(
    "federation.postprocessors.kind",
    "fed_rlhf.postprocessors",
    {},  # all come from installed packages
    "components.federation.postprocessing:PostProcessor",
)


class FederationConfig(Section):
    """The federated rounds."""

    method: Annotated[str, registered_name(METHODS, "federation.method")] = "fedbis"
    """Registered method (components/federation/methods)."""
    options: Annotated[SerializeAsAny[Method], registered_options(METHODS, "method")] = Field(
        default_factory=dict, validate_default=True
    )
    """Options of the method."""
    rounds: int = Field(500, ge=1)
    """Communication rounds (R); FedBiscuit table 3: 500."""
    clients_per_round: int = Field(5, ge=1)
    """Clients sampled without replacement in each round (A); FedBiscuit table 3: 5 of 53."""
    sampling: Literal["uniform", "round-robin"] = "uniform"
    """How the clients of a round are chosen. uniform: at random; round-robin: in turns, in a random order,
    so that a client has a pause of floor(M / A) - 1 rounds."""
    local_steps: int = Field(30, ge=1)
    """Optimizer steps of a client in a round (K), over all parts of its model; FedBiscuit table 3:
    30."""
    local_epochs: int | None = Field(None, ge=1)
    """Passes of a client over its own rows in a round, in place of local_steps. The number of steps
    then differs between clients. It covers the whole round: FedPDPO D.3.1 has 1 for the shared
    modules and 1 for the personal ones, which are 2 with a share of 0.5."""
    batch_size: int = Field(32, ge=1)
    """Rows of a minibatch; FedBiscuit table 3: 32."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Rows of a minibatch that go through the model at once. The gradient is that of the whole
    minibatch, up to rounding, and only the activations of these rows are in memory. null: the whole
    minibatch."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer of the clients."""
    rate_decay: RateDecay | None = None
    """Decay of the clients' learning rates when their DPO loss rises; null: none. For methods that
    train by DPO."""
    postprocessors: list[Annotated[SerializeAsAny[PostProcessor], registered_section(POSTPROCESSORS)]] = (
        Field(default_factory=list)
    )
    """Post-processors of updates, in the order in which a client applies them; the server applies
    them in reverse order."""
    privacy: Annotated[AnyPrivacy, registered_section(UNITS, key="unit")] | None = None
    """Differential privacy of what leaves the clients; null: none."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Share of the sampled clients whose updates must be accepted, or the round fails."""
    max_update_ratio: float | None = Field(1000.0, gt=1)
    """Refuse a client's update whose norm is more than so many times the median of the clients of the
    step; null accepts any. The round goes on with the others, if they have their quorum."""
    clients_per_task: int = Field(1, ge=1)
    """Clients that one mapped task runs, one after the other."""
    evaluate_every: int | None = Field(None, ge=1)
    """Measure accuracy on held-out pairs every so many rounds. null: before the first and after the
    last round only."""
    accuracy_split: Literal["test", "validation"] = "test"
    """Held-out pairs that accuracy is measured on. validation is for choosing hyper-parameters."""
    accuracy_pairs: int | None = Field(None, ge=1)
    """Held-out pairs that accuracy is measured on (a seeded sample, balanced over the clients);
    null takes all."""
    keep_every: int = Field(1, ge=1)
    """Keep and log the adapters of the server every so many rounds, and always those of the last.
    Those of the last two commits are kept too."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.local_epochs is None:
            check_warmup(self.optimizer, self.local_steps, "local_steps")
        return self

    def local_steps_for(self, rows: int) -> int:
        """Optimizer steps in a round of a client with so many training rows."""
        if self.local_epochs is None:
            return self.local_steps
        return max(1, math.ceil(rows * self.local_epochs / (self.batch_size * self.optimizer.accumulation)))
