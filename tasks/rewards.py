"""Tasks of reward models before the first round: scoring of pairs, training, and a trial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from prefect import get_run_logger

from components.config import Recipe, RewardConfig
from components.data.records import read_rows
from components.federation.clients.context import rewards_folder
from components.federation.method import method_of
from components.io import file_hash, read_json, write_json
from components.models.rewards.reward_section import (
    Progress,
    RewardResources,
    RewardSection,
    check_scores,
    response_reward,
)
from components.names import file_name
from tasks.devices import POOL, run_on_worker
from tasks.runs import Run, judges_root
from tasks.uncached import task


def prepare_rewards(run: Run, recipe: Recipe) -> None:
    """Prepare the recipe's rewards before any client trains.

    Rewards of methods that score completions are made ready to do so; others score the clients'
    pairs.
    """
    prepare = prepare_reward if method_of(recipe.federation).scores_completions else score_pairs
    for name in recipe.rewards:
        arguments = {"run": run, "recipe": recipe, "name": name}
        _log_figures(name, run_on_worker(prepare, recipe.runtime, run.folder, **arguments))


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
def score_pairs(run: Run, recipe: Recipe, name: str) -> dict[str, float]:
    """Score all training pairs of the clients; scores of the same recipe are read if they are stored.

    They are stored as NAME.parquet and NAME.json in the folder of rewards, see file_name.

    Returns:
        pairs, accuracy (share of the pairs whose chosen completion has the higher score, equal
        scores half) and margin (mean difference).
    """
    from datasets import Dataset

    reward = cast(RewardSection, recipe.rewards[name])
    path = rewards_folder(run.federation) / f"{file_name(name)}.parquet"
    record = path.with_suffix(".json")
    trained = rewards_fingerprint(recipe.rewards, run.prepared)
    fingerprint = recipe.fingerprint(*reward.recipe_sections) + trained
    if record.is_file() and path.is_file():
        known = read_json(record)
        if known["fingerprint"] == fingerprint:
            return dict(known["figures"])
    rows = read_rows(run.prepared / "pairs.parquet", split="train")
    with POOL.borrow(recipe.runtime) as device:
        resources = _resources(run, recipe, device)
        scores, reward_figures = reward.score_pairs(rows, resources, _log_progress(name))
    POOL.release()
    if reward_figures:
        _log_figures(name, reward_figures)
    margins = scores[:, 0] - scores[:, 1]
    figures = {
        "pairs": len(rows),
        "accuracy": float(((margins > 0) + 0.5 * (margins == 0)).mean()),
        "margin": float(margins.mean()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {key: [row[key] for row in rows] for key in ("pair_id", "client_id")}
    chosen, rejected = scores.T.tolist()
    Dataset.from_dict(columns | {"chosen": chosen, "rejected": rejected}).to_parquet(path)
    write_json(record, {"fingerprint": fingerprint, "figures": figures})
    return figures


@task(name="prepare reward {name}")
def prepare_reward(run: Run, recipe: Recipe, name: str) -> dict[str, float]:
    """Prepare the reward of an objective before any client trains: train it if needed, and try it.

    The folder of a trained reward, relative to the folder of rewards, is stored there as NAME.trained.json,
    see file_name.

    Returns:
        figures of the reward, e.g. a trained one's accuracy on held-out pairs of its owners.
    """
    reward = response_reward(recipe.rewards[name])
    with POOL.borrow(recipe.runtime) as device:
        prepared = reward.prepare(_resources(run, recipe, device), _log_progress(name))
        if prepared.folder is not None:
            rewards = rewards_folder(run.federation)
            content = {"folder": os.path.relpath(prepared.folder, rewards), "figures": prepared.figures}
            write_json(rewards / f"{file_name(name)}.trained.json", content)
        scores = check_scores(
            f"reward '{name}'",
            reward.load(device, prepared.folder),
            ["a question", "another", "a third"],
            ["an answer", "no", "yes"],
        )
    POOL.release()
    return prepared.figures | {"example_score": float(scores[0])}


def _resources(run: Run, recipe: Recipe, device: str) -> RewardResources:
    return RewardResources(run.prepared, judges_root(), recipe.seed, device, recipe.evaluation.judge)


def _log_figures(name: str, figures: dict[str, float]) -> None:
    line = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
    get_run_logger().info("reward %s: %s", name, line)


def _log_progress(name: str) -> Progress:
    log = get_run_logger()

    def progress(step: int, loss: float) -> None:
        if step % 10 == 0:
            log.info("reward %s: step %d, loss %.3f", name, step, loss)

    return progress
