"""The Auto-J judge with its pairwise protocol with ties (Li et al. 2023, arXiv 2310.05470).

It is the judge of FedBiscuit's table 1. A generative judge reads a query and two responses,
compares them in words, and ends with a decision for response 1, response 2 or a tie. As in the
authors' code (GAIR-NLP/auto-j) decoding is greedy, the instruction stands between "[INST] " and "
[/INST]", and the verdict is parsed after the last "final decision is". The query is the user
message of the policy's template (templates.user_message), because a prompt alone may not state the
task, such as a post that is to be summarized.

The instruction is not the authors' text (prompt_templates/autoj/pairwise.txt). To use theirs, save
the text of `pairwise_tie` in codes/usage/constants_prompt.py of that repository to a file, with its
placeholders {prompt}, {response} and {response_another}, and name the file as `prompt_file`.

The judge runs in this process with transformers, or behind an OpenAI-compatible endpoint.
GAIR/autoj-13b-GPTQ-4bits, the 4-bit form, is a GPTQ checkpoint. transformers reads it with
`optimum` and `gptqmodel`, which this project does not install.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast
from urllib.parse import urlsplit

from packaging.version import Version
from pydantic import Field, field_validator

from components.config import BackboneConfig, FrozenModel, NamedModel, TemplateFile
from components.config.models import ChatDate
from components.config.thoughts import EndpointOptions
from components.data.records import DataError
from components.data.templates import Template, user_message
from components.data.templates import load as load_template
from components.evaluation.judges.autoj_verdict import parse_autoj
from components.evaluation.judges.judge import Judge, JudgeError, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.models.backbone import (
    fetch_backbone,
    first_line,
    load_backbone,
    load_tokenizer,
    require_weights,
)
from components.models.chat import ChatEndpoint, read_key
from components.models.chat_template import ChatTemplate, reads_clock
from components.models.generation import GenerationSettings, find_stop_ids, generate_completions
from components.models.selector import Comparison
from components.progress import Work, report_work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
ENDPOINT = "the judge's endpoint"
GPTQ_LIBRARIES = {"optimum": "1.24.0", "gptqmodel": "1.4.3"}
"""Libraries that transformers 5.23 needs for a GPTQ checkpoint, with the oldest versions that its
quantizers/quantizer_gptq.py supports."""


class AutoJSection(EndpointOptions, NamedModel, JudgeSection):
    """Auto-J's pairwise protocol, by a model in this process or at an endpoint."""

    where: ClassVar[str] = "evaluation.judge"
    model_key: ClassVar[str] = "model"

    kind: Literal["autoj"] = Field("autoj", description="Kind of the judge.")

    model: str = Field(
        "GAIR/autoj-13b",
        min_length=1,
        description=(
            "Hub id or local folder of a causal language model (GAIR/autoj-13b-GPTQ-4bits is the 4-bit form);"
            " with base_url: its name at the endpoint."
        ),
    )
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "auto: float32 on CPU, bfloat16 on CUDA. A GPTQ checkpoint always runs in float16 on CUDA."
        ),
    )
    prompt_file: TemplateFile = Field(
        TemplateFile("autoj/pairwise"),
        description=(
            "Instruction: a template of the project, or a text file with {prompt}, {response} and"
            " {response_another}."
        ),
    )
    chat_template: bool = Field(
        False,
        description=(
            "Format the instruction with the model's own chat template; false: as '[INST] ... [/INST]', the"
            " format of Auto-J's training. An endpoint applies its own format."
        ),
    )
    chat_date: ChatDate = None
    max_prompt_tokens: int = Field(
        3072,
        ge=64,
        description=(
            "Maximum length of the whole input of a local model, with its instruction (tokens): Llama 2's"
            " 4,096 less max_new_tokens. The prompt inside the query is truncated first, then both responses."
            " Inputs of an endpoint are not truncated."
        ),
    )
    max_new_tokens: int = Field(
        1024, ge=1, description="Longest judgment (tokens); 1,024 in the authors' code."
    )
    batch_size: int = Field(8, ge=1, description="Judgments that a local model generates at once.")

    @field_validator("prompt_file")
    @classmethod
    def _instruction(cls, file: TemplateFile) -> TemplateFile:
        try:
            load_template(file, "pairwise")
        except DataError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return file

    @property
    def backbone(self) -> BackboneConfig:
        """The local model."""
        return BackboneConfig(name=self.location, revision=self.revision, dtype=self.dtype)

    def with_chat_date(self, day: str) -> AutoJSection:
        """The section with the day that the model's chat template prints, if it prints one."""
        prints_day = self.chat_template and self.base_url is None and self.chat_date is None
        if prints_day and reads_clock(self.backbone):
            return self.model_copy(update={"chat_date": day})
        return self

    def frozen_models(self) -> list[FrozenModel]:
        if self.base_url is not None:
            return []
        return [
            FrozenModel("judge", self.backbone, self.batch_size, self.max_prompt_tokens, self.max_new_tokens)
        ]

    def check_data(self, prepared: Path) -> None:
        if self.base_url:
            read_key(self, ENDPOINT, JudgeError)
        else:
            read_model_config(self)

    def build(self, resources: JudgeResources) -> AutoJ:
        return AutoJ(self, resources.device, resources.policy)


