"""Any change of a recipe is a recipe that the reference allows, or is refused in sentences."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from components.config.loading import dump_yaml, leaves
from components.recipes import load_recipe
from components.recipes.benchmarks import read_benchmark
from components.recipes.load import RECIPES, find_recipe, recipe_names
from tests.support.properties import (
    KEYS,
    NUMBERS,
    PROPERTY,
    SCALARS,
    TIER,
    VALUES,
    accepted,
    damaged,
    documented_types,
    undocumented,
)

pytestmark = TIER

SOURCES = ["summarization/demo", "qa/demo", "personalized/demo", "multi-objective/demo", "reasoning/demo"]
NAMES = st.sampled_from(["debug", *SOURCES])
SNIPPETS = st.one_of(
    st.text(max_size=30),
    SCALARS.map(lambda value: yaml.safe_dump(value).removesuffix("...\n")),
    VALUES.map(lambda value: json.dumps(value)),
    st.sampled_from(
        [
            *("!!int x", "!!binary aGk=", "!!python/name:os.system", "!!set {a}", "!!timestamp 2001-01-01"),
            *("010", "0o10", "1:30", "2026-11-25", "1e5", "1_000", "+.inf", ".NaN", "1e400", "0x" + "f" * 99),
            *("9" * 5000, "[" * 3000, "{a: " * 3000, "&a [*a]", "&a {b: *a}", "*a", "<<: {a: 1}"),
            *(
                "? [a]\n: b",
                "|\n  x",
                "'",
                '"',
                "%YAML 1.1",
                "---\na",
                "...",
                "\x00",
                "\u2028",
                "\ufeff",
                "@",
                "`",
            ),
        ]
    ),
)
"""Values as they are written in YAML, and what looks like one."""


@pytest.fixture(scope="module")
def file():
    """A recipe's file, written anew for each input."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "recipe.yaml"


@cache
def complete(name):
    """A recipe with all its defaults."""
    return load_recipe(name).model_dump(mode="json")


@cache
def known_keys():
    """The dotted keys of recipes and of the reference."""
    keys = {key for name in ["debug", *SOURCES] for key, _ in leaves(complete(name))}
    keys |= set(documented_types())
    keys |= {key.rpartition(".")[0] for key in keys if "." in key}
    return sorted(keys)


def check(name_or_path, overrides=()):
    recipe = accepted(lambda: load_recipe(str(name_or_path), overrides))
    if recipe is not None:
        assert not list(undocumented(recipe.model_dump(mode="json")))


def test_the_packaged_recipes_are_what_the_reference_allows():
    assert not [found for name in recipe_names() for found in undocumented(complete(name))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation.rounds", 0),
        ("federation.rounds", 1.5),
        ("federation.rounds", True),
        ("federation.quorum", 1.01),
        ("federation.local_epochs", "1"),
        ("data.clients", 0),
        ("federation.optimizer.scheduler", "other"),
        ("policy.lora.target_modules", [1]),
    ],
)
def test_a_value_that_the_reference_forbids_is_found(key, value):
    tree = copy.deepcopy(complete("debug"))
    *sections, last = key.split(".")
    section = tree
    for name in sections:
        section = section[name]
    section[last] = value
    assert [found.partition(" = ")[0] for found in undocumented(tree)] == [key]


@PROPERTY
@given(data=st.data())
def test_any_override(data):
    name = data.draw(NAMES)
    own = st.sampled_from([key for key, _ in leaves(complete(name))])
    key = st.one_of(own, own, own, st.sampled_from(known_keys()), st.text(max_size=12))
    value = st.one_of(SNIPPETS, NUMBERS.map(str), st.sampled_from(["true", "null", "0.1", "3", "{}", "[]"]))
    override = st.builds("{}={}".format, key, value)
    check(name, data.draw(st.lists(override, min_size=1, max_size=3)))


@PROPERTY
@given(data=st.data())
def test_any_number(data):
    name = data.draw(NAMES)
    keys = [key for key, value in leaves(complete(name)) if isinstance(value, int | float)]
    value = data.draw(st.one_of(st.integers(-1, 20), st.floats(-0.1, 1.1), st.floats(1, 100), NUMBERS))
    check(name, [f"{data.draw(st.sampled_from(keys))}={json.dumps(value)}"])


@PROPERTY
@given(data=st.data())
def test_any_change_of_a_value_or_a_key(data, file):
    tree = copy.deepcopy(complete(data.draw(NAMES)))
    for _ in range(data.draw(st.integers(1, 2))):
        section = tree
        while True:
            key = data.draw(st.sampled_from(sorted(section, key=str)))
            below = section[key]
            if not (isinstance(below, dict) and below) or data.draw(st.integers(0, 9)) == 0:
                break
            section = below
        change = data.draw(st.sampled_from(["replace", "replace", "rename", "drop"]))
        value = section.pop(key)
        if change == "replace":
            section[key] = data.draw(VALUES)
        elif change == "rename":
            section[data.draw(KEYS)] = value
        if not section:
            break
    file.write_text(dump_yaml(tree), encoding="utf-8")
    check(file)


@PROPERTY
@given(data=st.data())
def test_any_change_of_a_line(data, file):
    lines = find_recipe(data.draw(NAMES)).read_text(encoding="utf-8").splitlines()
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(lines) - 1))
        key, colon, _ = lines[number].partition(":")
        snippet = data.draw(SNIPPETS)
        changed = [
            [lines[number]] * 2,
            [],
            [f"{key}{colon} {snippet}"],
            [f"  {lines[number]}"],
            [lines[number], snippet],
        ]
        lines[number : number + 1] = data.draw(st.sampled_from(changed))
        if not lines:
            break
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    check(file)


@PROPERTY
@given(data=st.data())
def test_any_bytes(data, file):
    content = (RECIPES / f"{data.draw(NAMES)}.yaml").read_bytes()
    file.write_bytes(data.draw(st.one_of(st.binary(max_size=200), damaged(content))))
    check(file)


@PROPERTY
@given(data=st.data())
def test_any_benchmark(data, file):
    tree = {
        "recipe": "debug",
        "seeds": [0, 1],
        "settings": ["federation.rounds=2"],
        "arms": {"one": [], "two": ["federation.local_steps=2"]},
        "contests": [["one", "two"]],
        "claims": [{"arm": "one", "figure": "mean", "against": ["two"], "at_least": 0.0}],
    }
    key = data.draw(st.sampled_from([*tree, "fronts", "choices", "regressions", "like"]))
    tree[key] = data.draw(VALUES)
    file.write_text(dump_yaml(tree), encoding="utf-8")
    accepted(lambda: read_benchmark(str(file)))
