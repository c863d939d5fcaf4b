"""Conversational preference data as TRL reads them: lists of messages in place of texts.

A message is an object with a `role` (system, user or assistant) and its `content`, which is text. Lists may
be JSON texts, as tables write them that have no lists: a whole column is one of messages, or it is text. The
prompt may be a list of messages, a text, which stands for one message of the user, or absent. Then it is what
both completions begin with. Where a completion repeats the prompt, as in data sets that give whole
conversations, the repetition is left out. What remains must be one message of the assistant. Reasoning beside
the content is refused, since it would be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import Annotated, Any

from pydantic import model_validator

from components.data.dialogues import dialogue_turns
from components.data.raw import JSON, SPEAKERS, NeededText, RawRow, describe, if_null, messages_in
from components.data.records import TEXTS, DataError

MARKERS = {"user": "Human", "assistant": "Assistant"}
ROLES = ("system", *MARKERS)
TOOLS = ("tool", "function", "ipython", "observation")
"""Roles of what tools answer, as chat templates name them."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thought before its content, as chat templates and servers name them."""
COLUMN_SHARE = 0.9
"""Share of a column's values that must be messages where the column is one of messages."""
PROMPTS = frozenset({"question", "instruction", "input", "query"})
"""Names that columns of prompts have in other data sets."""
NEARLY = 0.82
"""Likeness of a column's name to 'prompt', such as 'promt' and 'prompts' have, and 'prompt_id' has not."""
OR_TEXT = "where the column is text, set data.messages to 'text'"
Row = Mapping[str, Any]
Message = tuple[str, str]
"""Its role, and its content without white space around it."""


ConversationText = Annotated[NeededText, if_null("")]
"""Text of a row whose messages have been read."""


class ConversationRow(RawRow):
    """A prompt with two completions: texts, or lists of messages, which are read as texts."""

    prompt: ConversationText
    chosen: ConversationText
    rejected: ConversationText

    @model_validator(mode="before")
    @classmethod
    def _read_messages(cls, row: Any) -> Any:
        if not any(isinstance(row.get(column), list) for column in TEXTS):
            return row
        if not {"chosen", "rejected"} <= set(row):
            return {"prompt": "", **row}  # the missing column is reported
        texts = as_texts(*(row.get(column) for column in TEXTS))
        return {**row, **dict(zip(TEXTS, texts, strict=True))}


@dataclass(frozen=True)
class MessageColumns:
    """Which columns of a table hold messages as JSON text, whether it has prompts, and what was read."""

    where: str  # the table, for messages
    names: Mapping[str, str]  # its columns, by TEXTS
    columns: frozenset[str]  # those of messages; the others are text, whatever it looks like
    has_prompt: bool  # whether there is a column of prompts, or one that may be meant
    unread: tuple[str, ...] = ()  # sentences on columns that are text, although messages are in them

    def lists(self, row: Row, where: str) -> Row:
        """A row with lists in place of messages as JSON text; the row itself where there are none.

        Raises:
            DataError: a column of messages holds them in another notation.
        """
        found: dict[str, list[Any]] = {}
        for column in sorted(self.columns):
            value = row.get(column)
            try:
                messages = messages_in(value) if isinstance(value, str) else None
            except ValueError as error:
                raise DataError(f"{where}: column '{column}' {error}; {OR_TEXT}") from None
            if messages is not None:
                found[column] = messages
        prompt = self.names["prompt"]
        if found and str(row.get(prompt)).strip() == "[]":
            found[prompt] = []
        return {**row, **found} if found else row

    def warnings(self, rows: Sequence[tuple[Row, Row]]) -> list[str]:
        """Sentences on what was read as messages.

        Args:
            rows: those that were read, as they are and as `lists` gives them.
        """
        of_json = sum(read is not raw for raw, read in rows)
        of_system = sum(_has_system(read, self.names) for _, read in rows)
        of_common = sum(_has_common_prompt(read, self.names) for _, read in rows)
        total = f"of {len(rows):,} rows"
        sentences = [*self.unread]
        if of_json:
            sentences.append(
                f"{self.where}: in {of_json:,} {total} messages as JSON text were read as messages (columns"
                f" {', '.join(sorted(self.columns))}; data.messages 'text' reads them as text)."
            )
        if of_common:
            sentences.append(
                f"{self.where}: the prompt of {of_common:,} pairs is the common beginning of chosen and"
                " rejected, since they have none of their own."
            )
        if of_system:
            sentences.append(
                f"{self.where}: in {of_system:,} {total} the message of the system was put before the user's"
                " first one, as a part of its text, and is no turn of the system in a chat template: where it"
                " is one text, leave it out of the rows and set policy.system."
            )
        return sentences


