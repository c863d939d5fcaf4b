"""The record of the project, and the files of a prepared folder.

The columns of a table of pairs are the fields of Pair, those of the server's prompts the fields of
Prompt; both are parquet files. A prepared folder contains:

    pairs.parquet      the pairs of the clients, with splits train, validation and test
    judge.parquet      pairs of owners that never take part in the federation (may have no rows)
    prompts.parquet    the server's prompts: split 'align' for labeling and DPO, 'test' for
                       evaluation
    owners.json        in place of pairs.parquet: what owners publish of pairs that they keep
    unseen/            pairs.parquet and clients.json of clients that take part in no round
                       (data.unseen_clients); not there without any
    clients.json       {client_id: {"train": rows, "validation": rows, "test": rows, "group": str |
                       null}}
    report.json        components.data.data_report.PreparationReport
    docs/              Great Expectations Data Docs (runtime.data_docs)
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.config import DataConfig, UserError
from components.data.data_report import read_client_counts
from components.data.same_text import one_prompt
from components.io import file_hash, read_mapping
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TEXTS = ("prompt", "chosen", "rejected")
TOO_LONG = "over max_characters"
"""Why a pair or prompt with a long text is dropped."""
SPLITS = ("train", "validation", "test")
OWNERS = "owners.json"
"""File of a prepared folder with what owners publish of pairs that they keep."""
UNSEEN = "unseen"
"""Folder of a prepared folder with the pairs of clients that take part in no round, if there are any."""


class DataError(UserError, ValueError):
    """Data that cannot be used."""


@dataclass(frozen=True)
class Pair:
    """A preference pair, as a source makes it and as it is read from a table of pairs.

    Its fields are the columns of these tables, in this order; a table has no column of margin, tree,
    depth or column if no pair of it has a value.

    A completion that continues the text of its prompt begins with the white space between the two
    (see Policy.encode_texts).
    """

    prompt: str
    chosen: str
    rejected: str
    client_id: str = ""  # the owner; empty where the source knows none
    domain: str = ""  # empty where the source knows none
    source: str = ""  # name of the source, where it is not that of the recipe (data.source)
    pair_id: str = ""  # see pairs_frame, which makes it
    split: str = ""  # train, validation or test; empty where it is drawn later
    margin: float | None = None  # how much better chosen is, in the units of the source
    group: str | None = None  # stays with one client and in one split; None or empty: the prompt
    tree: str | None = None  # name of the tree of thoughts that the pair is from
    depth: int | None = None  # of the pair's thoughts in that tree
    column: str | None = None  # value of data.column, if that is a column of the user's own file

    @property
    def texts(self) -> tuple[str, str, str]:
        """The prompt, and the chosen and the rejected completion."""
        return self.prompt, self.chosen, self.rejected

    @property
    def split_group(self) -> str:
        """What must stay in one split: the group, or the prompt where there is none."""
        return self.group or self.prompt


COLUMNS = {field.name: str(field.type) for field in fields(Pair)}
TEXT_COLUMNS = tuple(name for name, kind in COLUMNS.items() if kind.startswith("str") and name != "column")
"""The columns of the record that data.column may name with any source."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of the server. Its fields are the columns of the table of prompts, in this order."""

    prompt_id: str = field(default="", kw_only=True)  # see prompts_frame, which makes it
    prompt: str
    # Human answers, if any, under the name of their column; the first is the opponent in a win rate
    # against humans.
    references: list[str]
    split: str  # 'align' or 'test'


R = TypeVar("R", Pair, Prompt)


@dataclass(frozen=True)
class SourceData:
    """What a source returns, before the partition."""

    pairs: list[Pair]
    prompts: list[Prompt]  # of the server; unique_prompts is applied to them
    judge: list[Pair]  # of owners outside the federation; may be empty
    true_clusters: dict[str, str] = field(default_factory=dict)  # of each client, where they are known
    dropped: dict[str, int] = field(default_factory=dict)  # raw rows that became no pair, by reason
    warnings: tuple[str, ...] = ()  # what may be wrong with the rows, as sentences


