"""How the weights of FedBiscuit's eq. 8 rescale an adapter: `python -m perf.weight_scale`.

Clients of log-normal size with the number, total, standard deviation and range of FedBiscuit's
table 5 (TL;DR) are drawn many times, and the clients of each round by the project's own sampling.
Nothing is trained: a factor B that starts at zero moves by the same amount in each round, the
largest that AdamW can take in its local steps, as if all clients agreed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

from components.federation.weight_scale import planned_weight_sums
from components.seeding import generator

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the weight sums, their product, and the movement, over many draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="number of federations (default: 200)")
    draws = parser.parse_args(arguments).draws
    sums = np.array(
        [planned_weight_sums(draw_sizes(seed), SAMPLED, seed, range(ROUNDS)) for seed in range(draws)]
    )
    decades = np.log10(sums).sum(axis=1)
    moved = [movement(row) for row in sums]
    print(f"{CLIENTS} clients, {SAMPLED} a round, {ROUNDS} rounds, {draws} draws")
    print(f"sum of a round's weights   {sums.mean():.2f} +- {sums.std():.2f}")
    for name, values in (("log10 of their product", decades), ("movement by eq. 8", moved)):
        low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
        print(f"{name:26} median {median:.2g}, 5% and 95% quantiles {low:.2g} and {high:.2g}")
    print(f"movement by means          {ROUNDS * MOVEMENT:.2g}")


if __name__ == "__main__":
    main()
