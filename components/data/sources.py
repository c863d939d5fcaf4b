"""The data sources by name; each is a file of its own (see components/data/registry.py for how to add one).

    aclsum     embedded: annotators with tastes over 250 papers' expert summaries
    chitchat   embedded: human conversations, a participant is a client
    tldr       hub: OpenAI's TL;DR comparisons, a worker is a client (FedBiscuit section 6)
    shp        hub: answers on Reddit and their readers' votes, 18 domains (FedBiscuit section 6)
    hh-rlhf    hub: Anthropic's helpful and harmless dialogues
    thoughts   file: preferred thoughts along trees that were grown before, a question set is a client (DRIFT section 2.2)
    auto-j     file: Auto-J's pairwise set, human verdicts in 58 scenarios
    imdb       hub: film reviews carried on in two ways, a classifier's scores (FedPDPO D.1.1)
    code-vulnerability   hub: secure and vulnerable code in 11 languages (FedPDPO D.1.1)
    webgpt     hub: OpenAI's comparisons of long answers from the web (FedPDPO D.1.1)
    py-dpo     hub: Python code (FedPDPO D.1.1)
    ultrafeedback   hub: instructions of many kinds (FedPDPO D.1.1)
    mixture    several of these, each a client (FedPDPO D.1.2, cross-domain)
    jsonl      the user's own pairs
    parquet    the user's own pairs

Prompts for the server alone, which a recipe puts in place of those that come with its pairs (data.align_prompts,
data.test_prompts):

    safe-rlhf     hub: PKU's prompts about harm (FedBiscuit table 5)
    alpaca_eval   hub: AlpacaEval's 805 instructions (FedBiscuit section 7.1)
"""

from __future__ import annotations

from components.config import DataConfig, PromptsConfig, RecipeError, Section, check_section, unknown_name
from components.data import (  # noqa: F401  (importing them registers them)
    aclsum,
    alpaca_eval,
    auto_j,
    chitchat,
    code_vulnerability,
    files,
    hh_rlhf,
    imdb,
    mixture,
    py_dpo,
    safe_rlhf,
    shp,
    tldr,
    trees,
    ultrafeedback,
    webgpt,
)
from components.data.records import DataError, SourceData
from components.data.registry import PROMPT_SOURCES, SOURCES, TEXT_COLUMNS, PromptData, PromptSource, Source


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


def check(data: DataConfig, where: str) -> None:
    """Check that a recipe's source exists, that its options fit it, and that it has the column which data.column names.

    Args:
        data: the recipe's section.
        where: the file or command it comes from, for the error.

    Raises:
        RecipeError: an unknown source, option or column; the nearest one is named.
    """
    options = check_section(options_model(data.source, where), data.options, where, "data.options")
    found = SOURCES[data.source]
    if found.check is not None:
        found.check(options, where)
    if data.column is not None and not found.own_columns and data.column not in TEXT_COLUMNS:
        others = ", ".join(sorted(name for name, other in SOURCES.items() if other.own_columns))
        raise RecipeError(f"{where}: {unknown_name('data.column', data.column, TEXT_COLUMNS)} A column of a file's own can be named with the sources {others}.")


def load(data: DataConfig, seed: int) -> SourceData:
    """Load the source that the recipe names.

    Raises:
        RecipeError: an unknown source or option.
        DataError: the data are missing or cannot be used.
    """
    found = _find(data.source, "data.source")
    return found.load(data, check_section(found.options, data.options, "data.options", "data.options"), seed)


def check_prompts(prompts: PromptsConfig, key: str, where: str) -> None:
    """Check that a prompt source exists and that its options fit it.

    Args:
        prompts: a recipe's section.
        key: the section's own key, e.g. 'data.align_prompts'.
        where: the file or command it comes from, for the error.

    Raises:
        RecipeError: an unknown source or option; the nearest one is named.
    """
    check_section(_find_prompts(prompts.source, key, where).options, prompts.options, where, f"{key}.options")


def load_prompts(prompts: PromptsConfig, key: str, seed: int) -> PromptData:
    """Load the prompt source that a section names.

    Raises:
        RecipeError: an unknown source or option.
        DataError: the prompts are missing or cannot be used; the section's key is named.
    """
    found = _find_prompts(prompts.source, key, key)
    options = check_section(found.options, prompts.options, f"{key}.options", f"{key}.options")
    try:
        return found.load(prompts, options, seed)
    except DataError as error:
        raise DataError(f"{key}: {error}".replace("data.path", f"{key}.path")) from error


def _find(name: str, where: str) -> Source:
    if name not in SOURCES:
        raise RecipeError(f"{where}: {unknown_name('data source', name, SOURCES)}")
    return SOURCES[name]


def _find_prompts(name: str, key: str, where: str) -> PromptSource:
    if name not in PROMPT_SOURCES:
        raise RecipeError(f"{where}: {unknown_name(f'{key}.source', name, PROMPT_SOURCES)}")
    return PROMPT_SOURCES[name]
