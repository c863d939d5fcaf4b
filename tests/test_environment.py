"""Settings of a process before heavy imports: malloc, variables, logs."""

import ctypes
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.config import UserError
from components.environment import (
    MALLOC,
    SPIN,
    USER_ERROR_FILTER,
    VARIABLES,
    WAIT_VARIABLES,
    available_cores,
    configure_libraries,
    cpu_quota,
    cublas_variables,
    malloc_variables,
    preserve_root_log_level,
    use_deterministic_kernels,
)
from components.paths import without_credentials

ROOT = Path(__file__).resolve().parent.parent
COUNT_FAULTS = """
import resource
from components.environment import configure_libraries, release_memory
configure_libraries()

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = count_faults()
second = count_faults()
release_memory()
print(first, second, count_faults())
"""
"""Prints the page faults of the first allocation, the next one, and one after release_memory.

A page may be larger than usual, so they are compared with the first.
"""

glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc"
)


def is_malloc_variable(name: str) -> bool:
    return name.startswith(("MALLOC_", "GLIBC_TUNABLES"))


def count_faults(**variables: str) -> tuple[int, int, int]:
    inherited = {name: value for name, value in os.environ.items() if not is_malloc_variable(name)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS],
        cwd=ROOT,
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, released = map(int, done.stdout.split())
    return first, second, released


@pytest.mark.pipeline
@glibc
def test_freed_memory_serves_the_next_tensor_until_it_is_released():
    first, second, released = count_faults()
    assert second < first / 10
    assert released > first / 2


USER_SETTINGS = [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")]


@pytest.mark.pipeline
@glibc
@pytest.mark.parametrize(("name", "value"), USER_SETTINGS)
def test_malloc_is_not_configured_where_the_user_has_configured_it(name, value):
    first, second, _ = count_faults(**{name: value})
    assert second > first / 2


@pytest.mark.parametrize(("name", "value"), USER_SETTINGS)
def test_other_processes_get_no_variables_where_the_user_has_set_some(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert malloc_variables() == {}


@pytest.fixture
def without_malloc_variables(monkeypatch):
    for name in [name for name in os.environ if is_malloc_variable(name)]:
        monkeypatch.delenv(name)


def test_other_processes_and_the_image_get_the_settings_of_this_one(without_malloc_variables):
    assert malloc_variables() == {name: str(value) for name, (_, value) in MALLOC.items()}
    image = (ROOT / "infra" / "Dockerfile").read_text(encoding="utf-8")
    settings = " ".join(f"{name}={value}" for name, value in malloc_variables().items())
    assert settings in image


def test_variables_that_the_user_has_set_are_not_changed(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    configure_libraries()
    assert os.environ["TQDM_DISABLE"] == "0"
    assert os.environ["DO_NOT_TRACK"] == VARIABLES["DO_NOT_TRACK"]


@pytest.fixture
def torch_settings():
    """torch, whose settings are restored."""
    import torch

    yield torch
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda:1", True)])
def test_kernels_are_deterministic_on_cuda_and_those_of_the_cpu_stay(device, deterministic, torch_settings):
    use_deterministic_kernels(device)
    assert torch_settings.are_deterministic_algorithms_enabled() == deterministic
    assert not torch_settings.is_deterministic_algorithms_warn_only_enabled()
    assert torch_settings.utils.deterministic.fill_uninitialized_memory != deterministic


def test_the_workspaces_of_cublas_are_set_for_this_process_and_for_others(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_variables() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    configure_libraries()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert cublas_variables() == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


@pytest.mark.parametrize("name", [None, *WAIT_VARIABLES])
def test_threads_wait_as_the_user_says_or_else_spin_for_a_short_time(name, monkeypatch):
    for variable in WAIT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "1")
    configure_libraries()
    waiting = {variable: os.environ[variable] for variable in WAIT_VARIABLES if variable in os.environ}
    assert waiting == (SPIN if name is None else {name: "1"})


def log_record(error):
    return logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), (type(error), error, None))


def test_errors_are_logged_with_a_stack_trace_but_for_those_of_the_user():
    record = log_record(UserError("leave it out"))
    assert USER_ERROR_FILTER.filter(record)
    assert record.exc_info is None
    record = log_record(KeyError("x"))
    assert USER_ERROR_FILTER.filter(record)
    assert record.exc_info is not None


def test_the_level_of_the_root_logger_is_restored():
    before = logging.getLogger().level
    with preserve_root_log_level():
        logging.getLogger().setLevel(logging.CRITICAL)
    assert logging.getLogger().level == before


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://ada:secret@mlflow.example.org:5000/x", "https://mlflow.example.org:5000/x"),
        ("postgresql://ada:se@cret@h/db", "postgresql://h/db"),
        ("sqlite:////home/ada@home/mlflow.db", "sqlite:////home/ada@home/mlflow.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://ann:pa/ss@host:5000/x", "http://host:5000/x"),
        ("postgresql://host/db?user=ann&password=pass", "postgresql://host/db"),
        ("is there a run? No", "is there a run? No"),
    ],
)
def test_an_address_is_shown_without_its_user_and_password(uri, shown):
    assert without_credentials(uri) == shown


# --- cores


@pytest.mark.parametrize(
    ("files", "groups", "cores"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),  # a container of Docker with --cpus 1.5
        ({"cpu.max": "max 100000"}, "0::/", math.inf),
        ({"a.slice/cpu.max": "200000 100000", "a.slice/b/cpu.max": "max 100000"}, "0::/a.slice/b", 2),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, "2:cpuacct,cpu:/", 0.5),
        (  # mounted without a link
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            "2:cpu,cpuacct:/a",
            0.5,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/\n1:pids:/", math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000"}, "3:pids:/", math.inf),
        ({}, "0::/gone", math.inf),
    ],
)
def test_the_quota_of_control_groups_is_that_of_the_nearest_limit(files, groups, cores, tmp_path):
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    process = tmp_path / "process"
    process.write_text(f"{groups}\n")
    assert cpu_quota(tmp_path / "cgroup", process) == cores


def test_a_container_with_half_a_core_has_one(monkeypatch):
    monkeypatch.setattr("components.environment.cpu_quota", lambda: 0.5)
    assert available_cores() == 1
    monkeypatch.setattr("components.environment.cpu_quota", lambda: math.inf)
    assert available_cores() == len(os.sched_getaffinity(0))
