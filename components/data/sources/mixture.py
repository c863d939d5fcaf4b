"""Source `mixture`: several sources, each the data of one client (FedPDPO D.1.2, cross-domain).

    data:
      source: mixture
      partition: natural
      options:
        sources:
          - {source: webgpt, max_pairs: {train: 12000, test: 1434}}
          - {source: py-dpo, test: 0.053}
          - {source: ultrafeedback, max_pairs: {train: 12000}}

A pair's client is the name of its source in the mixture. The judge's pairs and the server's prompts
of all sources are concatenated.

A prompt that is in several sources is in one split in all of them. Where a split is drawn, this
holds already: the hash is of the seed and the prompt's text, not of the source, and the shares of
data.validation and data.test are common. It does not hold where a source has a test split, a test
share or groups of its own, or another spelling. There the most held-out split is used (test, then
validation), and the rows of the others are dropped and counted. A prompt of a client or the judge is
not one for the server to align on. Groups that a source names itself (a post, a conversation) are
prefixed with its name in the mixture, so that they differ from those of other sources; otherwise the
group is the prompt, in all sources the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from components.config import DataConfig, InputFile, Section
from components.config.data import AnySource, AnySourceOptions
from components.config.name_checks import PlainName
from components.data.records import SPLITS, TEXT_COLUMNS, DataError, Pair, Prompt, SourceData
from components.data.same_text import same_text
from components.data.sources.own_files import FileSource
from components.data.sources.source import Source, load
from components.data.splits import sample, with_groups, with_splits

NAME = "mixture"


class SplitLimits(Section):
    """Maximum numbers of pairs of each split."""

    train: int | None = Field(None, ge=1, description="Of the training split; null keeps all.")
    validation: int | None = Field(None, ge=1, description="Of the validation split; null keeps all.")
    test: int | None = Field(None, ge=1, description="Of the test split; null keeps all.")


class PartConfig(Section):
    """One source of a mixture."""

    source: AnySource = Field(
        min_length=1, description="Registered source of pairs (components/data/sources)."
    )
    name: PlainName | None = Field(
        None, min_length=1, description="Name of the client that owns its pairs; null: the source's own name."
    )
    path: InputFile | None = Field(None, description="As data.path, for this source.")
    revision: str | None = Field(None, description="As data.revision, for this source.")
    options: AnySourceOptions = Field(
        default_factory=dict, validate_default=True, description="Options of this source."
    )
    test: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "As data.test, for this source; null: data.test. A source's own test split has precedence."
        ),
    )
    max_pairs: Annotated[int, Field(ge=1)] | SplitLimits | None = Field(
        None,
        description=(
            "Maximum number of its pairs (a seeded sample of whole prompts, each split in proportion), or one"
            " of each split, e.g. {train: 12000, test: 895}; null keeps all."
        ),
    )

    @field_validator("source")
    @classmethod
    def _refuse_mixture(cls, source: str) -> str:
        if source == NAME:
            raise ValueError(
                "a mixture is made of other sources: list those of the inner mixture here instead"
            )
        return source

    @property
    def client(self) -> str:
        """The client that owns its pairs."""
        return self.name or self.source


class Mixture(Source):
    """Options of the source mixture."""

    columns: ClassVar[tuple[str, ...]] = FileSource.columns
    not_judgements: ClassVar[str] = ""  # those of its parts
    reads_messages: ClassVar[bool] = True

    sources: list[PartConfig] = Field(min_length=2, description="The sources, each a client.")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        counts = Counter(part.client for part in self.sources)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(
                f"data.options.sources names {', '.join(map(repr, repeated))} more than once, but each source"
                " is a client of its own: give each a name"
            )
        return self

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs of all sources.

        The name of the source in the mixture is the client_id, and the domain where the source
        knows none. Dropped rows are counted by source and reason.
        """
        for key in ("path", "revision"):
            if getattr(data, key) is not None:
                raise DataError(
                    f"data.{key} is given, but a mixture has none of its own: give it for each of"
                    " data.options.sources"
                )
        if (data.columns or data.drop_invalid) and not any(part.options.columns for part in self.sources):
            raise DataError(
                "data.columns and data.drop_invalid are for files, but none of the sources reads one"
            )
        parts = self._load_parts(data, seed)
        splits = _split_of_prompt(parts.values())
        dropped: Counter[str] = Counter()
        for name, part in parts.items():
            dropped += Counter({f"{name}: {reason}": count for reason, count in part.dropped.items()})
        pairs = {name: _consistent(name, part.pairs, splits, dropped) for name, part in parts.items()}
        judge = {name: _consistent(name, part.judge, splits, dropped) for name, part in parts.items()}
        sampled = self._sample(pairs, dropped, seed)
        prompts = _merge_prompts(chain.from_iterable(part.prompts for part in parts.values()), splits)
        warnings = tuple(f"{name}: {warning}" for name, part in parts.items() for warning in part.warnings)
        judged = list(chain.from_iterable(judge.values()))
        return SourceData(sampled, prompts, judged, dropped=dict(dropped), warnings=warnings)

    def _load_parts(self, data: DataConfig, seed: int) -> dict[str, SourceData]:
        """What the sources return, by client; each pair with a group and a split."""
        loaded: dict[str, SourceData] = {}
        for i, part in enumerate(self.sources):
            key = f"data.options.sources[{i}]"
            settings = {
                "source": part.source,
                "path": part.path,
                "revision": part.revision,
                "options": part.options,
                "test": part.test or data.test,
                "partition": "natural",
                "clients": None,
                # a column of the record has values only after the sources are combined
                "column": None if data.column in TEXT_COLUMNS else data.column,
            }
            try:
                loaded[part.client] = load(data.model_copy(update=settings), seed)
            except DataError as error:
                message = re.sub(r"\bdata\.(path|revision|options)\b", rf"{key}.\1", str(error))
                raise DataError(f"{key}: {message}") from error
        tables: list[list[Pair]] = []
        for part in self.sources:
            source = loaded[part.client]
            tables += [[_part_pair(pair, part) for pair in pairs] for pairs in (source.pairs, source.judge)]
        with_group = iter(with_groups(*tables))
        for part in self.sources:
            pairs, judge = (
                with_splits(next(with_group), data.validation, part.test or data.test, seed) for _ in range(2)
            )
            loaded[part.client] = replace(loaded[part.client], pairs=pairs, judge=judge)
        return loaded

    def _sample(self, pairs: Mapping[str, list[Pair]], dropped: Counter[str], seed: int) -> list[Pair]:
        """The pairs with their clients, at most max_pairs of each source; counts the dropped ones."""
        sampled: list[Pair] = []
        for i, part in enumerate(self.sources):
            own = pairs[part.client]
            if not own:
                raise DataError(
                    f"data.options.sources[{i}]: the source {part.client} has no pairs for its client, after"
                    " the shares of the judge and the server and what other sources hold out"
                )
            remaining = _limit(own, part.max_pairs, seed)
            dropped += Counter({f"{part.client}: over max_pairs": len(own) - len(remaining)})
            sampled += [replace(pair, client_id=part.client) for pair in remaining]
        return sampled


