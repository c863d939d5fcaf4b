"""Training a selector on an owner's pairs: both orders, fp32 steps, nothing kept between two clients."""

import math

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.federation.clients import SelectorLearner
from components.learning.objectives import selector_loss
from components.learning.selector import accuracy, labelled_comparisons, score_pairs, train_selector, validation_losses
from components.models.selector import Comparison, Selector

PAIRS = [{"prompt": f"paper {i}", "chosen": f"a whole summary {i}", "rejected": f"cut {i}"} for i in range(4)]
ADAMW = OptimizerConfig(lr=1e-2)


def test_every_pair_is_shown_in_both_orders_with_both_labels():
    comparisons, labels = labelled_comparisons(PAIRS)
    rows = list(zip(comparisons, labels.tolist(), strict=True))
    assert len(rows) == 2 * len(PAIRS) and labels.sum() == len(PAIRS)
    for p in PAIRS:
        assert (Comparison(p["prompt"], p["chosen"], p["rejected"]), 0) in rows
        assert (Comparison(p["prompt"], p["rejected"], p["chosen"]), 1) in rows


def test_the_loss_is_the_cross_entropy_of_the_choice_one_a_row():
    loss = selector_loss(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1]))
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-2)), math.log1p(math.e), math.log(2)])
    assert selector_loss(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0])).dtype == torch.float32


def test_training_lowers_the_loss_and_the_chosen_ones_win(tiny_selector):
    start = tiny_selector.slot.initial_adapter(0)
    adapter, curve = train_selector(tiny_selector, PAIRS, start, 60, 8, OptimizerConfig(lr=3e-2), seed=0)
    assert curve.losses[0] == pytest.approx(math.log(2), abs=0.1) and curve.losses[-1] < 0.55
    tiny_selector.slot.load(adapter)
    assert accuracy(score_pairs(tiny_selector, PAIRS)) == 1.0
    exchanged = [p | {"chosen": p["rejected"], "rejected": p["chosen"]} for p in PAIRS]
    assert accuracy(score_pairs(tiny_selector, exchanged)) == 0.0


def test_training_is_a_function_of_adapter_pairs_and_seed_and_changes_none_of_them(debug, random_adapter):
    selector = Selector(debug.selector, "cpu")            # with dropout
    start = random_adapter(3)
    kept = {n: t.clone() for n, t in start.items()}
    first, _ = train_selector(selector, PAIRS, start, 3, 4, ADAMW, seed=1)
    train_selector(selector, PAIRS[:2], random_adapter(4), 3, 4, ADAMW, seed=9)      # another client in between
    again, _ = train_selector(selector, PAIRS, start, 3, 4, ADAMW, seed=1)
    other, _ = train_selector(selector, PAIRS, start, 3, 4, ADAMW, seed=2)
    assert all(torch.equal(start[n], kept[n]) for n in kept)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)
    assert any(not torch.equal(first[n], start[n]) for n in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learning_rate_of_1e_5_moves_an_adapter_on_a_backbone_of_any_dtype(debug, random_adapter, dtype):
    """AdamW's first step is the learning rate in each value; in bf16 values near 0.2 it would be rounded away."""
    backbone = debug.selector.backbone.model_copy(update={"dtype": dtype})
    selector = Selector(debug.selector.model_copy(update={"backbone": backbone}), "cpu")
    start = random_adapter(3)
    trained, _ = train_selector(selector, PAIRS, start, 1, 8, OptimizerConfig(lr=1e-5), seed=1)
    steps = torch.cat([(trained[n] - start[n]).abs().flatten() for n in start])
    assert {t.dtype for t in trained.values()} == {torch.float32}
    assert steps.median().item() == pytest.approx(1e-5, rel=0.05) and (steps > 0).float().mean() > 0.9


def test_tokens_are_counted_without_padding(tiny_selector):
    _, curve = train_selector(tiny_selector, PAIRS, tiny_selector.slot.initial_adapter(0), 2, 8, ADAMW, seed=0)
    comparisons, _ = labelled_comparisons(PAIRS)
    assert curve.tokens == 2 * sum(len(tiny_selector.encode(c)) for c in comparisons)


def test_the_validation_loss_is_the_mean_over_both_orders_and_nan_without_pairs(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(1))
    comparisons, labels = labelled_comparisons(PAIRS)
    logits = tiny_selector.logits(comparisons).astype(float)
    expected = np.mean([np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, labels, strict=True)])
    losses = validation_losses(tiny_selector, PAIRS, [random_adapter(2), random_adapter(1)])
    assert losses[1] == pytest.approx(expected, abs=1e-6) and losses[0] != pytest.approx(expected, abs=1e-3)
    assert all(math.isnan(loss) for loss in validation_losses(tiny_selector, [], [random_adapter(2), random_adapter(1)]))


def test_accuracy_counts_a_tie_half_and_is_nan_without_pairs():
    assert accuracy(np.array([0.5, -0.5, 0.0, 2.0])) == 0.625
    assert math.isnan(accuracy(np.array([])))


def test_the_twin_of_a_pair_is_made_from_training_rows_alone(debug, prepared, tmp_path, monkeypatch):
    """Split first, swap afterwards: no comparison that is trained on, in either order, is one of a held-out pair."""
    from components.data.records import read_rows
    from components.federation.clients import run_job
    from components.federation.strategy import Job
    from components.models.adapters import AdapterStore

    learner, store, seen = SelectorLearner(debug, "cpu"), AdapterStore(tmp_path / "adapters"), []
    encode = learner.selector.encode
    monkeypatch.setattr(learner.selector, "encode", lambda comparison: (seen.append(comparison), encode(comparison))[1])
    ref = store.put(learner.initial_adapter(0))
    run_job(Job("train", "ada", 0, "selector", (ref,), "selector", 1), learner, prepared / "pairs.parquet", store)
    rows = read_rows(prepared / "pairs.parquet", "ada").to_list()
    assert {c.prompt for c in seen} == {r["prompt"] for r in rows if r["split"] == "train"}
    assert not {c.prompt for c in seen} & {r["prompt"] for r in rows if r["split"] != "train"}
    assert len(seen) == 2 * 8 and {Comparison(c.prompt, c.second, c.first) for c in seen} == set(seen)
