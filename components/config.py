"""The recipe: every hyper-parameter of a run, with its unit and where its default comes from.

A recipe is one YAML file under flows/recipes/, read by components/recipes.py. It is checked strictly here: unknown
keys, wrong types and impossible values are refused with one sentence each. Nothing else holds hyper-parameters.
"FedBiscuit table N" in a description refers to the tables of papers/fedbiscuit.txt, appendix B.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

S = TypeVar("S", bound=BaseModel)


class Explained(Exception):
    """An error whose message is meant for the person in front of the screen; it is shown without a stack trace."""


class RecipeError(Explained, ValueError):
    """A recipe or an override that cannot be run. The message is meant for the person who wrote it."""


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values are not coerced across types, nothing can be reassigned."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PromptsConfig(Section):
    """Prompts of a data set of their own, in place of those that come with the pairs."""

    source: str = Field(min_length=1, description="Registered prompt source, see components/data/sources.py: alpaca_eval, safe-rlhf.")
    path: str | None = Field(None, description="Local file read in place of the hub.")
    revision: str | None = Field(None, description="Hub revision (commit or tag) of the data set.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the prompt source, checked by the source itself.")
    max_prompts: int | None = Field(None, ge=1, description="Keep at most this many prompts (a seeded sample); None keeps all.")


class DataConfig(Section):
    """Which preference pairs there are, who owns them, and which rows may be trained on."""

    source: str = Field("aclsum", description="Registered source, see components/data/sources.py.")
    path: str | None = Field(None, description="Local file or folder read in place of the hub (any source that loads files).")
    revision: str | None = Field(None, description="Hub revision (commit or tag) of the data set.")
    trees: str | None = Field(None, description="File or folder of trees of thoughts whose pairs are dealt among the clients, beside those of the source; see the section thoughts, which grows them.")
    min_margin: float = Field(0.0, ge=0, lt=9, description="Thoughts whose scores differ by no more than this are tied, and give no pair. With thoughts.evaluator.read 'expected' scores are means, of which hardly two are equal.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the source, checked by the source itself.")
    partition: Literal["natural", "dirichlet", "iid", "margin", "column"] = Field(
        "natural", description="natural: the source's own owners; dirichlet: by domain, questions kept together; iid; margin: from the greatest margins to the least, questions kept together "
                               "(FedPDPO D.1.2, IMDB); column: by the values of a column (FedPDPO D.1.2, code by language).")
    clients: int | None = Field(None, ge=1, description="Number of clients; None with 'natural' and 'column' keeps every owner. FedBiscuit table 5: 53 (TL;DR).")
    column: str | None = Field(None, min_length=1, description="Column whose values say who owns a pair, with partition 'column': a column of text of the record, such as domain or source, "
                               "or, with the sources jsonl and parquet, any of the file's own.")
    column_clients: dict[Annotated[str, Field(min_length=1)], Annotated[list[str], Field(min_length=1)]] | None = Field(
        None, min_length=1, description="By client, the values of data.column whose pairs it owns; pairs of other values are left out. None: each value is a client of that name.")
    alpha: float = Field(0.3, gt=0, description="Concentration of the Dirichlet partition; FedBiscuit section 6 uses 0.3.")
    validation: float = Field(0.1, ge=0, lt=1, description="Share of a source's prompts held out as the clients' validation sets, where the source has no split of its own.")
    test: float = Field(0.2, gt=0, lt=1, description="Share of a source's prompts held out for the figures that are reported.")
    max_pairs: int | None = Field(None, ge=1, description="Keep at most this many pairs of the source (a seeded sample of whole prompts); None keeps all.")
    max_characters: int = Field(20_000, ge=1, description="A pair with a longer prompt or completion fails validation (characters).")
    align_prompts: PromptsConfig | None = Field(None, description="Server prompts to align on, in place of the source's own; FedBiscuit table 5: safe-rlhf for QA.")
    test_prompts: PromptsConfig | None = Field(None, description="Held-out prompts to evaluate policies on, in place of the source's own; FedBiscuit 7.1: alpaca_eval for QA.")

    @model_validator(mode="after")
    def _columns(self) -> DataConfig:
        if self.partition == "column" and self.column is None:
            raise ValueError("column is needed with partition 'column': name the column whose values say who owns a pair, such as domain")
        for key in ("column", "column_clients"):
            if self.partition != "column" and getattr(self, key) is not None:
                raise ValueError(f"{key} is not used with partition '{self.partition}': set partition to 'column', or leave it out")
        owner: dict[str, str] = {}
        for client, values in (self.column_clients or {}).items():
            for value in values:
                if value in owner:
                    raise ValueError(f"column_clients names the value '{value}' twice ({owner[value]}, {client}): a value has one client")
                owner[value] = client
        return self


class BackboneConfig(Section):
    """A frozen causal language model."""

    name: str = Field("embedded", description="'embedded' (SmolLM2-135M-Instruct), 'tiny-random' (for mechanics), a local folder, or a hub id.")
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    layers: int | None = Field(None, ge=1, description="Use the first N transformer layers; None uses all.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU (bf16 is slower there), bfloat16 on CUDA.")
    quantization: Literal["none", "8bit"] = Field("none", description="8bit: weights of the linear layers but the head as LLM.int8(), by bitsandbytes (DRIFT appendix A); adapters stay fp32. Needs the extra 8bit.")


class LoraConfig(Section):
    """A low-rank adapter (Hu et al., 2021). FedBiscuit B.1: rank 8, alpha 16, dropout 0.05."""

    r: int = Field(8, ge=1, description="Rank.")
    alpha: float = Field(16.0, gt=0, description="Scale; the update is alpha / r * B A.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field("all-linear", description="Module names that get an adapter, as in PEFT.")


def _in_the_unit_interval(betas: list[float]) -> list[float]:
    if not all(0 <= b < 1 for b in betas):
        raise ValueError("both must lie in [0, 1)")
    return betas


Moments = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_in_the_unit_interval)]
"""How long an optimiser remembers the gradient and its square, two numbers in [0, 1)."""


class OptimizerConfig(Section):
    """A first-order optimiser and its schedule, both begun anew for each client and round (clients keep no optimiser state)."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = Field(
        "adamw", description="FedBiscuit table 3: AdamW. adamw_8bit (DRIFT appendix A): bitsandbytes' AdamW with moments of 8 bits, in tensors of 4,096 values and more; needs the extra 8bit.")
    lr: float = Field(1e-5, gt=0, description="Learning rate; FedBiscuit table 3: 1e-5.")
    betas: Moments = Field([0.9, 0.95], description="AdamW moments; FedBiscuit table 3: (0.9, 0.95).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip: float | None = Field(1.0, gt=0, description="Clip of the global gradient norm; None does not clip.")
    accumulation: int = Field(1, ge=1, description="Minibatches whose gradients are averaged for one step. FedPDPO D.3: 2 of 8 pairs.")
    scheduler: Literal["constant", "linear", "cosine"] = Field("constant", description="How the learning rate goes on after the warm-up, over the steps of one local training: constant, or down towards 0. DRIFT appendix A: cosine.")
    warmup_steps: int = Field(0, ge=0, description="First steps, in which the learning rate rises from 0 in equal parts; fewer than a local training has. DRIFT appendix A: 4.")


def check_warmup(optimizer: OptimizerConfig, steps: int, where: str) -> None:
    """Refuse a warm-up after which no step is left.

    Args:
        optimizer: whose warm-up it is.
        steps: of the training that it is for.
        where: the key that holds them.

    Raises:
        ValueError: naming both numbers.
    """
    if optimizer.warmup_steps >= steps:
        raise ValueError(f"optimizer.warmup_steps is {optimizer.warmup_steps}, but {where} is {steps}, so that no step would have the full learning rate: use at most {steps - 1}")


class SelectorConfig(Section):
    """The binary selector (FedBiscuit section 4): which of two completions is better, read off ' A' against ' B'."""

    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    template: str = Field("summarization/selector", description="Template name under components/data/templates, or the path of a file.")
    max_length: int = Field(1024, ge=16, description="Longest input (tokens).")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Cut the prompt (context) from its end to this many tokens; None: only as max_length needs.")
    orders: Literal["both", "single"] = Field("both", description="Score both label orders and average (both), or only the given one, as the paper does (single).")
    score_batch_size: int = Field(16, ge=1, description="Pairs scored at once (rows are twice as many with orders: both).")


class FederationConfig(Section):
    """The federated rounds."""

    method: str = Field("fedbis", description="Name of the method, see components/federation.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the method, checked by the method itself.")
    selectors: int = Field(1, ge=1, description="Selectors in the ensemble (U); odd, so that a majority vote decides. FedBis has 1.")
    rounds: int = Field(500, ge=1, description="Communication rounds (R); FedBiscuit table 3: 500.")
    clients_per_round: int = Field(5, ge=1, description="Clients sampled without replacement each round (A); FedBiscuit table 3: 5 of 53.")
    local_steps: int = Field(30, ge=1, description="Optimiser steps a client takes a round (K); FedBiscuit table 3: 30.")
    local_epochs: int | None = Field(None, ge=1, description="Passes over its own rows that a client makes a round, in place of local_steps: as many steps as they take, which differ among clients. FedPDPO D.3: 1.")
    batch_size: int = Field(32, ge=1, description="Rows a minibatch; FedBiscuit table 3: 32.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    quorum: float = Field(0.5, gt=0, le=1, description="Share of the sampled clients whose updates must be accepted, or the round fails.")
    clients_per_task: int = Field(1, ge=1, description="Clients that one mapped task runs one after the other.")
    evaluate_every: int | None = Field(None, ge=1, description="Measure accuracy on held-out pairs every so many rounds too; None: before the first and after the last.")
    accuracy_pairs: int | None = Field(None, ge=1, description="Held-out pairs that accuracy is measured on (a seeded sample, as many of each client as of the others); None takes all. Policies take long.")
    keep_every: int = Field(1, ge=1, description="Log the committed server adapter every so many rounds; the final one always.")

    @field_validator("selectors")
    @classmethod
    def _odd(cls, selectors: int) -> int:
        if selectors % 2 == 0:
            raise ValueError(f"an ensemble needs an odd number of selectors, or votes tie: use {selectors - 1} or {selectors + 1}")
        return selectors

    @model_validator(mode="after")
    def _warmup(self) -> FederationConfig:
        if self.local_epochs is None:
            check_warmup(self.optimizer, self.local_steps, "local_steps")
        return self

    def steps_of(self, rows: int, epochs: int | None = None) -> int:
        """Optimiser steps that a client with so many training rows takes a round.

        Args:
            rows: of the client.
            epochs: passes, in place of the recipe's.
        """
        passes = epochs or self.local_epochs
        return self.local_steps if passes is None else max(1, math.ceil(rows * passes / (self.batch_size * self.optimizer.accumulation)))


class PolicyConfig(Section):
    """The language model that is aligned."""

    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    template: str = Field("summarization/policy", description="Template name under components/data/templates, or the path of a file.")
    system: str | None = Field(None, description="System turn before a prompt, where the backbone has a chat template; None leaves it to that, which may have one of its own.")
    max_prompt_tokens: int = Field(512, ge=8, description="Longest prompt (tokens); the context is cut, the template never.")
    truncation_mode: Literal["keep_start", "keep_end"] = Field("keep_start", description="What stays of a longer one: its start, or its end, where a chain of thoughts and the cue to go on stand.")
    max_new_tokens: int = Field(80, ge=1, description="Longest completion (tokens); FedBiscuit B.1: 80 for summarization, 300 for QA.")
    generation_batch_size: int = Field(16, ge=1, description="Sequences generated at once.")


class DpoConfig(Section):
    """Direct preference optimisation by TRL (FedBiscuit eqs. 2 and 9)."""

    reference: Literal["base", "sft", "round_start"] = Field(
        "base", description="Policy that the KL is measured to: base (adapter off), sft (reference_adapter merged), round_start (reference_adapter, which is trained on).")
    reference_adapter: str | None = Field(None, description="PEFT adapter folder, needed by reference: sft and round_start.")
    beta: float = Field(0.1, gt=0, description="Inverse temperature of the implicit reward; Rafailov et al. use 0.1.")
    optimizer: Literal["rmsprop", "adamw_torch", "sgd", "adagrad", "adafactor"] = Field("rmsprop", description="transformers' name of the optimiser; FedBiscuit table 3: RMSprop.")
    lr: float = Field(1e-6, gt=0, description="Learning rate; FedBiscuit table 3: 1e-6.")
    epochs: int = Field(5, ge=1, description="Passes over the labelled pairs; FedBiscuit table 3: 5 (section 7.1 says three).")
    batch_size: int = Field(32, ge=1, description="Pairs an optimiser step; FedBiscuit table 3: 32.")
    micro_batch_size: int = Field(8, ge=1, description="Pairs a forward pass; divides batch_size.")
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field("constant", description="Schedule of the learning rate; the paper names none.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip of the gradient norm.")
    checkpoint_every: int | None = Field(None, ge=1, description="Save the adapter every so many optimiser steps too; None: after each epoch only.")
    kl_prompts: int = Field(16, ge=0, description="Held-out prompts on which the KL to the reference is estimated after training.")

    @model_validator(mode="after")
    def _consistent(self) -> DpoConfig:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}")
        if self.reference != "base" and not self.reference_adapter:
            raise ValueError(f"reference '{self.reference}' needs reference_adapter, the folder of a PEFT adapter")
        if self.reference == "base" and self.reference_adapter:
            raise ValueError("reference_adapter is not used with reference 'base': remove it, or set reference to 'sft' or 'round_start'")
        return self


class AlignmentConfig(Section):
    """Labelling by the selector and alignment by DPO (FedBiscuit appendix A.2)."""

    prompts: int | None = Field(None, ge=1, description="Server prompts used (a seeded sample); None uses all. FedBiscuit table 5: 42,782.")
    completions: int = Field(2, ge=2, description="Completions sampled a prompt (n); all n (n - 1) / 2 pairs are labelled.")
    temperature: float = Field(0.7, gt=0, description="Sampling temperature; FedBiscuit B.1: 0.7.")
    dpo: DpoConfig = Field(default_factory=DpoConfig)


class EndpointOptions(Section):
    """Where an endpoint is and how it is asked.

    Attributes:
        where: the section's place in a recipe, for messages.
    """

    where: ClassVar[str] = "endpoint"

    base_url: str | None = Field(None, description="Root of an OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1; None runs the model here.")
    api_key_env: str | None = Field(None, description="NAME of the environment variable that holds the endpoint's key; None sends none. The key itself never belongs in a recipe.")
    request: dict[str, Any] = Field(default_factory=dict, description="Further fields of each request, e.g. {seed: 0}; null leaves a field out, e.g. {max_tokens: null, max_completion_tokens: 1024}.")
    timeout: float = Field(120.0, gt=0, description="Longest wait for an answer of the endpoint (seconds).")
    retries: int = Field(5, ge=0, description="How often a request is repeated after status 429 or 5xx, a broken connection or an answer of another form.")
    backoff: float = Field(1.0, ge=0, description="Seconds before the first repetition, doubled each time up to 60; a Retry-After header is followed, up to 60 too.")
    concurrency: int = Field(4, ge=1, description="Requests under way at once.")

    @model_validator(mode="after")
    def _endpoint(self) -> EndpointOptions:
        """Values that may hold a secret are not checked field by field, because such an error shows the value."""
        if self.base_url is not None:
            try:
                url = urlsplit(self.base_url)
                good = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not (url.username or url.password or url.query or url.fragment)
            except ValueError:
                good = False
            if not good:
                raise ValueError(f"{self.where}.base_url must be the root of an endpoint, such as http://127.0.0.1:8000/v1, without a user, a password or a query in it")
        if self.api_key_env is not None:
            if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
                raise ValueError(f"{self.where}.api_key_env must be the NAME of an environment variable, in capitals, such as OPENAI_API_KEY; the key itself stays out of a recipe")
            if self.base_url is None:
                raise ValueError(f"{self.where}.api_key_env is for an endpoint: give base_url too, or leave it out")
        return self


class EvaluatorOptions(EndpointOptions):
    """Who scores thoughts: a causal language model here, or an OpenAI-compatible endpoint."""

    where: ClassVar[str] = "thoughts.evaluator"

    model: str = Field("embedded", min_length=1, description="A backbone, as elsewhere; with base_url: the model's name there. DRIFT section 7: DeepSeek R1 32B.")
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    max_prompt_tokens: int = Field(1024, ge=64, description="Longest input here (tokens); the question loses its end first.")
    max_new_tokens: int = Field(8, ge=1, description="Longest answer (tokens); a model that reasons aloud needs more: its last line is read, and an answer that was cut off only where its first line is the score by itself.")
    batch_size: int = Field(8, ge=1, description="Thoughts scored at once here.")
    retries_unread: int = Field(2, ge=0, description="How often a score that cannot be read is asked for again, at temperature 1.")
    read: str = Field("text", pattern="^(text|expected)$", description="text: the number that is written (DRIFT D.1); expected: the mean of 1 to 10 by the model's probability of each, for models too small to write one (here only).")

    @model_validator(mode="after")
    def _here(self) -> EvaluatorOptions:
        if self.read == "expected" and self.base_url is not None:
            raise ValueError(f"{self.where}.read 'expected' needs the probabilities of a model here: leave base_url out, or read 'text'")
        return self


class QuestionsConfig(Section):
    """A question set: its trees are grown, and its pairs are one client's; or it is asked when a policy is measured."""

    set: str = Field(min_length=1, description="Registered question set, see components/data/questions: aqua, cose, csqa, mathqa, medmcqa, medqa, piqa, pubmedqa; chitchat (embedded).")
    path: str | None = Field(None, description="Local file or folder read in place of the hub.")
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    count: int | None = Field(300, ge=1, description="At most so many questions (a seeded sample); None takes all. DRIFT appendix B: about 300.")
    part: list[int] = Field([0, 1], min_length=2, max_length=2, description="[k, n]: the k-th of n parts of the set (from 0), so that sets that share questions share none here.")

    @field_validator("part")
    @classmethod
    def _part(cls, part: list[int]) -> list[int]:
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"{part} is not a part [k, n] with k from 0 to n - 1")
        return part


