"""The models that recipes of paper scale name, as folders of small models of their families.

A folder has the model's id as its relative path, so that transformers reads it in place of the hub.
Weights are random, and the tokenizers split texts mostly into characters.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.support.tokenizers import build_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A chat template like TinyLlama's."""


def _decoder_sizes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _gpt2_config(tokenizer: PreTrainedTokenizerBase, **more: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=1024,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **more,
    )


def _gemma(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**_decoder_sizes(tokenizer)))


def _llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(tokenizer)))


def _qwen2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_decoder_sizes(tokenizer)))


def _gpt2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return GPT2LMHeadModel(_gpt2_config(tokenizer))


def _gpt2_reward(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    # num_labels as Ray2333's configurations have it
    return GPT2ForSequenceClassification(
        _gpt2_config(tokenizer, num_labels=1, pad_token_id=tokenizer.eos_token_id)
    )


def _no_model(tokenizer: PreTrainedTokenizerBase) -> None:
    """Of this id only the tokenizer is used."""


Builder = Callable[[PreTrainedTokenizerBase], PreTrainedModel | None]

MODELS: dict[str, tuple[str, Builder]] = {
    "Ray2333/gpt2-large-harmless-reward_model": ("gpt2", _gpt2_reward),
    "Ray2333/gpt2-large-helpful-reward_model": ("gpt2", _gpt2_reward),
    "Qwen/Qwen2-0.5B": ("gpt2", _qwen2),
    "Qwen/Qwen2-1.5B": ("gpt2", _qwen2),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", _llama),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": ("gpt2", _qwen2),
    "distilbert/distilgpt2": ("gpt2", _gpt2),
    "google/flan-t5-xl": ("llama", _no_model),
    "google/gemma-2b": ("gemma", _gemma),
    "meta-llama/Llama-3.1-8B": ("llama-3", _llama),
    "mlabonne/Gemmalpaca-2B": ("gemma", _gemma),
}
"""By id: the family of the tokenizer, and what builds the model."""


def write_models(hub: Path) -> None:
    """Write the folders of all models."""
    for seed, (name, (family, build)) in enumerate(MODELS.items()):
        folder = hub / name
        tokenizer = build_tokenizer(family)
        if "Chat" in name:
            tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(tokenizer)
        if model is not None:
            model.save_pretrained(folder)
