"""Requests to a writer or an evaluator, which are answered together for several questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from components.models.generation import SampleKey
from components.seeding import derive


class Request(NamedTuple):
    """A prompt of a question.

    The seed is that of the requests of the same question and level. Samples are a function of it
    and of the request's position among those with this seed, so that they do not depend on the
    questions that share the batch.
    """

    prompt: str
    seed: int


def sample_keys(requests: Sequence[Request], *purpose: str | int) -> list[SampleKey]:
    """Keys of N samples: the requests' seeds, derived for the purpose, and positions among their seed's.

    A purpose is needed where a seed serves more than one.
    """
    counts: Counter[int] = Counter()
    keys = []
    for request in requests:
        seed = derive(request.seed, *purpose) if purpose else request.seed
        keys.append(SampleKey(seed, counts[request.seed]))
        counts[request.seed] += 1
    return keys
