"""Micro-batches: the gradient of the whole minibatch, and the activations of a few of its rows."""

import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from components.config import (
    DpoObjective,
    MultiObjective,
    OptimizerConfig,
    PdpoObjective,
    PersonalModules,
    PpoConfig,
)
from components.config.local_objectives import ExclusionConfig, OfflinePpoObjective, SftObjective
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.learning.loop import Loss, RowLosses, Training, split_rows, train
from components.learning.meta_learning import MetaLoss, adapt
from components.learning.multi_objective_ppo import MultiObjectivePpo
from components.learning.pair_scores import pair_logprobs
from components.learning.selector_training import train_selector
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.reward_functions import score_length, score_vowels
from tests.support.training import build_loss, train_pairs

SGD = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=None)
SIZES = [1, 2, 3]
"""Micro-batches of a minibatch of 5 rows; those of 2 and 3 rows are unequal."""


DPO = DpoObjective()
PDPO = PdpoObjective(reward_weight=[0.8, 0.8], scale_momentum=0.5, max_scale=1e9, exclusion=ExclusionConfig())


def settings(micro_batch_size=None, batch_size=5, optimizer=SGD, steps=1):
    return Training(steps, batch_size, optimizer, seed=3, micro_batch_size=micro_batch_size)


def assert_same_change(initial, first, second):
    """Two adapters that differ from the initial one by the same gradient, which is not 0."""
    assert any(not torch.allclose(first[name], initial[name], atol=1e-5) for name in initial)
    for name in initial:
        scale = (first[name] - initial[name]).abs().max()
        assert torch.allclose(first[name], second[name], rtol=0, atol=float(1e-3 * scale + 1e-6)), name


@pytest.fixture(scope="module")
def resident(debug):
    """The tiny policy with personal modules, without dropout."""
    torch.set_num_threads(1)
    lora = debug.policy.lora.model_copy(update={"dropout": 0.0})
    modules = PersonalModules(
        bottleneck=BottleneckConfig(width=4, dropout=0.0), reward=RewardHeadConfig(width=3, dropout=0.0)
    )
    config = debug.policy.model_copy(update={"max_new_tokens": 20, "lora": lora})
    return ResidentPolicy(config, "cpu", modules)


@pytest.fixture
def adapter(resident):
    """A random adapter, which is loaded into the model, with personal modules that change its output."""
    generator = torch.Generator().manual_seed(0)
    modules = resident.personal.initial_modules(0)
    resident.personal.load(
        {
            name: value + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in modules.items()
        }
    )
    tensors = random_tensors(resident.slot, seed=1, scale=0.1)
    resident.slot.load(tensors)
    return tensors


@pytest.fixture(scope="module")
def reference(resident):
    return pair_logprobs(resident, PAIRS, 4, reference=True)


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


class SavedTensors:
    """Counts the values that autograd stores for the backward pass.

    Attributes:
        stored: values that are stored now.
        peak: the most values that were stored at a time.
    """

    def __init__(self):
        self.stored = 0
        self.peak = 0

    @contextmanager
    def counted(self):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield self

    def _pack(self, tensor):
        box = _Box(tensor)
        self.stored += tensor.numel()
        self.peak = max(self.peak, self.stored)
        weakref.finalize(box, self._forget, tensor.numel())
        return box

    def _unpack(self, box):
        return box.tensor

    def _forget(self, values):
        self.stored -= values


class _Box:
    def __init__(self, tensor):
        self.tensor = tensor


# --- the loop


def test_micro_batches_are_consecutive_and_the_last_one_may_be_smaller():
    parts = split_rows(np.array([4, 1, 3, 0, 2]), 2)
    assert [part.tolist() for part in parts] == [[4, 1], [3, 0], [2]]


def test_without_a_size_the_minibatch_is_one_micro_batch():
    (part,) = split_rows(np.arange(5), None)
    assert part.tolist() == [0, 1, 2, 3, 4]


class Products(Loss):
    """A loss with a gradient of its own for each row, and its model."""

    rows = torch.tensor([[1.0, 0, 0, 2], [0, 3, 0, 0], [5, 0, 0, 0], [0, 0, 7, 1], [1, 1, 1, 1]])

    def __init__(self):
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.ones(4))
        self.calls = []
        self.begun = []

    def __call__(self, rows):
        self.calls.append(rows.tolist())
        return RowLosses(self.rows[rows] @ self.model.weight, rows, len(rows))

    def begin_minibatch(self, micro_batches):
        self.begun.append((len(self.calls), [part.tolist() for part in micro_batches]))

    def train(self, minibatches, training):
        return train(self.model, [self.model.weight], minibatches, self, training)


