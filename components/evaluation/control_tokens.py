"""Control tokens in the texts of owners, such as `<|im_end|>`, which models read as ordinary text.

A model's own texts have them (`Marks.cut`); here they are counted, or refused where a recipe says so. Of a
model behind an endpoint the tokens are not known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from components.config import BackboneConfig, Recipe
from components.data.prepare import DataSet
from components.data.records import TEXTS, UNSEEN, DataError
from components.evaluation.judges.selector_judge import SelectorJudgeSection
from components.models.backbone import EMBEDDED, TINY, BackboneError, read_tokenizer
from components.models.chat_template import ChatTemplate, find_marks
from components.models.generation import find_stop_ids, read_generation_settings
from components.models.tokens import TextMarks

COLUMNS = {"pairs": TEXTS, "judge": TEXTS, "prompts": ("prompt",), UNSEEN: TEXTS}
"""The texts of the tables of a data set, beside the references of the prompts."""
SHOWN = 5
"""Tokens that a sentence names."""
MARK = r"(?:<[^<>\s/]{0,30}[|\uff5c_][^<>\s/]{0,30}>)"
OPENED_ANSWER = re.compile(
    rf"(?:{MARK}\s*(?:assistant|model)\s*{MARK}?"
    r"|<[|\uff5c]+(?:assistant|bot|gpt|model)[|\uff5c]+>|\[/INST\])\s*$",
    re.IGNORECASE,
)
"""The end of a prompt that a chat template has rendered: it names who answers, in marks, as templates do."""
GIVE_TURNS = "give these rows as messages or as plain texts, or set policy.chat to 'none'"


@dataclass(frozen=True)
class Reader:
    """A model that reads texts of the data.

    Attributes:
        key: of its section in the recipe.
        marks: its control tokens.
        joins: whether it reads a prompt and its answer as one text.
        turn: what its chat template writes between a prompt and the answer; empty without one.
    """

    key: str
    marks: TextMarks
    joins: bool = False
    turn: str = ""

    def find(self, prompt: str, answers: Sequence[str]) -> set[str]:
        """The control tokens in a prompt and in answers to it."""
        texts = [(self.marks.prompt, prompt), *((self.marks.answer, answer) for answer in answers)]
        if self.joins:
            texts += [(self.marks.answer, prompt[-40:] + answer[:40]) for answer in answers]
        return {name for marks, text in texts for name, _ in marks.find(text)}


def find_readers(recipe: Recipe) -> list[Reader]:
    """The models that read the data of a recipe.

    A model that cannot be read is left out; the check of models, or its load, says what is wrong.
    """
    readers = []
    for key, backbone in reading_models(recipe):
        is_policy = key == "policy"
        arguments = recipe.policy.chat_template_kwargs if is_policy else {}
        try:
            tokenizer = read_tokenizer(backbone)
        except BackboneError:
            continue
        stop_ids: list[int] = []
        with suppress(OSError, ValueError):
            stop_ids = find_stop_ids(read_generation_settings(backbone), tokenizer) if is_policy else []
        marks = find_marks(tokenizer, arguments, stop_ids)
        in_turns = is_policy and recipe.policy.chat != "none" and bool(tokenizer.chat_template)
        turn = ChatTemplate(tokenizer, arguments, "0001-01-01").rendered_turn() if in_turns else ""
        readers.append(Reader(key, marks, is_policy and not in_turns, turn))
    return readers


def with_control_tokens(recipe: Recipe, data_set: DataSet) -> DataSet:
    """The data with the number of rows that hold control tokens, and a sentence on them.

    Raises:
        DataError: there are some, and data.control_tokens is 'refuse'; or a chat template has rendered most
            prompts.
    """
    rows = list(_rows(data_set))
    warnings = _rendered_by_others(recipe, rows)
    backbones = {backbone.name for _, backbone in reading_models(recipe)}
    if backbones <= {EMBEDDED, TINY} and not any("<" in text for row in rows for text in row):
        return replace(data_set, warnings=(*data_set.warnings, *warnings))  # their tokens begin so
    readers = find_readers(recipe)
    _refuse_rendered(rows, readers)
    held: Counter[tuple[str, str]] = Counter()
    first = ""
    count = 0
    for (prompt, *answers), row_id in zip(rows, _row_ids(data_set), strict=True):
        found = {(name, reader.key) for reader in readers for name in reader.find(prompt, answers)}
        held.update(found)
        count += bool(found)
        first = first or (row_id if found else "")
    if count:
        most = sorted(held.items(), key=lambda entry: (-entry[1], entry[0]))[:SHOWN]
        named = [f"{name!r} of {key} in {number:,}" for (name, key), number in most]
        more = f", and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
        sentence = (
            f"{count:,} of {len(rows):,} pairs and prompts hold control tokens, with which a model's sequence"
            f" is built ({', '.join(named)}{more})"
        )
        if recipe.data.control_tokens == "refuse":
            raise DataError(
                f"{sentence} (first in {first}): remove them, or set data.control_tokens to 'text', so that"
                " models read them as ordinary text."
            )
        warnings.append(f"{sentence}; models read them as ordinary text (data.control_tokens 'text').")
    return replace(data_set, warnings=(*data_set.warnings, *warnings), control_tokens=count)


def _refuse_rendered(rows: Sequence[Sequence[str]], readers: Sequence[Reader]) -> None:
    turn = next((reader.turn for reader in readers if reader.turn), None)
    rendered = sum(turn in prompt for prompt, *_ in rows) if turn else 0
    if 2 * rendered > len(rows):
        raise DataError(
            f"{rendered:,} of {len(rows):,} pairs and prompts were rendered by the policy's chat template,"
            f" which is applied again: {GIVE_TURNS}."
        )


def _rendered_by_others(recipe: Recipe, rows: Sequence[Sequence[str]]) -> list[str]:
    """A sentence on prompts that look as if a chat template has rendered them, where most do."""
    rendered = sum(OPENED_ANSWER.search(prompt) is not None for prompt, *_ in rows)
    if recipe.policy.chat == "none" or 2 * rendered <= len(rows):
        return []
    return [
        f"{rendered:,} of {len(rows):,} pairs and prompts end as those that a model's chat template has"
        " rendered; to this policy, the marks of another model's template are ordinary text:"
        f" {GIVE_TURNS}."
    ]


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


def _row_ids(data_set: DataSet) -> Iterator[str]:
    """The name of each of `_rows`, such as pair 0123456789abcdef."""
    for table, frame in data_set.tables.items():
        kind = "prompt" if table == "prompts" else "pair"
        yield from (f"{kind} {own}" for own in frame[f"{kind}_id"])


def _rows(data_set: DataSet) -> Iterator[list[str]]:
    """The prompt of each row, and the answers to it."""
    for table, frame in data_set.tables.items():
        for row, texts in enumerate(zip(*(frame[column] for column in COLUMNS[table]), strict=True)):
            references = frame["references"].iloc[row] if "references" in frame else ()
            yield [*texts, *references]
