"""Versions of artifacts whose meaning their settings do not show.

A version is part of the key under which an artifact is cached, or of the fingerprint of the commits
that depend on it. Raise it together with a change of code that changes what the artifact holds, so
that an artifact of the earlier code is not taken for one of the present code.
"""

ROUNDS = 9
"""What clients compute in the rounds (components/federation/clients, components/learning)."""

SAME_TEXT = 4
"""When two texts of a data set are the same (components/data/same_text.py); a preparation's report has it."""

SELECTOR_JUDGE = 6
"""Selectors that are trained as judges (components/evaluation/judges/selector_judge.py)."""

TRAINED_REWARD = 7
"""Reward models that are trained here (components/learning/reward_model.py)."""

THOUGHT_TREES = {"text": 5, "expected": 5}
"""Trees of thoughts by how the evaluator's scores are read (components/alignment/thoughts).

The rounding of expected scores belongs to their trees, so a change of their batches is a version.
"""

RESULTS = 3
"""Layout of the result files of a run or benchmark (components/results.py, evaluation/contests.py)."""
