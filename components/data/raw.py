"""Raw rows as models: the columns that a source reads, strictly typed.

A row that does not fit is one sentence, with its file, row, column and type, and what is expected. It
quotes no value, since sentences go to logs, reports and MLflow.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from components.config.name_checks import check_name, check_visible, composed
from components.data.records import DataError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

R = TypeVar("R")
T = TypeVar("T")
EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""What a column must be, by the type of pydantic's error."""
TYPES = {
    dict: "an object",
    list: "a list",
    tuple: "a list",
    str: "text",
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}
KEY = re.compile(r"['\"](role|content|from|value)\\*['\"]+\s*:")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
SPEAKERS = {*ROLES, "human", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"}
"""Roles of messages in small letters, by which an object is known to be one; not all of them are read."""
SPEAKER = re.compile(
    rf"['\"](?:role|from)\\*['\"]+\s*:\s*\\*['\"](?:{'|'.join(sorted(SPEAKERS))})\\*['\"]", re.IGNORECASE
)
HOLDERS = ("messages", "conversations", "conversation")
"""Keys of an object that holds messages."""
JSON = json.JSONDecoder()
GAP = re.compile(r"[\s,]*")


class RawRow(BaseModel):
    """A raw row, or an object in one; columns without a field are ignored.

    A validator of a field raises ValueError with the rest of a sentence that begins with its column.
    """

    may_be_renamed: ClassVar[bool] = False  # whether data.columns renames the columns of the file
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, rows: Iterable[Mapping[str, Any]], where: str) -> Iterator[Self]:
        """Read rows in their order.

        Args:
            rows: values of JSON by column.
            where: their file, or the part of a hub data set.

        Raises:
            DataError: naming the first row that does not fit, and its column.
        """
        for number, row in enumerate(rows, 1):
            yield cls.read_one(row, f"{where}, row {number}")

    @classmethod
    def read_one(cls, row: Mapping[str, Any], where: str) -> Self:
        """Read a row at a place.

        Raises:
            DataError: a column does not fit.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            raise DataError(f"{where}: {_sentence(cls, error.errors())}") from None


def collect(rows: Iterable[R], make: Callable[[R], T | str]) -> tuple[list[T], Counter[str]]:
    """What is made of rows, and the number of rows of which nothing is made, by the reason named."""
    made: list[T] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        result = make(row)
        if isinstance(result, str):
            dropped[result] += 1
        else:
            made.append(result)
    return made, dropped


def describe(value: Any) -> str:
    """The type of a value, for messages; of a number that is not finite, which one it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return TYPES.get(type(value), type(value).__name__)


def column_names(columns: Iterable[object]) -> str:
    """The names of columns on one line."""
    names = [name if (name := str(column)).isprintable() else repr(name) for column in columns]
    shown = [name[:60] for name in names[:40]]
    return ", ".join([*shown, *([f"and {len(names) - 40} more"] if len(names) > 40 else [])]) or "none"


def _sentence(row: type[RawRow], errors: list[ErrorDetails]) -> str:
    missing = [error for error in errors if error["type"] == "missing"]
    if missing:
        existing = missing[0]["input"]
        columns = [_column(error["loc"]) for error in missing if error["input"] is existing]
        others = [str(name) for name in existing if name not in row.model_fields]
        meant = {column: name for column in columns for name in get_close_matches(column, others, n=1)}
        guess = f"; did you mean {', '.join(map(repr, meant.values()))}?" if meant else ""
        named = f"columns {', '.join(map(repr, columns))} are" if columns[1:] else f"column {columns[0]!r} is"
        sentence = f"{named} missing; there are: {column_names(existing)}{guess}"
        if row.may_be_renamed and columns[0] in row.model_fields:
            names = ", ".join(
                f"{column}: {name if name.isidentifier() or not meant else json.dumps(name)}"
                for column, name in (meant or dict.fromkeys(columns, "...")).items()
            )
            sentence += f"{'' if meant else ';'} 'data.columns={{{names}}}' renames"
        return sentence
    place = errors[0]["loc"]
    column, reason = _column(place), _reason(errors[0], _annotation(row, place))
    return f"column '{column}' {reason}" if column else reason


