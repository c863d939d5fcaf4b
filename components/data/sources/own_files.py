"""Sources `jsonl`, `parquet` and `csv`: the user's own preference pairs from a file or a folder.

Three columns are required: prompt, chosen, rejected. They are texts, or lists of messages as in TRL's
conversational data sets, see `conversations`; then the prompt may be left out. Optional ones are
client_id (owner), domain, group (rows that must stay with one client and in one split), split (train,
validation or test) and margin (a number), and a column of text of any name, if data.column names it.
Owners and the like may be whole numbers, which are read as text. data.columns renames columns.

In a folder whose files, subfolders or saved data sets have the names of splits, such as
train-00000-of-00002.parquet, these are the splits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model

from components.config import DataConfig, unknown_name
from components.data.conversations import ConversationRow, noted, noted_warnings
from components.data.raw import AS_TEXT, AnyText, Key, Label, if_null
from components.data.records import TEXTS, DataError, Pair, SourceData
from components.data.rows import file_kinds, find_splits, read_file
from components.data.sources.source import AlignShare, Source
from components.data.splits import Shares, connection_warning, grouped, hold_out, in_splits, with_splits


def _whole_number(value: Any) -> Any:
    """A whole number that a table holds as a float, since other rows of its column have none."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


OwnLabel = Annotated[Label, AS_TEXT, BeforeValidator(_whole_number)]
"""A name, or a whole number as text; null is empty."""


class OwnRow(ConversationRow):
    """A pair of a user's own file."""

    may_be_renamed: ClassVar[bool] = True

    prompt: AnyText
    chosen: AnyText
    rejected: AnyText
    client_id: OwnLabel = ""
    domain: OwnLabel = ""
    group: Annotated[Key, AS_TEXT] = ""
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


class FileSource(Source):
    """Options of the sources jsonl, parquet and csv."""

    columns: ClassVar[tuple[str, ...]] = tuple(OwnRow.model_fields)
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
            DataError: see read_pairs; or a prompt connects so many groups that a split is empty.
        """
        told: Counter[str] = Counter()
        by_split, invalid = self.read(data, told=told)
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
        warnings = noted_warnings(told)
        if invalid:
            warnings.append(f"invalid rows: {len(invalid)} ({what}), the first: {invalid[0]}.")
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

    def read(
        self, data: DataConfig, limit: int | None = None, told: Counter[str] | None = None
    ) -> tuple[dict[str, list[Pair]], list[str]]:
        """Read pairs by split, and a sentence for each invalid row that is left out.

        Args:
            data: the recipe's section.
            limit: maximum number of rows of each split; None reads all.
            told: see read_pairs.

        Raises:
            DataError: see read_pairs.
        """
        if data.path is None:
            raise DataError(f"the data source {self.name} reads your own pairs: give the file as data.path")
        by_split: dict[str, list[Pair]] = {}
        invalid: list[str] = []
        for split, path in find_splits(Path(data.path)).items():
            others = file_kinds(path) - set(self.suffixes)
            if others:
                kinds = ", ".join(kind.name for kind in (JsonlFile, ParquetFile, CsvFile))
                raise DataError(
                    f"{path}: the data source {self.name} reads {' or '.join(self.suffixes)} files, but here"
                    f" are {' and '.join(sorted(others))}: for another kind, choose another data.source"
                    f" ({kinds})"
                )
            by_split[split], refused = read_pairs(path, data, self.row, limit, told)
            for pair in by_split[split]:
                if split and pair.split not in ("", split):
                    raise DataError(
                        f"{path}: column 'split' is '{pair.split}' in the pair of the prompt"
                        f" {pair.prompt[:40]!r}, but the file is of the split {split}: correct the column, or"
                        " leave it out"
                    )
            invalid += refused
        return by_split, invalid


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


def read_pairs(
    path: Path,
    data: DataConfig,
    row: type[OwnRow] = OwnRow,
    limit: int | None = None,
    told: Counter[str] | None = None,
) -> tuple[list[Pair], list[str]]:
    """Read and check the pairs of a file or folder; columns without a meaning are ignored.

    Args:
        path: see rows.read_file.
        data: the recipe's section. If data.column is none of OwnRow's texts, its value is the pair's
            `column`.
        row: model of the rows.
        limit: maximum number of rows that are read; None reads all.
        told: counts the rows whose messages are JSON texts, see conversations.noted.

    Returns:
        the pairs, and a sentence for each invalid row, which does not fit the model or has an empty text.
        If data.drop_invalid is 0, pairs with empty texts are among the pairs.

    Raises:
        DataError: the file is missing or is not of its kind, or the share of the invalid rows is above
            data.drop_invalid; if that is 0, a row does not fit the model.
    """
    if data.column is not None and data.column not in row.model_fields.keys() - {"margin"}:
        row = create_model(row.__name__, __base__=row, column=(OwnLabel, Field(alias=data.column)))
    raw_rows = read_file(path, limit)
    pairs: list[Pair] = []
    invalid: list[str] = []
    told = Counter() if told is None else told
    for number, raw in enumerate(noted(raw_rows, told, str(path), data.columns), 1):
        where = f"{path}, row {number}"
        try:
            missing = next((own for own in data.columns.values() if own not in raw), None)
            if missing is not None:
                raise DataError(f"{where}: {unknown_name('data.columns: the column', missing, raw)}")
            read = row.read_one(raw | {name: raw[own] for name, own in data.columns.items()}, where)
            pair = Pair(**read.model_dump() | {"group": read.group or None})
        except DataError as error:
            if not data.drop_invalid:
                raise
            invalid.append(str(error))
            continue
        empty = next((column for column in TEXTS if not getattr(pair, column).strip()), None)
        if empty:
            invalid.append(f"{where}: column '{empty}' is empty")
        if not (empty and data.drop_invalid):
            pairs.append(pair)
    allowed = data.drop_invalid * len(raw_rows)
    if data.drop_invalid and limit is None and (not pairs or len(invalid) > allowed):
        raise DataError(
            f"{path}: {len(invalid)} of {len(raw_rows)} rows are invalid, more than data.drop_invalid"
            f" ({data.drop_invalid:g} of the rows) allows; the first: {invalid[0]}"
        )
    return pairs, invalid
