"""The local loop: which rows a step sees, what precision it has, and what it leaves behind."""

from collections import Counter

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.learning import local
from components.learning.local import TrainingError, build_optimizer, minibatches, train

SGD = OptimizerConfig(name="sgd", lr=0.5, clip=None)


def test_minibatches_see_every_row_once_a_pass_and_drop_none():
    rows = np.concatenate(list(minibatches(7, 3, 7, seed=0)))
    assert len(rows) == 21 and all(sorted(rows[i:i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert rows[:7].tolist() != rows[7:14].tolist(), "each pass has an order of its own"


def test_a_minibatch_is_full_also_where_it_is_larger_than_the_data():
    batches = list(minibatches(3, 8, 2, seed=0))
    assert [len(b) for b in batches] == [8, 8] and set(Counter(np.concatenate(batches)).values()) <= {5, 6}


def test_minibatches_are_a_function_of_the_seed():
    first, again, other = (np.concatenate(list(minibatches(50, 5, 4, seed))) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_a_client_without_rows_is_an_error_and_not_an_endless_loop():
    with pytest.raises(TrainingError, match="no rows"):
        next(minibatches(0, 4, 1, seed=0))


class Line(torch.nn.Module):
    """Squared error of one weight; dropout where it is asked for."""

    def __init__(self, start: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), start))
        self.dropout = torch.nn.Dropout(dropout)

    def loss(self, indices):
        assert self.training and torch.is_grad_enabled()
        return self.dropout(self.weight).pow(2).sum().expand(len(indices)), 10 * len(indices)


def run(model, config=SGD, steps=1, seed=0, loss=None, **more):
    return train(model, [model.weight], minibatches(4, 2, steps, seed), loss or model.loss, config, seed, **more)


def test_a_step_of_sgd_is_the_learning_rate_times_the_gradient():
    model = Line()
    curve = run(model, OptimizerConfig(name="sgd", lr=0.1, clip=None))
    assert model.weight.tolist() == pytest.approx([0.8] * 4)
    assert (curve.losses, curve.tokens) == ([4.0], 20) and curve.gradient_norms == pytest.approx([4.0])


def test_the_gradient_is_clipped_to_its_norm_and_reported_before_that():
    model = Line()
    curve = run(model, OptimizerConfig(name="sgd", lr=1.0, clip=1.0))
    assert curve.gradient_norms == pytest.approx([4.0])
    assert model.weight.tolist() == pytest.approx([0.5] * 4, abs=1e-5)


def test_a_step_of_1e_5_is_not_lost_and_the_optimisers_state_is_fp32(monkeypatch):
    """In bf16 1 - 1e-5 rounds to 1; and so would AdamW's moments."""
    made = []
    monkeypatch.setattr(local, "build_optimizer", lambda *a: made.append(build_optimizer(*a)) or made[-1])
    model = Line()
    run(model, OptimizerConfig(lr=1e-5), steps=3)
    assert (1 - model.weight).tolist() == pytest.approx([3e-5] * 4, rel=0.02)
    state = made[0].state[model.weight]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32} and state["exp_avg"].abs().min() > 0


def test_the_optimiser_is_the_recipes_and_is_built_anew_for_each_call(monkeypatch):
    made = []
    monkeypatch.setattr(local, "build_optimizer", lambda *a: made.append(build_optimizer(*a)) or made[-1])
    config = OptimizerConfig(lr=3e-4, betas=[0.8, 0.7], weight_decay=0.1)
    run(Line(), config)
    run(Line(), config)
    assert made[0] is not made[1] and type(made[0]) is torch.optim.AdamW
    group = made[0].param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.7), 0.1)


class Slope(Line):
    """A loss whose gradient is 1 in each weight, so that a step of SGD goes as far as the learning rate."""

    def loss(self, indices):
        return self.weight.sum().expand(len(indices)), len(indices)


def rates(steps: int, **config) -> list[float]:
    """The learning rate of each step, as the distance that the weight goes in it."""
    model, seen = Slope(start=0.0), [0.0]
    config = OptimizerConfig(name="sgd", lr=0.5, clip=None, **config)
    run(model, config, steps=steps, progress=lambda *_: seen.append(-model.weight[0].item()))
    return np.diff(seen).tolist()


@pytest.mark.parametrize(("config", "expected"), [
    ({}, [0.5] * 6),
    ({"warmup_steps": 2}, [0, 0.25, 0.5, 0.5, 0.5, 0.5]),
    ({"scheduler": "linear"}, [0.5, 0.5 * 5 / 6, 0.5 * 4 / 6, 0.25, 0.5 * 2 / 6, 0.5 / 6]),
    ({"scheduler": "linear", "warmup_steps": 2}, [0, 0.25, 0.5, 0.375, 0.25, 0.125]),
    ({"scheduler": "cosine"}, [0.5, 0.25 * (1 + 0.75 ** 0.5), 0.375, 0.25, 0.125, 0.25 * (1 - 0.75 ** 0.5)]),
    ({"scheduler": "cosine", "warmup_steps": 4}, [0, 0.125, 0.25, 0.375, 0.5, 0.25]),
    ({"scheduler": "cosine", "warmup_steps": 5}, [0, 0.1, 0.2, 0.3, 0.4, 0.5])])
def test_the_learning_rate_rises_over_the_warm_up_and_follows_its_schedule_over_the_steps_of_the_call(config, expected):
    assert rates(6, **config) == pytest.approx(expected, abs=1e-6)


def test_the_schedule_begins_anew_with_each_call():
    config = {"scheduler": "cosine", "warmup_steps": 2}
    assert rates(6, **config) == rates(6, **config)


def test_a_constant_learning_rate_gives_the_bytes_of_the_plain_optimiser():
    model, plain = Line(), Line()
    run(model, OptimizerConfig(lr=1e-3), steps=7)
    optimizer = torch.optim.AdamW([plain.weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(7):
        optimizer.zero_grad()
        plain.train().loss(np.arange(2))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_([plain.weight], 1.0)
        optimizer.step()
    assert torch.equal(model.weight, plain.weight)


def test_dropout_is_a_function_of_the_seed_and_the_global_generator_stays():
    torch.manual_seed(1)
    expected = torch.rand(2)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(1)
        model = Line(dropout=0.5)
        run(model, steps=5, seed=seed)
        results.append(model.weight.tolist())
        assert torch.equal(torch.rand(2), expected)
    assert results[0] == results[1] != results[2]


def test_the_model_is_left_in_evaluation_mode_without_gradients():
    model = Line()
    model.eval()
    run(model)
    assert not model.training and model.weight.grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_at_its_step_and_changes_nothing_more(value):
    model, calls = Line(), []

    def loss(indices):
        calls.append(1)
        return model.loss(indices)[0] * (value if len(calls) == 3 else 1.0), 1

    with pytest.raises(TrainingError, match="at step 2"):
        run(model, OptimizerConfig(name="sgd", lr=0.1, clip=None), steps=5, loss=loss)
    assert model.weight.isfinite().all() and len(calls) == 3
    assert not model.training and model.weight.grad is None


def test_progress_is_told_of_each_step():
    seen = []
    curve = run(Line(), steps=3, progress=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(curve.losses)) and len(seen) == 3
