"""The protocols of sources, as the options in a recipe that describe them.

A source of pairs is the model of its options, with a function `load`:

    class Mine(Source):
        years: int = Field(3, ge=1, description="...")

        def load(self, data: DataConfig, seed: int) -> SourceData: ...

It is registered in components.config.data.SOURCES, or by the package that contains it:

    [project.entry-points."fed_rlhf.sources"]
    mine = "my_package.my_source:Mine"

Sources of server prompts derive from PromptSource, and are registered in PROMPT_SOURCES or by entry
points of the group `fed_rlhf.prompt_sources`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from components.config import DataConfig, PromptsConfig, RecipeError, Section, unknown_name
from components.config.data import SOURCES
from components.data.records import TEXT_COLUMNS, DataError, PromptData, SourceData, unique_prompts
from components.data.splits import Shares

R = TypeVar("R")


class Source(Section, ABC):
    """A source of pairs, as the section `data.options` of a recipe."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the user's own files, which data.columns may rename; empty for sources whose
    columns are given. data.column may name any other column of such files."""
    is_local: ClassVar[bool] = False  # its rows come from a file or a package, in no case from the hub
    not_judgements: ClassVar[str] = "does not say whether each of its pairs is a judgement of its own"
    """Why randomised response does not protect the verdicts of its pairs (federation.privacy with unit
    'label'); empty where each pair is a judgement of its own, whose verdict its texts do not show."""
    lends_verdicts: ClassVar[bool] = True
    """Whether answers to the server's prompts are completions that clients have chosen."""

    reads_messages: ClassVar[bool] = False
    """Whether prompts and completions may be lists of messages, also as JSON text (data.messages)."""

    @abstractmethod
    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs of the clients and the judge, and the server's prompts.

        Args:
            data: the recipe's section.
            seed: of the recipe; every random choice is a function of it.

        Raises:
            UserError: the data are missing or cannot be used.
        """


class PromptSource(Section, ABC):
    """A source of server prompts, as the options of data.align_prompts or data.test_prompts."""

    @abstractmethod
    def load(self, prompts: PromptsConfig, seed: int) -> PromptData:
        """Load the prompts.

        Args:
            prompts: the recipe's section.
            seed: of the recipe.

        Raises:
            UserError: the prompts are missing or cannot be used.
        """


AlignShare = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description=(
            "Share of the training prompts that become the server's unlabeled prompts; their pairs are"
            " dropped."
        ),
    ),
]
JudgeShare = Annotated[
    float, Field(ge=0, lt=1, description="Share of the prompts whose pairs train the judge.")
]


class PairSource(Source):
    """Base of sources that have neither a judge nor server prompts of their own."""

    align_share: AlignShare = 0.2
    judge_share: JudgeShare = 0.1

    @property
    def shares(self) -> Shares:
        """What is reserved for the server and the judge."""
        return Shares(align=self.align_share, judge=self.judge_share)


def load(data: DataConfig, seed: int) -> SourceData:
    """Load the source of pairs that a recipe names.

    Raises:
        UserError: the data are missing or cannot be used.
    """
    source = data.options.load(data, seed)
    prompts, spellings = unique_prompts(source.prompts)
    merged = {"prompt of the server in another spelling, which is merged": spellings} if spellings else {}
    return replace(source, prompts=prompts, dropped=source.dropped | merged)


def load_prompts(prompts: PromptsConfig, key: str, seed: int) -> PromptData:
    """Load the source of prompts that a section names.

    Args:
        prompts: the recipe's section.
        key: the key of the section, e.g. 'data.align_prompts'.
        seed: of the recipe.

    Raises:
        UserError: the prompts are missing or cannot be used; the key of the section is named.
    """
    try:
        return prompts.options.load(prompts, seed)
    except DataError as error:
        raise DataError(f"{key}: {error}".replace("data.path", f"{key}.path")) from error


def distinct(
    rows: Iterable[R], key: Callable[[R], str], what: str, where: str
) -> tuple[list[R], dict[str, int]]:
    """The first row of each key that is not empty, and the number of others by reason.

    Args:
        rows: raw rows.
        key: that is equal for rows with the same prompt.
        what: name of the prompts, for reasons.
        where: the rows are from, for the error if none has a key.
    """
    first: dict[str, R] = {}
    dropped: Counter[str] = Counter()
    for row in rows:
        name = key(row)
        if not name:
            dropped[f"empty {what}"] += 1
        elif first.setdefault(name, row) is not row:
            dropped[f"{what} that came before"] += 1
    if not first:
        raise DataError(f"{where}: there is no {what} in these data")
    return list(first.values()), dict(dropped)


def check_columns(data: DataConfig) -> None:
    """Refuse columns of a recipe that no row of its source can have.

    Raises:
        RecipeError: naming the column, and the nearest that exists.
    """
    known = data.options.columns
    sources = ", ".join(name for name in SOURCES.builtin if SOURCES.load(name).columns)
    for key in ("columns", "drop_invalid"):
        if getattr(data, key) and not known:
            raise RecipeError(
                f"data.{key} is not used with data.source '{data.source}': it is for the sources {sources}."
            )
    if data.messages != "auto" and not data.options.reads_messages:
        readers = ", ".join(name for name in SOURCES.builtin if SOURCES.load(name).reads_messages)
        raise RecipeError(
            f"data.messages is not used with data.source '{data.source}': it is for the sources {readers}."
        )
    for name in data.columns:
        if name not in known:
            raise RecipeError(unknown_name("data.columns: the column", name, known))
    repeated = [own for own, count in Counter(data.columns.values()).items() if count > 1]
    if repeated:
        raise RecipeError(f"data.columns gives the column '{repeated[0]}' two names: give each its own.")
    if data.column is None or known or data.column in TEXT_COLUMNS:
        return
    raise RecipeError(
        f"{unknown_name('data.column', data.column, TEXT_COLUMNS)} A column of a file's own can be named"
        f" with the sources {sources}."
    )
