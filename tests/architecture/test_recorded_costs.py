"""The check of the processor seconds of test files."""

import re

import pytest

from tests.support.costs import grown_files

RECORDED = {
    "tests/test_a.py": 100.0,
    "tests/test_b.py": 10.0,
    "tests/test_c.py": 20.0,
    "tests/test_d.py": 5.0,
}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({}, []),
        ({"tests/test_a.py": 125, "tests/test_b.py": 30}, []),
        ({"tests/test_a.py": 131}, ["test_a.py needs .* expected"]),
        ({"tests/test_new.py": 31}, ["test_new.py .* new or has another name"]),
        ({f"tests/test_{name}.py": 29 for name in "efghi"}, ["all files need"]),
    ],
)
def test_a_file_that_grows_by_more_than_30_seconds_and_a_sum_that_grows_by_half_are_found(
    measured, words, scale
):
    found = grown_files({name: scale * n for name, n in (RECORDED | measured).items()}, RECORDED)
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert re.search(word, line), line


def test_a_run_without_a_measured_file_is_a_fault():
    assert grown_files({}, RECORDED) == ["no test file was measured: --costs checks a run of the tests"]
