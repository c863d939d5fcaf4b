"""Greedy and sampled answers of a policy to questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from components.config import PolicyConfig
from components.config.evaluation import QuestionAnswersConfig
from components.data.questions import Question, render, truncate_context
from components.data.templates import load as load_template
from components.evaluation.answers.answer_parsing import parse_answer
from components.federation.protocol import Generation
from components.models.generation import Completion
from components.models.policy import PolicyTexts


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
        return [
            _answered(self.questions[n], self._texts.is_truncated(self.prompts[n]), answer, sampled)
            for n, (answer,), sampled in zip(rows, greedy, samples, strict=True)
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
