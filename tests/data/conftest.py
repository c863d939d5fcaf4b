"""Fixtures of the data tests: small files written for them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fixtures() -> Path:
    return ROOT / "tests" / "fixtures" / "data"
