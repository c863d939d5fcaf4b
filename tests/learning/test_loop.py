"""The training loop: drawn rows, precision, schedule, gradient rules, and the state that it leaves behind."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from components.config import OptimizerConfig
from components.learning.loop import (
    Loss,
    RowLosses,
    Training,
    TrainingError,
    draw_minibatches,
    train,
)
from components.learning.wrapped_losses import ProximalLoss, WrappedLoss

SGD = OptimizerConfig(name="sgd", lr=0.5, clip=None)


def draw(rows, batch_size, count, seed=0):
    return list(draw_minibatches(rows, batch_size, count, seed))


# --- minibatches


def test_minibatches_contain_every_row_once_per_pass_in_an_order_of_its_own():
    rows = np.concatenate(draw(7, 3, 7))
    assert len(rows) == 21
    passes = [rows[start : start + 7].tolist() for start in (0, 7, 14)]
    assert [sorted(order) for order in passes] == [list(range(7))] * 3
    assert passes[0] != passes[1]


def test_a_minibatch_is_full_even_if_it_is_larger_than_the_data():
    minibatches = draw(3, 8, 2)
    assert [len(minibatch) for minibatch in minibatches] == [8, 8]
    assert set(Counter(np.concatenate(minibatches)).values()) <= {5, 6}


def test_minibatches_are_a_function_of_the_seed():
    first, again, different = (np.concatenate(draw(50, 5, 4, seed)) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != different).any()


def test_a_client_without_rows_is_an_error_rather_than_an_endless_loop():
    with pytest.raises(TrainingError, match="no rows"):
        draw(0, 4, 1)


# --- steps


class ModelLoss(Loss):
    """The losses of a model's own function, by the rows' indices."""

    def __init__(self, model):
        self.model = model

    def __call__(self, rows):
        values = self.model.loss(rows)
        return RowLosses(values, 10 * len(rows))


class SquaredNorm(torch.nn.Module):
    """The squared norm of four weights, with dropout on request."""

    def __init__(self, initial: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), initial))
        self.dropout = torch.nn.Dropout(dropout)

    def loss(self, indices):
        assert self.training
        assert torch.is_grad_enabled()
        return self.dropout(self.weight).pow(2).sum().expand(len(indices))


class WeightSum(SquaredNorm):
    """A loss with a gradient of 1 in each weight, so a step of SGD is the learning rate."""

    def loss(self, indices):
        return self.weight.sum().expand(len(indices))


def run(model, config=SGD, steps=1, seed=0, loss=None, parameter_groups=(), **settings):
    training = Training(steps, 2, config, seed, **settings)
    minibatches = training.draw_minibatches(4)
    return train(model, [model.weight], minibatches, loss or ModelLoss(model), training, parameter_groups)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "sgd"},
        {"name": "rmsprop", "betas": [0.9, 0.75]},  # average square (1 - 0.75) 2^2 = 1
    ],
)
def test_a_step_is_that_of_the_optimizer_for_a_gradient_of_2(config):
    model = SquaredNorm()
    metrics = run(model, OptimizerConfig(lr=0.1, clip=None, **config))
    assert model.weight.tolist() == pytest.approx([0.8] * 4)
    assert metrics.losses == [4.0]
    assert metrics.tokens == 20
    assert metrics.gradient_norms == pytest.approx([4.0])


def test_rmsprop_with_weight_decay_is_refused():
    with pytest.raises(ValidationError, match=r"weight_decay is 0\.01, but rmsprop has no decoupled"):
        OptimizerConfig(name="rmsprop", weight_decay=0.01)


def test_the_gradient_is_clipped_to_its_norm_and_reported_before_clipping():
    model = SquaredNorm()
    metrics = run(model, OptimizerConfig(name="sgd", lr=1.0, clip=1.0))
    assert metrics.gradient_norms == pytest.approx([4.0])
    assert model.weight.tolist() == pytest.approx([0.5] * 4, abs=1e-5)


@pytest.mark.parametrize(("accumulates", "steps"), [(True, 2), (False, 6)])
def test_gradients_of_accumulated_minibatches_are_averaged_for_a_step(accumulates, steps):
    """A loss that does not accumulate takes a step of each minibatch."""
    model = WeightSum(initial=0.0)
    loss = ModelLoss(model)
    loss.accumulates = accumulates
    metrics = run(model, SGD.model_copy(update={"accumulation": 3}), steps=2, loss=loss)
    assert model.weight.tolist() == pytest.approx([-0.5 * steps] * 4)
    assert len(metrics.losses) == steps
    assert metrics.tokens == 120


class RowProducts(SquaredNorm):
    """A loss with a gradient of its own for each row, which records the threads that compute it."""

    rows = torch.tensor([[1.0, 0, 0, 2], [0, 3, 0, 0], [5, 0, 0, 0], [0, 0, 7, 1]])

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.calls: list[tuple[int, int, list[int]]] = []

    def loss(self, indices):
        self.calls.append((threading.get_ident(), torch.get_num_threads(), indices.tolist()))
        return self.rows[indices] @ self.weight


@pytest.mark.parametrize(
    ("size", "concurrent", "calls"),
    [
        (None, False, [[0, 1, 2, 3, 0], [3, 1]]),
        (None, True, [[0, 1, 2], [3, 0], [3], [1]]),
        (3, False, [[0, 1, 2], [3, 0], [3, 1]]),
        (3, True, [[0, 1], [2], [3], [0], [3], [1]]),
    ],
)
def test_micro_batches_and_halves_of_them_in_two_threads_have_the_gradient_of_the_minibatches(
    two_threads, size, concurrent, calls
):
    model = RowProducts()
    loss = ModelLoss(model)
    loss.concurrent = concurrent
    training = Training(1, 5, SGD.model_copy(update={"accumulation": 2}), 0, size)
    metrics = train(model, [model.weight], [np.array([0, 1, 2, 3, 0]), np.array([3, 1])], loss, training)
    expected = (model.rows[[0, 1, 2, 3, 0]].mean(0) + model.rows[[3, 1]].mean(0)) / 2
    assert torch.allclose(model.weight, 1 - 0.5 * expected)
    assert metrics.losses == pytest.approx([float(expected.sum())])
    assert metrics.tokens == 70
    assert sorted(rows for _, _, rows in model.calls) == sorted(calls)
    in_this_thread = {(thread == threading.get_ident(), share) for thread, share, _ in model.calls}
    assert in_this_thread == ({(False, 1)} if concurrent else {(True, 2)})


def test_a_minibatch_begins_with_its_micro_batches_before_the_first_of_them():
    model = RowProducts()
    loss = ModelLoss(model)
    begun = []
    loss.begin_minibatch = lambda parts: begun.append((len(model.calls), [part.tolist() for part in parts]))
    training = Training(2, 3, SGD, 0, micro_batch_size=2)
    train(model, [model.weight], [np.arange(3), np.arange(2)], loss, training)
    assert begun == [(0, [[0, 1], [2]]), (2, [[0, 1]])]


def test_a_frozen_parameter_and_one_that_the_loss_does_not_use_keep_their_values():
    model = SquaredNorm()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(2))
    parameters = [frozen, model.weight, unused]
    train(model, parameters, draw_minibatches(4, 2, 1, 0), ModelLoss(model), Training(1, 2, SGD, seed=0))
    assert model.weight.tolist() == pytest.approx([0.0] * 4)
    assert frozen.tolist() == unused.tolist() == [1.0, 1.0]


def test_a_model_with_dropout_is_computed_in_one_thread(two_threads):
    """A process has one generator for all its threads."""
    model = RowProducts(dropout=0.1)
    loss = ModelLoss(model)
    loss.concurrent = True
    run(model, loss=loss)
    assert [call[:2] for call in model.calls] == [(threading.get_ident(), 2)]


def test_each_training_gives_the_bytes_of_a_new_optimizer_with_the_options_of_the_recipe():
    model = SquaredNorm()
    plain = SquaredNorm()
    for _ in range(2):
        run(model, OptimizerConfig(lr=1e-3, betas=[0.8, 0.7], weight_decay=0.1), steps=4)
        optimizer = torch.optim.AdamW([plain.weight], lr=1e-3, betas=(0.8, 0.7), weight_decay=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            plain.train().loss(np.arange(2)).mean().backward()
            torch.nn.utils.clip_grad_norm_([plain.weight], 1.0)
            optimizer.step()
    assert torch.equal(model.weight, plain.weight)


# --- the schedule


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.5] * 6),
        ({"warmup_steps": 2}, [0, 0.25, 0.5, 0.5, 0.5, 0.5]),
        ({"warmup_steps": 9}, [0, 0.25, 0.5]),  # the full rate is reached in the last step
        ({"scheduler": "linear"}, [0.5, 0.5 * 5 / 6, 0.5 * 4 / 6, 0.25, 0.5 * 2 / 6, 0.5 / 6]),
        ({"scheduler": "linear", "warmup_steps": 2}, [0, 0.25, 0.5, 0.375, 0.25, 0.125]),
        ({"scheduler": "cosine"}, [0.5, 0.25 * (1 + 0.75**0.5), 0.375, 0.25, 0.125, 0.25 * (1 - 0.75**0.5)]),
        ({"scheduler": "cosine", "warmup_steps": 4}, [0, 0.125, 0.25, 0.375, 0.5, 0.25]),
        ({"scheduler": "cosine", "warmup_steps": 5}, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_the_learning_rate_rises_in_the_warm_up_and_then_follows_its_schedule(config, expected):
    """The rate of a step is measured as the distance that the weight moves in it."""
    model = WeightSum(initial=0.0)
    positions = [0.0]
    config = OptimizerConfig(name="sgd", lr=0.5, clip=None, **config)
    run(model, config, len(expected), progress=lambda *_: positions.append(-model.weight[0].item()))
    assert np.diff(positions).tolist() == pytest.approx(expected, abs=1e-6)


# --- the state of the process and of the model


def test_dropout_is_a_function_of_the_seed_and_the_global_generator_keeps_its_state():
    torch.manual_seed(1)
    expected = torch.rand(2)
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(1)
        model = SquaredNorm(dropout=0.5)
        run(model, steps=5, seed=seed)
        weights.append(model.weight.tolist())
        assert torch.equal(torch.rand(2), expected)
    assert weights[0] == weights[1]
    assert weights[1] != weights[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_training_at_its_step(value):
    model = SquaredNorm()
    calls = []

    class Diverging(ModelLoss):
        def __call__(self, rows):
            calls.append(1)
            losses = super().__call__(rows)
            return losses._replace(values=losses.values * (value if len(calls) == 3 else 1.0))

    with pytest.raises(TrainingError, match="at step 2"):
        run(model, OptimizerConfig(name="sgd", lr=0.1, clip=None), steps=5, loss=Diverging(model))
    assert model.weight.isfinite().all()
    assert len(calls) == 3
    assert not model.training
    assert model.weight.grad is None


# --- callbacks


def test_progress_is_reported_after_each_step():
    reported = []
    config = OptimizerConfig(name="sgd", lr=0.1, scheduler="linear", clip=None)
    metrics = run(SquaredNorm(), config, steps=3, progress=reported.append)
    rates = [0.1, 0.2 / 3, 0.1 / 3]
    figures = zip(range(3), metrics.losses, metrics.gradient_norms, map(pytest.approx, rates), strict=True)
    assert reported == list(figures)


def test_a_training_ends_after_the_step_whose_progress_returns_true():
    model = WeightSum(initial=0.0)
    metrics = run(model, steps=5, progress=lambda figures: figures.step == 1)
    assert len(metrics.losses) == 2
    assert model.weight[0].item() == -1.0


def test_before_step_is_called_with_the_gradient_of_the_step_and_the_weights_before_it():
    model = WeightSum(initial=0.0)
    calls = []
    loss = ModelLoss(model)
    loss.before_step = lambda: calls.append((model.weight[0].item(), model.weight.grad[0].item()))
    run(model, steps=2, loss=loss)
    assert calls == [(0.0, 1.0), (-0.5, 1.0)]


class Stopping(ModelLoss):
    """Ends the training once the weight is below a limit."""

    limit = -0.8

    def stops(self):
        return self.model.weight[0].item() < self.limit


def test_a_training_ends_before_a_step_when_its_loss_says_so():
    model = WeightSum(initial=0.0)
    metrics = run(model, steps=5, loss=Stopping(model))
    assert len(metrics.losses) == 2
    assert metrics.tokens == 60  # the third gradient was computed, and no step taken
    assert model.weight[0].item() == -1.0


def test_a_loss_around_another_can_change_the_gradient_before_it_is_clipped():
    model = WeightSum(initial=0.0)
    norms = []

    class Doubling(WrappedLoss):
        def before_step(self):
            super().before_step()
            model.weight.grad *= 2
            norms.append(model.weight.grad.norm().item())

    metrics = run(model, steps=5, loss=Doubling(Stopping(model)))
    assert model.weight[0].item() == -1.0
    assert len(metrics.losses) == 1
    assert metrics.gradient_norms == pytest.approx(norms[:1])


def test_the_first_step_is_taken_whatever_the_loss_says():
    model = WeightSum(initial=-1.0)
    assert len(run(model, steps=5, loss=Stopping(model)).losses) == 1


class TwoWeights(torch.nn.Module):
    """A loss with a gradient of 3 in one weight and of 4 in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.other = torch.nn.Parameter(torch.zeros(1))

    def loss(self, indices):
        return (3 * self.weight + 4 * self.other).expand(len(indices))


