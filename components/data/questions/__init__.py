"""Multiple-choice questions for chains of thoughts: the eight sets of DRIFT (section 4, table 7), one a client, and an embedded one.

    aqua, mathqa              algebra (mathematics.py)
    csqa, cose, piqa          common sense (commonsense.py)
    medmcqa, medqa, pubmedqa  medicine (medicine.py)
    chitchat                  which reply was given in a conversation; from a package, for demonstrations (conversation.py)

From the hub the training part is read, whose answers are public in all eight, so that the published development and test
parts stay for measuring. No remote code is ever run. The hub's schemas are those of the sets' pages and former loading
scripts; the hub was out of reach when this was written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.config import QuestionsConfig, RecipeError, unknown_name
from components.data.questions import commonsense, conversation, mathematics, medicine  # noqa: F401  (importing them registers their sets)
from components.data.questions.registry import QUESTION_SETS, Question, QuestionSet, Unusable
from components.data.records import DataError
from components.data.rows import SUFFIXES, find_file, from_hub
from components.seeding import derive, generator

__all__ = ["Question", "in_part", "load_questions", "load_section", "names", "parts_meet", "pool", "pooled", "read_questions", "render", "shared_questions"]


def names() -> list[str]:
    """The registered sets."""
    return sorted(QUESTION_SETS)


def pool(name: str) -> str:
    """The pool of questions that a set takes its questions from, see QuestionSet; a set that is not registered has its own."""
    return QUESTION_SETS[name].pool if name in QUESTION_SETS else name


def pooled(name: str) -> tuple[str, str]:
    """What is the same for one question in two sets: the pool and the id, of a question's set and id, as in csqa/1."""
    of, _, own_id = name.partition("/")
    return pool(of), own_id


def shared_questions(asked: Iterable[str]) -> list[tuple[str, str]]:
    """The questions that two sets ask, by both their names (set/id)."""
    first: dict[tuple[str, str], str] = {}
    return [(other, name) for name in asked if (other := first.setdefault(pooled(name), name)).partition("/")[0] != name.partition("/")[0]]


def load_questions(
        name: str, path: str | Path | None = None, revision: str | None = None, count: int | None = None, seed: int = 0,
        part: tuple[int, int] = (0, 1)) -> tuple[list[Question], dict[str, int]]:
    """The questions of a set, in the set's order.

    Args:
        name: see names().
        path: a file of the hub's schema or of the original distribution, or a folder with such files, read in place of
            the hub; the modules of the sets name the files.
        revision: of the hub set; the set's own where it is None.
        count: a random sample of at most so many questions; DRIFT takes about 300 of each set (appendix B). None keeps all.
        seed: of the sample.
        part: (k, n) keeps the k-th (from 0) of n parts, see in_part: two clients with different parts have no question in
            common even where they ask the same questions, as csqa and cose do (pool).

    Returns:
        Questions, and how many rows made none, by reason; rows of other parts and those over count are among them. For
        cose, explanations that belong to no question are counted, too.

    Raises:
        RecipeError: an unknown set (the nearest one is named), or a part or a count that there cannot be.
        DataError: the data cannot be read, lack a column, hold another type than they should, or hold no usable question.
    """
    if name not in QUESTION_SETS:
        raise RecipeError(unknown_name("question set", name, QUESTION_SETS))
    if not 0 <= part[0] < part[1]:
        raise RecipeError(f"part {part[0]} of {part[1]} of the question set '{name}': expected (k, n) with k from 0 to n - 1")
    if count is not None and count < 1:
        raise RecipeError(f"the question set '{name}': count is {count}, but at least 1 is expected (or null for all)")
    raw, where, lost = _raw(QUESTION_SETS[name], path, revision)
    questions, counts = read_questions(name, raw, where)
    dropped = Counter(lost) + Counter(counts)
    if not questions:
        raise DataError(f"{where}: there is no usable question in these data ({', '.join(f'{reason}: {n}' for reason, n in dropped.items()) or 'no rows'})")
    kept = [question for question in questions if in_part(question.id, *part)]
    dropped["question of another part"] = len(questions) - len(kept)
    if count is not None and len(kept) > count:
        dropped["over count"] = len(kept) - count
        kept = [kept[i] for i in sorted(generator(seed, "questions", name).choice(len(kept), count, replace=False))]
    return kept, {reason: n for reason, n in dropped.items() if n}


def load_section(section: QuestionsConfig, seed: int, key: str) -> tuple[list[Question], dict[str, int]]:
    """The questions that a section of a recipe names, see load_questions.

    Args:
        section: of the recipe.
        seed: of the sample where it has a count.
        key: the section's own key, e.g. 'thoughts.questions[0]'.

    Raises:
        DataError: as load_questions; what is said of a path names the section's own.
    """
    try:
        return load_questions(section.set, section.path, section.revision, section.count, seed, (section.part[0], section.part[1]))
    except DataError as error:
        raise DataError(str(error).replace("data.path", f"{key}.path")) from error


def read_questions(name: str, rows: Iterable[Mapping[str, Any]], where: str) -> tuple[list[Question], dict[str, int]]:
    """Questions from rows of the hub's schema.

    Args:
        name: of the set.
        where: what the rows come from, for errors.

    Returns:
        Questions in the rows' order, and how many rows made none, by reason: see registry.answered, and an id, or a question
        with its context and options, that came before.

    Raises:
        DataError: a column is missing or of another type.
    """
    read = QUESTION_SETS[name].read
    questions: dict[str, Question] = {}
    asked: set[tuple] = set()
    dropped: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        try:
            question = read(dict(row), f"{where}, row {number}")
        except Unusable as reason:
            dropped[str(reason)] += 1
            continue
        text = (question.context, question.question, frozenset(option for _, option in question.options))
        if question.id in questions:
            dropped["duplicate id"] += 1
        elif text in asked:
            dropped["question that came before"] += 1
        else:
            questions[question.id] = question
            asked.add(text)
    return list(questions.values()), dict(dropped)


def in_part(question_id: str, k: int, n: int) -> bool:
    """Whether a question is in the k-th (from 0) of n parts: a hash of its id says so, and neither the set, nor a seed, nor what else is in the file."""
    return derive(0, "part", question_id) % n == k


def parts_meet(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a question can be in both of two parts (k, n) and (j, m): a number can leave the remainder k of n and j of m where k and j leave the same of their common divisors."""
    return (one[0] - other[0]) % math.gcd(one[1], other[1]) == 0


def render(question: Question) -> str:
    """The text to show to a model: context, question, and the options with their labels, a line each."""
    options = "\n".join(f"{label}) {text}" for label, text in question.options)
    return "\n\n".join(text for text in (question.context, f"{question.question}\n{options}") if text)


def _raw(found: QuestionSet, path: str | Path | None, revision: str | None) -> tuple[Iterable[Mapping[str, Any]], str, dict[str, int]]:
    """Rows of the hub's schema, where they come from, and what was left out on the way."""
    if path is None and found.embedded is not None:
        if revision is not None:
            raise RecipeError("an embedded question set has no revision: leave it out")
        return found.embedded(), "the embedded conversations", {}
    if path is None:
        return from_hub(found.hub, found.config, split=found.split, revision=revision or found.revision), f"{found.hub} (split {found.split})", {}
    file = Path(path)
    if file.is_dir():
        file = next((inside for stem in found.files if (inside := find_file(Path(path), stem))), None)
        if file is None:
            raise DataError(f"{path}: expected one of the files {', '.join(found.files)} ({', '.join(SUFFIXES)}) in this folder (data.path)")
    rows, lost = found.local(file)
    return rows, str(file), lost
