"""Training and scoring a selector on one owner's pairs (FedBiscuit section 4, local training)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import OptimizerConfig
from components.learning.local import TrainingCurve, minibatches, train
from components.learning.objectives import selector_loss
from components.models.selector import Comparison, Selector

if TYPE_CHECKING:
    from components.models.adapters import Adapter

Pair = dict[str, Any]


def labelled_comparisons(pairs: Sequence[Pair]) -> tuple[list[Comparison], np.ndarray]:
    """Both orders of every pair with their labels: (x, y_w, y_l, 0) and (x, y_l, y_w, 1), so 2 n rows from n pairs.

    The pairs have been split into training and held-out ones before this, or a pair's twin would leak.
    """
    given = [Comparison(p["prompt"], p["chosen"], p["rejected"]) for p in pairs]
    swapped = [Comparison(p["prompt"], p["rejected"], p["chosen"]) for p in pairs]
    return [*given, *swapped], np.repeat([0, 1], len(pairs))


def train_selector(
    selector: Selector,
    pairs: Sequence[Pair],
    adapter: Adapter,
    steps: int,
    batch_size: int,
    optimizer: OptimizerConfig,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Adapter, TrainingCurve]:
    """Train an adapter for some steps on one owner's pairs, shown in both orders.

    Args:
        selector: the resident model; its slot is overwritten.
        pairs: rows with prompt, chosen, rejected.
        adapter: where training starts; not changed.
        steps, batch_size, optimizer: of the local loop.
        seed: the order of the rows and dropout are functions of it.
        progress: as in `train`.

    Returns:
        the trained adapter (fp32, CPU) and the curve.
    """
    import torch

    comparisons, labels = labelled_comparisons(pairs)
    encoded = [selector.encode(c) for c in comparisons]
    selector.slot.load(adapter)

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[i] for i in indices]
        logits = selector.choice_logits(*selector.batch(rows))
        return selector_loss(logits, torch.as_tensor(labels[indices], device=logits.device)), sum(map(len, rows))

    curve = train(selector.model, selector.slot.parameters, minibatches(len(encoded), batch_size, steps * optimizer.accumulation, seed), loss, optimizer, seed, progress)
    return selector.slot.read(), curve


def score_pairs(selector: Selector, pairs: Sequence[Pair]) -> np.ndarray:
    """Log-odds that the chosen completion is better, for the adapter in the slot; [N], right where above 0."""
    return selector.margins([Comparison(p["prompt"], p["chosen"], p["rejected"]) for p in pairs])


def accuracy(margins: np.ndarray) -> float:
    """Share of pairs in which the chosen completion is scored above the rejected one, equal scores counted half; NaN without pairs."""
    return float(np.mean((margins > 0) + 0.5 * (margins == 0))) if len(margins) else float("nan")


def validation_losses(selector: Selector, pairs: Sequence[Pair], adapters: Sequence[Adapter]) -> list[float]:
    """Mean cross-entropy over both orders of the pairs, for each adapter; NaN without pairs.

    This is a client's answer to a 'score' job (FedBiscuit section 5.1, step 2.1).
    """
    import torch

    if not pairs:
        return [float("nan")] * len(adapters)
    comparisons, labels = labelled_comparisons(pairs)
    wanted = torch.from_numpy(labels)
    return [float(selector_loss(torch.from_numpy(logits), wanted).mean()) for logits in selector.ensemble_logits(comparisons, adapters)]
