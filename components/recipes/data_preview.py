"""What the data of a recipe give, before a run starts: they are read and divided as a run does it.

Data of the hub are not read, since that may take hours. Of files above MAX_BYTES the first HEAD rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from components.config import DataConfig, InputFile, Recipe
from components.data.data_report import RowCounts
from components.data.prepare import DataSet, assemble, check_rows, expected
from components.data.records import TEXTS, DataError, Pair, write_table
from components.data.sources.own_files import FileSource
from components.data.sources.owners import has_owners, owner_names
from components.evaluation.control_tokens import with_control_tokens
from components.evaluation.pair_warnings import reading_warnings
from components.federation.protocol import build_federation
from components.models.backbone import BackboneError
from components.models.chat_template import ChatTemplateError
from components.models.policy import PolicyError
from components.recipes.inputs import hash_path, is_larger, map_named, named_files, with_original_names
from components.recipes.validation_process import ValidationProcess, validation_process
from components.reporting.lines import left_out_line

MAX_BYTES = 256 * 2**20
KEPT_BYTES = 32 * 2**20
"""Of files whose pairs stay in memory for the next recipe that has the same data."""
HEAD = 1000
"""Rows of larger files that are read."""
SHOWN = 5
"""Names of clients without training pairs that are shown."""


@dataclass(frozen=True)
class DataPreview:
    """The data of a recipe, before they are validated."""

    rows: RowCounts | None = None  # numbers of rows; None where not all rows were read
    clients: int | None = None  # number of clients that have training pairs; None likewise
    without_training: tuple[str, ...] = ()  # names of the other clients, which train in no round
    splits: Mapping[str, int] = field(default_factory=dict)  # numbers of the pairs of all clients
    sizes: tuple[int, int] = (0, 0)  # smallest and largest number of pairs of a client with training pairs
    warnings: tuple[str, ...] = ()  # what may be wrong with the rows, as sentences
    unread: str = ""  # why not all rows were read, as a sentence; empty where they were
    expectations: Callable[[], list[str]] = list  # waits for those on the data, and gives their warnings


_last: dict[str, DataSet] = {}
"""The data that this process read last, by what they depend on: a run and arms of a benchmark share them."""


def assembled(data: DataConfig, seed: int) -> DataSet:
    """What `assemble` gives. Local data that this process has read last are not read again.

    Raises:
        DataError: see assemble.
    """
    files = _files(data)
    if is_larger(files, KEPT_BYTES) or any(_hub_keys(data)):
        return assemble(data, seed)
    named = map_named(data, lambda _, one: InputFile(one.name) if isinstance(one, InputFile) else one)
    key = " ".join([str(seed), named.model_dump_json(), *map(hash_path, files)])
    data_set = _last.get(key)
    if data_set is None:
        read = assemble(data, seed)  # perhaps from the copies of a run, which its warnings name
        data_set = replace(read, warnings=tuple(with_original_names(data, one) for one in read.warnings))
        _last.clear()
        _last[key] = data_set
    return data_set


def _files(data: DataConfig) -> list[Path]:
    return [Path(file) for _, file in named_files(data) if isinstance(file, InputFile)]


def preview_data(recipe: Recipe, with_expectations: bool = False) -> DataPreview:
    """Read the data of a recipe as far as they are here.

    Args:
        recipe: the recipe.
        with_expectations: whether they are checked too, beside this; `expectations` of the preview gives
            what they say, or raises ExpectationsFailed. A run checks them itself, and keeps the Data Docs of
            data that fail.

    Raises:
        UserError: a run would fail with these data; in one sentence.
    """
    data = recipe.data
    if recipe.thoughts is not None:
        return DataPreview(unread="the data were not read: the run grows the trees that they come from")
    if has_owners(recipe):
        names = ", ".join(owner_names(recipe))
        return DataPreview(
            unread=f"the pairs stay with their owners ({names}), who see them by `owner check`"
        )
    if from_hub := ", ".join(_hub_keys(data)):
        return DataPreview(unread=f"the data were not read: they come from the hub ({from_hub})")
    if is_larger(_files(data), MAX_BYTES):
        large = f"their files have more than {MAX_BYTES:,} bytes"
        if isinstance(data.options, FileSource):
            data.options.read(data, HEAD)
            return DataPreview(unread=f"of the data, the first {HEAD:,} rows were read, since {large}")
        return DataPreview(unread=f"the data were not read: {large}")
    beside = validation_process() if with_expectations else None
    return _checked(recipe, assembled(data, recipe.seed), beside)


def _checked(recipe: Recipe, data_set: DataSet, beside: ValidationProcess | None) -> DataPreview:
    data_set = with_control_tokens(recipe, data_set)
    check_rows(recipe, data_set.splits, data_set.rows.prompts)
    if beside is not None:
        beside.start(data_set.tables, expected(data_set, recipe.data))
    active = {name: sum(rows.rows().values()) for name, rows in data_set.clients.items() if rows.train}
    counts = {name: rows.rows() for name, rows in data_set.clients.items()}
    groups = {name: rows.group for name, rows in data_set.clients.items()}
    clients_per_round, unseen = recipe.federation.clients_per_round, recipe.data.unseen_clients
    federation = build_federation(counts, "", clients_per_round, groups, unseen)
    recipe.federation.options.start(federation, recipe.seed)  # which may need more clients, or their pairs
    judge = recipe.evaluation.judge
    if judge.uses_judge_pairs:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "judge.parquet"
            write_table(path, data_set.tables["judge"])
            try:
                judge.check_data(Path(folder))
            except DataError as error:
                raise DataError(str(error).replace(f"{path} has", "the judge has")) from None
    warnings = list(data_set.warnings)
    with suppress(BackboneError, ChatTemplateError, PolicyError):  # which the check of models explains
        day = recipe.policy.chat_date or date.today().isoformat()
        dated = recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"chat_date": day})})
        rows = data_set.tables["pairs"][[*TEXTS]].itertuples(index=False)
        pairs = [Pair(*texts) for texts in rows]
        warnings += reading_warnings(dated, pairs, data_set.tables["prompts"]["prompt"])
    return DataPreview(
        rows=data_set.rows,
        clients=len(active),
        without_training=tuple(name for name in data_set.clients if name not in active),
        splits=data_set.splits,
        sizes=(min(active.values()), max(active.values())),
        warnings=tuple(warnings),
        expectations=beside.warnings if beside is not None else list,
    )


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


def describe_data(preview: DataPreview) -> str:
    """The data in lines: pairs and clients, what is left out, and warnings; or why they were not read."""
    rows = preview.rows
    if rows is None:
        return preview.unread
    prompts = ", ".join(f"{count:,} {split}" for split, count in rows.prompts.items()) or "none"
    splits = ", ".join(f"{count:,} {split}" for split, count in preview.splits.items())
    sizes = " to ".join(f"{size:,}" for size in preview.sizes)
    others = [*preview.without_training[:SHOWN], *(["..."] if preview.without_training[SHOWN:] else [])]
    lines = [
        f"data: {rows.pairs:,} pairs of {preview.clients:,} clients ({splits}; {sizes} a client),"
        f" {rows.judge:,} pairs of the judge, prompts of the server: {prompts}",
        f"clients without a training pair, which train in no round: {len(preview.without_training)}"
        f" ({', '.join(others)})"
        if others
        else "",
        left_out_line(rows),
        *(f"warning: {warning}" for warning in preview.warnings),
    ]
    return "\n".join(filter(None, lines))
