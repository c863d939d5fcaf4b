"""Divergences of adapters and weights of neighbors, against plain loops and hand-computed cases."""

import itertools
import math
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from scipy.stats import norm

from components.federation import graph as graph_module
from components.federation.graph import (
    client_graph,
    divergence_matrix,
    inverse_weights,
    mst_weights,
    own_cluster_share,
    shortest_path,
    shortest_path_weights,
    spanning_tree,
)
from components.models import store as store_module
from components.models.store import AdapterError

KINDS = ("softmax", "gaussian", "histogram")


def make_adapters(count, seed=0, scale=1e-2, spread=1e-3):
    """Clients' adapters around a common one, as after some local steps."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A.weight": (4, 60), "q.lora_B.weight": (50, 4), "v.lora_A.weight": (4, 60)}
    common = {name: scale * torch.randn(shape, generator=numbers) for name, shape in shapes.items()}

    def near(tensor):
        return tensor + spread * torch.randn(tensor.shape, generator=numbers)

    return [{name: near(tensor) for name, tensor in common.items()} for _ in range(count)]


def interpolate(start, end, share):
    return {name: torch.lerp(start[name], end[name], share) for name in start}


def flatten(adapter):
    return np.concatenate([adapter[name].double().numpy().ravel() for name in sorted(adapter)])


def symmetric_kl(distributions):
    """KL(p || q) + KL(q || p) of all pairs, by scipy."""
    return np.array([[(rel_entr(p, q) + rel_entr(q, p)).sum() for q in distributions] for p in distributions])


# --- the matrix


@pytest.mark.parametrize(("scale", "spread"), [(1e-2, 1e-3), (1e-2, 1e-6), (1.0, 0.5), (30.0, 10.0)])
def test_softmax_is_the_symmetric_kl_of_scipy_at_any_size_of_the_weights(scale, spread):
    adapters = make_adapters(5, scale=scale, spread=spread)
    expected = symmetric_kl([softmax(flatten(adapter)) for adapter in adapters])
    assert np.allclose(divergence_matrix(adapters), expected, rtol=1e-6, atol=1e-14 * max(1, scale))


def test_softmax_is_the_hand_computed_value_whatever_constant_is_added_to_the_weights():
    p = torch.tensor([1.0, 2.0, 1.0]) / 4
    q = torch.tensor([2.0, 1.0, 1.0]) / 4
    adapters = [{"a": p.log()}, {"a": q.log() + 5}]
    assert divergence_matrix(adapters)[0, 1] == pytest.approx(0.5 * math.log(2), rel=1e-6)


def test_adapters_that_hardly_differ_keep_the_digits_of_their_divergence():
    adapters = make_adapters(2, scale=1.0, spread=1e-6)
    values = [flatten(adapter).astype(np.longdouble) for adapter in adapters]
    p, q = (np.exp(value) / np.exp(value).sum() for value in values)
    expected = float(((p - q) * (values[0] - values[1])).sum())
    assert 0 < expected < 1e-11
    assert divergence_matrix(adapters)[0, 1] == pytest.approx(expected, rel=1e-6, abs=0)


def integrate_gaussians(first, second):
    """Symmetric KL of two normal distributions (mean, standard deviation), by the trapezoidal rule."""
    width = 12 * max(first[1], second[1])
    xs = np.linspace(min(first[0], second[0]) - width, max(first[0], second[0]) + width, 200_001)
    density = norm.pdf(xs, *first) - norm.pdf(xs, *second)
    ratio = norm.logpdf(xs, *first) - norm.logpdf(xs, *second)
    return np.trapezoid(density * ratio, xs)


def test_gaussian_is_the_sum_over_tensors_of_integrated_divergences():
    adapters = make_adapters(3, spread=5e-3)
    matrix = divergence_matrix(adapters, "gaussian")
    for i, j in itertools.combinations(range(3), 2):
        expected = 0.0
        for name in adapters[0]:
            moments = [
                (adapter[name].double().mean().item(), adapter[name].double().std(correction=0).item())
                for adapter in (adapters[i], adapters[j])
            ]
            expected += integrate_gaussians(*moments)
        assert matrix[i, j] == pytest.approx(expected, rel=1e-4)


def test_histogram_is_that_of_numpy_over_shared_bins():
    """Values on an edge of a bin may fall into either one."""
    adapters = make_adapters(3, spread=5e-3)
    expected = np.zeros((3, 3))
    for name in adapters[0]:
        values = [adapter[name].double().numpy().ravel() for adapter in adapters]
        limits = (min(map(np.min, values)), max(map(np.max, values)))
        counts = [np.histogram(value, bins=graph_module.BINS, range=limits)[0] + 0.5 for value in values]
        expected += symmetric_kl([count / count.sum() for count in counts])
    assert np.allclose(divergence_matrix(adapters, "histogram"), expected, rtol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_is_0_between_equal_adapters_symmetric_and_the_same_in_any_order(kind):
    adapters = make_adapters(4)
    adapters.append({name: tensor.clone() for name, tensor in adapters[1].items()})
    matrix = divergence_matrix(adapters, kind)
    different = ~np.eye(5, dtype=bool)
    different[1, 4] = different[4, 1] = False
    order = [3, 0, 4, 2, 1]
    reordered = divergence_matrix([adapters[n] for n in order], kind)
    assert (matrix[~different] == 0).all()
    assert (matrix[different] > 0).all()
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(reordered, matrix[np.ix_(order, order)], rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_grows_along_a_line(kind):
    (start,) = make_adapters(1)
    end = {name: 3 * tensor + 0.02 for name, tensor in start.items()}
    adapters = [start, *(interpolate(start, end, share) for share in (0.1, 0.4, 1.0))]
    distances = divergence_matrix(adapters, kind)[0]
    assert 0 < distances[1] < distances[2] < distances[3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_blocks_does_not_change_the_divergence(kind, monkeypatch):
    adapters = make_adapters(3, scale=1.0, spread=0.3)
    whole = divergence_matrix(adapters, kind)
    monkeypatch.setattr(store_module, "BLOCK_VALUES", 3 * 7)
    monkeypatch.setattr(store_module, "MIN_BLOCK_WIDTH", 5)
    assert np.allclose(divergence_matrix(adapters, kind), whole, rtol=1e-10)


def test_each_tensor_is_read_once_of_all_clients_before_the_next_one():
    reads = []

    class Recorded(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    adapters = [Recorded(adapter) for adapter in make_adapters(3)]
    divergence_matrix(adapters)
    assert reads == sorted([*adapters[0]] * 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v.lora_A.weight": None}, "adapter 1 and adapter 0 .*'v.lora_A.weight'"),
        ({"q.lora_A.weight": torch.zeros(240)}, r"'q.lora_A.weight' .*\(4, 60\), \(240,\)"),
        ({"q.lora_B.weight": torch.full((50, 4), math.nan)}, "adapter 1: .*'q.lora_B.weight' .*NaN"),
    ],
    ids=["missing", "shape", "nan"],
)
def test_an_adapter_unlike_the_others_is_refused_by_its_tensor(kind, tensors, message):
    first, second = make_adapters(2)
    second = {name: tensor for name, tensor in (second | tensors).items() if tensor is not None}
    with pytest.raises(AdapterError, match=message):
        divergence_matrix([first, second], kind)


def test_up_to_one_adapter_has_an_empty_or_a_zero_matrix():
    assert divergence_matrix([]).shape == (0, 0)
    assert divergence_matrix(make_adapters(1)).tolist() == [[0.0]]


def test_an_unknown_divergence_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'cosine' is not known: use softmax, gaussian, histogram"):
        divergence_matrix(make_adapters(2), "cosine")


# --- the graph

#        a --1-- b --2-- c --1-- d; all other edges are long
NAMES = ["a", "b", "c", "d"]
EDGES = {"ab": 1.0, "bc": 2.0, "cd": 1.0, "ac": 8.0, "ad": 9.0, "bd": 9.0}


@pytest.fixture
def chain():
    matrix = np.zeros((4, 4))
    for (first, second), weight in EDGES.items():
        i, j = NAMES.index(first), NAMES.index(second)
        matrix[i, j] = matrix[j, i] = weight
    return client_graph(matrix, NAMES)


def test_the_graph_is_complete_weighted_by_divergence_and_read_back_from_node_link_json(chain):
    assert {first + second: weight for first, second, weight in chain.edges.data("weight")} == EDGES
    read = nx.node_link_graph(nx.node_link_data(chain, edges="edges"), edges="edges")
    assert nx.utils.graphs_equal(chain, read)


@pytest.mark.parametrize(
    ("matrix", "names"),
    [
        (np.zeros((2, 3)), ["a", "b"]),
        (np.zeros((2, 2)), ["a", "a"]),
        (np.array([[0, 1], [2, 0.0]]), ["a", "b"]),
        (-np.ones((2, 2)), ["a", "b"]),
        (np.full((2, 2), np.nan), ["a", "b"]),
    ],
    ids=["shape", "names", "asymmetric", "negative", "nan"],
)
def test_what_is_no_divergence_matrix_is_refused(matrix, names):
    with pytest.raises(ValueError, match="divergences"):
        client_graph(matrix, names)


# --- the spanning tree


def test_the_spanning_tree_has_the_short_edges(chain):
    edges = {frozenset(edge) for edge in spanning_tree(chain).edges}
    assert edges == {frozenset(pair) for pair in ("ab", "bc", "cd")}


def test_neighbors_in_the_spanning_tree_are_weighted_by_inverse_edges(chain):
    assert mst_weights(chain, "a") == pytest.approx({"a": 0.5, "b": 0.5})
    assert mst_weights(chain, "b") == pytest.approx({"b": 0.4, "a": 0.4, "c": 0.2})


# --- shortest paths


@pytest.mark.parametrize(
    ("delta", "path"),
    [(0.0, "ab"), (1 / 6, "ab"), (0.3, "ab"), (1 / 3, "abc"), (0.49, "abc"), (0.5, "abcd"), (1.0, "abcd")],
)
def test_the_path_grows_with_delta_from_the_shortest_to_the_longest(chain, delta, path):
    """From a, the paths have 1, 2 and 3 edges: 1/6, 2/6 and 3/6 of all. None takes the long edge ac."""
    assert "".join(shortest_path(chain, "a", delta)) == path


def test_clients_on_a_path_are_weighted_by_the_inverse_of_the_edge_that_leads_to_them(chain):
    expected = {"a": 2 / 7, "b": 2 / 7, "c": 1 / 7, "d": 2 / 7}
    assert shortest_path_weights(chain, "a", 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("source", "path"), [("b", ["b", "a"]), ("c", ["c", "d"])])
def test_of_paths_of_equal_length_the_one_with_the_least_divergence_is_chosen(chain, source, path):
    assert shortest_path(chain, source, 0.0) == path


def longest_share(count):
    """The largest share of the edges of all paths that one path can have among so many clients."""
    return max(edges / (edges * (edges + 1) / 2 + count - 1 - edges) for edges in range(1, count))


@pytest.mark.parametrize(("count", "bound"), [(4, 0.5), (8, 4 / 13), (16, 0.2)])
def test_no_path_is_longer_than_the_bound_so_larger_deltas_choose_the_same(count, bound):
    names = [f"client-{n:02d}" for n in range(count)]
    shares = []
    for seed in range(8):
        uneven = np.triu(np.random.default_rng(seed).random((count, count)) ** 8, 1)
        graph = client_graph(uneven + uneven.T, names)
        for source in names:
            paths = nx.single_source_dijkstra_path(graph, source, weight="weight")
            lengths = [len(path) - 1 for path in paths.values()]
            shares.append(max(lengths) / sum(lengths))
            longest = shortest_path(graph, source, 1.0)
            assert shortest_path(graph, source, bound) == longest
            assert len(longest) == max(lengths) + 1
    assert longest_share(count) == pytest.approx(bound)
    assert 0.6 * bound < max(shares) <= bound + 1e-12


@pytest.mark.parametrize(("delta", "edges"), [(0.0, 1), (0.05, 1), (0.1, 2), (0.15, 3), (0.2, 5), (1.0, 5)])
def test_the_bound_is_reached_by_a_path_of_five_edges_and_ten_neighbors(delta, edges):
    """All paths together have 25 edges."""
    matrix = np.full((16, 16), 100.0)
    np.fill_diagonal(matrix, 0.0)
    for i, j in [(n, n + 1) for n in range(5)] + [(0, n) for n in range(6, 16)]:
        matrix[i, j] = matrix[j, i] = 1.0
    graph = client_graph(matrix, [f"{n:02d}" for n in range(16)])
    assert len(shortest_path(graph, "00", delta)) - 1 == edges


def test_independent_adapters_are_one_edge_apart():
    graph = client_graph(divergence_matrix(make_adapters(8)), list("abcdefgh"))
    for _, paths in nx.all_pairs_dijkstra_path(graph, weight="weight"):
        assert max(len(path) for path in paths.values()) == 2
    nearest = min(graph["a"], key=lambda name: graph["a"][name]["weight"])
    for delta in (0.0, 0.05, 0.2, 1.0):
        assert shortest_path(graph, "a", delta) == ["a", nearest]


def test_adapters_along_a_line_are_a_chain():
    start, end = make_adapters(2)
    adapters = [interpolate(start, end, n / 4) for n in range(5)]
    graph = client_graph(divergence_matrix(adapters), list("abcde"))
    assert graph["a"]["c"]["weight"] > graph["a"]["b"]["weight"] + graph["b"]["c"]["weight"]
    assert shortest_path(graph, "a", 1.0) == list("abcde")


@pytest.mark.parametrize("delta", [-0.1, 1.1, math.nan])
def test_a_delta_that_is_no_share_is_refused(chain, delta):
    with pytest.raises(ValueError, match="delta is .*from 0 to 1"):
        shortest_path(chain, "a", delta)


# --- weights


def test_equal_adapters_share_the_whole_weight_as_in_the_limit():
    equal = inverse_weights("a", {"b": 0.0, "c": 0.0, "d": 3.0})
    nearly_equal = inverse_weights("a", {"b": 1e-9, "c": 1e-9, "d": 3.0})
    assert equal == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3, "d": 0.0})
    assert nearly_equal == pytest.approx(equal, abs=1e-8)


def test_where_all_adapters_are_equal_so_are_their_weights():
    graph = client_graph(np.zeros((3, 3)), ["a", "b", "c"])
    for weights in (mst_weights(graph, "b"), shortest_path_weights(graph, "b", 1.0)):
        assert sum(weights.values()) == pytest.approx(1)
        assert "b" in weights
        assert len(set(weights.values())) == 1


WEIGHTINGS = {
    "mst": mst_weights,
    "shortest": partial(shortest_path_weights, delta=0.0),
    "longer": partial(shortest_path_weights, delta=0.3),
    "longest": partial(shortest_path_weights, delta=1.0),
}


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("count", "seed"), itertools.product([1, 2, 7], range(3)))
def test_weights_are_positive_sum_to_one_are_largest_at_the_source_and_the_same_in_any_order(
    count, seed, weighting
):
    numbers = np.random.default_rng(seed)
    upper = np.triu(numbers.random((count, count)), 1)
    matrix = upper + upper.T
    names = [f"client-{n}" for n in range(count)]
    order = numbers.permutation(count)
    graph = client_graph(matrix, names)
    reordered = client_graph(matrix[np.ix_(order, order)], [names[n] for n in order])
    for source in names:
        weights = WEIGHTINGS[weighting](graph, source)
        assert sum(weights.values()) == pytest.approx(1)
        assert min(weights.values()) > 0
        assert len(weights) > 1 or count == 1
        assert next(iter(weights)) == source
        assert weights[source] == max(weights.values())
        assert WEIGHTINGS[weighting](reordered, source) == pytest.approx(weights)


GROUPS = {"a": "x", "b": "x", "c": "y", "d": "y", "e": None}


def test_the_share_of_the_own_group_leaves_out_the_client_itself_and_unknown_groups():
    weights = {
        "a": {"a": 0.5, "b": 0.4, "c": 0.1},
        "b": {"b": 0.5, "a": 0.5},
        "c": {"c": 0.6, "a": 0.4},
        "d": {"d": 0.5, "e": 0.5},
    }
    shares = own_cluster_share(weights, GROUPS)
    assert shares == pytest.approx({"neighbors": 2 / 4, "weight": 0.9 / 1.4, "chance": 4 / 12})


def test_without_neighbors_there_is_no_share_of_the_own_group():
    for value in own_cluster_share({"a": {"a": 1.0}}, GROUPS).values():
        assert math.isnan(value)
