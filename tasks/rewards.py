"""Tasks of frozen reward models: they score the clients' pairs once, before the rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prefect import get_run_logger

from components.config import Recipe
from components.federation.private import rewards_beside
from components.federation.strategy import ServerState
from components.models.adapters import AdapterStore
from components.seeding import derive
from tasks.alignment import choose_prompts
from tasks.devices import POOL
from tasks.runs import file_hash, read_json, write_json
from tasks.uncached import task


def judges_rows(recipe: Recipe, prepared: Path) -> str:
    """Hash of the pairs of owners outside the federation, where a reward of the recipe is trained on them, and how that is done."""
    from components.learning.reward import WAY

    kinds = {reward.kind for reward in recipe.rewards.values()}
    return (f"-{file_hash(prepared / 'judge.parquet')[:16]}" if kinds & {"judge", "trained"} else "") + (f"-{WAY}" if "trained" in kinds else "")


def prompts_asked(recipe: Recipe, prepared: Path) -> str:
    """Hash of the held-out prompts, where the policy's rewards are measured on them."""
    return f"-{file_hash(prepared / 'prompts.parquet')[:16]}" if "objectives" in recipe.federation.options else ""


@task(task_run_name="score pairs: {name}")
def score_pairs(recipe: Recipe, name: str, prepared: Path, folder: Path, judges: Path) -> dict[str, float]:
    """Score chosen and rejected of every training pair of the clients; what was scored for this recipe before is taken as it is.

    A reward of kind 'judge' gives log-odds of a pair, averaged over both orders: half of them to chosen, and their opposite to rejected.

    Args:
        recipe: its rewards, and its judge.
        name: of the reward.
        prepared: folder of prepared data.
        folder: <name>.parquet and <name>.json are written into it.
        judges: folder of trained judges; rewards that are trained here are kept under `rewards` in it.

    Returns:
        pairs, accuracy (share of the pairs whose chosen completion has the higher score, equal scores half) and margin (mean difference).
    """
    from datasets import Dataset

    from components.data.records import read_rows

    log, config, file = get_run_logger(), recipe.rewards[name], folder / f"{name}.parquet"
    content = (recipe.fingerprint("rewards", "evaluation") if config.kind == "judge" else recipe.fingerprint("rewards")) + judges_rows(recipe, prepared)
    record = file.with_suffix(".json")
    if record.is_file() and file.is_file() and (known := read_json(record))["of"] == content:
        return known["figures"]
    rows = read_rows(prepared / "pairs.parquet", split="train").to_list()
    with POOL.borrow(recipe) as device:
        if config.kind == "judge":
            from components.evaluation.judges import SelectorJudge, check_judge
            from components.learning.selector import score_pairs as log_odds

            check_judge(recipe.evaluation.judge, prepared)
            judge = SelectorJudge(recipe.evaluation.judge, prepared, judges, recipe.seed, device)
            half = log_odds(judge.selector, rows) / 2
            scores = np.stack([half, -half], axis=1)
        else:
            from components.learning.reward import build_reward

            score, known = build_reward(config, prepared, judges / "rewards", recipe.seed, device, lambda step, loss: log.info("reward %s: step %d, loss %.3f", name, step, loss) if step % 10 == 0 else None)
            if known:
                log.info("reward %s: %s", name, ", ".join(f"{key} {value:.3f}" for key, value in known.items()))
            scores = np.stack([score([row["prompt"] for row in rows], [row[side] for row in rows]) for side in ("chosen", "rejected")], axis=1)
    POOL.release()
    margins = scores[:, 0] - scores[:, 1]
    figures = {"pairs": len(rows), "accuracy": float(((margins > 0) + 0.5 * (margins == 0)).mean()), "margin": float(margins.mean())}
    file.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list([
        {"pair_id": row["pair_id"], "client_id": row["client_id"], "chosen": float(chosen), "rejected": float(rejected)}
        for row, (chosen, rejected) in zip(rows, scores, strict=True)]).to_parquet(file)
    write_json(record, {"of": content, "figures": figures})
    return figures


@task(task_run_name="reward {name}")
def ready_reward(recipe: Recipe, name: str, folder: Path, prepared: Path, judges: Path) -> dict[str, float]:
    """Make sure, before any client trains, that a reward of an objective can be had: load it, and train it first where it is of that kind.

    Args:
        recipe: its rewards.
        name: of the reward.
        folder: <name>.trained.json is written into it, which says where a trained one lies.
        prepared: folder of prepared data.
        judges: folder of trained judges; trained rewards are kept under `rewards` in it.

    Returns:
        what is known of it: of a trained one its accuracy on held-out pairs of its owners.
    """
    from components.learning.multi_objective import checked_scores
    from components.learning.reward import load_reward, trained_reward

    log, config, place, figures = get_run_logger(), recipe.rewards[name], None, {}
    with POOL.borrow(recipe) as device:
        if config.kind == "trained":
            place, figures = trained_reward(
                config, prepared, judges / "rewards", recipe.seed, device, lambda step, loss: log.info("reward %s: step %d, loss %.3f", name, step, loss) if step % 10 == 0 else None)
            write_json(folder / f"{name}.trained.json", {"folder": str(place), "figures": figures})
        scores = checked_scores(f"reward '{name}'", load_reward(config, place, device), ["a question", "another", "a third"], ["an answer", "no", "yes"])
    POOL.release()
    return figures | {"of_an_answer": float(scores[0])}


@task(task_run_name="measure rewards {moment}")
def measure_rewards(recipe: Recipe, trains: str, prepared: Path, store: Path, state: ServerState, record: Path, moment: str) -> dict[str, float]:
    """Mean score of each objective, by its first reward, of the server's policy on held-out prompts, and its KL to the reference; measured once, and read from the record afterwards.

    The completions are sampled as the clients sample theirs, with the same seed at each moment.
    """
    if record.is_file():
        return read_json(record)
    stored = AdapterStore(store)
    (ref,) = state.adapters.values()
    with POOL.borrow_learner(recipe, trains) as learner:
        prompts = [row["prompt"] for row in choose_prompts(prepared, "test", learner.options.reward_prompts, recipe.seed)]
        measured = learner.measure(prompts, stored.get(ref), rewards_beside(stored), derive(recipe.seed, "reward prompts"))
    write_json(record, measured)
    return measured
