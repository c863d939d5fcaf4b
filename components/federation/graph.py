"""The client graph: divergences of adapters, and the weights of neighbors (DRIFT sections 4.1 to 4.3).

The paper compares clients by the symmetric KL divergence of their LoRA parameters (eqs. 6, 7 and
9). Its eq. 8 sums over weights w "drawn from p_Theta" without saying what distribution p_Theta is,
and the printed formula multiplies where it should take the logarithm of a ratio. The interpretation
is therefore an option:

- `softmax`: an adapter's values, all tensors concatenated, are the logits of one categorical
  distribution. It needs no bins and no fit, depends on which value is at which position, and is
  exactly a symmetric KL divergence. The probabilities are nearly uniform, so it is close to the
  mean squared difference of the two adapters' values.
- `gaussian`: each tensor's values are samples of a normal distribution, fitted by their mean and
  variance; closed form, summed over tensors. The positions of the values do not matter.
- `histogram`: the same with a histogram of each tensor, over bins that all clients share.

Because `softmax` behaves like a squared distance, the path from a to c over b is shorter than the
edge only if b is in the ball whose diameter is the edge (an obtuse angle at b). Clients that moved
independently of each other are at 60 degrees: every shortest path is then the direct edge, and
DRIFT-SP chooses the nearest client for all values of delta. Clients along a line give paths of
several edges.

All pairs are computed in one pass over the adapters: sums over values are inner products, so the K
x K matrix is a sum of matrix products of blocks of a few million values, in fp64, and no adapter is
copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import numpy.typing as npt

from components.models.store import iterate_blocks

if TYPE_CHECKING:
    import torch

BINS = 64
"""Bins of the option `histogram`, over the range of a tensor's values at all clients."""
VARIANCE_FLOOR = 1e-12
"""Added to each variance of the option `gaussian`, because LoRA's B is initialized with zeros."""

Matrix = npt.NDArray[np.float64]
Adapters = Sequence[Mapping[str, "torch.Tensor"]]


def divergence_matrix(adapters: Adapters, kind: str = "softmax") -> Matrix:
    """KL(s || t) + KL(t || s) in nats of all pairs of K adapters (DRIFT eqs. 6 to 9), [K, K].

    It is symmetric, not negative, and zero on the diagonal and between adapters of the same values.
    The kinds are those of the module's docstring. A mapping may read its tensors from a file.
    """
    if kind not in KINDS:
        raise ValueError(f"divergence '{kind}' is not known: use {', '.join(KINDS)}")
    if len(adapters) < 2:
        return np.zeros((len(adapters), len(adapters)))
    matrix = np.maximum(KINDS[kind](adapters), 0.0)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _softmax(adapters: Adapters) -> Matrix:
    """sum (p_s - p_t)(w_s - w_t) with p = softmax(w); the normalizers cancel, since p sums to one.

    With c the clients' mean of a value, p_s . (w_s - w_t) = p_s . (w_s - c) - p_s . (w_t - c):
    these products are of small numbers, so their differences keep their digits. The maximum of the
    logits is updated block by block, as in a streaming softmax.
    """
    count = len(adapters)
    highest = np.full(count, -np.inf)
    mass = np.zeros(count)
    products = np.zeros((count, count))
    largest = np.zeros(count)
    for logits in iterate_blocks(adapters):
        new_highest = np.maximum(highest, logits.max(axis=1))
        factor = np.exp(highest - new_highest)
        weights = np.exp(logits - new_highest[:, None])
        logits -= logits.mean(axis=0)
        highest = new_highest
        mass = mass * factor + weights.sum(axis=1)
        products = products * factor[:, None] + weights @ logits.T
        largest = np.maximum(largest, np.maximum(logits.max(axis=1), -logits.min(axis=1)))
    if not (mass > 0).all():
        return np.zeros((count, count))
    cross = products / mass[:, None]
    own = np.diag(cross)
    matrix = (own[:, None] + own[None, :]) - (cross + cross.T)
    # Each product is a mean of numbers below `largest`, which bounds its rounding error.
    rounding = 8 * np.finfo(float).eps * (largest[:, None] + largest[None, :])
    return np.where(matrix <= rounding, 0.0, matrix)


