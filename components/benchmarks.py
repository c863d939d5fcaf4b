"""A benchmark: one recipe, several methods (arms) and seeds. Read from flows/benchmarks/ and checked as strictly as recipes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, model_validator

from components.config import Recipe, RecipeError, Section, check_section, unknown_name
from components.recipes import RECIPES, load_recipe

BENCHMARKS = RECIPES.parent / "benchmarks"

FIGURES = {
    "common": "common taste", "common_assigned": "common taste, own adapter", "own": "own taste", "own_assigned": "own taste, own adapter", "worst": "worst client", "adjusted_rand_index": "adjusted Rand index",
    "accuracy": "pair accuracy", "margin": "reward margin", "reward": "reward", "best_reward": "best reward", "neighbours": "own-group neighbours", "neighbours_chance": "by chance",
    "summed": "accuracy by log-likelihood", "summed_worst": "by log-likelihood, worst client", "per_token": "accuracy by log-likelihood a token", "per_token_worst": "by log-likelihood a token, worst client",
    "explicit": "accuracy by the reward head", "mean_reward": "mean reward", "sampled_kl": "KL of sampled answers (nats)", "lambda_drift": "distance of clients' weights", "mean_lambda_drift": "distance of their rounds' means",
    "update_drift": "distance of clients' updates", "hypervolume": "hypervolume", "rank": "rank correlation of preference and reward", "sent": "MB sent", "kept": "MB kept by a client", "answer_accuracy": "answers to questions, accuracy", "success": "answers to questions, success",
    "rougeLsum": "ROUGE-L", "characters": "characters an answer", "kl": "KL (nats)", "implicit_reward": "implicit reward", "client_steps": "client steps", "train_seconds": "training (s)",
    "aggregation_seconds": "aggregation (s a round)"}
"""What is averaged over seeds, by the name in the table. Accuracies are on held-out pairs, of the selectors' majority or of the trained policy's implicit reward; "own adapter": each
client's pairs by the adapter that it uses (of its group, or its own; where all use the same, that one). Pair accuracy is the clients' mean. Reward and reward
margin are implicit (beta log pi / pi_ref of the chosen completion, and its difference to the rejected one's), the clients' mean on held-out pairs, after the last
round; best reward is the greatest of the rounds that were measured. Own-group neighbours are the mean over rounds. Wall time: training is the sum over clients and
rounds, aggregation what the server takes for a round, the mean over rounds (DRIFT table 6). Accuracy by log-likelihood is FedPDPO's preference accuracy (its section 5),
summed over a completion's tokens, or their mean; the clients' mean, and the worst of them. MB sent are of all clients over all rounds; kept is what never leaves a client, the mean over clients
in the last round that each took part in. Mean reward is over the objectives, of sampled answers to held-out prompts after the last round; besides, each objective's own is a figure, `reward:` and its name. Distances of
clients are means over pairs of them and over rounds (FIRM). Hypervolume and rank correlation are of a front, a row of its own: see Benchmark.fronts."""

OF_OBJECTIVE = "reward:"
"""What the figure of a single objective begins with."""


def figure_label(name: str) -> str:
    """A figure's name in a table."""
    return f"reward, {name.removeprefix(OF_OBJECTIVE)}" if name.startswith(OF_OBJECTIVE) else FIGURES[name]


WINS = "wins"
"""The figure of a claim on a contest: wins / (wins + losses), ties apart."""

RAW, REFERENCES = "raw policy", "the references"
"""Whom every arm's answers are compared with."""


class Claim(Section):
    """What a benchmark is expected to show: a figure of an arm, or its difference to other arms'. The report says whether it does."""

    arm: str = Field(description="Whose figure.")
    figure: str = Field(description="A key of FIGURES; or wins: in the judge's contests with those of `against`, the share of wins among wins and losses, ties apart.")
    against: list[str] = Field(
        default_factory=list, description="Arms whose figure is subtracted, a claim each; of wins those contested with (arms, 'raw policy', 'the references'). Empty: the figure itself.")
    times: float = Field(1.0, gt=0, description="By which the others' figures are multiplied before they are subtracted: with 2 and at_least 0, ours is at least twice theirs.")
    at_least: float | None = Field(None, description="What the figure or the difference is at least.")
    above: float | None = Field(None, description="What it is greater than; one of the two is set.")

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.figure not in (*FIGURES, WINS) and not self.figure.startswith(OF_OBJECTIVE):
            raise ValueError(unknown_name("figure", self.figure, (*FIGURES, WINS)))
        if (self.at_least is None) == (self.above is None):
            raise ValueError(f"claim on {self.figure} of {self.arm}: set one of at_least and above")
        if self.times != 1 and (self.figure == WINS or not self.against):
            raise ValueError(f"claim on {self.figure} of {self.arm}: times is of a figure's difference to others'; leave it out, or name them in 'against'")
        if self.figure == WINS and not self.against:
            raise ValueError(f"claim on wins of {self.arm}: name in 'against' whom it wins against")
        return self


class Benchmark(Section):
    """What is compared."""

    recipe: str = Field(min_length=1, description="Recipe that all arms share.")
    seeds: Annotated[list[int], Field(min_length=1)] = Field(description="Seeds; each arm is run with each.")
    settings: list[str] = Field(default_factory=list, description="'key.path=value' settings of all arms on top of the recipe, such as how much is measured.")
    arms: dict[str, list[str]] = Field(min_length=1, description="Settings of each arm on top of these.")
    contests: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(
        default_factory=list, description="Pairs of arms whose policies' answers are compared by the judge.")
    fronts: dict[str, Annotated[list[str], Field(min_length=2)]] = Field(
        default_factory=dict, description="By name, arms of one method with several objectives that differ in their preference. The report has the hypervolume of each front, over the worst reward of each objective that any of its seed's "
        "policies has (the raw one's included), and the least of the objectives' rank correlations of preference and reward.")
    claims: list[Claim] = Field(default_factory=list, description="What the benchmark is expected to show; the report checks each. Its arms may be fronts.")

    @model_validator(mode="after")
    def _consistent(self) -> Benchmark:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds}: each is named once")
        for name in self.arms:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"arm '{name}': use letters, digits, '-' and '_', because it names a folder")
        for whose, settings in {"the benchmark": self.settings, **{f"arm '{name}'": settings for name, settings in self.arms.items()}}.items():
            if any(setting.startswith("seed=") for setting in settings):
                raise ValueError(f"{whose} sets the seed: leave it out, the seeds are set by 'seeds'")
        for ours, theirs in self.contests:
            if ours == theirs:
                raise ValueError(f"contest [{ours}, {theirs}]: an arm cannot be compared with itself")
            for name in (ours, theirs):
                if name not in self.arms:
                    raise ValueError(f"contest [{ours}, {theirs}]: there is no arm '{name}' (there are: {', '.join(self.arms)})")
        for name, arms in self.fronts.items():
            if name in self.arms:
                raise ValueError(f"front '{name}' has the name of an arm: give it another")
            for arm in arms:
                if arm not in self.arms:
                    raise ValueError(f"front '{name}': there is no arm '{arm}' (there are: {', '.join(self.arms)})")
        for claim in self.claims:
            measured = [*self.arms, *self.fronts]
            others = [*self.arms, RAW, REFERENCES] if claim.figure == WINS else measured
            for name, known in ((claim.arm, list(self.arms) if claim.figure == WINS else measured), *((name, others) for name in claim.against)):
                if name not in known:
                    raise ValueError(f"claim on {claim.figure} of {claim.arm}: there is no '{name}' (there are: {', '.join(known)})")
            for name in claim.against:
                if name == claim.arm:
                    raise ValueError(f"claim on {claim.figure} of {claim.arm}: an arm cannot be compared with itself")
                if claim.figure == WINS and name in self.arms and [claim.arm, name] not in self.contests:
                    raise ValueError(f"claim on wins of {claim.arm} against {name}: there is no such contest, add [{claim.arm}, {name}] to 'contests'")
        return self

    def recipe_of(self, arm: str, seed: int) -> Recipe:
        """The recipe of one arm and seed.

        Raises:
            RecipeError: see load_recipe.
        """
        return load_recipe(self.recipe, [*self.settings, *self.arms[arm], f"seed={seed}"])


