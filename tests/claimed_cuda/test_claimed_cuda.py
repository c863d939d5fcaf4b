"""The code on CUDA devices that are only claimed: branches for CUDA, devices that mix, several devices.

`python -m tests.claimed_cuda` runs all methods and pipelines.
"""

import shutil

import pytest
import torch

from tests.claimed_cuda.__main__ import run_cases

SELECTION = (
    "not rounds and not pipeline and not processes_of_ray and not benchmark and not lost"
    " or rounds and (fedbis-paper or fedpdpo or firm-weights)"
    " or processes_of_ray and fedbis-paper"
)
"""The cases that are independent of methods, some methods, and one on Ray."""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the hooks of CUDA")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the hooks are compiled by g++")
def test_cases_pass_on_two_claimed_devices():
    done = run_cases(2, SELECTION)
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("\nPASSED ") >= 18
