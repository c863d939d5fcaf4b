"""A causal language model in this process that writes judgments; it may be a GPTQ checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from components.config import BackboneConfig
from components.data.templates import Template
from components.data.templates import load as load_template
from components.evaluation.judges.autoj.judge_prompts import encode_question
from components.evaluation.judges.judge import JudgeError
from components.models.backbone import fetch_backbone, load_backbone, load_tokenizer
from components.models.chat_template import ChatTemplate
from components.models.generation import GenerationSettings, find_stop_ids, generate_completions
from components.models.selector import Comparison
from components.progress import Work, report_work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from components.evaluation.judges.autoj.autoj_judge import AutoJSection

log = logging.getLogger(__name__)
GPTQ_LIBRARIES = {"optimum": "1.24.0", "gptqmodel": "1.4.3"}
"""Libraries that transformers 5.23 needs for a GPTQ checkpoint, with their oldest supported
versions.

Source: quantizers/quantizer_gptq.py of transformers."""


class LocalModel:
    """A causal language model in this process that writes judgments, greedily and in batches.

    Attributes:
        shortened: number of inputs that were truncated to max_prompt_tokens.
    """

    def __init__(self, options: AutoJSection, device: str, policy: Template | None = None) -> None:
        """Load the model.

        Raises:
            JudgeError: the model cannot be loaded, or has no chat template although the options ask
                for one.
        """
        self.options = options
        self.device = device
        self.policy = policy
        self.shortened = 0
        self.template = load_template(options.prompt_file, "pairwise")
        config = read_model_config(options)
        backbone = BackboneConfig(name=options.location, revision=options.revision, dtype=options.dtype)
        self.tokenizer = load_tokenizer(backbone)
        if options.chat_template and not self.tokenizer.chat_template:
            raise JudgeError(
                f"the judge '{options.model}' has no chat template: set"
                " evaluation.judge.chat_template to false, or use another model."
            )
        self.model = (
            load_backbone(backbone, device)
            if _quantization_method(config) is None
            else _load_quantized(options, device)
        )
        if options.chat_template:
            chat = ChatTemplate(self.tokenizer, {}, options.chat_date)
            stop_ids = find_stop_ids(self.model.generation_config, self.tokenizer, chat.end_of_turn())
            cast("Any", self.model.generation_config).eos_token_id = stop_ids

    def write(self, comparisons: Sequence[Comparison]) -> list[str]:
        """Write a judgment on each comparison, in their order."""
        encoded = []
        for comparison in comparisons:
            ids, truncated = encode_question(
                self.tokenizer, self.template, comparison, self.options, self.policy
            )
            self.shortened += truncated
            encoded.append(ids)
        settings = GenerationSettings(self.options.batch_size, self.options.max_new_tokens)
        written = generate_completions(
            self.model,
            self.tokenizer,
            encoded,
            settings,
            seed=0,
            progress=lambda done, total: report_work(log, Work("judgments", done, total)),
        )
        return [completions[0].text for completions in written]


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
            f"the judge's model '{options.model}' cannot be read: {_first_line(error)} Use a hub id that this"
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
    missing = [
        f"{name} >= {oldest}" for name, oldest in GPTQ_LIBRARIES.items() if not _is_installed(name, oldest)
    ]
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
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.location,
            revision=options.revision or "main",
            dtype="float16" if device.startswith("cuda") else "float32",
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise JudgeError(
            f"the judge's quantized model '{options.model}' could not be loaded on {device}:"
            f" {_first_line(error)}"
        ) from None
    return cast("PreTrainedModel", model.requires_grad_(False).eval())


def _quantization_method(config: PreTrainedConfig) -> str | None:
    """The quantization method of a checkpoint, e.g. 'gptq'; None if it has none."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    is_mapping = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_mapping else quantization.quant_method
    return str(getattr(method, "value", method))


def _is_installed(name: str, oldest: str) -> bool:
    from importlib import metadata

    from packaging.version import Version

    try:
        return Version(metadata.version(name)) >= Version(oldest)
    except metadata.PackageNotFoundError:
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