@pytest.mark.parametrize("belongs_to_the_loss", [False, True])
def test_the_proximal_term_holds_the_parameters_at_the_optimizers_rate_alone(belongs_to_the_loss):
    """Private modules, and those of the loss such as a critic, are not pulled to their initial values."""
    model = TwoWeights()
    parameter_groups = (([model.other], 0.1),)
    loss = ModelLoss(model)
    if belongs_to_the_loss:
        loss.parameter_groups, parameter_groups = parameter_groups, ()
    proximal = ProximalLoss(loss, [model.weight], 2.0)
    run(model, SGD, steps=2, loss=proximal, parameter_groups=parameter_groups)
    assert model.weight.item() == pytest.approx(-(1.5 + 0.5 * (3 - 2 * 1.5)))
    assert model.other.item() == pytest.approx(-0.8)


# --- the minibatches of a loss


def test_a_loss_draws_the_steps_of_its_part_of_the_round():
    training = Training(5, 2, SGD.model_copy(update={"accumulation": 2}), seed=4)
    drawn = Loss.draw_minibatches(None, 7, training, lambda steps: steps[:3], round_seed=9)
    expected = draw(7, 2, 6, seed=4)
    assert len(drawn) == 6
    assert all(np.array_equal(first, second) for first, second in zip(drawn, expected, strict=True))
