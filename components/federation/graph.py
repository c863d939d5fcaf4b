"""The client graph: how far adapters are from each other, and who is aggregated with whom (DRIFT sections 4.1 to 4.3).

The paper measures clients by the symmetric KL divergence of their LoRA parameters (eqs. 6, 7 and 9), but its eq. 8 sums
over weights w "drawn from p_Theta" without saying what distribution p_Theta is, and the printed formula multiplies where
it should take the logarithm of a ratio. So the reading is an option:

- `softmax`: an adapter's values, all tensors one after the other, are the logits of one categorical distribution. It
  needs no bins and no fit, tells which value stands where (two adapters with the same values in another order differ), and
  is symmetric KL to the letter. The probabilities are nearly uniform, so it is close to the mean squared difference of
  the two adapters' values about its own mean.
- `gaussian`: each tensor's values are drawn from a normal distribution, fitted by their mean and variance; closed form,
  summed over tensors. Where the values stand has no say.
- `histogram`: the same with a histogram of each tensor, over bins that all clients share.

`softmax` being like a squared distance, the way from a to c over b is shorter than the edge only where b lies inside the ball that has
the edge for a diameter (an obtuse angle at b). Clients that moved independently of each other are at 60 degrees: every shortest path is the
direct edge then, and DRIFT-SP takes the nearest client whatever its delta is. Clients along a line make paths of many edges.

All pairs come from one pass over the adapters: sums over values are inner products, so the K x K matrix is built from matrix
products of blocks of a few million values, in fp64, and no adapter is copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from components.models.adapters import stacked_blocks

if TYPE_CHECKING:
    import torch

BINS = 64
"""Bins of the option `histogram`, between the smallest and the largest value that a client has in the tensor."""
VARIANCE_FLOOR = 1e-12
"""Added to each variance of the option `gaussian`: LoRA's B starts at zero, where there is nothing to fit."""


