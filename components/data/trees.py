"""Trees of thoughts: their file, best paths, and the pairs along these (DRIFT section 2.2, eq. 3).

The best path of a tree is the one with the greatest sum of scores. At each of its steps the chosen
thought is preferred over its pruned siblings, after the same prefix (Chain of Preference
Optimization, Zhang et al. 2024):

    question, previous thoughts  ->  chosen thought  >  pruned sibling

Siblings with the same score (up to data.min_margin) give no pair, nor do those without a score. A
deviation: in eq. 3 the chosen thought is preferred over every pruned sibling, here not over one
with a higher score, since the pair would contradict the evaluator. Such siblings exist because the
sum along the path is maximal, if the beam is wide enough to continue from a worse thought (2 or
more, or null for all). All of these are counted. A file has one tree per line; trees are added to
it, and none is removed.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from components.config.name_checks import check_name
from components.data.questions import pooled
from components.data.records import TEXTS, DataError, Pair
from components.data.rows import normalize_line_ends
from components.data.same_text import same_text
from components.data.templates import Template, names
from components.data.templates import load as load_template
from components.io import write_atomically

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Node:
    """A thought."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    number: int  # in the order of growth
    parent: int  # number of the previous thought, -1 for the first ones
    depth: int  # 1 for the first ones
    thought: str  # one line
    # 1 to 10 (an integer, or a mean with `read: expected`), or of a scale of one's own; None: unreadable
    score: Annotated[int | float, Field(ge=-(2**53), le=2**53)] | None
    asked: int  # number of requests to the evaluator


@dataclass(frozen=True)
class Tree:
    """A question's tree."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    id: str  # of the question, with its set
    set: str  # name of the question set
    key: str  # hash of the settings that it was grown with
    question: str  # text that the policy was shown
    nodes: tuple[Node, ...]  # in the order of growth
    path: tuple[int, ...]  # the best path's nodes; shorter than the depth where scores are missing


_TREE = TypeAdapter(Tree)


def thought_pairs(path: Path, key: str, min_margin: float = 0.0) -> tuple[list[Pair], dict[str, int]]:
    """Make the pairs of a file or folder of trees, each owned by its question set.

    Trees whose questions are the same text (same_text), or are equal in two sets of a pool,
    are one group.

    Args:
        path: of the file or folder.
        key: of the recipe that names it, for errors.
        min_margin: see tree_pairs.

    Returns:
        the pairs, and the number of thoughts that gave none, by reason.
    """
    trees: dict[str, Tree] = {}
    for tree in trees_at(path, key):
        known = trees.setdefault(tree.id, tree)  # concurrent runs may have grown the same tree twice
        if (known.key, known.question) != (tree.key, tree.question):
            raise DataError(
                f"{path}: question {tree.id} has two trees, grown with different settings or texts: keep"
                " those of one, or each in a folder of its own"
            )
    groups = _question_groups(trees)
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    for tree in trees.values():
        own, counts = tree_pairs(tree, thought_template(tree.set), min_margin)
        for pair in own:
            texts = {name: normalize_line_ends(getattr(pair, name)) for name in TEXTS}
            pairs.append(replace(pair, client_id=tree.set, group=groups[tree.id], **texts))
        dropped += counts
    if not pairs:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "there are none"
        raise DataError(f"{path}: none of the {len(trees)} trees gives a pair ({reasons})")
    return pairs, dict(dropped)


def _question_groups(trees: Mapping[str, Tree]) -> dict[str, str]:
    """The group of each tree: the first id, in sorted order, of the same question."""
    group_of: dict[str | tuple[str, str], str] = {}
    for name in sorted(trees):
        keys = (same_text(trees[name].question), pooled(name))
        group = next((group_of[key] for key in keys if key in group_of), name)
        group_of |= dict.fromkeys(keys, group)
    return {name: group_of[pooled(name)] for name in trees}


def best_path(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Numbers of the nodes of the longest scored path with the greatest sum of scores.

    Of paths with equal length and sum, the one that was grown first is returned.
    """
    paths: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 0.0)}
    for node in sorted(nodes, key=lambda node: node.number):
        if node.score is not None and node.parent in paths:
            prefix, total = paths[node.parent]
            paths[node.number] = ((*prefix, node.number), total + node.score)
    return min(paths.values(), key=lambda entry: (-len(entry[0]), -entry[1], entry[0]))[0]


