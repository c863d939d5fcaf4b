"""Reading YAML files with 'key.path=value' overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from components.config.errors import RecipeError
from components.config.section import describe_type

TAG = "tag:yaml.org,2002:"


Tree = dict[str, Any]
"""Plain values of YAML by their keys."""


class _SafeLoader(Composer, yaml.CSafeLoader):
    """Safe YAML with the plain values of YAML 1.2, in which a mapping names each key once.

    PyYAML reads YAML 1.1, where 010 is 8, 1:30 is 90, `no` is false, 2026-11-25 is a date, and 1e-5 is text,
    and takes the last value of a key that is named twice. Here all but 1e-5 are texts, so that a place for
    a number refuses them.

    libyaml splits the text into events, in a tenth of the time; nodes are composed in Python.
    """

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                problem = f"the key '{key.value}' is named twice, in lines {lines[key.value]} and {line}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag.removeprefix(TAG) in ("map", "seq", "str", "int", "float", "bool", "null", "merge"):
                return super().construct_object(node, deep)
            problem = f"the tag {node.tag.replace(TAG, '!!')} is not used here: write the value without it"
        except (ValueError, KeyError):
            problem = f"'{str(node.value)[:40]}' is no {node.tag.removeprefix(TAG)}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_SafeLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]{1,16}", list("-+0123456789")),
    (
        "float",
        r"[-+]?((\.\d+|\d+\.\d*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
):
    _SafeLoader.add_implicit_resolver(TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


class _SafeDumper(yaml.SafeDumper):
    """Safe YAML in which text of several lines, such as a template, is written as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(f"{TAG}str", data, style="|" if "\n" in data else None)


_SafeDumper.add_representer(str, _SafeDumper.represent_str)
_SafeDumper.add_implicit_resolver(  # so that a text such as 7e5, which is a number of YAML 1.2, is quoted
    TAG + "float", re.compile(r"^[-+]?(\.\d+|\d+\.?\d*)[eE][-+]?\d+$"), list("-+.0123456789")
)


def dump_yaml(content: Any) -> str:
    """YAML of plain values, in their order."""
    return yaml.dump(content, Dumper=_SafeDumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, content: str) -> Tree:
    """The mapping in a YAML file, with every alias as a value of its own.

    The content is what the file holds, for the messages of a RecipeError, e.g. 'a recipe is a mapping'.
    """
    try:
        tree = _load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{path}{line}: this is not valid YAML ({problem}).") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: {content}, but this file holds {describe_type(tree)}.")
    return tree


def _load(text: str) -> Any:
    """The value of a YAML text, with every alias as a value of its own, so that each can be overridden."""

    def unshared(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: unshared(value) for key, value in node.items()}
        return [unshared(value) for value in node] if isinstance(node, list) else node

    try:
        return unshared(yaml.load(text, _SafeLoader))
    except RecursionError:
        raise ValueError("an alias contains itself, or values are nested too deeply") from None


def merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """A tree with the values of another one where it has none of its own.

    Sections are merged key by key; all other values, lists included, are replaced. Options and the section
    of a kind are not merged with those of another method, source or kind.
    """
    merged = dict(base)
    for choice, options in (("method", "options"), ("source", "options")):
        if choice in own and choice in base and own[choice] != base[choice]:
            merged.pop(options, None)
    if "kind" in own and "kind" in base and own["kind"] != base["kind"]:
        merged = {}
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(below, str) and isinstance(value, Mapping):  # the name of a kind, see apply_overrides
            below = {"kind": below}
        is_section = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = merge(below or {}, value) if is_section else value
    return merged


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree that are no sections, with their dotted keys; empty sections are values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_json = partial(json.dumps, ensure_ascii=False)


def annotated_yaml(
    tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "", indent: str = ""
) -> str:
    """YAML of a tree, in which a comment says where each value comes from, by the origins of dotted keys."""
    lines = []
    for key, value in tree.items():
        shown = key if re.fullmatch(r"[a-z]\w*", key) and key not in ("true", "false", "null") else _json(key)
        if isinstance(value, Mapping) and value:
            below = annotated_yaml(value, origins, f"{prefix}{key}.", f"{indent}  ")
            lines.append(f"{indent}{shown}:\n{below}")
        else:
            origin = origin_of(f"{prefix}{key}", origins) or "default"
            lines.append(f"{indent}{shown}: {_json(value)}  # {origin}")
    return "\n".join(lines)


def origin_of(key: str, origins: Mapping[str, str]) -> str | None:
    """Where a value comes from: the origin of its key, of the section it is in, or of all that is in it."""
    parts = re.split(r"[.\[]", key)
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    inside = {origin for name, origin in origins.items() if name.startswith(f"{key}.")}
    found = next((origins[name] for name in above if name in origins), None)
    return found or (inside.pop() if len(inside) == 1 else None)


def apply_overrides(tree: Tree, overrides: Iterable[str]) -> None:
    """Set the values of 'key.path=value' overrides in a tree, creating sections as needed."""
    for override in overrides:
        _apply(tree, override)


def _apply(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or not key.isprintable():
        raise RecipeError(f"override {override!r}: expected key.path=value, e.g. federation.rounds=10.")
    try:
        value = _load(text)
    except (yaml.YAMLError, ValueError):
        raise RecipeError(f"override {override!r}: the value is not valid YAML.") from None
    *sections, last = key.split(".")
    node = tree
    for depth, section in enumerate(sections):
        child = node.get(section)
        if child is None or isinstance(child, str):  # the name of a kind stands for its section
            child = node[section] = {} if child is None else {"kind": child}
        if not isinstance(child, dict):
            path = ".".join(sections[: depth + 1])
            raise RecipeError(
                f"override {override!r}: {path} is {describe_type(child)}, not a section with keys of"
                " its own."
            )
        node = child
    node[last] = value
