"""A small prepared folder, written without a source: four clients, a judge, prompts of the server."""

from __future__ import annotations

import json
from pathlib import Path

TRAINING_PAIRS = {"ada": 8, "bea": 6, "cyd": 4, "dan": 2}
"""Training pairs by client: shares of 0.4, 0.3, 0.2 and 0.1."""


def write_prepared(folder: Path) -> Path:
    """Write the pairs of the clients and the judge and the server's prompts, as records.py says."""
    from datasets import Dataset

    owners = {name: {"train": train, "validation": 2, "test": 2} for name, train in TRAINING_PAIRS.items()}
    judge = {"judge": {"train": 6, "test": 4}}
    Dataset.from_list(pairs_by_owner(owners)).to_parquet(folder / "pairs.parquet")
    Dataset.from_list(pairs_by_owner(judge)).to_parquet(folder / "judge.parquet")
    Dataset.from_list(server_prompts(3)).to_parquet(folder / "prompts.parquet")
    clients = {name: {**counts, "group": None} for name, counts in owners.items()}
    (folder / "clients.json").write_text(json.dumps(clients))
    return folder


def pairs_by_owner(owners: dict[str, dict[str, int]]) -> list[dict[str, str]]:
    """Pairs of each owner, as many as are named for each split, each with a prompt of its own."""
    pairs = []
    for owner, splits in owners.items():
        for split, count in splits.items():
            pairs += [preference_pair(owner, split, number) for number in range(count)]
    return pairs


def preference_pair(owner: str, split: str, number: int) -> dict[str, str]:
    """A pair; those of an owner and a split alternate between two domains."""
    prompt = f"paper {number} of {owner} for {split}"
    return {
        "prompt": prompt,
        "chosen": f"it shows that {owner} {split} {number} holds",
        "rejected": f"{split} {number}",
        "client_id": owner,
        "domain": ("common", "own")[number % 2],
        "source": "written",
        "pair_id": f"{owner}-{split}-{number}",
        "split": split,
        "group": prompt,
    }


def server_prompts(count: int) -> list[dict[str, object]]:
    """Prompts of the server to align on, and as many to evaluate on."""
    prompts: list[dict[str, object]] = []
    for split in ("align", "test"):
        for number in range(count):
            prompts.append(
                {
                    "prompt_id": f"{split}-{number}",
                    "prompt": f"server text {number} for {split}",
                    "references": [f"a human summary of text {number}"],
                    "split": split,
                }
            )
    return prompts
