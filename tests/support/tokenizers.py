"""Tokenizer folders as Gemma and Llama have them: <bos> is added by the post-processor of tokenizer.json."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def write_sentencepiece_tokenizer(folder: Path, tokenizer_class: str, adds_bos: bool = True) -> Path:
    """Write a tokenizer over printable characters, in which a space is the letter '▁'.

    Args:
        folder: to write.
        tokenizer_class: as in tokenizer_config.json, e.g. 'GemmaTokenizer'.
        adds_bos: whether encoded texts begin with <bos>.
    """
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, "\n", "▁"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters, "▁A", "▁B"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "A"), ("▁", "B")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A <bos> $B",
            special_tokens=[("<bos>", vocabulary["<bos>"])],
        )
    fast_tokenizer: Any = PreTrainedTokenizerFast
    names = {f"{name[1:-1]}_token": name for name in SPECIAL}
    fast_tokenizer(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": tokenizer_class, "add_bos_token": adds_bos}
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
