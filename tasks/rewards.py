"""Tasks of reward models before the first round: scoring of pairs, training, and a trial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from prefect import get_run_logger

from components.config import Recipe
from components.data.records import read_clients
from components.federation.clients.context import rewards_folder
from components.federation.protocol import PairSums, ScorePairsJob
from components.federation.rounds import ask_clients
from components.federation.transport import Transport
from components.io import file_hash, stored, write_json
from components.models.rewards.reward_section import (
    Progress,
    ResponseReward,
    RewardResources,
    RewardSection,
    check_scores,
)
from components.names import file_name
from tasks.devices import POOL, run_on_worker
from tasks.runs import Run, judges_root
from tasks.uncached import task


def prepare_rewards(run: Run, recipe: Recipe, transport: Transport) -> None:
    """Prepare the recipe's rewards before any client trains.

    Rewards of methods that sample completions are tried on texts; by others each client scores its pairs.
    """
    for name in recipe.rewards:
        arguments = {"run": run, "recipe": recipe, "name": name}
        _log_figures(name, run_on_worker(prepare_reward, recipe.runtime, run.folder, **arguments))
    for name in {} if recipe.federation.options.sampling else recipe.rewards:
        _log_figures(name, score_pairs(run, recipe, name, transport))


def rewards_fingerprint(rewards: Mapping[str, RewardSection], prepared: Path) -> str:
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


def score_pairs(run: Run, recipe: Recipe, name: str, transport: Transport) -> dict[str, float]:
    """Let each client score its training pairs by a reward, and keep the scores.

    The figures are stored, and read if they are stored.

    Returns:
        pairs, accuracy (share of the pairs whose chosen completion has the higher score, equal
        scores half) and margin (mean difference).
    """
    reward = recipe.rewards[name]
    trained = rewards_fingerprint(recipe.rewards, run.prepared)
    fingerprint = recipe.fingerprint(*reward.recipe_sections) + trained
    path = rewards_folder(run.federation) / f"{file_name(name)}-{fingerprint}.json"

    def score() -> dict[str, float]:
        jobs = [
            ScorePairsJob(client=client, round=0, seed=recipe.seed, reward=name, fingerprint=fingerprint)
            for client, splits in read_clients(run.prepared).items()
            if splits["train"]
        ]
        updates, _ = ask_clients(jobs, transport, recipe.federation, quorum=1)
        sums = [PairSums.model_validate(update.output) for update in updates]
        pairs = sum(one.pairs for one in sums)
        return {
            "pairs": pairs,
            "accuracy": sum(one.right for one in sums) / pairs,
            "margin": sum(one.margin for one in sums) / pairs,
        }

    figures: dict[str, float] = stored(path, score)
    return figures


@task(name="prepare reward {name}")
def prepare_reward(run: Run, recipe: Recipe, name: str) -> dict[str, float]:
    """Prepare the reward of an objective before any client trains: train it if needed, and try it.

    The folder of a trained reward, relative to the folder of rewards, is stored there as NAME.trained.json,
    see file_name.

    Returns:
        figures of the reward, e.g. a trained one's accuracy on held-out pairs of its owners.
    """
    reward = recipe.rewards[name]
    with POOL.borrow(recipe.runtime) as device:
        prepared = reward.prepare(_resources(run, recipe, device), _log_progress(name))
        if prepared.folder is not None:
            rewards = rewards_folder(run.federation)
            content = {"folder": os.path.relpath(prepared.folder, rewards), "figures": prepared.figures}
            write_json(rewards / f"{file_name(name)}.trained.json", content)
        figures = dict(prepared.figures)
        if isinstance(reward, ResponseReward):
            scores = check_scores(
                f"reward '{name}'",
                reward.load(device, prepared.folder),
                ["a question", "another", "a third"],
                ["an answer", "no", "yes"],
            )
            figures["example_score"] = float(scores[0])
    POOL.release()
    return figures


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