def benchmark_names() -> list[str]:
    """The benchmarks under flows/benchmarks."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.yaml"))


def load_benchmark(name_or_path: str, overrides: Sequence[str] = ()) -> Benchmark:
    """Read a benchmark by name or path, and check the recipe of each of its arms and seeds.

    Args:
        name_or_path: of a YAML file.
        overrides: 'key.path=value' settings on top of the recipe and of the benchmark's own settings for all arms, such as where the data are; an arm's own win.

    Raises:
        RecipeError: there is none, or it or one of its recipes cannot be run.
    """
    benchmark = read_benchmark(name_or_path)
    if overrides:
        arms = {name: [*overrides, *settings] for name, settings in benchmark.arms.items()}
        benchmark = check_section(Benchmark, benchmark.model_dump(mode="json") | {"arms": arms}, name_or_path)
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            try:
                benchmark.recipe_of(arm, seed)
            except RecipeError as error:
                raise RecipeError(f"{name_or_path}: {'settings' if _fails_alike(benchmark, error) else f'arm {arm}'}: {error}") from None
    _check_objectives(benchmark, name_or_path)
    return benchmark


def _fails_alike(benchmark: Benchmark, error: RecipeError) -> bool:
    """Whether what all arms share is refused for the same reason as an arm."""
    try:
        load_recipe(benchmark.recipe, benchmark.settings)
    except RecipeError as alone:
        return bool(benchmark.settings) and str(alone) == str(error)
    return False


def _check_objectives(benchmark: Benchmark, where: str) -> None:
    """Refuse fronts whose arms have different objectives, and claims on the reward of an objective that an arm does not have."""
    objectives = {arm: set(benchmark.recipe_of(arm, benchmark.seeds[0]).federation.options.get("objectives", {})) for arm in benchmark.arms}
    for name, arms in benchmark.fronts.items():
        if any(objectives[arm] != objectives[arms[0]] or not objectives[arm] for arm in arms):
            raise RecipeError(f"{where}: front '{name}' is of arms that do not have the same objectives (federation.options.objectives).")
    for claim in benchmark.claims:
        for arm in (claim.arm, *claim.against):
            if claim.figure.startswith(OF_OBJECTIVE) and claim.figure.removeprefix(OF_OBJECTIVE) not in objectives.get(arm, ()):
                raise RecipeError(f"{where}: claim on {claim.figure} of {claim.arm}: '{arm}' has no such objective (it has: {', '.join(sorted(objectives.get(arm, ()))) or 'none'}).")


def read_benchmark(name_or_path: str) -> Benchmark:
    """Read a benchmark, without its recipes: those of one that was started lie in its folder already.

    Raises:
        RecipeError: as load_benchmark.
    """
    path = next((p for p in (BENCHMARKS / f"{name_or_path}.yaml", Path(name_or_path)) if p.is_file()), None)
    if path is None:
        raise RecipeError(f"{unknown_name('benchmark', name_or_path, benchmark_names())} A path to a YAML file works too.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: this is not valid YAML ({getattr(error, 'problem', None) or error}).") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a benchmark is a mapping with the keys {', '.join(Benchmark.model_fields)}.")
    if isinstance(tree.get("arms"), dict):  # YAML reads a bare number as one
        tree["arms"] = {str(name): settings for name, settings in tree["arms"].items()}
    return check_section(Benchmark, tree, str(path))
