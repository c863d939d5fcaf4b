"""Control tokens in the texts of owners, which the tokenizers of a recipe's models read as tokens.

`<|im_end|>` in a prompt ends the user's turn, and what follows may open one of the system; an answer
that holds it is trained to end there. data.control_tokens says what happens to such texts before any model
reads them, so that a prompt or an answer is safe wherever it is put into a template, also by a model behind
an endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING

from components.config import BackboneConfig, Recipe
from components.data.prepare import DataSet
from components.data.records import TEXTS, UNSEEN, DataError
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.models.backbone import EMBEDDED, TINY, BackboneError, read_tokenizer
from components.models.chat_template import ChatTemplate
from components.models.generation import find_stop_ids, read_generation_settings
from components.models.tokens import control_tokens

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {"pairs": TEXTS, "judge": TEXTS, "prompts": ("prompt",), UNSEEN: TEXTS}
"""The texts of the tables of a data set, beside the references of the prompts."""
IDS = {"pairs": "pair_id", "judge": "pair_id", "prompts": "prompt_id", UNSEEN: "pair_id"}


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a recipe's models.

    Attributes:
        models: of each token, the key of a model that reads it so.
        turn: the text between a prompt and its answer in the policy's chat template; empty without one.
    """

    models: Mapping[str, str]
    turn: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a control token, the longest one of those that begin at a place."""
        return re.compile("|".join(map(re.escape, sorted(self.models, key=len, reverse=True))) or r"(?!)")

    def escape(self, text: str) -> str:
        """A text with a space after the first letter of each control token, e.g. `< |im_end|>`.

        A token of one letter is left out.
        """
        while self.pattern.search(text):
            text = self.pattern.sub(lambda match: _split(match[0]), text)
        return text


def _split(token: str) -> str:
    letters = token.strip()
    return f"{letters[0]} {letters[1:]}" if len(letters) > 1 else ""


def find_control_tokens(recipe: Recipe) -> ControlTokens:
    """The control tokens of the models that read the data of a recipe.

    A model that cannot be read has none here; the check of models, or its load, says what is wrong.
    """
    models: dict[str, str] = {}
    turn = ""
    for key, backbone in reading_models(recipe):
        try:
            tokenizer = read_tokenizer(backbone)
        except BackboneError:
            continue
        stop_ids: list[int] = []
        with suppress(OSError, ValueError):  # it cannot be loaded, as its load says
            stop_ids = find_stop_ids(read_generation_settings(backbone), tokenizer)
        tokens = control_tokens(tokenizer, stop_ids)
        if tokenizer.chat_template:
            arguments = recipe.policy.chat_template_kwargs if key == "policy" else {}
            chat = ChatTemplate(tokenizer, arguments, date.min.isoformat())
            tokens |= chat.written_tokens()
            if key == "policy" and recipe.policy.chat != "none":
                turn = chat.rendered_turn()
        for token in sorted(tokens):
            models.setdefault(token, key)
    return ControlTokens(models, turn)


def with_control_tokens(recipe: Recipe, data_set: DataSet) -> DataSet:
    """The data with their control tokens refused, escaped or kept, as data.control_tokens says.

    Raises:
        DataError: there are some, and they are to be refused.
    """
    backbones = {backbone.name for _, backbone in reading_models(recipe)}
    if backbones <= {EMBEDDED, TINY} and not any(_found(data_set, re.compile("<"))):
        return data_set  # their tokens begin so, and importing transformers takes seconds
    tokens = find_control_tokens(recipe)
    found = list(_found(data_set, tokens.pattern))
    if not found:
        return data_set
    mode = recipe.data.control_tokens
    sentence = _describe(found, tokens, data_set)
    if mode == "refuse":
        raise DataError(
            f"{sentence}: remove them (give rows that a chat template was applied to as messages), or set"
            " data.control_tokens to 'escape', which writes them as ordinary text, or to 'keep'."
        )
    if mode == "escape":
        data_set = replace(data_set, tables=_mapped(data_set, tokens.escape))
    done = "they are written as ordinary text" if mode == "escape" else "models read them as tokens"
    return replace(
        data_set,
        warnings=(*data_set.warnings, f"{sentence}; {done} (data.control_tokens '{mode}')."),
        control_tokens=len(found),
    )


def reading_models(recipe: Recipe) -> Iterator[tuple[str, BackboneConfig]]:
    """The models whose tokenizers read texts of the data, with the keys of their sections."""
    yield "policy", recipe.policy.backbone
    if recipe.federation.options.trained_model == "selector":
        yield "selector", recipe.selector.backbone
    judge = recipe.evaluation.judge
    if isinstance(judge, SelectorJudgeSection):
        yield "evaluation.judge.selector", judge.selector.backbone
    models = [("evaluation.judge", judge.frozen_models())]
    models += [(f"rewards.{name}", reward.frozen_models(name)) for name, reward in recipe.rewards.items()]
    for key, frozen in models:
        for model in frozen:
            yield key, model.backbone


def _rows(data_set: DataSet) -> Iterator[tuple[str, int, list[str]]]:
    """The table, the number and the texts of each row."""
    for table, frame in data_set.tables.items():
        columns = COLUMNS[table]
        for row, texts in enumerate(zip(*(frame[column] for column in columns), strict=True)):
            references = frame["references"].iloc[row] if "references" in frame else ()
            yield table, row, [*texts, *references]


def _found(data_set: DataSet, pattern: re.Pattern[str]) -> Iterator[tuple[str, int, str]]:
    """The table, the number and the first match of each row in which a pattern is found."""
    for table, row, texts in _rows(data_set):
        match = next(filter(None, map(pattern.search, texts)), None)
        if match:
            yield table, row, match[0]


def _mapped(data_set: DataSet, change: Callable[[str], str]) -> dict[str, pd.DataFrame]:
    """The tables with other texts; their ids, splits and owners stay."""
    tables = {
        table: frame.assign(**{column: frame[column].map(change) for column in COLUMNS[table]})
        for table, frame in data_set.tables.items()
    }
    prompts = tables["prompts"]
    references = prompts["references"].map(lambda texts: list(map(change, texts)))
    return {**tables, "prompts": prompts.assign(references=references.astype(object))}


def _describe(found: Sequence[tuple[str, int, str]], tokens: ControlTokens, data_set: DataSet) -> str:
    table, row, token = found[0]
    total = sum(map(len, data_set.tables.values()))
    example = data_set.tables[table][IDS[table]].iloc[row]
    rendered = sum(any(tokens.turn in text for text in texts) for *_, texts in _rows(data_set))
    sentence = (
        f"{len(found):,} of {total:,} pairs and prompts hold control tokens, which begin or end a turn or a"
        f" text (such as {token!r} of {tokens.models[token]} in {IDS[table].partition('_')[0]} {example})"
    )
    if tokens.turn and rendered:
        sentence += f", and {rendered:,} of them were rendered by a chat template, which is applied again"
    return sentence
