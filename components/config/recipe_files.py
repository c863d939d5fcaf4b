"""Files that a recipe names.

In a recipe such a file is a name or a path. When a run starts, the content of each file is read
once: the text of a template becomes part of the run's recipe, and other files are copied into the
run's folder and named by their hash (components/recipes/inputs.py). So fingerprints, cache keys and DVC's
stage inputs, which are made of sections, depend on the content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, PrivateAttr, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from components.config.section import Section

MAX_PART = 255
"""Bytes of the name of a file or folder, as file systems limit it."""
MAX_PATH = 4095
"""Bytes of a path."""


def check_path(path: str) -> str:
    """Refuse a text that cannot be the path of a file; the ValueError is the rest of a sentence."""
    encoded = path.encode("utf-8", errors="replace")
    longest = max(map(len, encoded.split(b"/")))
    if len(encoded) > MAX_PATH or longest > MAX_PART or b"\0" in encoded:
        raise ValueError(
            f"can be no file: a path has at most {MAX_PATH:,} bytes, {MAX_PART} in each part, and no U+0000:"
            " correct it"
        )
    return path


@dataclass(frozen=True)
class RecipeFile:
    """A file as a recipe names it; in the recipe of a run with its content.

    In YAML it is its name, or in the recipe of a run a mapping of the name and the content.
    """

    name: str  # or path, as the recipe's author wrote it
    content_key: ClassVar[str]  # attribute that stands for the content; None until a run starts

    def __str__(self) -> str:
        return self.name

    @classmethod
    def validate(cls, value: Any) -> Self:
        """The file of a name, or of a mapping of name and content."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value:
            try:
                return cls(check_path(value))
            except ValueError as error:
                raise PydanticCustomError("path", str(error)) from None
        is_file = isinstance(value, Mapping) and set(value) == {"name", cls.content_key}
        if is_file and all(isinstance(part, str) for part in value.values()):
            return cls(**value)
        raise PydanticCustomError("string_type", "Input should be the name of a file")

    def dump(self) -> str | dict[str, str]:
        """As it is written in YAML."""
        content = getattr(self, self.content_key)
        return self.name if content is None else {"name": self.name, self.content_key: content}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.validate, serialization=core_schema.plain_serializer_function_ser_schema(cls.dump)
        )


@dataclass(frozen=True)
class TemplateFile(RecipeFile):
    """A prompt template of the project, or a text file."""

    text: str | None = None  # in the recipe of a run
    content_key: ClassVar[str] = "text"


@dataclass(frozen=True)
class InputFile(RecipeFile):
    """A file or folder that is read in place of the hub, or beside it. `Path(file)` is where it is read."""

    sha256: str | None = None  # of its content, in the recipe of a run
    # The run's own copy; it is not part of the recipe, since a run's folder may be moved.
    copy: str | None = field(default=None, compare=False)
    content_key: ClassVar[str] = "sha256"

    def __fspath__(self) -> str:
        return self.copy or self.name


@dataclass(frozen=True)
class NameOrFolder(InputFile):
    """A name that a package knows, or a local folder, which has precedence."""


class NamedModel(Section):
    """Base of sections that name a model: by a hub id or a local folder.

    A local folder is not copied, because weights are large. A run refuses one that has changed.
    """

    model_key: ClassVar[str] = "name"  # the key that holds the name
    _location: str | None = PrivateAttr(None)  # not part of the recipe, since a folder may be moved

    sha256: str | None = None
    """Hash of the files of a local folder. A run records it when it starts, and does not resume
    with other files. null: the files are not compared."""

    @model_validator(mode="after")
    def _check_model_path(self) -> Self:
        try:
            check_path(getattr(self, self.model_key))
        except ValueError as error:
            raise ValueError(f"{self.model_key} {error}") from None
        return self

    @property
    def model_name(self) -> str | None:
        """The hub id or local folder as the author wrote it; None for a model at an endpoint."""
        if getattr(self, "base_url", None) is not None:
            return None
        return str(getattr(self, self.model_key))

    @property
    def location(self) -> str:
        """What the model is loaded from: the absolute path of a run's local folder, or the name."""
        return self._location or str(getattr(self, self.model_key))

    def at(self, location: str, sha256: str) -> Self:
        """The section with the hash of a local folder, and where the folder is."""
        section = self.model_copy(update={"sha256": sha256})
        section._location = location
        return section
