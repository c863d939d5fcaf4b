"""The policy: a causal language model with or without a LoRA adapter, its prompts, and batched generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from components.config import Explained, PolicyConfig
from components.data.templates import Template
from components.data.templates import load as load_template
from components.models.adapters import AdapterSlot, attach, export_adapter, folder_names, read_adapter, write_atomically
from components.models.backbone import load_backbone, load_tokenizer
from components.seeding import derive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from components.models.adapters import Adapter


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


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, template: Template, prompt: str, max_prompt_tokens: int, truncation_mode: Literal["keep_start", "keep_end"] = "keep_start", system: str | None = None,
) -> list[int]:
    """Token ids of a prompt in its template, as a user's turn where the backbone has a chat template, behind a system turn where one is given.

    What is too long is cut from the end of the prompt itself (from its start with keep_end); the template and the start of the answer always stay.

    Raises:
        PolicyError: the template alone takes more than max_prompt_tokens, or the chat template takes no system turn.
    """
    from jinja2 import TemplateError

    context = tokenizer.encode(prompt.strip(), add_special_tokens=False)
    before = [] if system is None else [{"role": "system", "content": system}]
    while True:
        text = template.render(prompt=tokenizer.decode(context))
        if tokenizer.chat_template:
            try:
                text = tokenizer.apply_chat_template([*before, {"role": "user", "content": text.strip()}], tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise PolicyError(f"the chat template of {tokenizer.name_or_path} refuses the prompt ({error}){'' if system is None else ', before which policy.system puts a system turn: leave that out if it has none'}.") from None
        ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        surplus = len(ids) - max_prompt_tokens
        if surplus <= 0:
            return ids
        if not context:
            raise PolicyError(f"the template '{template.name}' alone takes {len(ids)} tokens, more than policy.max_prompt_tokens {max_prompt_tokens}: raise it.")
        kept = max(0, len(context) - surplus)
        context = context[:kept] if truncation_mode == "keep_start" else context[len(context) - kept :]


def check_prompts(config: PolicyConfig) -> None:
    """Refuse a template, or a system turn, that a policy's prompts cannot have; the model is not loaded.

    Raises:
        PolicyError: see encode_prompt.
        DataError: there is no such template.
        BackboneError: the backbone cannot be had.
    """
    encode_prompt(load_tokenizer(config.backbone), load_template(config.template, "policy"), "", config.max_prompt_tokens, config.truncation_mode, config.system)


class Policy:
    """A language model that answers prompts.

    Of the backbone's generation settings (generation_config.json) it takes the tokens that end a completion alone: with a repetition penalty, say, completions would be of
    another distribution than the one whose log-probabilities are trained and measured.

    Attributes:
        model: the backbone, PEFT-wrapped where an adapter is loaded.
    """

    def __init__(self, config: PolicyConfig, device: str, adapter: Path | None = None) -> None:
        """Load the backbone, and a PEFT adapter folder where one is given."""
        from transformers import GenerationConfig

        self.config, self.device = config, device
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "policy")
        self.model: PreTrainedModel = load_backbone(config.backbone, device)
        self.model.generation_config = GenerationConfig(eos_token_id=stop_ids(self.model, self.tokenizer))
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter).eval()

    def encode(self, prompt: str) -> list[int]:
        """Token ids of one prompt, see encode_prompt."""
        config = self.config
        return encode_prompt(self.tokenizer, self.template, prompt, config.max_prompt_tokens, config.truncation_mode, config.system)

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


class PersonalPolicies:
    """Policies of several clients on one backbone: an adapter for each, swapped in when its client asks.

    Attributes:
        clients: their names, sorted.
        policy: the backbone with the slot of the adapters; its own adapter is that of the client who asked last.
    """

    def __init__(self, config: PolicyConfig, device: str, folder: Path) -> None:
        """Load the backbone and the adapters of a folder that save_personal wrote."""
        adapters = {name: read_adapter(folder / sub) for name, sub in personal_folders(folder).items()}
        loras = [lora for _, lora in adapters.values()]
        if any(lora != loras[0] for lora in loras):
            raise PolicyError(f"the adapters in {folder} do not have the same LoRA configuration: they cannot share a slot")
        self.clients = sorted(adapters)
        self.policy = Policy(config, device)
        self.policy.model = attach(self.policy.model, loras[0]).eval()
        self._slot = AdapterSlot(self.policy.model)
        self._adapters = {name: tensors for name, (tensors, _) in adapters.items()}

    def of(self, client: str) -> Policy:
        """The policy of a client, until another one is asked for.

        Raises:
            PolicyError: there is no such client.
        """
        self.check(client)
        self._slot.load(self._adapters[client])
        return self.policy

    def check(self, client: str) -> None:
        """Refuse a client that is none.

        Raises:
            PolicyError: naming the first that are.
        """
        if client not in self.clients:
            raise PolicyError(f"client_id '{client}' has no policy here (there are {len(self.clients)}: {', '.join(self.clients[:5])}{', ...' if len(self.clients) > 5 else ''})")

    def generate(self, prompts: Sequence[str], clients: Sequence[str], seed: int, progress: Callable[[int, int], None] | None = None) -> list[list[Completion]]:
        """Greedy answers, each prompt's by the policy of its client; see Policy.generate."""
        result: list[list[Completion]] = [[] for _ in prompts]
        done = 0
        for name in sorted(set(clients)):
            asked = [n for n, client in enumerate(clients) if client == name]
            for n, answer in zip(asked, self.of(name).generate([prompts[n] for n in asked], seed), strict=True):
                result[n] = answer
            done += len(asked)
            if progress is not None:
                progress(done, len(prompts))
        return result


