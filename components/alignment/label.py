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
from components.models.selector import majority_vote

if TYPE_CHECKING:
    from components.models.generation import Completion


__all__ = [
    "Candidate",
    "CandidateCounts",
    "LabelShares",
    "LabeledPair",
    "candidate_pairs",
    "choose_ranked_pairs",
    "label_pairs",
    "label_shares",
    "majority_vote",
]


@dataclass(frozen=True)
class Candidate:
    """An unlabeled pair of completions of one prompt.

    Attributes:
        pair_id: identifies the pair, see components.data.records.pair_id.
        prompt_id, prompt: id and text of the server's prompt.
        first, second: the completions, in the order in which they were sampled.
    """

    pair_id: str
    prompt_id: str
    prompt: str
    first: Completion
    second: Completion


@dataclass(frozen=True)
class CandidateCounts:
    """Numbers of completions and pairs.

    Attributes:
        completions: sampled completions.
        dropped_identical, dropped_empty: completions that repeat an earlier one of their prompt,
            and completions without text.
        pairs: candidate pairs.
        prompts_without_pair: prompts with fewer than two distinct completions.
    """

    completions: int
    dropped_identical: int
    dropped_empty: int
    pairs: int
    prompts_without_pair: int


class LabeledPair(TypedDict):
    """A labeled pair, as it is stored.

    Attributes:
        pair_id, prompt_id, prompt: as of the candidate.
        label: 0 if the first completion was preferred, 1 if the second one was.
        margin: mean over the selectors of the log-odds that the first completion is better.
        chosen, rejected: texts.
        chosen_ids, rejected_ids: sampled tokens.
        chosen_finished, rejected_finished: whether the completion ended by itself.
    """

    pair_id: str
    prompt_id: str
    prompt: str
    label: int
    margin: float
    chosen: str
    chosen_ids: list[int]
    chosen_finished: bool
    rejected: str
    rejected_ids: list[int]
    rejected_finished: bool


@dataclass(frozen=True)
class LabelShares:
    """Shares of labeled pairs; NaN without pairs.

    Attributes:
        label_1_share: share of pairs in which the second completion was preferred.
        chosen_longer_share: share of pairs whose chosen completion has more tokens.
        chosen_finished_more: share of chosen completions that ended by themselves, less that of
            rejected ones.
    """

    label_1_share: float
    chosen_longer_share: float
    chosen_finished_more: float


def candidate_pairs(
    prompts: Mapping[str, str], completions: Mapping[str, Sequence[Completion]]
) -> tuple[list[Candidate], CandidateCounts]:
    """Form all pairs of the distinct completions of each prompt.

    Args:
        prompts: texts by prompt id.
        completions: the sampled completions by prompt id.

    Returns:
        the pairs, and the numbers of what was dropped.
    """
    pairs: list[Candidate] = []
    dropped_empty = 0
    dropped_identical = 0
    prompts_without_pair = 0
    for prompt_id, sampled in completions.items():
        distinct: dict[str, Completion] = {}
        for completion in sampled:
            if not completion.text:
                dropped_empty += 1
            elif completion.text in distinct:
                dropped_identical += 1
            else:
                distinct[completion.text] = completion
        prompts_without_pair += len(distinct) < 2
        for first, second in combinations(distinct.values(), 2):
            identifier = pair_id(prompt_id, first.text, second.text)
            pairs.append(Candidate(identifier, prompt_id, prompts[prompt_id], first, second))
    counts = CandidateCounts(
        completions=sum(len(sampled) for sampled in completions.values()),
        dropped_identical=dropped_identical,
        dropped_empty=dropped_empty,
        pairs=len(pairs),
        prompts_without_pair=prompts_without_pair,
    )
    return pairs, counts


def label_pairs(margins: npt.NDArray[np.float64], candidates: Sequence[Candidate]) -> list[LabeledPair]:
    """Label pairs by the majority of the selectors.

    A selector prefers the second completion (label 1) unless it scores the first one higher, as in
    the paper.

    Args:
        margins: [U, N], log-odds that the first completion is better, by each of an odd number of
            selectors.
        candidates: the N pairs.

    Returns:
        a row for each pair, in the order of the pairs.

    Raises:
        ValueError: the number of selectors is even.
    """
    labels = majority_vote(np.where(margins > 0, 0, 1).reshape(len(margins), len(candidates)))
    mean_margins = np.mean(margins, axis=0)
    return [
        _labeled(candidate, int(label), float(margin))
        for candidate, label, margin in zip(candidates, labels, mean_margins, strict=True)
    ]


def choose_ranked_pairs(pairs: Sequence[LabeledPair], count: int) -> list[LabeledPair]:
    """Choose pairs of each prompt by the selectors' order of its completions.

    Completions are ranked by the pairs that they win, of equal ones by the summed log-odds of these.
    The first is paired with the last, the second with the last but one, and so on.

    Args:
        pairs: all labeled pairs of the prompts' distinct completions.
        count: pairs per prompt, at most; a prompt with n completions has n // 2.
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


def _labeled(candidate: Candidate, label: int, margin: float) -> LabeledPair:
    completions = (candidate.first, candidate.second)
    chosen = completions[label]
    rejected = completions[1 - label]
    return LabeledPair(
        pair_id=candidate.pair_id,
        prompt_id=candidate.prompt_id,
        prompt=candidate.prompt,
        label=label,
        margin=margin,
        chosen=chosen.text,
        chosen_ids=list(chosen.ids),
        chosen_finished=chosen.finished,
        rejected=rejected.text,
        rejected_ids=list(rejected.ids),
        rejected_finished=rejected.finished,
    )


def label_shares(pairs: Sequence[LabeledPair]) -> LabelShares:
    """Compute shares of labeled pairs that show a bias of the labels."""
    return LabelShares(
        label_1_share=_share([pair["label"] == 1 for pair in pairs]),
        chosen_longer_share=_share([len(pair["chosen_ids"]) > len(pair["rejected_ids"]) for pair in pairs]),
        chosen_finished_more=_share([pair["chosen_finished"] for pair in pairs])
        - _share([pair["rejected_finished"] for pair in pairs]),
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
