"""Comparison of measured ratios with those of earlier runs under the same conditions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from components.config import UserError
from perf.harness import Ratios

MIN_EARLIER = 3
"""Earlier runs without which a ratio is not judged."""


@dataclass(frozen=True)
class Conditions:
    """What ratios depend on besides the code; only runs under equal conditions are compared.

    Attributes:
        recipe: name or path of the recipe.
        processor: name of the processor.
        cores: cores that the process may use.
        device: name of the GPU, or "cpu".
    """

    recipe: str
    processor: str
    cores: int
    device: str

    def params(self) -> dict[str, str]:
        """The conditions as parameters of an MLflow run."""
        return {name: str(value) for name, value in asdict(self).items()}

    def describes(self, params: Mapping[str, str]) -> bool:
        """Whether an MLflow run with these parameters was measured under these conditions."""
        return self.params().items() <= params.items()


@dataclass(frozen=True)
class Measured:
    """The ratios of a logged run.

    Attributes:
        params: parameters of the MLflow run.
        ratios: its metrics.
    """

    params: Mapping[str, str]
    ratios: Ratios


@dataclass(frozen=True)
class Rule:
    """When a ratio is a regression.

    Attributes:
        tolerance: fraction by which a ratio may be below the median of earlier runs.
        earlier_runs: number of last runs that the median is of.

    Raises:
        UserError: a value outside its range.
    """

    tolerance: float = 0.15
    earlier_runs: int = 7

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance is {self.tolerance:g}, expected a fraction between 0 and 1.")
        if self.earlier_runs < MIN_EARLIER:
            raise UserError(f"earlier_runs is {self.earlier_runs}, expected at least {MIN_EARLIER}.")


@dataclass(frozen=True)
class Verdict:
    """A ratio beside those of earlier runs.

    Attributes:
        name: of the ratio.
        now: its value.
        before: the median of earlier runs; None where there are fewer than MIN_EARLIER.
        runs: number of earlier runs that have the ratio, up to the rule's.
        is_regression: whether it is lower than the rule allows.
    """

    name: str
    now: float
    before: float | None
    runs: int
    is_regression: bool

    def row(self) -> dict[str, str]:
        """The row of the table."""
        before = change = "-"
        verdict = f"not judged: {self.runs} earlier runs of at least {MIN_EARLIER}"
        if self.before is not None:
            before = f"{self.before:.3f}"
            change = f"{self.now / self.before - 1:+.1%}"
            verdict = "regression" if self.is_regression else "no regression"
        return {
            "ratio": self.name,
            "now": f"{self.now:.3f}",
            "median before": before,
            "change": change,
            "verdict": verdict,
        }

    def sentence(self) -> str:
        """What is known of the ratio."""
        text = f"{self.name} is {self.now:.3f}"
        if self.before is None:
            return f"{text}, not judged with {self.runs} earlier runs"
        return f"{text}, the median of {self.runs} earlier runs is {self.before:.3f}"


def judge(ratios: Ratios, conditions: Conditions, earlier: Sequence[Measured], rule: Rule) -> list[Verdict]:
    """Compare each ratio with its median in the last runs under the same conditions that have it.

    Args:
        ratios: of this run.
        conditions: of this run.
        earlier: earlier runs, the newest first.
        rule: when a ratio is a regression.
    """
    comparable = [run.ratios for run in earlier if conditions.describes(run.params)]
    verdicts = []
    for name, now in ratios.items():
        values = [run[name] for run in comparable if name in run][: rule.earlier_runs]
        before = statistics.median(values) if len(values) >= MIN_EARLIER else None
        is_regression = before is not None and now < (1 - rule.tolerance) * before
        verdicts.append(Verdict(name, now, before, len(values), is_regression))
    return verdicts


def summarize(verdicts: Sequence[Verdict], rule: Rule) -> str:
    """One sentence on all ratios."""
    regressions = [verdict for verdict in verdicts if verdict.is_regression]
    if regressions:
        details = "; ".join(verdict.sentence() for verdict in regressions)
        return (
            f"{len(regressions)} of {len(verdicts)} ratios fell by more than {rule.tolerance:.0%}: {details}."
        )
    judged = sum(verdict.before is not None for verdict in verdicts)
    if judged == 0:
        return (
            f"{len(verdicts)} ratios were measured and none was judged, because fewer than {MIN_EARLIER}"
            " earlier runs were measured under the same conditions."
        )
    return f"No regression: {judged} of {len(verdicts)} ratios were judged."


def regression_tag(verdicts: Sequence[Verdict]) -> str:
    """The tag `regressions` of the MLflow run: names of ratios, "none" or "not judged"."""
    names = ", ".join(verdict.name for verdict in verdicts if verdict.is_regression)
    if names:
        return names
    return "none" if any(verdict.before is not None for verdict in verdicts) else "not judged"
