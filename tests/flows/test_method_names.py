"""Flows, tasks, tracking and reports work with any method: their code names none, and asks for none.

The import contracts cover what they import; these tests cover names in strings and comparisons.
"""

import ast
from pathlib import Path

import pytest

from components.config.federation import METHODS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "components/reporting")
FILES: list[str] = []
for package in PACKAGES:
    FILES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py"))
NAMES = {*METHODS.builtin}
QUESTIONS = {"method", "kind", "trained_model"}
"""Attributes whose value depends on the method."""


def docstrings(tree):
    """The nodes of strings that stand alone, which are documentation."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def named_methods(tree):
    """Lines with a string that is the name of a method."""
    documentation = docstrings(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in documentation
    ]


def compared_methods(tree):
    """Lines that branch on an attribute that depends on the method."""
    lines = []
    for node in ast.walk(tree):
        operands = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        if any(isinstance(operand, ast.Attribute) and operand.attr in QUESTIONS for operand in operands):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("file", FILES)
def test_a_file_names_no_method_and_branches_on_none(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert named_methods(tree) == []
    assert compared_methods(tree) == []


@pytest.mark.parametrize(
    "code",
    [
        "if recipe.federation.method == 'fedavg': pass",
        "labels = {'firm': 'FIRM'}",
        "x = recipe.federation.options in ('fedbis',)",
    ],
)
def test_a_name_of_a_method_in_code_is_reported(code):
    assert named_methods(ast.parse(code)) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "x = outcome.trained_model == OTHER",
        "x = recipe.federation.method in NAMES",
        "match outcome.trained_model:\n    case _: pass",
    ],
)
def test_a_branch_on_the_kind_of_a_method_is_reported(code):
    assert compared_methods(ast.parse(code)) == [1]


def test_a_name_in_documentation_is_not_reported():
    assert named_methods(ast.parse("'''\nfedavg\n'''\n'fedavg'")) == []


def test_all_packages_are_read():
    assert {"flows/fed_rlhf.py", "tasks/tracking/federate.py", "components/reporting/claims.py"} <= set(FILES)
