"""The federated rounds: the method, its options, and what all methods share."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from components.config.models import BackboneConfig, PolicyConfig, SelectorConfig
from components.config.optimizer import OptimizerConfig, RateDecay, check_warmup
from components.config.registry import (
    Registry,
    registered_name,
    registered_options,
    registered_section,
)
from components.config.section import Section

if TYPE_CHECKING:
    from components.config.recipe import Recipe


class MethodOptions(Section):
    """Options of a federated method.

    A method derives from components.federation.method.Method, and is registered in METHODS or
    through the entry points of a package.
    """

    trained_model: ClassVar[Literal["selector", "policy"]] = "policy"  # section of what clients train
    trainer: ClassVar[str]  # name of the client half, a key of components.federation.clients.TRAINERS

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the method cannot run, by a RecipeError with key, value and remedy."""

    def trained_section(self, recipe: Recipe) -> SelectorConfig | PolicyConfig:
        """The section of the recipe whose model the clients train."""
        return recipe.selector if self.trained_model == "selector" else recipe.policy

    @property
    def needs_server_prompts(self) -> bool:
        """Whether a policy is aligned after the rounds, on prompts of the server."""
        return self.trained_model == "selector"

    def server_adapters(self, federation: FederationConfig) -> int:
        """Adapters of the server that a round changes at most."""
        return 1

    def required_backbones(self, recipe: Recipe) -> list[BackboneConfig]:
        """Backbones that the rounds need."""
        return [self.trained_section(recipe).backbone]

    def recipe_sections(self, recipe: Recipe) -> list[str]:
        """Sections of the recipe, beside the seed and the data, that determine the rounds."""
        of_rewards = (reward.recipe_sections for reward in recipe.rewards.values())
        return list(dict.fromkeys([self.trained_model, "federation", *chain.from_iterable(of_rewards)]))


METHODS: Registry[type[MethodOptions]] = Registry(
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
        "ffa_lora": "components.federation.methods.ffa_lora:FfaLora",
        "firm": "components.federation.methods.firm:Firm",
        "perfedavg": "components.federation.methods.perfedavg:PerFedAvg",
        "scaffold": "components.federation.methods.scaffold:Scaffold",
    },
    "components.federation.method:Method",
)


class AggregatorConfig(Section):
    """How the server combines updates; `combine` is added by
    components.federation.aggregators.aggregator.Aggregator."""

    kind: str
    """Registered aggregator (components/federation/aggregators)."""


AGGREGATORS: Registry[type[AggregatorConfig]] = Registry(
    "federation.options.aggregator",
    "fed_rlhf.aggregators",
    {
        "exact": "components.federation.aggregators.exact:ExactMean",
        "paper": "components.federation.aggregators.weighted:PaperMean",
        "participation": "components.federation.aggregators.weighted:ParticipationMean",
        "trimmed": "components.federation.aggregators.trimmed:TrimmedMean",
        "uniform": "components.federation.aggregators.weighted:UniformMean",
    },
    "components.federation.aggregators.aggregator:Aggregator",
)


class PostProcessorConfig(Section):
    """What changes an update before it is sent, and the server's result: clipping, noise, masks.

    components.federation.postprocessing.PostProcessor adds how.
    """

    kind: str
    """Registered post-processor."""


POSTPROCESSORS: Registry[type[PostProcessorConfig]] = Registry(
    "federation.postprocessors.kind",
    "fed_rlhf.postprocessors",
    {},  # all come from installed packages
    "components.federation.postprocessing:PostProcessor",
)


class FederationConfig(Section):
    """The federated rounds."""

    method: Annotated[str, registered_name(METHODS, "federation.method")] = "fedbis"
    """Registered method (components/federation/methods)."""
    options: Annotated[
        SerializeAsAny[MethodOptions], registered_options(METHODS, MethodOptions, "method")
    ] = Field(default_factory=MethodOptions, validate_default=True)
    """Options of the method."""
    rounds: int = Field(500, ge=1)
    """Communication rounds (R); FedBiscuit table 3: 500."""
    clients_per_round: int = Field(5, ge=1)
    """Clients sampled without replacement in each round (A); FedBiscuit table 3: 5 of 53."""
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
    postprocessors: list[
        Annotated[SerializeAsAny[PostProcessorConfig], registered_section(POSTPROCESSORS)]
    ] = Field(default_factory=list)
    """Post-processors of updates, in the order in which a client applies them; the server applies
    them in reverse order."""
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
