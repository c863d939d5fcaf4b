"""A DPO training that a launch of several processes shares.

    python -m tests.support.data_parallel FOLDER

The environment is that of `accelerate launch`: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The main
process writes the history to FOLDER/history.json.
"""

import json
import sys
from pathlib import Path

PAIRS = [
    {
        "prompt": f"paper {i}",
        "chosen_ids": [40 + i, 41, 42, 2][: 4 - i % 2],
        "rejected_ids": [60, 61 + i] * (1 + i % 3),
    }
    for i in range(7)
]
"""Seven pairs: the second step of an epoch has a single one."""


def train(folder: Path) -> list[dict[str, float]]:
    """The history of two epochs on PAIRS, in steps of six pairs and micro-batches of four."""
    from components.alignment.packed_trainer import train_packed
    from components.models.policy import Policy
    from components.recipes import load_recipe

    recipe = load_recipe("debug")
    # RMSprop and Adam divide by the size of the gradient, and so enlarge differences by rounding.
    values = {
        "optimizer": "sgd",
        "batch_size": 6,
        "micro_batch_size": 4,
        "epochs": 2,
        "lr": 0.5,
    }
    config = recipe.alignment.dpo.model_copy(update=values)
    return train_packed(Policy(recipe.policy, "cpu"), PAIRS, config, folder, seed=0).history


def main() -> None:
    """Train, and write the history once."""
    import torch

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    history = train(folder)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (folder / "history.json").write_text(json.dumps(history), encoding="utf-8")


if __name__ == "__main__":
    main()
