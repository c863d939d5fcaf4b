"""The files of the long tier, and those that a change concerns: `python -m tests.support.long_tier BASE`.

Prints the files of tests/long.yaml that changed since the commit BASE, or of which a source did.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypedDict

import pytest
import yaml
from _pytest.mark import ParameterSet

ROOT = Path(__file__).resolve().parents[2]
ALL = ("constraints.txt", "tests/conftest.py", "tests/support/pipeline.py")
"""A change of these concerns all files."""


class LongFile(TypedDict):
    """What tests/long.yaml says of a file."""

    stays: list[str]
    touched: list[str]


def long_files() -> dict[str, LongFile]:
    """The files of the long tier by their path."""
    files: dict[str, LongFile] = yaml.safe_load((ROOT / "tests" / "long.yaml").read_text(encoding="utf-8"))
    return files


def concerned(changed: Collection[str]) -> list[str]:
    """The files of the long tier that are among changed files, or name one of them."""
    files = []
    for name, entry in long_files().items():
        if any(fnmatch(path, pattern) for path in changed for pattern in (name, *ALL, *entry["touched"])):
            files.append(name)
    return files


def with_examples(names: Iterable[str], examples: Collection[str]) -> list[ParameterSet]:
    """Cases of a test: the examples, which stay in `make test`, and all others, which are long."""
    cases = list(names)
    assert set(examples) <= set(cases), examples
    return [pytest.param(name, marks=[] if name in examples else pytest.mark.long) for name in cases]


def main(base: str) -> None:
    """Print a line for each file."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", base, "HEAD"]
    changed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    print("\n".join(concerned(changed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