def divergence_matrix(adapters: Sequence[Mapping[str, torch.Tensor]], kind: str = "softmax") -> np.ndarray:
    """Symmetric KL divergence of all pairs of adapters, KL(s || t) + KL(t || s) (DRIFT eqs. 6 to 9).

    Args:
        adapters: K adapters with the same tensors; a tensor is read when its turn comes, so a mapping may read them from a file.
        kind: 'softmax', 'gaussian' or 'histogram', see the module's docstring.

    Returns:
        [K, K] float64 in nats, symmetric, not negative, zero on the diagonal and between adapters of the same values.

    Raises:
        AdapterError: the adapters do not have the same tensors, or a value is NaN or infinite; names the tensor.
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"divergence '{kind}' is not known: use {', '.join(KINDS)}")
    if len(adapters) < 2:
        return np.zeros((len(adapters), len(adapters)))
    matrix = np.maximum(KINDS[kind](adapters), 0.0)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _softmax(adapters: Sequence[Mapping[str, torch.Tensor]]) -> np.ndarray:
    """sum (p_s - p_t)(w_s - w_t), where p = softmax(w): the normalisers cancel, because both p sum to one.

    With c the clients' mean of a value, p_s . (w_s - w_t) = p_s . (w_s - c) - p_s . (w_t - c): the products are of small
    numbers, so their differences keep their digits. The largest logit is taken out as it is met, as in a streaming softmax.
    """
    count = len(adapters)
    highest, mass, products, largest = np.full(count, -np.inf), np.zeros(count), np.zeros((count, count)), np.zeros(count)
    for logits in stacked_blocks(adapters):
        now = np.maximum(highest, logits.max(axis=1))
        shrunk = np.exp(highest - now)
        weights = np.exp(logits - now[:, None])
        logits -= logits.mean(axis=0)
        highest, mass, products = now, mass * shrunk + weights.sum(axis=1), products * shrunk[:, None] + weights @ logits.T
        largest = np.maximum(largest, np.maximum(logits.max(axis=1), -logits.min(axis=1)))
    if not (mass > 0).all():
        return np.zeros((count, count))
    cross = products / mass[:, None]
    own = np.diag(cross)
    matrix = (own[:, None] + own[None, :]) - (cross + cross.T)
    noise = 8 * np.finfo(float).eps * (largest[:, None] + largest[None, :])  # each product is a mean of numbers below that
    return np.where(matrix <= noise, 0.0, matrix)


def _gaussian(adapters: Sequence[Mapping[str, torch.Tensor]]) -> np.ndarray:
    """Sum over tensors of (v_s / v_t + v_t / v_s) / 2 - 1 + (m_s - m_t)^2 (1 / v_s + 1 / v_t) / 2."""
    total = np.zeros((len(adapters), len(adapters)))
    for name in sorted(adapters[0]):
        blocks = [(block.shape[1], block.mean(axis=1), block.var(axis=1)) for block in stacked_blocks(adapters, [name])]
        count = sum(width for width, _, _ in blocks)
        if count == 0:
            continue
        mean = sum(width * part for width, part, _ in blocks) / count
        variance = sum(width * (spread + np.square(part - mean)) for width, part, spread in blocks) / count + VARIANCE_FLOOR
        gap = np.square(mean[:, None] - mean[None, :])
        total += np.square(variance[:, None] - variance[None, :]) / (2 * variance[:, None] * variance[None, :]) + gap * (1 / variance[:, None] + 1 / variance[None, :]) / 2
    return total


def _histogram(adapters: Sequence[Mapping[str, torch.Tensor]]) -> np.ndarray:
    """Sum over tensors of the divergence of histograms; each bin starts with half a value (Jeffreys), so none is empty."""
    total = np.zeros((len(adapters), len(adapters)))
    for name in sorted(adapters[0]):
        ends = [(block.min(), block.max()) for block in stacked_blocks(adapters, [name])]
        low, high = min((low for low, _ in ends), default=0.0), max((high for _, high in ends), default=0.0)
        if low == high:
            continue
        counts = np.full((len(adapters), BINS), 0.5)
        for block in stacked_blocks(adapters, [name]):
            places = np.minimum(((block - low) * (BINS / (high - low))).astype(int), BINS - 1)
            for row, values in zip(counts, places, strict=True):
                row += np.bincount(values, minlength=BINS)
        shares = counts / counts.sum(axis=1, keepdims=True)
        logs = np.log(shares)
        for row in range(len(adapters)):
            total[row] += ((shares[row] - shares) * (logs[row] - logs)).sum(axis=1)
    return total


KINDS: dict[str, Callable[[Sequence[Mapping[str, torch.Tensor]]], np.ndarray]] = {"softmax": _softmax, "gaussian": _gaussian, "histogram": _histogram}


def client_graph(divergences: np.ndarray, names: Sequence[str]) -> nx.Graph:
    """The complete graph of a round's clients; the edges' `weight` is their divergence (DRIFT section 4, figure 3).

    Args:
        divergences: [K, K], symmetric, not negative, finite.
        names: K distinct names, in the order of the rows.

    Raises:
        ValueError: the matrix is none of that.
    """
    divergences = np.asarray(divergences, dtype=float)
    if divergences.shape != (len(names), len(names)) or len(set(names)) < len(names):
        raise ValueError(f"divergences have shape {divergences.shape} for {len(names)} names, {len(set(names))} of them distinct; expected a square matrix with a name for each row")
    if not np.isfinite(divergences).all() or (divergences < 0).any() or not np.array_equal(divergences, divergences.T):
        raise ValueError("divergences must be finite, not negative and symmetric")
    graph = nx.Graph()
    graph.add_nodes_from(names)
    graph.add_weighted_edges_from((names[i], names[j], float(divergences[i, j])) for i in range(len(names)) for j in range(i + 1, len(names)))
    return graph


def spanning_tree(graph: nx.Graph) -> nx.Graph:
    """The minimum spanning tree of a client graph, by Kruskal's algorithm (DRIFT eq. 10)."""
    return nx.minimum_spanning_tree(graph, weight="weight", algorithm="kruskal")


def mst_weights(graph: nx.Graph, source: str, tree: nx.Graph | None = None) -> dict[str, float]:
    """Weights with which a client is aggregated with its neighbours in the minimum spanning tree (DRIFT section 4.1, eq. 14).

    Args:
        graph: of the round's clients.
        source: the client.
        tree: of the graph, where it is known already.

    Returns:
        weight by name, with the source first; they sum to one.
    """
    tree = spanning_tree(graph) if tree is None else tree
    return inverse_weights(source, {name: tree[source][name]["weight"] for name in sorted(tree[source])})


