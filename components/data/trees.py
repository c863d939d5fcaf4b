"""Trees of thoughts: their file, their best paths, and the preference pairs along these (DRIFT section 2.2, eq. 3); the source `thoughts`.

The best path of a tree is the one with the greatest sum of scores. At each of its steps the kept thought is preferred over
its pruned siblings, given the same prefix (Chain of Preference Optimization, Zhang et al. 2024):

    question, thoughts so far  ->  kept thought  >  pruned sibling

Siblings with the same score (data.min_margin says what is the same) give no pair, nor do those without a score. A departure: in
eq. 3 the kept thought is preferred over every sibling that was pruned, here not over one that was scored higher, since the
evaluator's word on the two would be turned round. There are such siblings, as it is the sum along the path that is the
greatest, where the beam is wide enough to carry on a worse thought (2 or more, or null for all). All of these are counted. A
file holds a tree a line, and is only ever added to.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.questions import pooled
from components.data.records import DataError, SourceData
from components.data.registry import source
from components.data.reserve import set_apart
from components.data.splits import assign, normal
from components.data.templates import Template, names
from components.data.templates import load as load_template


class ThoughtsDataOptions(Section):
    """Options of the source thoughts."""

    align_share: float = Field(0.0, ge=0, lt=1, description="Share of the training questions that become the server's unlabelled prompts; their pairs are left out.")
    judge_share: float = Field(0.1, ge=0, lt=1, description="Share of the questions whose pairs train the judge.")


@source("thoughts", ThoughtsDataOptions)
def load(data: DataConfig, options: ThoughtsDataOptions, seed: int) -> SourceData:
    """The pairs of a file of trees (data.path), or of all such files of a folder; with the natural partition a question set is a client.

    Splits are drawn by question, so that all steps of a tree are in one.

    Raises:
        DataError: the file is not given, is not there, or holds no tree that gives a pair.
    """
    if data.path is None:
        raise DataError("the data source thoughts reads trees that were grown before: give their file, or a folder of them, as data.path")
    rows, left_out = thought_pairs(Path(data.path), "data.path", data.min_margin)
    parts = assign((row["group"] for row in rows), data.validation, data.test, seed)
    return set_apart([row | {"split": part} for row, part in zip(rows, parts, strict=True)], "thoughts", options.align_share, options.judge_share, seed, left_out)


def thought_pairs(path: Path, key: str, min_margin: float = 0.0) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The pairs of a file of trees, or of all such files of a folder, each owned by its question set; and what gave none, by reason.

    Trees whose questions differ in case and white space only, or are one in two sets of a pool, are one group.

    Args:
        path: of the file or folder.
        key: of the recipe that names it, for errors.
        min_margin: see tree_pairs.

    Raises:
        DataError: there is no file, one has a line that is no tree, a question has two trees, or none of them gives a pair.
    """
    trees: dict[str, Tree] = {}
    for tree in trees_at(path, key):
        if tree.id in trees and trees[tree.id].key == tree.key and trees[tree.id].question == tree.question:
            continue  # two runs at once may have grown the same one
        if tree.id in trees:
            raise DataError(f"{path}: question {tree.id} has two trees, grown with different settings or texts: keep those of one, or each in a folder of its own")
        trees[tree.id] = tree
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    first: dict[Any, str] = {}
    for name in sorted(trees):
        same = (normal(trees[name].question), pooled(name))
        first |= dict.fromkeys(same, next((first[key] for key in same if key in first), name))
    for tree in trees.values():
        own, dropped = tree_pairs(tree, thought_template(tree.set), min_margin)
        rows += [row | {"client_id": tree.set, "group": first[pooled(tree.id)]} for row in own]
        left_out += dropped
    if not rows:
        raise DataError(f"{path}: none of the {len(trees)} trees gives a pair ({', '.join(f'{reason}: {n}' for reason, n in left_out.items()) or 'there are none'})")
    return rows, dict(left_out)


@dataclass(frozen=True)
class Node:
    """A thought.

    Attributes:
        number: of the node, in the order of growth.
        parent: number of the thought before, -1 for the first ones.
        depth: 1 for the first ones.
        thought: its text, one line.
        score: 1 to 10 (an integer, or a mean with `read: expected`), None where none could be read.
        asked: how often the evaluator was asked.
    """

    number: int
    parent: int
    depth: int
    thought: str
    score: float | None
    asked: int


