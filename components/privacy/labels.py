"""Randomised response on the verdicts of pairs (Warner 1965), and estimates that are corrected for it.

A verdict is replaced with probability 2 p by a coin, so that it is exchanged with probability p. With
p = 1 / (1 + exp(epsilon)) this is epsilon-differentially private for one verdict. The draws are a function of
the client's secret, of epsilon, the texts and the verdict. So the same verdict shows the same noise in all
jobs, and in all runs of a client that keeps its secret. Another epsilon, or a verdict that the client has
changed, has noise of its own, and costs epsilon once more.

If a loss l, a vote or a margin is computed from exchanged verdicts, its expectation is (1 - p) l + p l',
where l' is that of the other verdict, so that

    ((1 - p) l - p l') / (1 - 2 p)

has the expectation of the true verdict's (Natarajan et al. 2013, lemma 1; for DPO: Chowdhury et al. 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from components.data.records import Pair, pair_id
from components.privacy.secrets import digest

WORD = 1 << 64


@dataclass(frozen=True)
class NoisedVerdicts:
    """The randomised response of one client."""

    flip: float  # p, below 0.5
    secret: bytes  # of the client
    debias: bool = True  # whether losses are corrected
    exact_measures: bool = False  # whether accuracy is measured by the true verdicts

    @property
    def loss_flip(self) -> float:
        """p, for which losses are corrected; 0 where they are not."""
        return self.flip if self.debias else 0.0

    def apply(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs with noised verdicts: the same ones each time, and from job to job.

        Their order and their ids do not depend on the true verdicts. Of several judgements of the same texts
        each has noise of its own. Margins, which are judgements too, are removed.
        """
        texts_seen: Counter[str] = Counter()
        judgements_seen: Counter[tuple[str, str]] = Counter()
        noised: list[Pair] = []
        # Among equal texts by verdict: where one of several judgements differs, one row of these does.
        for pair in sorted(pairs, key=_order):
            prompt, *completions = _texts(pair)
            name = pair_id(prompt, *completions)
            judgement = (name, pair.chosen)
            place = completions.index(pair.chosen)
            draw = self._draw((prompt, *completions), place, judgements_seen[judgement])
            if int.from_bytes(draw[:8], "big") < math.ceil(2 * self.flip * WORD):
                place = draw[8] & 1
            own_id = f"{name}-{texts_seen[name]}"
            texts_seen[name] += 1
            judgements_seen[judgement] += 1
            chosen, rejected = completions if place == 0 else completions[::-1]
            noised.append(replace(pair, chosen=chosen, rejected=rejected, pair_id=own_id, margin=None))
        return sorted(noised, key=attrgetter("pair_id"))

    def _draw(self, texts: tuple[str, ...], place: int, number: int) -> bytes:
        """The random bytes of a judgement: of texts, which of them is chosen, and how many came before."""
        return digest(self.secret, "verdict", repr(self.flip), *texts, str(place), str(number))


def _texts(pair: Pair) -> tuple[str, str, str]:
    """The texts of a pair, with the completions in alphabetical order."""
    first, second = sorted((pair.chosen, pair.rejected))
    return pair.prompt, first, second


def _order(pair: Pair) -> tuple[str, ...]:
    """What rows are ordered by: all that is no verdict, and the verdict last."""
    others = (pair.domain, pair.group, pair.source, pair.tree, pair.depth, pair.column)
    return (*_texts(pair), *(f"{value}" for value in others), pair.chosen)
