"""Rewards that are sequence classifiers of transformers; an output is the score of a response."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from components.config import BackboneConfig, FrozenModel, NamedModel
from components.environment import disable_transformers_progress_bars
from components.hub import require_reachable
from components.models.backbone import (
    BackboneError,
    check_quantization,
    choose_dtype,
    first_line,
    load_reported,
    require_stored,
)
from components.models.chat_template import ChatTemplate, marks_of
from components.models.rewards.reward_section import ResponseReward, RewardFunction, Scores
from components.models.tokens import decode_cut, sort_distinct, surrounding_ids

FIXED_DAY = "2024-07-26"
"""What a classifier's chat template prints as the present day, so that scores do not change by the day.

It is the day that Llama 3.2's template has where it cannot ask for the present one.
"""
log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ResponseFormat:
    """Format of a prompt and a response as the input of a classifier."""

    # Text with {prompt} and {response}; None is the tokenizer's chat template, and without one encodes them
    # as a pair of texts.
    template: str | None
    max_length: int  # maximum input length (tokens)

    def shorten(self, tokenizer: PreTrainedTokenizerBase, response: str) -> str:
        """Truncate a response to three quarters of the input, so a part of the prompt stays.

        White space around the response, such as that before a continuation, is removed.
        """
        response = response.strip()
        ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        limit = self.max_length * 3 // 4
        return response if len(ids) <= limit else decode_cut(tokenizer, ids[:limit], response)

    def encode(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> BatchEncoding:
        """Encode N pairs of (prompt, response), padded to [N, L].

        A space follows the first letter of a control token in a text, e.g. `< /s>`, so that it is none. The
        start of a prompt that is too long is truncated; this requires a tokenizer that truncates on the
        left. BOS at the beginning of the template stays, and special tokens that
        both the template and the tokenizer write are there once.
        """
        prompt_marks, response_marks = marks_of(tokenizer)
        texts = [(prompt_marks.cut(prompt, " "), response_marks.cut(text, " ")) for prompt, text in texts]
        filled_in = self.template or chat_format(tokenizer)
        if filled_in is None:
            prompts, responses = map(list, zip(*texts, strict=True))
            pairs: BatchEncoding = tokenizer(
                prompts,
                responses,
                truncation="only_first",
                padding=True,
                max_length=self.max_length,
                return_tensors="pt",
            )
            return pairs
        template = _without_added_tokens(tokenizer, filled_in)
        bos = tokenizer.bos_token or ""
        opening = [tokenizer.bos_token_id] if bos and template.startswith(bos) else []
        # The prompt is inserted last, so that a field in its text is not filled.
        before, _, after = template[len(bos) if opening else 0 :].partition("{prompt}")
        filled = [
            before.replace("{response}", response) + prompt + after.replace("{response}", response)
            for prompt, response in texts
        ]
        encoded = tokenizer(filled, truncation=True, max_length=self.max_length - len(opening))
        if opening:
            encoded = {"input_ids": [opening + ids for ids in encoded["input_ids"]]}
        return tokenizer.pad(encoded, padding=True, return_tensors="pt")


def chat_format(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A prompt and a response as turns of a tokenizer's chat template, with their fields; None without one.

    A template that does not write both is a BackboneError.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "{response}"}]
    try:
        text = ChatTemplate(tokenizer, {}, FIXED_DAY).render(turns, add_generation_prompt=False)
        check_template(text)
    except ValueError as error:
        raise BackboneError(
            f"the chat template of the classifier '{tokenizer.name_or_path}' cannot be used ({error}): give"
            " its template in the recipe, with {prompt} and {response}"
        ) from None
    return text


def _without_added_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """A template without the special tokens at its ends that the tokenizer adds to every text."""
    first, last = (
        "".join(cast("list[str]", tokenizer.convert_ids_to_tokens(ids))) for ids in surrounding_ids(tokenizer)
    )
    ended = template.rstrip()  # a block of YAML ends in a line break
    if last and ended.endswith(last):
        template = ended.removesuffix(last)
    return template.removeprefix(first)


def check_template(template: str | None) -> None:
    if template is not None and not ("{prompt}" in template and "{response}" in template):
        raise ValueError("template must contain {prompt} and {response}")


class ClassifierScoring(ResponseReward):
    """How a frozen sequence classifier scores responses, whether it is loaded or trained here."""

    max_length: int = Field(
        512,
        ge=16,
        description=(
            "Maximum input length (tokens). A response is truncated to three quarters of it, then the prompt"
            " at its start."
        ),
    )
    batch_size: int = Field(16, ge=1, description="Responses per batch.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32", description="In bfloat16 (auto on CUDA), scores that differ little become equal."
    )
    tf32: bool = Field(
        True,
        description=(
            "On CUDA, round the factors of float32 products to TF32, which is faster; not in rounds whose"
            " threads train on several GPUs, since they share the setting."
        ),
    )

    def without_tf32(self) -> Self:
        return self.model_copy(update={"tf32": False})


class ClassifierReward(NamedModel, ClassifierScoring):
    """A sequence classifier of the hub or of a local folder."""

    kind: Literal["classifier"] = Field("classifier", description="Kind of the reward.")
    name: str = Field(
        min_length=1,
        description=(
            "A local folder, or a hub id, e.g. OpenAssistant/reward-model-deberta-v3-large-v2 (FedPDPO"
            " D.2.5)."
        ),
    )
    revision: str | None = Field(None, description="Hub revision (commit or tag).")
    template: str | None = Field(
        None,
        description=(
            "Text with {prompt} and {response} that the classifier reads, e.g. '\n\nHuman: {prompt}\n\n"
            "Assistant: {response}'; null: the tokenizer's chat template, with a turn of the user and one of"
            " the assistant, and where it has none a pair of texts, as the tokenizer encodes it."
        ),
    )
    output: int = Field(0, ge=0, description="Index of the classifier's output that is the score.")

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        check_template(self.template)
        return self

    @property
    def description(self) -> str:
        return f"classifier {self.name}"

    @property
    def format(self) -> ResponseFormat:
        return ResponseFormat(self.template, self.max_length)

    def frozen_models(self, name: str) -> list[FrozenModel]:
        backbone = BackboneConfig(name=self.location, revision=self.revision, dtype=self.dtype)
        return [FrozenModel(name, backbone, self.batch_size, self.max_length)]

    def check_loading(self, key: str) -> None:
        self.check_files(key)
        self.check_template()

    def check_files(self, key: str) -> None:
        """Refuse a configuration, which is small, that cannot be read or is of no model that is read here.

        Args:
            key: of the reward, for messages.
        """
        from transformers import AutoConfig

        try:
            require_reachable(self.location, self.revision)
            config = AutoConfig.from_pretrained(
                self.location, revision=self.revision or "main", trust_remote_code=False
            )
        except (OSError, ConnectionError, ValueError) as error:
            raise _unreadable(self, error) from None
        check_quantization(f"{key}.name '{self.name}'", config.to_dict())
        positions = _absolute_positions(config, self.max_length)
        if positions is not None and self.max_length > positions:
            raise BackboneError(
                f"the classifier '{self.name}' has {positions} positions, but max_length is"
                f" {self.max_length}: lower max_length."
            )

    def check_template(self) -> None:
        """Refuse a chat template that would be used and cannot be."""
        if self.template is None:
            chat_format(self.read_tokenizer())

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """The classifier's tokenizer, which truncates on the left."""
        from transformers import AutoTokenizer

        try:
            require_reachable(self.location, self.revision)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.location,
                revision=self.revision or "main",
                trust_remote_code=False,
                truncation_side="left",
            )
        except (OSError, ConnectionError, ValueError) as error:
            raise _unreadable(self, error) from None
        return tokenizer

    def load_weights(self, **options: Any) -> PreTrainedModel:
        """The classifier in float32, refused where its files lack weights or it lacks the output.

        With device_map {"": "meta"} only the headers of the files are read.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        disable_transformers_progress_bars()
        try:
            model, loading = load_reported(
                AutoModelForSequenceClassification,
                f"reward model '{self.name}'",
                self.location,
                revision=self.revision or "main",
                dtype=torch.float32,
                **options,
            )
        except BackboneError:
            raise
        except (OSError, ConnectionError, ValueError, ImportError) as error:
            raise _unreadable(self, error) from None
        missing = sorted(loading["missing_keys"])
        if missing:
            raise BackboneError(
                f"reward model '{self.name}' has no weights for {missing[0]}, so its "
                "scores would be random: name a sequence classifier."
            )
        if self.output >= model.config.num_labels:
            raise BackboneError(
                f"reward model '{self.name}' has {model.config.num_labels} outputs, but output is"
                f" {self.output}: use a number from 0 to {model.config.num_labels - 1}."
            )
        return cast("PreTrainedModel", model)

    def load(self, device: str, folder: Path | None) -> RewardFunction:
        return RewardModel(self, device).score


def _absolute_positions(config: PreTrainedConfig, length: int) -> int | None:
    """Longest input of a model with a vector for each position; None for other models.

    Some models, such as RoBERTa, give the first token the position after the padding token's id. The
    model shows it, whose positions have a padding index then. It is built without weights, and only
    if it matters for inputs of this length.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is None or not getattr(text, "position_biased_input", True):  # DeBERTa v2 and v3
        return None
    pad = getattr(text, "pad_token_id", None)
    has_vectors = getattr(text, "rope_parameters", None) is None
    if has_vectors and pad is not None and positions - pad - 1 < length <= positions:
        return positions - _first_position(config)
    return positions


