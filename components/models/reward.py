"""A reward model: a sequence classifier of transformers whose output is the score of a response to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.config import RewardConfig
from components.models.backbone import BackboneError, choose_dtype, quiet_transformers

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


class RewardModel:
    """A frozen classifier on a device; it is the same for all clients."""

    def __init__(self, config: RewardConfig, device: str) -> None:
        """Load it.

        Raises:
            BackboneError: it cannot be had, has no safetensors weights, or not so many outputs.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        quiet_transformers()
        self.config, self.device, revision = config, device, config.revision or "main"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(config.name, revision=revision, trust_remote_code=False, truncation_side="left")
            self.model, found = AutoModelForSequenceClassification.from_pretrained(
                config.name, revision=revision, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True)
        except (OSError, ConnectionError, ValueError) as error:
            raise _unreadable(config, error) from None
        if found["missing_keys"]:
            raise BackboneError(f"reward model '{config.name}' has no weights for {sorted(found['missing_keys'])[0]}, so that its scores would be random: it is no sequence classifier, give one.")
        if config.output >= self.model.config.num_labels:
            raise BackboneError(f"reward model '{config.name}' has {self.model.config.num_labels} outputs, but output is {config.output}: they are counted from 0.")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model = self.model.requires_grad_(False).eval().to(device, choose_dtype(config.dtype, device))  # transformers loads bf16 by a default of the whole process, in which other clients train

    def score(self, prompts: Sequence[str], responses: Sequence[str], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Scores of responses to prompts.

        Args:
            prompts, responses: N texts each.
            progress: called with (rows done, rows in all) after each batch.

        Returns:
            [N] float64.
        """
        import torch

        texts = [(prompt, shortened(self.tokenizer, self.config, response)) for prompt, response in zip(prompts, responses, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: (sum(map(len, texts[i])), i))  # rows of like length share a batch, so little is padded
        scores = np.zeros(len(texts))
        for start in range(0, len(order), self.config.batch_size):
            chunk = order[start : start + self.config.batch_size]
            with torch.inference_mode():
                logits = self.model(**encode(self.tokenizer, self.config, [texts[i] for i in chunk]).to(self.device)).logits
            scores[chunk] = logits[:, self.config.output].double().cpu().numpy()
            if progress is not None:
                progress(start + len(chunk), len(order))
        return scores


def read_config(config: RewardConfig) -> None:
    """Refuse early what can be refused by a classifier's configuration, which is small.

    Raises:
        BackboneError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(config.name, revision=config.revision or "main", trust_remote_code=False)
    except (OSError, ConnectionError, ValueError) as error:
        raise _unreadable(config, error) from None


def _unreadable(config: RewardConfig, error: Exception) -> BackboneError:
    return BackboneError(
        f"reward model '{config.name}' (revision {config.revision or 'main'}) could not be loaded: {str(error).splitlines()[0]} "
        "Give a folder with config.json and safetensors weights of a sequence classifier, or a hub id that this machine can reach.")


def shortened(tokenizer: PreTrainedTokenizerBase, config: RewardConfig, response: str) -> str:
    """A response of at most three quarters of the input, so that something of the prompt stays."""
    ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    most = config.max_length * 3 // 4
    return response if len(ids) <= most else tokenizer.decode(ids[:most])


def encode(tokenizer: PreTrainedTokenizerBase, config: RewardConfig, texts: Sequence[tuple[str, str]]) -> BatchEncoding:
    """What the classifier reads of prompts and responses, padded; the prompts lose their start where it is too long."""
    most = {"padding": True, "max_length": config.max_length, "return_tensors": "pt"}
    if config.template is None:
        return tokenizer([prompt for prompt, _ in texts], [response for _, response in texts], truncation="only_first", **most)
    before, _, after = config.template.partition("{prompt}")  # in parts: what a prompt says is not filled in again
    filled = [before.replace("{response}", response) + prompt + after.replace("{response}", response) for prompt, response in texts]
    return tokenizer(filled, truncation=True, **most)
