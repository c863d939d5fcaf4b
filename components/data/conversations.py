"""Conversational preference data as TRL reads them: lists of messages in place of texts.

A message is an object with a `role` (system, user or assistant) and its `content`, which is text. Lists may
be JSON texts, as tables write them that have no lists. The prompt may be a list of messages, a text, which
stands for one message of the user, or absent. Then it is what both completions begin with. Where a
completion repeats the prompt, as in data sets that give whole conversations, the repetition is left out. What
remains must be one message of the assistant. Reasoning beside the content is refused, since it would be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Annotated, Any, TypeVar

from pydantic import model_validator

from components.data.dialogues import dialogue_turns
from components.data.raw import AnyText, RawRow, column_names, if_null, messages_in
from components.data.records import TEXTS, DataError

MARKERS = {"user": "Human", "assistant": "Assistant"}
ROLES = ("system", *MARKERS)
TOOLS = ("tool", "function", "ipython", "observation")
"""Roles of what tools answer, as chat templates name them."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thought before its content, as chat templates and servers name them."""
Row = TypeVar("Row", bound=Mapping[str, Any])
NOTED = "rows whose messages are JSON text"
ALONE = "rows of which one completion alone is messages as text"
NO_COLUMNS: Mapping[str, str] = {}
Message = tuple[str, str]
"""Its role, and its content without white space around it."""


ConversationText = Annotated[AnyText, if_null("")]
"""Text of a row whose messages have been read."""


class ConversationRow(RawRow):
    """A prompt with two completions: texts, or lists of messages, which are read as texts."""

    prompt: ConversationText
    chosen: ConversationText
    rejected: ConversationText

    @model_validator(mode="before")
    @classmethod
    def _read_messages(cls, row: Any) -> Any:
        row = {**row, **messages_as_text(row, dict(zip(TEXTS, TEXTS, strict=True)))[0]}
        if not any(isinstance(row.get(column), list) for column in TEXTS):
            return row
        if not {"chosen", "rejected"} <= set(row):
            return {"prompt": "", **row}  # the missing column is reported
        texts = as_texts(*(row.get(column) for column in TEXTS))
        return {**row, **dict(zip(TEXTS, texts, strict=True))}


def messages_as_text(
    row: Mapping[str, Any], columns: Mapping[str, str]
) -> tuple[dict[str, list[Any]], str | None]:
    """The messages of the columns that hold them as JSON text, and the completion that alone does.

    Of the completions, both are messages or none is: a single one may be an answer that is JSON, which stays
    a text.

    Args:
        row: values by column.
        columns: the row's columns, by TEXTS.

    Raises:
        ValueError: a column holds messages in another notation, as a sentence.
    """
    found: dict[str, list[Any]] = {}
    refused: dict[str, str] = {}
    for column in columns.values():
        value = row.get(column)
        try:
            messages = messages_in(value) if isinstance(value, str) else None
        except ValueError as error:
            refused[column] = f"column '{column}' {error}"
            continue
        if messages is not None:
            found[column] = messages
    answers = [columns["chosen"], columns["rejected"]]
    told = [column for column in answers if column in {*found, *refused} or isinstance(row.get(column), list)]
    alone = told[0] if len(told) == 1 and isinstance(row.get(told[0]), str) else None
    if alone is not None:
        found.pop(alone, None)
        refused.pop(alone, None)
    if refused:
        raise ValueError(next(iter(refused.values())))
    if len(told) == 2 and str(row.get(columns["prompt"])).strip() == "[]":
        found[columns["prompt"]] = []
    return found, alone


def noted(
    rows: Iterable[Row], counts: Counter[str], where: str, columns: Mapping[str, str] = NO_COLUMNS
) -> Iterator[Row]:
    """The rows; those whose messages are JSON texts are counted as NOTED, or as ALONE.

    Args:
        rows: values by column.
        counts: are added to.
        where: the rows are, for messages.
        columns: renames TEXTS.

    Raises:
        DataError: after the last row, where a completion is messages in each row, and the other one is not.
    """
    names = {name: columns.get(name, name) for name in TEXTS}
    alone: Counter[str | None] = Counter()
    for row in rows:
        column = None
        with suppress(ValueError):  # the row is refused
            found, column = messages_as_text(row, names)
            counts[NOTED] += bool(found)
        alone[column] += 1
        yield row
    total = alone.total()
    counts[ALONE] += total - alone[None]
    for column in (names["chosen"], names["rejected"]):
        if alone[column] == total > 1:
            (other,) = {names["chosen"], names["rejected"]} - {column}
            raise DataError(
                f"{where}: column '{column}' holds messages as text in each of the {total:,} rows, but column"
                f" '{other}' does not: write both as messages, or both as plain text"
            )


def noted_warnings(counts: Mapping[str, int]) -> list[str]:
    """A sentence on each kind of rows that `noted` has counted."""
    done = {NOTED: "they were read as messages", ALONE: "it was read as an answer that is JSON"}
    return [f"{kind}: {counts[kind]:,}; {what}." for kind, what in done.items() if counts[kind]]