def shortest_path(graph: nx.Graph, source: str, delta: float) -> list[str]:
    """The path along which a client is aggregated (DRIFT section 4.2, eqs. 11 to 13 and theorem 3).

    Of the shortest paths (Dijkstra) from the source to each other client, |P| being the number of their edges, the
    longest one with |P| / sum |P| <= delta. Theorem 3 bounds the choice: where delta admits none, as delta = 0 always
    does, it is the shortest one, and none is longer than the longest. Of several of the same length it is the one
    with the least total divergence.

    With K clients, |P| / sum |P| is at most the largest L / (L (L + 1) / 2 + K - 1 - L) over L = 1 .. K - 1: 0.5 for K = 4, 4/13 for 8,
    0.2 for 16. For the way to each client on a path of L edges is a shortest path of its own, 1 .. L edges long, and each of the other
    K - 1 - L clients takes at least one edge. All larger deltas choose the same path.

    Args:
        graph: of the round's clients.
        source: the client.
        delta: divergence threshold, 0 to 1.

    Returns:
        names along the path, the source first; the source alone where there is no other client.

    Raises:
        ValueError: delta is not in 0 to 1.
    """
    if not 0 <= delta <= 1:
        raise ValueError(f"delta is {delta}: it is a share, from 0 to 1")
    totals, paths = nx.single_source_dijkstra(graph, source, weight="weight")
    lengths = {target: len(path) - 1 for target, path in paths.items() if target != source}
    if not lengths:
        return [source]
    allowed = {length for length in lengths.values() if length / sum(lengths.values()) <= delta + 1e-12}
    wanted = max(allowed, default=min(lengths.values()))
    return paths[min((target for target, length in lengths.items() if length == wanted), key=lambda target: (totals[target], target))]


def shortest_path_weights(graph: nx.Graph, source: str, delta: float) -> dict[str, float]:
    """Weights with which a client is aggregated with those on its path, each by the edge that leads to it (DRIFT section 4.2, eq. 14).

    Args:
        graph, source, delta: as shortest_path.

    Returns:
        weight by name, with the source first; they sum to one.
    """
    path = shortest_path(graph, source, delta)
    return inverse_weights(source, {name: graph[before][name]["weight"] for before, name in pairwise(path)})


def inverse_weights(source: str, edges: Mapping[str, float]) -> dict[str, float]:
    """Each client by the inverse of its edge, the source by that of the smallest edge, normalised (DRIFT eq. 14).

    An edge of zero (the same adapter) would have an infinite weight: in the limit it and the source share the whole
    weight evenly with the other edges of zero, and that is what they get.

    Args:
        source: the client.
        edges: divergence by name of the others.

    Returns:
        weight by name, with the source first; they sum to one.
    """
    if not edges:
        return {source: 1.0}
    smallest = min(edges.values())
    ratios = {source: 1.0} | {name: float(edge == smallest) if smallest == 0 else smallest / edge for name, edge in edges.items()}
    total = sum(ratios.values())
    return {name: ratio / total for name, ratio in ratios.items()}


def own_group_share(weights: Mapping[str, Mapping[str, float]], known: Mapping[str, str | None]) -> dict[str, float]:
    """How far clients are aggregated with their own group, without themselves, over the clients whose group is known.

    Args:
        weights: by client, the weights of those it is aggregated with (its own among them).
        known: true group by client.

    Returns:
        neighbours: share of the neighbours that are of the client's own group; weight: the same by weight; chance: the
        share that neighbours drawn at random among these clients would have. NaN where there are no neighbours.
    """
    pairs = [(name, other, weight) for name, members in weights.items() for other, weight in members.items() if other != name and known.get(name) and known.get(other)]
    own = [(weight, known[name] == known[other]) for name, other, weight in pairs]
    named = [name for name in weights if known.get(name)]
    drawn = [known[name] == known[other] for name in named for other in named if other != name]
    mass = sum(weight for weight, _ in own)
    return {
        "neighbours": sum(same for _, same in own) / len(own) if own else float("nan"),
        "weight": sum(weight for weight, same in own if same) / mass if mass else float("nan"),
        "chance": sum(drawn) / len(drawn) if drawn else float("nan")}
