"""Grouping of clients in balanced clusters (FedBiscuit section 5.1, step 2.1).

Two solutions of the same constraint (eq. 5: sizes differ by at most one):

- `balanced_groups`, the paper's procedure. Each client is first assigned the selector on which its
  validation loss is lowest. Then, until all clusters are closed, the largest open cluster is
  capped, and the clients above the cap move to the open cluster with their next-lowest loss. The
  paper does not say which clients stay below the cap: here those with the lowest loss on that
  selector do, so that the result does not depend on the order in which losses arrive.
- `least_loss_groups`, the minimum of the sum of losses under the constraint: the paper's problem
  (eqs. 4 and 5, for fixed selectors) with equal weights of the clients. A selector that is better
  than the others for all clients attracts all of them in the procedure, and the caps then sort them
  by how easy their pairs are. In the sum such an advantage cancels up to the remainder of M / U,
  because the sizes are fixed, and the relative gains decide. With the weights p_m of eq. 4 it would
  not cancel: clients with much data would be attracted by the better selector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Clusters = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float64]


def balanced_groups(losses: npt.ArrayLike, previous: npt.ArrayLike | None = None) -> Clusters:
    """Assign M clients to U clusters whose sizes differ by at most one (FedBiscuit eq. 5), [M].

    A row of NaN is a client without validation pairs. It stays in its previous cluster as long as the
    sizes allow it, and is put where there is room if it has none. In other rows, NaN and infinity
    are the worst loss. Ties of losses are decided by the smaller cluster, then by the lower number.
    Permuting the clients permutes the result, as long as no two of them have the same loss on a
    selector.

    Args:
        losses: [M, U], mean validation loss of each client on each selector.
        previous: [M], the previous clusters; None, or -1 for a client, where there are none. Only
            clients without validation pairs stay in theirs.
    """
    matrix, last, stays = _check_arguments(losses, previous)
    count, selectors = matrix.shape
    without_losses = np.isnan(matrix).all(axis=1)
    costs = np.where(np.isnan(matrix), np.inf, matrix)
    costs[stays, last[stays]] = -np.inf  # so that only clients that stay too can displace it

    clusters = np.full(count, -1, dtype=np.int64)
    for client in [*np.flatnonzero(~without_losses | stays), *np.flatnonzero(without_losses & ~stays)]:
        clusters[client] = _best_cluster(costs[client], clusters, range(selectors))
    open_clusters = list(range(selectors))
    while len(open_clusters) > 1:
        sizes = np.bincount(clusters, minlength=selectors)
        largest = max(open_clusters, key=lambda u: (sizes[u], -u))
        cap = -(-int(sizes[open_clusters].sum()) // len(open_clusters))
        members = np.flatnonzero(clusters == largest)
        above_cap = members[np.lexsort((members, costs[members, largest]))][cap:]
        open_clusters.remove(largest)
        clusters[above_cap] = -1
        for client in above_cap:
            clusters[client] = _best_cluster(costs[client], clusters, open_clusters)
    return clusters


def least_loss_groups(losses: npt.ArrayLike, previous: npt.ArrayLike | None = None) -> Clusters:
    """Assign clients to clusters whose sizes differ by at most one, with the minimum sum of losses.

    This is FedBiscuit eqs. 4 and 5 with p_m = 1 / M, solved exactly as an assignment of clients to
    places: each cluster has M // U places that must be taken, and one more that may stay empty.
    Arguments and result are those of balanced_groups.
    """
    from scipy.optimize import linear_sum_assignment

    matrix, last, stays = _check_arguments(losses, previous)
    count, selectors = matrix.shape
    finite = np.abs(matrix[np.isfinite(matrix)])
    worst = 1e3 * (1.0 + (finite.max() if finite.size else 0.0))
    costs = np.where(np.isfinite(matrix), matrix, worst)
    costs[np.isnan(matrix).all(axis=1)] = 0.0
    costs[stays, last[stays]] = -1e3 * worst * count
    places = np.repeat(np.arange(selectors), count // selectors + 1)
    optional = np.tile(np.arange(count // selectors + 1) == count // selectors, selectors)
    empty = np.where(optional, 0.0, 1e9 * worst * count)[None, :].repeat(len(places) - count, axis=0)
    _, chosen = linear_sum_assignment(np.vstack([costs[:, places], empty]))
    clusters: Clusters = places[chosen[:count]]
    return clusters


def _check_arguments(
    losses: npt.ArrayLike, previous: npt.ArrayLike | None
) -> tuple[Losses, Clusters, npt.NDArray[np.bool_]]:
    """Losses [M, U], previous clusters [M] with -1 for none, and which clients stay in theirs [M]."""
    matrix = np.asarray(losses, dtype=float)
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise ValueError(f"losses have shape {matrix.shape}, expected [clients, selectors]")
    count, selectors = matrix.shape
    last = np.full(count, -1) if previous is None else np.asarray(previous)
    if (
        last.shape != (count,)
        or not np.issubdtype(last.dtype, np.number)
        or not (np.equal(np.mod(last, 1), 0) & (last >= -1) & (last < selectors)).all()
    ):
        raise ValueError(
            f"previous clusters must be {count} numbers between -1 and {selectors - 1}, got {last.tolist()}"
        )
    clusters = last.astype(np.int64)
    return matrix, clusters, np.isnan(matrix).all(axis=1) & (clusters >= 0)


def _best_cluster(costs: Losses, assigned: Clusters, candidates: Sequence[int]) -> int:
    """The cluster of the lowest cost; of several, the one with fewest members so far."""
    return min(candidates, key=lambda u: (costs[u], int((assigned == u).sum()), u))


def count_moved(clusters: Sequence[int] | Clusters, previous: Sequence[int] | Clusters | None) -> int:
    """Number of clients that changed their cluster; 0 where there was no grouping before."""
    return 0 if previous is None else int(np.sum(np.asarray(clusters) != np.asarray(previous)))


def adjusted_rand_index(assignment: Mapping[str, str], true_clusters: Mapping[str, str | None]) -> float:
    """Adjusted Rand index of a grouping against the clients' true clusters (Hubert and Arabie 1985).

    It is 1 for equal partitions, about 0 for random ones. Clients without a true cluster
    are left out.
    """
    from sklearn.metrics import adjusted_rand_score

    names = sorted(name for name in assignment if true_clusters.get(name))
    return float(
        adjusted_rand_score([true_clusters[name] for name in names], [assignment[name] for name in names])
    )


def mean_loss_of_cluster(losses: Losses, clusters: Clusters) -> float:
    """Mean over M clients of the loss [M, U] on their cluster's selector; NaN where none has losses."""
    if np.isnan(losses).all():
        return float("nan")
    return float(np.nanmean(losses[np.arange(len(losses)), clusters]))