class AutoJ(Judge):
    """A generative judge, whose figure is the number of inputs that were truncated."""

    def __init__(self, options: AutoJSection, device: str, policy: Template | None = None) -> None:
        """Load the model, or read the endpoint's key.

        Args:
            options: section of the recipe.
            device: device of a local model.
            policy: the policy's template, whose instruction is part of the query; None: the prompt
                is the complete query.
        """
        self._template = load_template(options.prompt_file, "pairwise")
        self._policy = policy
        self._writer: LocalModel | ChatEndpoint
        if options.base_url:
            self._writer = ChatEndpoint(options, options.model, options.max_new_tokens, ENDPOINT, JudgeError)
            location = f"at {urlsplit(options.base_url).netloc}"
        else:
            self._writer = LocalModel(options, device, self.instruction)
            location = "on this machine"
        super().__init__(
            f"Auto-J's pairwise protocol, {options.model} {location}, instruction {options.prompt_file}",
            {"judge_shortened": 0},
        )

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        judgments = self._write(comparisons)
        verdicts = [parse_autoj(text) for text in judgments]
        for comparison, text, verdict in zip(comparisons, judgments, verdicts, strict=True):
            self.texts.append(
                {
                    "prompt": judge_query(self._policy, comparison.prompt),
                    "response_1": comparison.first,
                    "response_2": comparison.second,
                    "text": text,
                    "verdict": verdict.value,
                }
            )
        return verdicts

    def _write(self, comparisons: Sequence[Comparison]) -> list[str]:
        """A judgment on each comparison; an endpoint refuses inputs that are too long for it."""
        if isinstance(self._writer, ChatEndpoint):
            return [reply.text for reply in self._writer.generate(list(map(self.instruction, comparisons)))]
        judgments, truncated = self._writer.write(comparisons)
        self.figures = {"judge_shortened": self.figures["judge_shortened"] + truncated}
        return judgments

    def instruction(self, comparison: Comparison) -> str:
        """The instruction with a comparison."""
        return self._template.render(
            prompt=judge_query(self._policy, comparison.prompt),
            response=comparison.first,
            response_another=comparison.second,
        )