def _limit(pairs: list[Pair], limits: int | SplitLimits | None, seed: int) -> list[Pair]:
    """A sample of whole prompts with at most as many pairs as the limits say, of all splits or of each."""
    parts = (
        [(pairs, limits)]
        if not isinstance(limits, SplitLimits)
        else [([pair for pair in pairs if pair.split == split], getattr(limits, split)) for split in SPLITS]
    )
    kept: list[Pair] = []
    for own, limit in parts:
        if limit is not None and len(own) > limit:
            chosen = sample([pair.prompt for pair in own], [pair.split for pair in own], limit, seed)
            own = [pair for pair in own if pair.prompt in chosen]
        kept += own
    return kept


def _part_pair(pair: Pair, part: PartConfig) -> Pair:
    """A pair of a source, with a group only if it is not the prompt in some spelling."""
    own_group = pair.group and same_text(pair.group) != same_text(pair.prompt)
    return replace(
        pair,
        source=pair.source or part.source,
        group=f"{part.client}/{pair.group}" if own_group else None,
        domain=pair.domain or part.client,
    )


def _split_of_prompt(parts: Iterable[SourceData]) -> dict[str, str]:
    """The most held-out split of each prompt, by its normal form."""
    splits: dict[str, str] = {}
    for part in parts:
        rows: list[Pair | Prompt] = [*part.pairs, *part.judge]
        rows += [row for row in part.prompts if row.split == "test"]
        for row in rows:
            key = same_text(row.prompt)
            splits[key] = max(row.split, splits.get(key, "train"), key=SPLITS.index)
    return splits


def _consistent(
    name: str, pairs: Sequence[Pair], splits: Mapping[str, str], dropped: Counter[str]
) -> list[Pair]:
    """The pairs of a source whose prompt is not held out in another one; counts the others."""
    kept = [pair for pair in pairs if pair.split == splits[same_text(pair.prompt)]]
    dropped += Counter({f"{name}: prompt held out in another source": len(pairs) - len(kept)})
    return kept


def _merge_prompts(prompts: Iterable[Prompt], splits: Mapping[str, str]) -> list[Prompt]:
    """The server's prompts, each text once with the references of all sources.

    Prompts to align on that a client or the judge has are left out.
    """
    merged: dict[str, Prompt] = {}
    for row in prompts:
        if row.split == "test" or same_text(row.prompt) not in splits:
            known = merged.setdefault(row.prompt, Prompt(row.prompt, [], row.split)).references
            known += [text for text in row.references if text not in known]
    return list(merged.values())
