"""Published shapes of the models that recipes and benchmarks of paper scale name, and a hub that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.config import BackboneConfig
from components.models.backbone import read_model_config

SHAPES = {
    "Qwen/Qwen2-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
    | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2-1.5B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960}
    | {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "google/gemma-2b": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384}
    | {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1}
    | {"head_dim": 256, "vocab_size": 256000},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {"model_type": "llama", "hidden_size": 2048}
    | {"intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
    "meta-llama/Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096}
    | {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": {"model_type": "qwen2", "hidden_size": 5120}
    | {"intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "OpenAssistant/reward-model-deberta-v3-large-v2": {"model_type": "deberta-v2", "hidden_size": 1024}
    | {"intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"vocab_size": 128100},
    "distilbert/distilgpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12}
    | {"n_positions": 1024, "vocab_size": 50257},
    "Ray2333/gpt2-large-helpful-reward_model": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36}
    | {"n_head": 20, "n_positions": 1024, "vocab_size": 50257},
}
SHAPES["mlabonne/Gemmalpaca-2B"] = SHAPES["google/gemma-2b"]
SHAPES["Ray2333/gpt2-large-harmless-reward_model"] = SHAPES["Ray2333/gpt2-large-helpful-reward_model"]
"""The published shapes of the models that recipes of paper scale name."""


def hub_with_shapes(folder: Path) -> Callable[[BackboneConfig], dict[str, Any]]:
    """A read_model_config for which the hub has the config.json of these models, in a folder."""

    def read(backbone: BackboneConfig) -> dict[str, Any]:
        if backbone.name not in SHAPES:
            return read_model_config(backbone)
        model = folder / backbone.name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[backbone.name]))
        return read_model_config(backbone.model_copy(update={"name": str(model)}))

    return read
