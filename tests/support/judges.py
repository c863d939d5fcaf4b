"""Judges of tests, whose verdicts follow from the texts, and how a recipe gets one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from components.config import Recipe
from components.evaluation.judges.judge import Judge, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.models.selector import Comparison


class LengthJudge(Judge):
    """Prefers the longer response."""

    def __init__(self, description: str = "the longer one") -> None:
        super().__init__(description)

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The longer response of each pair; the second of equally long ones."""
        return [
            Verdict.FIRST if len(pair.first) > len(pair.second) else Verdict.SECOND for pair in comparisons
        ]


class FirstJudge(LengthJudge):
    """Prefers the response that is shown first."""

    def __init__(self) -> None:
        super().__init__("the one that is shown first")

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The first response of each pair."""
        return [Verdict.FIRST] * len(comparisons)


class AlphabetJudge(LengthJudge):
    """Prefers the response that is first in the alphabet, and may write why.

    Args:
        writes: whether it writes a text for each comparison, and has a figure.
    """

    def __init__(self, writes: bool) -> None:
        super().__init__("the first in the alphabet")
        self.writes = writes
        if writes:
            self.figures["judge_shortened"] = 0

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The response of each pair that is first in the alphabet."""
        if self.writes:
            self.texts += [{"prompt": pair.prompt, "text": "because"} for pair in comparisons]
        return [Verdict.FIRST if pair.first < pair.second else Verdict.SECOND for pair in comparisons]


class LengthSection(JudgeSection):
    """Section of the LengthJudge."""

    kind: Literal["length"] = "length"

    def build(self, resources: JudgeResources) -> LengthJudge:
        """The judge."""
        return LengthJudge()


class FirstSection(JudgeSection):
    """Section of the FirstJudge."""

    kind: Literal["first"] = "first"

    def build(self, resources: JudgeResources) -> FirstJudge:
        """The judge."""
        return FirstJudge()


class AlphabetSection(JudgeSection):
    """Section of the AlphabetJudge."""

    kind: Literal["alphabet"] = "alphabet"
    writes: bool = False

    def build(self, resources: JudgeResources) -> AlphabetJudge:
        """The judge."""
        return AlphabetJudge(self.writes)


def with_judge(recipe: Recipe, judge: JudgeSection) -> Recipe:
    """The recipe with another judge."""
    evaluation = recipe.evaluation.model_copy(update={"judge": judge})
    return recipe.model_copy(update={"evaluation": evaluation})
