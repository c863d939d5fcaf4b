"""Where data sources are registered, and the rows that they return.

A source of pairs is a function ``(data: DataConfig, options, seed: int) -> SourceData`` with a pydantic model of its options,
registered under a name by a decorator:

    class MyOptions(Section):
        years: int = Field(3, ge=1, description="...")

    @source("mine", MyOptions)
    def load(data: DataConfig, options: MyOptions, seed: int) -> SourceData: ...

A source of prompts only, for the server, is a function ``(prompts: PromptsConfig, options, seed: int) -> PromptData``,
registered by the decorator ``prompt_source`` in the same way.

components/data/sources.py imports the modules that register one; a new source is a new file and one import there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from components.config import DataConfig, PromptsConfig, Section
from components.data.records import PAIR_COLUMNS, PROMPT_COLUMNS, SourceData, pair_id

if TYPE_CHECKING:
    from datasets import Dataset

EXTRA = {"margin": "float64", "group": "string", "tree": "string", "depth": "int64", "column": "string"}
"""Columns that some sources have beside PAIR_COLUMNS, with their types; tree and depth say where a pair of thoughts comes from,
column is the value of data.column where that is a column of the user's own file."""

TEXT_COLUMNS = (*PAIR_COLUMNS, *(c for c, kind in EXTRA.items() if kind == "string" and c != "column"))
"""The columns of the record that data.column may name with any source."""

Load = Callable[[DataConfig, Any, int], SourceData]
LoadPrompts = Callable[[PromptsConfig, Any, int], "PromptData"]


@dataclass(frozen=True)
class Source:
    """A registered source.

    Attributes:
        options: the model of its options.
        load: its loading function.
        own_columns: whether data.column may name a column of the user's own file.
        check: looks at what is inside checked options, (options, where), and raises a RecipeError; None: there is nothing more to check.
    """

    options: type[Section]
    load: Load
    own_columns: bool = False
    check: Callable[[Any, str], Any] | None = None


@dataclass(frozen=True)
class CountedSourceData(SourceData):
    """Source data with what was left out on the way.

    Attributes:
        dropped: rows of the raw data that became neither a pair nor a judge's pair, by reason.
    """

    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSource:
    """A registered prompt source: its options' model and its loading function."""

    options: type[Section]
    load: LoadPrompts


@dataclass(frozen=True)
class PromptData:
    """What a prompt source returns.

    Attributes:
        prompts: (prompt, references) in the data set's order; the references may be none.
        references: who wrote them, e.g. 'human' or the name of a model; empty where there are none.
        dropped: rows of the raw data that became no prompt, by reason.
    """

    prompts: list[tuple[str, list[str]]]
    references: str = ""
    dropped: dict[str, int] = field(default_factory=dict)


SOURCES: dict[str, Source] = {}
PROMPT_SOURCES: dict[str, PromptSource] = {}


def source(name: str, options: type[Section], own_columns: bool = False, check: Callable[[Any, str], Any] | None = None) -> Callable[[Load], Load]:
    """Register a source under a name; see Source for the rest.

    Raises:
        ValueError: the name is taken.
    """
    def register(load: Load) -> Load:
        if name in SOURCES:
            raise ValueError(f"two data sources are named '{name}'")
        SOURCES[name] = Source(options, load, own_columns, check)
        return load

    return register


def prompt_source(name: str, options: type[Section]) -> Callable[[LoadPrompts], LoadPrompts]:
    """Register a prompt source under a name.

    Raises:
        ValueError: the name is taken.
    """
    def register(load: LoadPrompts) -> LoadPrompts:
        if name in PROMPT_SOURCES:
            raise ValueError(f"two prompt sources are named '{name}'")
        PROMPT_SOURCES[name] = PromptSource(options, load)
        return load

    return register


def pairs_dataset(rows: Iterable[Mapping[str, Any]], source: str | None) -> Dataset:
    """Rows as a Dataset of PAIR_COLUMNS, with those of EXTRA that any row has.

    Args:
        rows: mappings with prompt, chosen and rejected; client_id, domain, split, and those of EXTRA where known.
        source: written to every row; None: each row has its own. pair_id is derived from source, owner, prompt and
            completions; an owner's repeated judgement of one pair counts up, so that ids stay unique.
    """
    from datasets import Dataset, Features, Value

    rows = list(rows)
    extra = [c for c in EXTRA if any(r.get(c) is not None for r in rows)]
    columns: dict[str, list] = {c: [] for c in (*PAIR_COLUMNS, *extra)}
    seen: dict[tuple[str, ...], int] = {}
    for row in rows:
        origin = row["source"] if source is None else source
        identity = (origin, row.get("client_id") or "", row["prompt"], row["chosen"], row["rejected"])
        again = seen[identity] = seen.get(identity, -1) + 1
        values = {"client_id": "", "domain": "", "split": ""} | {k: v for k, v in row.items() if v is not None}
        values |= {"source": origin, "pair_id": pair_id(*identity, *([str(again)] if again else []))}
        for column in columns:
            columns[column].append(values.get(column))
    features = Features({c: Value(EXTRA.get(c, "string")) for c in columns})
    return Dataset.from_dict(columns, features=features)


def prompts_dataset(rows: Iterable[tuple[str, list[str], str]], source: str) -> Dataset:
    """Rows (prompt, references, split) as a Dataset of PROMPT_COLUMNS; a prompt that comes twice is kept once."""
    from datasets import Dataset, Features, Value
    from datasets import List as ListOf

    columns: dict[str, list] = {c: [] for c in PROMPT_COLUMNS}
    seen: set[str] = set()
    for prompt, references, split in rows:
        if prompt in seen:
            continue
        seen.add(prompt)
        for column, value in zip(PROMPT_COLUMNS, (pair_id(source, prompt), prompt, references, split), strict=True):
            columns[column].append(value)
    features = Features({c: ListOf(Value("string")) if c == "references" else Value("string") for c in PROMPT_COLUMNS})
    return Dataset.from_dict(columns, features=features)
