"""Answers to multiple-choice questions: the questions, the answers, their parsing, and the figures.

The figures are those of DRIFT section 7.1:

    accuracy        share of questions whose greedy answer is right
    success rate    share of questions for which at least one of N sampled answers is right

An answer that cannot be parsed is wrong. The paper compares the greedy answer with the key and the
N samples with the explanation of the question set, without stating how; here both are compared with
the key. Since a guess is sometimes right, and one of N guesses often, the expected figures of
guessing are reported beside them. Questions that trees of thoughts were grown for are refused,
whether or not the policy was trained on their pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from components.config import DataConfig, PolicyConfig, QuestionsConfig
from components.config.evaluation import QuestionAnswersConfig
from components.data.questions import Question, load_section, pooled, render, truncate_context
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.trees import trees_at
from components.evaluation.answer_parsing import parse_answer
from components.evaluation.winrate import bootstrap_interval
from components.federation.protocol import Generation
from components.models.policy import PolicyTexts
from components.models.samples import Completion
from components.results import QuestionFigures, QuestionResult
from components.seeding import derive


def tree_questions(data: DataConfig, grown: Path | None) -> dict[str, str]:
    """The questions that a run's trees of thoughts were grown for, as they were shown, by name (set/id).

    The trees were grown before the run (data.path or data.trees), or by the run itself: then `grown` is their
    folder.
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
    """Load the questions that policies are evaluated on, by set; the seed draws the sample of a section.

    Refused (DataError) are parts that hold no question or share one, and questions that trees were grown for
    (`tree_questions`): those with an equal name, with an equal id in another set of the same pool (such as
    csqa and cose), or with an equal text.
    """
    questions_by_set: dict[str, list[Question]] = {}
    for n, section in enumerate(sections):
        questions, _ = load_section(section, seed, f"evaluation.questions.questions[{n}]")
        if not questions:
            raise DataError(
                f"evaluation.questions: part {section.part} of set {section.set} holds no question: choose a"
                " larger part"
            )
        _check_without_trees(questions, section.set, with_trees)
        questions_by_set.setdefault(section.set, []).extend(questions)
    for name, questions in questions_by_set.items():
        if len({question.id for question in questions}) < len(questions):
            raise DataError(
                f"evaluation.questions: the parts of set {name} share questions: give each its own, such as"
                " part: [0, 2] and [1, 2]"
            )
    return questions_by_set


def _check_without_trees(
    questions: Sequence[Question], question_set: str, with_trees: Mapping[str, str]
) -> None:
    by_text = {text: name for name, text in with_trees.items()}
    by_pool = {pooled(name): name for name in with_trees}
    trees: dict[str, str] = {}
    for question in questions:
        name = f"{question.set}/{question.id}"
        tree = name if name in with_trees else by_pool.get(pooled(name)) or by_text.get(render(question))
        if tree is not None:
            trees[question.id] = tree
    if trees:
        question_id, tree = next(iter(trees.items()))
        tree_set = tree.partition("/")[0]
        remedy = (
            f"give each of the sets {tree_set} and {question_set}, which share questions, a part of its own,"
            " such as part: [0, 2] and [1, 2]"
        )
        if tree_set == question_set:
            remedy = "another part of this one, such as part: [1, 2] if the trees are of [0, 2]"
        raise DataError(
            f"evaluation.questions: trees of thoughts were grown for {len(trees)} of the {len(questions)}"
            f" questions of set {question_set}, e.g. {question_set}/{question_id} (tree {tree}), so that"
            f" answers to them would not measure new questions: use another file, or {remedy}"
        )


class ParsedAnswer(TypedDict):
    """An answer and the option that it names."""

    text: str
    finished: bool  # whether it ended by itself, and not at the length limit
    answer: str | None  # label of the option; None if the answer names none, or more than one


class AnsweredQuestion(ParsedAnswer):
    """A question with its greedy answer and its sampled answers."""

    set: str
    id: str
    question: str  # as it was shown
    options: dict[str, str]  # texts by label
    key: str  # label of the right option
    cut: bool  # whether the prompt was truncated
    samples: list[ParsedAnswer]  # their number is the same for all questions


