"""Sampling of clients: uniform without replacement, or in turns; a function of seed and round."""

from __future__ import annotations

from collections.abc import Sequence

from components.seeding import generator


def sample_clients(names: Sequence[str], count: int, seed: int, round: int) -> list[str]:
    """Sample a round's clients, sorted by their names (FedBiscuit A.1, step 1).

    The sample is a function of the names, their count, the seed and the round.
    """
    if count > len(names):
        raise ValueError(f"cannot sample {count} of {len(names)} clients without replacement")
    chosen = generator(seed, "sample", round).choice(len(names), size=count, replace=False)
    ordered = sorted(names)
    return sorted(ordered[i] for i in chosen)


def take_turns(names: Sequence[str], count: int, seed: int, round: int) -> list[str]:
    """A round's clients, sorted by their names, where all take turns in an order that the seed determines.

    Between two rounds of one client are at least floor(M / A) - 1 others, for A of M clients.
    """
    if count > len(names):
        raise ValueError(f"cannot choose {count} of {len(names)} clients")
    order = generator(seed, "turns").permutation(len(names))
    ordered = sorted(names)
    places = ((round * count + turn) % len(names) for turn in range(count))
    return sorted(ordered[order[place]] for place in places)
