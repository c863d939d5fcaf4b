"""Small models of several families with random weights, whose embeddings are tied or not."""

from pathlib import Path

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from components.config import BackboneConfig
from tests.support.tokenizers import build_tokenizer

DECODERS = {
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
FAMILIES = ("gemma", "gpt2", "llama", "qwen2")


def build_family(family: str, tied: bool, vocabulary: int = 40) -> PreTrainedModel:
    """A model of two layers, frozen and in evaluation mode."""
    common = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "gpt2":
            config = GPT2Config(n_positions=1024, n_embd=16, n_layer=2, n_head=2, **common)
            model: PreTrainedModel = GPT2LMHeadModel(config)
        else:
            config_class, model_class = DECODERS[family]
            sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
            model = model_class(config_class(pad_token_id=None, **sizes, **heads, **common))
    return model.requires_grad_(False).eval()


def write_family(family: str, tied: bool, folder: Path) -> BackboneConfig:
    """Save such a model with a tokenizer that has ' A' and ' B' as tokens."""
    tokenizer = build_tokenizer("gpt2")
    build_family(family, tied, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return BackboneConfig(name=str(folder))
