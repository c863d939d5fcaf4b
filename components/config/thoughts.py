"""Trees of thoughts, question sets, and the model that scores thoughts."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from components.config.models import BackboneConfig, ChatDate, FrozenModel, PolicyConfig
from components.config.recipe_files import InputFile, NamedModel, TemplateFile
from components.config.section import Section


class EndpointOptions(Section):
    """Address of an OpenAI-compatible endpoint, and how it is called."""

    where: ClassVar[str] = "endpoint"  # place of the section in a recipe, for messages

    base_url: str | None = None
    """Root of the endpoint, e.g. http://127.0.0.1:8000/v1; null: the model runs here."""
    api_key_env: str | None = None
    """NAME of the environment variable that holds the API key; null sends none. The key itself
    never belongs in a recipe."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, e.g. {seed: 0}. null removes a field, e.g. {max_tokens: null,
    max_completion_tokens: 1024}."""
    timeout: float = Field(120.0, gt=0, le=86_400)
    """Timeout of a request (seconds)."""
    retries: int = Field(5, ge=0, le=1000)
    """Retries after status 429 or 5xx, a broken connection, or a malformed response."""
    backoff: float = Field(1.0, ge=0, le=3600)
    """Seconds before the first retry, doubled for each further one up to 60. A Retry-After header
    takes precedence, up to 60 seconds too."""
    concurrency: int = Field(4, ge=1, le=1000)
    """Maximum number of concurrent requests."""

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        """Check the keys that may hold a secret. A field's own validator would show its value."""
        if self.base_url is not None and not _is_endpoint_root(self.base_url):
            raise ValueError(
                f"{self.where}.base_url must be the root of an endpoint, such as"
                " http://127.0.0.1:8000/v1, without a user, a password or a query in it"
            )
        if self.api_key_env is None:
            return self
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise ValueError(
                f"{self.where}.api_key_env must be the NAME of an environment variable, in capitals, such as"
                " OPENAI_API_KEY; the key itself does not belong in a recipe"
            )
        if self.base_url is None:
            raise ValueError(
                f"{self.where}.api_key_env is for an endpoint: set base_url too, or leave api_key_env out"
            )
        return self


def _is_endpoint_root(address: str) -> bool:
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        return False
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return False
    return not (url.username or url.password or url.query or url.fragment)


class EvaluatorOptions(EndpointOptions, NamedModel):
    """The model that scores thoughts: in this process, or an OpenAI-compatible endpoint."""

    where: ClassVar[str] = "thoughts.evaluator"
    model_key: ClassVar[str] = "model"

    model: str = Field("embedded", min_length=1)
    """Name of a backbone; with base_url, the name of the model at the endpoint. DRIFT section 7:
    DeepSeek R1 32B."""
    revision: str | None = None
    """Hub revision (commit or tag)."""
    max_prompt_tokens: int = Field(1024, ge=64)
    """Maximum length of the whole rendered input (tokens) in this process. A longer one loses the
    end of its text, where the thought is; thoughts.max_question_tokens prevents this."""
    max_new_tokens: int = Field(8, ge=1)
    """Maximum answer length (tokens). A model that reasons before it answers needs more: its last
    line is read, and of an answer that was cut off the first line, if that is a score by itself."""
    batch_size: int = Field(8, ge=1)
    """Thoughts scored in one batch in this process."""
    retries_unread: int = Field(2, ge=0, le=1000)
    """Retries, at temperature 1, of a score that cannot be parsed."""
    chat_date: ChatDate = None
    read: Literal["text", "expected"] = "text"
    """text: the number that the model writes (DRIFT D.1); expected: the mean of 1 to 10 under the
    model's probabilities, for models that are too small to write a number (in this process
    only)."""

    @property
    def local(self) -> PolicyConfig:
        """The model in this process."""
        return PolicyConfig(
            backbone=BackboneConfig(name=self.location, revision=self.revision),
            template=TemplateFile("thoughts/policy"),
            chat_date=self.chat_date,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            generation_batch_size=self.batch_size,
        )

    def frozen_models(self) -> list[FrozenModel]:
        """The model that it loads in this process."""
        if self.base_url is not None:
            return []
        tokens = 0 if self.read == "expected" else self.max_new_tokens
        return [
            FrozenModel("evaluator", self.local.backbone, self.batch_size, self.max_prompt_tokens, tokens)
        ]

    @model_validator(mode="after")
    def _check_read(self) -> Self:
        if self.read == "expected" and self.base_url is not None:
            raise ValueError(
                f"{self.where}.read 'expected' needs the probabilities of a model in this process: leave"
                " base_url out, or set read to 'text'"
            )
        return self