@dataclass(frozen=True)
class PromptData:
    """What a source of prompts returns."""

    prompts: list[tuple[str, list[str]]]  # with answers to them, if any, in the order of the data set
    answers_author: str = ""  # e.g. 'human' or the name of a model; empty without any
    dropped: dict[str, int] = field(default_factory=dict)  # raw rows that became no prompt, by reason


def pair_id(*parts: str) -> str:
    """Stable id of a pair: a hash of what identifies it (source, owner, prompt, both completions)."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def answer_id(prompt_id: str, number: int) -> str:
    """Id of the answer of this number (from 0) to a prompt; that of the first one is the prompt's."""
    return prompt_id if number == 0 else f"{prompt_id}#{number}"


def answered_prompt(answer: str) -> str:
    """The prompt's id in the id of an answer."""
    return answer.partition("#")[0]


def trailing_space(text: str) -> str:
    """The white space at the end of a text; empty if there is none."""
    return text[len(text.rstrip()) :]


def drop_long(rows: Sequence[R], what: str, data: DataConfig) -> list[R]:
    """The rows without a prompt or completion that is too long.

    References are not limited, as no model reads them. A missing text is left to the expectations.

    Args:
        rows: pairs or prompts.
        what: their name, for the message.
        data: the recipe's section.
    """
    limit = data.max_characters
    kept = [row for row in rows if all(len(getattr(row, name, None) or "") <= limit for name in TEXTS)]
    count = len(rows) - len(kept)
    if count > data.max_dropped * len(rows):
        raise DataError(
            f"{count} of {len(rows)} {what} have more than {limit} characters, more than"
            f" the share {data.max_dropped:g} that may be dropped: raise data.max_characters, or"
            " data.max_dropped."
        )
    return kept


def pairs_frame(pairs: Sequence[Pair], source: str) -> pd.DataFrame:
    """A data frame of pairs, without the columns that may be None and are so in each, but for the group.

    The id of a pair is derived from source, owner, prompt and completions; an owner's repeated
    judgment of one pair is numbered, so that ids are unique.

    Args:
        pairs: the pairs.
        source: name of the source of those that name none.
    """
    columns = {name: [getattr(pair, name) for pair in pairs] for name in COLUMNS}
    for name, kind in COLUMNS.items():
        if kind != "str" and name != "group" and all(value is None for value in columns[name]):
            del columns[name]
    columns["source"] = [pair.source or source for pair in pairs]
    repeats: Counter[tuple[str, ...]] = Counter()
    for row, pair in enumerate(pairs):
        identity = (columns["source"][row], pair.client_id, pair.prompt, pair.chosen, pair.rejected)
        number = [str(repeats[identity])] if repeats[identity] else []
        columns["pair_id"][row] = pair_id(*identity, *number)
        repeats[identity] += 1
    return _frame(columns)


