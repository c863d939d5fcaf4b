"""A benchmark: one recipe, several methods (arms) and seeds, and the claims that are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import combinations
from typing import Annotated, Self

from pydantic import Field, model_validator

from components.config.name_checks import PlainName
from components.config.section import Section

Seed = Annotated[int, Field(ge=0, lt=2**31)]
MAX_ARM = 100
"""Bytes of an arm's name, which is part of the names of folders."""
WINS = "wins"
"""The figure of a claim on a contest: wins / (wins + losses), without ties."""
WINS_EQUAL_LENGTH = "wins_equal_length"
"""The figure of a claim on a contest: the length-controlled win rate, with a tie as half a win."""
OF_CONTESTS = (WINS, WINS_EQUAL_LENGTH)
"""Figures of contests."""
BASE_POLICY = "base policy"
REFERENCES = "the references"
OPPONENTS = (BASE_POLICY, REFERENCES)
"""Whom every arm's answers are compared with."""


class Claim(Section):
    """What a benchmark should show: a figure of an arm, or its difference to other arms' figures.

    The report says whether the numbers support it.
    """

    arm: str
    """The arm."""
    figure: str
    """Name of a figure; or, of the judge's contests with those of `against`: wins, the share of wins among
    wins and losses, without ties; wins_equal_length, the length-controlled win rate, with a tie as half a win
    (components/evaluation/length_control.py). A judge may prefer long answers, which the second one takes
    out."""
    against: list[str] = Field(default_factory=list)
    """Arms whose figure is subtracted, a claim each; of wins, those contested with (arms, 'base
    policy', 'the references'). Empty: the figure itself."""
    times: float = Field(1.0, gt=0)
    """Factor of the others' figures before they are subtracted: with 2 and at_least 0, the arm's is
    at least twice theirs."""
    at_least: float | None = None
    """Minimum of the figure or the difference."""
    above: float | None = None
    """Strict lower bound; one of the two is set."""

    @property
    def limit(self) -> float:
        """The minimum or the lower bound."""
        return next(limit for limit in (self.at_least, self.above) if limit is not None)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        claim = f"claim on {self.figure} of {self.arm}"
        if (self.at_least is None) == (self.above is None):
            raise ValueError(f"{claim}: set one of at_least and above")
        if self.times != 1 and (self.figure in OF_CONTESTS or not self.against):
            raise ValueError(
                f"{claim}: times applies to a figure's difference to others'; leave it out, or name them in"
                " 'against'"
            )
        if self.figure in OF_CONTESTS and not 0 < self.limit < 1:
            raise ValueError(f"{claim}: a share is between 0 and 1, so give a limit between them")
        if self.figure in OF_CONTESTS and not self.against:
            raise ValueError(f"{claim}: name in 'against' whom it wins against")
        return self


class Choice(Section):
    """One of several arms that differ in a setting, such as a learning rate."""

    among: Annotated[list[str], Field(min_length=2)]
    """The arms; of equal ones the first is chosen."""
    figure: str
    """Name of the figure whose mean over the seeds is the largest."""


class Benchmark(Section):
    """What is compared."""

    recipe: str = Field(min_length=1)
    """Recipe that all arms share."""
    seeds: Annotated[list[Seed], Field(min_length=1)]
    """Seeds; each arm runs with each."""
    settings: list[str] = Field(default_factory=list)
    """'key.path=value' settings of all arms on top of the recipe, such as what is measured."""
    arms: dict[str, list[str]] = Field(min_length=1)
    """Settings of each arm on top of these."""
    contests: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(default_factory=list)
    """Pairs of arms whose policies' answers the judge compares."""
    fronts: dict[PlainName, Annotated[list[str], Field(min_length=2)]] = Field(default_factory=dict)
    """By name, arms of one method with several objectives that differ in their preference. The
    report has the hypervolume of each front, over the smallest reward of each objective that any
    policy of its seed has (the base policy included), and the smallest of the objectives' rank
    correlations of preference and reward."""
    choices: dict[PlainName, Choice] = Field(default_factory=dict)
    """By name, arms of which the report names the best one, for benchmarks that choose settings.
    Their figures come from validation pairs (federation.accuracy_split) of seeds that no other
    benchmark reports."""
    claims: list[Claim] = Field(default_factory=list)
    """What the benchmark is expected to show; the report checks each. Arms may be fronts."""
    regressions: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """By name of a figure of which more is better, how far it may fall below its median in the last
    runs of the same arms and seeds before the report marks a regression, for benchmarks that are
    repeated every night."""

    def fingerprint(self) -> str:
        """Hash of what is run; benchmarks with equal ones may be compared."""
        content = self.model_dump_json(include={"recipe", "seeds", "settings", "arms"})
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds}: name each only once")
        for name in self.arms:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"arm '{name}': use letters, digits, '-' and '_', because it names a folder")
            if len(name.encode()) > MAX_ARM:
                raise ValueError(
                    f"arm '{name[:40]} ...': use a shorter name (at most {MAX_ARM} bytes), because it names a"
                    " folder"
                )
        for one, other in combinations(self.arms, 2):
            if one.casefold() == other.casefold():
                raise ValueError(
                    f"arms '{one}' and '{other}' differ only in case, but name folders: rename one"
                )
        owners = {"the benchmark": self.settings} | {f"arm '{name}'": own for name, own in self.arms.items()}
        for owner, settings in owners.items():
            if any(setting.startswith("seed=") for setting in settings):
                raise ValueError(f"{owner} sets the seed: leave it out, the seeds are set by 'seeds'")
        return self

    @model_validator(mode="after")
    def _check_contests(self) -> Self:
        for ours, theirs in self.contests:
            if ours == theirs:
                raise ValueError(f"contest [{ours}, {theirs}]: an arm cannot be compared with itself")
            self._require_arms(f"contest [{ours}, {theirs}]", (ours, theirs))
        for name, members in self.fronts.items():
            if name in self.arms:
                raise ValueError(f"front '{name}' has the name of an arm: rename it")
            self._require_arms(f"front '{name}'", members)
        for name, choice in self.choices.items():
            self._require_arms(f"choice '{name}'", choice.among)
        return self

    def _require_arms(self, owner: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.arms:
                raise ValueError(f"{owner}: there is no arm '{name}' (there are: {', '.join(self.arms)})")

    @model_validator(mode="after")
    def _check_claims(self) -> Self:
        for claim in self.claims:
            self._check_claim(claim)
        return self

    def _check_claim(self, claim: Claim) -> None:
        key = f"claim on {claim.figure} of {claim.arm}"
        wins = claim.figure in OF_CONTESTS
        others = OPPONENTS if wins else self.fronts
        for name in (claim.arm, *claim.against):
            names = [*self.arms] if wins and name == claim.arm else [*self.arms, *others]
            if name not in names:
                raise ValueError(f"{key}: there is no '{name}' (there are: {', '.join(names)})")
        for name in claim.against:
            if name == claim.arm:
                raise ValueError(f"{key}: an arm cannot be compared with itself")
            if wins and name in self.arms and [claim.arm, name] not in self.contests:
                raise ValueError(
                    f"{key} against {name}: there is no such contest, add [{claim.arm}, {name}] to 'contests'"
                )
