"""Implementations by name: built-in ones, and those that installed packages add by entry points.

    [project.entry-points."fed_rlhf.methods"]      # in the pyproject.toml of a user's own package
    mine = "my_package.my_method:MyMethod"

An implementation is imported when its name is first used, so that a check of a recipe imports only
what the recipe names. Most registered objects are sections of a recipe that do what they describe:
a method has its server half, a source loads its pairs. A built-in name cannot be replaced.

This package imports these classes for the type checker only. At run time the key of a recipe that holds
one is annotated with a plain section, and `registered_options` or `registered_section` validates it by the
registered class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationInfo

from components.config.errors import ExpectedSectionError, RecipeError, unknown_name
from components.config.section import Section, validate_nested

T = TypeVar("T")
KIND = re.compile(r"[A-Za-z0-9_-]+")
"""What can be the name of a kind. Other text is not repeated in errors; it may be a secret."""


class Registry(Generic[T]):
    """Names, and where each of them is implemented."""

    def __init__(self, key: str, group: str, builtin: Mapping[str, str], base: str = "") -> None:
        """A registry with the package's own implementations, 'module:attribute' by name."""
        self.key = key  # what names an implementation, for messages, e.g. 'federation.method'
        self.group = group  # of the entry points that add names
        self.builtin = dict(builtin)
        self.base = base  # class that an implementation derives from, 'module:attribute'; '' is any object

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self.builtin, *self._entry_points})

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._entry_points

    def load(self, name: str, key: str | None = None) -> T:
        """The implementation of a name; a RecipeError if it is not known, or cannot be used.

        The key is the recipe's, where it is not the registry's own.
        """
        key = key or self.key
        if name in self.builtin:
            implementation: T = resolve_name(self.builtin[name])
        elif name in self._entry_points:
            entry = self._entry_points[name]
            try:
                implementation = entry.load()
            except (ImportError, AttributeError) as error:
                package = entry.dist.name if entry.dist is not None else entry.value
                raise RecipeError(
                    f"{key} '{entry.name}' of the package {package} cannot be imported ({error}):"
                    " repair the package, or uninstall it"
                ) from error
        else:
            raise RecipeError(unknown_name(key, name, self.names()))
        registered = getattr(implementation, "__qualname__", repr(implementation))
        if self.base and inspect.isabstract(implementation):
            missing = ", ".join(sorted(getattr(implementation, "__abstractmethods__", ())))
            raise RecipeError(f"{key} '{name}' registers {registered}, which does not define {missing}")
        if self.base and not (
            isinstance(implementation, type) and issubclass(implementation, resolve_name(self.base))
        ):
            raise RecipeError(
                f"{key} '{name}' registers {registered}, which is no {self.base.replace(':', '.')}: derive it"
                " from that class"
            )
        return implementation

    def has(self, section: object) -> bool:
        """Whether an object is of the class that implementations derive from."""
        return not self.base or isinstance(section, resolve_name(self.base))


def registered_name(registry: Registry[Any], key: str) -> AfterValidator:
    """A validator for a field that holds a name of a registry; the key is for messages."""

    def validate(name: str) -> str:
        if name not in registry:
            raise ValueError(unknown_name(key, name, registry.names()))
        return name

    return AfterValidator(validate)


def registered_options(registry: Registry[type[Any]], name_key: str) -> BeforeValidator:
    """A validator for a field that holds the options of what an earlier field, `name_key`, names."""

    def validate(values: Any, info: ValidationInfo) -> Any:
        name = info.data.get(name_key)
        if name is None:
            return Section()  # the error of the name is reported
        return validate_nested(registry.load(name), values, f"{name_key} {name}")

    return BeforeValidator(validate)


def registered_section(
    table: Registry[type[Any]] | Mapping[str, type[BaseModel]], default: str | None = None, key: str = "kind"
) -> BeforeValidator:
    """A validator for a field that holds one of several sections, told apart by a key, such as `kind`.

    The key may be left out where there is a default kind. A bare name stands for the section of
    that kind with its defaults: `judge: autoj` is `judge: {kind: autoj}`.
    """

    def validate(values: Any) -> Any:
        if isinstance(values, BaseModel):
            if isinstance(table, Registry) and not table.has(values):
                raise ValueError(f"{type(values).__name__} is no {table.base}")
            return values
        if isinstance(values, str) and KIND.fullmatch(values):
            values = {key: values}
        kinds = table.names() if isinstance(table, Registry) else list(table)
        names = ", ".join(kinds) or "none is installed"
        if not isinstance(values, Mapping):
            raise ExpectedSectionError(
                f"expected the name of a {key} ({names}), or a mapping with the key {key}"
            )
        kind = values.get(key, default)
        if not isinstance(kind, str):
            raise ValueError(f"the key {key} must be one of: {names}")
        if kind not in kinds:
            raise ValueError(unknown_name(key, kind, kinds))
        model = table.load(kind, key) if isinstance(table, Registry) else table[kind]
        return validate_nested(model, {key: kind, **values})

    return BeforeValidator(validate)


def one_of(*members: type[BaseModel]) -> BeforeValidator:
    """As registered_section, for sections whose default `kind` is their name; the first is the default."""
    by_kind = {str(member.model_fields["kind"].default): member for member in members}
    return registered_section(by_kind, next(iter(by_kind)))
