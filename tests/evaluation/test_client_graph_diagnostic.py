"""The diagnostic of DRIFT's client graph: document, plot, and share of own-group neighbors."""

import networkx as nx
import pytest

from components.evaluation.diagnostics.client_graph import ClientGraphDiagnostic, graph_charts
from components.evaluation.diagnostics.diagnostic import DiagnosedRun
from components.federation.methods.drift import Drift, GraphMemory
from tests.support.diagnostics import RecordingSink
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
def logged():
    """What is logged of a round with known groups."""
    sink = RecordingSink()
    ClientGraphDiagnostic().log(graph_step(0, FIRST), GROUPS, sink)
    return sink


def test_the_graph_of_a_round_is_logged_with_the_share_of_own_group_neighbors(logged):
    assert logged.documents == {"graphs/00001.json": graph_memory(FIRST).graph}
    assert logged.metrics == {
        1: {
            "graph/neighbors": 0.5,
            "graph/weight": 0.5,
            "graph/chance": pytest.approx(2 / 6),
        }
    }


def test_without_true_groups_no_share_is_logged_and_the_summary_is_empty():
    sink = RecordingSink()
    ClientGraphDiagnostic().log(graph_step(0, FIRST), UNKNOWN, sink)
    assert sink.metrics == {}
    assert sink.documents.keys() == {"graphs/00001.json"}
    result = federation_result(records=[graph_step(0, FIRST)])
    assert ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, UNKNOWN)).figures == {}


def test_own_group_neighbors_are_the_mean_over_the_rounds_that_have_neighbors():
    result = federation_result(records=[graph_step(0, FIRST), graph_step(1, SECOND)])
    summary = ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, GROUPS))
    assert summary.figures == {"neighbors": 0.75, "neighbors_chance": pytest.approx(2 / 6)}
    alone = {name: {name: 1.0} for name in GROUPS}
    result = federation_result(records=[graph_step(0, FIRST), graph_step(1, alone)])
    summary = ClientGraphDiagnostic().summarize(result, DiagnosedRun("DRIFT", 0, GROUPS))
    assert summary.figures["neighbors"] == 0.5


def test_trees_and_paths_of_all_rounds_are_one_page_and_the_report_has_the_last_graph():
    result = federation_result(records=[graph_step(0, FIRST), graph_step(1, SECOND)])
    sink = RecordingSink()
    ClientGraphDiagnostic().log_result(result, DiagnosedRun("DRIFT", 0, GROUPS), sink)
    titles = [figure.layout.title.text for figure in sink.charts["graphs/graphs.html"]]
    assert [title.partition(":")[0] for title in titles] == ["Round 1", "Round 1", "Round 2", "Round 2"]
    charts = ClientGraphDiagnostic().run_charts(result, DiagnosedRun("DRIFT", 0, GROUPS))
    assert [chart.layout.title.text.partition(":")[0] for chart in charts] == ["Round 2"] * 3


@pytest.fixture(scope="module")
def drawn():
    """The three drawn graphs of a round: all pairs, the tree, the paths of the first client."""
    return graph_charts(graph_step(0, FIRST), DiagnosedRun("DRIFT", 0, GROUPS))


def test_the_drawn_graphs_have_all_divergences_those_of_the_tree_and_those_of_the_paths(drawn):
    edges = [next(trace for trace in chart.data if trace.hoverinfo == "text") for chart in drawn]
    tree = {"a – b: 1", "b – c: 2"}
    assert [set(trace.hovertext) for trace in edges] == [tree | {"a – c: 4"}, tree, tree]
    assert all(trace.mode == "markers+text" for trace in edges)


def names_of(chart):
    return [trace.name for trace in chart.data if trace.name]


@pytest.mark.parametrize(("variant", "deciding"), [("mst", 1), ("sp", 2)])
def test_the_graph_that_decides_says_so_and_rings_those_that_the_first_client_is_aggregated_with(
    variant, deciding
):
    run = DiagnosedRun("DRIFT", 0, GROUPS, options=Drift(variant=variant))
    charts = graph_charts(graph_step(0, FIRST), run)
    decides = ["decides the aggregation" in chart.layout.title.text for chart in charts]
    assert [n for n, one in enumerate(decides) if one] == [deciding]
    (ring,) = (trace for trace in charts[deciding].data if trace.name == "aggregated with a")
    assert len(ring.x) == 2
    assert [names_of(chart) for chart in charts if chart is not charts[deciding]] == [
        ["group x", "group y"]
    ] * 2


def test_groups_are_those_of_the_source_and_unknown_ones_are_shown_as_such(drawn):
    assert names_of(drawn[0]) == ["group x", "group y"]
    assert names_of(graph_charts(graph_step(0, FIRST), DiagnosedRun("DRIFT", 0, UNKNOWN))[0]) == [
        "group unknown"
    ]


def test_a_graph_of_two_clients_without_divergence_is_drawn():
    graph = nx.Graph()
    graph.add_edge("a", "b", weight=0.0)
    data = nx.node_link_data(graph, edges="edges")
    memory = GraphMemory(graph=data, tree=[["a", "b"]], weights={"a": {"a": 1.0}, "b": {"b": 1.0}})
    record = step_record(0, memory=memory.model_dump(mode="json"))
    run = DiagnosedRun("DRIFT", 0, {})
    assert len(ClientGraphDiagnostic().run_charts(federation_result(records=[record]), run)) == 3
