"""The check of the processor seconds of test files."""

import re

import pytest

from tests.support.costs import CALIBRATION, grown_files

RECORDED = {CALIBRATION: 0.5, "tests/test_a.py": 100.0, "tests/test_b.py": 10.0}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"tests/test_a.py": 125, "tests/test_b.py": 30}, []),
        ({"tests/test_a.py": 131, "tests/test_b.py": 10}, ["test_a.py needs .* expected"]),
        ({"tests/test_new.py": 31, "tests/test_a.py": 100}, ["test_new.py .* new or has another name"]),
        ({"tests/test_a.py": 129, "tests/test_b.py": 39, "tests/test_new.py": 29}, ["all files need"]),
        ({}, ["no test file was measured"]),
    ],
)
def test_a_file_that_grows_by_more_than_30_seconds_and_a_sum_that_grows_by_half_are_found(
    measured, words, scale
):
    found = grown_files({name: scale * n for name, n in measured.items()}, RECORDED, 0.5 * scale)
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert re.search(word, line), line
