"""Training and scoring of a selector on one client's pairs (FedBiscuit section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from components.data.records import Pair
from components.learning.loop import Loss, RowLosses, Rows, Trained, Training, train
from components.learning.objectives import selector_loss
from components.models.selector import Comparison
from components.models.selector_model import WHOLE, BatchShare, Selector
from components.models.store import Adapter


def build_labeled_comparisons(pairs: Sequence[Pair]) -> tuple[list[Comparison], np.ndarray]:
    """Both orders of N pairs with their labels [2 N]: (x, y_w, y_l, 0) and (x, y_l, y_w, 1)."""
    chosen_first = [Comparison(*pair.texts) for pair in pairs]
    return [*chosen_first, *(pair.swapped() for pair in chosen_first)], np.repeat([0, 1], len(pairs))


class SelectorLoss(Loss):
    """Cross-entropy of the binary choice; a row is a pair in one order (FedBiscuit eq. 7)."""

    concurrent = True

    def __init__(self, selector: Selector, pairs: Sequence[Pair], flip: float = 0.0) -> None:
        """The loss; with `flip` the mean over both orders of a pair is corrected (objectives.corrected)."""
        self.selector = selector
        self.flip = flip
        comparisons, self.labels = build_labeled_comparisons(pairs)
        self.encoded = [selector.encode(comparison) for comparison in comparisons]

    def __call__(self, rows: Rows) -> RowLosses:
        encoded = [self.encoded[n] for n in rows]
        logits = self.selector.choice_logits(*self.selector.collate(encoded))
        labels = torch.as_tensor(self.labels[rows], device=logits.device)
        losses = selector_loss(logits, labels, self.flip)
        return RowLosses(losses, sum(map(len, encoded)))


def train_selector(
    selector: Selector, pairs: Sequence[Pair], adapter: Adapter, training: Training
) -> tuple[Adapter, Trained]:
    """Train an adapter (fp32, CPU), which is not changed, on one client's pairs, shown in both orders.

    The adapter in the selector's slot is replaced. A row of a minibatch is a pair in one order.
    """
    loss = SelectorLoss(selector, pairs)
    selector.slot.load(adapter)
    minibatches = training.draw_minibatches(len(loss.encoded))
    trained = train(selector.model, selector.slot.parameters, minibatches, loss, training)
    return selector.slot.read(), trained


def score_pairs(selector: Selector, pairs: Sequence[Pair]) -> np.ndarray:
    """Log-odds that the chosen completions of N pairs are better, shown first and second, [2, N].

    Both orders are measured even where the selector labels in one, because the chosen completion must
    not have a position of its own. With orders 'both' both rows are the mean.
    """
    comparisons = [Comparison(*pair.texts) for pair in pairs]
    margins = selector.margins_by_order(comparisons)
    if selector.config.orders == "both":
        margins[:] = margins.mean(axis=0)
    return margins


def compare(
    selector: Selector,
    comparisons: Sequence[Comparison],
    adapters: Sequence[Adapter],
    share: BatchShare = WHOLE,
) -> np.ndarray:
    """Log-odds that the first completion is better, by each adapter, [U, N]; see Selector.margins."""
    margins = np.zeros((len(adapters), len(comparisons)))
    for row, adapter in zip(margins, adapters, strict=True):
        selector.slot.load(adapter)
        row[:] = selector.margins(comparisons, share)
    return margins


def accuracy(margins: np.ndarray) -> float:
    """Share of margins above 0, where a margin of 0 counts half; NaN if there are none."""
    if not margins.size:
        return float("nan")
    return float(np.mean((margins > 0) + 0.5 * (margins == 0)))


def validation_losses(
    selector: Selector, pairs: Sequence[Pair], adapters: Sequence[Adapter], flip: float = 0.0
) -> list[float]:
    """Validation losses of U adapters (FedBiscuit section 5.1, step 2.1), nats; NaN without pairs.

    They are mean cross-entropies over both orders of the pairs. The adapter in the selector's slot
    is replaced. `flip` is that of components.learning.objectives.corrected.
    """
    if not pairs:
        return [float("nan")] * len(adapters)
    comparisons, labels = build_labeled_comparisons(pairs)
    targets = torch.from_numpy(labels)
    losses = []
    for adapter in adapters:
        selector.slot.load(adapter)
        logits = torch.from_numpy(selector.logits(comparisons))
        losses.append(float(selector_loss(logits, targets, flip).mean()))
    return losses
