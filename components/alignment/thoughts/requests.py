"""Requests to a writer or an evaluator, which are answered together for several questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from components.models.generation import SampleKey
from components.seeding import derive


class Request(NamedTuple):
    """A prompt of a question.

    Attributes:
        prompt: its text.
        seed: of the requests of the same question and level. Samples are a function of it and of the
            request's position among those with this seed, so that they do not depend on the questions
            that share the batch.
    """

    prompt: str
    seed: int


def sample_keys(requests: Sequence[Request], *purpose: str | int) -> list[SampleKey]:
    """Keys of the samples of N requests.

    Args:
        requests: of any number of seeds.
        purpose: what the samples are for, if a seed serves more than one purpose.

    Returns:
        N keys: the seed (derived for the purpose), and the position among the requests of that seed.
    """
    counts: Counter[int] = Counter()
    keys = []
    for request in requests:
        seed = derive(request.seed, *purpose) if purpose else request.seed
        keys.append(SampleKey(seed, counts[request.seed]))
        counts[request.seed] += 1
    return keys
