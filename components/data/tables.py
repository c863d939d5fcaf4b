"""Pairs and prompts as data sets with the columns of the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from components.data.records import PAIR_COLUMNS, PROMPT_COLUMNS, Pair, pair_id

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset

OPTIONAL_COLUMNS = {
    "margin": "float64",
    "group": "string",
    "tree": "string",
    "depth": "int64",
    "column": "string",
}
"""Columns that some sources have beside PAIR_COLUMNS, with their types; see records.Pair."""

TEXT_COLUMNS = (*PAIR_COLUMNS, "group", "tree")
"""The columns of the record that data.column may name with any source."""


class Prompt(NamedTuple):
    """A prompt as a source reads it: its text, human answers, and its split ('align' or 'test')."""

    prompt: str
    references: list[str]
    split: str


@dataclass(frozen=True)
class PreparedTables:
    """The tables of a prepared folder.

    Attributes:
        pairs: the clients' pairs (PAIR_COLUMNS, `group`, and other OPTIONAL_COLUMNS).
        judge: pairs of owners that are not clients; may have no rows.
        prompts: the server's prompts (PROMPT_COLUMNS).
        clients: ids of the clients, sorted.
    """

    pairs: pd.DataFrame
    judge: pd.DataFrame
    prompts: pd.DataFrame
    clients: Sequence[str]


def pairs_dataset(pairs: Iterable[Pair], source: str | None) -> Dataset:
    """Make a data set of pairs: PAIR_COLUMNS, and those of OPTIONAL_COLUMNS that any pair has.

    Args:
        pairs: the pairs.
        source: written to every row; None: each pair has its own. The id of a pair is derived from
            source, owner, prompt and completions; an owner's repeated judgment of one pair is
            numbered, so that ids are unique.
    """
    from datasets import Dataset, Features, Value

    pairs = list(pairs)
    optional = [name for name in OPTIONAL_COLUMNS if any(getattr(pair, name) is not None for pair in pairs)]
    columns: dict[str, list[Any]] = {name: [] for name in (*PAIR_COLUMNS, *optional)}
    repeats: dict[tuple[str, ...], int] = {}
    for pair in pairs:
        origin = pair.source if source is None else source
        identity = (origin, pair.client_id, pair.prompt, pair.chosen, pair.rejected)
        repeats[identity] = repeats.get(identity, -1) + 1
        suffix = [str(repeats[identity])] if repeats[identity] else []
        derived = {"source": origin, "pair_id": pair_id(*identity, *suffix)}
        for name, values in columns.items():
            values.append(derived[name] if name in derived else getattr(pair, name))
    features = Features({name: Value(OPTIONAL_COLUMNS.get(name, "string")) for name in columns})
    return Dataset.from_dict(columns, features=features)


def prompts_dataset(rows: Iterable[Prompt], source: str) -> Dataset:
    """Make a data set of prompts with PROMPT_COLUMNS; of equal prompts the first one is used."""
    from datasets import Dataset, Features, Value
    from datasets import List as ListOf

    unique: dict[str, Prompt] = {}
    for row in rows:
        unique.setdefault(row.prompt, row)
    columns = {
        "prompt_id": [pair_id(source, prompt) for prompt in unique],
        "prompt": list(unique),
        "references": [row.references for row in unique.values()],
        "split": [row.split for row in unique.values()],
    }
    types = {name: Value("string") for name in PROMPT_COLUMNS} | {"references": ListOf(Value("string"))}
    return Dataset.from_dict(columns, features=Features(types))
