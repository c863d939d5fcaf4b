"""Backbones, LoRA adapters, and the two models that are trained: the selector and the policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from components.config.recipe_files import NamedModel, TemplateFile
from components.config.section import Section


class BackboneConfig(NamedModel):
    """A frozen causal language model."""

    name: str = "embedded"
    """'embedded' (SmolLM2-135M-Instruct), 'tiny-random' (random weights, for tests), a local
    folder, or a hub id."""
    revision: str | None = None
    """Hub revision (commit or tag)."""
    layers: int | None = Field(None, ge=1)
    """Use the first N transformer layers; null uses all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on CUDA."""
    quantization: Literal["none", "8bit"] = "none"
    """8bit: the weights of all linear layers except the head as LLM.int8() by bitsandbytes (DRIFT
    appendix A). Adapters stay float32. Needs the extra 8bit."""
    gradient_checkpointing: bool = False
    """Store only the inputs of layers for the backward pass, which computes the layers again. The
    gradients are the same."""
    # stored recipes and their hashes stay as they were
    device_map: Literal["auto"] | dict[str, Literal["cpu", "disk"]] | None = Field(
        None, exclude_if=lambda value: value is None
    )
    """Layers of a backbone that is larger than a device, by their names in the model, such as
    {model.layers.31: disk}. Their weights stay in the machine's memory (cpu) or in the model's
    files (disk), and are loaded whenever they are computed. auto: those that do not fit on the
    device, and then not in memory. null: the whole backbone is on the device."""
    max_memory: dict[Literal["device", "cpu"], str] = Field(
        default_factory=dict, exclude_if=lambda value: not value
    )
    """Memory that weights may take with device_map 'auto', such as {device: 60GiB, cpu: 200GiB};
    90% of what is free where it is left out."""

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.device_map is not None and self.quantization != "none":
            raise ValueError(
                "device_map is for weights that are not quantized: leave it out, or set quantization to"
                " 'none'"
            )
        if self.max_memory and self.device_map != "auto":
            raise ValueError("max_memory is for device_map 'auto': leave it out, or set device_map to 'auto'")
        for place, size in self.max_memory.items():
            if not re.fullmatch(r"\d+(\.\d+)?[KMG]i?B", size):
                raise ValueError(f"max_memory.{place} is '{size}': give a size such as 60GiB or 500MB")
        return self


class LoraConfig(Section):
    """A low-rank adapter (Hu et al. 2021). FedBiscuit B.1: rank 8, alpha 16, dropout 0.05."""

    r: int = Field(8, ge=1, le=65_536)
    """Rank."""
    alpha: float = Field(16.0, gt=0)
    """Scale; the update is alpha / r * B A."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the input of the adapter."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the linear layers that get an adapter, as in PEFT; not embeddings or the head."""


@dataclass(frozen=True)
class FrozenModel:
    """A model that a section of a recipe loads to score or to generate, and what goes through it at once."""

    name: str  # in a recipe's terms, such as 'reward helpful'
    backbone: BackboneConfig
    rows: int
    tokens: int  # of the longest input
    new_tokens: int = 0  # generated after it; 0: it scores
    lora: LoraConfig | None = None  # of its adapter


class SelectorConfig(Section):
    """The binary selector (FedBiscuit section 4), which chooses by the logits of ' A' and ' B'."""

    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    """The frozen model."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """The trained adapter."""
    template: TemplateFile = TemplateFile("summarization/selector")
    """Name of a template under components/data/prompt_templates, or the path of a file."""
    max_length: int = Field(1024, ge=16)
    """Maximum length of the whole input, with its template (tokens)."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Maximum length of the prompt's own text, without the template (tokens); a longer one loses
    its end. null: only as max_length needs."""
    orders: Literal["both", "single"] = "both"
    """both: score a pair in both orders of its completions and average; single: in the given order
    only, as the paper does."""
    score_batch_size: int = Field(16, ge=1)
    """Pairs scored in one batch; with orders 'both' a batch has twice as many rows."""


def _read_date(value: object) -> object:
    """A day as YAML reads it, or as text, in ISO form."""
    if isinstance(value, str):
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError:
            raise ValueError("give a date such as 2026-01-31") from None
    return value.isoformat() if type(value) is date else value


ChatDate = Annotated[
    str | None,
    BeforeValidator(_read_date),
    Field(
        description=(
            "The date, such as 2026-01-31, given to chat templates that print today's date (Llama 3.2)."
            " null: the date on which the run starts, which is stored with the run."
        )
    ),
]

RENDERING_OPTIONS = (
    "messages",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of `apply_chat_template` that a template does not get, or that the project sets."""

ChatMode = Literal["auto", "turns", "none"]
"""How a prompt becomes the input of a backbone with a chat template, see `PolicyConfig.chat`."""


class PolicyConfig(Section):
    """The language model that is aligned."""

    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    """The frozen model."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """The trained adapter."""
    template: TemplateFile = TemplateFile("summarization/policy")
    """Name of a template under components/data/prompt_templates, or the path of a file."""
    chat: ChatMode = "auto"
    """How a prompt becomes the input of a backbone with a chat template. auto: in the template, as
    one turn of the user; turns: each turn of a dialogue ('Human:', 'Assistant:') as a turn of its
    own, without the template; none: in the template, without the chat template, as for backbones
    that have none. 'turns' needs a chat template. A turn begins with its marker at the start of the
    text or after an empty line. If that gives no dialogue, a marker at the start of any line does,
    provided that the text begins with one, the speakers alternate and the last turn is the user's.
    Any other marker is a part of the text of its turn."""
    system: str | None = None
    """System turn before each prompt, for backbones with a chat template. null: the chat template's
    own default."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the backbone's chat template, e.g. {enable_thinking: false} for Qwen3; as
    chat_template_kwargs of TRL."""
    chat_date: ChatDate = None
    max_prompt_tokens: int = Field(512, ge=8)
    """Maximum length of the whole rendered input (tokens): the prompt in its template and in the
    chat template, with special tokens. Of a longer one only the prompt's own text is cut."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a longer prompt is kept. keep_end is for chains of thoughts, whose last steps
    matter."""
    max_new_tokens: int = Field(80, ge=1)
    """Maximum completion length (tokens); FedBiscuit B.1: 80 for summarization, 300 for QA."""
    generation_batch_size: int = Field(16, ge=1)
    """Sequences generated in one batch."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refused = [name for name in arguments if name in RENDERING_OPTIONS]
        if refused:
            raise ValueError(
                f"'{refused[0]}' is not an argument of a chat template: give only what the template itself"
                " reads, such as enable_thinking"
            )
        return arguments
