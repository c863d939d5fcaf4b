"""No behavior has its only test in the long tier, which `make test` and a contributor leave out."""

import ast
import re
from functools import cache

import pytest

from components.paths import PACKAGE as ROOT
from tests.support.long_tier import concerned, long_files

TESTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


@cache
def marked_long(file):
    """For each test of a file, and for the module: whether all, some or no cases are long, or skipped."""
    marks = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            some = any("pytest.mark.long" in text or "with_examples(" in text for text in decorators)
            skipped = any("skip" in text or text.startswith("needs_") for text in decorators)
            marks[node.name] = "all" if "pytest.mark.long" in decorators else "some" if some else "none"
            marks[node.name] = "skipped" if skipped else marks[node.name]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks["module"] = "all" if "pytest.mark.long" in ast.unparse(node.value) else "none"
    return marks


def test_the_files_with_long_tests_are_those_of_the_list():
    marks = re.compile(r"pytest\.mark\.long|with_examples\(|^pytestmark = TIER$", re.MULTILINE)
    files = {file for file in TESTS if marks.search((ROOT / file).read_text(encoding="utf-8"))}
    assert files - {"tests/architecture/test_tiers.py"} == set(long_files())


@pytest.mark.parametrize("file", long_files())
def test_an_example_of_each_kind_of_long_tests_stays_in_make_test(file):
    for test in long_files()[file]["stays"]:
        path, _, name = test.partition("::")
        if name:
            assert marked_long(path)[name] in ("some", "none"), test
        assert marked_long(path).get("module") != "all", test


def test_a_change_concerns_the_long_tests_of_what_it_touches():
    assert concerned(["tasks/ray_files.py", "README.md"]) == ["tests/flows/test_ray.py"]
    assert concerned(["components/names.py"]) == ["tests/flows/test_names_of_clients.py"]
    assert "tests/federation/test_crashes.py" in concerned(["components/federation/clients/private.py"])
    assert concerned(["tests/infra/test_schedule.py"]) == ["tests/infra/test_schedule.py"]
    assert concerned(["docs/index.md"]) == []


@pytest.mark.parametrize("file", long_files())
def test_the_sources_of_a_long_file_exist(file):
    for pattern in long_files()[file]["touched"]:
        assert list(ROOT.glob(pattern)), pattern
