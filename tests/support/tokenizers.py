"""Folders of small tokenizers that split texts as those of well-known families do, and of backbones."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    GemmaTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from components.config import BackboneConfig
from components.models.backbone import load_tokenizer

WORDS = (" A", " B", " the", " film", " was", " great", " lovely", "lovely", "great", "film", "\n\n")
"""Texts that are a token each; all other texts are split into characters or their beginnings."""

WITH_BOS = ("gemma", "llama", "llama-2", "llama-3")
WITHOUT_BOS = ("gpt2",)


def load_family(family: str, folder: Path) -> PreTrainedTokenizerBase:
    """Save a tokenizer of a family into a folder, and load it as the project loads a backbone's."""
    build_tokenizer(family).save_pretrained(folder)
    assert (folder / "tokenizer.json").is_file()
    return load_tokenizer(BackboneConfig(name=str(folder)))


def build_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """A tokenizer of a family."""
    return _BUILDERS[family]()


def write_backbone(tokenizer: PreTrainedTokenizerBase, folder: Path) -> BackboneConfig:
    """Save a small GPT-2 with random weights and a tokenizer of its own."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=512,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return BackboneConfig(name=str(folder))


def _vocabulary(
    special: list[str], letters: list[str], words: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with every beginning of the words, and the merges that make them."""
    merges = []
    for word in words:
        merges += [(word[:n], word[n]) for n in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    tokens = dict.fromkeys([*special, *letters, *("".join(merge) for merge in merges)])
    return {token: n for n, token in enumerate(tokens)}, merges


def _sentencepiece(special: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """As SentencePiece: a space is ▁, and a character that is not in the vocabulary is its bytes."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    letters += ["▁", "\n", *(chr(n) for n in range(33, 127))]
    return _vocabulary(special, letters, [word.replace(" ", "▁") for word in WORDS])


def _gemma() -> PreTrainedTokenizerBase:
    vocabulary, merges = _sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def _llama() -> PreTrainedTokenizerBase:
    vocabulary, merges = _sentencepiece(["<unk>", "<s>", "</s>"])
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def _llama_2() -> PreTrainedTokenizerBase:
    """With a space before every text, as in the tokenizer.json of Llama 2."""
    vocabulary, merges = _sentencepiece(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _byte_level(special: list[str]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in WORDS]
    tokenizer = Tokenizer(models.BPE(*_vocabulary(special, letters, words)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama_3() -> PreTrainedTokenizerBase:
    tokenizer = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    bos = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", 0)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


def _gpt2() -> PreTrainedTokenizerBase:
    tokenizer = _byte_level(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


_BUILDERS = {"gemma": _gemma, "llama": _llama, "llama-2": _llama_2, "llama-3": _llama_3, "gpt2": _gpt2}