@pytest.mark.parametrize("size", SIZES)
def test_unequal_micro_batches_are_weighted_by_their_rows(size):
    loss = Products()
    minibatches = [np.array([0, 1, 2, 3, 4]), np.array([3, 0, 1])]
    metrics = loss.train(minibatches, settings(size, optimizer=SGD.model_copy(update={"accumulation": 2})))
    expected = (Products.rows.mean(0) + Products.rows[[3, 0, 1]].mean(0)) / 2
    assert torch.allclose(loss.model.weight, 1 - expected)
    assert metrics.losses == pytest.approx([float(expected.sum())])
    assert metrics.tokens == 8
    assert max(map(len, loss.calls)) == size


def test_the_parts_of_a_micro_batch_are_computed_concurrently(two_threads):
    loss = Products()
    loss.concurrent = True
    loss.train([np.arange(5)], settings(3))
    assert torch.allclose(loss.model.weight, 1 - Products.rows.mean(0))
    assert sorted(loss.calls) == [[0, 1], [2], [3], [4]]


def test_a_minibatch_begins_with_its_micro_batches_before_the_first_of_them():
    loss = Products()
    loss.train([np.arange(5), np.arange(2)], settings(2))
    assert loss.begun == [(0, [[0, 1], [2, 3], [4]]), (3, [[0, 1]])]


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


def test_the_activations_of_a_micro_batch_are_freed_before_the_next_one(tiny_selector, random_adapter):
    initial = random_adapter(3)
    peaks = {}
    for size in (None, 1, 2, 4):
        saved = SavedTensors()
        with saved.counted():
            train_selector(tiny_selector, PAIRS, initial, settings(size, batch_size=8))
        assert saved.stored == 0
        peaks[size] = saved.peak
    assert peaks[1] < 0.3 * peaks[None]
    assert peaks[2] < 0.4 * peaks[None]
    assert peaks[4] < 0.7 * peaks[None]
    assert peaks[1] < peaks[2] < peaks[4]


# --- policies


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("objective", [SftObjective(), DPO], ids=["sft", "dpo"])
def test_a_step_has_the_gradient_of_the_whole_minibatch(resident, adapter, reference, objective, size):
    whole = train_pairs(resident, PAIRS, adapter, objective, settings(), reference=reference)
    with recorded_rows(resident.model) as rows:
        parts = train_pairs(resident, PAIRS, adapter, objective, settings(size), reference=reference)
    assert max(rows) == size
    assert_same_change(adapter, whole.adapter, parts.adapter)


@pytest.mark.parametrize("size", SIZES)
def test_the_proximal_term_is_added_once(resident, adapter, reference, size):
    training = replace(settings(steps=2), proximal_weight=0.3)
    whole = train_pairs(resident, PAIRS, adapter, DPO, training, reference=reference)
    divided = replace(training, micro_batch_size=size)
    parts = train_pairs(resident, PAIRS, adapter, DPO, divided, reference=reference)
    assert_same_change(adapter, whole.adapter, parts.adapter)


@pytest.fixture(scope="module")
def contradicted(reference):
    """A reference that contradicts one pair by far."""
    changed = reference.copy()
    changed[2, 0] += 300
    return changed


@pytest.mark.parametrize("group", ["personal", "shared", "all"])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_pdpo_has_the_scale_and_the_exclusions_of_the_whole_minibatch(
    resident, adapter, contradicted, group, size
):
    """Eq. 7's scale and the excluded pairs are statistics of the minibatch."""
    modules = resident.personal.read()
    training = settings(batch_size=6)
    whole = train_pairs(resident, PAIRS, None, PDPO, training, group, reference=contradicted)
    expected = {**resident.personal.read(), **resident.slot.read()}
    resident.personal.load(modules)
    divided = replace(training, micro_batch_size=size)
    parts = train_pairs(resident, PAIRS, adapter, PDPO, divided, group, reference=contradicted)
    assert_same_change({**modules, **adapter}, expected, {**resident.personal.read(), **resident.slot.read()})
    assert whole.metrics["excluded"] == parts.metrics["excluded"] > 0
    for name in ("scale", "dpo", "loss"):
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)


