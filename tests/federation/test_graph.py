"""Divergences of adapters, and the weights that the client graph gives, against plain loops and cases worked out by hand."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from scipy.stats import norm

from components.federation import graph as module
from components.federation.graph import (
    client_graph,
    divergence_matrix,
    inverse_weights,
    mst_weights,
    own_group_share,
    shortest_path,
    shortest_path_weights,
    spanning_tree,
)
from components.models import adapters as models
from components.models.adapters import AdapterError

KINDS = ("softmax", "gaussian", "histogram")


def adapters(count, seed=0, scale=1e-2, spread=1e-3):
    """Clients' adapters about a common one, as after some local steps."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A.weight": (4, 60), "q.lora_B.weight": (50, 4), "v.lora_A.weight": (4, 60)}
    common = {name: scale * torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    return [{name: tensor + spread * torch.randn(tensor.shape, generator=numbers) for name, tensor in common.items()} for _ in range(count)]


def flat(adapter):
    return np.concatenate([adapter[name].double().numpy().ravel() for name in sorted(adapter)])


def by_double_loop(clients):
    """Symmetric KL of softmax(w), pair by pair, with scipy."""
    distributions = [softmax(flat(adapter)) for adapter in clients]
    return np.array([[rel_entr(p, q).sum() + rel_entr(q, p).sum() for q in distributions] for p in distributions])


# --- the matrix

@pytest.mark.parametrize(("scale", "spread"), [(1e-2, 1e-3), (1e-2, 1e-6), (1.0, 0.5), (30.0, 10.0)])
def test_softmax_is_the_symmetric_kl_of_scipy_whatever_the_size_of_the_weights(scale, spread):
    clients = adapters(5, scale=scale, spread=spread)
    expected = by_double_loop(clients)
    assert np.allclose(divergence_matrix(clients), expected, rtol=1e-6, atol=1e-14 * max(1, scale))


def test_softmax_by_hand():
    p, q = np.array([1, 2, 1]) / 4, np.array([2, 1, 1]) / 4
    clients = [{"a": torch.tensor(np.log(p), dtype=torch.float32)}, {"a": torch.tensor(np.log(q) + 5, dtype=torch.float32)}]
    assert divergence_matrix(clients)[0, 1] == pytest.approx(0.5 * math.log(2), rel=1e-6), "a shift of all logits changes nothing"


def test_gaussian_is_the_closed_form_summed_over_tensors():
    clients = adapters(3, spread=5e-3)
    for i, j in itertools.combinations(range(3), 2):
        expected = 0.0
        for name in clients[0]:
            (m1, s1), (m2, s2) = ((c[name].double().mean().item(), c[name].double().std(correction=0).item()) for c in (clients[i], clients[j]))
            xs = np.linspace(min(m1, m2) - 12 * max(s1, s2), max(m1, m2) + 12 * max(s1, s2), 200_001)
            p, q = norm.pdf(xs, m1, s1), norm.pdf(xs, m2, s2)
            expected += np.trapezoid((p - q) * (norm.logpdf(xs, m1, s1) - norm.logpdf(xs, m2, s2)), xs)
        assert divergence_matrix(clients, "gaussian")[i, j] == pytest.approx(expected, rel=1e-4)


def test_histogram_is_that_of_numpy_over_shared_bins():
    clients = adapters(3, spread=5e-3)
    expected = np.zeros((3, 3))
    for name in clients[0]:
        values = [c[name].double().numpy().ravel() for c in clients]
        counts = np.array([np.histogram(v, bins=module.BINS, range=(min(map(np.min, values)), max(map(np.max, values))))[0] + 0.5 for v in values])
        shares = counts / counts.sum(axis=1, keepdims=True)
        expected += [[(rel_entr(p, q) + rel_entr(q, p)).sum() for q in shares] for p in shares]
    assert np.allclose(divergence_matrix(clients, "histogram"), expected, rtol=0.02)  # values that lie on an edge of a bin


@pytest.mark.parametrize("kind", KINDS)
def test_identical_adapters_are_at_zero_and_the_matrix_is_symmetric_and_does_not_depend_on_the_order(kind):
    clients = adapters(4)
    clients.append({name: tensor.clone() for name, tensor in clients[1].items()})
    matrix = divergence_matrix(clients, kind)
    assert matrix[1, 4] == 0 and (np.diag(matrix) == 0).all() and np.array_equal(matrix, matrix.T)
    apart = ~np.eye(5, dtype=bool)
    apart[1, 4] = apart[4, 1] = False
    assert (matrix[apart] > 0).all()
    order = [3, 0, 4, 2, 1]
    assert np.allclose(divergence_matrix([clients[n] for n in order], kind), matrix[np.ix_(order, order)], rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_near_adapter_is_nearer_than_a_far_one(kind):
    start = adapters(1)[0]
    far = {name: 3 * tensor + 0.02 for name, tensor in start.items()}
    clients = [start, *({name: torch.lerp(start[name], far[name], share) for name in start} for share in (0.1, 0.4, 1.0))]
    distances = divergence_matrix(clients, kind)[0]
    assert 0 < distances[1] < distances[2] < distances[3]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_change_the_numbers(kind, monkeypatch):
    clients = adapters(3, scale=1.0, spread=0.3)
    whole = divergence_matrix(clients, kind)
    monkeypatch.setattr(models, "BLOCK", 3 * 7)
    monkeypatch.setattr(models, "WIDTH", 5)
    assert np.allclose(divergence_matrix(clients, kind), whole, rtol=1e-10)


def test_each_tensor_is_read_once_of_all_clients_and_then_the_next_one():
    class Watched(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    asked = []
    clients = [Watched(a) for a in adapters(3)]
    divergence_matrix(clients)
    assert asked == [name for name in sorted(clients[0]) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_an_adapter_like_the_others_is_named(kind):
    good = adapters(2)
    with pytest.raises(AdapterError, match="adapter 1 and adapter 0 do not have the same tensors: only one of them has 'v.lora_A.weight'"):
        divergence_matrix([good[0], {n: t for n, t in good[1].items() if n != "v.lora_A.weight"}], kind)
    with pytest.raises(AdapterError, match=r"tensor 'q.lora_A.weight' has shapes \[\(4, 60\), \(240,\)\]"):
        divergence_matrix([good[0], good[1] | {"q.lora_A.weight": torch.zeros(240)}], kind)
    with pytest.raises(AdapterError, match="adapter 1: tensor 'q.lora_B.weight' has values that are NaN or infinite"):
        divergence_matrix([good[0], good[1] | {"q.lora_B.weight": torch.full((50, 4), math.nan)}], kind)


def test_few_adapters_and_unknown_kinds():
    assert divergence_matrix([]).shape == (0, 0) and divergence_matrix(adapters(1)).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="divergence 'cosine' is not known: use softmax, gaussian, histogram"):
        divergence_matrix(adapters(2), "cosine")


# --- the graph

#        a --1-- b --2-- c --1-- d; everything else is long
NAMES = ["a", "b", "c", "d"]
EDGES = {"ab": 1.0, "bc": 2.0, "cd": 1.0, "ac": 8.0, "ad": 9.0, "bd": 9.0}


def chain():
    matrix = np.zeros((4, 4))
    for pair, weight in EDGES.items():
        i, j = (NAMES.index(letter) for letter in pair)
        matrix[i, j] = matrix[j, i] = weight
    return client_graph(matrix, NAMES)


def test_the_graph_is_complete_and_survives_as_node_link_json():
    graph = chain()
    assert sorted(graph.nodes) == NAMES and graph.number_of_edges() == 6 and graph["a"]["c"]["weight"] == 8.0
    again = nx.node_link_graph(nx.node_link_data(graph, edges="edges"), edges="edges")
    assert nx.utils.graphs_equal(graph, again)


@pytest.mark.parametrize(("matrix", "names"), [
    (np.zeros((2, 3)), ["a", "b"]), (np.zeros((2, 2)), ["a", "a"]), (np.array([[0, 1], [2, 0.0]]), ["a", "b"]), (-np.ones((2, 2)), ["a", "b"]),
    (np.full((2, 2), np.nan), ["a", "b"])])
def test_what_is_no_divergence_matrix_is_refused(matrix, names):
    with pytest.raises(ValueError, match="divergences"):
        client_graph(matrix, names)


def test_the_neighbours_in_the_spanning_tree_are_weighted_by_the_inverse_of_their_edges():
    graph = chain()
    assert {frozenset(edge) for edge in spanning_tree(graph).edges} == {frozenset(pair) for pair in ("ab", "bc", "cd")}
    assert mst_weights(graph, "a") == pytest.approx({"a": 0.5, "b": 0.5})
    assert mst_weights(graph, "b") == pytest.approx({"b": 0.4, "a": 0.4, "c": 0.2})  # inverses 1, 1, 1/2


def test_the_path_grows_with_delta_and_stays_between_the_shortest_and_the_longest():
    graph = chain()  # from a: b in 1 edge (1), c in 2 (3), d in 3 (4); normalised 1/6, 2/6, 3/6
    chosen = {delta: "".join(shortest_path(graph, "a", delta)) for delta in (0.0, 0.1, 1 / 6, 0.3, 1 / 3, 0.49, 0.5, 1.0)}
    assert chosen == {0.0: "ab", 0.1: "ab", 1 / 6: "ab", 0.3: "ab", 1 / 3: "abc", 0.49: "abc", 0.5: "abcd", 1.0: "abcd"}
    assert shortest_path_weights(graph, "a", 1.0) == pytest.approx({"a": 2 / 7, "b": 2 / 7, "c": 1 / 7, "d": 2 / 7})  # inverses 1, 1, 1/2, 1
    assert shortest_path(graph, "b", 0.0) == ["b", "a"], "of two paths of one edge the one with less divergence"


def test_a_direct_edge_that_is_longer_than_the_way_round_is_not_taken():
    assert shortest_path(chain(), "a", 1 / 3) == ["a", "b", "c"] and "c" not in shortest_path_weights(chain(), "a", 0.0)


def test_of_paths_of_the_same_length_the_least_total_divergence_decides_and_not_the_alphabet():
    assert shortest_path(chain(), "c", 0.0) == ["c", "d"], "b comes first, but its edge is 2 and that to d is 1"


def most(count):
    """The largest normalised length that a path can have among so many clients."""
    return max(edges / (edges * (edges + 1) / 2 + count - 1 - edges) for edges in range(1, count))


@pytest.mark.parametrize(("count", "bound"), [(4, 0.5), (8, 4 / 13), (16, 0.2)])
def test_no_path_is_longer_than_the_bound_so_larger_deltas_choose_the_same(count, bound):
    assert most(count) == pytest.approx(bound)
    names, found = [f"client-{n:02d}" for n in range(count)], []
    for seed in range(12):
        matrix = np.triu(np.random.default_rng(seed).random((count, count)) ** 8, 1)  # a few edges are far shorter than the rest
        graph = client_graph(matrix + matrix.T, names)
        for source in names:
            lengths = [len(path) - 1 for path in nx.single_source_dijkstra_path(graph, source, weight="weight").values()]
            found.append(max(lengths) / sum(lengths))
            assert shortest_path(graph, source, bound) == shortest_path(graph, source, 1.0) and len(shortest_path(graph, source, 1.0)) == max(lengths) + 1
    assert 0.6 * bound < max(found) <= bound + 1e-12


def test_the_bound_is_reached_by_a_path_of_five_edges_and_ten_neighbours():
    matrix = np.full((16, 16), 100.0)
    np.fill_diagonal(matrix, 0.0)
    for i, j in [(n, n + 1) for n in range(5)] + [(0, n) for n in range(6, 16)]:
        matrix[i, j] = matrix[j, i] = 1.0
    graph = client_graph(matrix, [f"{n:02d}" for n in range(16)])
    chosen = {delta: len(shortest_path(graph, "00", delta)) - 1 for delta in (0.0, 0.05, 0.1, 0.15, 0.2, 1.0)}
    assert chosen == {0.0: 1, 0.05: 1, 0.1: 2, 0.15: 3, 0.2: 5, 1.0: 5}, "25 edges in all"


def test_independent_adapters_are_one_edge_apart_and_those_along_a_line_make_a_chain():
    independent = client_graph(divergence_matrix(adapters(8)), list("abcdefgh"))
    assert all(len(path) <= 2 for _, paths in nx.all_pairs_dijkstra_path(independent, weight="weight") for path in paths.values())
    assert {tuple(shortest_path(independent, "a", delta)) for delta in (0.0, 0.05, 0.2, 1.0)} == {("a", min(independent["a"], key=lambda name: independent["a"][name]["weight"]))}
    start, end = adapters(2)
    line = client_graph(divergence_matrix([{name: torch.lerp(start[name], end[name], n / 4) for name in start} for n in range(5)]), list("abcde"))
    assert line["a"]["c"]["weight"] > line["a"]["b"]["weight"] + line["b"]["c"]["weight"] and shortest_path(line, "a", 1.0) == list("abcde")


@pytest.mark.parametrize("delta", [-0.1, 1.1, math.nan])
def test_delta_is_a_share(delta):
    with pytest.raises(ValueError, match="from 0 to 1"):
        shortest_path(chain(), "a", delta)


def test_adapters_that_are_the_same_share_the_weight_and_nothing_is_divided_by_zero():
    assert inverse_weights("a", {"b": 0.0, "c": 0.0, "d": 3.0}) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3, "d": 0.0})
    near = inverse_weights("a", {"b": 1e-9, "c": 1e-9, "d": 3.0})
    assert near == pytest.approx(inverse_weights("a", {"b": 0.0, "c": 0.0, "d": 3.0}), abs=1e-8), "the limit"
    same = client_graph(np.zeros((3, 3)), ["a", "b", "c"])
    for weights in (mst_weights(same, "b"), shortest_path_weights(same, "b", 1.0)):
        assert sum(weights.values()) == pytest.approx(1) and "b" in weights and len(set(weights.values())) == 1


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_positive_sum_to_one_hold_the_source_first_and_do_not_depend_on_the_order(count, seed):
    numbers = np.random.default_rng(seed)
    matrix = numbers.random((count, count))
    matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T
    names = [f"client-{n}" for n in range(count)]
    order = numbers.permutation(count)
    graph, other = client_graph(matrix, names), client_graph(matrix[np.ix_(order, order)], [names[n] for n in order])
    for source in names:
        for weights, again in ((mst_weights(graph, source), mst_weights(other, source)),
                               *((shortest_path_weights(graph, source, d), shortest_path_weights(other, source, d)) for d in (0.0, 0.3, 1.0))):
            assert next(iter(weights)) == source and sum(weights.values()) == pytest.approx(1) and min(weights.values()) > 0
            assert weights[source] == max(weights.values()) and again == pytest.approx(weights)
            assert count == 1 or len(weights) > 1


def test_the_share_of_the_own_group_leaves_the_client_itself_and_unknown_ones_out():
    known = {"a": "x", "b": "x", "c": "y", "d": "y", "e": None}
    weights = {"a": {"a": 0.5, "b": 0.4, "c": 0.1}, "b": {"b": 0.5, "a": 0.5}, "c": {"c": 0.6, "a": 0.4}, "d": {"d": 0.5, "e": 0.5}}
    shares = own_group_share(weights, known)
    assert shares == pytest.approx({"neighbours": 2 / 4, "weight": 0.9 / 1.4, "chance": 4 / 12})
    assert all(math.isnan(value) for value in own_group_share({"a": {"a": 1.0}}, known).values())


def test_adapters_that_hardly_differ_keep_the_digits_of_their_divergence():
    clients = adapters(2, scale=1.0, spread=1e-6)
    values = [flat(adapter).astype(np.longdouble) for adapter in clients]
    p, q = (np.exp(v) / np.exp(v).sum() for v in values)
    expected = float(((p - q) * (values[0] - values[1])).sum())
    assert 0 < expected < 1e-11 and divergence_matrix(clients)[0, 1] == pytest.approx(expected, rel=1e-6, abs=0)
