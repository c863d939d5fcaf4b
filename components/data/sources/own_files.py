"""Sources `jsonl`, `parquet` and `csv`: the user's own preference pairs from a file or a folder.

Three columns are read as texts, or as lists of messages as in TRL's conversational data sets, see
`conversations`: prompt, chosen, rejected. In a file without the column prompt, the prompt is what chosen
and rejected begin with, see `common_prompt`. Optional columns are client_id (owner), domain, group (rows that
must stay with one client and in one split), split (train, validation or test) and margin (a number), and
a column of text of any name, if data.column names it. Owners and the like may be whole numbers, which
are read as text. data.columns renames columns.

In a folder whose files, subfolders or saved data sets have the names of splits, such as
train-00000-of-00002.parquet, these are the splits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, create_model

from components.config import DataConfig, unknown_name
from components.data.common_prompt import with_common_prompt
from components.data.conversations import ConversationRow, MessageColumns, Row, message_columns
from components.data.raw import AS_TEXT, Key, Label, NeededText, if_null
from components.data.records import TEXTS, DataError, Pair, SourceData
from components.data.rows import file_kinds, find_splits, read_file, split_name_warning
from components.data.sources.source import AlignShare, Source
from components.data.splits import (
    Shares,
    connection_warning,
    grouped,
    hold_out,
    in_splits,
    with_splits,
)

EXACT = 2**53
"""From here on, neighbouring whole numbers are one float."""


def _whole_number(value: Any) -> Any:
    """A whole number that a table holds as a float, since other rows of its column have none."""
    if not isinstance(value, float):
        return value
    if math.isfinite(value) and abs(value) >= EXACT:
        raise ValueError(
            "is a number above 2^53 that is stored as a float, which is the same for several whole numbers:"
            " write ids as text, or as whole numbers"
        )
    return None if math.isnan(value) else int(value) if value.is_integer() else value


OwnLabel = Annotated[Label, AS_TEXT, BeforeValidator(_whole_number)]
"""A name, or a whole number as text; null is empty."""


class OwnRow(ConversationRow):
    """A pair of a user's own file."""

    may_be_renamed: ClassVar[bool] = True

    prompt: NeededText
    chosen: NeededText
    rejected: NeededText
    client_id: OwnLabel = ""
    domain: OwnLabel = ""
    group: Annotated[Key, AS_TEXT, BeforeValidator(_whole_number)] = ""
    split: Annotated[Literal["", "train", "validation", "test"], if_null("")] = ""
    margin: float | None = None


def _number(text: Any) -> Any:
    """A number of a csv file, None where it is empty; the field checks other values."""
    if not isinstance(text, str):
        return text
    try:
        return float(text) if text.strip() else None
    except ValueError:
        return text


class CsvRow(OwnRow):
    """A pair of a csv file, whose values are texts."""

    margin: Annotated[float | None, BeforeValidator(_number)] = None


class FileRows(NamedTuple):
    """What was read of a file or a folder."""

    pairs: list[Pair]
    invalid: dict[str, str]  # by place, why a row does not fit the model, or which of its texts is empty
    messages: MessageColumns  # which of its columns hold messages
    read: list[tuple[Row, Row]]  # the rows of the pairs, as they are and with lists of messages

    @property
    def warnings(self) -> list[str]:
        """Sentences on how the columns were read."""
        return self.messages.warnings(self.read)