def test_the_margins_of_a_minibatch_are_measured_with_the_dropout_of_its_losses(debug, reference):
    modules = PersonalModules(
        bottleneck=BottleneckConfig(width=4, dropout=0.5), reward=RewardHeadConfig(width=3, dropout=0.5)
    )
    resident = ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 20}), "cpu", modules)
    resident.slot.load(random_tensors(resident.slot, seed=1, scale=0.1))
    loss = build_loss(resident, PAIRS, PDPO, reference=reference)
    margins = []
    compute = loss._margins

    def record(indices):
        margins.append(compute(indices))
        return margins[-1]

    loss._margins = record
    resident.model.train()
    micro_batches = [np.array([0, 1]), np.array([2, 3]), np.array([4])]
    with torch.no_grad():
        loss.begin_minibatch(micro_batches)
        for part in micro_batches:
            loss(part)
    resident.model.eval()
    assert len(margins) == 6
    for measured, used in zip(margins[:3], margins[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(measured, used, strict=True))


def test_pairs_that_do_not_depend_on_each_other_are_computed_once(resident, adapter, reference):
    """Plain DPO with personal modules needs no statistics of the minibatch."""
    plain = PersonalModules(bottleneck=BottleneckConfig(width=4, dropout=0.0), reward=None)
    model = ResidentPolicy(resident.policy.config, "cpu", plain)
    model.personal.load(model.personal.initial_modules(0))
    model.slot.load(adapter)
    whole = train_pairs(model, PAIRS, None, DPO, settings(), reference=reference)
    with recorded_rows(model.model) as rows:
        parts = train_pairs(model, PAIRS, adapter, DPO, settings(2), reference=reference)
    assert sum(rows) == 5
    for name in ("dpo", "loss"):
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)


# --- PPO

SCORES = np.array([[1.0, 0.0], [3.0, -1.0], [0.5, 0.5], [2.0, 0.0], [-1.0, -3.0], [0.0, 4.0]])


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
def test_a_meta_step_has_the_gradients_of_whole_minibatches(resident, adapter, reference, size):
    meta_batches = [[np.array([0, 1, 2]), np.array([3, 4]), np.array([5, 1, 0])], [np.arange(4)]]
    parameters = resident.slot.parameters
    trained, tokens = {}, {}
    for micro_batch_size in (None, size):
        resident.slot.load(adapter)
        dpo = build_loss(resident, PAIRS, DPO, reference=reference)
        loss = MetaLoss(dpo, meta_batches, parameters, 0.5, micro_batch_size)
        with recorded_rows(resident.model) as rows:
            figures = train(
                resident.model, parameters, loss.outer_minibatches, loss, settings(micro_batch_size)
            )
        trained[micro_batch_size] = resident.slot.read()
        tokens[micro_batch_size] = loss.metrics(figures)["tokens"]
        assert sum(rows) == 12
    assert max(rows) == size
    assert_same_change(adapter, trained[None], trained[size])
    assert tokens[None] == tokens[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("objective", [DPO, OfflinePpoObjective()], ids=["dpo", "ppo"])
def test_an_adaptation_has_the_gradients_of_whole_minibatches(resident, adapter, objective, size):
    adapted = {}
    for micro_batch_size in (None, size):
        resident.slot.load(adapter)
        loss = build_loss(resident, PAIRS, objective, scores=SCORES)
        parameters = resident.slot.parameters
        adapt(resident.model, parameters, [np.arange(5)], loss, 0.5, 0, micro_batch_size)
        adapted[micro_batch_size] = resident.slot.read()
    assert_same_change(adapter, adapted[None], adapted[size])


# --- several objectives

REWARDS = {"long": score_length, "vowels": score_vowels}
PROMPTS = ["one", "a second question", "and the third of them", "four", "the fifth prompt here"]


@pytest.fixture
def objective():
    return MultiObjective(
        objectives={name: [name] for name in REWARDS},
        ppo=PpoConfig(target_kl=None, minibatch=5, epochs=2),
        beta=0.01,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", [None, {"long": 0.3, "vowels": 0.7}])
def test_gradients_of_objectives_are_weighted_by_tokens(resident, adapter, objective, size, weights):
    objective = objective.model_copy(update={"weights": weights})
    undivided = MultiObjectivePpo(resident, REWARDS, objective, settings())
    divided = MultiObjectivePpo(resident, REWARDS, objective, settings(size))
    sampled = undivided.sample(PROMPTS, seed=4)
    resident.slot.load(random_tensors(resident.slot, seed=2, scale=0.1))
    indices = np.array([3, 1, 4, 0, 2])
    whole = undivided.gradients(*sampled, indices)
    with recorded_rows(resident.model) as rows:
        parts = divided.gradients(*sampled, indices)
    assert max(rows) == size
    assert torch.allclose(whole.gradients, parts.gradients, atol=float(1e-4 * whole.gradients.abs().max()))
    assert whole.gradients.abs().max() > 0
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-6)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-4)
    assert torch.allclose(whole.states, parts.states, atol=1e-4)


def test_the_multi_objective_trainer_takes_its_minibatches_in_micro_batches(resident, adapter, objective):
    trained = {}
    for size in (None, 2):
        resident.slot.load(adapter)
        MultiObjectivePpo(resident, REWARDS, objective, settings(size)).train(PROMPTS)
        trained[size] = resident.slot.read()
    assert_same_change(adapter, trained[None], trained[2])
