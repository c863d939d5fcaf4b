"""Files and classes of components have names of their own, so that a traceback says which one is meant."""

import ast
from collections import Counter

from components.paths import PACKAGE

FILES = [path for path in (PACKAGE / "components").rglob("*.py") if path.name != "__init__.py"]


def repeated(names):
    return [name for name, count in Counter(names).items() if count > 1]


def test_no_two_files_of_components_have_one_name():
    assert len(FILES) > 100
    assert repeated(path.name for path in FILES) == []


def test_no_two_classes_of_components_have_one_name():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert len(classes) > 100
    assert repeated(classes) == []


def test_no_two_files_of_tests_have_one_name():
    """Pytest imports them by their names alone."""
    assert repeated(path.name for path in (PACKAGE / "tests").rglob("test_*.py")) == []