def unique_prompts(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Each prompt once, and the number of its other spellings, by one_prompt.

    Of equal texts the first is used; another spelling adds its references to those of the first one.
    """
    first: dict[str, Prompt] = {}
    texts: set[str] = set()
    for row in prompts:
        key = one_prompt(row.prompt)
        known = first.setdefault(key, row)
        if row.prompt not in texts and known is not row:
            others = [text for text in row.references if text not in known.references]
            first[key] = replace(known, references=[*known.references, *others])
        texts.add(row.prompt)
    return list(first.values()), len(texts) - len(first)


def prompts_frame(prompts: Iterable[Prompt], source: str) -> pd.DataFrame:
    """A data frame of the prompts of a source, which get their ids."""
    rows = [replace(row, prompt_id=pair_id(source, row.prompt)) for row in prompts]
    return _frame({column.name: [getattr(row, column.name) for row in rows] for column in fields(Prompt)})


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Write pairs or prompts as parquet."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pandas(frame, schema=_schema(frame), preserve_index=False)
    pyarrow.parquet.write_table(table.replace_schema_metadata(), path)  # without pandas' metadata


def read_pairs(path: Path, client: str | None = None, split: str | None = None) -> list[Pair]:
    """Read prepared pairs, optionally only those of one client or split.

    Raises:
        DataError: the file is missing or is not parquet.
    """
    return [Pair(**row) for row in read_rows(path, client, split)]


def pairs_digest(folder: Path) -> str:
    """sha256 of the clients' pairs of a prepared folder, or of the digests that their owners publish."""
    if not (folder / OWNERS).is_file():
        return file_hash(folder / "pairs.parquet")
    digests = published_digests(folder)
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def published_digests(folder: Path) -> dict[str, str]:
    """By owner, the digest that it has published of its pairs; none where the folder has all pairs."""
    path = folder / OWNERS
    if not path.is_file():
        return {}
    return {name: statement["digest"] for name, statement in read_mapping(path).items()}


def read_prompts(folder: Path, split: str | None = None) -> list[Prompt]:
    """Read the server's prompts of a prepared folder, optionally only those of one split.

    Raises:
        DataError: the file is missing or is not parquet.
    """
    return [Prompt(**row) for row in read_rows(folder / "prompts.parquet", split=split)]


def read_rows(path: Path, client_id: str | None = None, split: str | None = None) -> list[Any]:
    """Read rows of a parquet file by column, optionally only those of one client or split.

    Raises:
        DataError: the file is missing or is not parquet.
    """
    import pyarrow
    import pyarrow.parquet

    values = {"client_id": client_id, "split": split}
    filters = [(column, "=", value) for column, value in values.items() if value is not None]
    try:
        rows: list[Any] = pyarrow.parquet.read_table(path, filters=filters or None).to_pylist()
        return rows
    except (FileNotFoundError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"{path}: expected a parquet file of prepared data ({error}); run the prepare stage first."
        ) from None


def read_judges_rows(folder: Path, who: str) -> tuple[list[Pair], list[Pair]]:
    """Read the training and the held-out pairs of owners that never take part in the federation.

    Raises:
        DataError: one of the two is empty; names the reader, `who`.
    """
    table = folder / "judge.parquet"
    train = read_pairs(table, split="train")
    held_out = read_pairs(table, split="test")
    if not train or not held_out:
        raise DataError(
            f"{table} has {len(train)} training and {len(held_out)} held-out pairs, but {who} needs both, of"
            " owners that are not in the federation: bring more of them by data.options (judge_clients,"
            " judge_share or the file judge, as the source has it)."
        )
    return train, held_out


def read_clients(folder: Path) -> dict[str, dict[str, int]]:
    """Number of pairs by split of each client of a prepared folder, by client id in sorted order."""
    return {name: counts.rows() for name, counts in sorted(read_client_counts(folder).items())}


def read_true_clusters(folder: Path) -> dict[str, str | None]:
    """True cluster of each client, None where the source does not know it, by client id."""
    return {name: counts.group for name, counts in sorted(read_client_counts(folder).items())}


def choose_prompts(folder: Path, split: str, limit: int | None, seed: int) -> list[Prompt]:
    """Choose prepared prompts of a split, all or a seeded sample, in the order of their ids.

    Args:
        folder: prepared data.
        split: 'align' or 'test'.
        limit: maximum number of prompts; None takes all.
        seed: determines the sample.
    """
    rows = sorted(read_prompts(folder, split), key=lambda row: row.prompt_id)
    if limit is None or limit >= len(rows):
        return rows
    chosen = generator(seed, "prompts", split).choice(len(rows), size=limit, replace=False)
    return [rows[i] for i in sorted(chosen)]


def _frame(columns: dict[str, list[Any]]) -> pd.DataFrame:
    import pyarrow as pa

    return pa.table(columns, schema=_schema(columns)).to_pandas()


def _schema(columns: Collection[str]) -> pa.Schema:
    """The types of these columns, in the order that they have in the table of pairs or of prompts."""
    import pyarrow as pa

    types = {"list[str]": pa.list_(pa.string()), "float | None": pa.float64(), "int | None": pa.int64()}
    table = fields(Prompt if "prompt_id" in columns else Pair)
    kinds = {column.name: types.get(str(column.type), pa.string()) for column in table}
    return pa.schema([(name, kind) for name, kind in kinds.items() if name in columns])
