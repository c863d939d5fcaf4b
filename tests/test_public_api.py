"""The package fed_rlhf: the names that pages and plug-ins import, each from its module when it is used."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pkgutil import resolve_name

import pytest
import yaml

import fed_rlhf
from components.paths import PACKAGE
from tests.support.registries import config_registries

PAGES = [PACKAGE / "docs" / name for name in ("guides/python.md", "tutorials/own-method.md")]


def typed_places():
    """The place of each name, as mypy and editors see it."""
    tree = ast.parse((PACKAGE / "fed_rlhf" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {alias.asname: f"{node.module}:{alias.name}" for node in block.body for alias in node.names}


def loaded_after(code):
    """The top-level modules that a new process has loaded after some code."""
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_type_checkers_see_the_names_that_are_loaded():
    assert typed_places() == fed_rlhf.PLACES


@pytest.mark.parametrize("name", sorted(fed_rlhf.PLACES))
def test_each_name_is_that_of_its_module(name):
    module, _, attribute = fed_rlhf.PLACES[name].partition(":")
    assert getattr(fed_rlhf, name) is getattr(sys.modules[module], attribute)


def test_the_package_lists_its_names_and_version_and_has_no_other():
    assert set(dir(fed_rlhf)) == set(fed_rlhf.__all__) == {*fed_rlhf.PLACES, "__version__"}
    assert fed_rlhf.__version__ == version("fed-rlhf")
    with pytest.raises(AttributeError, match="module 'fed_rlhf' has no attribute 'Metod'"):
        _ = fed_rlhf.Metod
    with pytest.raises(ImportError, match="cannot import name 'Metod'"):
        exec("from fed_rlhf import Metod")


def test_neither_the_package_nor_a_plug_in_of_the_tutorial_loads_torch_prefect_or_mlflow():
    heavy = {"torch", "prefect", "mlflow", "transformers", "pandas"}
    assert loaded_after("import fed_rlhf") & {*heavy, "components", "flows", "tasks"} == set()
    names = "AveragingMethod, Method, SumAggregator, PairSource, load_recipe"
    loaded = loaded_after(f"from fed_rlhf import {names}")
    assert "components" in loaded
    assert loaded & heavy == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_import_from_no_package_below_it(page):
    imports = re.findall(r"^\s*(?:from|import) (\w+).*", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert "fed_rlhf" in imports
    assert {"components", "tasks", "flows"} & {*imports} == set()


def test_the_base_class_of_each_registry_is_a_name_of_the_package():
    exported = [getattr(fed_rlhf, name) for name in fed_rlhf.PLACES]
    bases = [resolve_name(registry.base) for registry in config_registries() if registry.base]
    assert len(bases) > 5
    assert [base for base in bases if base not in exported] == []


def test_plug_ins_import_the_package_in_the_process_of_a_deployment():
    """Prefect loads `flows/fed_rlhf.py:NAME` as the module fed_rlhf, and puts flows/ first on the path."""
    deployments = yaml.safe_load((PACKAGE / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    entrypoints = {one["entrypoint"] for one in deployments if one["entrypoint"].startswith("flows")}
    assert len(entrypoints) == 2
    load = f"for one in {sorted(entrypoints)}: load_flow_from_entrypoint(one, use_placeholder_flow=False)"
    lines = ["from prefect.flows import load_flow_from_entrypoint", load, "from fed_rlhf import Method"]
    assert "prefect" in loaded_after("\n".join(lines))
