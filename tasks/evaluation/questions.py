"""Answers of the policies to multiple-choice questions (DRIFT section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger

from components.alignment.policies import PolicySet
from components.config import Recipe
from components.config.evaluation import QuestionAnswersConfig
from components.io import read_json, write_json
from components.progress import Work, progress
from components.results import QuestionResult
from components.seeding import derive
from tasks.devices import POOL
from tasks.evaluation.answers import EvaluatedPolicy
from tasks.runs import Run
from tasks.uncached import task

if TYPE_CHECKING:
    from components.data.questions import Question
    from components.evaluation.answers import AnsweredQuestion


@task(name="answer questions: {policy.name}")
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
        with POOL.borrow(recipe.runtime) as device:
            policies = policy.open(run, recipe, device)
            for name, path in missing.items():
                rows = _answer_set(policy.name, policies, questions_by_set[name], config, recipe.seed)
                write_json(path, rows)
    all_rows: list[AnsweredQuestion] = []
    for path in paths.values():
        all_rows += read_json(path)
    seed = derive(recipe.seed, "bootstrap", "questions")
    return answer_figures(all_rows, recipe.evaluation.bootstrap, seed)


def _answer_set(
    policy_name: str,
    policies: PolicySet,
    questions: Sequence[Question],
    config: QuestionAnswersConfig,
    run_seed: int,
) -> list[dict[str, Any]]:
    """Answers to the questions of one set, with the answering client where clients have own policies."""
    from components.alignment.thoughts.growth import truncate_context
    from components.evaluation.answers import generate_answers

    name = questions[0].set
    if config.max_question_tokens is not None:
        questions = [
            truncate_context(question, policies.tokenizer, config.max_question_tokens)
            for question in questions
        ]
    clients = policies.assign_questions(len(questions), name)
    log = get_run_logger()
    rows: dict[int, dict[str, Any]] = {}
    for client in sorted(set(clients)):
        own = [n for n, assigned in enumerate(clients) if assigned == client]
        seed = derive(run_seed, "questions", name, client)
        answers = generate_answers(policies.select(client), [questions[n] for n in own], config, seed)
        for n, row in zip(own, answers, strict=True):
            rows[n] = dict(row) | ({"client_id": client} if client else {})
        work = Work(f"questions of {name}, {policy_name} policy", len(rows), len(questions))
        line = "%s policy: %d of %d questions of %s"
        log.info(line, policy_name, work.done, work.total, name, extra=progress(work))
    return [rows[n] for n in range(len(questions))]
