"""Labelling sampled completions by the selectors (FedBiscuit appendix A.2 step 1, and section 5.1 for an ensemble)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from components.data.records import pair_id
from components.models.selector import Comparison, Selector, majority_vote

if TYPE_CHECKING:
    from components.models.adapters import Adapter
    from components.models.policy import Completion


__all__ = ["Candidate", "candidate_pairs", "label_pairs", "majority_vote"]


@dataclass(frozen=True)
class Candidate:
    """Two completions of one prompt, to be labelled.

    Attributes:
        pair_id: joins the verdict to the pair.
        prompt_id, prompt: of the server's prompt.
        first, second: the completions, by their place among the prompt's completions (j < l).
    """

    pair_id: str
    prompt_id: str
    prompt: str
    first: Completion
    second: Completion


def candidate_pairs(
    prompts: Mapping[str, str], completions: Mapping[str, Sequence[Completion]]
) -> tuple[list[Candidate], dict[str, int]]:
    """All pairs of a prompt's distinct completions.

    Args:
        prompts: text by prompt id.
        completions: the n completions of each prompt id.

    Returns:
        the pairs, and counts: completions, identical and empty ones dropped, pairs, prompts left without a pair.
    """
    pairs, counts = [], {"completions": 0, "dropped_identical": 0, "dropped_empty": 0, "pairs": 0, "prompts_without_pair": 0}
    for prompt_id, texts in completions.items():
        distinct: dict[str, Completion] = {}
        for completion in texts:
            counts["completions"] += 1
            if not completion.text:
                counts["dropped_empty"] += 1
            elif completion.text in distinct:
                counts["dropped_identical"] += 1
            else:
                distinct[completion.text] = completion
        made = [
            Candidate(pair_id(prompt_id, a.text, b.text), prompt_id, prompts[prompt_id], a, b)
            for a, b in combinations(distinct.values(), 2)]
        counts["prompts_without_pair"] += not made
        pairs += made
    counts["pairs"] = len(pairs)
    return pairs, counts


def label_pairs(selector: Selector, adapters: Sequence[Adapter], candidates: Sequence[Candidate]) -> list[dict]:
    """Let each selector choose, and take the majority: one row for each pair, both labels kept.

    A selector prefers the second completion (label 1) unless the first is scored above it, as in the paper.

    Args:
        selector: the resident model; its slot is overwritten.
        adapters: one for each selector of the ensemble.
        candidates: the pairs.

    Returns:
        rows with pair_id, prompt_id, label (0: the first completion was chosen), margin (mean log-odds that the
        first is better), and chosen and rejected as text, ids and `finished`.
    """
    comparisons = [Comparison(c.prompt, c.first.text, c.second.text) for c in candidates]
    margins = []
    for adapter in adapters:
        selector.slot.load(adapter)
        margins.append(selector.margins(comparisons))
    labels = majority_vote(np.array([np.where(m > 0, 0, 1) for m in margins]).reshape(len(adapters), len(candidates)))
    mean = np.mean(margins, axis=0)
    verdicts = {c.pair_id: (int(label), float(margin)) for c, label, margin in zip(candidates, labels, mean, strict=True)}
    rows = []
    for candidate in candidates:
        label, margin = verdicts[candidate.pair_id]
        chosen, rejected = (candidate.first, candidate.second) if label == 0 else (candidate.second, candidate.first)
        rows.append({
            "pair_id": candidate.pair_id, "prompt_id": candidate.prompt_id, "prompt": candidate.prompt, "label": label, "margin": margin,
            "chosen": chosen.text, "chosen_ids": list(chosen.ids), "chosen_finished": chosen.finished,
            "rejected": rejected.text, "rejected_ids": list(rejected.ids), "rejected_finished": rejected.finished})
    return rows
