"""Fixtures of the data tests: small files written for them, and the real samples beside the repository where there are any."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fixtures() -> Path:
    return ROOT / "tests" / "fixtures" / "data"


@pytest.fixture
def samples() -> Path:
    folder = Path(os.environ.get("FED_RLHF_SAMPLES", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the real samples are not at {folder} (set FED_RLHF_SAMPLES)")
    return folder
