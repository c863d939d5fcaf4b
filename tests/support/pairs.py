"""Preference pairs for tests of training: prompts and completions of different lengths."""

import numpy as np

from components.data.records import Pair

PAIRS = [
    Pair(
        prompt=f"paper {i}" + " about trees" * i,
        chosen=f"it shows that {i} holds",
        rejected="no " * (i + 1),
        pair_id=str(i),
        client_id="ada",
    )
    for i in range(6)
]

SCORES = np.array([[1.0, 0.0], [3.0, -1.0], [0.5, 0.5], [2.0, 0.0], [-1.0, -3.0], [0.0, 4.0]])
"""Scores of a reward for the chosen and the rejected completion of each pair."""
