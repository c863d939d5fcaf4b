"""The base of all recipe sections, and the check that turns pydantic's errors into sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from components.config.errors import ExpectedSectionError, RecipeError

S = TypeVar("S", bound=BaseModel)

Location = Sequence[str | int]

LARGEST = 2**31 - 1
"""Largest number of a section; counts that take memory or processes have smaller bounds of their own."""

SHOWN = 200
"""Characters of a refused value in a message."""


class Section(BaseModel):
    """A section of a recipe: frozen, strictly typed, without unknown keys, NaN, infinite or huge numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int | float) and abs(value) > LARGEST:
                raise ValueError(f"{name} is {str(value)[:20]}, at most {LARGEST:,} is allowed")
        return self


class KindSection(Section):
    """A section of one of several kinds, which a registry knows by name."""

    kind: str
    """Registered name."""


class NestedSectionError(ValueError):
    """Errors of a section whose model depends on another key, e.g. a method's options.

    Raised inside a pydantic validator; `check_section` shows the nested errors under the outer key.
    """

    def __init__(self, model: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> None:
        super().__init__(str(error))
        self.model = model
        self.values = values
        self.error = error


def validate_nested(model: type[S], values: Any, owner: str = "") -> S:
    """Validate a nested section inside a validator of the outer one.

    The owner, such as a method, is whose options they are; several that it does not have are left over
    from another one.
    """
    if isinstance(values, model):
        return values
    if isinstance(values, BaseModel):
        values = values.model_dump(mode="json")
    if not isinstance(values, Mapping):
        raise ExpectedSectionError(f"expected a mapping of keys ({', '.join(model.model_fields)})")
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        foreign = [str(detail["loc"][0]) for detail in error.errors() if detail["type"] == "extra_forbidden"]
        if owner and len(foreign) > 1:
            raise ValueError(
                f"{owner} has no {', '.join(foreign)}: they may be left over from another one; begin with"
                " options={} and set its own, which are: " + (", ".join(model.model_fields) or "none")
            ) from None
        raise NestedSectionError(model, dict(values), error) from None


def check_section(model: type[S], values: Mapping[str, Any], where: str, prefix: str = "") -> S:
    """Validate values by a pydantic model; a RecipeError has one line for each error.

    Args:
        where: the file or command that the values come from.
        prefix: dotted key of the section, empty for a whole recipe.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        sentences = _sentences(model, dict(values), error, prefix)
        raise RecipeError("\n".join(f"{where}: {sentence}" for sentence in sentences)) from None


def describe_type(value: Any) -> str:
    """The type of a YAML value in words."""
    names = {
        dict: "a mapping",
        list: "a list",
        str: "text",
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        type(None): "nothing",
    }
    return names.get(type(value), type(value).__name__)


def _sentences(model: type[BaseModel], values: Any, error: ValidationError, prefix: str) -> list[str]:
    sentences = []
    for detail in error.errors():
        nested = detail.get("ctx", {}).get("error")
        if isinstance(nested, NestedSectionError):
            key = _dotted(prefix, _key_path(detail))
            sentences += _sentences(nested.model, nested.values, nested.error, key)
        else:
            sentences.append(_sentence(model, values, detail, prefix))
    return sentences


def _key_path(error: Mapping[str, Any]) -> list[str | int]:
    """The keys of an error's location, without pydantic's names of the members of unions."""
    location = error["loc"]
    own = len(location) - 1 if error["type"] == "extra_forbidden" else None  # any text of the user's
    return [
        part
        for number, part in enumerate(location)
        if isinstance(part, int)
        or number == own
        or not ("[" in part or part.startswith("literal") or part in ("str", "int"))
    ]


def _sentence(model: type[BaseModel], values: Any, error: Mapping[str, Any], prefix: str) -> str:
    location = _key_path(error)
    # Whatever follows a key in the same word may be a secret, so it is not shown.
    names = [part if isinstance(part, int) else re.split(r"[\s:=]", part, maxsplit=1)[0] for part in location]
    key = _dotted(prefix, names)
    if error["type"] == "extra_forbidden":
        return _unknown_key(model, location, names, prefix)
    if error["type"] == "missing":
        return f"key '{key}' is missing: it has no default."
    reason = _reason(error)
    if not location:
        first_word = reason.split(" ", 1)[0]
        sentence = reason if "." in first_word else reason[:1].upper() + reason[1:]
        return _end_sentence(f"section '{prefix}': {reason}" if prefix else sentence)
    if error["type"] == "literal_error":
        reason = f"not an allowed value (expected {error['ctx']['expected']})"
    else:
        reason = reason[:1].lower() + reason[1:]
    return _end_sentence(f"key '{key}'{_shown_value(values, location, error)}: {reason}")


def _end_sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "value_error" and "error" in error.get("ctx", {}):
        return str(error["ctx"]["error"]).removesuffix(".")
    return str(error["msg"]).removeprefix("Value error, ").removesuffix(".")


def _shown_value(values: Any, location: Location, error: Mapping[str, Any]) -> str:
    value = values
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = error.get("input")
            break
    if isinstance(value, dict):
        return ""
    refused_section = isinstance(error.get("ctx", {}).get("error"), ExpectedSectionError)
    if refused_section or error["type"] in ("dict_type", "model_type"):
        return f" is {describe_type(value)}"
    shown = repr(value)
    return f" is {shown if len(shown) <= SHOWN else f'{shown[:SHOWN]} ...'}"


def _unknown_key(model: type[BaseModel], location: Location, names: Location, prefix: str) -> str:
    *section, last = names
    fields = _fields_at(model, location[:-1])
    nearest = "." if last in fields else _nearest_key(model, str(last), section, fields, prefix)
    glued = ""
    if last != str(location[-1]):
        glued = " with more in the same word (between a key and its value stand a colon and a space)"
    allowed = f"Keys allowed here: {', '.join(fields)}." if fields else "No keys are allowed here."
    return f"unknown key '{_dotted(prefix, names)}'{glued}{nearest} {allowed}"


def section_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a section's annotation, optional or not; None for other annotations."""
    if get_origin(annotation) is Annotated:
        return section_model(get_args(annotation)[0])
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for member in members:
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    for part in location:
        if isinstance(part, int):  # the index of a list of sections
            continue
        if part not in model.model_fields:
            return []
        annotation = model.model_fields[part].annotation
        inner = next(filter(None, map(section_model, (annotation, *get_args(annotation)))), None)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _nearest_key(model: type[BaseModel], last: str, section: Location, fields: list[str], prefix: str) -> str:
    """The suggestion for an unknown key: of its own section, or a key right in another section."""
    paths = list(_key_paths(model))
    inside = [path for path in paths if not section or path.startswith(f"{section[0]}.")]
    own, direct = (
        {path.rpartition(".")[2]: path for path in reversed(some)}  # of one name, the first in the recipe
        for some in (inside, [path for path in paths if path.count(".") < 2])
    )
    siblings = {name: _dotted("", [*section, name]) for name in fields}
    backbones = [path for path in inside if path.endswith("backbone.name")]
    if backbones:
        own["model"] = backbones[0]  # as other libraries call it
    for keys, cutoff in ((own, 1.0), (direct, 1.0), (siblings, 0.6), (own, 0.75), (direct, 0.75)):
        for name in difflib.get_close_matches(last, keys, n=1, cutoff=cutoff):
            return f"; did you mean '{_dotted(prefix, [keys[name]])}'?"
    return "."


def _dotted(prefix: str, parts: Iterable[str | int]) -> str:
    """A key as it is written in an override, e.g. data.options.sources[1].path."""
    path = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")


def _key_paths(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = section_model(field.annotation)
        if inner is not None:
            yield from _key_paths(inner, f"{prefix}{name}.")
