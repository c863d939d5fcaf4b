"""The server's prompts: those that come with the pairs, or those that the recipe puts in their place.

A recipe may take the prompts to align on and those to evaluate on from data sets of their own (data.align_prompts,
data.test_prompts; FedBiscuit table 5 and section 7.1 do so for QA). Then nothing keeps them apart from the pairs, so it
is done here. Prompts are the same where they differ in case and white space only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from components.config import DataConfig, PromptsConfig
from components.data import sources
from components.data.records import PROMPT_COLUMNS, DataError, SourceData
from components.data.registry import prompts_dataset
from components.data.splits import normal
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

REASONS = {"align": "in a pair or to be evaluated on", "test": "in a training or validation pair"}


def server_prompts(data: DataConfig, loaded: SourceData, pairs: pd.DataFrame, judge: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The server's prompts of a recipe.

    Where a prompt of another data set is put in place, no prompt to evaluate on is one that a client or the judge
    trains on or is validated on, and no prompt to align on is in any of their pairs or among those to evaluate on.

    Args:
        data: the recipe's data section.
        loaded: what the source of pairs gave.
        pairs, judge: the clients' and the judge's pairs, with their splits.
        seed: of the recipe.

    Returns:
        Rows of PROMPT_COLUMNS, and by split what a report says of those that were put in place or had to go: "source",
        "left_out" (rows by reason), and "references" (who wrote them, e.g. a model's name).

    Raises:
        RecipeError: an unknown source or option.
        DataError: the prompts cannot be read, or none is left.
    """
    import pandas as pd

    own = loaded.prompts.to_pandas()[list(PROMPT_COLUMNS)]
    sections = {"test": data.test_prompts, "align": data.align_prompts}
    if not any(sections.values()):
        return own, {}
    known = pd.concat([pairs[["prompt", "split"]], judge[["prompt", "split"]]])
    forbidden = {normal(prompt) for prompt, split in zip(known["prompt"], known["split"], strict=True) if split != "test"}
    chosen, notes = {}, {}
    for split, section in sections.items():
        if section is None:
            rows = own[own["split"] == split]
            chosen[split] = rows[~rows["prompt"].map(normal).isin(forbidden)]
            if len(chosen[split]) < len(rows):
                notes[split] = {"source": data.source, "left_out": {REASONS[split]: len(rows) - len(chosen[split])}}
        else:
            chosen[split], notes[split] = _other(section, split, forbidden, seed)
        forbidden |= {normal(prompt) for prompt in (*known["prompt"], *chosen[split]["prompt"])}
    return pd.concat([chosen["align"], chosen["test"]], ignore_index=True), notes


def _other(section: PromptsConfig, split: str, forbidden: Collection[str], seed: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Prompts of another data set, without those that are forbidden; and what is noted of them."""
    key = f"data.{split}_prompts"
    given = sources.load_prompts(section, key, seed)
    left_out = Counter(given.dropped)
    kept = [(prompt, references, split) for prompt, references in given.prompts if normal(prompt) not in forbidden]
    left_out[REASONS[split]] += len(given.prompts) - len(kept)
    if section.max_prompts is not None and len(kept) > section.max_prompts:
        drawn = generator(seed, "max_prompts", split).choice(len(kept), section.max_prompts, replace=False)
        left_out["over max_prompts"] += len(kept) - section.max_prompts
        kept = [kept[i] for i in sorted(drawn)]
    if not kept:
        raise DataError(f"{key}: of the {len(given.prompts)} prompts of {section.source} none is left, for all are in the pairs too")
    frame = prompts_dataset(kept, section.source).to_pandas()
    return frame, {"source": section.source, "left_out": {reason: n for reason, n in left_out.items() if n}, "references": given.references}
