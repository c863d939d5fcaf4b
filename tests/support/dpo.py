"""What tests of DPO share: a reference, and log-probabilities by another way."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from components.config import PolicyConfig
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from tests.support.adapters import random_tensors

REFERENCES = ["base", "sft", "round_start"]
PAIRS = [
    {
        "prompt": f"paper {i}",
        "chosen_ids": [40 + i, 41, 42, 2][: 4 - i % 2],
        "rejected_ids": [60, 61 + i] * (1 + i % 3),
    }
    for i in range(7)
]
"""Pairs by tokens. Every other chosen completion ends with EOS (id 2); no rejected one does.

They are seven, so that the last micro-batch of an epoch may be smaller.
"""


def write_reference_adapter(policy: PolicyConfig, folder: Path) -> Path:
    """Write an adapter of an earlier training as a PEFT folder."""
    slot = AdapterSlot(attach_lora(load_backbone(policy.backbone, "cpu"), policy.lora))
    return export_adapter(random_tensors(slot, seed=0, scale=0.3), policy.lora, policy.backbone, folder)


def load_reference(policy: PolicyConfig, reference: str, adapter: Path) -> Any:
    """The model that a recipe's reference means, built without the tested code."""
    from peft import PeftModel

    backbone = load_backbone(policy.backbone, "cpu")
    return backbone if reference == "base" else PeftModel.from_pretrained(backbone, adapter).eval()


def sequence_logprob(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probability of a completion, from the full logits of one unpadded sequence."""
    logprobs = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float().log_softmax(-1)
    return torch.stack([logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(completion)]).sum()
