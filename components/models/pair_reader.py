"""How training reads pairs: the token ids of their completions after truncation, without a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.config import PolicyConfig, Section, SelectorConfig
from components.data.records import PairRow
from components.data.templates import load as load_template
from components.models.backbone import load_tokenizer
from components.models.policy import PolicyTexts
from components.models.selector import Comparison, encode_comparison


@dataclass(frozen=True)
class PairReader:
    """How the training of a model reads a pair."""

    model: str  # for messages
    settings: str  # hash of the section of the model
    key: str  # the recipe's key of the length that completions are cut to
    length: int  # the value of the key (tokens)
    # The token ids that stand for chosen and for rejected. If they are equal, training learns nothing
    # from the pair.
    read: Callable[[PairRow], tuple[Sequence[int], Sequence[int]]]


def settings_hash(section: Section) -> str:
    content = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def policy_pair_reader(config: PolicyConfig) -> PairReader:
    """How a policy reads pairs, by any objective; see `PolicyTexts.encode_trained`."""
    texts = PolicyTexts(config)

    def read(pair: PairRow) -> tuple[list[int], list[int]]:
        _, chosen, rejected = texts.encode_trained(pair["prompt"], pair["chosen"], pair["rejected"])
        return chosen, rejected

    return PairReader(
        "the policy", settings_hash(config), "policy.max_new_tokens", config.max_new_tokens, read
    )


def selector_pair_reader(config: SelectorConfig, key: str) -> PairReader:
    """How a selector reads pairs: as its whole input, in both orders of the completions."""
    tokenizer = load_tokenizer(config.backbone)
    template = load_template(config.template, "selector")

    def encode(comparison: Comparison) -> list[int]:
        return encode_comparison(tokenizer, template, comparison, config.max_length, config.max_prompt_tokens)

    def read(pair: PairRow) -> tuple[list[int], list[int]]:
        comparison = Comparison(pair["prompt"], pair["chosen"], pair["rejected"])
        return encode(comparison), encode(comparison.swapped())

    return PairReader(f"the model {key}", settings_hash(config), f"{key}.max_length", config.max_length, read)
