"""Source `owners`: the pairs stay with their owners, whose processes prepare them (components.owners)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from components.config import DataConfig, InputFile, Recipe
from components.config.name_checks import PlainName
from components.data.records import DataError, Pair, SourceData
from components.data.rows import ending, file_kinds, find_splits
from components.data.sources.own_files import CsvFile, FileSource, JsonlFile, ParquetFile
from components.data.sources.source import Source
from components.data.splits import JUDGE

FILES = (JsonlFile, ParquetFile, CsvFile)
"""The sources that read an owner's file, and the server's pairs."""


class Owners(Source):
    """Options of the source owners."""

    is_local: ClassVar[bool] = True
    not_judgements: ClassVar[str] = ""
    lends_verdicts: ClassVar[bool] = False

    owners: list[Annotated[PlainName, Field(min_length=1)]] = Field(
        min_length=1, description="Names of the owners, each a client, as in `fed-rlhf owner init NAME`."
    )
    judge: InputFile | None = Field(
        None,
        description=(
            "The server's own pairs (.jsonl, .parquet or .csv), of a judge or rewards that are trained."
        ),
    )

    @field_validator("owners")
    @classmethod
    def _distinct(cls, owners: list[str]) -> list[str]:
        repeated = sorted({name for name in owners if owners.count(name) > 1})
        if repeated:
            raise ValueError(f"'{repeated[0]}' is named twice: name each owner once")
        return owners

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """The judge's pairs; those of owners are not here."""
        if self.judge is None:
            return SourceData([], [], [])
        own = DataConfig(source=file_source(Path(self.judge)).name, path=self.judge)
        assert isinstance(own.options, FileSource)
        pairs: list[Pair] = []
        warnings: list[str] = []
        for split, rows in own.options.read(own).items():
            pairs += [replace(row, client_id=JUDGE, split=row.split or split) for row in rows.pairs]
            warnings += rows.warnings
        return SourceData([], [], pairs, warnings=tuple(warnings))


def has_owners(recipe: Recipe) -> bool:
    """Whether the pairs of a recipe stay with owners."""
    return isinstance(recipe.data.options, Owners)


def owner_names(recipe: Recipe) -> list[str]:
    """The owners of a recipe, sorted; none where it has the rows itself."""
    options = recipe.data.options
    return sorted(options.owners) if isinstance(options, Owners) else []


def file_source(path: Path) -> type[FileSource]:
    """The source that reads a file or a folder, by the suffixes of its files.

    Raises:
        DataError: none reads it.
    """
    parts = find_splits(path).values() if path.is_dir() else ()
    kinds = set[str]().union(*map(file_kinds, parts)) if path.is_dir() else {ending(path)}
    for source in FILES:
        if kinds & {*source.suffixes}:
            return source
    endings = ", ".join(suffix for source in FILES for suffix in source.suffixes)
    raise DataError(f"{path} is no file of pairs, whose name ends with one of {endings}")
