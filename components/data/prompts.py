"""The server's prompts: those that come with the pairs, or those of other data sets.

A recipe may take the prompts to align on and those to evaluate on from other data sets
(data.align_prompts, data.test_prompts; FedBiscuit table 5 and section 7.1 do so for QA). Such data
sets are not separated from the pairs, so it is done here. Prompts are the same if they differ only
in case and white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from components.config import DataConfig, PromptsConfig
from components.data.lengths import TOO_LONG, check_dropped, fits
from components.data.records import PROMPT_COLUMNS, DataError, PromptData, SourceData
from components.data.report import PromptSummary
from components.data.sources import load_prompts
from components.data.splits import normal
from components.data.tables import Prompt, prompts_dataset
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

REASONS = {"align": "in a pair or to be evaluated on", "test": "in a training or validation pair"}
"""By split, why a prompt is left out."""


@dataclass(frozen=True)
class ServerPrompts:
    """The server's prompts.

    Attributes:
        rows: rows of PROMPT_COLUMNS.
        summaries: by split, of prompts that do not come unchanged from the source of the pairs.
    """

    rows: pd.DataFrame
    summaries: dict[str, PromptSummary]


def server_prompts(
    data: DataConfig, source: SourceData, pairs: pd.DataFrame, judge: pd.DataFrame, seed: int
) -> ServerPrompts:
    """Choose the server's prompts of a recipe.

    If prompts of another data set are used, no prompt to evaluate on is one that a client or the
    judge trains on or is validated on, and no prompt to align on is in any of their pairs or among
    those to evaluate on.

    Args:
        data: the recipe's data section.
        source: the data of the source of pairs.
        pairs, judge: the pairs of the clients and of the judge, with their splits.
        seed: of the recipe.

    Raises:
        DataError: the prompts cannot be read, or none remains.
    """
    import pandas as pd

    own = source.prompts.to_pandas()[list(PROMPT_COLUMNS)]
    if data.test_prompts is None and data.align_prompts is None:
        return ServerPrompts(own, {})
    known = pd.concat([pairs[["prompt", "split"]], judge[["prompt", "split"]]])
    forbidden = {normal(prompt) for prompt in known.loc[known["split"] != "test", "prompt"]}
    chosen: dict[str, pd.DataFrame] = {}
    summaries: dict[str, PromptSummary] = {}
    for split, section in (("test", data.test_prompts), ("align", data.align_prompts)):
        if section is None:
            rows = own[own["split"] == split]
            chosen[split] = rows[~rows["prompt"].map(normal).isin(forbidden)]
            left_out = len(rows) - len(chosen[split])
            if left_out:
                summaries[split] = PromptSummary(source=data.source, left_out={REASONS[split]: left_out})
        else:
            chosen[split], summaries[split] = _other_prompts(section, split, forbidden, data, seed)
        forbidden |= {normal(prompt) for prompt in (*known["prompt"], *chosen[split]["prompt"])}
    rows = pd.concat([chosen["align"], chosen["test"]], ignore_index=True)
    return ServerPrompts(rows, summaries)


def _other_prompts(
    section: PromptsConfig, split: str, forbidden: Collection[str], data: DataConfig, seed: int
) -> tuple[pd.DataFrame, PromptSummary]:
    """Prompts of another data set, without the forbidden ones, and their summary."""
    key = f"data.{split}_prompts"
    loaded = load_prompts(section, key, seed)
    is_kept = [fits((prompt,), data) for prompt, _ in loaded.prompts]
    if too_long := check_dropped(is_kept, f"prompts of {key}", data):
        prompts = [prompt for prompt, kept in zip(loaded.prompts, is_kept, strict=True) if kept]
        dropped = {**loaded.dropped, TOO_LONG: too_long}
        loaded = replace(loaded, prompts=prompts, dropped=dropped)
    rows, left_out = _choose(loaded, section.max_prompts, split, forbidden, seed)
    if not rows:
        raise DataError(
            f"{key}: of the {len(loaded.prompts)} prompts of {section.source} none is left, for all are in"
            " the pairs too"
        )
    summary = PromptSummary(source=section.source, left_out=left_out, references=loaded.references)
    return prompts_dataset(rows, section.source).to_pandas(), summary


def _choose(
    loaded: PromptData, limit: int | None, split: str, forbidden: Collection[str], seed: int
) -> tuple[list[Prompt], dict[str, int]]:
    """At most `limit` prompts that are not forbidden, and the number of others, by reason."""
    left_out = Counter(loaded.dropped)
    rows = [
        Prompt(prompt, references, split)
        for prompt, references in loaded.prompts
        if normal(prompt) not in forbidden
    ]
    left_out[REASONS[split]] += len(loaded.prompts) - len(rows)
    if limit is not None and len(rows) > limit:
        drawn = generator(seed, "max_prompts", split).choice(len(rows), limit, replace=False)
        left_out["over max_prompts"] += len(rows) - limit
        rows = [rows[i] for i in sorted(drawn)]
    return rows, {reason: count for reason, count in left_out.items() if count}
