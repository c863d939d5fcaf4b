"""Runs that are killed at random moments end with the bytes of runs that were not killed."""

import os
import random
import re
import subprocess
import sys

import pytest
import yaml

from tests.golden.compare import ROOT, VARIANTS

MINUTES = 8


@pytest.mark.long
def test_variants_that_are_killed_at_random_moments_end_with_the_bytes_of_whole_runs(tmp_path):
    """Some variants of all, drawn with the moments from the seed FED_RLHF_KILL_SEED."""
    seed = int(os.environ.get("FED_RLHF_KILL_SEED", "0"))
    variants = yaml.safe_load((ROOT / VARIANTS).read_text(encoding="utf-8"))
    names = [name for name in variants if not name.startswith("_")]
    only = random.Random(seed).sample(names, 3)
    options = ["--kills", "5", "--minutes", str(MINUTES), "--seed", str(seed), "--only", *only]
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.kills", str(tmp_path), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"FED_RLHF_KILL_SEED={seed}: {done.stdout}{done.stderr}"
    assert re.search(r": [1-9]\d* kills\n", done.stdout), f"no run was killed: {done.stdout}"
