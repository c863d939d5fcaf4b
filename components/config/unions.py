"""Sections of several kinds: the key `kind` says which model the other keys must fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator

from components.config.errors import ExpectedSectionError, is_kind, unknown_name
from components.config.section import validate_nested


def one_of(*members: type[BaseModel]) -> BeforeValidator:
    """A validator for a field that holds one of several sections.

    Each member has a field `kind` whose default is its own name; the first member is taken where
    `kind` is left out. A bare name stands for the section of that kind with its defaults:
    `objective: ppo` is `objective: {kind: ppo}`.
    """
    by_kind = {str(member.model_fields["kind"].default): member for member in members}
    default = next(iter(by_kind))

    def validate(values: Any) -> Any:
        if isinstance(values, BaseModel):
            return values
        if isinstance(values, str) and is_kind(values):
            values = {"kind": values}
        if not isinstance(values, Mapping):
            raise ExpectedSectionError(
                f"expected one of {', '.join(by_kind)}, or a mapping with the key kind"
            )
        values = {"kind": default, **values}
        if values["kind"] not in by_kind:
            raise ValueError(unknown_name("kind", str(values["kind"]), by_kind))
        return validate_nested(by_kind[values["kind"]], values)

    return BeforeValidator(validate)
