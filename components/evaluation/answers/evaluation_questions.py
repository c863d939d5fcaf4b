"""The questions that policies are evaluated on, none of which may have a tree of thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from components.config import DataConfig, QuestionsConfig
from components.data.questions import Question, load_section, pooled, render
from components.data.records import DataError
from components.data.trees import trees_at


def tree_questions(data: DataConfig, grown: Path | None) -> dict[str, str]:
    """Collect the questions that a run's trees of thoughts were grown for.

    Args:
        data: names the trees that were grown before the run (data.path or data.trees).
        grown: folder of the trees that the run grew itself; None if it grew none.

    Returns:
        the questions as they were shown, by name (set/id).

    Raises:
        DataError: the trees cannot be read.
    """
    is_source = data.source == "thoughts"
    earlier = data.path if is_source else data.trees
    folder = Path(earlier) if grown is None and earlier is not None else grown
    if folder is None:
        return {}
    trees = trees_at(folder, "data.path" if is_source else "data.trees")
    return {tree.id: tree.question for tree in trees}


def load_evaluation_questions(
    sections: Sequence[QuestionsConfig], seed: int, with_trees: Mapping[str, str]
) -> dict[str, list[Question]]:
    """Load the questions that policies are evaluated on.

    Args:
        sections: the question sets and parts of a recipe.
        seed: determines the sample of a section with a count.
        with_trees: questions that trees were grown for, see tree_questions. A question is one of
            them if its name is equal, if its id is equal in another set of the same pool (such as
            csqa and cose), or if its text is equal.

    Returns:
        questions by set.

    Raises:
        DataError: the questions cannot be read, there are none, one is listed twice, or a tree was
            grown for one of them.
    """
    questions_by_set: dict[str, list[Question]] = {}
    trees_by_key = _trees_by_key(with_trees)
    for n, section in enumerate(sections):
        questions, _ = load_section(section, seed, f"evaluation.questions.questions[{n}]")
        if not questions:
            raise DataError(
                f"evaluation.questions: part {section.part} of set {section.set} holds no question: choose a"
                " larger part"
            )
        _check_without_trees(questions, section.set, trees_by_key)
        questions_by_set.setdefault(section.set, []).extend(questions)
    for name, questions in questions_by_set.items():
        _check_distinct(name, questions)
    return questions_by_set


def _check_distinct(question_set: str, questions: Sequence[Question]) -> None:
    if len({question.id for question in questions}) < len(questions):
        raise DataError(
            f"evaluation.questions: the parts of set {question_set} share questions: give each its own, such"
            " as part: [0, 2] and [1, 2]"
        )


TreeKey = str | tuple[str, str]
"""A question's name (set/id), its pool and id, or its text."""


def _trees_by_key(with_trees: Mapping[str, str]) -> dict[TreeKey, str]:
    """Names of trees by each key of their questions; a name has precedence over a text."""
    trees: dict[TreeKey, str] = {text: name for name, text in with_trees.items()}
    trees |= {pooled(name): name for name in with_trees}
    trees |= {name: name for name in with_trees}
    return trees


def _check_without_trees(
    questions: Sequence[Question], question_set: str, trees_by_key: Mapping[TreeKey, str]
) -> None:
    trained: list[tuple[str, str]] = []
    for question in questions:
        tree_name = _tree_of(question, trees_by_key)
        if tree_name is not None:
            trained.append((question.id, tree_name))
    if not trained:
        return
    question_id, tree = trained[0]
    raise DataError(
        f"evaluation.questions: trees of thoughts were grown for {len(trained)} of the {len(questions)}"
        f" questions of set {question_set}, e.g. {question_set}/{question_id} (tree {tree}), so that answers"
        f" to them would not measure new questions: use another file, or {_remedy(tree, question_set)}"
    )


def _tree_of(question: Question, trees_by_key: Mapping[TreeKey, str]) -> str | None:
    """Name of the tree that was grown for a question; None without one."""
    name = f"{question.set}/{question.id}"
    keys = (name, pooled(name), render(question))
    return next((trees_by_key[key] for key in keys if key in trees_by_key), None)


def _remedy(tree: str, question_set: str) -> str:
    tree_set = tree.partition("/")[0]
    if tree_set == question_set:
        return "another part of this one, such as part: [1, 2] if the trees are of [0, 2]"
    return (
        f"give each of the sets {tree_set} and {question_set}, which share questions, a part of its own,"
        " such as part: [0, 2] and [1, 2]"
    )
