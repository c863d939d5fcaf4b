"""Labels for pairs of sampled completions, chosen by the selectors.

FedBiscuit appendix A.2 step 1; section 5.1 for an ensemble of selectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from components.data.records import pair_id
from components.models.selector import majority_vote as majority_vote  # a name of this module too

if TYPE_CHECKING:
    from components.models.samples import Completion


@dataclass(frozen=True)
class Candidate:
    """An unlabeled pair of completions of one prompt."""

    pair_id: str  # see components.data.records.pair_id
    prompt_id: str
    prompt: str
    first: Completion  # in the order in which they were sampled
    second: Completion


class LabeledPair(TypedDict):
    """A labeled pair, as it is stored."""

    pair_id: str
    prompt_id: str
    prompt: str
    label: int  # 0 if the first completion was preferred, 1 if the second one was
    margin: float  # mean over the selectors of the log-odds that the first completion is better
    chosen: str
    chosen_ids: list[int]  # sampled tokens
    chosen_finished: bool  # whether the completion ended by itself
    rejected: str
    rejected_ids: list[int]
    rejected_finished: bool


def candidate_pairs(
    prompts: Mapping[str, str], completions: Mapping[str, Sequence[Completion]]
) -> tuple[list[Candidate], dict[str, int]]:
    """All pairs of the distinct completions of each prompt, and numbers of what was formed and dropped.

    Prompts and completions are by prompt id. The numbers are fields of LabellingResult.
    """
    pairs: list[Candidate] = []
    names = ("completions", "dropped_identical", "dropped_empty", "pairs", "prompts_without_pair")
    counts = dict.fromkeys(names, 0)
    for prompt_id, sampled in completions.items():
        counts["completions"] += len(sampled)
        distinct: dict[str, Completion] = {}
        for completion in sampled:
            if not completion.text:
                counts["dropped_empty"] += 1
            elif completion.text in distinct:
                counts["dropped_identical"] += 1
            else:
                distinct[completion.text] = completion
        counts["prompts_without_pair"] += len(distinct) < 2
        for first, second in combinations(distinct.values(), 2):
            identifier = pair_id(prompt_id, first.text, second.text)
            pairs.append(Candidate(identifier, prompt_id, prompts[prompt_id], first, second))
    return pairs, counts | {"pairs": len(pairs)}


def label_pairs(margins: npt.NDArray[np.float64], candidates: Sequence[Candidate]) -> list[LabeledPair]:
    """Label N pairs by the majority of the selectors.

    A selector prefers the second completion (label 1) unless it scores the first one higher, as in
    the paper. The margins [U, N] are log-odds that the first completion is better. An even number of
    selectors, such as one of each client, may tie: then the mean of the log-odds decides.
    """
    choices = np.where(margins > 0, 0, 1).reshape(len(margins), len(candidates))
    mean_margins = np.mean(margins, axis=0)
    if len(choices) % 2 == 0:
        choices = np.concatenate([choices, np.where(mean_margins > 0, 0, 1)[None]])
    labels = majority_vote(choices)
    rows = []
    for candidate, label, margin in zip(candidates, labels, mean_margins, strict=True):
        completions = (candidate.first, candidate.second)
        chosen = completions[label]
        rejected = completions[1 - label]
        row = LabeledPair(
            pair_id=candidate.pair_id,
            prompt_id=candidate.prompt_id,
            prompt=candidate.prompt,
            label=int(label),
            margin=float(margin),
            chosen=chosen.text,
            chosen_ids=list(chosen.ids),
            chosen_finished=chosen.finished,
            rejected=rejected.text,
            rejected_ids=list(rejected.ids),
            rejected_finished=rejected.finished,
        )
        rows.append(row)
    return rows


def choose_ranked_pairs(pairs: Sequence[LabeledPair], count: int) -> list[LabeledPair]:
    """Choose pairs of each prompt by the selectors' order of its completions.

    Completions are ranked by the pairs that they win, of equal ones by the summed log-odds of
    these. The first is paired with the last, the second with the last but one, and so on: at most
    `count` pairs of a prompt, and n // 2 of one with n completions. The given pairs are all labeled
    ones.
    """
    scores: dict[str, dict[str, tuple[int, float]]] = {}
    for pair in pairs:
        own = scores.setdefault(pair["prompt_id"], {})
        wins, odds = own.get(pair["chosen"], (0, 0.0))
        own[pair["chosen"]] = (wins + 1, odds + (-pair["margin"] if pair["label"] else pair["margin"]))
        own.setdefault(pair["rejected"], (0, 0.0))
    chosen: set[tuple[str, frozenset[str]]] = set()
    for prompt, own in scores.items():
        ranked = sorted(own, key=lambda text: own[text], reverse=True)
        for rank in range(min(count, len(ranked) // 2)):
            chosen.add((prompt, frozenset((ranked[rank], ranked[-1 - rank]))))
    return [
        pair for pair in pairs if (pair["prompt_id"], frozenset((pair["chosen"], pair["rejected"]))) in chosen
    ]


def label_shares(pairs: Sequence[LabeledPair]) -> dict[str, float]:
    """Shares of labeled pairs, fields of LabellingResult, that show a bias; NaN without pairs."""
    count = len(pairs) or float("nan")
    longer = sum(len(pair["chosen_ids"]) > len(pair["rejected_ids"]) for pair in pairs)
    chosen_finished = sum(pair["chosen_finished"] for pair in pairs) / count
    rejected_finished = sum(pair["rejected_finished"] for pair in pairs) / count
    return {
        "label_1_share": sum(pair["label"] for pair in pairs) / count,
        "chosen_longer_share": longer / count,
        "chosen_finished_more": chosen_finished - rejected_finished,
    }
