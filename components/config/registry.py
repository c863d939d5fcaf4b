"""Implementations by name: built-in ones, and those that installed packages add by entry points.

    [project.entry-points."fed_rlhf.methods"]      # in the pyproject.toml of a user's own package
    mine = "my_package.my_method:Options"

An implementation is imported when its name is first used, so that a check of a recipe imports only
what the recipe names. Most registered objects are sections of a recipe that build what they
describe: the options of a method build its strategy, those of a source load its pairs. A
built-in name cannot be replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator

from components.config.errors import ExpectedSectionError, RecipeError, is_kind, unknown_name
from components.config.section import validate_nested

T = TypeVar("T")


class Registry(Generic[T]):
    """Names, and where each of them is implemented.

    Attributes:
        key: what names an implementation, for messages, e.g. 'federation.method'.
        group: group of the entry points that add names.
        builtin: the package's own implementations, 'module:attribute' by name.
    """

    def __init__(self, key: str, group: str, builtin: Mapping[str, str]) -> None:
        """A registry with the package's own implementations, 'module:attribute' by name."""
        self.key = key
        self.group = group
        self.builtin = dict(builtin)

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self.builtin, *self._entry_points})

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._entry_points

    def load(self, name: str, key: str | None = None) -> T:
        """The implementation of a name.

        Args:
            name: as a recipe writes it.
            key: the recipe's key, where it is not the registry's own.

        Raises:
            RecipeError: the name is not known, or a package's entry point cannot be imported.
        """
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            implementation: T = getattr(importlib.import_module(module), attribute)
            return implementation
        if name not in self._entry_points:
            raise RecipeError(unknown_name(key or self.key, name, self.names()))
        entry = self._entry_points[name]
        try:
            implementation = entry.load()
        except (ImportError, AttributeError) as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            raise RecipeError(
                f"{key or self.key} '{name}' of the package {package} cannot be imported ({error}):"
                " repair the package, or uninstall it"
            ) from error
        return implementation


def registered_section(registry: Registry[type[Any]], default: str | None = None) -> BeforeValidator:
    """A validator for a field that holds a section of a registered kind.

    The section has a key `kind`, which may be left out where there is a default kind. A bare name
    stands for the section of that kind with its defaults: `judge: autoj` is `judge: {kind: autoj}`.
    """

    def validate(values: Any) -> Any:
        if isinstance(values, BaseModel):
            return values
        if isinstance(values, str) and is_kind(values):
            values = {"kind": values}
        if not isinstance(values, Mapping):
            raise ExpectedSectionError("expected the name of a kind, or a mapping with the key kind")
        kind = values.get("kind", default)
        if not isinstance(kind, str):
            raise ValueError(
                f"the key kind must be one of: {', '.join(registry.names()) or 'none is installed'}"
            )
        return validate_nested(registry.load(kind, "kind"), {"kind": kind, **values})

    return BeforeValidator(validate)
