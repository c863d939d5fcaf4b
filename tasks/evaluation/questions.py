"""Answers of the policies to multiple-choice questions (DRIFT section 7.1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import Recipe
from components.federation.outcome import rows_by_client
from components.federation.protocol import Generation
from components.io import read_json, write_json
from components.models.policy import assign_round_robin
from components.models.samples import Completion
from components.results import QuestionResult
from components.seeding import derive
from tasks.policies import EvaluatedPolicy, generate
from tasks.runs import Run

if TYPE_CHECKING:
    from components.data.questions import Question
    from components.evaluation.answers import AnsweredQuestion


def answer_questions(run: Run, recipe: Recipe, policy: EvaluatedPolicy) -> QuestionResult:
    """Answers of a policy to the recipe's questions, greedy and sampled (DRIFT section 7.1).

    With policies of clients' own, a set is answered by its client, or by its clients in turn; the
    questions of other sets belong to no client, and are assigned round-robin. Answers to a set are
    stored as questions/<policy>-<set>.json, and read if they are stored.

    Raises:
        DataError: a tree was grown for one of the questions.
    """
    from components.evaluation.answers import answer_figures, load_evaluation_questions, tree_questions

    config = recipe.evaluation.questions
    if config is None:
        raise ValueError("the recipe has no section evaluation.questions")
    folder = run.evaluation / "questions"
    paths = {section.set: folder / f"{policy.name}-{section.set}.json" for section in config.questions}
    missing = {name: path for name, path in paths.items() if not path.is_file()}
    if missing:
        grown = run.trees if recipe.thoughts is not None else None
        questions_by_set = load_evaluation_questions(
            config.questions, recipe.seed, tree_questions(recipe.data, grown)
        )
        _answer_sets(run, recipe, policy, {path: questions_by_set[name] for name, path in missing.items()})
    all_rows: list[AnsweredQuestion] = []
    for path in paths.values():
        all_rows += read_json(path)
    seed = derive(recipe.seed, "bootstrap", "questions")
    return answer_figures(all_rows, recipe.evaluation.bootstrap, seed)


def _answer_sets(
    run: Run, recipe: Recipe, policy: EvaluatedPolicy, sets: Mapping[Path, Sequence[Question]]
) -> None:
    """Write the answers to each set as soon as they are complete.

    Rows have the answering client where clients have policies of their own.
    """
    from components.evaluation.answers import QuestionPrompts

    config = recipe.evaluation.questions
    assert config is not None
    prompts = {path: QuestionPrompts(questions, config, recipe.policy) for path, questions in sets.items()}
    assigned = {
        path: rows_by_client(assign_questions(policy.clients, len(questions), questions[0].set))
        for path, questions in sets.items()
    }
    # Each client's generations, and the set that each of them belongs to.
    generations: dict[str, list[Generation]] = defaultdict(list)
    sources: dict[str, list[Path]] = defaultdict(list)
    for path, questions in sets.items():
        for client, rows in assigned[path].items():
            seed = derive(recipe.seed, "questions", questions[0].set, client)
            own = prompts[path].generations(rows, seed)
            generations[client] += own
            sources[client] += [path] * len(own)
    completed: dict[tuple[Path, str], list[list[list[Completion]]]] = defaultdict(list)

    def store(client: str, number: int, completions: list[list[Completion]]) -> None:
        path = sources[client][number]
        completed[path, client].append(completions)
        if all(len(completed[path, name]) == 2 for name in assigned[path]):
            answered: dict[int, Mapping[str, Any]] = {}
            for name, rows in assigned[path].items():
                own = {"client_id": name} if name else {}
                parsed = prompts[path].parse(rows, *completed[path, name])
                answered.update((n, dict(row) | own) for n, row in zip(rows, parsed, strict=True))
            write_json(path, [answered[n] for n in sorted(answered)])

    generate(run, recipe, policy, generations, "answer questions", store)


def assign_questions(clients: Sequence[str], count: int, question_set: str) -> list[str]:
    """The client that answers each question of a set; empty names if all clients share a policy.

    The questions of a client's own set go to that client, those of other sets to all clients in turn.
    Clients that share a set (<set>-0, <set>-1 and so on) answer its questions in turn.
    """
    if not clients:
        return [""] * count
    if question_set in clients:
        return [question_set] * count
    sharing = [name for name in clients if re.fullmatch(rf"{re.escape(question_set)}-\d+", name)]
    return assign_round_robin(count, sharing or clients)