class QuestionPrompts:
    """Questions as a policy is shown them: each in its template, as in the growth of trees of thoughts."""

    def __init__(
        self, questions: Sequence[Question], config: QuestionAnswersConfig, policy: PolicyConfig
    ) -> None:
        """Render the questions, whose contexts are truncated to config.max_question_tokens."""
        self._texts = PolicyTexts(policy)
        limit = config.max_question_tokens
        self.questions = [
            question if limit is None else truncate_context(question, self._texts.tokenizer, limit)
            for question in questions
        ]
        template = load_template(config.template, "answer")
        self.prompts = [template.render(question=render(question)) for question in self.questions]
        self._config = config

    def generations(self, rows: Sequence[int], seed: int) -> list[Generation]:
        """The greedy and the sampled answers to some questions; `seed` determines the samples."""
        config = self._config
        prompts = tuple(self.prompts[n] for n in rows)
        greedy = Generation(prompts=prompts, seed=seed, max_new_tokens=config.max_new_tokens)
        sampled = {"temperature": config.temperature, "count": config.samples}
        return [greedy, greedy.model_copy(update=sampled)]

    def parse(
        self,
        rows: Sequence[int],
        greedy: Sequence[Sequence[Completion]],
        samples: Sequence[Sequence[Completion]],
    ) -> list[AnsweredQuestion]:
        """A row for each question, from the completions of its generations."""
        answered: list[AnsweredQuestion] = []
        for n, (answer,), sampled in zip(rows, greedy, samples, strict=True):
            question = self.questions[n]
            row = AnsweredQuestion(
                set=question.set,
                id=question.id,
                question=render(question),
                options=dict(question.options),
                key=question.answer,
                cut=self._texts.surplus(self.prompts[n]) > 0,
                **_parse(answer, question),
                samples=[_parse(sample, question) for sample in sampled],
            )
            answered.append(row)
        return answered


def _parse(completion: Completion, question: Question) -> ParsedAnswer:
    return ParsedAnswer(
        text=completion.text,
        finished=completion.finished,
        answer=parse_answer(completion.text, question.options),
    )


def answer_figures(rows: Sequence[AnsweredQuestion], resamples: int, seed: int) -> QuestionResult:
    """The accuracy and the success rate of a policy by at least one answered question."""
    sets = {
        name: _figures([row for row in rows if row["set"] == name], resamples, derive(seed, name))
        for name in sorted({row["set"] for row in rows})
    }
    every = _figures(rows, resamples, derive(seed, ""))
    # The unweighted mean over sets; they all have samples, or none has.
    means = {
        name: float(np.mean([getattr(figures, name) for figures in sets.values()]))
        for name in ("accuracy", "chance", "unparsable_share", "success", "success_chance")
        if getattr(every, name) is not None
    }
    samples = len(rows[0]["samples"])
    return QuestionResult(samples=samples, sets=sets, all=every, mean=QuestionFigures(**means))


def _figures(rows: Sequence[AnsweredQuestion], resamples: int, seed: int) -> QuestionFigures:
    right = [row["answer"] == row["key"] for row in rows]
    unparsable = sum(row["answer"] is None for row in rows)
    chance = np.array([1 / len(row["options"]) for row in rows])
    low, high = bootstrap_interval(right, resamples, seed)
    success: dict[str, float] = {}
    if samples := len(rows[0]["samples"]):
        succeeded = [any(sample["answer"] == row["key"] for sample in row["samples"]) for row in rows]
        success_low, success_high = bootstrap_interval(succeeded, resamples, derive(seed, "success"))
        success = {
            "succeeded": sum(succeeded),
            "success": sum(succeeded) / len(rows),
            "success_chance": float(np.mean(1 - (1 - chance) ** samples)),
            "success_low": success_low,
            "success_high": success_high,
        }
    return QuestionFigures(
        accuracy=sum(right) / len(rows),
        chance=float(chance.mean()),
        unparsable_share=unparsable / len(rows),
        low=low,
        high=high,
        questions=len(rows),
        right=sum(right),
        unparsable=unparsable,
        cut=sum(row["cut"] for row in rows),
        **success,
    )