def message_columns(
    rows: Sequence[Row], where: str, mode: str, renamed: Mapping[str, str] | None = None
) -> MessageColumns:
    """Decide for each column of texts of a table whether it holds messages as JSON text.

    A column does if COLUMN_SHARE of its values are messages, as lists or as text. A single object of
    role and content may be an answer that is asked for, so it counts only beside a column of lists.

    Args:
        rows: of the table.
        where: it is, for messages.
        mode: data.messages.
        renamed: the names of columns, by TEXTS, where they are other ones.

    Raises:
        DataError: one completion is messages as text, or the prompt, and another column is text.
    """
    names = {name: (renamed or {}).get(name, name) for name in TEXTS}
    existing = {str(column).casefold() for column in set[str]().union(*rows)}
    has_prompt = names["prompt"] != "prompt" or any(map(_may_be_prompt, existing))
    if mode != "auto":
        read = frozenset(names.values() if mode == "messages" else ())
        return MessageColumns(where, names, read, has_prompt)
    forms = {column: Counter(_form(row.get(column)) for row in rows) for column in names.values()}
    for own in forms.values():
        del own["blank"]
    kinds = ("list", "text", "object", "notation")
    alike = {column: sum(own[kind] for kind in kinds) for column, own in forms.items()}
    columns = {column for column, own in forms.items() if alike[column] >= max(1, _least(own))}
    lists = {column: alike[column] - own["object"] for column, own in forms.items()}
    if not any(lists[column] >= _least(forms[column]) for column in columns):
        columns = set()
    of_json = [column for column in forms if column in columns and forms[column]["list"] < alike[column]]
    completions = [names["chosen"], names["rejected"]]
    others = [column for column in completions if forms[column] and column not in columns]
    if of_json and others and len(rows) > 1:
        raise DataError(
            f"{where}: column '{of_json[0]}' holds messages as text in {alike[of_json[0]]:,} of"
            f" {len(rows):,} rows, but column '{others[0]}' does not: write both completions as messages, or"
            " set data.messages to 'text', by which all columns are read as text"
        )
    if not of_json or others:
        columns = set()
    unread = []
    for column, own in forms.items():
        is_whole = own.total() > 1 and alike[column] >= _least(own)
        count = own["text"] + (own["object"] if is_whole else 0)
        if count and column not in columns:
            unread.append(
                f"{where}: column '{column}' is read as text, although {count:,} of its {own.total():,}"
                " values are messages as JSON text (data.messages 'messages' reads them as messages)."
            )
    return MessageColumns(where, names, frozenset(columns), has_prompt, tuple(unread))


def _may_be_prompt(column: str) -> bool:
    is_named = "prompt" in column and not column.endswith("id")
    return column in PROMPTS or is_named or bool(get_close_matches("prompt", [column], cutoff=NEARLY))


def _least(forms: Counter[str]) -> float:
    return COLUMN_SHARE * forms.total()


def _form(value: Any) -> str:
    """A value's form: a list, a text of messages, of one message or in another notation, or another one."""
    if isinstance(value, list):
        return "list"
    text = value.removeprefix("\ufeff").strip() if isinstance(value, str) else ""
    if text in ("", "[]"):
        return "blank"
    try:
        messages = messages_in(text)
    except ValueError:
        return "notation"
    if messages is None:
        return "other"
    return "object" if messages == [JSON.raw_decode(text)[0]] else "text"


def _has_common_prompt(row: Row, names: Mapping[str, str]) -> bool:
    """Whether the prompt of a row that was read is what its completions begin with."""
    is_list = isinstance(row.get(names["chosen"]), list)
    return names["prompt"] not in row or (is_list and row[names["prompt"]] in (None, "", []))


def _has_system(row: Row, names: Mapping[str, str]) -> bool:
    """Whether a conversation begins with a message of the system that is not empty."""
    for column in (names["prompt"], names["chosen"]):
        value = row.get(column)
        if isinstance(value, list) and value:
            first = value[0]
            return isinstance(first, Mapping) and first.get("role") == "system" and bool(first.get("content"))
    return False


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
                f"column '{column}' is {describe(value)}, but another column is a list of messages: the"
                " prompt and both completions must be texts, or both completions lists of messages"
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
        raise ValueError(
            f"column '{column}' is {describe(value)}, but text or a list of messages is expected"
        )
    return [_message(item, f"column '{column}[{number}]'") for number, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        found = f"is {describe(item)}"
        if isinstance(item, Mapping):
            found = f"has no {' and no '.join(key for key in ('role', 'content') if key not in item)}"
        cure = "" if isinstance(item, Mapping) else ": write one list of messages"
        if isinstance(item, Mapping) and {"from", "value"} <= set(item):
            cure = f": write 'from' as role ({', '.join(ROLES)}), and 'value' as content"
        raise ValueError(f"{where} must be a message, an object with role and content, but {found}{cure}")
    role, content = item["role"], item["content"]
    calls = bool(item.get("tool_calls") or item.get("function_call"))
    if role not in ROLES or calls:
        known = f"has the role {role!r}" if str(role).casefold() in SPEAKERS else "has another role"
        what = "calls a tool" if calls else known
        cure = "leave such conversations out, or write what the tool did as text"
        if not calls and role not in TOOLS:
            cure = "write one of these roles"
        raise ValueError(f"{where} {what}, but only texts of {', '.join(ROLES)} can be trained on: {cure}")
    if not isinstance(content, str):
        parts = ": join its parts to one text" if isinstance(content, list) else ""
        raise ValueError(f"{where}: its content must be text, but is {describe(content)}{parts}")
    reasoning = next((key for key in REASONING if item.get(key)), None)
    if reasoning is not None:
        raise ValueError(
            f"{where} has {reasoning} beside its content, which would not be trained on: write it into the"
            " content as the model is to write it, or remove it"
        )
    return role, content.strip()


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