CLIENTS_FILE = "clients.json"


def is_personal(folder: Path | None) -> bool:
    """Whether a folder holds an adapter for each of several clients, and not one PEFT adapter."""
    return folder is not None and (folder / CLIENTS_FILE).is_file()


def save_personal(adapters: Mapping[str, Adapter], config: PolicyConfig, folder: Path) -> Path:
    """Write an adapter for each client, as PEFT folders, and clients.json, which says whose is where."""
    folders = folder_names(sorted(adapters))
    for name, sub in folders.items():
        export_adapter(adapters[name], config.lora, config.backbone.name, folder / sub)
    write_atomically(folder / CLIENTS_FILE, json.dumps(folders, indent=1, ensure_ascii=False).encode())
    return folder


def personal_folders(folder: Path) -> dict[str, str]:
    """Folder of each client's adapter, by client."""
    return json.loads((folder / CLIENTS_FILE).read_text(encoding="utf-8"))


def deal(count: int, clients: Sequence[str]) -> list[str]:
    """Whose policy answers each of so many prompts that belong to nobody: in turn, by the clients' sorted names."""
    names = sorted(clients)
    return [names[n % len(names)] for n in range(count)]


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
    from transformers import LogitsProcessorList

    rows = [(i, k) for i in range(len(encoded)) for k in range(count)]
    rows.sort(key=lambda row: (len(encoded[row[0]]), row))  # rows of like length share a batch, so little is padded
    result: list[list[Completion | None]] = [[None] * count for _ in encoded]
    eos = stop_ids(model, tokenizer)
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        width = max(len(encoded[i]) for i, _ in chunk)
        ids = torch.full((len(chunk), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for n, (i, _) in enumerate(chunk):
            ids[n, width - len(encoded[i]) :] = torch.as_tensor(encoded[i])
            mask[n, width - len(encoded[i]) :] = 1
        noise = LogitsProcessorList([gumbel_noise(device, derive(seed, "generate", start), temperature)] if temperature else [])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens,
                eos_token_id=eos, pad_token_id=tokenizer.pad_token_id, do_sample=False, logits_processor=noise)
        for (i, k), row in zip(chunk, out[:, width:].cpu().tolist(), strict=True):
            stop = next((n for n, token in enumerate(row) if token in eos), None)
            kept = row if stop is None else row[: stop + 1]
            result[i][k] = Completion(tuple(kept), tokenizer.decode(kept, skip_special_tokens=True).strip(), stop is not None)
        if progress is not None:
            progress(start + len(chunk), len(rows))
    return result


def gumbel_noise(device: str, seed: int, temperature: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What makes the arg max of logits a sample of their softmax at a temperature: noise of a standard Gumbel distribution on each (Gumbel 1954; Maddison et al. 2014, A* Sampling).

    It has a generator of its own, so that clients side by side, or a model that is being built beside them, draw nothing of each other's, as they would from the process's.
    """
    import torch

    numbers = torch.Generator(device).manual_seed(seed)

    def noisy(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        draws = torch.empty(logits.shape, dtype=torch.float64, device=logits.device).exponential_(generator=numbers)
        return logits.double() / temperature - draws.log_()

    return noisy


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: those of the model's generation settings, and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
