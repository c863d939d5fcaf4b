"""The server's prompts: those that come with the pairs, or those of other data sets.

A recipe may take the prompts to align on and those to evaluate on from other data sets
(data.align_prompts, data.test_prompts; FedBiscuit table 5 and section 7.1 do so for QA). Such data
sets are not separated from the pairs, so it is done here, by same_text. Which prompts are one prompt is
asked by one_prompt (same_text.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from components.config import DataConfig, PromptsConfig
from components.data.data_report import PromptSummary
from components.data.records import (
    TOO_LONG,
    DataError,
    Prompt,
    drop_long,
    prompts_frame,
    unique_prompts,
)
from components.data.same_text import same_text
from components.data.sources import load_prompts
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

REASONS = {"align": "in a pair or to be evaluated on", "test": "in a training or validation pair"}
"""By split, why a prompt is left out."""


def server_prompts(
    data: DataConfig, own: Sequence[Prompt], known: Sequence[tuple[str, str]], seed: int
) -> tuple[pd.DataFrame, dict[str, PromptSummary]]:
    """Choose the server's prompts of a recipe.

    If prompts of another data set are used, no prompt to evaluate on is one that a client or the
    judge trains on or is validated on, and no prompt to align on is in any of their pairs or among
    those to evaluate on.

    Args:
        data: the recipe's data section.
        own: the prompts of the source of pairs.
        known: prompt and split of each pair of the clients and of the judge.
        seed: of the recipe.

    Returns:
        the prompts, and by split a summary of the prompts that do not come unchanged from
        the source of the pairs.
    """
    import pandas as pd

    if data.test_prompts is None and data.align_prompts is None:
        return prompts_frame(own, data.source), {}
    forbidden = {same_text(prompt) for prompt, split in known if split != "test"}
    in_pairs = {same_text(prompt) for prompt, _ in known}
    frames: dict[str, pd.DataFrame] = {}
    summaries: dict[str, PromptSummary] = {}
    for split, section in (("test", data.test_prompts), ("align", data.align_prompts)):
        if section is None:
            candidates = [row for row in own if row.split == split]
            rows, left_out = _choose(candidates, None, split, forbidden, seed)
            if left_out:
                summaries[split] = PromptSummary(source=data.source, left_out=left_out)
        else:
            rows, summaries[split] = _other_prompts(section, split, forbidden, data, seed)
        frames[split] = prompts_frame(rows, section.source if section else data.source)
        forbidden |= in_pairs | {same_text(row.prompt) for row in rows}
    return pd.concat([frames["align"], frames["test"]], ignore_index=True), summaries


def _other_prompts(
    section: PromptsConfig, split: str, forbidden: Collection[str], data: DataConfig, seed: int
) -> tuple[list[Prompt], PromptSummary]:
    """Prompts of another data set, without the forbidden ones, and their summary."""
    key = f"data.{split}_prompts"
    loaded = load_prompts(section, key, seed)
    prompts, _ = unique_prompts(Prompt(text, answers, split) for text, answers in loaded.prompts)
    repeated = len(loaded.prompts) - len(prompts)
    short = drop_long(prompts, f"prompts of {key}", data)
    rows, left_out = _choose(short, section.max_prompts, split, forbidden, seed)
    if not rows:
        raise DataError(
            f"{key}: of the {len(short)} prompts of {section.source} none is left, for all are in"
            " the pairs too"
        )
    own = {"prompt that came before": repeated, TOO_LONG: len(prompts) - len(short), **left_out}
    summary = PromptSummary(
        source=section.source,
        left_out=dict(Counter(loaded.dropped) + Counter(own)),
        references=loaded.answers_author,
    )
    return rows, summary


def _choose(
    prompts: Sequence[Prompt], limit: int | None, split: str, forbidden: Collection[str], seed: int
) -> tuple[list[Prompt], dict[str, int]]:
    """At most `limit` prompts that are not forbidden, and the number of others, by reason."""
    rows = [row for row in prompts if same_text(row.prompt) not in forbidden]
    left_out = Counter({REASONS[split]: len(prompts) - len(rows)})
    if limit is not None and len(rows) > limit:
        left_out["over max_prompts"] = len(rows) - limit
        drawn = generator(seed, "max_prompts", split).choice(len(rows), limit, replace=False)
        rows = [rows[i] for i in sorted(drawn)]
    return rows, dict(+left_out)
