"""Dependencies of the stages in dvc.yaml, derived from the code that the stages run."""

import ast
from functools import cache
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FLOW = ROOT / "flows" / "fed_rlhf.py"
STAGES = ROOT / "flows" / "stages.py"
STAGE_FUNCTIONS = {
    "fetch_backbone": (STAGES, "run_stage"),
    "grow_trees": (FLOW, "grow_trees"),
    "prepare": (FLOW, "prepare"),
    "federate": (FLOW, "federate"),
    "align": (FLOW, "align"),
    "evaluate": (FLOW, "evaluate"),
}
"""The function that does the work of each stage; the stage `report` depends on all packages."""
LOGGING = ("tasks.tracking", "tasks.flow_runs", "tasks.report", "components.reporting")
"""Modules that write to MLflow, to Prefect and to logs, and to no output of these stages."""


@pytest.fixture(scope="module")
def graph():
    packages = ("components", "tasks", "flows", "infra")
    return grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)


def stages():
    return yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


@cache
def imported_names(path):
    """Module of each imported name of a file; of a name that is a module itself, that module."""
    names = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = (alias.name, "")
    return names


@cache
def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def entry_modules(path, name, modules, visited=None):
    """Modules that a function uses, directly or through functions of its own file."""
    visited = set() if visited is None else visited
    if name in visited:
        return set()
    visited.add(name)
    reached = set()
    for node in ast.walk(functions(path)[name]):
        if not isinstance(node, ast.Name):
            continue
        if node.id in functions(path):
            reached |= entry_modules(path, node.id, modules, visited)
        elif node.id in imported_names(path):
            module, attribute = imported_names(path)[node.id]
            submodule = f"{module}.{attribute}"
            reached.add(submodule if submodule in modules else module)
    return {module for module in reached if module in modules}


def registered_modules():
    """Modules of registered implementations, by the module that defines the registry."""
    from components.config.registry import Registry

    edges = {}
    for path in (ROOT / "components").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "Registry(" not in path.read_text(encoding="utf-8") or module == "components.config.registry":
            continue
        namespace = vars(__import__(module, fromlist=["_"]))
        for value in namespace.values():
            if isinstance(value, Registry):
                edges.setdefault(module, set()).update(
                    target.partition(":")[0] for target in value.builtin.values()
                )
    return edges


def reachable(graph, entries):
    """All modules of the project that these modules import, directly or not, logging excepted."""
    registered = registered_modules()
    pending = [module for module in entries if not module.startswith(LOGGING)]
    visited = set()
    while pending:
        module = pending.pop()
        if module in visited:
            continue
        visited.add(module)
        imported = graph.find_modules_directly_imported_by(module) | registered.get(module, set())
        pending += [other for other in imported if not other.startswith(LOGGING)]
    return visited


def covered(module, dependencies):
    """Whether a module, or a folder that contains it, is a dependency."""
    path = Path(*module.split("."))
    candidates = [path.with_suffix(".py"), *path.parents, path]
    return any(candidate.as_posix() in dependencies for candidate in candidates)


@pytest.mark.parametrize("stage", [name for name in STAGE_FUNCTIONS if name != "fetch_backbone"])
def test_a_stage_depends_on_all_code_that_it_runs(graph, stage):
    path, function = STAGE_FUNCTIONS[stage]
    entries = entry_modules(path, function, graph.modules)
    assert any(module.startswith("tasks.") for module in entries)
    dependencies = stages()[stage]["deps"]
    missing = [module for module in reachable(graph, entries) if not covered(module, dependencies)]
    assert sorted(missing) == [], f"add their files or folders to `deps` of the stage '{stage}' in dvc.yaml"


def test_the_registries_are_part_of_the_derivation(graph):
    modules = reachable(graph, {"components.config"})
    assert "components.federation.methods.fedbis" in modules
    assert "components.evaluation.judges.selector_judge" in modules


@pytest.mark.parametrize("stage", list(stages()))
def test_a_dependency_on_code_exists(stage):
    for dependency in stages()[stage]["deps"]:
        if not dependency.startswith("data/"):
            assert (ROOT / dependency).exists(), dependency


def test_the_report_depends_on_all_packages():
    assert {"components", "flows", "tasks"} <= set(stages()["report"]["deps"])
