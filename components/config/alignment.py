"""Labeling of sampled completions by the selectors, and alignment of the policy by DPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from components.config.recipe_files import InputFile
from components.config.section import Section


class DpoConfig(Section):
    """Direct preference optimization (FedBiscuit eqs. 2 and 9)."""

    reference: Literal["base", "sft", "round_start"] = "base"
    """Reference policy of the KL. base: the adapter is off; sft: reference_adapter is merged into
    the backbone, or stays below the trained one where the backbone is in bfloat16; round_start:
    reference_adapter, from which training starts. With the last two it also samples the completions
    that are labeled, and is the base policy of the evaluation."""
    reference_adapter: InputFile | None = None
    """Folder of a LoRA adapter that PEFT has saved, for the references sft and round_start."""
    beta: float = Field(0.1, gt=0)
    """Inverse temperature of the implicit reward; Rafailov et al. 2023: 0.1."""
    optimizer: Literal["rmsprop", "adamw_torch", "sgd", "adagrad", "adafactor"] = "rmsprop"
    """Optimizer, by its name in transformers; FedBiscuit table 3: RMSprop."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate; FedBiscuit table 3: 1e-6."""
    epochs: int = Field(5, ge=1)
    """Passes over the labeled pairs; FedBiscuit table 3: 5 (section 7.1 says three)."""
    batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step; FedBiscuit table 3: 32."""
    micro_batch_size: int = Field(8, ge=1)
    """Pairs per forward pass; divides batch_size."""
    lr_scheduler: Literal["linear", "cosine", "constant"] = "constant"
    """Schedule of the learning rate; the paper names none."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Save the adapter every so many optimizer steps; null: after each epoch only."""
    kl_prompts: int = Field(16, ge=0)
    """Held-out prompts on which the KL to the reference is estimated after training."""
    max_kl: float | None = Field(None, gt=0)
    """Training ends at the first checkpoint (checkpoint_every, or an epoch's end) whose KL to the
    reference, estimated on kl_prompts, is above this (nats per completion); null: after epochs."""

    @model_validator(mode="before")
    @classmethod
    def _without_trainer(cls, values: Any) -> Any:
        """Recipes of earlier runs store 'packed' for the option trainer, which was removed."""
        if not isinstance(values, Mapping) or "trainer" not in values:
            return values
        if values["trainer"] == "trl":
            raise ValueError("trainer 'trl' was removed, since there is one trainer now: leave trainer out")
        return {key: value for key, value in values.items() if (key, value) != ("trainer", "packed")}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )
        if self.max_kl is not None and not self.kl_prompts:
            raise ValueError("max_kl is measured on held-out prompts: set kl_prompts above 0")
        if self.reference != "base" and not self.reference_adapter:
            raise ValueError(
                f"reference '{self.reference}' needs reference_adapter, the folder of a PEFT adapter"
            )
        if self.reference == "base" and self.reference_adapter:
            raise ValueError(
                "reference_adapter is not used with reference 'base': remove it, or set reference to 'sft' or"
                " 'round_start'"
            )
        return self


class AlignmentConfig(Section):
    """Labeling by the selectors and alignment by DPO (FedBiscuit appendix A.2)."""

    prompts: int | None = Field(None, ge=1)
    """Server prompts used (a seeded sample); null uses all. FedBiscuit table 5: 42,782."""
    completions: int = Field(2, ge=2, le=10_000)
    """Completions sampled per prompt (n); all n (n - 1) / 2 pairs are labeled."""
    pairs_per_prompt: int | None = Field(None, ge=1)
    """Labeled pairs of a prompt that are trained on: its completions are ranked by the pairs that
    they win, and the first is paired with the last, the second with the last but one, and so on.
    null takes all pairs."""
    temperature: float = Field(0.7, gt=0)
    """Sampling temperature; FedBiscuit B.1: 0.7."""
    dpo: DpoConfig = Field(default_factory=DpoConfig)
    """The alignment."""
