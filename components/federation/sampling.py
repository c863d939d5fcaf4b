"""Sampling of clients: uniform, without replacement, a function of seed and round."""

from __future__ import annotations

from collections.abc import Sequence

from components.seeding import generator


def sample_clients(
    names: Sequence[str], count: int, seed: int, round: int, purpose: str = "sample"
) -> list[str]:
    """Sample clients for a round (FedBiscuit A.1, step 1).

    Args:
        names: all clients, in any order.
        count: number of sampled clients (A).
        seed, round, purpose: the sample is a function of them.

    Returns:
        the sampled names, sorted.

    Raises:
        ValueError: count is larger than the number of clients.
    """
    if count > len(names):
        raise ValueError(f"cannot sample {count} of {len(names)} clients without replacement")
    chosen = generator(seed, purpose, round).choice(len(names), size=count, replace=False)
    ordered = sorted(names)
    return sorted(ordered[i] for i in chosen)
