"""What a process is told before anything heavy is imported: here, that malloc keeps what is freed."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.environment import MALLOC, malloc_variables

ROOT = Path(__file__).resolve().parent.parent
FAULTS = """
import resource
from components.environment import give_back_memory, quiet
quiet()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, again = faults(), faults()   # a page may be larger than usual: what is compared is the first time
give_back_memory()
print(first, again, faults())
"""
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")


def count_faults(**variables: str) -> tuple[int, int, int]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))} | variables
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    first, again, trimmed = map(int, done.stdout.split())
    return first, again, trimmed


@glibc
def test_freed_memory_serves_the_next_tensor_until_it_is_given_back():
    first, again, trimmed = count_faults()
    assert again < first / 10 and trimmed > first / 2


@glibc
@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")])
def test_malloc_is_left_alone_where_the_person_has_set_it(monkeypatch, name, value):
    first, again, _ = count_faults(**{name: value})
    assert again > first / 2
    monkeypatch.setenv(name, value)
    assert malloc_variables() == {}


def test_the_variables_for_other_processes_are_the_settings_of_this_one_and_stand_in_the_image(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    assert malloc_variables() == {name: str(value) for name, (_, value) in MALLOC.items()}
    image = (ROOT / "infra" / "Dockerfile").read_text(encoding="utf-8")
    assert " ".join(f"{name}={value}" for name, value in malloc_variables().items()) in image
