"""The import graph of the packages, function-level imports included."""

import networkx as nx
import pytest

PACKAGES = ("fed_rlhf", "components", "tasks", "flows", "infra", "perf")


@pytest.fixture(scope="module")
def imports():
    """Directed graph of the modules; an edge from a module to each that it imports at run time."""
    import grimp

    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    edges = nx.DiGraph()
    edges.add_nodes_from(graph.modules)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            edges.add_edge(module, imported)
    return edges


def test_the_graph_contains_function_level_imports(imports):
    assert imports.has_edge("flows.cli", "flows.process")


def test_no_module_is_part_of_an_import_cycle(imports):
    cycles = [
        sorted(component) for component in nx.strongly_connected_components(imports) if len(component) > 1
    ]
    assert cycles == []


def test_no_flow_imports_the_command_line(imports):
    assert list(imports.predecessors("flows.cli")) == ["flows.module"]
