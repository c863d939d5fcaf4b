"""Training a selector on a client's pairs: both orders, fp32 steps, no state between clients."""

import math

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.data.records import Pair
from components.learning.loop import Training
from components.learning.selector_training import (
    accuracy,
    build_labeled_comparisons,
    score_pairs,
    train_selector,
    validation_losses,
)
from components.models.selector import Comparison
from components.models.selector_model import Selector

PAIRS = [Pair(f"paper {i}", f"a whole summary {i}", f"cut {i}") for i in range(4)]


def settings(steps, batch_size, lr, seed=0):
    return Training(steps, batch_size, OptimizerConfig(lr=lr), seed)


def test_every_pair_is_shown_in_both_orders_with_both_labels():
    comparisons, labels = build_labeled_comparisons(PAIRS)
    rows = list(zip(comparisons, labels.tolist(), strict=True))
    assert len(rows) == 2 * len(PAIRS)
    assert labels.sum() == len(PAIRS)
    for pair in PAIRS:
        assert (Comparison(*pair.texts), 0) in rows
        assert (Comparison(pair.prompt, pair.rejected, pair.chosen), 1) in rows


def test_training_lowers_the_loss_until_the_chosen_completions_win(tiny_selector):
    initial = tiny_selector.slot.initial_adapter(0)
    adapter, metrics = train_selector(tiny_selector, PAIRS, initial, settings(20, 8, 6e-2))
    assert metrics.losses[0] == pytest.approx(math.log(2), abs=0.1)
    assert metrics.losses[-1] < 0.55
    tiny_selector.slot.load(adapter)
    assert accuracy(score_pairs(tiny_selector, PAIRS)) == 1.0
    exchanged = [Pair(pair.prompt, pair.rejected, pair.chosen) for pair in PAIRS]
    assert accuracy(score_pairs(tiny_selector, exchanged)) == 0.0


def test_training_is_a_function_of_the_adapter_the_pairs_and_the_seed(debug, random_adapter):
    selector = Selector(debug.selector, "cpu")  # with dropout
    initial = random_adapter(3)
    first, _ = train_selector(selector, PAIRS, initial, settings(3, 4, 1e-2, seed=1))
    assert all(torch.equal(initial[name], tensor) for name, tensor in random_adapter(3).items())
    train_selector(selector, PAIRS[:2], random_adapter(4), settings(3, 4, 1e-2, seed=9))  # another client
    again, _ = train_selector(selector, PAIRS, initial, settings(3, 4, 1e-2, seed=1))
    different, _ = train_selector(selector, PAIRS, initial, settings(3, 4, 1e-2, seed=2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], different[name]) for name in first)
    assert any(not torch.equal(first[name], initial[name]) for name in first)


def test_two_threads_take_the_steps_of_one(tiny_selector, random_adapter, two_threads):
    """SGD, since AdamW divides a gradient near zero by its own size."""
    initial = random_adapter(3)
    training = Training(3, 5, OptimizerConfig(name="sgd", lr=0.1), seed=0)
    adapter, metrics = train_selector(tiny_selector, PAIRS, initial, training)
    torch.set_num_threads(1)
    expected, alone = train_selector(tiny_selector, PAIRS, initial, training)
    assert metrics.losses == pytest.approx(alone.losses, rel=1e-5)
    assert metrics.gradient_norms == pytest.approx(alone.gradient_norms, rel=1e-4)
    assert all(torch.allclose(adapter[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert max(float((adapter[name] - initial[name]).abs().max()) for name in initial) > 1e-3


def test_the_accuracy_of_one_order_is_the_mean_over_the_positions_of_the_chosen_completion(
    tiny_selector, random_adapter, monkeypatch
):
    """So a selector that always chooses the first position has an accuracy of one half."""
    tiny_selector.slot.load(random_adapter(2, 1.0))
    monkeypatch.setattr(tiny_selector, "config", tiny_selector.config.model_copy(update={"orders": "single"}))
    comparisons, labels = build_labeled_comparisons(PAIRS)
    choices = (tiny_selector.margins(comparisons) < 0).astype(int)
    assert np.mean(choices == labels) != np.mean((choices == labels)[: len(PAIRS)])
    assert accuracy(score_pairs(tiny_selector, PAIRS)) == (choices == labels).mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learning_rate_of_1e_5_moves_an_adapter_on_a_backbone_of_any_dtype(debug, random_adapter, dtype):
    """AdamW's first step is the learning rate in each value; bf16 would lose it near 0.2."""
    backbone = debug.selector.backbone.model_copy(update={"dtype": dtype})
    selector = Selector(debug.selector.model_copy(update={"backbone": backbone}), "cpu")
    initial = random_adapter(3)
    trained, _ = train_selector(selector, PAIRS, initial, settings(1, 8, 1e-5, seed=1))
    steps = torch.cat([(trained[name] - initial[name]).abs().flatten() for name in initial])
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert steps.median().item() == pytest.approx(1e-5, rel=0.05)
    assert (steps > 0).float().mean() > 0.9


def test_tokens_are_counted_without_padding(tiny_selector):
    initial = tiny_selector.slot.initial_adapter(0)
    _, metrics = train_selector(tiny_selector, PAIRS, initial, settings(2, 8, 1e-2))
    comparisons, _ = build_labeled_comparisons(PAIRS)
    assert metrics.tokens == 2 * sum(len(tiny_selector.encode(comparison)) for comparison in comparisons)


def test_the_validation_loss_is_the_mean_cross_entropy_over_both_orders(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(1))
    comparisons, labels = build_labeled_comparisons(PAIRS)
    logits = tiny_selector.logits(comparisons).astype(float)
    expected = np.mean(
        [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, labels, strict=True)]
    )
    losses = validation_losses(tiny_selector, PAIRS, [random_adapter(2), random_adapter(1)])
    assert losses[1] == pytest.approx(expected, abs=1e-6)
    assert losses[0] != pytest.approx(expected, abs=1e-3)


def test_accuracy_counts_a_tie_half():
    assert accuracy(np.array([0.5, -0.5, 0.0, 2.0])) == 0.625


def test_accuracy_and_validation_losses_are_nan_without_pairs(tiny_selector, random_adapter):
    losses = validation_losses(tiny_selector, [], [random_adapter(2), random_adapter(1)])
    assert np.isnan([accuracy(np.array([])), *losses]).tolist() == [True] * 3
