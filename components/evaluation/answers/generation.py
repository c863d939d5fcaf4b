"""Greedy and sampled answers of a policy to questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from components.config.evaluation import QuestionAnswersConfig
from components.data.questions import Question, render
from components.data.templates import load as load_template
from components.evaluation.answers.parsing import parse_answer
from components.models.generation import Completion
from components.models.policy import Policy


class ParsedAnswer(TypedDict):
    """An answer and the option that it names.

    Attributes:
        text: the complete answer.
        finished: whether it ended by itself, and not at the length limit.
        answer: label of the option; None if the answer names none, or more than one.
    """

    text: str
    finished: bool
    answer: str | None


class AnsweredQuestion(ParsedAnswer):
    """A question with its greedy answer and its sampled answers.

    Attributes:
        set, id: of the question.
        question: the question as it was shown.
        options: texts by label.
        key: label of the right option.
        cut: whether the prompt was truncated.
        samples: sampled answers; their number is the same for all questions.
    """

    set: str
    id: str
    question: str
    options: dict[str, str]
    key: str
    cut: bool
    samples: list[ParsedAnswer]


def generate_answers(
    policy: Policy, questions: Sequence[Question], config: QuestionAnswersConfig, seed: int
) -> list[AnsweredQuestion]:
    """Let a policy answer questions greedily and in samples.

    The prompt is the question in its template, as in the growth of trees of thoughts.

    Args:
        policy: answers the questions.
        questions: questions as they are shown.
        config: template, temperature, number of samples, and longest answer (tokens).
        seed: determines the samples, together with the questions.

    Returns:
        a row for each question.
    """
    template = load_template(config.template, "answer")
    prompts = [template.render(question=render(question)) for question in questions]
    greedy = policy.generate(prompts, seed, max_new_tokens=config.max_new_tokens)
    sampled = policy.generate(prompts, seed, config.temperature, config.samples, config.max_new_tokens)
    return [
        _answered(question, policy.is_truncated(prompt), answer, samples)
        for question, prompt, (answer,), samples in zip(questions, prompts, greedy, sampled, strict=True)
    ]


def _answered(
    question: Question, is_truncated: bool, answer: Completion, samples: Sequence[Completion]
) -> AnsweredQuestion:
    parsed = _parse(answer, question)
    return AnsweredQuestion(
        set=question.set,
        id=question.id,
        question=render(question),
        options=dict(question.options),
        key=question.answer,
        cut=is_truncated,
        text=parsed["text"],
        finished=parsed["finished"],
        answer=parsed["answer"],
        samples=[_parse(sample, question) for sample in samples],
    )


def _parse(completion: Completion, question: Question) -> ParsedAnswer:
    return ParsedAnswer(
        text=completion.text,
        finished=completion.finished,
        answer=parse_answer(completion.text, question.options),
    )