def _gaussian(adapters: Adapters) -> Matrix:
    """Sum over tensors of (v_s / v_t + v_t / v_s) / 2 - 1 + (m_s - m_t)^2 (1 / v_s + 1 / v_t) / 2."""
    total = np.zeros((len(adapters), len(adapters)))
    for name in sorted(adapters[0]):
        blocks = [
            (block.shape[1], block.mean(axis=1), block.var(axis=1))
            for block in iterate_blocks(adapters, [name])
        ]
        count = sum(width for width, _, _ in blocks)
        if count == 0:
            continue
        mean = sum(width * block_mean for width, block_mean, _ in blocks) / count
        spread = sum(
            width * (block_variance + np.square(block_mean - mean))
            for width, block_mean, block_variance in blocks
        )
        variance = spread / count + VARIANCE_FLOOR
        gap = np.square(mean[:, None] - mean[None, :])
        total += (
            np.square(variance[:, None] - variance[None, :]) / (2 * variance[:, None] * variance[None, :])
            + gap * (1 / variance[:, None] + 1 / variance[None, :]) / 2
        )
    return total


def _histogram(adapters: Adapters) -> Matrix:
    """Sum over tensors of the divergence of histograms.

    Each bin has half a count added (Jeffreys), so none is empty.
    """
    total = np.zeros((len(adapters), len(adapters)))
    for name in sorted(adapters[0]):
        ranges = [(block.min(), block.max()) for block in iterate_blocks(adapters, [name])]
        low = min((lowest for lowest, _ in ranges), default=0.0)
        high = max((highest for _, highest in ranges), default=0.0)
        if low == high:
            continue
        counts = np.full((len(adapters), BINS), 0.5)
        for block in iterate_blocks(adapters, [name]):
            bins = np.minimum(((block - low) * (BINS / (high - low))).astype(int), BINS - 1)
            for row, indices in zip(counts, bins, strict=True):
                row += np.bincount(indices, minlength=BINS)
        shares = counts / counts.sum(axis=1, keepdims=True)
        logs = np.log(shares)
        for row_index in range(len(adapters)):
            difference = shares[row_index] - shares
            total[row_index] += (difference * (logs[row_index] - logs)).sum(axis=1)
    return total


KINDS: dict[str, Callable[[Adapters], Matrix]] = {
    "softmax": _softmax,
    "gaussian": _gaussian,
    "histogram": _histogram,
}


def client_graph(divergences: npt.ArrayLike, names: Sequence[str]) -> nx.Graph:
    """The complete graph of a round's K clients (DRIFT section 4, figure 3).

    The edges' `weight` is their divergence, [K, K] in the order of the names.
    """
    matrix = np.asarray(divergences, dtype=float)
    if matrix.shape != (len(names), len(names)) or len(set(names)) < len(names):
        raise ValueError(
            f"divergences have shape {matrix.shape} for {len(names)} names, {len(set(names))} of them"
            " distinct; expected a square matrix with a name for each row"
        )
    if not np.isfinite(matrix).all() or (matrix < 0).any() or not np.array_equal(matrix, matrix.T):
        raise ValueError("divergences must be finite, not negative and symmetric")
    graph = nx.Graph()
    graph.add_nodes_from(names)
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            graph.add_edge(first, names[j], weight=float(matrix[i, j]))
    return graph


def spanning_tree(graph: nx.Graph) -> nx.Graph:
    """The minimum spanning tree of a client graph, by Kruskal's algorithm (DRIFT eq. 10)."""
    return nx.minimum_spanning_tree(graph, weight="weight", algorithm="kruskal")


def mst_weights(graph: nx.Graph, source: str, tree: nx.Graph | None = None) -> dict[str, float]:
    """Weights of a client and its neighbors in the spanning tree (DRIFT section 4.1, eq. 14).

    They are by name, with the source first, and sum to one. The tree is that of the graph; None
    computes it.
    """
    tree = spanning_tree(graph) if tree is None else tree
    return inverse_weights(source, {name: tree[source][name]["weight"] for name in sorted(tree[source])})


