"""The policy: a causal language model with or without an adapter, its prompts and completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config import LoraConfig, PolicyConfig, UserError
from components.data.dialogues import Turn, dialogue_turns, turn_marker
from components.data.records import trailing_space
from components.data.templates import load as load_template
from components.io import read_json, write_atomically
from components.models.adapters import AdapterSlot, attach_lora, export_adapter, read_adapter
from components.models.backbone import load_backbone, load_tokenizer
from components.models.chat_template import ChatTemplate, ChatTemplateError, Message, find_marks
from components.models.checkpointing import enable_checkpointing
from components.models.generation import (
    GenerationProgress,
    decode_completion,
    find_stop_ids,
    generate_completions,
    read_generation_settings,
)
from components.models.offload import allocate_adapters
from components.models.peft_folder import check_recorded_layers, read_options
from components.models.samples import Completion, GenerationSettings, Reply, SampleKey
from components.models.tokens import decode_cut, encode_beginning, encode_continuation, encode_text
from components.names import file_name

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from components.models.logprobs import TokenRow
    from components.models.store import Adapter

CLIENTS_FILE = "clients.json"  # maps each client to the folder of its adapter


class PolicyError(UserError, ValueError):
    """A prompt or an adapter that the policy cannot work with."""


@dataclass(frozen=True)
class RenderedPrompt:
    """What a policy generates from."""

    text: str  # the prompt in its template, and in the chat template if there is one
    ids: list[int]  # without a chat template they begin with the special tokens of the tokenizer
    messages: Sequence[Message] = ()  # the turns before the answer; none without a chat template


def check_prompts(config: PolicyConfig) -> None:
    """Check the template, the system turn and the chat template of a policy without loading the model."""
    texts = PolicyTexts(config)
    if texts.tokenizer.eos_token_id is None:
        raise PolicyError(
            f"the tokenizer of '{config.backbone.name}' has no token that ends a completion: set eos_token in"
            " its tokenizer_config.json."
        )
    texts.encode("")
    if texts.chat is not None:
        texts.chat.end_of_turn()
    elif config.chat_template_kwargs:
        raise PolicyError(
            f"policy.chat_template_kwargs has arguments, but no chat template of {config.backbone.name} is"
            " used: leave them out, or use a backbone with a chat template and policy.chat 'auto'."
        )


def used_ids(config: PolicyConfig) -> set[int]:
    """The tokens of a short prompt with an answer and of the end of a turn, without loading the model."""
    texts = PolicyTexts(config)
    end = None if texts.chat is None else texts.chat.end_of_turn()
    return {*chain(*texts.encode_texts("a", "a")), *([] if end is None else [end])}


class PolicyTexts:
    """How a policy reads texts: its tokenizer, its template, and its longest prompt and completion."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.backbone)
        self.template = load_template(config.template, "policy")
        # Prompts and completions that each prompt follows, and the tokens that they may take.
        self.examples: tuple[tuple[str, str], ...] = ()
        self.max_example_tokens = 0
        stop_ids: list[int] = []
        with suppress(OSError, ValueError):  # the model cannot be loaded, as its load says
            stop_ids = find_stop_ids(read_generation_settings(config.backbone), self.tokenizer)
        self.marks = find_marks(self.tokenizer, config.chat_template_kwargs, stop_ids)
        # False: without a chat template, prompts may hold tokens, since the texts of owners in them are cut.
        self.cuts_prompts = True
        self.chat: ChatTemplate | None = None  # that prompts are given in
        if self.tokenizer.chat_template and config.chat != "none":
            self.chat = ChatTemplate(
                self.tokenizer, config.chat_template_kwargs, config.chat_date, self.marks
            )

    def render(self, prompt: str) -> RenderedPrompt:
        """A prompt in its template, as the user's turn if there is a chat template.

        With `chat` 'turns', the turns of a dialogue are turns of the chat template, without the template.

        A chat template writes its own special tokens; without one, the tokenizer's precede the text. If
        the result is too long, the prompt's own text is truncated; the template and the start of the
        answer always stay. White space around the prompt is removed. Examples take no tokens from the
        prompt; those that would take more than their own are left out.

        Raises:
            PolicyError: the template alone is too long, or each example is.
        """
        rendered = self._render_alone(prompt)
        if not self.examples:
            return rendered
        fitting: list[tuple[str, str]] = []
        shown = rendered
        for example in self.examples:
            longer = self._render_after([*fitting, example], rendered)
            if len(longer.ids) <= len(rendered.ids) + self.max_example_tokens:
                fitting, shown = [*fitting, example], longer
        if not fitting:
            taken = len(self._render_after(self.examples[:1], rendered).ids) - len(rendered.ids)
            raise PolicyError(
                f"no example fits: the first one takes {taken} tokens, and"
                f" federation.options.max_example_tokens is {self.max_example_tokens}: raise it."
            )
        return shown

    def _render_after(self, examples: Sequence[tuple[str, str]], rendered: RenderedPrompt) -> RenderedPrompt:
        """A rendered prompt after examples: as further turns, or as further texts without a chat template."""
        shown = [(self._render_alone(prompt), completion.strip()) for prompt, completion in examples]
        if self.chat is None:
            cut = self.marks.answer.cut
            text = "".join(f"{one.text} {cut(answer)}\n\n" for one, answer in shown) + rendered.text
            return RenderedPrompt(text, encode_beginning(self.tokenizer, text))
        systems = 0 if self.config.system is None else 1
        turns: list[Message] = []
        for one, answer in shown:
            turns += [*one.messages[systems:], {"role": "assistant", "content": answer}]
        messages = [*rendered.messages[:systems], *turns, *rendered.messages[systems:]]
        text = self.chat.render(messages, add_generation_prompt=True)
        return RenderedPrompt(text, encode_text(self.tokenizer, text), messages)

    def _render_alone(self, prompt: str) -> RenderedPrompt:
        """See `render`, without examples."""
        if self.config.chat == "turns" and self.chat is None:
            raise PolicyError(
                f"policy.chat is 'turns', and {self.tokenizer.name_or_path} has no chat template: use a"
                " backbone with one, or policy.chat=none with a template such as dialogue/policy"
            )
        shown = prompt.strip()
        marker = turn_marker(shown)
        rendered = self._render_whole(shown, marker)
        context = None
        while (surplus := len(rendered.ids) - self.config.max_prompt_tokens) > 0:
            if context is None:
                context = encode_text(self.tokenizer, self.marks.prompt.cut(shown))
            if not context:
                raise PolicyError(
                    f"the template '{self.template.name}' alone takes {len(rendered.ids)} tokens, more than "
                    f"policy.max_prompt_tokens {self.config.max_prompt_tokens}: raise it."
                )
            remaining = max(0, len(context) - surplus)
            start = 0 if self.config.truncation_mode == "keep_start" else len(context) - remaining
            context = context[start : start + remaining]
            rendered = self._render_whole(decode_cut(self.tokenizer, context, shown), marker)
        return rendered

    def surplus(self, prompt: str) -> int:
        """Tokens by which a rendered prompt is longer than it may be, before it is truncated."""
        shown = prompt.strip()
        return max(0, len(self._render_whole(shown, turn_marker(shown)).ids) - self.config.max_prompt_tokens)

    def _render_whole(self, prompt: str, marker: re.Pattern[str]) -> RenderedPrompt:
        messages = self._messages(prompt, marker)
        if self.chat is None:
            text = self.template.render(prompt=self.marks.prompt.cut(prompt) if self.cuts_prompts else prompt)
            return RenderedPrompt(text, encode_beginning(self.tokenizer, text))
        try:
            text = self.chat.render(messages, add_generation_prompt=True)
        except ChatTemplateError as error:
            remedy = (
                "" if self.config.system is None else "; if it has no system turn, leave out policy.system"
            )
            raise PolicyError(f"{error}{remedy}.") from None
        return RenderedPrompt(text, encode_text(self.tokenizer, text), messages)

    def _messages(self, prompt: str, marker: re.Pattern[str]) -> list[Message]:
        """The turns before the answer; none without a chat template."""
        if self.chat is None:
            return []
        alone = [Turn(role="user", content=self.template.render(prompt=prompt).strip())]
        turns = dialogue_turns(prompt, marker) if self.config.chat == "turns" else alone
        messages: list[Message] = [{**turn} for turn in turns]
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, see `render`."""
        return self.render(prompt).ids

    def encode_texts(self, prompt: str, *completions: str) -> TokenRow:
        """Token ids of a prompt, and of its completions with their end, as of the joined texts.

        Without a chat template the joined text is the prompt in its template, followed by the
        completion as it is, and the end is EOS. Its leading white space stays: a continuation begins
        with its space, and an answer without one follows the template's last character, such as the
        colon of '### Response:', as in Alpaca's training. Where a template ends with the prompt, the
        white space at the prompt's end precedes the completion. The ids of the prompt are those that
        completions are generated from; those of the completion are as of `encode_continuation`.

        With a chat template the completion is the assistant's turn, white space around it is removed,
        and it ends as the template ends a turn, see `ChatTemplate.encode_answers`.

        White space at the end of a completion is always removed. Sampled completions need no text:
        their own ids are trained on.
        """
        rendered = self.render(prompt)
        if self.chat is not None:
            answers = [completion.strip() for completion in completions]
            return self.chat.encode_answers(rendered.messages, rendered.text, rendered.ids, answers)
        before = "" if self.template.pieces[-1] else trailing_space(prompt)
        texts = [before + text if text else text for text in map(str.rstrip, completions)]
        ends = [cast("int", self.tokenizer.eos_token_id)]
        cut = self.marks.answer.cut
        encoded = [encode_continuation(self.tokenizer, rendered.text, cut(text)) + ends for text in texts]
        return rendered.ids, *encoded

    def hides(self, prompt: str, *completions: str) -> bool:
        """Whether the chat template leaves a part of a completion out, which training then does not read.

        The prompt is not truncated.
        """
        if self.chat is None:
            return False
        hiding = self._hiding_texts
        suspects = [
            text.strip()
            for text in completions
            if hiding is None or any(all(part in text for part in group) for group in hiding)
        ]
        return bool(suspects) and self.chat.hides(self.messages(prompt), *suspects)

    def samples_otherwise(self, prompt: str, completion: str) -> bool:
        """Whether a completion is trained on after another text than completions are sampled after."""
        if self.chat is None or self._trains_prompt:
            return False
        return not self.chat.trains_prompt(self.messages(prompt), completion.strip())

    @cached_property
    def _trains_prompt(self) -> bool:
        return self.chat is None or self.chat.trains_prompt(self.messages("question"))

    @cached_property
    def _hiding_texts(self) -> tuple[tuple[str, ...], ...] | None:
        return () if self.chat is None else self.chat.hiding_texts(self.messages("question"))

    def messages(self, prompt: str) -> list[Message]:
        """The turns before the answer, without truncation; none without a chat template."""
        shown = prompt.strip()
        return self._messages(shown, turn_marker(shown))


class Policy(PolicyTexts):
    """A language model that answers prompts.

    A completion ends with EOS, with the token that ends a turn of the chat template, or with a token
    that the backbone's generation settings (generation_config.json) name as an end. Nothing else is
    taken from these settings. With others, such as a repetition penalty, completions would follow another
    distribution than the one whose log-probabilities are trained and measured.
    """

    def __init__(self, config: PolicyConfig, device: str, adapter: Path | None = None) -> None:
        """Load the backbone, and a PEFT folder unless it is None."""
        from transformers import GenerationConfig

        generation_config: Any = GenerationConfig
        super().__init__(config)
        self.device = device
        backbone = load_backbone(config.backbone, device)
        end_of_turn = None if self.chat is None else self.chat.end_of_turn()
        stop_ids = find_stop_ids(backbone.generation_config, self.tokenizer, end_of_turn)
        backbone.generation_config = generation_config(eos_token_id=stop_ids)
        self.model: PreTrainedModel | PeftModel = backbone
        if adapter is not None:
            from peft import PeftModel

            check_recorded_layers(read_options(adapter), backbone.config.num_hidden_layers)
            is_split = config.backbone.device_map is not None
            self.model = PeftModel.from_pretrained(backbone, adapter, low_cpu_mem_usage=is_split).eval()
            if is_split:  # PEFT puts the adapters of offloaded layers where these are
                allocate_adapters(self.model)
                AdapterSlot(self.model).load(read_adapter(adapter)[0])

    def attach_lora(self, lora: LoraConfig) -> PeftModel:
        """Wrap the backbone with a new LoRA adapter."""
        model = attach_lora(cast("PreTrainedModel", self.model), lora)
        if self.config.backbone.gradient_checkpointing:
            enable_checkpointing(model, self.config.backbone.name)
        self.model = model
        return model

    def generate(
        self,
        prompts: Sequence[str],
        seed: int | Sequence[SampleKey],
        temperature: float = 0.0,
        count: int = 1,
        max_new_tokens: int | None = None,
        progress: GenerationProgress | None = None,
    ) -> list[list[Completion]]:
        """Generate `count` completions for each prompt; see `generate_completions`.

        Temperature 0 is greedy search, of which there is one completion per prompt. max_new_tokens is the
        recipe's if it is None.
        """
        if count > 1 and temperature == 0:
            raise PolicyError(
                f"{count} greedy completions of a prompt would be the same: use a temperature above 0"
            )
        settings = GenerationSettings(
            batch_size=self.config.generation_batch_size,
            max_new_tokens=max_new_tokens or self.config.max_new_tokens,
            temperature=temperature,
            count=count,
        )
        encoded = [self.encode(prompt) for prompt in prompts]
        return generate_completions(self.model, self.tokenizer, encoded, settings, seed, progress)

    def write(
        self,
        prompts: Sequence[str],
        seed: int | Sequence[SampleKey] = 0,
        temperature: float = 0.0,
        progress: GenerationProgress | None = None,
    ) -> list[Reply]:
        """Write a text for each prompt, see `generate`; `ChatEndpoint.write` does it by an endpoint."""
        replies = []
        for (completion,) in self.generate(prompts, seed, temperature, progress=progress):
            ids = list(completion.ids[:-1] if completion.finished else completion.ids)
            replies.append(
                Reply(decode_completion(self.tokenizer, ids, completion.finished), completion.finished)
            )
        return replies


class ClientPolicySet:
    """Policies of several clients on one backbone, whose slot holds the selected client's adapter."""

    def __init__(self, config: PolicyConfig, device: str, folder: Path) -> None:
        """Load the backbone and the adapters of a folder that `save_client_adapters` wrote."""
        adapters = {name: read_adapter(path) for name, path in client_adapter_folders(folder).items()}
        configurations = [lora for _, lora in adapters.values()]
        if any(lora != configurations[0] for lora in configurations):
            raise PolicyError(
                f"the adapters in {folder} do not have the same LoRA configuration: they cannot share a slot"
            )
        self.clients = sorted(adapters)
        self.policy = Policy(config, device)
        model = self.policy.attach_lora(configurations[0])
        model.eval()
        self._slot = AdapterSlot(model)
        self._adapters = {name: tensors for name, (tensors, _) in adapters.items()}

    def select(self, client: str) -> Policy:
        """Load the adapter of a client; the policy is the client's until another one is selected."""
        if client not in self.clients:
            names = ", ".join(self.clients[:5]) + (", ..." if len(self.clients) > 5 else "")
            raise PolicyError(
                f"client_id '{client}' has no policy here (there are {len(self.clients)}: {names})"
            )
        self._slot.load(self._adapters[client])
        return self.policy

    def generate(self, prompts: Sequence[str], clients: Sequence[str], seed: int) -> list[list[Completion]]:
        """Greedy answers, each by the policy of the prompt's client."""
        result: list[list[Completion]] = [[] for _ in prompts]
        for name in sorted(set(clients)):
            rows = [n for n, client in enumerate(clients) if client == name]
            answers = self.select(name).generate([prompts[n] for n in rows], seed)
            for n, answer in zip(rows, answers, strict=True):
                result[n] = answer
        return result


def has_client_adapters(folder: Path | None) -> bool:
    """Whether a folder contains the adapters of several clients rather than one PEFT adapter."""
    return folder is not None and (folder / CLIENTS_FILE).is_file()


def save_client_adapters(adapters: Mapping[str, Adapter], config: PolicyConfig, folder: Path) -> Path:
    """Write a PEFT folder for each client, and the file that maps clients to folders."""
    folder_names = {name: file_name(name) for name in sorted(adapters)}
    for name, folder_name in folder_names.items():
        target = folder / folder_name
        export_adapter(adapters[name], config.lora, config.backbone, target, config.template)
    write_atomically(folder / CLIENTS_FILE, json.dumps(folder_names, indent=1, ensure_ascii=False).encode())
    return folder


def client_adapter_folders(folder: Path) -> dict[str, Path]:
    """Folder of each client's adapter, in a folder of `save_client_adapters`."""
    folder_names = read_json(folder / CLIENTS_FILE)
    return {name: folder / folder_name for name, folder_name in folder_names.items()}


def assign_round_robin(count: int, clients: Sequence[str]) -> list[str]:
    """The client of each of so many prompts that belong to none: in turn, by their sorted names."""
    names = sorted(clients)
    return [names[n % len(names)] for n in range(count)]
