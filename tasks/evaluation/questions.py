"""Answers of the policies to multiple-choice questions (DRIFT section 7.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.config import Recipe
from components.federation.outcome import rows_by_client
from components.io import read_json, write_json
from components.models.policy import assign_round_robin
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
        for name, path in missing.items():
            write_json(path, _answer_set(run, recipe, policy, questions_by_set[name]))
    all_rows: list[AnsweredQuestion] = []
    for path in paths.values():
        all_rows += read_json(path)
    seed = derive(recipe.seed, "bootstrap", "questions")
    return answer_figures(all_rows, recipe.evaluation.bootstrap, seed)


def _answer_set(
    run: Run, recipe: Recipe, policy: EvaluatedPolicy, questions: Sequence[Question]
) -> list[dict[str, Any]]:
    """Answers to the questions of one set, with the answering client where clients have own policies."""
    from components.evaluation.answers import QuestionPrompts

    config = recipe.evaluation.questions
    assert config is not None
    name = questions[0].set
    prompts = QuestionPrompts(questions, config, recipe.policy)
    clients = assign_questions(policy.clients, len(questions), name)
    by_client = rows_by_client(clients)
    generations = {
        client: prompts.generations(own, derive(recipe.seed, "questions", name, client))
        for client, own in by_client.items()
    }
    answers = generate(run, recipe, policy, generations, "answer questions")
    rows: dict[int, dict[str, Any]] = {}
    for client, own in by_client.items():
        for n, row in zip(own, prompts.parse(own, *answers[client]), strict=True):
            rows[n] = dict(row) | ({"client_id": client} if client else {})
    return [rows[n] for n in range(len(questions))]


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