def _first_position(config: PreTrainedConfig) -> int:
    """The position of the first token of a classifier's inputs; 0 if the classifier cannot be built."""
    import torch
    from transformers import AutoModelForSequenceClassification

    automatic: Any = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            model = automatic.from_config(config)
    except ValueError:  # loading it says why
        return 0
    indices = (
        getattr(module, "padding_idx", None)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings")
    )
    return next((int(index) + 1 for index in indices if index is not None), 0)


class RewardModel:
    """A frozen classifier on a device; all clients use the same one."""

    def __init__(self, config: ClassifierReward, device: str) -> None:
        """Load the classifier; its weights must be safetensors."""
        import torch

        from components.models.onednn import use_onednn

        disable_transformers_progress_bars()
        self.config = config
        self.device = device
        self.tokenizer = config.read_tokenizer()
        model: Any = config.load_weights()
        require_stored(model, f"reward model '{config.name}'", config.location, config.revision)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        if config.template is None:
            reads = "in its chat template" if chat_format(self.tokenizer) else "as a pair of texts"
            log.info("the classifier %s reads a prompt and a response %s", config.name, reads)
        if getattr(model.config, "summary_type", None) != "last":  # XLNet reads the last column
            self.tokenizer.padding_side = "right"  # positions are counted from the first column
        # The model is loaded in fp32 and then converted. transformers loads bf16 by changing the
        # default dtype of the process, in which other clients train.
        dtype = choose_dtype(config.dtype, device)
        self.model = model.requires_grad_(False).eval().to(device, dtype)
        use_onednn(self.model)
        rounds = config.tf32 and device.startswith("cuda") and dtype == torch.float32
        self._products: Callable[[], AbstractContextManager[None]] = tf32_products if rounds else nullcontext

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        progress: Callable[[int, int], None] | None = None,
    ) -> Scores:
        """Score N responses to N prompts; [N] float64.

        Progress is called after each batch with the number of distinct rows done, and in total.
        """
        import torch

        response_format = self.config.format
        texts = [
            (prompt, response_format.shorten(self.tokenizer, response))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        distinct, positions = sort_distinct(texts, lambda text: sum(map(len, text)))
        scores = np.zeros(len(distinct))
        for start in range(0, len(distinct), self.config.batch_size):
            batch = distinct[start : start + self.config.batch_size]
            inputs = self._mark_padding(response_format.encode(self.tokenizer, batch)).to(self.device)
            with torch.inference_mode(), self._products():
                logits = self.model(**inputs).logits
            scores[start : start + len(batch)] = logits[:, self.config.output].double().cpu().numpy()
            if progress is not None:
                progress(start + len(batch), len(distinct))
        return scores[positions]

    def _mark_padding(self, inputs: BatchEncoding) -> BatchEncoding:
        """Pad with a token that no text of a batch contains, and tell the model which one it is.

        Classifiers of transformers read the last token that is not the padding token. In a text that
        ends in EOS, where EOS is the padding token, that is not the last token.
        """
        ids, attended = inputs["input_ids"], inputs["attention_mask"].bool()
        pad = choose_padding(self.model, set(ids[attended].tolist()), self.tokenizer.pad_token_id)
        inputs["input_ids"] = ids.masked_fill(~attended, pad)
        for config in (self.model.config, self.model.config.get_text_config()):
            config.pad_token_id = pad
        return inputs


def choose_padding(model: PreTrainedModel, tokens: Collection[int], preferred: int) -> int:
    """A token of a model's vocabulary that is none of `tokens`: the preferred one if possible."""
    embedding: Any = model.get_input_embeddings()
    vocabulary: int = embedding.weight.shape[0]
    candidates: list[int] = [preferred, *range(vocabulary)]
    for token in candidates:
        if token < vocabulary and token not in tokens:
            return token
    raise BackboneError(
        f"the texts of a reward model contain all its {vocabulary} tokens, so that none is left to pad with:"
        " add a padding token to its tokenizer and its embedding"
    )


def _unreadable(config: ClassifierReward, error: Exception) -> BackboneError:
    return BackboneError(
        f"reward model '{config.name}' (revision {config.revision or 'main'}) could not be loaded:"
        f" {first_line(error).rstrip('.')}. Give a folder with config.json and safetensors weights of a"
        " sequence classifier, or a hub id that this machine can reach."
    )


_TF32_LOCK = threading.Lock()
_tf32_users = 0  # threads that are inside
_precision_before = "none"  # precision before the first of them


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let fp32 products of matrices use TF32 on CUDA until the last of the threads inside has left.

    They round their factors to 10 bits of mantissa. torch has one setting for the process, so no other
    thread may compute what must not use TF32. It is set by allow_tf32, which sets torch's earlier and present
    setting alike: after fp32_precision alone, a library that reads the earlier one gets an error.
    """
    import torch

    global _tf32_users, _precision_before
    matmul = torch.backends.cuda.matmul
    with _TF32_LOCK:
        if _tf32_users == 0:
            _precision_before = matmul.fp32_precision
            matmul.allow_tf32 = True
        _tf32_users += 1
    try:
        yield
    finally:
        with _TF32_LOCK:
            _tf32_users -= 1
            if _tf32_users == 0 and _precision_before != "tf32":
                matmul.allow_tf32 = False
                matmul.fp32_precision = _precision_before
