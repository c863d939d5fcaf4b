"""Micro-batches: the gradient of the whole minibatch, and the activations of a few of its rows."""

import weakref
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from components.config import DpoObjective, OptimizerConfig, PdpoObjective
from components.config.local_objectives import ExclusionConfig, OfflinePpoObjective, SftObjective
from components.learning.loop import Training, train
from components.learning.meta_learning import MetaLoss, adapt
from components.learning.selector_training import train_selector
from components.learning.wrapped_losses import ProximalLoss
from tests.support.adapters import random_tensors
from tests.support.multi_objective import build_ppo
from tests.support.pairs import PAIRS, SCORES
from tests.support.training import build_loss, open_personal_policy, train_pairs

SGD = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=None)
SIZES = [1, 2, 3]
"""Micro-batches of a minibatch of 5 rows; those of 2 and 3 rows are unequal."""
DPO = DpoObjective()
PDPO = PdpoObjective(reward_weight=[0.8, 0.8], scale_momentum=0.5, max_scale=1e9, exclusion=ExclusionConfig())


def settings(micro_batch_size=None, batch_size=5, optimizer=SGD, steps=1):
    return Training(steps, batch_size, optimizer, 3, micro_batch_size)


def proximal(loss, local):
    return ProximalLoss(loss, list(local.parameters.values()), 0.3)


def assert_same_change(initial, first, second):
    """Two sets of tensors that differ from the initial one by the same gradient, which is not 0."""
    assert any(not torch.allclose(first[name], initial[name], atol=1e-5) for name in initial)
    for name in initial:
        scale = (first[name] - initial[name]).abs().max()
        assert torch.allclose(first[name], second[name], rtol=0, atol=float(1e-3 * scale + 1e-6)), name


@contextmanager
def recorded_rows(model):
    """Rows of each forward pass of the backbone."""
    rows = []
    hook = model.get_base_model().base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


# --- selectors


def test_a_selectors_step_has_the_gradient_of_the_whole_minibatch(tiny_selector, random_adapter):
    initial = random_adapter(3)
    whole, metrics = train_selector(tiny_selector, PAIRS, initial, settings())
    for size in SIZES:
        with recorded_rows(tiny_selector.model) as rows:
            adapter, same = train_selector(tiny_selector, PAIRS, initial, settings(size))
        assert max(rows) == size
        assert sum(rows) == 5
        assert_same_change(initial, whole, adapter)
        assert same.losses == pytest.approx(metrics.losses)
        assert same.tokens == metrics.tokens


def peak_of_stored_values(compute):
    """The most values that autograd stores for the backward pass at a time; none is left at the end."""
    stored = [0]

    def forget(values):
        stored.append(stored[-1] - values)

    def pack(tensor):
        def unpack():
            return tensor

        stored.append(stored[-1] + tensor.numel())
        weakref.finalize(unpack, forget, tensor.numel())
        return unpack

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
        compute()
    assert stored[-1] == 0
    return max(stored)


def test_the_activations_of_a_micro_batch_are_freed_before_the_next_one(tiny_selector, random_adapter):
    whole, one, two, four = (
        peak_of_stored_values(
            partial(train_selector, tiny_selector, PAIRS, random_adapter(3), settings(size, batch_size=8))
        )
        for size in (None, 1, 2, 4)
    )
    assert one < 0.3 * whole
    assert two < 0.4 * whole
    assert four < 0.7 * whole
    assert one < two < four


# --- policies


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("objective", "steps", "wrap"),
    [(SftObjective(), 1, None), (DPO, 1, None), (DPO, 2, proximal)],
    ids=["sft", "dpo", "proximal"],
)
def test_steps_have_the_gradient_of_the_whole_minibatch(
    personal_policy, adapter, reference, objective, steps, wrap, size
):
    """The proximal term is added once."""
    options = {"reference": reference, "wrap": wrap}
    whole = train_pairs(personal_policy, PAIRS, adapter, objective, settings(steps=steps), **options)
    with recorded_rows(personal_policy.model) as rows:
        parts = train_pairs(
            personal_policy, PAIRS, adapter, objective, settings(size, steps=steps), **options
        )
    assert max(rows) == size
    assert_same_change(adapter, whole.adapter, parts.adapter)


@pytest.mark.parametrize("group", ["personal", "shared", "all"])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_pdpo_has_the_scale_and_the_exclusions_of_the_whole_minibatch(
    personal_policy, adapter, contradicted, group, size
):
    """Eq. 7's scale and the excluded pairs are statistics of the minibatch."""
    initial = personal_policy.personal.read() | adapter
    trained, metrics = [], []
    for micro_batch_size in (None, size):
        personal_policy.personal.load({name: initial[name] for name in personal_policy.personal.names})
        training = settings(micro_batch_size, batch_size=6)
        reference = contradicted(300)
        result = train_pairs(personal_policy, PAIRS, adapter, PDPO, training, group, reference=reference)
        trained.append(personal_policy.personal.read() | personal_policy.slot.read())
        metrics.append(result.metrics)
    assert_same_change(initial, *trained)
    whole, parts = metrics
    assert whole["excluded"] == parts["excluded"] > 0
    for name in ("scale", "dpo", "loss"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5)


