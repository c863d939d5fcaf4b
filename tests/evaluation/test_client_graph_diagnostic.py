"""The diagnostic of DRIFT's client graph: document, plot, and share of own-group neighbors."""

import networkx as nx
import pytest

from components.evaluation.diagnostics.base import DiagnosedRun
from components.evaluation.diagnostics.client_graph import ClientGraphDiagnostic, plot_client_graph
from components.federation.methods.drift import GraphMemory
from tests.support.diagnostics import RecordingSink
from tests.support.plots import drawn_figure
from tests.support.results import federation_result, step_record

GROUPS = {
    "a": "x",
    "b": "x",
    "c": "y",
}
UNKNOWN = dict.fromkeys(GROUPS)
FIRST = {
    "a": {"a": 0.5, "b": 0.5},
    "b": {"b": 1.0},
    "c": {"c": 0.5, "a": 0.5},
}
SECOND = {
    "a": {"a": 0.5, "b": 0.5},
    "b": {"b": 0.5, "a": 0.5},
    "c": {"c": 1.0},
}


def graph_memory(weights):
    """The memory of a round with three clients, in which b is between a and c."""
    graph = nx.Graph()
    graph.add_edge("a", "b", weight=1.0)
    graph.add_edge("b", "c", weight=2.0)
    graph.add_edge("a", "c", weight=4.0)
    data = nx.node_link_data(graph, edges="edges")
    return GraphMemory(graph=data, tree=[["a", "b"], ["b", "c"]], weights=weights)


def graph_step(round_index, weights):
    return step_record(round_index, memory=graph_memory(weights).model_dump(mode="json"))


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """What is logged of a round with known groups."""
    sink = RecordingSink(tmp_path_factory.mktemp("sink"))
    ClientGraphDiagnostic().log(graph_step(0, FIRST), GROUPS, sink)
    return sink


def test_the_graph_of_a_round_is_logged_as_a_document_and_as_a_plot(logged):
    assert logged.documents == {"graphs/00001.json": graph_memory(FIRST).graph}
    assert logged.plots == ["graphs/00001.png"]


def test_the_share_of_own_group_neighbors_is_logged_at_the_round(logged):
    assert logged.metrics == {
        1: {
            "graph/neighbors": 0.5,
            "graph/weight": 0.5,
            "graph/chance": pytest.approx(2 / 6),
        }
    }


def test_without_true_groups_no_share_is_logged():
    sink = RecordingSink()
    ClientGraphDiagnostic().log(graph_step(0, FIRST), UNKNOWN, sink)
    assert sink.metrics == {}
    assert sink.plots == ["graphs/00001.png"]


def test_own_group_neighbors_are_the_mean_over_rounds_beside_the_share_by_chance():
    result = federation_result(records=[graph_step(0, FIRST), graph_step(1, SECOND)])
    summary = ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, GROUPS))
    assert summary.figures == {"neighbors": 0.75, "neighbors_chance": pytest.approx(2 / 6)}


def test_rounds_without_neighbors_are_left_out_of_the_mean():
    alone = {name: {name: 1.0} for name in GROUPS}
    result = federation_result(records=[graph_step(0, FIRST), graph_step(1, alone)])
    summary = ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, GROUPS))
    assert summary.figures["neighbors"] == 0.5


def test_without_true_groups_the_summary_is_empty():
    result = federation_result(records=[graph_step(0, FIRST)])
    assert ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, UNKNOWN)).figures == {}


@pytest.fixture(scope="module")
def panels(tmp_path_factory):
    """The three panels of the plot: all pairs, the tree, the paths of the first client."""
    path = tmp_path_factory.mktemp("plots") / "graph.png"
    return drawn_figure(lambda: plot_client_graph(graph_memory(FIRST), GROUPS, path)).axes[:3]


def names_of(axes):
    return {text.get_text() for text in axes.texts} & set(GROUPS)


def weights_of(axes):
    return {text.get_text() for text in axes.texts} - set(GROUPS)


def test_each_panel_of_the_plot_names_all_clients(panels):
    assert all(names_of(axes) == set(GROUPS) for axes in panels)


def test_the_panels_label_all_divergences_those_of_the_tree_and_those_of_the_paths(panels):
    assert [weights_of(axes) for axes in panels] == [{"1", "2", "4"}, {"1", "2"}, {"1", "2"}]


def test_the_clients_that_the_first_one_is_aggregated_with_have_a_red_ring(panels):
    red = [tuple(color)[:3] == (1.0, 0.0, 0.0) for color in panels[2].collections[0].get_edgecolors()]
    assert red == [True, True, False]


def test_the_plot_has_a_legend_of_the_true_groups(panels):
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["x", "y"]


@pytest.mark.slow
def test_a_graph_of_two_clients_is_drawn(tmp_path):
    graph = nx.Graph()
    graph.add_edge("a", "b", weight=0.0)
    data = nx.node_link_data(graph, edges="edges")
    memory = GraphMemory(graph=data, tree=[["a", "b"]], weights={"a": {"a": 1.0}, "b": {"b": 1.0}})
    plot_client_graph(memory, {}, tmp_path / "two.png")
    assert (tmp_path / "two.png").is_file()
