"""The one record type of the project, and how prepared data lie on disk.

A preference pair is a row of PAIR_COLUMNS; a server prompt is a row of PROMPT_COLUMNS. Both are parquet on disk
and `datasets.Dataset` in memory.

A prepared folder holds
    pairs.parquet      the federated clients' pairs, splits train, validation and test
    judge.parquet      pairs of owners that never take part in the federation (may have no rows)
    prompts.parquet    the server's prompts: split 'align' for labelling and DPO, 'test' for evaluation
    clients.json       {client_id: {"train": rows, "validation": rows, "test": rows, "group": str | null}}
    report.json        counts, the partition's row of statistics, and the expectation suite's outcome
    partition.png      picture of the partition
    docs/              Great Expectations Data Docs
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import Explained

if TYPE_CHECKING:
    from datasets import Dataset

PAIR_COLUMNS = ("prompt", "chosen", "rejected", "client_id", "domain", "source", "pair_id", "split")
PROMPT_COLUMNS = ("prompt_id", "prompt", "references", "split")
SPLITS = ("train", "validation", "test")


class DataError(Explained, ValueError):
    """Data that cannot be used. The message is meant for the person who brought them."""


@dataclass(frozen=True)
class SourceData:
    """What a source returns, before partition and split.

    Attributes:
        pairs: rows of PAIR_COLUMNS, optionally with `margin` (float) and `group` (str: what must stay with one
            client and in one split, such as a question; the prompt itself where absent). `client_id` is empty where
            the source knows no owners, `split` is empty where it has no split of its own.
        prompts: rows of PROMPT_COLUMNS; `references` is a list of human answers (may be empty), the first of which
            is what a win rate against humans is measured with.
        judge: rows as pairs, of owners that are in no federation; may have no rows.
        groups: the annotators' group of each client, where the source knows it (for the adjusted Rand index).
    """

    pairs: Dataset
    prompts: Dataset
    judge: Dataset
    groups: dict[str, str] = field(default_factory=dict)


def pair_id(*parts: str) -> str:
    """A stable id of a pair: a hash of what identifies it (source, owner, prompt, both completions)."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def read_rows(path: Path, client_id: str | None = None, split: str | None = None) -> Dataset:
    """Read pairs or prompts from parquet, only the rows of one client and split where given.

    Raises:
        DataError: the file is missing or is not parquet.
    """
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    wanted = [(column, "=", value) for column, value in (("client_id", client_id), ("split", split)) if value is not None]
    try:
        return Dataset(pyarrow.parquet.read_table(path, filters=wanted or None))
    except (FileNotFoundError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path}: expected a parquet file of prepared data ({error}); run the prepare stage first.") from None


def read_judges_rows(folder: Path, who: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and the held-out pairs of owners that never take part in the federation.

    Args:
        folder: of prepared data.
        who: needs them, for the error.

    Raises:
        DataError: there are none of one kind.
    """
    table = folder / "judge.parquet"
    rows, held_out = (read_rows(table, split=split).to_list() for split in ("train", "test"))
    if not rows or not held_out:
        raise DataError(
            f"{table} has {len(rows)} training and {len(held_out)} held-out pairs, but {who} needs both, of owners that are not in the federation: set more owners apart in data.options.")
    return rows, held_out


def read_clients(folder: Path) -> dict[str, dict]:
    """The clients of a prepared folder: rows per split and group, by client id in sorted order."""
    return dict(sorted(json.loads((folder / "clients.json").read_text(encoding="utf-8")).items()))


def known_groups(folder: Path) -> dict[str, str | None]:
    """The clients' true groups, None where the source does not know it, by client id."""
    return {name: counts.get("group") for name, counts in read_clients(folder).items()}
