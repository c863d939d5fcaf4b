"""Small tokenizers with the special tokens and chat templates of well-known families.

The templates of Gemma, Llama 3, Qwen2.5 and Qwen3 are those that TRL has in its package.
"""

from pathlib import Path
from typing import NamedTuple

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from components.config import LoraConfig, PolicyConfig
from components.models.resident import ResidentPolicy
from tests.support.tokenizers import write_backbone


class Family(NamedTuple):
    """A family's chat template and special tokens; the marks are what the template writes besides."""

    template: str
    bos: str | None
    eos: str
    marks: tuple[str, ...]
    end_of_turn: str


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
THINKING_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
"""Prompts end with an empty block of thoughts, which a complete dialogue does not have (Gemma 4)."""
DATED = (
    '  {% if strftime_now is defined %}{% set day = strftime_now( "%d %b %Y" ) %}{% endif %}\n'
    "{{ bos_token }}Today Date: {{ day }}\n"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_QWEN = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")


def packaged(name: str) -> str:
    """A chat template of TRL's package."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def family(name: str) -> Family:
    """A family by its name."""
    bos, end = "<|begin_of_text|>", "<|end_of_text|>"
    families = {
        "llama-3": lambda: Family(packaged("llama3"), bos, end, _LLAMA, "<|eot_id|>"),
        "llama-3.2": lambda: Family(packaged("llama3_2"), bos, end, _LLAMA, "<|eot_id|>"),
        "dated": lambda: Family(DATED, bos, end, _LLAMA, "<|eot_id|>"),
        "gemma": lambda: Family(packaged("gemma"), "<bos>", "<eos>", _GEMMA, "<end_of_turn>"),
        "qwen2-base": lambda: Family(packaged("qwen2_5"), None, "<|endoftext|>", _QWEN, "<|im_end|>"),
        "qwen2": lambda: Family(packaged("qwen2_5"), None, "<|im_end|>", _QWEN, "<|im_end|>"),
        "qwen3": lambda: Family(packaged("qwen3"), None, "<|im_end|>", _QWEN, "<|im_end|>"),
        "thinking-prompt": lambda: Family(THINKING_PROMPT, None, "<|im_end|>", _QWEN, "<|im_end|>"),
        "mistral": lambda: Family(MISTRAL, "<s>", "</s>", (), "</s>"),
    }
    return families[name]()


def build_chat_tokenizer(shape: Family) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and of blank lines that begins texts with BOS if the family has one.

    The marks of thoughts are added tokens that are not special, as in Qwen3's tokenizer.
    """
    tokens = dict.fromkeys(filter(None, (shape.bos, shape.eos, *shape.marks)))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*tokens, *letters, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+"), "isolated")
    letters_of_line = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, letters_of_line])
    tokenizer.decoder = decoders.ByteLevel()
    for token in tokens:
        is_special = token not in ("<think>", "</think>")
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    if shape.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{shape.bos} $A", special_tokens=[(shape.bos, vocabulary[shape.bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=shape.bos,
        eos_token=shape.eos,
        pad_token=shape.eos,
        chat_template=shape.template or None,
    )


def write_chat_policy(name: str, folder: Path, **settings: object) -> PolicyConfig:
    """Save a tiny model with a family's chat template, and describe a policy on it."""
    return PolicyConfig(
        backbone=write_backbone(build_chat_tokenizer(family(name)), folder),
        lora=LoraConfig(r=2, dropout=0.0, target_modules=["c_attn"]),
        template="thoughts/policy",
        max_prompt_tokens=400,
        max_new_tokens=100,
        **settings,
    )


def open_chat_policy(name: str, folder: Path, **settings: object) -> ResidentPolicy:
    """A policy on a tiny model with a family's chat template."""
    return ResidentPolicy(write_chat_policy(name, folder, **settings), "cpu")
