"""The Auto-J judge (Li et al., 2023, arXiv 2310.05470), by its pairwise protocol with ties; the judge of FedBiscuit's table 1.

A generative judge reads a query and two responses, compares them in words, and ends with a decision for response 1,
response 2 or a tie. As in the authors' own code (GAIR-NLP/auto-j) decoding is greedy, the instruction stands between
"[INST] " and " [/INST]", and the verdict is read off behind the last "final decision is". The query is what a user
would have asked: the instruction of the policy's template with the prompt filled in (templates.user_message), since a
prompt by itself may say nothing of the task, as a post that is to be summarized.

The instruction is in our own words (prompt_templates/autoj/pairwise.txt). For the original's, save the text of
`pairwise_tie` in codes/usage/constants_prompt.py of that repository to a file, its placeholders {prompt}, {response}
and {response_another} as they are, and name the file as `prompt_file`.

The judge runs here, by transformers, or behind any OpenAI-compatible endpoint. GAIR/autoj-13b-GPTQ-4bits, the 4-bit
form, is a GPTQ checkpoint: transformers reads it with `optimum` and `gptqmodel`, which this project does not install.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.config import BackboneConfig, EndpointOptions, JudgeConfig
from components.data.records import DataError
from components.data.templates import Template, user_message
from components.data.templates import load as load_template
from components.evaluation.judge_protocol import JudgeError
from components.evaluation.winrate import Verdict
from components.models.backbone import fetch_backbone, load_backbone, load_tokenizer
from components.models.chat import ChatEndpoint, read_key
from components.models.policy import complete
from components.models.selector import Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GPTQ_LIBRARIES = {"optimum": "1.24.0", "gptqmodel": "1.4.3"}
"""What transformers 5.23 needs for a GPTQ checkpoint, with the oldest versions that it takes (quantizers/quantizer_gptq.py)."""


class AutoJOptions(EndpointOptions):
    """Options of the judge 'autoj'."""

    where: ClassVar[str] = "evaluation.judge.options"

    model: str = Field("GAIR/autoj-13b", min_length=1, description="Hub id or local folder of a causal language model (GAIR/autoj-13b-GPTQ-4bits is the 4-bit form); with base_url: its name there.")
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU, bfloat16 on CUDA. A GPTQ checkpoint runs in float16 on CUDA whatever this says.")
    prompt_file: str = Field("autoj/pairwise", description="Instruction: a template that ships with the project, or a text file with {prompt}, {response} and {response_another}.")
    chat_template: bool = Field(False, description="Wrap the instruction by the model's own chat template; false: by '[INST] ... [/INST]', as Auto-J was trained. An endpoint wraps by itself.")
    max_prompt_tokens: int = Field(3072, ge=64, description="Longest input here (tokens): Llama 2's 4,096 less max_new_tokens. The prompt within the query loses its end first, then both responses; an endpoint gets all.")
    max_new_tokens: int = Field(1024, ge=1, description="Longest judgement (tokens); the authors' code: 1,024.")
    batch_size: int = Field(8, ge=1, description="Judgements written at once here.")

    @field_validator("prompt_file")
    @classmethod
    def _instruction(cls, name: str) -> str:
        try:
            load_template(name, "pairwise")
        except DataError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return name


# --- the verdict

_MARK = re.compile(r"final\s+decision\s+is(?![^\W_])", re.IGNORECASE)
_NAME = r"(?:response[\W_]*(?P<{0}>[12])|(?P<{0}tie>tie|tied))(?![^\W_]|[.,]\d)"
_DECISION = re.compile(r"(?:[\W_]*\b(?:that|it|they|is|are|a|an|the)\b)*[\W_]*" + _NAME.format("said"), re.IGNORECASE)
_ALTERNATIVE = re.compile(
    r"(?P<gap>(?:[^\w.!?;]|_)*)(?:(?P<joint>and/or|or|and|nor|vs|versus)(?:[^\w!?;]|_)*(?:an?(?:[^\w!?;]|_)+)?)?" + _NAME.format("other")
    + r"|\s*(?P<mark>[/|&,]|or\b|and\b)\s*[12](?![^\W_])", re.IGNORECASE)
_LAST = re.compile(r"(?:[^\w.!?;\n]|_)*(?:[.!?;\n]|$)")


def parse_autoj(text: str) -> Verdict:
    """The verdict of a judgement: the name right behind the last "final decision is", whatever its case.

    Markup, quotes, punctuation, line ends and words such as "that it is a" may stand between. No name there, another
    name ("Response 10"), or several to choose from ("Response 1 / Response 2 / Tie", "Response 1 or 2", "Response 1,
    Response 2") is unparsable. As in the authors' code, reasons that follow the name change nothing, although they may
    speak of the other response: a further name behind a comma, a bracket or a line end is one to choose from only where
    no more words follow it in its line or sentence; behind "or", "/" or a bare "and" it always is.

    Args:
        text: any text.

    Returns:
        response 1, response 2, tie or unparsable; it never raises.
    """
    marks = list(_MARK.finditer(text))
    said = _DECISION.match(text, marks[-1].end()) if marks else None
    if said is None:
        return Verdict.UNPARSABLE
    other = _ALTERNATIVE.match(text, said.end())
    while other is not None:
        if _joined(other) or _LAST.match(text, other.end()):
            return Verdict.UNPARSABLE
        other = _ALTERNATIVE.match(text, other.end())
    if said["saidtie"]:
        return Verdict.TIE
    return Verdict.FIRST if said["said"] == "1" else Verdict.SECOND


def _joined(other: re.Match[str]) -> bool:
    """Whether a further name is tied to the one before it, so that both are offered, whatever follows."""
    if other["mark"]:
        return other["mark"] != ","
    gap, joint = other["gap"], (other["joint"] or "").lower()
    if joint == "and":
        return not set(gap) & set(",:(\n\r-\u2013\u2014")     # behind one of these a new clause begins
    return joint != "" or bool(set(gap) & set("/|&"))


# --- the judge

class AutoJ:
    """A generative judge; see the module's docstring.

    Attributes:
        figures: `judge_shortened`, how many inputs were too long and were cut.
        texts: each comparison with what the judge wrote on it and how that was read.
    """

    Options = AutoJOptions

    def __init__(
        self, config: JudgeConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None, policy: Template | None = None,
    ) -> None:
        """Load the model, or look for the endpoint's key.

        Args:
            config: the recipe's judge.
            prepared, cache, seed, progress: not used; nothing is trained or drawn.
            device: where a model of this machine runs.
            policy: the policy's template, whose instruction is part of the query; None: a prompt is the whole query.

        Raises:
            JudgeError: the model cannot be had, or the key's variable is not set.
        """
        self.options, self.policy = AutoJOptions.model_validate(config.options), policy
        self._writer = Endpoint(self.options, policy) if self.options.base_url else LocalModel(self.options, device, policy)
        self.texts: list[dict[str, str]] = []
        where = f"at {urlsplit(self.options.base_url).netloc}" if self.options.base_url else "on this machine"
        self.description = f"Auto-J's pairwise protocol, {self.options.model} {where}, instruction {self.options.prompt_file}"

    @staticmethod
    def check(config: JudgeConfig, prepared: Path) -> None:
        """Refuse what cannot be had at the end: a key that is not set, a model or a quantisation library that is not there.

        Raises:
            JudgeError: in one sentence.
        """
        options = AutoJOptions.model_validate(config.options)
        if options.base_url:
            read_key(options, "the judge's endpoint", JudgeError)
        else:
            read_model_config(options)

    @property
    def figures(self) -> dict[str, float]:
        return {"judge_shortened": self._writer.shortened}

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """Verdicts, each comparison in its one given order.

        Raises:
            JudgeError: the endpoint does not answer, or the instruction leaves no room for the responses.
        """
        texts = self._writer.write(comparisons)
        verdicts = [parse_autoj(text) for text in texts]
        self.texts += [{"prompt": query(self.policy, c.prompt), "response_1": c.first, "response_2": c.second, "text": text, "verdict": verdict.value}
                       for c, text, verdict in zip(comparisons, texts, verdicts, strict=True)]
        return verdicts


def query(policy: Template | None, prompt: str) -> str:
    """What the judge is told that the responses are to: what a user would have asked, or without a policy's template the prompt."""
    return prompt if policy is None else user_message(policy, prompt)


def fields_of(comparison: Comparison, policy: Template | None = None) -> dict[str, str]:
    """A comparison under the names that an instruction's placeholders have."""
    return {"prompt": query(policy, comparison.prompt), "response": comparison.first, "response_another": comparison.second}


# --- a model on this machine

class LocalModel:
    """A causal language model that writes judgements here, greedily and in batches.

    Attributes:
        shortened: inputs that were cut to max_prompt_tokens.
    """

    def __init__(self, options: AutoJOptions, device: str, policy: Template | None = None) -> None:
        self.options, self.device, self.policy, self.shortened = options, device, policy, 0
        self.template = load_template(options.prompt_file, "pairwise")
        config, backbone = read_model_config(options), _backbone(options)
        self.tokenizer = load_tokenizer(backbone)
        if options.chat_template and not self.tokenizer.chat_template:
            raise JudgeError(f"the judge '{options.model}' has no chat template: set evaluation.judge.options.chat_template to false, or name another model.")
        self.model = load_backbone(backbone, device) if _quantisation(config) is None else _load_quantised(options, device)

    def write(self, comparisons: Sequence[Comparison]) -> list[str]:
        """A judgement on each comparison, in their order."""
        encoded = []
        for comparison in comparisons:
            ids, cut = encode_question(self.tokenizer, self.template, comparison, self.options, self.policy)
            self.shortened += cut
            encoded.append(ids)
        written = complete(self.model, self.tokenizer, encoded, self.device, self.options.batch_size, self.options.max_new_tokens, seed=0)
        return [completions[0].text for completions in written]


def encode_question(
    tokenizer: PreTrainedTokenizerBase, template: Template, comparison: Comparison, options: AutoJOptions, policy: Template | None = None,
) -> tuple[list[int], bool]:
    """Token ids of the wrapped instruction, and whether something was cut.

    What is too long is cut from the prompt's end; only if that is not enough, from the ends of the responses, the
    longer one first. The instruction always stays, and so does that of the policy's template.

    Raises:
        JudgeError: the instructions alone take more than max_prompt_tokens.
    """
    def encode(texts: dict[str, str]) -> list[int]:
        text = template.render(**texts)
        if options.chat_template:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
            return tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.encode(f"[INST] {text} [/INST]")

    ids = encode(fields_of(comparison, policy))
    if len(ids) <= options.max_prompt_tokens:
        return ids, False
    kept = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in fields_of(comparison).items()}
    while (surplus := len(ids) - options.max_prompt_tokens) > 0:
        name = "prompt" if kept["prompt"] else max(("response", "response_another"), key=lambda n: len(kept[n]))
        if not kept[name]:
            raise JudgeError(f"the instruction '{template.name}' alone takes {len(ids)} tokens, more than evaluation.judge.options.max_prompt_tokens {options.max_prompt_tokens}: raise it.")
        if name != "prompt":
            shorter = min(len(kept["response"]), len(kept["response_another"]))
            surplus = min(surplus, max((surplus + 1) // 2, len(kept[name]) - shorter))
        kept[name] = kept[name][: max(0, len(kept[name]) - surplus)]
        prompt, *responses = (tokenizer.decode(tokens) for tokens in kept.values())
        ids = encode(fields_of(Comparison(prompt, *responses), policy))
    return ids, True


def read_model_config(options: AutoJOptions) -> PreTrainedConfig:
    """The configuration of the judge's model, which is small: what can be refused by it is refused before anything is trained.

    Raises:
        JudgeError: there is no such model, its context is too short, or what its quantisation needs is not installed.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(fetch_backbone(options.model), revision=options.revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise JudgeError(f"the judge's model '{options.model}' cannot be read: {_line(error)} Give a hub id that this machine can reach, "
                         "or a local folder (evaluation.judge.options.model), or an endpoint (base_url).") from None
    context = getattr(config, "max_position_embeddings", None)
    if context and options.max_prompt_tokens + options.max_new_tokens > context:
        raise JudgeError(f"the judge '{options.model}' reads and writes at most {context} tokens, but evaluation.judge.options.max_prompt_tokens {options.max_prompt_tokens} "
                         f"and max_new_tokens {options.max_new_tokens} make {options.max_prompt_tokens + options.max_new_tokens}: lower them.")
    if _quantisation(config) == "gptq":
        absent = [f"{name} >= {oldest}" for name, oldest in GPTQ_LIBRARIES.items() if not _is_installed(name, oldest)]
        if absent:
            raise JudgeError(f"the judge '{options.model}' is a GPTQ checkpoint, and {' and '.join(absent)} to read it {'are' if len(absent) > 1 else 'is'} not installed here: "
                             f"run `pip install {' '.join(GPTQ_LIBRARIES)}`, or take the plain model, or an endpoint (evaluation.judge.options.base_url).")
    return config


def _load_quantised(options: AutoJOptions, device: str) -> PreTrainedModel:
    """A quantised checkpoint is put on its device while it is loaded; its kernels take float16 on CUDA."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, revision=options.revision or "main", dtype="float16" if device.startswith("cuda") else "float32", device_map={"": device},
            trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise JudgeError(f"the judge's quantised model '{options.model}' could not be loaded on {device}: {_line(error)}") from None
    return model.requires_grad_(False).eval()


def _backbone(options: AutoJOptions) -> BackboneConfig:
    return BackboneConfig(name=options.model, revision=options.revision, dtype=options.dtype)


def _quantisation(config: PreTrainedConfig) -> str | None:
    """The method of a quantised checkpoint, 'gptq' for Auto-J's 4-bit form."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    return str(getattr(method, "value", method))


def _is_installed(name: str, oldest: str) -> bool:
    from importlib import metadata

    from packaging.version import Version

    try:
        return Version(metadata.version(name)) >= Version(oldest)
    except metadata.PackageNotFoundError:
        return False


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- a model behind an endpoint

class Endpoint:
    """An OpenAI-compatible chat endpoint that writes judgements; the instruction is the user's turn.

    Attributes:
        shortened: none; the server says itself what is too long for it.
    """

    shortened = 0

    def __init__(self, options: AutoJOptions, policy: Template | None = None) -> None:
        self.options, self.policy = options, policy
        self.template = load_template(options.prompt_file, "pairwise")
        self._chat = ChatEndpoint(options, options.model, options.max_new_tokens, "the judge's endpoint", JudgeError)

    def write(self, comparisons: Sequence[Comparison]) -> list[str]:
        """A judgement on each comparison, in their order; the first failure ends the others.

        Raises:
            JudgeError: a request was refused, or all its repetitions failed.
        """
        return [reply.text for reply in self._chat.ask([self.template.render(**fields_of(c, self.policy)) for c in comparisons])]