def _annotation(model: Any, place: tuple[int | str, ...]) -> Any:
    """The type of a value in a row."""
    for key in place:
        kinds = [model, *get_args(model)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if isinstance(key, int):
            model = get_args(model)[0] if get_args(model) else model
        elif inner is not None and key in inner.model_fields:
            model = inner.model_fields[key].annotation
    return model


def _kind(annotation: Any) -> str:
    """What a list or an object holds, as the end of a sentence; empty for other types."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is list:
            (item,) = get_args(kind)
            return f" of {'objects' if _kind(item) else 'texts'}{_kind(item)}"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            *others, last = kind.model_fields
            return f" with {', '.join(others)} and {last}" if others else f" with {last}"
    return ""


def _column(place: tuple[int | str, ...]) -> str:
    """The path of a value in a row, such as summaries[1].text."""
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return "".join(keys).removeprefix(".")


def _reason(error: ErrorDetails, annotation: Any) -> str:
    value = error["input"]
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "string_type" and value is None:
        return "is null, but text is needed"
    if error["type"] == "float_type" and isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"is a number of {len(str(abs(value)))} digits, which is too large: repair the file"
    expected = EXPECTED.get(error["type"]) or error.get("ctx", {}).get("expected", error["msg"])
    if error["type"] in ("list_type", "dict_type", "model_type"):
        expected += _kind(annotation)
    found = "another text" if error["type"] == "literal_error" and isinstance(value, str) else describe(value)
    return f"must be {expected}, but is {found}"


def _whole_characters(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half a character at position {error.start} (a lone surrogate), which is not text:"
            " repair the file"
        ) from None
    return text


def messages_in(text: str) -> list[Any] | None:
    """The messages that a text is as JSON, as tables without lists write them; None for other texts.

    They may be a list, an object that holds one, or objects one after another, such as JSON lines; whether
    they can be trained on is not checked. A text that goes on after the JSON is none, such as a question
    about it.

    Raises:
        ValueError: it is messages in another notation, as the rest of a sentence.
    """
    whole = text.removeprefix("\ufeff").strip()
    values: list[Any] = []
    end = 0
    while end < len(whole):
        if not whole.startswith(("[", "{", "(", '"'), end):
            return None
        try:
            value, end = JSON.raw_decode(whole, end)
        except RecursionError:
            return None
        except ValueError as error:
            is_cut = getattr(error, "msg", "").startswith("Unterminated string")
            is_whole = is_cut or whole.endswith(("]", "}", ")"))
            is_told = _is_message(KEY.findall(whole, end)) and SPEAKER.search(whole, end)
            if is_whole and whole[end] != '"' and is_told:
                raise ValueError(
                    "holds messages as text in another notation than JSON, such as Python's: write them as"
                    " lists, or with json.dumps"
                ) from None
            return None
        values.append(value)
        end = cast("re.Match[str]", GAP.match(whole, end)).end()
    held: Any = values[0] if len(values) == 1 else values
    if isinstance(held, dict):
        held = next((held[key] for key in HOLDERS if key in held), [held])
    if isinstance(held, str):  # encoded twice
        return messages_in(held)
    first = held
    while isinstance(first, list) and first:
        first = first[0]
    speaker = first.get("role", first.get("from")) if isinstance(first, dict) else None
    is_known = str(speaker).casefold() in SPEAKERS
    return held if isinstance(held, list) and is_known and _is_message(first) else None


def _is_message(keys: Iterable[str]) -> bool:
    return {"role", "content"} <= {*keys} or {"from", "value"} <= {*keys}


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty, but each row needs one")
    return text


def one_of(meanings: Mapping[int, str]) -> BeforeValidator:
    """Refuses what is none of these whole numbers, and says what they mean."""
    *others, last = (f"{number} ({meaning})" for number, meaning in meanings.items())

    def check(value: Any) -> Any:
        if type(value) is int and value in meanings:
            return value
        found = "another whole number" if type(value) is int else describe(value)
        raise ValueError(f"must be {', '.join(others)} or {last}, but is {found}")

    return BeforeValidator(check)


def if_null(value: Any) -> BeforeValidator:
    """Reads null as this value."""
    return BeforeValidator(lambda raw: value if raw is None else raw)


NeededText = Annotated[str, AfterValidator(_whole_characters)]
"""Text that must not be null."""

Text = Annotated[NeededText, if_null("")]
"""Text; null is empty."""

BareText = Annotated[Text, AfterValidator(str.strip)]
"""Text without white space around it; null is empty."""

Label = Annotated[Text, AfterValidator(check_name)]
"""The name of a client or a domain; null is empty."""

Name = Annotated[Label, AfterValidator(_not_blank)]
"""A name that must not be empty."""

Key = Annotated[Text, AfterValidator(check_visible), AfterValidator(composed)]
"""What rows have in common, such as a question; null is empty."""

AS_TEXT = BeforeValidator(lambda raw: str(raw) if type(raw) is int else raw)
"""Reads a whole number as text."""

Identifier = Annotated[NeededText, AS_TEXT]
"""Text, or a whole number as text."""
