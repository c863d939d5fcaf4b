"""Growth of trees, level by level, for several questions at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import NamedTuple, TypeVar

from components.alignment.thoughts.scores import Score
from components.alignment.thoughts.tree_models import Request, TreeModels
from components.config import ThoughtsConfig
from components.data.questions import Question, render
from components.data.templates import Template
from components.data.trees import Node, Tree, best_path, numbered
from components.seeding import derive

T = TypeVar("T")


class ThoughtTemplates(NamedTuple):
    """Templates of a question set: of the next thought, and of a thought's value."""

    thought: Template
    value: Template


@dataclass(frozen=True)
class TreeSettings:
    """Settings of the trees of a question set."""

    config: ThoughtsConfig  # depth, children, and beam
    templates: ThoughtTemplates
    key: str  # hash of the settings, stored with each tree, see settings_key
    seed: int  # determines the samples, together with the question's set and id


class Prefix(NamedTuple):
    """A path from the question to a thought, and the sum of its scores."""

    nodes: tuple[Node, ...]
    total: float


@dataclass
class GrowingTree:
    """A tree whose levels are grown one after the other."""

    question: Question
    settings: TreeSettings
    nodes: list[Node] = field(default_factory=list)  # of complete levels, in the order of growth
    # Prefixes that the next level extends, the best first
    frontier: list[Prefix] = field(default_factory=lambda: [Prefix((), 0.0)])
    depth: int = 0  # number of complete levels

    @property
    def name(self) -> str:
        return f"{self.question.set}/{self.question.id}"

    @property
    def is_complete(self) -> bool:
        return not self.frontier or self.depth == self.settings.config.depth

    def thought_requests(self) -> list[Request]:
        question = render(self.question)
        seed = derive(self.settings.seed, "thoughts", self.name, self.depth + 1)
        requests = []
        for prefix in self.frontier:
            thoughts = numbered([node.thought for node in prefix.nodes])
            prompt = self.settings.templates.thought.render(question=question, thoughts=thoughts)
            requests += [Request(prompt, seed)] * self.settings.config.children
        return requests

    def score_requests(self, thoughts: Sequence[str]) -> list[Request]:
        question = render(self.question)
        seed = derive(self.settings.seed, "scores", self.name, self.depth + 1)
        template = self.settings.templates.value
        return [Request(template.render(question=question, thought=thought), seed) for thought in thoughts]

    def add_level(self, thoughts: Sequence[str], scores: Mapping[int, Score]) -> None:
        """Add the next level: a thought for each of `thought_requests`, and scores by position."""
        children = self.settings.config.children
        prefixes = chain.from_iterable(repeat(prefix, children) for prefix in self.frontier)
        extended = []
        for position, (prefix, thought) in enumerate(zip(prefixes, thoughts, strict=True)):
            score, attempts = scores.get(position, Score(None, 0))
            parent = prefix.nodes[-1].number if prefix.nodes else -1
            node = Node(len(self.nodes), parent, len(prefix.nodes) + 1, thought, score, attempts)
            self.nodes.append(node)
            if score is not None:
                extended.append(Prefix((*prefix.nodes, node), prefix.total + score))
        extended.sort(key=lambda prefix: (-prefix.total, prefix.nodes[-1].number))
        self.frontier = extended[: self.settings.config.beam]
        self.depth += 1

    def complete(self) -> Tree:
        nodes = tuple(self.nodes)
        shown = render(self.question)
        return Tree(self.name, self.question.set, self.settings.key, shown, nodes, best_path(nodes))


def grow_trees(
    questions: Sequence[Question],
    models: TreeModels,
    settings: Mapping[str, TreeSettings],
) -> list[Tree]:
    """Grow the trees of questions together: the requests of a level are answered in common batches.

    A tree is the one that its question has by itself, except for the last bits of expected scores,
    which depend on the batch that they are computed in. The questions, of any sets, have distinct
    names (set/id); the settings are by set.
    """
    trees = [GrowingTree(question, settings[question.set]) for question in questions]
    while growing := [tree for tree in trees if not tree.is_complete]:
        thoughts_by_tree = _answer_together([tree.thought_requests() for tree in growing], models.write)
        levels = [[first_line(text) for text in texts] for texts in thoughts_by_tree]
        positions = [[n for n, thought in enumerate(thoughts) if thought] for thoughts in levels]
        requests = []
        for tree, thoughts, scored in zip(growing, levels, positions, strict=True):
            requests.append(tree.score_requests([thoughts[n] for n in scored]))
        scores_by_tree = _answer_together(requests, models.score)
        for tree, thoughts, scored, scores in zip(growing, levels, positions, scores_by_tree, strict=True):
            tree.add_level(thoughts, dict(zip(scored, scores, strict=True)))
    return [tree.complete() for tree in trees]


def _answer_together(
    requests_by_tree: Sequence[Sequence[Request]], answer: Callable[[Sequence[Request]], Sequence[T]]
) -> list[list[T]]:
    """Answer the requests of all trees in one call; gives the answers by tree."""
    answers = iter(answer(list(chain.from_iterable(requests_by_tree))))
    return [list(islice(answers, len(requests))) for requests in requests_by_tree]


def first_line(text: str) -> str:
    """The first line that is not blank, without a number that a model may write before it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"^\d{1,2}[.)]\s+", "", line)
