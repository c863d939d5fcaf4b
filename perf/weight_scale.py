"""How the weights of FedBiscuit's eq. 8 rescale an adapter: `python -m perf weight-scale`.

Clients of log-normal size with the number, total, standard deviation and range of FedBiscuit's
table 5 (TL;DR) are drawn many times, and the clients of each round by the project's own sampling.
Nothing is trained: a factor B that starts at zero moves by the same amount in each round, the
largest that AdamW can take in its local steps, as if all clients agreed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from components.federation.weight_scale import planned_weight_sums
from components.seeding import generator
from perf.harness import show

CLIENTS = 53
PAIRS = 92858
DEVIATION = 2284.33
RANGE = (1, 12985)
ROUNDS = 500
SAMPLED = 5
MOVEMENT = 30 * 1e-5
"""Local steps times learning rate (section 7.1 and appendix B)."""


def draw_sizes(seed: int) -> dict[str, float]:
    """Shares p_m of all pairs of clients with log-normal sizes."""
    mean = PAIRS / CLIENTS
    variance = math.log(1 + (DEVIATION / mean) ** 2)
    numbers = generator(seed, "weight scale")
    sizes = np.exp(math.log(mean) - variance / 2 + math.sqrt(variance) * numbers.standard_normal(CLIENTS))
    sizes = np.clip(sizes, *RANGE)
    return {f"worker-{n:02d}": float(size) for n, size in enumerate(sizes / sizes.sum())}


def movement(sums: Sequence[float]) -> float:
    """Final value of a factor that moves by MOVEMENT before each round's weights scale it."""
    value = 0.0
    for weight_sum in sums:
        value = weight_sum * (value + MOVEMENT)
    return value


def show_scales(draws: Annotated[int, typer.Option(min=1, help="Number of federations.")] = 200) -> None:
    """The sums of FedBiscuit's weights, their product, and how they rescale an adapter."""
    import pandas as pd

    sums = np.array(
        [planned_weight_sums(draw_sizes(seed), SAMPLED, seed, range(ROUNDS)) for seed in range(draws)]
    )
    values = {
        "sum of a round's weights": sums.ravel(),
        "log10 of their product": np.log10(sums).sum(axis=1),
        "movement by eq. 8": np.array([movement(row) for row in sums]),
        "movement by means": np.array([ROUNDS * MOVEMENT]),
    }
    frame = pd.DataFrame(values.items(), columns=["", "values"])
    for name, share in {"5% quantile": 0.05, "median": 0.5, "95% quantile": 0.95}.items():
        frame[name] = [float(np.quantile(array, share)) for array in frame["values"]]
    frame["mean"] = [float(array.mean()) for array in frame["values"]]
    frame["standard deviation"] = [float(array.std()) for array in frame["values"]]
    title = f"{CLIENTS} clients, {SAMPLED} a round, {ROUNDS} rounds, {draws} draws"
    show(title, frame.drop(columns="values"))
