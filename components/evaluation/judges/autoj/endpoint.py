"""An OpenAI-compatible endpoint that writes judgments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from components.data.templates import Template
from components.data.templates import load as load_template
from components.evaluation.judges.autoj.judge_prompts import prompt_fields
from components.evaluation.judges.judge import JudgeError
from components.models.chat import ChatEndpoint
from components.models.selector import Comparison

if TYPE_CHECKING:
    from components.evaluation.judges.autoj.autoj_judge import AutoJSection


class Endpoint:
    """An OpenAI-compatible chat endpoint that writes judgments; the instruction is the user's turn.

    Attributes:
        shortened: always 0, since inputs are not truncated; the server refuses those that are too
            long.
    """

    shortened = 0

    def __init__(self, options: AutoJSection, policy: Template | None = None) -> None:
        """Read the key.

        Raises:
            JudgeError: the key's variable is not set.
        """
        self.options = options
        self.policy = policy
        self.template = load_template(options.prompt_file, "pairwise")
        self._chat = ChatEndpoint(
            options, options.model, options.max_new_tokens, "the judge's endpoint", JudgeError
        )

    def write(self, comparisons: Sequence[Comparison]) -> list[str]:
        """Write a judgment on each comparison, in their order; the first failure cancels the rest.

        Raises:
            JudgeError: a request was refused, or all its retries failed.
        """
        instructions = [
            self.template.render(**prompt_fields(comparison, self.policy)) for comparison in comparisons
        ]
        return [reply.text for reply in self._chat.generate(instructions)]
