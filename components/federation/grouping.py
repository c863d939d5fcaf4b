"""Client grouping in balanced clusters (FedBiscuit section 5.1, step 2.1).

Two ways to the same constraint (eq. 5, sizes differ by at most one):

- `balanced_groups`, the paper's procedure. Every client is first given the selector on which its validation loss is
  lowest. Then, until all are closed, the cluster that most clients chose is capped, and those over the cap go to the
  open cluster of their next-best loss. The paper does not say who stays under a cap: here it is those with the lowest
  loss on that selector, so that the order in which losses arrive has no say.
- `least_loss_groups`, the least sum of losses under the constraint: the paper's problem (eqs. 4 and 5, for given
  selectors) with all clients weighted the same. A selector that is better than the others for everybody draws all
  clients in the procedure, and the caps then sort them by how easy their pairs are. In the sum such a lead cancels up to
  the remainder of M / U, because the sizes are fixed, and what is left is who gains most from which selector. With the
  p_m of eq. 4 it would not: clients with much data would be drawn to the leading selector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def balanced_groups(losses: np.ndarray, previous: Sequence[int] | None = None) -> np.ndarray:
    """Put clients into clusters whose sizes differ by at most one (FedBiscuit eq. 5).

    A row of NaN is a client without a vote (it has no validation pairs): it keeps its previous group as long as the
    sizes allow, and is put where there is room if it has none. In a row with some numbers, NaN and infinity are the
    worst loss.

    Args:
        losses: [M, U], mean validation loss of each client on each selector.
        previous: [M], the groups until now; None, or -1 for a client, where there are none. Only clients without a
            vote keep theirs.

    Returns:
        [M] integers in 0..U-1. Equal losses are decided by the smaller cluster, then by the lower number; permuting
        the clients permutes the result, as long as no two of them have the same loss on a selector.

    Raises:
        ValueError: losses is not a matrix with at least one column, or previous does not fit it.
    """
    losses, last, keeps = _checked(losses, previous)
    count, selectors = losses.shape
    mute = np.isnan(losses).all(axis=1)
    wishes = np.where(np.isnan(losses), np.inf, losses)
    wishes[keeps, last[keeps]] = -np.inf  # before every vote, so that only other keepers can displace it

    groups = np.full(count, -1)
    for client in [*np.flatnonzero(~mute | keeps), *np.flatnonzero(mute & ~keeps)]:
        groups[client] = _best(wishes[client], groups, range(selectors))
    open_clusters = list(range(selectors))
    while len(open_clusters) > 1:
        sizes = np.bincount(groups, minlength=selectors)
        largest = max(open_clusters, key=lambda u: (sizes[u], -u))
        cap = -(-int(sizes[open_clusters].sum()) // len(open_clusters))
        members = np.flatnonzero(groups == largest)
        over = members[np.lexsort((members, wishes[members, largest]))][cap:]
        open_clusters.remove(largest)
        groups[over] = -1
        for client in over:
            groups[client] = _best(wishes[client], groups, open_clusters)
    return groups


def least_loss_groups(losses: np.ndarray, previous: Sequence[int] | None = None) -> np.ndarray:
    """Put clients into clusters whose sizes differ by at most one, with the least sum of losses (FedBiscuit eqs. 4 and 5, p_m = 1 / M).

    Solved exactly, as an assignment of clients to seats: each cluster has M // U seats that must be taken and one more
    that may stay empty.

    Args:
        losses, previous: as balanced_groups; rows of NaN are treated as there.

    Returns:
        [M] integers in 0..U-1.

    Raises:
        ValueError: as balanced_groups.
    """
    from scipy.optimize import linear_sum_assignment

    losses, last, keeps = _checked(losses, previous)
    count, selectors = losses.shape
    finite = np.abs(losses[np.isfinite(losses)])
    worst = 1e3 * (1.0 + (finite.max() if finite.size else 0.0))
    costs = np.where(np.isfinite(losses), losses, worst)
    costs[np.isnan(losses).all(axis=1)] = 0.0
    costs[keeps, last[keeps]] = -1e3 * worst * count
    seats = np.repeat(np.arange(selectors), count // selectors + 1)
    spare = np.tile(np.arange(count // selectors + 1) == count // selectors, selectors)
    nobody = np.where(spare, 0.0, 1e9 * worst * count)[None, :].repeat(len(seats) - count, axis=0)
    _, taken = linear_sum_assignment(np.vstack([costs[:, seats], nobody]))
    return seats[taken[:count]]


def _checked(losses: np.ndarray, previous: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The losses [M, U], the last groups [M] with -1 for none, and which clients keep theirs for want of a vote [M]."""
    losses = np.asarray(losses, dtype=float)
    if losses.ndim != 2 or losses.shape[1] == 0:
        raise ValueError(f"losses have shape {losses.shape}, expected [clients, selectors]")
    count, selectors = losses.shape
    last = np.full(count, -1) if previous is None else np.asarray(previous)
    if last.shape != (count,) or not np.issubdtype(last.dtype, np.number) or not (np.equal(np.mod(last, 1), 0) & (last >= -1) & (last < selectors)).all():
        raise ValueError(f"previous groups must be {count} numbers between -1 and {selectors - 1}, got {last.tolist()}")
    last = last.astype(int)
    return losses, last, np.isnan(losses).all(axis=1) & (last >= 0)


def _best(wishes: np.ndarray, groups: np.ndarray, clusters: Sequence[int]) -> int:
    """The cluster of least loss; of several, the one with fewest members by now."""
    return min(clusters, key=lambda u: (wishes[u], int((groups == u).sum()), u))


def moved(groups: Sequence[int], previous: Sequence[int] | None) -> int:
    """How many clients changed their group; none where there was no grouping before."""
    return 0 if previous is None else int(np.sum(np.asarray(groups) != np.asarray(previous)))


def rand_index(assigned: Mapping[str, str], known: Mapping[str, str | None]) -> float:
    """Adjusted Rand index of a grouping against the clients' true groups (Hubert and Arabie 1985): 1 the same, about 0 by chance.

    Args:
        assigned: group by client.
        known: true group by client; clients without one are left out.
    """
    from sklearn.metrics import adjusted_rand_score

    names = sorted(name for name in assigned if known.get(name))
    return float(adjusted_rand_score([known[name] for name in names], [assigned[name] for name in names]))
