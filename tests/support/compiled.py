"""A compiled selector, and the bytes of its step, for a test and for the processes that it starts."""

import hashlib

import torch

from components.models.selector import Comparison, Selector
from tests.support.adapters import random_tensors

COMPARISONS = [Comparison(f"prompt {n}" * n, "yes sure " * n, "no") for n in range(1, 7)]


def load_selector(recipe, compiled=False):
    """The recipe's selector without dropout, with random values in its slot."""
    lora = recipe.selector.lora.model_copy(update={"dropout": 0.0})
    selector = Selector(recipe.selector.model_copy(update={"lora": lora}), "cpu", compiled)
    selector.slot.load(random_tensors(selector.slot, seed=1, scale=0.2))
    return selector


def logits_and_gradients(selector, rows):
    """Logits [N, 2] of rows, and the gradients of the slot's parameters for alternating labels."""
    for parameter in selector.slot.parameters:
        parameter.grad = None
    logits = selector.training_logits(rows)
    torch.nn.functional.cross_entropy(logits, torch.arange(len(rows)) % 2).backward()
    return logits.detach(), [parameter.grad for parameter in selector.slot.parameters]


def digest(selector, rows):
    """Hash of the bytes of a step's logits and gradients."""
    logits, gradients = logits_and_gradients(selector, rows)
    data = b"".join(tensor.numpy().tobytes() for tensor in (logits, *gradients))
    return hashlib.sha256(data).hexdigest()
