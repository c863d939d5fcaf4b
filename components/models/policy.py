"""The policy: a causal language model with or without a LoRA adapter, its prompts, and batched generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Explained, PolicyConfig
from components.data.templates import Template
from components.data.templates import load as load_template
from components.models.backbone import load_backbone, load_tokenizer
from components.seeding import derive, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PolicyError(Explained, ValueError):
    """A prompt or an adapter that the policy cannot work with."""


@dataclass(frozen=True)
class Completion:
    """What a policy wrote.

    Attributes:
        ids: sampled tokens, with the end-of-sequence token where it was reached.
        text: decoded, without special tokens, stripped.
        finished: whether it ended by itself, and not at the length limit.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool


def encode_prompt(tokenizer: PreTrainedTokenizerBase, template: Template, prompt: str, max_prompt_tokens: int) -> list[int]:
    """Token ids of a prompt in its template, as a user's turn where the backbone has a chat template.

    What is too long is cut from the end of the prompt itself; the template and the start of the answer always stay.

    Raises:
        PolicyError: the template alone takes more than max_prompt_tokens.
    """
    context = tokenizer.encode(prompt.strip(), add_special_tokens=False)
    while True:
        text = template.render(prompt=tokenizer.decode(context))
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text.strip()}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        surplus = len(ids) - max_prompt_tokens
        if surplus <= 0:
            return ids
        if not context:
            raise PolicyError(f"the template '{template.name}' alone takes {len(ids)} tokens, more than policy.max_prompt_tokens {max_prompt_tokens}: raise it.")
        context = context[: max(0, len(context) - surplus)]


class Policy:
    """A language model that answers prompts.

    Attributes:
        model: the backbone, PEFT-wrapped where an adapter is loaded.
    """

    def __init__(self, config: PolicyConfig, device: str, adapter: Path | None = None) -> None:
        """Load the backbone, and a PEFT adapter folder where one is given."""
        self.config, self.device = config, device
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "policy")
        self.model: PreTrainedModel = load_backbone(config.backbone, device)
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter).eval()

    def encode(self, prompt: str) -> list[int]:
        """Token ids of one prompt, see encode_prompt."""
        return encode_prompt(self.tokenizer, self.template, prompt, self.config.max_prompt_tokens)

    def generate(
        self, prompts: Sequence[str], seed: int, temperature: float = 0.0, count: int = 1, max_new_tokens: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample completions in batches; a batch stops when all its rows have.

        Args:
            prompts: texts.
            seed: a batch's random numbers are a function of it and of the batch's place.
            temperature: 0 is greedy search.
            count: completions a prompt; more than one needs a temperature.
            max_new_tokens: None takes the recipe's.
            progress: called with (rows done, rows in all) after each batch.

        Returns:
            `count` completions for each prompt, in the order of the prompts.
        """
        if count > 1 and temperature == 0:
            raise PolicyError(f"{count} greedy completions of a prompt would be the same: give a temperature above 0")
        return complete(
            self.model, self.tokenizer, [self.encode(prompt) for prompt in prompts], self.device, self.config.generation_batch_size,
            max_new_tokens or self.config.max_new_tokens, seed, temperature, count, progress)


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoded: Sequence[list[int]], device: str, batch_size: int, max_new_tokens: int, seed: int,
    temperature: float = 0.0, count: int = 1, progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Complete prompts that are token ids already; see Policy.generate for the other arguments.

    Args:
        model, tokenizer: any causal language model; the tokenizer has a padding token.
        encoded: token ids, one list a prompt.
        device: where the model is.
        batch_size: sequences generated at once.
        max_new_tokens: longest completion (tokens).
    """
    import torch

    rows = [(i, k) for i in range(len(encoded)) for k in range(count)]
    rows.sort(key=lambda row: (len(encoded[row[0]]), row))  # rows of like length share a batch, so little is padded
    result: list[list[Completion | None]] = [[None] * count for _ in encoded]
    eos = stop_ids(model, tokenizer)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        width = max(len(encoded[i]) for i, _ in chunk)
        ids = torch.full((len(chunk), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for n, (i, _) in enumerate(chunk):
            ids[n, width - len(encoded[i]) :] = torch.as_tensor(encoded[i])
            mask[n, width - len(encoded[i]) :] = 1
        with torch.inference_mode(), seeded(device, derive(seed, "generate", start)):
            out = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens,
                eos_token_id=eos, pad_token_id=tokenizer.pad_token_id, **sampling)
        for (i, k), row in zip(chunk, out[:, width:].cpu().tolist(), strict=True):
            stop = next((n for n, token in enumerate(row) if token in eos), None)
            kept = row if stop is None else row[: stop + 1]
            result[i][k] = Completion(tuple(kept), tokenizer.decode(kept, skip_special_tokens=True).strip(), stop is not None)
        if progress is not None:
            progress(start + len(chunk), len(rows))
    return result


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: those of the model's generation settings, and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
