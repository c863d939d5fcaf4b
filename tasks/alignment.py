"""Tasks of labelling and alignment, each on one device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from components.config import Recipe
from components.federation.strategy import options_of
from components.models.adapters import AdapterStore
from components.seeding import derive, generator
from tasks.devices import POOL
from tasks.policies import Homes, open_policies
from tasks.runs import read_json, write_json
from tasks.uncached import task


def choose_prompts(prepared: Path, split: str, most: int | None, seed: int) -> list[dict[str, Any]]:
    """A seeded sample of the prepared prompts of a split, in a fixed order."""
    from components.data.records import read_rows

    rows = sorted(read_rows(prepared / "prompts.parquet", split=split).to_list(), key=lambda row: row["prompt_id"])
    if most is not None and most < len(rows):
        kept = generator(seed, "prompts", split).choice(len(rows), size=most, replace=False)
        rows = [rows[i] for i in sorted(kept)]
    return rows


@task(task_run_name="sample completions")
def sample_completions(recipe: Recipe, prepared: Path, path: Path) -> dict[str, Any]:
    """Let the unaligned policy write n completions for each of the server's prompts; stored as JSON, and read where it is there already."""
    from components.models.policy import Policy

    log = get_run_logger()
    if path.is_file():
        written = read_json(path)
        return {"prompts": len(written), "finished_share": _share([c["finished"] for row in written for c in row["completions"]])}
    prompts = choose_prompts(prepared, "align", recipe.alignment.prompts, recipe.seed)
    with POOL.borrow(recipe) as device:
        policy = Policy(recipe.policy, device)
        completions = policy.generate(
            [row["prompt"] for row in prompts], derive(recipe.seed, "completions"), recipe.alignment.temperature, recipe.alignment.completions,
            progress=lambda done, total: log.info("sampled %d of %d completions", done, total))
    write_json(path, [row | {"completions": [asdict(c) for c in answers]} for row, answers in zip(prompts, completions, strict=True)])
    return {"prompts": len(prompts), "finished_share": _share([c.finished for answers in completions for c in answers])}


@task()
def label_completions(recipe: Recipe, completions: Path, store: Path, digests: dict[str, str], path: Path) -> dict[str, Any]:
    """Let the selectors label all pairs of distinct completions; stored as parquet, one row a pair."""
    from datasets import Dataset

    from components.alignment.label import candidate_pairs, label_pairs
    from components.models.policy import Completion

    rows = read_json(completions)
    written = {row["prompt_id"]: [Completion(tuple(c["ids"]), c["text"], c["finished"]) for c in row["completions"]] for row in rows}
    candidates, counts = candidate_pairs({row["prompt_id"]: row["prompt"] for row in rows}, written)
    adapters = AdapterStore(store)
    with POOL.borrow_learner(recipe, "selector") as learner:
        labelled = label_pairs(learner.selector, [adapters.get(adapters.ref(digests[name])) for name in sorted(digests)], candidates)
    path.parent.mkdir(parents=True, exist_ok=True)
    if labelled:
        Dataset.from_list(labelled).to_parquet(path)
    longer = _share([len(row["chosen_ids"]) > len(row["rejected_ids"]) for row in labelled])
    ended = _share([row["chosen_finished"] for row in labelled]) - _share([row["rejected_finished"] for row in labelled])
    return counts | {"label_1_share": _share([row["label"] for row in labelled]), "chosen_longer_share": longer, "chosen_finished_more": ended}


@task()
def train_dpo(recipe: Recipe, pairs: Path, prepared: Path, folder: Path) -> dict[str, Any]:
    """Align the policy by DPO on the labelled pairs; gives TRL's history, the KL to the reference and the folders."""
    from components.alignment.dpo import align_policy
    from components.data.records import read_rows

    log = get_run_logger()
    prompts = [row["prompt"] for row in choose_prompts(prepared, "test", recipe.alignment.dpo.kl_prompts, recipe.seed)]
    rows = read_rows(pairs).to_list() if pairs.is_file() else []
    with POOL.borrow(recipe) as device:
        result = align_policy(
            recipe.policy, recipe.alignment.dpo, rows, folder, device, derive(recipe.seed, "dpo"), prompts,
            progress=lambda step, steps, logs: log.info(
                "DPO step %d of %d: loss %.4f, reward margin %.4f", step, steps, logs["loss"], logs.get("rewards/margins", float("nan"))))
    return {"history": result.history, "metrics": result.metrics, "reference": recipe.alignment.dpo.reference, "adapter": str(result.adapter),
            "checkpoints": {str(folder): step for folder, step in result.checkpoints.items()}}


@task()
def adopt_policy(recipe: Recipe, store: Path, digests: dict[str, str], prepared: Path, folder: Path, personal: bool = False, homes: Homes | None = None) -> dict[str, Any]:
    """Take the policy that the clients trained as the aligned one, or each client's own; gives the KL to the backbone, and the folder.

    Of personal policies it is the mean over the prompts, which the clients are dealt in turn. Where clients have parts of their own, the
    folder holds the adapter that they share, and nothing of theirs.
    """
    from components.alignment.dpo import kl_to_reference
    from components.models.adapters import export_adapter
    from components.models.policy import PersonalPolicies, deal, save_personal

    adapters = AdapterStore(store)
    prompts = [row["prompt"] for row in choose_prompts(prepared, "test", recipe.alignment.dpo.kl_prompts, recipe.seed)]
    seed = derive(recipe.seed, "dpo")
    options = options_of(recipe.federation)
    temperature = options.ppo.temperature if hasattr(options, "objectives") else 1.0  # at which it was trained
    if personal:
        adapter = save_personal({name: adapters.get(adapters.ref(digest)) for name, digest in digests.items()}, recipe.policy, folder / "final")
    else:
        (digest,) = digests.values()
        adapter = export_adapter(adapters.get(adapters.ref(digest)), recipe.policy.lora, recipe.policy.backbone.name, folder / "final")
    with POOL.borrow(recipe) as device:
        policies = open_policies(recipe, device, adapter, homes)
        if isinstance(policies, PersonalPolicies):
            dealt = deal(len(prompts), policies.clients)
            measured = [kl_to_reference(policies.of(name), [prompt], derive(seed, n), temperature) for n, (name, prompt) in enumerate(zip(dealt, prompts, strict=True))]
            metrics = {"kl_sequence": sum(numbers["kl_sequence"] for numbers in measured) / len(measured)} if measured else {}
        else:
            metrics = kl_to_reference(policies, prompts, seed, temperature)
    return {"history": [], "metrics": metrics, "reference": "base", "adapter": str(adapter), "checkpoints": {}}


def _share(values: list[bool] | list[int]) -> float:
    return sum(values) / len(values) if values else float("nan")
