"""The section of a recipe that describes the Auto-J judge, and the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.config import BackboneConfig, FrozenModel, NamedModel, TemplateFile
from components.config.models import ChatDate
from components.config.thoughts import EndpointOptions
from components.data.records import DataError
from components.data.templates import Template
from components.data.templates import load as load_template
from components.evaluation.judges.autoj.endpoint import Endpoint
from components.evaluation.judges.autoj.judge_prompts import judge_query
from components.evaluation.judges.autoj.local import LocalModel, read_model_config
from components.evaluation.judges.autoj.verdict_parsing import parse_autoj
from components.evaluation.judges.judge import Judge, JudgeError, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.models.chat import read_key
from components.models.chat_template import reads_clock
from components.models.selector import Comparison


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

    def with_chat_date(self, day: str) -> AutoJSection:
        """The section with the day that the model's chat template prints, if it prints one."""
        prints_day = self.chat_template and self.base_url is None and self.chat_date is None
        if prints_day and reads_clock(BackboneConfig(name=self.location, revision=self.revision)):
            return self.model_copy(update={"chat_date": day})
        return self

    def frozen_models(self) -> list[FrozenModel]:
        if self.base_url is not None:
            return []
        backbone = BackboneConfig(name=self.location, revision=self.revision, dtype=self.dtype)
        return [FrozenModel("judge", backbone, self.batch_size, self.max_prompt_tokens, self.max_new_tokens)]

    def check_data(self, prepared: Path) -> None:
        """Refuse a missing key, model or quantization library before the run.

        Without this check the run would fail at its end.

        Raises:
            JudgeError: states what is missing.
        """
        if self.base_url:
            read_key(self, "the judge's endpoint", JudgeError)
        else:
            read_model_config(self)

    def build(self, resources: JudgeResources) -> AutoJ:
        """Load the model, or read the endpoint's key.

        Raises:
            JudgeError: the model cannot be loaded, or the key's variable is not set.
        """
        return AutoJ(self, resources.device, resources.policy)


class AutoJ(Judge):
    """A generative judge; see the module's docstring.

    Its texts are the comparisons with their judgments and verdicts. Its figure is the number of
    inputs that were truncated.
    """

    def __init__(self, options: AutoJSection, device: str, policy: Template | None = None) -> None:
        """Load the model, or read the endpoint's key.

        Args:
            options: section of the recipe.
            device: device of a local model.
            policy: the policy's template, whose instruction is part of the query; None: the prompt
                is the complete query.

        Raises:
            JudgeError: the model cannot be loaded, or the key's variable is not set.
        """
        self.options = options
        self.policy = policy
        self._writer: LocalModel | Endpoint
        if options.base_url:
            self._writer = Endpoint(options, policy)
            location = f"at {urlsplit(options.base_url).netloc}"
        else:
            self._writer = LocalModel(options, device, policy)
            location = "on this machine"
        super().__init__(
            f"Auto-J's pairwise protocol, {options.model} {location}, instruction {options.prompt_file}",
            {"judge_shortened": 0},
        )

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """Judge each comparison in its own order.

        Raises:
            JudgeError: the endpoint does not answer, or the instruction leaves no room for the
                responses.
        """
        judgments = self._writer.write(comparisons)
        self.figures = {"judge_shortened": self._writer.shortened}
        verdicts = [parse_autoj(text) for text in judgments]
        for comparison, text, verdict in zip(comparisons, judgments, verdicts, strict=True):
            self.texts.append(
                {
                    "prompt": judge_query(self.policy, comparison.prompt),
                    "response_1": comparison.first,
                    "response_2": comparison.second,
                    "text": text,
                    "verdict": verdict.value,
                }
            )
        return verdicts
