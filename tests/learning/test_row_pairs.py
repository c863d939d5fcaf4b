"""Every loss names the pair that each of its losses belongs to, which gradients of pairs need."""

from pkgutil import resolve_name
from typing import get_args

import numpy as np
import pytest
import torch

from components.config import DpoObjective, LocalObjective, PdpoObjective
from components.config.local_objectives import ExclusionConfig, OfflinePpoObjective, SftObjective
from components.learning.loop import mean_gradients, pair_gradients
from components.learning.pair_ppo import PairPpoLoss
from components.learning.preference import PreferenceLoss, SftLoss
from components.learning.selector_training import SelectorLoss
from tests.support.pairs import PAIRS, SCORES
from tests.support.training import build_loss

ROWS = np.array([4, 1, 2, 5])
OBJECTIVES = [SftObjective(), DpoObjective(), PdpoObjective(exclusion=None), OfflinePpoObjective()]
EXCLUSION = PdpoObjective(exclusion=ExclusionConfig(deviations=2.0, max_share=0.5))


def measure(loss, rows=ROWS):
    """The losses of a minibatch of one micro-batch."""
    loss.begin_minibatch([rows])
    return loss(rows)


def test_these_are_the_losses_of_all_objectives():
    losses = {resolve_name(objective.loss) for objective in get_args(LocalObjective) if objective.loss}
    assert losses == {SftLoss, PreferenceLoss, PairPpoLoss}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.kind)
def test_each_row_of_a_policys_loss_is_a_pair(personal_policy, objective):
    losses = measure(build_loss(personal_policy, PAIRS, objective, scores=SCORES))
    assert losses.pairs.tolist() == ROWS.tolist()
    alone = [
        measure(build_loss(personal_policy, PAIRS, objective, scores=SCORES), np.array([n])) for n in ROWS
    ]
    if not isinstance(objective, PdpoObjective):  # whose scale is that of the minibatch
        assert losses.values.tolist() == pytest.approx([loss.values.item() for loss in alone], abs=1e-4)


def test_a_pair_that_is_excluded_has_no_loss(personal_policy, contradicted):
    losses = measure(build_loss(personal_policy, PAIRS, EXCLUSION, reference=contradicted(300)))
    assert losses.pairs.tolist() == [4, 1, 5]
    assert len(losses.values) == 3


def test_a_pair_that_is_excluded_from_several_micro_batches_has_a_loss_without_gradient(
    personal_policy, contradicted
):
    loss = build_loss(personal_policy, PAIRS, EXCLUSION, reference=contradicted(300))
    micro_batches = [ROWS[:3], ROWS[3:]]
    loss.begin_minibatch(micro_batches)
    first, second = (loss(rows) for rows in micro_batches)
    assert [*first.pairs, *second.pairs] == ROWS.tolist()
    gradients = dict(pair_gradients(first, personal_policy.slot.parameters))
    assert not any(gradient.any() for gradient in gradients[2])
    assert any(gradient.any() for gradient in gradients[4])


def test_both_orders_of_a_pair_have_its_index(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(3))
    loss = SelectorLoss(tiny_selector, PAIRS)
    rows = np.array([4, 7, 1, 10, 6])  # of 6 pairs; row n + 6 has pair n's other order
    assert measure(loss, rows).pairs.tolist() == [4, 1, 1, 4, 0]
    gradients = dict(pair_gradients(measure(loss, rows), tiny_selector.slot.parameters))
    both_orders = mean_gradients(measure(loss, np.array([4, 10])), tiny_selector.slot.parameters, 2.0)
    assert sorted(gradients) == [0, 1, 4]
    for computed, expected in zip(gradients[4], both_orders, strict=True):
        assert torch.allclose(computed, expected, atol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in both_orders)