def shortest_path(graph: nx.Graph, source: str, delta: float) -> list[str]:
    """The path along which a client is aggregated (DRIFT section 4.2, eqs. 11 to 13 and theorem 3).

    Of the shortest paths (Dijkstra) from the source to each other client, with |P| edges each, this
    is the longest one with |P| / sum |P| <= delta. Theorem 3 bounds the choice: where delta admits
    none, as delta = 0 always does, it is the shortest one. Of several with the same number of edges
    it is the one with the least total divergence. The names begin with the source, which is alone
    where there is no other client.

    With K clients, |P| / sum |P| is at most the maximum over L = 1 .. K - 1 of L / (L (L + 1) / 2 +
    K - 1 - L): 0.5 for K = 4, 4/13 for 8, 0.2 for 16. The clients on a path of L edges have
    shortest paths of 1 .. L edges, and each of the other K - 1 - L clients has a path of at least
    one edge. All larger values of delta choose the same path.
    """
    if not 0 <= delta <= 1:
        raise ValueError(f"delta is {delta}: it is a share, from 0 to 1")
    totals, paths = nx.single_source_dijkstra(graph, source, weight="weight")
    lengths = {target: len(path) - 1 for target, path in paths.items() if target != source}
    if not lengths:
        return [source]
    allowed = {length for length in lengths.values() if length / sum(lengths.values()) <= delta + 1e-12}
    chosen_length = max(allowed, default=min(lengths.values()))
    candidates = [target for target, length in lengths.items() if length == chosen_length]
    path: list[str] = paths[min(candidates, key=lambda target: (totals[target], target))]
    return path


def shortest_path_weights(graph: nx.Graph, source: str, delta: float) -> dict[str, float]:
    """Weights with which a client is aggregated with those on its path (DRIFT section 4.2, eq. 14).

    Each client on the path is weighted by the edge that leads to it. They are by name, with the
    source first, and sum to one.
    """
    path = shortest_path(graph, source, delta)
    edges = {name: graph[previous][name]["weight"] for previous, name in pairwise(path)}
    return inverse_weights(source, edges)


def inverse_weights(source: str, edges: Mapping[str, float]) -> dict[str, float]:
    """Weights by inverse edges, the source's by the smallest edge, normalized (DRIFT eq. 14).

    The edges are the divergences of the other clients; the source comes first in the weights. An
    edge of zero (equal adapters) would have an infinite weight. In the limit, the source and all
    clients with edges of zero share the whole weight evenly, and that is what is returned.
    """
    if not edges:
        return {source: 1.0}
    smallest = min(edges.values())
    ratios = {source: 1.0}
    for name, edge in edges.items():
        ratios[name] = float(edge == smallest) if smallest == 0 else smallest / edge
    total = sum(ratios.values())
    return {name: ratio / total for name, ratio in ratios.items()}


def own_cluster_share(
    weights: Mapping[str, Mapping[str, float]], true_clusters: Mapping[str, str | None]
) -> dict[str, float]:
    """Share of the clients' aggregation that comes from their own true clusters, themselves excluded.

    The weights are those of the clients that each one is aggregated with, its own among them.
    `neighbors` is the share of the neighbors that are of the client's true cluster, `weight` the same
    by weight, and `chance` the share that random neighbors among these clients would have; NaN
    where there are no neighbors.
    """
    neighbors: list[tuple[float, bool]] = []
    for name, members in weights.items():
        for other, weight in members.items():
            if other != name and true_clusters.get(name) and true_clusters.get(other):
                neighbors.append((weight, true_clusters[name] == true_clusters[other]))
    known = [name for name in weights if true_clusters.get(name)]
    random_pairs: list[bool] = []
    for name in known:
        random_pairs += [true_clusters[name] == true_clusters[other] for other in known if other != name]
    mass = sum(weight for weight, _ in neighbors)
    own_mass = sum(weight for weight, same in neighbors if same)
    return {
        "neighbors": sum(same for _, same in neighbors) / len(neighbors) if neighbors else float("nan"),
        "weight": own_mass / mass if mass else float("nan"),
        "chance": sum(random_pairs) / len(random_pairs) if random_pairs else float("nan"),
    }


def divergence_metrics(clients: nx.Graph, tree: nx.Graph) -> dict[str, float]:
    """Mean divergence over the edges of the graph and of its spanning tree; empty without edges."""
    metrics = {}
    for name, graph in (("divergence", clients), ("divergence_of_tree", tree)):
        weights = [float(weight) for _, _, weight in graph.edges.data("weight")]
        if weights:
            metrics[name] = sum(weights) / len(weights)
    return metrics