class ThoughtsConfig(Section):
    """Trees of thoughts whose preferred steps are the pairs (DRIFT section 2.2), grown before the data are prepared.

    They are all pairs there are (data.source 'thoughts', a question set being a client), or are dealt among another source's clients.
    """

    questions: list[QuestionsConfig] = Field(default_factory=list, description="The question sets.")
    max_question_tokens: int | None = Field(None, ge=16, description="Longest question with its context (tokens of the policy); the context loses its end. None cuts nothing, but the policy cuts a prompt that does not fit.")
    depth: int = Field(3, ge=1, description="Thoughts from the question to the end of a path; DRIFT appendix B: 3.")
    children: int = Field(2, ge=2, description="Thoughts proposed after each prefix; DRIFT appendix B: 2.")
    beam: int | None = Field(None, ge=1, description="Prefixes carried on at each depth, those with the greatest sums of scores; None carries all on.")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of the thoughts.")
    max_thought_tokens: int = Field(48, ge=4, description="Longest thought (tokens); it ends with its line.")
    evaluator: EvaluatorOptions = Field(default_factory=EvaluatorOptions)


class JudgeConfig(Section):
    """Who decides which of two answers is better."""

    kind: str = Field("selector", description="Registered judge, see components/evaluation/judges.py.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the judge, checked by the judge itself.")
    selector: SelectorConfig = Field(default_factory=SelectorConfig, description="Model of the 'selector' judge, a gold-model proxy trained on owners that never take part.")
    steps: int = Field(200, ge=1, description="Optimiser steps of the judge's central training.")
    batch_size: int = Field(32, ge=1, description="Rows a step.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)

    @model_validator(mode="after")
    def _warmup(self) -> JudgeConfig:
        check_warmup(self.optimizer, self.steps, "steps")
        return self


class AlpacaEvalConfig(Section):
    """AlpacaEval 2.0 (Li et al., 2023; Dubois et al., 2024) by the package alpaca_eval, see components/evaluation/alpaca.py."""

    annotators_config: str = Field(
        "weighted_alpaca_eval_gpt4_turbo", min_length=1,
        description="Name of an annotator of the package, or a local folder that holds configs.yaml. An API key is taken from the environment (OPENAI_API_KEY for the default one).")
    reference_outputs: str | None = Field(
        None, description="JSON file of the baseline's outputs in AlpacaEval's schema, for its own instructions those of gpt4_1106_preview; None: the raw policy's answers are the baseline.")
    calibration: str | None = Field(
        None, description="df_gamed.csv of the hub's data set tatsu-lab/alpaca_eval, needed for the package's length-controlled win rate; None: that rate is not computed.")


class QuestionAnswersConfig(Section):
    """Multiple-choice questions that the raw and the aligned policy answer (DRIFT section 7.1), see components/evaluation/answers.py."""

    questions: list[QuestionsConfig] = Field(min_length=1, description="The question sets that are asked; of a set that trees are grown of, a part or a file that no tree was grown of.")
    template: str = Field("thoughts/answer", description="Template name under components/data/templates, or the path of a file.")
    max_question_tokens: int | None = Field(None, ge=16, description="Longest question with its context (tokens of the policy); the context loses its end. None cuts nothing, but the policy cuts a prompt that does not fit.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, its thoughts included (tokens).")
    samples: int = Field(0, ge=0, description="Answers sampled beside the greedy one (N): the success rate is the share of questions of which one of N is right. 0 leaves it out.")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of these; the paper names none.")


class EvaluationConfig(Section):
    """What is measured, on what was held out."""

    prompts: int | None = Field(None, ge=1, description="Held-out prompts answered greedily by the raw and the aligned policy; None uses all. FedBiscuit 7.1: 6,553.")
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    preference_pairs: int = Field(0, ge=0, description="Held-out pairs (a seeded sample) on which the accuracy of the aligned policy's implicit reward is measured; 0 does not.")
    score_batch_size: int = Field(16, ge=1, description="Pairs whose log-probabilities are computed at once there.")
    curve_prompts: int = Field(0, ge=0, description="Held-out prompts that each DPO checkpoint answers for the reward-hacking curve (judge score against proxy score over steps); 0 does not. Methods whose clients train the policy itself have no such checkpoints, and no curve.")
    bootstrap: int = Field(2000, ge=100, description="Resamples of the bootstrap interval of a win rate.")
    alpaca_eval: AlpacaEvalConfig | None = Field(None, description="AlpacaEval on the answers to the held-out prompts; None: it is not run.")
    questions: QuestionAnswersConfig | None = Field(None, description="Questions with a right answer, by which the policies' accuracy is measured; None: none are asked.")


class RewardTrainingConfig(Section):
    """A reward model that is trained here, by TRL's RewardTrainer: a backbone with a LoRA and one output, on the pairs of owners outside the federation."""

    backbone: BackboneConfig = Field(default_factory=lambda: BackboneConfig(name="embedded", layers=8), description="What it is made of.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Trained with the output, and merged afterwards.")
    steps: int = Field(100, ge=1, description="Optimiser steps.")
    batch_size: int = Field(8, ge=1, description="Pairs a step.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of AdamW; it falls linearly to 0, as TRL's does.")


class RewardConfig(Section):
    """A frozen reward model, see components/models/reward.py."""

    kind: Literal["classifier", "trained", "function", "judge"] = Field(
        "classifier", description="classifier: a sequence classifier, whose output is the score of a response; trained: one that is trained here, on the pairs of owners outside the federation; function: a Python function; "
        "judge: the recipe's own 'selector' judge, trained on these owners, whose log-odds are the difference of a pair's scores, so that it scores pairs only.")
    name: str | None = Field(None, min_length=1, description="Of a classifier: a local folder, or a hub id, e.g. OpenAssistant/reward-model-deberta-v3-large-v2 (FedPDPO D.2.5). "
                                                            "Of a function: a registered one's (components/models/reward_functions.py), or module:function.")
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    training: RewardTrainingConfig | None = Field(None, description="Of kind 'trained'; None: its defaults.")
    template: str | None = Field(None, description="Text with {prompt} and {response} that the classifier reads, e.g. '\n\nHuman: {prompt}\n\nAssistant: {response}'; None: the two as a pair of texts, as its tokenizer joins them. One that is trained here needs it.")
    output: int = Field(0, ge=0, description="Which of the classifier's outputs is the score.")
    max_length: int = Field(512, ge=16, description="Longest input (tokens); a response loses what is beyond three quarters of it, then the prompt its start.")
    batch_size: int = Field(16, ge=1, description="Responses scored at once.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("float32", description="In bfloat16 (auto takes it on CUDA) scores that lie near each other are the same.")

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        if self.kind == "classifier" and self.name is None:
            raise ValueError("a classifier needs a name: a local folder or a hub id")
        if self.kind == "function" and self.name is None:
            raise ValueError("a function needs a name: a registered one's, or module:function")
        if self.kind == "judge" and self.name is not None:
            raise ValueError("kind 'judge' takes the recipe's own judge: leave out name")
        if self.kind == "trained" and self.name is not None:
            raise ValueError("kind 'trained' is made here: leave out name")
        if self.kind == "trained" and self.template is None:
            raise ValueError("kind 'trained' needs a template: text with {prompt} and {response} that it reads")
        if self.kind == "trained" and (self.output or self.revision):
            raise ValueError("kind 'trained' has one output, and its backbone's revision is training.backbone.revision: leave out output and revision")
        if self.training is not None and (self.training.backbone.quantization != "none" or self.training.backbone.dtype != "auto"):
            raise ValueError("a reward is trained in float32: leave out training.backbone.dtype and quantization")
        if self.kind != "trained" and self.training is not None:
            raise ValueError(f"training is of kind 'trained', and the kind is '{self.kind}': leave out one of them")
        of_classifiers = ("batch_size", "dtype", "max_length", "output", "revision", "template") if self.kind in ("function", "judge") else ()
        unused = [key for key in of_classifiers if getattr(self, key) != type(self).model_fields[key].default]
        if unused:
            raise ValueError(f"{unused[0]} is of classifiers, and the kind is '{self.kind}': leave it out")
        if self.template is not None and not ("{prompt}" in self.template and "{response}" in self.template):
            raise ValueError("template must hold {prompt} and {response}")
        return self


class TrackingConfig(Section):
    """Where the run is found afterwards."""

    experiment: str = Field("fed-rlhf", min_length=1, description="MLflow experiment.")
    registered_model: str = Field("fed-rlhf-policy", pattern=r"^[^/:]+$", description="Name under which the aligned policy is registered.")


class RuntimeConfig(Section):
    """How the work is spread. Nothing here changes a result on one device type, except torch_threads and cpu_workers in the last bits."""

    task_runner: Literal["threads", "ray"] = Field("threads", description="Where mapped tasks run: threads of this process (one a GPU, cpu_workers on the CPU), or a Ray cluster.")
    ray_address: str | None = Field(None, description="Address of a Ray cluster; None starts a local one.")
    devices: list[str] | None = Field(None, description="Devices to use, e.g. ['cuda:0', 'cuda:1'] or ['cpu']; None uses every CUDA device, else the CPU.")
    cpu_workers: int = Field(1, ge=1, description="Clients that train side by side on the CPU, each with a model of its own in memory and an even share of the threads. Their models must have no dropout: a process has one generator for all.")
    torch_threads: int | None = Field(None, ge=1, description="Threads of a CPU operation, or of all that clients side by side have going; None uses all cores. Sums are split by it, so byte-equal runs need the same value.")

    @model_validator(mode="after")
    def _workers(self) -> RuntimeConfig:
        if self.cpu_workers > 1 and self.task_runner != "threads":
            raise ValueError("cpu_workers is for task_runner 'threads': Ray spreads clients over its own workers, so leave it out")
        return self

    @field_validator("devices")
    @classmethod
    def _distinct(cls, devices: list[str] | None) -> list[str] | None:
        for device in devices or []:
            if not re.fullmatch(r"cpu|cuda:\d+", device):
                raise ValueError(f"'{device}' is not a device: use 'cpu' or 'cuda:0', 'cuda:1', ...")
        if devices is not None and (not devices or len(set(devices)) < len(devices)):
            raise ValueError("each device is named once, and at least one: a model is resident on each, and serves one client at a time")
        return devices

    retries: int = Field(1, ge=0, description="How often Prefect repeats a task that failed before its client is left out of the round.")


class Recipe(Section):
    """One experiment."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_/.-]*$", description="Name of the experiment; by custom the file's own path under flows/recipes.")
    seed: int = Field(0, ge=0, lt=2**31, description="Every random choice is a function of it.")
    data: DataConfig = Field(default_factory=DataConfig)
    thoughts: ThoughtsConfig | None = Field(None, description="Trees of thoughts to grow; None where there are none, or data.path (source thoughts) or data.trees (another source) names some that are there.")
    selector: SelectorConfig = Field(default_factory=SelectorConfig)
    federation: FederationConfig = Field(default_factory=FederationConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    alignment: AlignmentConfig = Field(default_factory=AlignmentConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    rewards: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], RewardConfig] = Field(default_factory=dict, description="Reward models by a name of your own, of methods that use some: one for the objective ppo of federation.options.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        check_cohort(self.federation.clients_per_round, self.data.clients)
        if self.data.partition not in ("natural", "column") and self.data.clients is None:
            raise ValueError(f"data.clients is needed with data.partition '{self.data.partition}': give the number of clients")
        if self.data.validation + self.data.test >= 1:
            raise ValueError(f"data.validation {self.data.validation} and data.test {self.data.test} leave nothing to train on: their sum must be below 1")
        key = "path" if self.data.source == "thoughts" else "trees"
        if self.thoughts is not None and getattr(self.data, key) is not None:
            raise ValueError(f"the section thoughts grows trees, but data.{key} names some that are there ({getattr(self.data, key)}): leave out one of them")
        if self.data.source == "thoughts" and self.data.trees is not None:
            raise ValueError("data.trees is for trees beside another source: with data.source 'thoughts' give their file or folder as data.path")
        if self.data.source == "thoughts" and self.thoughts is None and self.data.path is None:
            raise ValueError("data.source 'thoughts' has no trees: give a section thoughts, which grows some, or data.path, the file or folder of some that are there")
        if self.data.min_margin and self.thoughts is None and self.data.source != "thoughts" and self.data.trees is None:
            raise ValueError(f"data.min_margin is {self.data.min_margin}, but there are no trees of thoughts whose scores it could be of (a section thoughts, or data.trees): leave it out")
        if self.thoughts is not None and not self.thoughts.questions:
            raise ValueError("thoughts.questions is empty: name at least one question set")
        if any(reward.kind == "judge" for reward in self.rewards.values()) and self.evaluation.judge.kind != "selector":
            raise ValueError(f"a reward of kind 'judge' needs evaluation.judge.kind 'selector', which gives log-odds, and not '{self.evaluation.judge.kind}'")
        if self.policy.backbone.quantization != "none" and self.alignment.dpo.reference != "base":
            raise ValueError(f"alignment.dpo.reference '{self.alignment.dpo.reference}' begins with an adapter, which a policy of 8 bits would round: use 'base', or set policy.backbone.quantization to 'none'")
        return self

    def fingerprint(self, *sections: str) -> str:
        """Hash of the seed and the named sections, for what must start anew when one of them changes."""
        chosen = {"seed": self.seed} | {name: self.model_dump(mode="json")[name] for name in sections}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def check_cohort(clients_per_round: int, clients: int | None) -> None:
    """Refuse a round that samples more clients than there are.

    Raises:
        ValueError: naming both numbers and the keys that hold them.
    """
    if clients is not None and clients_per_round > clients:
        raise ValueError(f"federation.clients_per_round is {clients_per_round}, but there are only {clients} clients (data.clients): use at most {clients}")


def check_section(model: type[S], values: Mapping[str, Any], where: str, prefix: str = "") -> S:
    """Validate values by a pydantic model, turning its errors into sentences.

    Args:
        model: the model of the section.
        values: what was given.
        where: the file or command the values come from.
        prefix: dotted key of the section, empty for a whole recipe.

    Raises:
        RecipeError: one line for each error.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = [_sentence(model, dict(values), e, prefix) for e in error.errors()]
        raise RecipeError("\n".join(f"{where}: {line}" for line in lines)) from None


def unknown_name(what: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that is not registered, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"{what} '{given}' is not known; there are: {', '.join(known)}.{hint}"


def kind_of(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a whole number", float: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def _sentence(model: type[BaseModel], values: Any, error: Mapping[str, Any], prefix: str) -> str:
    location = [p for p in error["loc"] if not (isinstance(p, str) and ("[" in p or p.startswith("literal") or p in {"str", "int"}))]
    names = [part if isinstance(part, int) else re.split(r"[\s:=]", part, maxsplit=1)[0] for part in location]     # what is glued to a key may be a secret
    key = _dotted(prefix, names)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        fields = _fields_at(model, location[:-1])
        near = _nearest(model, names[-1], location[:-1], fields, prefix) if names[-1] not in fields else "."
        glued = "" if names[-1] == str(location[-1]) else " with more in the same word (between a key and its value stand a colon and a space)"
        return f"unknown key '{key}'{glued}{near} " + (f"Keys allowed here: {', '.join(fields)}." if fields else "No keys are allowed here.")
    if kind == "missing":
        return f"key '{key}' is missing: it has no default."
    given = values
    for part in location:
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            given = error.get("input")
            break
    reason = str(context["error"]) if kind == "value_error" and "error" in context else error["msg"].removeprefix("Value error, ")
    reason = reason.removesuffix(".")
    if not location:
        return (reason if "." in reason.split(" ", 1)[0] else reason[:1].upper() + reason[1:]) + "."
    shown = "" if isinstance(given, dict) else f" is {kind_of(given)}" if kind in ("dict_type", "model_type") else f" is {given!r}"
    allowed = f" (expected {context['expected']})" if kind == "literal_error" else ""
    reason = "not an allowed value" if kind == "literal_error" else reason[:1].lower() + reason[1:]
    return f"key '{key}'{shown}: {reason}{allowed}."


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, optional or not; None where the annotation is of another kind."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _fields_at(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    for part in location:
        if isinstance(part, int):   # of a list of sections
            continue
        annotation = model.model_fields[part].annotation
        inner = section_of(annotation) or next((found for of in get_args(annotation) if (found := section_of(of))), None)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _nearest(model: type[BaseModel], last: str, section: list, fields: list[str], prefix: str) -> str:
    everywhere = {path.rsplit(".", 1)[-1]: path for path in reversed(list(_paths(model)))}      # of keys with one name the first
    near = difflib.get_close_matches(last, fields, n=1, cutoff=0.6)
    if near and last not in everywhere:    # the very name in another section is nearer than a like one in this
        return f"; did you mean '{_dotted(prefix, [*section, near[0]])}'?"
    near = difflib.get_close_matches(last, list(everywhere), n=1, cutoff=0.75)
    return f"; did you mean '{everywhere[near[0]]}'?" if near else "."


def _dotted(prefix: str, parts: Iterable[str | int]) -> str:
    """A key as people write it: data.options.sources[1].path."""
    return (prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)).removeprefix(".")


def _paths(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")
