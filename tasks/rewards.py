"""Tasks of reward models before the first round: scoring of pairs, training, and a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger

from components.config import Recipe, RewardConfig
from components.data.records import read_rows
from components.federation.clients.context import rewards_folder
from components.federation.protocol import method_of
from components.io import file_hash, read_json, write_json
from components.models.rewards.base import (
    Progress,
    RewardResources,
    check_scores,
    response_reward,
    reward_section,
)
from tasks.devices import POOL
from tasks.runs import Run, judges_root
from tasks.uncached import task


@dataclass(frozen=True)
class RewardPlace:
    """The folders of a run's rewards.

    Attributes:
        prepared: the prepared data.
        folder: scores, and records of trained rewards.
        judges: trained judges and rewards of all runs.
    """

    prepared: Path
    folder: Path
    judges: Path

    @classmethod
    def of_run(cls, run: Run) -> RewardPlace:
        """The place of a run's rewards."""
        return cls(run.prepared, rewards_folder(run.federation), judges_root())

    def resources(self, recipe: Recipe, device: str) -> RewardResources:
        """The data, caches and device for the preparation of a reward."""
        return RewardResources(self.prepared, self.judges, recipe.seed, device, recipe.evaluation.judge)


def prepare_rewards(recipe: Recipe, place: RewardPlace) -> None:
    """Prepare the recipe's rewards before any client trains.

    Rewards of methods that score completions are made ready to do so; others score the clients'
    pairs.
    """
    log = get_run_logger()
    scores_completions = method_of(recipe.federation).scores_completions
    for name in recipe.rewards:
        if scores_completions:
            figures = prepare_reward(recipe, name, place)
        else:
            figures = score_pairs(recipe, name, place)
        log.info("reward %s: %s", name, format_figures(figures))


def rewards_fingerprint(rewards: Mapping[str, RewardConfig], prepared: Path) -> str:
    """Hash of the pairs that rewards are trained on, and versions of that training.

    It is empty for recipes without trained rewards.
    """
    parts = []
    if any(reward.uses_judge_pairs for reward in rewards.values()):
        parts.append(file_hash(prepared / "judge.parquet")[:16])
    parts += sorted(
        {str(reward.artifact_version) for reward in rewards.values() if reward.artifact_version is not None}
    )
    return "".join(f"-{part}" for part in parts)


@task(name="score pairs: {name}")
def score_pairs(recipe: Recipe, name: str, place: RewardPlace) -> dict[str, float]:
    """Score all training pairs of the clients; scores of the same recipe are read if they are stored.

    Args:
        recipe: its rewards, and its judge.
        name: of the reward.
        place: <name>.parquet and <name>.json are written into its folder.

    Returns:
        pairs, accuracy (share of the pairs whose chosen completion has the higher score, equal
        scores half) and margin (mean difference).
    """
    from datasets import Dataset

    reward = reward_section(recipe.rewards[name])
    path = place.folder / f"{name}.parquet"
    record = path.with_suffix(".json")
    fingerprint = recipe.fingerprint(*reward.recipe_sections) + rewards_fingerprint(
        recipe.rewards, place.prepared
    )
    if record.is_file() and path.is_file():
        stored = read_json(record)
        if stored["fingerprint"] == fingerprint:
            figures: dict[str, float] = stored["figures"]
            return figures
    rows = list(read_rows(place.prepared / "pairs.parquet", split="train").to_list())
    with POOL.borrow(recipe.runtime) as device:
        resources = place.resources(recipe, device)
        scores, reward_figures = reward.score_pairs(rows, resources, _log_progress(name))
    POOL.release()
    if reward_figures:
        get_run_logger().info("reward %s: %s", name, format_figures(reward_figures))
    margins = scores[:, 0] - scores[:, 1]
    figures = {
        "pairs": len(rows),
        "accuracy": float(((margins > 0) + 0.5 * (margins == 0)).mean()),
        "margin": float(margins.mean()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(
        [
            {
                "pair_id": row["pair_id"],
                "client_id": row["client_id"],
                "chosen": float(chosen),
                "rejected": float(rejected),
            }
            for row, (chosen, rejected) in zip(rows, scores, strict=True)
        ]
    ).to_parquet(path)
    write_json(record, {"fingerprint": fingerprint, "figures": figures})
    return figures


@task(name="prepare reward {name}")
def prepare_reward(recipe: Recipe, name: str, place: RewardPlace) -> dict[str, float]:
    """Prepare the reward of an objective before any client trains: train it if needed, and try it.

    Args:
        recipe: its rewards.
        name: of the reward.
        place: <name>.trained.json, with the folder of a trained reward, is written into its folder.

    Returns:
        figures of the reward, e.g. a trained one's accuracy on held-out pairs of its owners.
    """
    reward = response_reward(recipe.rewards[name])
    with POOL.borrow(recipe.runtime) as device:
        prepared = reward.prepare(place.resources(recipe, device), _log_progress(name))
        if prepared.folder is not None:
            content = {"folder": str(prepared.folder), "figures": prepared.figures}
            write_json(place.folder / f"{name}.trained.json", content)
        scores = check_scores(
            f"reward '{name}'",
            reward.load(device, prepared.folder),
            ["a question", "another", "a third"],
            ["an answer", "no", "yes"],
        )
    POOL.release()
    return prepared.figures | {"example_score": float(scores[0])}


def format_figures(figures: dict[str, float]) -> str:
    """Figures as a line."""
    return ", ".join(f"{key} {value:.3f}" for key, value in figures.items())


def _log_progress(name: str) -> Progress:
    log = get_run_logger()

    def progress(step: int, loss: float) -> None:
        if step % 10 == 0:
            log.info("reward %s: step %d, loss %.3f", name, step, loss)

    return progress
