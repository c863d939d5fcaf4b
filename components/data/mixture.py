"""Source `mixture`: several registered sources, each the data of one client (FedPDPO D.1.2, cross-domain: WebGPT, PyDPO, UltraFeedback).

    data: {source: mixture, partition: natural, options: {sources: [{source: webgpt, max_pairs: 13434}, {source: py-dpo}, {source: ultrafeedback, max_pairs: 12895}]}}

A pair's client is the name of its source in the mixture. The judge's pairs and the server's prompts of all are put together.

A prompt that stands in several sources is in one split in all of them. Where a split is drawn, this comes of itself: what is
hashed is the seed and the prompt's text, not the source, and the shares of data.validation and data.test are common. It does not
where a source has a test split or groups of its own, or another spelling. There the most held-out split wins (test, then
validation), and the rows of the others are dropped and counted. A prompt that a client or the judge has is not one for the server
to align on. Groups that a source names itself (a post, a conversation) are its own: they bear its name in the mixture, so that they meet no
other's; else the group is the prompt, in all sources the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from components.config import DataConfig, RecipeError, Section, check_section, unknown_name
from components.data.records import SPLITS, DataError, SourceData
from components.data.registry import SOURCES, TEXT_COLUMNS, CountedSourceData, Source, pairs_dataset, prompts_dataset, source
from components.data.splits import assign, normal, one_spelling, sample

NAME = "mixture"
Row = dict[str, Any]


class PartConfig(Section):
    """One source of a mixture."""

    source: str = Field(min_length=1, description="Registered source, see components/data/sources.py.")
    name: str | None = Field(None, min_length=1, description="Name of the client that owns its pairs; None: the source's own name.")
    path: str | None = Field(None, description="As data.path, for this source.")
    revision: str | None = Field(None, description="As data.revision, for this source.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of this source, checked by the source itself.")
    max_pairs: int | None = Field(None, ge=1, description="Keep at most this many of its pairs (a seeded sample of whole prompts); None keeps all.")

    @property
    def client(self) -> str:
        """The client that owns its pairs."""
        return self.name or self.source


class MixtureOptions(Section):
    """Options of the source mixture."""

    sources: list[PartConfig] = Field(min_length=2, description="The sources, each a client.")

    @model_validator(mode="after")
    def _distinct(self) -> MixtureOptions:
        twice = [name for name, n in Counter(part.client for part in self.sources).items() if n > 1]
        if twice:
            raise ValueError(f"data.options.sources names {', '.join(map(repr, twice))} more than once, but each source is a client of its own: give each a name")
        return self


def inner_sources(options: MixtureOptions, where: str) -> list[tuple[str, Source, Section]]:
    """The sources of a mixture with their checked options, each with the key that it has in the recipe.

    Raises:
        RecipeError: an unknown source or option, or a mixture within the mixture.
    """
    found = []
    for n, part in enumerate(options.sources):
        key = f"data.options.sources[{n}]"
        if part.source == NAME:
            raise RecipeError(f"{where}: {key}.source is '{NAME}', but a mixture is made of other sources: list those of the inner one here")
        if part.source not in SOURCES:
            raise RecipeError(f"{where}: {unknown_name(f'{key}.source', part.source, set(SOURCES) - {NAME})}")
        inner = SOURCES[part.source]
        found.append((key, inner, check_section(inner.options, part.options, where, f"{key}.options")))
    return found


@source(NAME, MixtureOptions, own_columns=True, check=inner_sources)
def load(data: DataConfig, options: MixtureOptions, seed: int) -> SourceData:
    """The pairs of all sources, with the source's name in the mixture as client_id, and as domain where the source knows none.

    What is dropped is counted by source and reason.

    Raises:
        RecipeError: an unknown source or option.
        DataError: data.path or data.revision is given, a source cannot be used, or has no pairs.
    """
    for key in ("path", "revision"):
        if getattr(data, key) is not None:
            raise DataError(f"data.{key} is given, but a mixture has none of its own: give it for each of data.options.sources")
    column = None if data.column in TEXT_COLUMNS else data.column       # that of the record, which is the mixture's to fill
    pairs, judge, prompts, dropped = [], [], [], Counter()
    for part, (key, inner, own_options) in zip(options.sources, inner_sources(options, "data.options"), strict=True):
        given = {"source": part.source, "path": part.path, "revision": part.revision, "options": part.options, "partition": "natural", "clients": None, "column": column}
        try:
            loaded = inner.load(data.model_copy(update=given), own_options, seed)
        except DataError as error:
            raise DataError(f"{key}: " + re.sub(r"\bdata\.(path|revision|options)\b", rf"{key}.\1", str(error))) from error
        for rows, kept in ((loaded.pairs, pairs), (loaded.judge, judge)):
            kept += [_named(row, part.client) for row in rows]
        prompts += loaded.prompts
        dropped.update({f"{part.client}: {reason}": n for reason, n in getattr(loaded, "dropped", {}).items()})

    spelling = one_spelling(row["prompt"] for row in (*pairs, *judge))
    pairs, judge = (_split([row | {"group": row["group"] or spelling[row["prompt"]]} for row in rows], data, seed) for rows in (pairs, judge))
    home: dict[str, str] = {}
    for row in (*pairs, *judge, *(row for row in prompts if row["split"] == "test")):
        home[normal(row["prompt"])] = max(row["split"], home.get(normal(row["prompt"]), "train"), key=SPLITS.index)
    for row in (*pairs, *judge):
        dropped[f"{row['mixed']}: prompt held out in another source"] += row["split"] != home[normal(row["prompt"])]
    pairs, judge = ([row for row in rows if row["split"] == home[normal(row["prompt"])]] for rows in (pairs, judge))

    kept = []
    for n, part in enumerate(options.sources):
        own = [row for row in pairs if row["mixed"] == part.client]
        if not own:
            raise DataError(f"data.options.sources[{n}]: the source {part.client} has no pairs for its client, after the shares of the judge and the server and what other sources hold out")
        if part.max_pairs is not None and len(own) > part.max_pairs:
            drawn = sample([row["prompt"] for row in own], [row["split"] for row in own], part.max_pairs, seed)
            own, before = [row for row in own if row["prompt"] in drawn], len(own)
            dropped[f"{part.client}: over max_pairs"] += before - len(own)
        kept += [row | {"client_id": part.client} for row in own]
    return CountedSourceData(
        pairs_dataset(kept, None), prompts_dataset(_merged(prompts, home), NAME), pairs_dataset(judge, None), dropped={reason: n for reason, n in dropped.items() if n})


def _named(row: Row, client: str) -> Row:
    """A source's row with the name of its source, and with a group only where it is not the prompt in some spelling."""
    group = row.get("group")
    own = group and normal(group) != normal(row["prompt"])
    return row | {"mixed": client, "group": f"{client}/{group}" if own else "", "domain": row["domain"] or client}


def _split(rows: Sequence[Row], data: DataConfig, seed: int) -> list[Row]:
    """Rows with a split, as their source gives it or drawn by group."""
    parts = assign((row["group"] for row in rows), data.validation, data.test, seed)
    return [row | {"split": row["split"] or part} for row, part in zip(rows, parts, strict=True)]


def _merged(prompts: Sequence[Row], home: dict[str, str]) -> list[tuple[str, list[str], str]]:
    """The server's prompts, each once with the references of all sources, without those to align on that are someone's."""
    merged: dict[str, tuple[str, list[str], str]] = {}
    for row in prompts:
        key = normal(row["prompt"])
        if row["split"] == "test" or key not in home:
            _, known, _ = merged.setdefault(key, (row["prompt"], [], row["split"]))
            known += [text for text in row["references"] if text not in known]
    return list(merged.values())
