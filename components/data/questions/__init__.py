"""Multiple-choice questions for chains of thoughts: DRIFT's eight sets (section 4, table 7).

A set is a client.

    aqua, mathqa              algebra (mathematics.py)
    csqa, cose, piqa          common sense (commonsense.py)
    medmcqa, medqa, pubmedqa  medicine (medicine.py)
    chitchat                  the reply in a conversation; embedded, for demonstrations
                              (conversation.py)

From the hub the training split is read unless a recipe names another: its answers are public in all
eight sets. No remote code is run. The hub's schemas are those
of the sets' pages and former loading scripts; they were not verified on the hub.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config import QuestionsConfig, RecipeError
from components.data.questions.question_set import QUESTION_SETS, QuestionSet, SkippedRow
from components.data.questions.question_set import Question as Question  # exported
from components.data.records import DataError
from components.data.rows import SUFFIXES, RawRows, find_file, from_hub, is_saved
from components.data.same_text import one_prompt
from components.seeding import derive, generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def names() -> list[str]:
    """Names of the registered sets, sorted."""
    return QUESTION_SETS.names()


def pool(name: str) -> str:
    """The pool of questions that a set takes its questions from; an unknown set has its own."""
    return (QUESTION_SETS.load(name).pool or name) if name in QUESTION_SETS else name


def pooled(name: str) -> tuple[str, str]:
    """A key that is equal for one question in two sets: its pool and its id.

    Args:
        name: set and id of the question, e.g. csqa/1.
    """
    of, _, own_id = name.partition("/")
    return pool(of), own_id


def shared_questions(questions: Iterable[str]) -> list[tuple[str, str]]:
    """The questions (set/id) that two sets have in common, by both their names."""
    first: dict[tuple[str, str], str] = {}
    shared: list[tuple[str, str]] = []
    for name in questions:
        other = first.setdefault(pooled(name), name)
        if other.partition("/")[0] != name.partition("/")[0]:
            shared.append((other, name))
    return shared


def load_questions(
    name: str,
    path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    count: int | None = None,
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    split: str | None = None,
) -> tuple[list[Question], dict[str, int]]:
    """Load the questions of a set, in the set's order.

    Args:
        name: see names().
        path: a file of the hub's schema or of the original distribution, or a folder with such
            files, which is read in place of the hub; the modules of the sets name the files.
        revision: of the hub set; None: the set's own.
        count: maximum number of questions (a random sample); DRIFT takes about 300 of each set
            (appendix B). None takes all.
        seed: of the sample.
        part: (k, n) takes the k-th (from 0) of n parts, see in_part: two clients with different
            parts have no question in common, even if their sets ask the same ones, as csqa and cose
            do.
        split: of the hub set; None: the set's own.

    Returns:
        the questions, and the number of rows that made none, by reason; rows of other parts and
        those over count are included. For cose, explanations without a question are counted too.

    Raises:
        RecipeError: an unknown set, or an impossible part or count.
        DataError: the data cannot be read, lack a column, have a value of a wrong type, or have no
            usable question.
    """
    question_set = QUESTION_SETS.load(name)
    if not 0 <= part[0] < part[1]:
        raise RecipeError(
            f"part {part[0]} of {part[1]} of the question set '{name}': expected (k, n) with k from 0"
            " to n - 1"
        )
    if count is not None and count < 1:
        raise RecipeError(
            f"the question set '{name}': count is {count}, but at least 1 is expected (or null for all)"
        )
    raw, left_out = _raw(question_set, path, revision, split)
    questions, counts = read_questions(name, *raw)
    dropped = Counter(left_out) + Counter(counts)
    if not questions:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "no rows"
        raise DataError(f"{raw.where}: there is no usable question in these data ({reasons})")
    chosen = [question for question in questions if in_part(question.id, *part)]
    dropped["question of another part"] = len(questions) - len(chosen)
    if count is not None and len(chosen) > count:
        dropped["over count"] = len(chosen) - count
        sample = generator(seed, "questions", name).choice(len(chosen), count, replace=False)
        chosen = [chosen[i] for i in sorted(sample)]
    return chosen, {reason: n for reason, n in dropped.items() if n}


def load_section(section: QuestionsConfig, seed: int, key: str) -> tuple[list[Question], dict[str, int]]:
    """Load the questions that a section of a recipe names, see load_questions.

    Args:
        section: of the recipe.
        seed: of the sample, if the section has a count.
        key: the section's own key, e.g. 'thoughts.questions[0]'.

    Raises:
        DataError: as load_questions; errors of a path name the section's own key.
    """
    try:
        return load_questions(
            section.set,
            section.path,
            section.revision,
            section.count,
            seed,
            (section.part[0], section.part[1]),
            section.split,
        )
    except DataError as error:
        raise DataError(str(error).replace("data.path", f"{key}.path")) from error


def split_of(section: QuestionsConfig) -> str:
    """The split of the hub set that a section of a recipe names, or the set's own."""
    return section.split or QUESTION_SETS.load(section.set).split