def test_the_margins_of_a_minibatch_are_measured_with_the_dropout_of_its_losses(debug, adapter, reference):
    personal_policy = open_personal_policy(debug.policy, dropout=0.5)
    personal_policy.slot.load(adapter)
    loss = build_loss(personal_policy, PAIRS, PDPO, reference=reference)
    margins = []
    compute = loss._margins

    def record(indices):
        margins.append(compute(indices))
        return margins[-1]

    loss._margins = record
    personal_policy.model.train()
    micro_batches = [np.array([0, 1]), np.array([2, 3]), np.array([4])]
    with torch.no_grad():
        loss.begin_minibatch(micro_batches)
        for part in micro_batches:
            loss(part)
    personal_policy.model.eval()
    assert len(margins) == 6
    for measured, used in zip(margins[:3], margins[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(measured, used, strict=True))


def test_pairs_that_do_not_depend_on_each_other_are_computed_once(personal_policy, adapter, reference):
    """Plain DPO needs no statistics of the minibatch."""
    whole = train_pairs(personal_policy, PAIRS, adapter, DPO, settings(), reference=reference)
    with recorded_rows(personal_policy.model) as rows:
        parts = train_pairs(personal_policy, PAIRS, adapter, DPO, settings(2), reference=reference)
    assert sum(rows) == 5
    for name in ("dpo", "loss"):
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)


# --- PPO


@pytest.mark.parametrize("size", SIZES)
def test_ppo_has_the_gradient_and_the_distance_of_the_whole_minibatch(resident, adapter, size):
    trained, distances = {}, {}
    minibatches = [np.arange(5), np.arange(3)]
    for micro_batch_size in (None, size):
        resident.slot.load(adapter)
        loss = build_loss(resident, PAIRS, OfflinePpoObjective(target_kl=1e9), scores=SCORES)
        resident.slot.load(random_tensors(resident.slot, seed=2, scale=0.1))
        train(resident.model, resident.slot.parameters, minibatches, loss, settings(micro_batch_size))
        trained[micro_batch_size] = resident.slot.read()
        distances[micro_batch_size] = loss.distances
    assert_same_change(adapter, trained[None], trained[size])
    assert len(distances[size]) == 2
    assert distances[size] == pytest.approx(distances[None], rel=1e-4)


# --- meta-steps


@pytest.mark.parametrize("size", SIZES)
def test_a_meta_step_has_the_gradients_of_whole_minibatches(personal_policy, adapter, reference, size):
    meta_batches = [[np.array([0, 1, 2]), np.array([3, 4]), np.array([5, 1, 0])], [np.arange(4)]]
    parameters = personal_policy.slot.parameters
    trained, tokens = {}, {}
    for micro_batch_size in (None, size):
        personal_policy.slot.load(adapter)
        dpo = build_loss(personal_policy, PAIRS, DPO, reference=reference)
        loss = MetaLoss(dpo, meta_batches, parameters, 0.5, micro_batch_size)
        with recorded_rows(personal_policy.model) as rows:
            figures = train(
                personal_policy.model, parameters, loss.outer_minibatches, loss, settings(micro_batch_size)
            )
        trained[micro_batch_size] = personal_policy.slot.read()
        tokens[micro_batch_size] = loss.metrics(figures)["tokens"]
        assert sum(rows) == 12
    assert max(rows) == size
    assert_same_change(adapter, trained[None], trained[size])
    assert tokens[None] == tokens[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("objective", [DPO, OfflinePpoObjective()], ids=["dpo", "ppo"])
def test_an_adaptation_has_the_gradients_of_whole_minibatches(personal_policy, adapter, objective, size):
    adapted = {}
    for micro_batch_size in (None, size):
        personal_policy.slot.load(adapter)
        loss = build_loss(personal_policy, PAIRS, objective, scores=SCORES)
        parameters = personal_policy.slot.parameters
        adapt(personal_policy.model, parameters, [np.arange(5)], loss, 0.5, 0, micro_batch_size)
        adapted[micro_batch_size] = personal_policy.slot.read()
    assert_same_change(adapter, adapted[None], adapted[size])


# --- several objectives

PROMPTS = ["one", "a second question", "and the third of them", "four", "the fifth prompt here"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("estimator", "weights"),
    [
        ("gae", None),
        ("gae", {"long": 0.3, "vowels": 0.7}),
        ({"kind": "rloo", "samples": 2}, None),
        ({"kind": "grpo", "samples": 2}, None),
    ],
)
def test_gradients_of_objectives_are_weighted_by_tokens(short_policy, size, estimator, weights):
    options = {"weights": weights, "estimator": estimator}
    undivided = build_ppo(short_policy, training=settings(), **options)
    divided = build_ppo(short_policy, training=settings(size), **options)
    sampled = undivided.sample(PROMPTS, seed=4)
    short_policy.slot.load(random_tensors(short_policy.slot, seed=2, scale=0.1))
    indices = np.array([3, 1, 4, 0, 2])
    whole = undivided.gradients(*sampled, indices)
    with recorded_rows(short_policy.model) as rows:
        parts = divided.gradients(*sampled, indices)
    assert max(rows) == size
    assert torch.allclose(whole.gradients, parts.gradients, atol=float(1e-4 * whole.gradients.abs().max()))
    assert whole.gradients.abs().max() > 0
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-6)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-4)
    assert torch.allclose(whole.states, parts.states, atol=1e-4)


def test_the_multi_objective_trainer_takes_its_minibatches_in_micro_batches(short_policy, adapter):
    trained = {}
    for size in (None, 2):
        short_policy.slot.load(adapter)
        build_ppo(short_policy, training=settings(size), minibatch=5, epochs=2).train(PROMPTS)
        trained[size] = short_policy.slot.read()
    assert_same_change(adapter, trained[None], trained[2])