class FileSource(Source):
    """Options of the sources jsonl, parquet and csv."""

    columns: ClassVar[tuple[str, ...]] = tuple(OwnRow.model_fields)
    reads_messages: ClassVar[bool] = True
    is_local: ClassVar[bool] = True
    not_judgements: ClassVar[str] = ""
    name: ClassVar[str]  # name of the source
    suffixes: ClassVar[tuple[str, ...]]  # suffixes of the files that it reads
    row: ClassVar[type[OwnRow]] = OwnRow  # model of its rows

    align_share: AlignShare = 0.2
    judge_clients: float = Field(
        0.1,
        ge=0,
        lt=1,
        description=(
            "Share of the owners whose pairs train the judge; of the prompts where there are fewer than"
            " 10 owners."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load pairs from a file or a folder.

        A folder's split of validation or test stays, and pairs of other splits whose prompt or group is
        in it are dropped and counted.

        Raises:
            DataError: see read; or a prompt connects so many groups that a split is empty.
        """
        read = self.read(data)
        by_split = {split: rows.pairs for split, rows in read.items()}
        invalid = {place: why for rows in read.values() for place, why in rows.invalid.items()}
        (messages, *_) = [rows.messages for rows in read.values()]
        warnings = messages.warnings([pair for rows in read.values() for pair in rows.read])
        names = split_name_warning(Path(str(data.path))) if "" in read else ""
        warnings += filter(None, [names])
        whole = by_split.pop("", None)
        if whole is None:
            if "train" not in by_split:
                raise DataError(f"{data.path}: there is no split train in this folder: bring its pairs too")
            warning = connection_warning(by_split["train"])
            pairs, duplicates = in_splits(by_split, data, seed)
        else:
            warning = connection_warning(whole)
            pairs, duplicates = with_splits(grouped(whole), data.validation, data.test, seed), 0
        left_out = len(invalid) if data.drop_invalid else 0
        counts = {"prompt also in a held-out split": duplicates, "invalid row": left_out}
        dropped = {reason: count for reason, count in counts.items() if count}
        what = "left out" if left_out else "kept, and data.drop_invalid leaves them out"
        if invalid:
            place, why = next(iter(invalid.items()))
            first = f"{place}: {why.partition(';')[0]}"  # without names of columns that are there
            warnings.append(f"invalid rows: {len(invalid)} ({what}), the first: {first}.")
        try:
            held = hold_out(pairs, self.name, Shares(self.align_share, self.judge_clients), seed, dropped)
        except DataError:
            if not warning:
                raise
            held = None
        if warning:
            warnings.append(f"{data.path}: {warning}.")
            if held is None or all(pair.split != "test" for pair in held.pairs):
                raise DataError(warnings[-1])
        assert held is not None
        return replace(held, warnings=tuple(warnings))

    def read(self, data: DataConfig, limit: int | None = None) -> dict[str, FileRows]:
        """Read and check pairs by split; '' where the files have no names of splits.

        Columns without a meaning are ignored.

        Args:
            data: the recipe's section. If data.column is none of OwnRow's texts, its value is the pair's
                `column`. If data.drop_invalid is 0, pairs with empty texts are among the pairs.
            limit: maximum number of rows of each split; None reads all.

        Raises:
            DataError: data.path is null, or there is no such file or it is of another kind, or the share of
                the invalid rows is above data.drop_invalid; if that is 0, a row does not fit.
        """
        if data.path is None:
            raise DataError(f"the data source {self.name} reads your own pairs: give the file as data.path")
        paths = find_splits(Path(data.path))
        rows: dict[str, list[dict[str, Any]]] = {}
        for split, path in paths.items():
            others = file_kinds(path) - set(self.suffixes)
            if others:
                kinds = ", ".join(kind.name for kind in (JsonlFile, ParquetFile, CsvFile))
                raise DataError(
                    f"{path}: the data source {self.name} reads {' or '.join(self.suffixes)} files, but here"
                    f" are {' and '.join(sorted(others))}: for another kind, choose another data.source"
                    f" ({kinds})"
                )
            rows[split] = read_file(path, limit)
        everything = list(chain.from_iterable(rows.values()))
        messages = message_columns(everything, data.path.name, data.messages, data.columns)
        return {
            split: _read_rows(paths[split], own, messages, data, self.row, limit is None, split)
            for split, own in rows.items()
        }


class JsonlFile(FileSource):
    """Options of the source jsonl: one JSON object a line, or one list of them (.json)."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


class ParquetFile(FileSource):
    """Options of the source parquet; folders that save_to_disk of `datasets` wrote are read too."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".arrow")


class CsvFile(FileSource):
    """Options of the source csv: values separated by commas, below a line of the columns' names."""

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz")
    row: ClassVar[type[OwnRow]] = CsvRow


def _read_rows(
    path: Path,
    raw_rows: Sequence[Row],
    messages: MessageColumns,
    data: DataConfig,
    row: type[OwnRow],
    is_whole: bool,
    split: str,
) -> FileRows:
    if data.column is not None and data.column not in row.model_fields.keys() - {"margin"}:
        row = create_model(row.__name__, __base__=row, column=(OwnLabel, Field(alias=data.column)))
    pairs: list[Pair] = []
    invalid: dict[str, str] = {}
    read: list[tuple[Row, Row]] = []
    for number, raw in enumerate(raw_rows, 1):
        where = f"{path}, row {number}"
        try:
            lists = messages.lists(raw, where)
            pair = _read_pair(lists, row, data, where, split, messages.has_prompt)
        except DataError as error:
            if not data.drop_invalid:
                raise
            invalid[where] = str(error).removeprefix(f"{where}: ")
            continue
        empty = next((column for column in TEXTS if not getattr(pair, column).strip()), None)
        if empty:
            invalid[where] = f"column '{empty}' is empty"
        if not (empty and data.drop_invalid):
            pairs.append(pair)
            read.append((raw, lists))
    allowed = data.drop_invalid * len(raw_rows)
    if data.drop_invalid and is_whole and (not pairs or len(invalid) > allowed):
        place, why = next(iter(invalid.items()))
        raise DataError(
            f"{path}: {len(invalid)} of {len(raw_rows)} rows are invalid, more than data.drop_invalid"
            f" ({data.drop_invalid:g} of the rows) allows; the first: {place}: {why}"
        )
    return FileRows(pairs, invalid, messages, read)


def _read_pair(
    raw: Row, row: type[OwnRow], data: DataConfig, where: str, split: str, has_prompt: bool
) -> Pair:
    missing = next((own for own in data.columns.values() if own not in raw), None)
    if missing is not None:
        hint = unknown_name("data.columns: the column", missing, raw)
        raise DataError(f"{where}: column '{missing}' is missing; {hint}")
    renamed: Row = {**raw, **{name: raw[own] for name, own in data.columns.items()}}
    values = row.read_one(renamed if has_prompt else with_common_prompt(renamed, where), where)
    pair = Pair(**values.model_dump() | {"group": values.group or None})
    if split and pair.split not in ("", split):
        raise DataError(
            f"{where}: column 'split' is '{pair.split}', but the file is of the split {split}: correct the"
            " column, or leave it out"
        )
    return pair