def as_texts(prompt: Any, chosen: Any, rejected: Any) -> tuple[str, str, str]:
    """The prompt and the completions of a conversational row, as texts.

    A prompt of several turns is a dialogue with the markers of HH-RLHF, see `dialogues`. The message of
    the system is put before the user's first one, with an empty line between the two.

    Args:
        prompt: messages, text or None.
        chosen: messages.
        rejected: messages.

    Raises:
        ValueError: the row cannot be read so, as a sentence that names the column.
    """
    completions = {"chosen": chosen, "rejected": rejected}
    for column, value in completions.items():
        if value is None:
            raise ValueError(f"column '{column}' is null, but a list of messages is needed")
        if not isinstance(value, list):
            raise ValueError(
                f"column '{column}' is {_kind(value)}, but another column is a list of messages: the prompt"
                " and both completions must be texts, or both completions lists of messages"
            )
    conversations = {column: _messages(value, column) for column, value in completions.items()}
    if prompt is None or prompt in ("", []):
        heads = zip(*(messages[:-1] for messages in conversations.values()), strict=False)
        beginning = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], heads)]
    elif isinstance(prompt, str):
        beginning = [("user", prompt.strip())]
    else:
        beginning = _messages(prompt, "prompt")
    answers = [_answer(messages, beginning, column) for column, messages in conversations.items()]
    # A text is read as in rows of texts, where it may be a dialogue.
    is_text = isinstance(prompt, str) and prompt != ""
    return prompt if is_text else _prompt_text(beginning), answers[0], answers[1]


def _messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"column '{column}' is {_kind(value)}, but text or a list of messages is expected")
    return [_message(item, f"column '{column}[{number}]'") for number, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        found = f"has {column_names(item)[:60]}" if isinstance(item, Mapping) else f"is {_kind(item)}"
        cure = "" if isinstance(item, Mapping) else ": write one list of messages"
        if isinstance(item, Mapping) and {"from", "value"} <= set(item):
            cure = f": write 'from' as role ({', '.join(ROLES)}), and 'value' as content"
        raise ValueError(f"{where} must be a message, an object with role and content, but {found}{cure}")
    role, content = item["role"], item["content"]
    calls = bool(item.get("tool_calls") or item.get("function_call"))
    if role not in ROLES or calls:
        what = "calls a tool" if calls else f"has the role {str(role)[:40]!r}"
        cure = "leave such conversations out, or write what the tool did as text"
        if not calls and role not in TOOLS:
            cure = "write one of these roles"
        raise ValueError(f"{where} {what}, but only texts of {', '.join(ROLES)} can be trained on: {cure}")
    if not isinstance(content, str):
        parts = ": join its parts to one text" if isinstance(content, list) else ""
        raise ValueError(f"{where}: its content must be text, but is {_kind(content)}{parts}")
    reasoning = next((key for key in REASONING if item.get(key)), None)
    if reasoning is not None:
        raise ValueError(
            f"{where} has {reasoning} beside its content, which would not be trained on: write it into the"
            " content as the model is to write it, or remove it"
        )
    return role, content.strip()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), f"{str(value)[:40]!r} ({type(value).__name__})")


def _answer(messages: Sequence[Message], beginning: Sequence[Message], column: str) -> str:
    """The answer that follows the beginning, which may be repeated before it."""
    repeats = list(messages[: len(beginning)]) == list(beginning)
    rest = messages[len(beginning) :] if repeats else messages
    if len(rest) == 1 and rest[0][0] == "assistant":
        return rest[0][1]
    roles = ", ".join(role for role, _ in rest) or "none"
    raise ValueError(
        f"column '{column}' must be one message of the assistant, before which the prompt may be repeated,"
        f" but beside the prompt it has: {roles}"
    )


def _prompt_text(messages: Sequence[Message]) -> str:
    turns = list(messages)
    if turns and turns[0][0] == "system":
        system = turns.pop(0)[1]
        if turns and system:
            turns[0] = (turns[0][0], f"{system}\n\n{turns[0][1]}")
    roles = [role for role, _ in turns]
    if len(roles) % 2 == 0 or roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
        found = ", ".join(role for role, _ in messages) or "none"
        raise ValueError(
            "in the prompt, messages of user and assistant must alternate, the last of them the user's, after"
            f" at most one of the system, but its roles are: {found}"
        )
    text = turns[0][1]
    if len(turns) > 1:
        text = "\n\n".join(f"{MARKERS[role]}: {content}" for role, content in turns)
    if [(turn["role"], turn["content"]) for turn in dialogue_turns(text)] != turns:
        raise ValueError(
            "the turns of the prompt cannot be told apart as a dialogue, since a message is empty, or"
            " 'Human:' or 'Assistant:' begins a paragraph of one: write it otherwise, or leave the row out"
        )
    return text