def numbered(thoughts: Sequence[str]) -> str:
    """Thoughts as a prompt shows them, one per line."""
    return "\n".join(f"{n}. {thought}" for n, thought in enumerate(thoughts, 1)) or "(none yet)"


def thought_template(name: str) -> Template:
    """The template of a question set's next thought: its own if it has one, or the common one."""
    own = f"thoughts/thought_{name}"
    return load_template(own if own in names("thought") else "thoughts/thought_default", "thought")


def tree_pairs(tree: Tree, template: Template, min_margin: float = 0.0) -> tuple[list[Pair], Counter[str]]:
    """Make the preference pairs along a tree's best path.

    Args:
        tree: grown.
        template: of the next thought, which makes the pairs' prompts.
        min_margin: scores that differ by at most this are the same.

    Returns:
        the pairs, with the difference of the scores as margin, the set as domain, and the question
        as group, so that it stays with one client and in one split; and the number of siblings that
        gave none, by reason. One with a higher score than the chosen thought gives none, unlike in
        eq. 3.
    """
    by_number = {node.number: node for node in tree.nodes}
    max_depth = max((node.depth for node in tree.nodes), default=0)
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    dropped["path ends early"] += len(tree.path) < max_depth or not tree.path
    for place, number in enumerate(tree.path):
        chosen = by_number[number]
        previous = numbered([by_number[n].thought for n in tree.path[:place]])
        prompt = template.render(question=tree.question, thoughts=previous)
        step = (chosen.parent, chosen.depth)
        for sibling in (node for node in tree.nodes if (node.parent, node.depth) == step):
            if sibling.number == chosen.number:
                continue
            margin = _margin(chosen, sibling, min_margin)
            if isinstance(margin, str):
                dropped[margin] += 1
                continue
            pairs.append(
                Pair(
                    prompt,
                    chosen.thought,
                    sibling.thought,
                    domain=tree.set,
                    group=tree.id,
                    margin=margin,
                    tree=tree.id,
                    depth=chosen.depth,
                )
            )
    return pairs, +dropped


def _margin(chosen: Node, sibling: Node, min_margin: float) -> float | str:
    """How much higher the chosen thought is scored than a sibling, or why it is not preferred."""
    if sibling.score is None or chosen.score is None:
        return "unreadable score" if sibling.thought else "empty thought"
    if sibling.thought == chosen.thought:
        return "same thought"
    margin = float(chosen.score - sibling.score)
    if abs(margin) <= min_margin:
        return "same score"
    return margin if margin > 0 else "sibling scored higher"


def read_trees(path: Path) -> list[Tree]:
    """Read the trees of a file, in its order; none where it does not exist.

    An incomplete last line, of a killed run, is ignored; `append_trees` overwrites it.

    Raises:
        DataError: another line is not a tree; names it.
    """
    if not path.is_file():
        return []
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    trees: list[Tree] = []
    for number, line in enumerate(lines, 1):
        try:
            tree = _TREE.validate_json(line)
            numbers = [node.number for node in tree.nodes]
            if len(set(numbers)) < len(numbers) or not set(tree.path) <= set(numbers):
                raise ValueError("the numbers of its nodes are not unique, or its path has another one")
            trees.append(replace(tree, set=check_name(tree.set)))
        except ValueError as error:
            reason = error.errors()[-1]["msg"] if isinstance(error, ValidationError) else error
            raise DataError(
                f"{path}, line {number}: this is not a tree of thoughts ({reason}): delete the line, and its"
                " question is asked again"
            ) from None
    return trees


def trees_at(path: Path, key: str) -> list[Tree]:
    """Read the trees of a file, or of all such files of a folder.

    Args:
        path: of the file or folder.
        key: of the recipe that names it, for errors.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"{path}: there is no file of trees (*.jsonl) here ({key})")
    trees: list[Tree] = []
    for file in files:
        trees += read_trees(file)
    return trees


def append_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Append trees to a file; all of them are on the disk when this returns.

    The file is replaced by its copy with the trees, so that it has all of them or none, also after
    a kill. An incomplete last line is left out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may append to the same file
        data = path.read_bytes() if path.is_file() else b""
        complete = data[: data.rfind(b"\n") + 1]
        write_atomically(path, complete + b"".join(tree_line(tree) for tree in trees))


def tree_line(tree: Tree) -> bytes:
    """A tree as a line of a file."""
    return json.dumps(asdict(tree), ensure_ascii=False).encode() + b"\n"
