"""What the data of a recipe give, before a run starts: they are read and divided as a run does it.

Data of the hub are not read, since that may take hours. Of files above MAX_BYTES the first HEAD rows are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from components.config import DataConfig, InputFile, Recipe
from components.data.prepare import assemble, check_rows, expected
from components.data.records import DataError
from components.data.repeats import count_repeats, repeat_warnings
from components.data.report import RowCounts
from components.data.sources.files import FileOptions
from components.data.tables import write_table
from components.data.validation import validate
from components.evaluation.judges.base import judge_section
from components.federation.protocol import check_participants
from components.inputs import hash_path, named_files
from components.reporting.lines import left_out_line

MAX_BYTES = 256 * 2**20
HEAD = 1000
"""Rows of larger files that are read."""


@dataclass(frozen=True)
class DataPreview:
    """The data of a recipe, before they are validated.

    Attributes:
        rows: numbers of rows; None where not all rows were read.
        clients: number of clients that have training pairs; None likewise.
        warnings: what may be wrong with the rows, as sentences.
        unread: why not all rows were read; empty where they were.
        validated: whether the rows meet the expectations.
    """

    rows: RowCounts | None = None
    clients: int | None = None
    warnings: tuple[str, ...] = ()
    unread: str = ""
    validated: bool = False

    @property
    def server_prompts(self) -> int | None:
        """Number of the prompts to align on; None where it is not known."""
        return None if self.rows is None else self.rows.prompts.get("align", 0)


_known: dict[str, DataPreview] = {}
"""The last preview of this process, by what it depends on: a command and its flow ask for the same."""


def preview_data(recipe: Recipe, validated: bool = False) -> DataPreview:
    """Read the data of a recipe as far as they are here.

    Args:
        recipe: the recipe.
        validated: whether the expectations are checked too, which imports Great Expectations. A run does so
            itself, and keeps the Data Docs of data that fail.

    Raises:
        UserError: a run would fail with these data; in one sentence.
    """
    data = recipe.data
    if recipe.thoughts is not None:
        return DataPreview(unread="their pairs are those of the trees of thoughts that the run grows")
    if from_hub := ", ".join(_hub_keys(data)):
        return DataPreview(unread=f"they come from the hub ({from_hub})")
    files = [Path(file) for _, file in named_files(data) if isinstance(file, InputFile)]
    if sum(map(_size, files)) > MAX_BYTES:
        limit = f"{MAX_BYTES:,} bytes"
        if isinstance(data.options, FileOptions):
            data.options.read(data, HEAD)
            return DataPreview(unread=f"only the first {HEAD:,} rows were, since the files have over {limit}")
        return DataPreview(unread=f"the files have over {limit}")
    key = f"{recipe.seed} {data.model_dump_json()} {recipe.federation.model_dump_json()}"
    key += " ".join(map(hash_path, files))
    if key not in _known or (validated and not _known[key].validated):
        _known.clear()
        _known[key] = _read(recipe, validated)
    return _known[key]


def _read(recipe: Recipe, validated: bool) -> DataPreview:
    data_set = assemble(recipe.data, recipe.seed)
    check_rows(recipe, data_set.splits, data_set.rows.prompts)
    active = sum(client.train > 0 for client in data_set.clients.values())
    check_participants(active, recipe.federation.clients_per_round)
    judge = judge_section(recipe.evaluation.judge)
    if judge.pair_reader() is not None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "judge.parquet"
            write_table(path, data_set.tables["judge"])
            try:
                judge.check_data(Path(folder))
            except DataError as error:
                raise DataError(str(error).replace(f"{path} has", "the judge has")) from None
    warnings = list(data_set.warnings)
    if validated:
        warnings += validate(data_set.tables, expected(data_set, recipe.data), None).warnings
        warnings += repeat_warnings(count_repeats(data_set.tables["pairs"], data_set.tables["judge"]))
    return DataPreview(data_set.rows, active, tuple(warnings), validated=validated)


def _hub_keys(data: DataConfig) -> Iterator[str]:
    """The keys of sources that may be read from the hub."""
    parts = {
        f"data.options.sources[{n}]": part for n, part in enumerate(getattr(data.options, "sources", []))
    }
    for key, part in (parts or {"data": data}).items():
        if part.path is None and not part.options.is_local:
            yield f"{key}.source {part.source}"
    for key in ("align_prompts", "test_prompts"):
        section = getattr(data, key)
        if section is not None and section.path is None:
            yield f"data.{key}.source {section.source}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*"))


def describe_data(preview: DataPreview) -> str:
    """The data in lines: pairs and clients, what is left out, and warnings; or why they were not read."""
    rows = preview.rows
    if rows is None:
        return f"the data were not read: {preview.unread}"
    prompts = ", ".join(f"{count:,} {split}" for split, count in rows.prompts.items()) or "none"
    lines = [
        f"data: {rows.pairs:,} pairs of {preview.clients:,} clients that train, {rows.judge:,} pairs of the"
        f" judge, prompts of the server: {prompts}",
        left_out_line(rows),
        *(f"warning: {warning}" for warning in preview.warnings),
    ]
    return "\n".join(filter(None, lines))
