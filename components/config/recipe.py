"""The recipe: every hyper-parameter of a run, with its unit and the source of its default.

"FedBiscuit table N" in a description refers to the tables of the paper's appendix B.
"""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from typing import Annotated, Self

from pydantic import Field, model_validator

from components.config.alignment import AlignmentConfig
from components.config.data import DataConfig
from components.config.evaluation import AnyReward, EvaluationConfig
from components.config.federation import FederationConfig
from components.config.models import PolicyConfig, SelectorConfig
from components.config.recipe_files import InputFile
from components.config.runtime import RuntimeConfig, TrackingConfig
from components.config.section import Section
from components.config.thoughts import ThoughtsConfig

RewardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=150)]


class Recipe(Section):
    """One experiment."""

    name: str = Field(min_length=1, max_length=150, pattern=r"^[A-Za-z0-9][A-Za-z0-9_/.-]*$")
    """Name of the experiment; by custom the path of its file under flows/recipes."""
    seed: int = Field(0, ge=0, lt=2**31)
    """All random choices are functions of it."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Preference pairs and their owners."""
    thoughts: ThoughtsConfig | None = None
    """Trees of thoughts to grow; null where there are none, or where data.path (source thoughts) or
    data.trees (other sources) names existing ones."""
    selector: SelectorConfig = Field(default_factory=SelectorConfig)
    """The binary selector."""
    federation: FederationConfig = Field(default_factory=FederationConfig)
    """The federated rounds."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """The policy that is aligned."""
    alignment: AlignmentConfig = Field(default_factory=AlignmentConfig)
    """Labeling and DPO on the server."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """What is measured."""
    rewards: dict[RewardName, AnyReward] = Field(default_factory=dict)
    """Reward models by name, for methods that use some and for the judge 'reward'."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    """Names in MLflow."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """Devices and task runner."""

    @model_validator(mode="after")
    def _check_clients(self) -> Self:
        cohort, clients = self.federation.clients_per_round, self.data.clients
        if clients is not None and cohort > clients:
            raise ValueError(
                f"federation.clients_per_round is {cohort}, but there are only {clients} clients"
                f" (data.clients): use at most {clients}"
            )
        if self.data.partition not in ("natural", "column") and clients is None:
            raise ValueError(
                f"data.clients is needed with data.partition '{self.data.partition}': give the number of"
                " clients"
            )
        if self.data.validation + self.data.test >= 1:
            raise ValueError(
                f"data.validation {self.data.validation} and data.test {self.data.test} leave nothing to"
                " train on: their sum must be below 1"
            )
        return self

    @model_validator(mode="after")
    def _check_trees(self) -> Self:
        are_all_pairs = self.data.source == "thoughts"
        key = "path" if are_all_pairs else "trees"
        existing = getattr(self.data, key)
        if self.thoughts is not None and existing is not None:
            raise ValueError(
                f"the section thoughts grows trees, but data.{key} names existing ones ({existing}):"
                " leave out one of them"
            )
        if are_all_pairs and self.data.trees is not None:
            raise ValueError(
                "data.trees is for trees beside another source: with data.source 'thoughts' give their"
                " file or folder as data.path"
            )
        if are_all_pairs and self.thoughts is None and existing is None:
            raise ValueError(
                "data.source 'thoughts' has no trees: give a section thoughts, which grows some, or"
                " data.path, the file or folder of existing ones"
            )
        if self.data.min_margin and not are_all_pairs and self.thoughts is None and existing is None:
            raise ValueError(
                f"data.min_margin is {self.data.min_margin}, but there are no trees of thoughts, whose"
                " scores it applies to (a section thoughts, or data.trees): leave it out"
            )
        if self.thoughts is not None and not self.thoughts.questions:
            raise ValueError("thoughts.questions is empty: name at least one question set")
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        reference, backbone = self.alignment.dpo.reference, self.policy.backbone
        if reference == "base":
            return self
        start = f"alignment.dpo.reference '{reference}' starts from an adapter, which"
        if backbone.quantization != "none":
            raise ValueError(
                f"{start} an 8-bit policy would round: use 'base', or set policy.backbone.quantization to"
                " 'none'"
            )
        if backbone.device_map is not None:
            raise ValueError(
                f"{start} layers outside the device cannot: use 'base', or leave out"
                " policy.backbone.device_map"
            )
        return self

    @property
    def base_adapter(self) -> InputFile | None:
        """Folder of the adapter of the policy before the alignment; None for the backbone alone."""
        return self.alignment.dpo.reference_adapter if self.aligns_a_policy else None

    @property
    def trained(self) -> SelectorConfig | PolicyConfig:
        """The section whose model the clients train."""
        return self.selector if self.federation.options.trained_model == "selector" else self.policy

    @property
    def aligns_a_policy(self) -> bool:
        """Whether a policy is aligned after the rounds, on prompts of the server."""
        return self.federation.options.trained_model == "selector"

    @property
    def rounds_sections(self) -> list[str]:
        """Sections, beside the seed and the data, that determine the rounds."""
        method = self.federation.options
        of_rewards = chain.from_iterable(reward.recipe_sections for reward in self.rewards.values())
        return list(dict.fromkeys([method.trained_model, "federation", *of_rewards, *method.also_read]))

    def fingerprint(self, *sections: str) -> str:
        """Hash of the seed and of the named sections."""
        values = self.model_dump(mode="json")
        content = {"seed": self.seed} | {name: values[name] for name in sections}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
