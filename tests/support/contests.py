"""Verdicts of contests for tests of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.evaluation.contests import Contest
from components.evaluation.winrate import Verdict

WIN = Verdict.FIRST
TIE = Verdict.TIE
LOSS = Verdict.SECOND


def contest(
    verdicts: Sequence[Verdict],
    prompts: Sequence[str] = "abcdefghijklmnopqrstuvwxyz",
    ours: Sequence[int] = (),
    theirs: Sequence[int] = (),
    opposed: int = 0,
    style: Mapping[str, Sequence[int]] | None = None,
) -> Contest:
    """A contest in which a judge gives these verdicts in both orders.

    Args:
        verdicts: of both orders; the judge favours the first answer in the last `opposed` of them,
            which are then ties.
        prompts: ids of the answers, of which as many are used as there are verdicts.
        ours, theirs: lengths of the answers, 5 characters each where they are left out.
        opposed: number of pairs on which the orders do not agree.
        style: differences of style by name.
    """
    count = len(verdicts)
    agreed = [verdict.swapped() for verdict in verdicts[: count - opposed]]
    return Contest(
        prompts=list(prompts[:count]),
        original=[*verdicts[: count - opposed], *[Verdict.FIRST] * opposed],
        swapped=[*agreed, *[Verdict.FIRST] * opposed],
        equal=[False] * count,
        ours=list(ours) or [5] * count,
        theirs=list(theirs) or [5] * count,
        style={name: list(values) for name, values in (style or {}).items()},
    )