@dataclass(frozen=True)
class Tree:
    """A question's tree.

    Attributes:
        id: of the question, with its set.
        set: name of the question set.
        key: hash of the settings that it was grown with.
        question: as it was shown.
        nodes: in the order of growth.
        path: numbers of the best path's nodes; shorter than the depth where scores are missing.
    """

    id: str
    set: str
    key: str
    question: str
    nodes: tuple[Node, ...]
    path: tuple[int, ...] = field(default=())


def best_path(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Numbers of the nodes of the longest scored path with the greatest sum of scores; of equal ones that which was grown first."""
    known = {node.number: node for node in nodes if node.score is not None}
    paths: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 0.0)}
    for number, node in sorted(known.items()):
        if node.parent in paths:
            before, total = paths[node.parent]
            paths[number] = ((*before, number), total + node.score)
    return min(paths.values(), key=lambda entry: (-len(entry[0]), -entry[1], entry[0]))[0]


def numbered(thoughts: Sequence[str]) -> str:
    """Thoughts as they stand in a prompt, one a line."""
    return "\n".join(f"{n}. {thought}" for n, thought in enumerate(thoughts, 1)) or "(none yet)"


def thought_template(name: str) -> Template:
    """The template of a question set's next thought: its own where there is one, else the common one."""
    own = f"thoughts/thought_{name}"
    return load_template(own if own in names("thought") else "thoughts/thought_default", "thought")


def tree_pairs(tree: Tree, template: Template, min_margin: float = 0.0) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The preference pairs along a tree's best path, and how many siblings gave none, by reason; one that was scored higher than the kept thought gives none, unlike in eq. 3 (see above).

    Args:
        tree: grown.
        template: of the next thought, which makes the pairs' prompts.
        min_margin: difference of scores up to which, it included, they count as the same.

    Returns:
        rows with prompt, chosen, rejected, margin (difference of the scores), domain (the set), group (the question, so
        that it stays with one client and in one split), tree and depth; and the counts.
    """
    by_number, rows, left_out = {node.number: node for node in tree.nodes}, [], Counter()
    left_out["path ends early"] += int(len(tree.path) < max((node.depth for node in tree.nodes), default=0) or not tree.path)
    for place, number in enumerate(tree.path):
        kept = by_number[number]
        prompt = template.render(question=tree.question, thoughts=numbered([by_number[n].thought for n in tree.path[:place]]))
        for sibling in tree.nodes:
            if sibling.parent != kept.parent or sibling.number == number or sibling.depth != kept.depth:
                continue
            if sibling.score is None:
                left_out["empty thought" if not sibling.thought else "unreadable score"] += 1
            elif sibling.thought == kept.thought:
                left_out["same thought"] += 1
            elif abs(sibling.score - kept.score) <= min_margin:
                left_out["same score"] += 1
            elif sibling.score > kept.score:
                left_out["sibling scored higher"] += 1
            else:
                rows.append({"prompt": prompt, "chosen": kept.thought, "rejected": sibling.thought, "margin": float(kept.score - sibling.score),
                             "domain": tree.set, "group": tree.id, "tree": tree.id, "depth": kept.depth})
    return rows, +left_out


def read_trees(path: Path) -> list[Tree]:
    """The trees of a file, in its order. A last line that a kill cut short is left out; `append_tree` writes over it.

    Raises:
        DataError: another line is not a tree; names it.
    """
    if not path.is_file():
        return []
    data = path.read_bytes()
    lines, trees = data[: data.rfind(b"\n") + 1].splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            trees.append(Tree(**content | {"nodes": tuple(Node(**node) for node in content["nodes"]), "path": tuple(content["path"])}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: this is not a tree of thoughts ({error}): delete the line, and its question is asked again") from None
    return trees


def trees_at(path: Path, key: str) -> list[Tree]:
    """The trees of a file, or of all such files of a folder; key is the recipe's key that names it, for errors.

    Raises:
        DataError: there is no such file, or a line is not a tree.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"{path}: there is no file of trees (*.jsonl) here ({key})")
    return [tree for file in files for tree in read_trees(file)]


def append_tree(path: Path, tree: Tree) -> None:
    """Add a tree at the end of a file, whole and on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run may add to the same file
        file.seek(0)
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
        file.write(tree_line(tree))
        file.flush()
        os.fsync(file.fileno())


def tree_line(tree: Tree) -> bytes:
    """A tree as a line of a file."""
    return json.dumps(asdict(tree), ensure_ascii=False).encode() + b"\n"
