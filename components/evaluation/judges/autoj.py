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
Quantized checkpoints, such as GAIR/autoj-13b-GPTQ-4bits, are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.config import BackboneConfig, FrozenModel, NamedModel, PolicyConfig, TemplateFile, UserError
from components.config.models import ChatDate
from components.config.thoughts import EndpointOptions
from components.data.records import DataError
from components.data.templates import Template, user_message
from components.data.templates import load as load_template
from components.evaluation.judges.autoj_verdict import parse_autoj
from components.evaluation.judges.judge import Judge, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.hub import require_reachable
from components.models.backbone import (
    fetch_backbone,
    first_line,
    load_tokenizer,
    quantization_of,
)
from components.models.chat import ChatEndpoint, read_key
from components.models.chat_template import needs_date
from components.models.policy import Policy
from components.models.selector import Comparison
from components.models.tokens import decode_cut, encode_text
from components.progress import Work, report_work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)
ENDPOINT = "the judge's endpoint"
FORM = TemplateFile("[INST] {prompt} [/INST]", text="[INST] {prompt} [/INST]")  # of Auto-J's training


class AutoJSection(EndpointOptions, NamedModel, JudgeSection):
    """Auto-J's pairwise protocol, by a model in this process or at an endpoint."""

    where: ClassVar[str] = "evaluation.judge"
    model_key: ClassVar[str] = "model"

    kind: Literal["autoj"] = Field("autoj", description="Kind of the judge.")

    model: str = Field(
        "GAIR/autoj-13b",
        min_length=1,
        description=(
            "Hub id or local folder of a causal language model; with base_url: its name at the endpoint."
        ),
    )
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: float32 on CPU, bfloat16 on CUDA.",
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
    def local(self) -> PolicyConfig:
        """The model in this process."""
        return PolicyConfig(
            backbone=BackboneConfig(name=self.location, revision=self.revision, dtype=self.dtype),
            template=TemplateFile("thoughts/policy") if self.chat_template else FORM,
            chat="auto" if self.chat_template else "none",
            chat_date=self.chat_date,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            generation_batch_size=self.batch_size,
        )

    def with_chat_date(self, day: str) -> AutoJSection:
        """The section with the day that the model's chat template prints, if it prints one."""
        if self.base_url is None and needs_date(self.local):
            return self.model_copy(update={"chat_date": day})
        return self

    def frozen_models(self) -> list[FrozenModel]:
        if self.base_url is not None:
            return []
        return [
            FrozenModel(
                "judge", self.local.backbone, self.batch_size, self.max_prompt_tokens, self.max_new_tokens
            )
        ]

    def check_data(self, prepared: Path) -> None:
        if self.base_url:
            read_key(self, ENDPOINT)
        else:
            read_model_config(self)

    def build(self, resources: JudgeResources) -> AutoJ:
        return AutoJ(self, resources.device, resources.policy)


class AutoJ(Judge):
    """A generative judge, whose figure is the number of inputs that were truncated."""

    def __init__(self, options: AutoJSection, device: str, policy: Template | None = None) -> None:
        """Load the model, or read the endpoint's key.

        The instruction of the policy's template is part of the query; without one the prompt is all of it.
        """
        self._options = options
        self._template = load_template(options.prompt_file, "pairwise")
        self._policy = policy
        self.model: Policy | ChatEndpoint
        if options.base_url:
            self.model = ChatEndpoint(options, options.model, options.max_new_tokens, ENDPOINT)
            location = f"at {urlsplit(options.base_url).netloc}"
        else:
            if options.chat_template and not load_tokenizer(options.local.backbone).chat_template:
                raise UserError(
                    f"the judge '{options.model}' has no chat template: set"
                    " evaluation.judge.chat_template to false, or use another model."
                )
            self.model = Policy(options.local, device)
            self.model.cuts_prompts = False  # the instruction may be written for the model's tokens
            location = "on this machine"
        super().__init__(
            f"Auto-J's pairwise protocol, {options.model} {location}, instruction {options.prompt_file}",
            {"judge_shortened": 0},
        )

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        replies = self.model.write(
            [self.prompt(comparison) for comparison in comparisons],
            progress=lambda done, total: report_work(log, Work("judgments", done, total)),
        )
        verdicts = []
        for comparison, reply in zip(comparisons, replies, strict=True):
            text = reply.text.strip()
            verdicts.append(parse_autoj(text))
            self.texts.append(
                {
                    "prompt": judge_query(self._policy, comparison.prompt),
                    "response_1": comparison.first,
                    "response_2": comparison.second,
                    "text": text,
                    "verdict": verdicts[-1].value,
                }
            )
        return verdicts

    def prompt(self, comparison: Comparison) -> str:
        """The instruction with a comparison, truncated to max_prompt_tokens for a local model.

        The prompt is truncated at its end first; if that is not sufficient, the responses are, the
        longer one first. The instruction and that of the policy's template are never truncated; if they alone
        take more, that is a UserError.
        """
        instruction = self._instruction(comparison)
        if isinstance(self.model, ChatEndpoint) or not self.model.surplus(instruction):
            return instruction
        self.figures = {"judge_shortened": self.figures["judge_shortened"] + 1}
        tokenizer = self.model.tokenizer
        texts = (comparison.prompt, comparison.first, comparison.second)
        marks = self.model.marks.prompt
        cut: list[list[int]] = [encode_text(tokenizer, marks.cut(text)) for text in texts]
        while surplus := self.model.surplus(instruction):
            if not any(cut):
                limit = self._options.max_prompt_tokens
                raise UserError(
                    f"the instruction '{self._options.prompt_file}' alone takes {limit + surplus} tokens,"
                    f" more than evaluation.judge.max_prompt_tokens {limit}: raise it."
                )
            _cut(cut, surplus)
            parts = zip(cut, texts, strict=True)
            instruction = self._instruction(Comparison(*[decode_cut(tokenizer, *part) for part in parts]))
        return instruction

    def _instruction(self, comparison: Comparison) -> str:
        """The instruction with a comparison, whose texts have no control token of a local model."""
        texts = [judge_query(self._policy, comparison.prompt), comparison.first, comparison.second]
        if isinstance(self.model, Policy):
            texts = [self.model.marks.prompt.cut(text) for text in texts]
        prompt, response, another = texts
        return self._template.render(prompt=prompt, response=response, response_another=another)


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
    """Read the configuration of the judge's model, before anything is trained.

    A UserError where there is no such model, its context is too short, or it is quantized.
    """
    from transformers import AutoConfig

    source = fetch_backbone(options.location)
    try:
        require_reachable(source, options.revision)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, revision=options.revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the judge's model '{options.model}' cannot be read: {first_line(error).rstrip('.')}. Use a"
            " hub id that this machine can reach, or a local folder (evaluation.judge.model), or an endpoint"
            " (base_url)."
        ) from None
    context = getattr(config, "max_position_embeddings", None)
    length = options.max_prompt_tokens + options.max_new_tokens
    if context and length > context:
        raise UserError(
            f"the judge '{options.model}' has a context of at most {context} tokens, but"
            f" evaluation.judge.max_prompt_tokens {options.max_prompt_tokens} and max_new_tokens"
            f" {options.max_new_tokens} make {length}: lower them."
        )
    if (method := quantization_of(config.to_dict())) is not None:
        raise UserError(
            f"the judge's model '{options.model}' is a quantized checkpoint ({method}), which is"
            " not read here: use the unquantized model, such as GAIR/autoj-13b, or an endpoint"
            " (evaluation.judge.base_url)."
        )
    return config
