"""Losses and figures that are corrected for exchanged verdicts, against the exact sum over the exchanges."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from components.config import DpoObjective, PdpoObjective
from components.config.local_objectives import SftObjective
from components.learning.objectives import corrected, dpo_margin_loss, pdpo_loss, selector_loss
from components.learning.pair_scores import PreferenceScores, pair_figures
from components.learning.selector_training import SelectorLoss, validation_losses
from tests.support.pairs import PAIRS
from tests.support.training import build_loss

FLIP = 0.2
ROWS = np.arange(3)


def exchanged(pair):
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def expectation(values_of, pairs, flip=FLIP):
    """The expectation over all exchanges of values [N] that are computed from the pairs."""
    total = 0.0
    for pattern in product([False, True], repeat=len(pairs)):
        weight = np.prod([flip if is_exchanged else 1 - flip for is_exchanged in pattern])
        own = [
            exchanged(pair) if is_exchanged else pair
            for pair, is_exchanged in zip(pairs, pattern, strict=True)
        ]
        total = total + weight * values_of(own)
    return total


def test_the_expectation_of_corrected_losses_is_the_loss_of_the_true_verdicts():
    loss, other = torch.tensor([0.3, 2.0]), torch.tensor([1.1, 0.2])
    mean = (1 - FLIP) * corrected(loss, other, FLIP) + FLIP * corrected(other, loss, FLIP)
    torch.testing.assert_close(mean, loss)
    factors = corrected(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.11920)
    assert factors.tolist() == pytest.approx([1.15652, -0.15652], abs=1e-4)
    assert (factors[0] + factors[1]).item() == pytest.approx(1.0)


def test_the_other_verdict_has_the_other_label_and_the_opposite_margin():
    logits, labels = torch.tensor([[2.0, 0.5], [0.0, 1.0]]), torch.tensor([0, 1])
    plain, other = selector_loss(logits, labels), selector_loss(logits, 1 - labels)
    torch.testing.assert_close(selector_loss(logits, labels, FLIP), corrected(plain, other, FLIP))
    margins, heads = torch.tensor([1.5, -2.0]), torch.tensor([0.5, 1.0])
    plain, other = dpo_margin_loss(margins, 0.1), dpo_margin_loss(-margins, 0.1)
    torch.testing.assert_close(dpo_margin_loss(margins, 0.1, FLIP), corrected(plain, other, FLIP))
    plain, other = pdpo_loss(margins, heads, 2.0, 0.5, 0.1), pdpo_loss(-margins, -heads, 2.0, 0.5, 0.1)
    torch.testing.assert_close(pdpo_loss(margins, heads, 2.0, 0.5, 0.1, FLIP), corrected(plain, other, FLIP))


@pytest.mark.parametrize("objective", [SftObjective(), DpoObjective(), PdpoObjective(exclusion=None)])
def test_losses_of_clients_have_the_expectation_of_the_true_verdicts(objective, resident):
    def values(pairs, flip=FLIP):
        with torch.no_grad():
            return build_loss(resident, pairs, objective, flip=flip)(ROWS).values.double().numpy()

    pairs = PAIRS[:3]
    np.testing.assert_allclose(expectation(values, pairs), values(pairs, flip=0.0), rtol=1e-5)
    assert not np.allclose(values(pairs), values(pairs, flip=0.0))


def test_losses_of_selectors_have_the_expectation_of_the_true_verdicts(tiny_selector, random_adapter):
    pairs, adapter = PAIRS[:3], random_adapter(2)
    tiny_selector.slot.load(adapter)
    both_orders = np.arange(6)

    def values(pairs, flip=FLIP):
        with torch.no_grad():
            by_row = SelectorLoss(tiny_selector, pairs, flip)(both_orders).values.double().numpy()
        return by_row[:3] + by_row[3:]

    np.testing.assert_allclose(expectation(values, pairs), values(pairs, flip=0.0), rtol=1e-4)

    def validation(pairs, flip=FLIP):
        return np.array(validation_losses(tiny_selector, pairs, [adapter], flip))

    np.testing.assert_allclose(expectation(validation, pairs), validation(pairs, flip=0.0), rtol=1e-5)


def test_figures_have_the_expectation_of_the_true_verdicts():
    chosen, rejected = np.array([[1.0, -3.0, 0.5]]), np.array([[0.2, 1.0, 0.5]])
    likelihoods = {pair.chosen: float(value) for pair, value in zip(PAIRS[:3], chosen[0], strict=True)}
    likelihoods |= {pair.rejected: float(value) for pair, value in zip(PAIRS[:3], rejected[0], strict=True)}

    def figures(pairs, flip=FLIP):
        first, second = (
            np.array([[likelihoods[getattr(pair, name)] for pair in pairs]])
            for name in ("chosen", "rejected")
        )
        scores = PreferenceScores(first - second, first, {"summed": first - second})
        found = pair_figures(scores, pairs, assigned=0, flip=flip)
        return np.array(
            [
                *(found.votes, found.margin, found.reward, found.by_metric["summed"], found.assigned.votes),
                *(votes for _, votes in found.domains.values()),
            ]
        )

    pairs = [replace(pair, domain=name) for pair, name in zip(PAIRS[:3], ("a", "a", "b"), strict=True)]
    np.testing.assert_allclose(expectation(figures, pairs), figures(pairs, flip=0.0))
    assert figures(pairs, flip=0.0)[0] == 1.5, "one right, one wrong, one tie"