def read_questions(
    name: str, rows: Iterable[Mapping[str, Any]], where: str
) -> tuple[list[Question], dict[str, int]]:
    """Make questions of rows of the hub's schema.

    Args:
        name: of the set.
        rows: the rows.
        where: origin of the rows, for errors.

    Returns:
        the questions in the order of the rows, and the number of rows that made none, by reason:
        see QuestionRow.answered, a repeated id, or a repeated question with its context and options.
    """
    row_type = QUESTION_SETS.load(name).row
    questions: dict[str, Question] = {}
    known: set[tuple[str, str, frozenset[str]]] = set()
    dropped: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        try:
            question = replace(row_type.read_one(row, f"{where}, row {number}").ask(), set=name)
        except SkippedRow as reason:
            dropped[str(reason)] += 1
            continue
        options = frozenset(one_prompt(option) for _, option in question.options)
        key = (one_prompt(question.context), one_prompt(question.question), options)
        if question.id in questions:
            dropped["duplicate id"] += 1
        elif key in known:
            dropped["question that came before"] += 1
        else:
            questions[question.id] = question
            known.add(key)
    return list(questions.values()), dict(dropped)


def in_part(question_id: str, k: int, n: int) -> bool:
    """Whether a question is in the k-th (from 0) of n parts.

    A hash of its id decides, and neither the set, nor a seed, nor other rows of the file.
    """
    return derive(0, "part", question_id) % n == k


def parts_meet(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a question can be in both of two parts (k, n) and (j, m).

    A number can have the remainders k modulo n and j modulo m if k and j are equal modulo the
    greatest common divisor of n and m.
    """
    return (one[0] - other[0]) % math.gcd(one[1], other[1]) == 0


def render(question: Question) -> str:
    """The text to show to a model: context, question, and one line per option with its label."""
    options = "\n".join(f"{label}) {text}" for label, text in question.options)
    return "\n\n".join(text for text in (question.context, f"{question.question}\n{options}") if text)


def truncate_context(question: Question, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Question:
    """Truncate a question's context so that the question with context and options has `max_tokens`.

    The context loses its end. The question itself and its options are never truncated.
    """
    surplus = len(tokenizer.encode(render(question), add_special_tokens=False)) - max_tokens
    context = tokenizer.encode(question.context, add_special_tokens=False)
    if surplus <= 0 or not context:
        return question
    remaining = cast("str", tokenizer.decode(context[: max(0, len(context) - surplus)]))
    return replace(question, context=remaining.rstrip("\ufffd").strip())  # half a character


def _raw(
    question_set: QuestionSet, path: str | os.PathLike[str] | None, revision: str | None, split: str | None
) -> tuple[RawRows, Mapping[str, int]]:
    """Rows of the hub's schema, and the number of those left out, by reason."""
    if path is None and question_set.embedded is not None:
        if revision is not None:
            raise RecipeError("an embedded question set has no revision: leave it out")
        if split is not None:
            raise RecipeError("an embedded question set has no splits: leave split out")
        return RawRows(question_set.embedded(), "the embedded conversations"), {}
    if path is None:
        raw = from_hub(
            question_set.hub,
            question_set.config,
            split=split or question_set.split,
            revision=revision or question_set.revision,
        )
        return raw, {}
    file = Path(path)
    if file.is_dir():
        files = [find_file(file, stem) for stem in question_set.files]
        found = next((one for one in files if one is not None), None)
        if found is None and not is_saved(file):
            raise DataError(
                f"{path}: expected one of the files {', '.join(question_set.files)} ({', '.join(SUFFIXES)})"
                " in this folder (data.path)"
            )
        file = found or file
    rows, dropped = question_set.local(file)
    return RawRows(rows, str(file)), dropped
