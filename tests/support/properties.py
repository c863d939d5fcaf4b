"""What must come of any recipe and any file: an accepted value that the reference allows, or one sentence."""

import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from components.config import UserError
from components.config.name_checks import is_hidden

T = TypeVar("T")
LIMIT = 20
"""Seconds of the processor that an input may take."""
EXAMPLES = int(os.environ.get("FED_RLHF_EXAMPLES", "0"))
"""Inputs that the long tier tries of each property, drawn from the seed of `--hypothesis-seed`.

Without it, the same few are tried each time.
"""
# Constants of the modules that are loaded, which a test before may have imported, would be among the inputs.
assert hasattr(providers, "_get_local_constants"), "this version of hypothesis has another name for it"
providers._get_local_constants = lambda: providers._local_constants
TIER = [pytest.mark.long] if EXAMPLES else []
"""The marks of a module of properties."""
REFERENCE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "recipe"
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
"""Values of the input in a message, which may be any text."""
NO_SENTENCE = re.compile(r"Traceback|pydantic|<class |object at 0x|For further information|Error: ")

PROPERTY = settings(
    max_examples=EXAMPLES or 40,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def accepted(call: Callable[[], T]) -> T | None:
    """What a call returns; None where it refuses its input in a sentence."""
    try:
        with _no_hang():
            result = call()
    except UserError as error:
        event("refused")
        _check_message(str(error))
        return None
    event("accepted")
    return result


@contextmanager
def _no_hang() -> Iterator[None]:
    """Ends what takes longer than LIMIT, whatever else the machine does."""

    def end(*_: object) -> None:
        raise TimeoutError(f"this takes more than {LIMIT} seconds")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _check_message(message: str) -> None:
    lines = message.split("\n")
    for line in lines:
        assert len(line.split()) >= 4, message
        assert not NO_SENTENCE.search(QUOTED.sub("", line)), message
        assert not any(map(is_hidden, line)), message


# --- values

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([-1, 0, 0.5, 1, 2, 10**6, 2**31 - 1, 2**31, 2**63, 10**400, 1e308, 5e-324, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "nan", "1", "a" * 5000, "a\u200bb", "\u202e", "\u034f", "a\nb"]),
    st.sampled_from(["a/../b", "../" * 2000]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
KEYS = st.one_of(st.text(max_size=8), st.sampled_from(["kind", "name", "path", "sha256", "a" * 5000]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
"""Values of JSON and YAML."""


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that are overwritten, repeated, inserted to or cut a few times, mostly a few of them."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from([0, 1, 1, 2, 8, 200])))
        inserted = draw(st.one_of(st.binary(max_size=4), st.binary(max_size=40), st.just(content[start:end])))
        edits = [
            content[:start] + inserted + content[end:],
            content[:start] + inserted + content[start:],
            content[:start] + content[end:],
        ]
        content = draw(st.sampled_from([*edits, *edits, content[:start], content[start:]]))
    return content


# --- the reference


@cache
def documented_types() -> dict[str, set[str]]:
    """The types in words that the reference gives to each key, by the key as it is written there."""
    types: dict[str, set[str]] = {}
    for page in REFERENCE.glob("*.md"):
        for key, words in re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page.read_text(encoding="utf-8"), re.M):
            types.setdefault(key, set()).add(words.strip())
    return types


def undocumented(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a recipe with values that the reference does not allow.

    A key of a kind's options is documented without those before it, so that the type of any kind fits.
    """
    types = documented_types()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        suffixes = [".".join(key.split(".")[n:]) for n in range(key.count(".") + 1)]
        words = set().union(*(types.get(suffix, set()) for suffix in suffixes))
        if words and not any(_fits(value, one) for one in words):
            yield f"{key} = {value!r} is none of {sorted(words)}"
        if "mapping of names to values" in words:
            continue  # fields of an endpoint or a template, which may have any name
        if isinstance(value, dict):
            yield from undocumented(value, f"{key}.")
        elif isinstance(value, float):
            assert math.isfinite(value), key
        assert not isinstance(value, int | float) or abs(value) < 2**31, key


def _fits(value: Any, words: str) -> bool:
    """Whether a value has a type in words, such as 'integer or null, >= 1'."""
    base, *bounds = words.split(", ")
    if base.startswith("list of `"):
        return value is None or (isinstance(value, list) and set(value) <= set(re.findall(r"`(\w+)`", base)))
    return any(_has_kind(value, kind, bounds) for kind in base.split(" or "))


def _has_kind(value: Any, kind: str, bounds: list[str]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind in ("integer", "number"):
        return is_number and (kind == "number" or isinstance(value, int)) and _within(value, bounds)
    if kind.startswith("`"):
        return value == kind.strip("`") or (isinstance(value, dict) and "kind" in value)
    if kind in ("true", "false"):
        return value is (kind == "true")
    if kind.startswith("list of "):
        item = kind.removeprefix("list of ").removesuffix("s")
        return isinstance(value, list) and all(_has_kind(one, item, []) for one in value)
    if kind in ("section", "sections") or kind.startswith("mapping of "):
        return isinstance(value, dict)
    return isinstance(value, str | dict)  # a text, a name or a file with its content


def _within(value: float, bounds: list[str]) -> bool:
    compare = {
        ">": lambda bound: value > bound,
        ">=": lambda bound: value >= bound,
        "<": lambda bound: value < bound,
        "<=": lambda bound: value <= bound,
    }
    signs = (bound.split() for bound in bounds)
    return all(compare[sign](float(number)) for sign, number in signs)
