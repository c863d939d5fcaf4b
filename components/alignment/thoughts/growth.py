"""Growth of the tree of a question, level by level."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from components.alignment.thoughts.models import Evaluator, TreeModels, Writer
from components.alignment.thoughts.scores import Score
from components.config import ThoughtsConfig
from components.data.questions import Question, render
from components.data.templates import Template
from components.data.trees import Node, Tree, best_path, numbered
from components.seeding import derive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ThoughtTemplates(NamedTuple):
    """Templates of a question set: of the next thought, and of a thought's value."""

    thought: Template
    value: Template


@dataclass(frozen=True)
class TreeSettings:
    """Settings of the trees of a question set.

    Attributes:
        config: depth, children, and beam.
        templates: templates of the set.
        key: hash of the settings, stored with each tree, see settings_key.
        seed: determines the samples, together with the question's set and id.
    """

    config: ThoughtsConfig
    templates: ThoughtTemplates
    key: str
    seed: int


class Prefix(NamedTuple):
    """A path from the question to a thought, and the sum of its scores."""

    nodes: tuple[Node, ...]
    total: float


def grow_tree(question: Question, models: TreeModels, settings: TreeSettings) -> Tree:
    """Grow the tree of a question.

    Args:
        question: the question.
        models: propose and score thoughts.
        settings: depth, children, beam, templates, key, and seed.

    Raises:
        ThoughtsError: the evaluator failed.
    """
    shown = render(question)
    name = f"{question.set}/{question.id}"
    nodes: list[Node] = []
    frontier = [Prefix((), 0.0)]
    for depth in range(1, settings.config.depth + 1):
        thoughts = _propose(
            shown, frontier, models.writer, settings, derive(settings.seed, "thoughts", name, depth)
        )
        scores = _score(
            shown, thoughts, models.evaluator, settings, derive(settings.seed, "scores", name, depth)
        )
        prefixes: list[Prefix] = []
        for prefix in frontier:
            prefixes += [prefix] * settings.config.children
        level = _make_nodes(prefixes, thoughts, scores, len(nodes))
        nodes += level
        frontier = _best_extensions(prefixes, level, settings.config.beam)
        if not frontier:
            break
    return Tree(name, question.set, settings.key, shown, tuple(nodes), best_path(nodes))


def _make_nodes(
    prefixes: Sequence[Prefix], thoughts: Sequence[str], scores: Mapping[int, Score], first_number: int
) -> list[Node]:
    """The nodes of a level: a thought after each prefix, with its score, if it has one."""
    nodes = []
    for position, (prefix, thought) in enumerate(zip(prefixes, thoughts, strict=True)):
        score = scores.get(position, Score(None, 0))
        parent = prefix.nodes[-1].number if prefix.nodes else -1
        depth = len(prefix.nodes) + 1
        nodes.append(Node(first_number + position, parent, depth, thought, score.value, score.attempts))
    return nodes


def _best_extensions(prefixes: Sequence[Prefix], nodes: Sequence[Node], beam: int | None) -> list[Prefix]:
    """The prefixes extended by their nodes with a score, the best first, at most `beam` of them."""
    extended = []
    for prefix, node in zip(prefixes, nodes, strict=True):
        if node.score is not None:
            extended.append(Prefix((*prefix.nodes, node), prefix.total + node.score))
    extended.sort(key=lambda prefix: (-prefix.total, prefix.nodes[-1].number))
    return extended[:beam]


def _propose(
    question: str, frontier: Sequence[Prefix], writer: Writer, settings: TreeSettings, seed: int
) -> list[str]:
    """Propose `children` thoughts after each prefix."""
    prompts = []
    for prefix in frontier:
        thoughts = numbered([node.thought for node in prefix.nodes])
        prompt = settings.templates.thought.render(question=question, thoughts=thoughts)
        prompts += [prompt] * settings.config.children
    return [first_line(text) for text in writer.write(prompts, seed)]


def _score(
    question: str, thoughts: Sequence[str], evaluator: Evaluator, settings: TreeSettings, seed: int
) -> dict[int, Score]:
    """Score the thoughts that are not empty; gives the scores by position."""
    positions = [n for n, thought in enumerate(thoughts) if thought]
    prompts = [settings.templates.value.render(question=question, thought=thoughts[n]) for n in positions]
    return dict(zip(positions, evaluator.score(prompts, seed), strict=True))


def first_line(text: str) -> str:
    """The first line that is not blank, without a number that a model may write before it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"^\d{1,2}[.)]\s+", "", line)


def truncate_context(question: Question, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Question:
    """Truncate a question's context so that the question fits.

    The context loses its end. The question itself and its options are never truncated.

    Args:
        question: the question.
        tokenizer: tokenizer of the policy.
        max_tokens: longest question with its context and options (tokens).
    """
    surplus = len(tokenizer.encode(render(question), add_special_tokens=False)) - max_tokens
    context = tokenizer.encode(question.context, add_special_tokens=False)
    if surplus <= 0 or not context:
        return question
    remaining = cast("str", tokenizer.decode(context[: max(0, len(context) - surplus)]))
    return replace(question, context=remaining.strip())
