"""Reading YAML files with 'key.path=value' overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from components.config.errors import RecipeError
from components.config.section import describe_type


class _SafeLoader(yaml.SafeLoader):
    """Safe YAML as in YAML 1.2: 1e-5 is a number, and a mapping names each key once.

    PyYAML reads 1e-5 as text, and takes the last value of a key that is named twice.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is named twice", key.start_mark
                )
            names.add(key.value)
        return node


_SafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _SafeDumper(yaml.SafeDumper):
    """Safe YAML in which text of several lines, such as a template, is written as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_SafeDumper.add_representer(str, _represent_text)


def dump_yaml(content: Any) -> str:
    """YAML of plain values, in their order."""
    return yaml.dump(content, Dumper=_SafeDumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, content: str) -> dict[str, Any]:
    """The mapping in a YAML file, with every alias as a value of its own.

    Args:
        path: the file.
        content: what the file holds, for messages, e.g. 'a recipe is a mapping of sections'.

    Raises:
        RecipeError: the file is no valid YAML, or holds no mapping.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{path}{line}: this is not valid YAML ({problem}).") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: {content}, but this file holds {describe_type(tree)}.")
    try:
        return {key: _unshare(value) for key, value in tree.items()}
    except RecursionError:
        raise RecipeError(f"{path}: an alias of YAML contains itself: write the value out.") from None


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set the values of 'key.path=value' overrides in a tree, creating sections as needed.

    Raises:
        RecipeError: an override is malformed, or its path leads through a value that is no section.
    """
    for override in overrides:
        _apply(tree, override)


def _unshare(node: Any) -> Any:
    """A copy whose YAML aliases are values of their own, so that an override changes one of them."""
    if isinstance(node, dict):
        return {key: _unshare(value) for key, value in node.items()}
    return [_unshare(value) for value in node] if isinstance(node, list) else node


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override '{override}': expected key.path=value, e.g. federation.rounds=10.")
    try:
        value = yaml.load(text, _SafeLoader)
    except yaml.YAMLError:
        raise RecipeError(f"override '{override}': the value is not valid YAML.") from None
    *sections, last = key.split(".")
    node = tree
    for depth, section in enumerate(sections):
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if isinstance(child, str):  # the name of a kind, which stands for a section with its defaults
            child = node[section] = {"kind": child}
        if not isinstance(child, dict):
            path = ".".join(sections[: depth + 1])
            raise RecipeError(
                f"override '{override}': {path} is {describe_type(child)}, not a section with keys of its"
                " own."
            )
        node = child
    node[last] = value
