"""Small models of any family that transformers has, with random weights."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma": {},
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
}
"""Families whose layers have the parts of Llama's, with settings that short texts are affected by."""
EXAMPLES = ("llama", "gemma3_text")
"""One without and one with a window and further norms."""


def build_random(family: str, **settings: Any) -> PreTrainedModel:
    """A model in evaluation mode; settings of its configuration replace SIZES and those of FAMILIES."""
    config = AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3)
    return model
