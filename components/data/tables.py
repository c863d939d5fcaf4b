"""The tables of a prepared folder, as data frames and as parquet files of one schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.records import OPTIONAL_COLUMNS, PAIR_COLUMNS, PROMPT_COLUMNS, Pair, Prompt, pair_id
from components.data.same_text import same_text

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def pairs_frame(pairs: Sequence[Pair], source: str) -> pd.DataFrame:
    """A data frame of pairs: PAIR_COLUMNS, group, and those of OPTIONAL_COLUMNS that any pair has.

    The id of a pair is derived from source, owner, prompt and completions; an owner's repeated
    judgment of one pair is numbered, so that ids are unique.

    Args:
        pairs: the pairs.
        source: name of the source of those that name none.
    """
    names = [*PAIR_COLUMNS, "group"]
    names += [name for name in OPTIONAL_COLUMNS if any(getattr(pair, name) is not None for pair in pairs)]
    columns = {name: [getattr(pair, name, "") for pair in pairs] for name in names}
    columns["source"] = [pair.source or source for pair in pairs]
    repeats: Counter[tuple[str, ...]] = Counter()
    for row, pair in enumerate(pairs):
        identity = (columns["source"][row], pair.client_id, pair.prompt, pair.chosen, pair.rejected)
        number = [str(repeats[identity])] if repeats[identity] else []
        columns["pair_id"][row] = pair_id(*identity, *number)
        repeats[identity] += 1
    return _frame(columns)


def unique_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts without those that are the same text as an earlier one."""
    first: dict[str, Prompt] = {}
    for row in prompts:
        first.setdefault(same_text(row.prompt), row)
    return list(first.values())


def prompts_frame(prompts: Iterable[Prompt], source: str) -> pd.DataFrame:
    """A data frame with PROMPT_COLUMNS of the prompts of a source; of equal ones the first is used."""
    rows = unique_prompts(prompts)
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in Prompt._fields}
    return _frame(columns | {"prompt_id": [pair_id(source, row.prompt) for row in rows]})


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Write pairs or prompts as parquet."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pandas(frame, schema=_schema(frame), preserve_index=False)
    pyarrow.parquet.write_table(table.replace_schema_metadata(), path)  # without pandas' metadata


def _frame(columns: dict[str, list[Any]]) -> pd.DataFrame:
    import pyarrow as pa

    return pa.table(columns, schema=_schema(columns)).to_pandas()


def _schema(columns: Collection[str]) -> pa.Schema:
    """The types of these columns, in the order that they have in the tables of pairs and of prompts."""
    import pyarrow as pa

    types = {"references": pa.list_(pa.string()), "margin": pa.float64(), "depth": pa.int64()}
    names = (*PROMPT_COLUMNS[:3], *PAIR_COLUMNS[1:], *OPTIONAL_COLUMNS)
    return pa.schema([(name, types.get(name, pa.string())) for name in names if name in columns])
