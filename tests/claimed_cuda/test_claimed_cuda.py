"""The code on CUDA devices that are only claimed: branches for CUDA, devices that mix, several devices.

`python -m tests.claimed_cuda` runs all methods and pipelines.
"""

import shutil

import pytest
import torch

from tests.claimed_cuda.__main__ import reasons, run_cases

WHOLE_RUNS = "rounds or pipeline or processes_of_ray or names_ray or benchmark or lost"
"""Cases that run methods or the pipeline, or start Ray."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.pipeline,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the hooks of CUDA"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the hooks are compiled by g++"),
]


def assert_pass(selection, at_least):
    done = run_cases(2, selection)
    assert done.returncode == 0, reasons(done.stdout) or done.stdout[-6000:]
    assert done.stdout.count("\nPASSED ") >= at_least


def test_models_and_the_rounds_of_a_method_run_on_two_claimed_devices():
    assert_pass(f"not ({WHOLE_RUNS}) or rounds and fedbis-paper", 18)


def test_all_methods_and_pipelines_run_on_two_claimed_devices():
    """Of the methods on Ray two, which share a selector and have private modules."""
    on_ray = "processes_of_ray and (fedbis-paper or fedpdpo)"
    assert_pass(f"({WHOLE_RUNS}) and not processes_of_ray or {on_ray}", 30)