class LocalModel:
    """A causal language model in this process that writes judgments, greedily and in batches."""

    def __init__(self, options: AutoJSection, device: str, instruction: Callable[[Comparison], str]) -> None:
        """Load the model, which reads the instruction with a comparison."""
        self.options = options
        self.instruction = instruction
        config = read_model_config(options)
        self.tokenizer = load_tokenizer(options.backbone)
        if options.chat_template and not self.tokenizer.chat_template:
            raise JudgeError(
                f"the judge '{options.model}' has no chat template: set"
                " evaluation.judge.chat_template to false, or use another model."
            )
        self.model = (
            load_backbone(options.backbone, device)
            if _quantization_method(config) is None
            else _load_quantized(options, device)
        )
        self.chat: ChatTemplate | None = None
        if options.chat_template:
            self.chat = ChatTemplate(self.tokenizer, {}, options.chat_date)
            stop_ids = find_stop_ids(self.model.generation_config, self.tokenizer, self.chat.end_of_turn())
            cast("Any", self.model.generation_config).eos_token_id = stop_ids

    def write(self, comparisons: Sequence[Comparison]) -> tuple[list[str], int]:
        """Write a judgment on each comparison, in their order, and count the truncated inputs."""
        encoded = [self.encode(comparison) for comparison in comparisons]
        written = generate_completions(
            self.model,
            self.tokenizer,
            [ids for ids, _ in encoded],
            GenerationSettings(self.options.batch_size, self.options.max_new_tokens),
            seed=0,
            progress=lambda done, total: report_work(log, Work("judgments", done, total)),
        )
        return [completions[0].text for completions in written], sum(truncated for _, truncated in encoded)

    def encode(self, comparison: Comparison) -> tuple[list[int], bool]:
        """Encode the instruction with a comparison, truncated to max_prompt_tokens.

        The prompt is truncated at its end first; if that is not sufficient, the responses are, the
        longer one first. The instruction and that of the policy's template are never truncated.

        Returns:
            token ids, and whether a text was truncated.

        Raises:
            JudgeError: the instructions alone take more than max_prompt_tokens.
        """
        limit = self.options.max_prompt_tokens
        ids = self._encode_whole(comparison)
        if len(ids) <= limit:
            return ids, False
        cut: list[list[int]] = [
            self.tokenizer.encode(text, add_special_tokens=False)
            for text in (comparison.prompt, comparison.first, comparison.second)
        ]
        while (surplus := len(ids) - limit) > 0:
            if not any(cut):
                raise JudgeError(
                    f"the instruction '{self.options.prompt_file}' alone takes {len(ids)} tokens, more than"
                    f" evaluation.judge.max_prompt_tokens {limit}: raise it."
                )
            _cut(cut, surplus)
            ids = self._encode_whole(Comparison(*[cast("str", self.tokenizer.decode(text)) for text in cut]))
        return ids, True

    def _encode_whole(self, comparison: Comparison) -> list[int]:
        """Encode a comparison in the format of Auto-J, or in the model's chat template."""
        instruction = self.instruction(comparison)
        ids: list[int]
        if self.chat is None:
            ids = self.tokenizer.encode(f"[INST] {instruction} [/INST]")
        else:
            text = self.chat.render([{"role": "user", "content": instruction}], add_generation_prompt=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def _cut(texts: list[list[int]], surplus: int) -> None:
    """Remove tokens from the end of the prompt, or else of the longer response (the first, if equal)."""
    prompt, first, second = texts
    if prompt:
        del prompt[max(0, len(prompt) - surplus) :]
        return
    shorter, longer = sorted((second, first), key=len)
    count = min(surplus, max((surplus + 1) // 2, len(longer) - len(shorter)))
    del longer[max(0, len(longer) - count) :]


def judge_query(policy: Template | None, prompt: str) -> str:
    """Build the query: the user message of the policy's template, or the prompt itself."""
    return prompt if policy is None else user_message(policy, prompt)


def read_model_config(options: AutoJSection) -> PreTrainedConfig:
    """Read and check the configuration of the judge's model, before anything is trained.

    Raises:
        JudgeError: there is no such model, its context is too short, or a library that its
            quantization needs is not installed.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            fetch_backbone(options.location), revision=options.revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise JudgeError(
            f"the judge's model '{options.model}' cannot be read: {first_line(error)} Use a hub id that this"
            " machine can reach, or a local folder (evaluation.judge.model), or an endpoint"
            " (base_url)."
        ) from None
    context = getattr(config, "max_position_embeddings", None)
    length = options.max_prompt_tokens + options.max_new_tokens
    if context and length > context:
        raise JudgeError(
            f"the judge '{options.model}' has a context of at most {context} tokens, but"
            f" evaluation.judge.max_prompt_tokens {options.max_prompt_tokens} and max_new_tokens"
            f" {options.max_new_tokens} make {length}: lower them."
        )
    if _quantization_method(config) == "gptq":
        _check_gptq_libraries(options.model)
    return config


def _check_gptq_libraries(model: str) -> None:
    missing = []
    for name, oldest in GPTQ_LIBRARIES.items():
        try:
            is_recent = Version(metadata.version(name)) >= Version(oldest)
        except metadata.PackageNotFoundError:
            is_recent = False
        if not is_recent:
            missing.append(f"{name} >= {oldest}")
    if missing:
        raise JudgeError(
            f"the judge '{model}' is a GPTQ checkpoint, but {' and '.join(missing)} to read it"
            f" {'are' if len(missing) > 1 else 'is'} not installed: run"
            f" `pip install {' '.join(GPTQ_LIBRARIES)}`, or use the unquantized model, or an endpoint"
            " (evaluation.judge.base_url)."
        )


def _load_quantized(options: AutoJSection, device: str) -> PreTrainedModel:
    """Load a quantized checkpoint directly on its device; its kernels need float16 on CUDA."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            options.location,
            revision=options.revision or "main",
            dtype="float16" if device.startswith("cuda") else "float32",
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, loading = loaded
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise JudgeError(
            f"the judge's quantized model '{options.model}' could not be loaded on {device}:"
            f" {first_line(error)}"
        ) from None
    require_weights(f"the judge's model '{options.model}'", loading)
    return cast("PreTrainedModel", model.requires_grad_(False).eval())


def _quantization_method(config: PreTrainedConfig) -> str | None:
    """The quantization method of a checkpoint, e.g. 'gptq'; None if it has none."""
    quantization: dict[str, str] = getattr(config, "quantization_config", None) or {}
    return quantization.get("quant_method")
