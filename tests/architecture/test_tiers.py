"""The long tests, which `make test` leaves out: their files, and the program that runs them."""

import re
from dataclasses import replace

import pytest

from components.paths import PACKAGE as ROOT
from tests.support import long_tier
from tests.support.long_tier import Line, concerned, long_files, read_lines, waiting_files, write_lines

TESTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def test_the_files_with_long_tests_are_those_of_the_list():
    marks = re.compile(r"pytest\.mark\.long|with_examples\(|^pytestmark = TIER$", re.MULTILINE)
    files = {file for file in TESTS if marks.search((ROOT / file).read_text(encoding="utf-8"))}
    assert files - {"tests/architecture/test_tiers.py"} == set(long_files()), "edit tests/long.yaml"


def test_a_change_concerns_the_long_tests_of_what_it_touches():
    assert concerned(["tasks/ray_files.py", "README.md"]) == ["tests/flows/test_ray.py"]
    assert concerned(["components/names.py"]) == ["tests/flows/test_names_of_clients.py"]
    assert "tests/federation/test_crashes.py" in concerned(["components/federation/clients/private.py"])
    assert concerned(["tests/infra/test_schedule.py"]) == ["tests/infra/test_schedule.py"]
    assert concerned(["docs/index.md"]) == []


@pytest.mark.parametrize("file", long_files())
def test_the_sources_of_a_long_file_exist(file):
    for pattern in long_files()[file]:
        assert list(ROOT.glob(pattern)), f"{pattern}: edit tests/long.yaml"


LINE = Line("tests/a.py", 3, 0, 1, 12, 7, "abc", "2026-01-02", "2 cores, a processor")


def test_the_program_runs_the_longest_first_and_leaves_out_what_has_passed_at_the_commit(
    tmp_path, monkeypatch
):
    ran = []

    def run_file(file, seed, commit):
        ran.append(file)
        return replace(LINE, file=file, seed=seed, commit=commit, failed=int(file == "tests/b.py"))

    files = [f"tests/{name}.py" for name in "abc"]
    known = [replace(LINE, file=name, seconds=seconds) for name, seconds in zip(files, (5, 9), strict=False)]
    monkeypatch.setattr(long_tier, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(long_tier, "run_file", run_file)
    monkeypatch.setattr(long_tier, "long_files", lambda: {name: [] for name in files})
    write_lines({line.file: line for line in known})
    assert waiting_files("def") == files
    assert not long_tier.run(files, 4, "def")
    assert ran == ["tests/c.py", "tests/b.py", "tests/a.py"]
    assert read_lines()["tests/a.py"] == replace(LINE, seed=4, commit="def")
    assert waiting_files("def") == ["tests/b.py"]
    assert long_tier.run(["tests/a.py"], 5, "def+")
    assert "tests/a.py" in waiting_files("def+")
