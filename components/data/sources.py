"""The data sources by name; each is a file of its own (see components/data/registry.py for how to add one).

    aclsum     embedded: annotators with tastes over 250 papers' expert summaries
    chitchat   embedded: human conversations, a participant is a client
    tldr       hub: OpenAI's TL;DR comparisons, a worker is a client (FedBiscuit section 6)
    hh-rlhf    hub: Anthropic's helpful and harmless dialogues
    auto-j     file: Auto-J's pairwise set, human verdicts in 58 scenarios
    jsonl      the user's own pairs
    parquet    the user's own pairs
"""

from __future__ import annotations

from components.config import DataConfig, RecipeError, Section, check_section, unknown_name
from components.data import aclsum, auto_j, chitchat, files, hh_rlhf, tldr  # noqa: F401  (importing them registers them)
from components.data.records import SourceData
from components.data.registry import SOURCES, Source


def names() -> list[str]:
    """The registered sources."""
    return sorted(SOURCES)


def options_model(name: str, where: str) -> type[Section]:
    """The model that data.options of a source must fit.

    Args:
        name: data.source of a recipe.
        where: the file or command it comes from, for the error.

    Raises:
        RecipeError: no source has this name; the nearest one is named.
    """
    return _find(name, where).options


def load(data: DataConfig, seed: int) -> SourceData:
    """Load the source that the recipe names.

    Raises:
        RecipeError: an unknown source or option.
        DataError: the data are missing or cannot be used.
    """
    found = _find(data.source, "data.source")
    return found.load(data, check_section(found.options, data.options, "data.options", "data.options"), seed)


def _find(name: str, where: str) -> Source:
    if name not in SOURCES:
        raise RecipeError(f"{where}: {unknown_name('data source', name, SOURCES)}")
    return SOURCES[name]