class QuestionsConfig(Section):
    """A question set, from which trees are grown, or whose questions a policy answers."""

    set: str = Field(min_length=1)
    """Registered question set (components/data/questions): aqua, cose, csqa, mathqa, medmcqa,
    medqa, piqa, pubmedqa; chitchat (embedded)."""
    path: InputFile | None = None
    """Local file or folder read in place of the hub."""
    revision: str | None = None
    """Hub revision (commit or tag)."""
    split: str | None = Field(None, min_length=1)
    """Split of the hub set, e.g. test, which DRIFT section 7.1 measures on; null: the training
    split, whose answers are public in all sets of the paper. A row without an answer makes no
    question."""
    count: int | None = Field(300, ge=1)
    """Maximum number of questions (a seeded sample); null: all. DRIFT appendix B: about 300."""
    part: list[int] = Field([0, 1], min_length=2, max_length=2)
    """[k, n]: the k-th of n disjoint parts of the set, counted from 0. Uses of one set that must
    not share questions take different parts."""

    @field_validator("part")
    @classmethod
    def _check_part(cls, part: list[int]) -> list[int]:
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"{part} is not a part [k, n] with k from 0 to n - 1")
        return part

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.split is not None and self.path is not None:
            raise ValueError(
                f"split '{self.split}' is of the hub set, and path names a local file in its place: leave one"
                " out"
            )
        return self


class ThoughtsConfig(Section):
    """Trees of thoughts, whose preferred steps give the pairs (DRIFT section 2.2).

    With data.source 'thoughts' they are all pairs, and a question set is a client. With another
    source they are assigned to its clients round-robin.
    """

    questions: list[QuestionsConfig] = Field(default_factory=list)
    """The question sets."""
    max_question_tokens: int | None = Field(None, ge=16)
    """Maximum length of a question with its context (tokens of the policy); the context is cut at
    its end. null does not cut; the policy still cuts a prompt that does not fit."""
    depth: int = Field(3, ge=1, le=100)
    """Thoughts on a path from the question; DRIFT appendix B: 3."""
    children: int = Field(2, ge=2, le=1000)
    """Thoughts proposed after each prefix; DRIFT appendix B: 2."""
    beam: int | None = Field(None, ge=1)
    """Prefixes that are extended at each depth, by their sums of scores; null extends all."""
    temperature: float = Field(0.8, gt=0)
    """Sampling temperature of the thoughts."""
    max_thought_tokens: int = Field(48, ge=4)
    """Maximum length of a thought (tokens); a thought ends with its line."""
    question_batch_size: int = Field(16, ge=1)
    """Questions whose trees are grown together, so that their thoughts fill common batches.
    policy.generation_batch_size and thoughts.evaluator.batch_size bound the memory; a run that is
    stopped grows the trees of these questions again."""
    evaluator: EvaluatorOptions = Field(default_factory=EvaluatorOptions)
    """The model that scores thoughts."""
    loading: Literal["together", "in_turn"] = "together"
    """How the writer and an evaluator in this process are loaded. together: both stay on the device;
    in_turn: at each depth one after the other, for models that do not fit together. The trees are
    the same; a larger question_batch_size loads them less often."""

    @model_validator(mode="after")
    def _check_loading(self) -> Self:
        if self.loading == "in_turn" and self.evaluator.base_url is not None:
            raise ValueError(
                "thoughts.loading 'in_turn' is for an evaluator in this process: leave it out, or"
                " evaluator.base_url"
            )
        return self
