"""Gradient checkpointing: the same gradients from fewer stored values, on every path of a backbone."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from components.config import (
    DpoObjective,
    LoraConfig,
    MultiObjective,
    OptimizerConfig,
    PdpoObjective,
    PersonalModules,
    PpoConfig,
)
from components.config.local_objectives import OfflinePpoObjective, SftObjective
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.learning.loop import Training
from components.learning.multi_objective_ppo import MultiObjectivePpo
from components.learning.pair_scores import pair_logprobs
from components.learning.selector_training import score_pairs, train_selector
from components.models.adapters import AdapterSlot, attach_lora
from components.models.backbone import BackboneError
from components.models.checkpointing import checkpointed, enable_checkpointing
from components.models.resident import ResidentPolicy
from components.models.selector_model import Selector
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.random_models import build_random
from tests.support.recording import record_calls
from tests.support.reward_functions import score_length, score_vowels
from tests.support.training import train_pairs

SGD = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=None)
ONE_STEP = Training(1, 4, SGD, seed=3)
PDPO = PdpoObjective(reward_weight=[0.8, 0.8], scale_momentum=0.0, exclusion=None)
MODULES = PersonalModules(
    bottleneck=BottleneckConfig(width=4, dropout=0.1), reward=RewardHeadConfig(width=3, dropout=0.1)
)


@contextmanager
def saved_bytes():
    """Bytes of the tensors that autograd stores, counted once for each storage."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def configured(section, dropout=0.05):
    """A model's section without and with gradient checkpointing."""
    lora = section.lora.model_copy(update={"dropout": dropout})
    backbone = section.backbone.model_copy(update={"gradient_checkpointing": True})
    plain = section.model_copy(update={"lora": lora})
    return plain, plain.model_copy(update={"backbone": backbone})


@pytest.fixture(scope="module")
def selectors(debug):
    """The tiny selector without and with checkpointing, with dropout."""
    return [Selector(config, "cpu") for config in configured(debug.selector)]


@pytest.fixture(scope="module")
def policies(debug):
    """The tiny policy without and with checkpointing, with dropout and personal modules."""
    config = debug.policy.model_copy(update={"max_new_tokens": 20})
    return [ResidentPolicy(each, "cpu", MODULES) for each in configured(config)]


@pytest.fixture(scope="module")
def reference(policies):
    return pair_logprobs(policies[0], PAIRS, 4, reference=True)


def initial_adapter(models):
    return random_tensors(models[0].slot, seed=1, scale=0.2)


def compute_both(models, compute):
    """What is computed without and with checkpointing, and the share of values that the latter stores."""
    results, stored = [], []
    for model in models:
        if isinstance(model, ResidentPolicy):
            model.personal.load(models[0].personal.initial_modules(0))
        with saved_bytes() as sizes:
            results.append(compute(model))
        stored.append(sum(sizes.values()))
    return results, stored[1] / stored[0]


def assert_same(first, second, initial):
    assert any(not torch.allclose(first[name], initial[name], atol=1e-5) for name in initial)
    for name in initial:
        scale = float((first[name] - initial[name]).abs().max())
        assert torch.allclose(first[name], second[name], rtol=0, atol=1e-4 * scale + 1e-7), name


def is_checkpointed(model):
    """Flags of the model's layers."""
    return [layer.gradient_checkpointing for layer in model.get_base_model().base_model.layers]


# --- selectors


def test_a_selectors_gradients_are_the_same_and_fewer_values_are_stored(selectors):
    initial = initial_adapter(selectors)
    trained, share = compute_both(selectors, lambda one: train_selector(one, PAIRS, initial, ONE_STEP)[0])
    assert_same(*trained, initial)
    assert share < 0.6


def test_the_last_layer_of_a_selector_is_computed_at_one_position_and_not_checkpointed(
    selectors, monkeypatch
):
    assert is_checkpointed(selectors[0].model) == [False, False]
    assert is_checkpointed(selectors[1].model) == [True, False]
    layer = selectors[1].model.get_base_model().base_model.layers[-1]
    rows = record_calls(monkeypatch, layer.mlp, "forward", lambda states: states.shape[1])
    train_selector(selectors[1], PAIRS, initial_adapter(selectors), ONE_STEP)
    assert set(rows) == {1}


def test_scores_do_not_depend_on_checkpointing(selectors):
    adapter = initial_adapter(selectors)
    scores = []
    for selector in selectors:
        selector.slot.load(adapter)
        scores.append(score_pairs(selector, PAIRS))
    assert np.array_equal(*scores)


def test_the_parts_of_a_minibatch_are_checkpointed_concurrently(debug, two_threads):
    selectors = [Selector(config, "cpu") for config in configured(debug.selector, dropout=0.0)]
    initial = initial_adapter(selectors)
    trained = [train_selector(selector, PAIRS, initial, ONE_STEP)[0] for selector in selectors]
    assert_same(*trained, initial)


# --- policies


@pytest.mark.parametrize(
    "objective",
    [DpoObjective(), SftObjective(), OfflinePpoObjective(epochs=1, minibatch=6)],
    ids=["dpo on packed rows", "sft", "ppo on pairs, which has no dropout"],
)
def test_gradients_on_pairs_are_the_same_and_fewer_values_are_stored(policies, reference, objective):
    initial = initial_adapter(policies)
    scores = np.array([[1.0, 0.0]] * len(PAIRS))
    trained, share = compute_both(
        policies,
        lambda policy: (
            train_pairs(
                policy, PAIRS, initial, objective, ONE_STEP, reference=reference, scores=scores
            ).adapter
        ),
    )
    assert is_checkpointed(policies[1].model) == [True, True]
    assert_same(*trained, initial)
    assert share < 0.8


@pytest.mark.parametrize("group", ["personal", "shared"])
def test_steps_of_pdpo_are_the_same_in_micro_batches_too(policies, reference, group):
    adapter = initial_adapter(policies)
    training = Training(2, 4, OptimizerConfig(lr=1e-2), seed=3, micro_batch_size=3)

    def step(policy):
        shared = train_pairs(policy, PAIRS, adapter, PDPO, training, group, reference=reference).adapter
        return {**policy.personal.read(), **shared}

    trained, _ = compute_both(policies, step)
    assert_same(*trained, {**policies[0].personal.initial_modules(0), **adapter})


def test_no_gradient_passes_through_the_backbone_in_a_personal_step(policies, reference, monkeypatch):
    policy = policies[1]
    policy.personal.load(policy.personal.initial_modules(0))
    layer = policy.model.get_base_model().base_model.layers[1]
    requires_grad = record_calls(monkeypatch, layer.mlp, "forward", lambda states: states.requires_grad)
    train_pairs(policy, PAIRS, None, PDPO, ONE_STEP, "personal", reference=reference)
    assert set(requires_grad) == {False}


def test_gradients_of_several_objectives_are_checkpointed(policies):
    rewards = {"long": score_length, "vowels": score_vowels}
    objective = MultiObjective(
        objectives={name: [name] for name in rewards}, ppo=PpoConfig(target_kl=None), beta=0.01
    )
    initial = initial_adapter(policies)

    def compute(policy):
        policy.slot.load(initial)
        ppo = MultiObjectivePpo(policy, rewards, objective, ONE_STEP)
        result = ppo.gradients(*ppo.sample(["one", "a second"], seed=4), np.arange(2)).gradients
        assert not any(module.training for module in policy.model.modules())
        return result

    gradients, share = compute_both(policies, compute)
    assert torch.allclose(*gradients, atol=float(1e-4 * gradients[0].abs().max()))
    assert share < 0.8


def test_only_the_layers_themselves_change_their_mode_and_only_with_checkpointing(policies):
    plain, model = (policy.model.eval() for policy in policies)
    with checkpointed(plain), checkpointed(model):
        layers = model.get_base_model().base_model.layers
        assert all(layer.training for layer in layers)
        assert not any(child.training for layer in layers for child in layer.children())
        assert not model.training
        assert not any(module.training for module in plain.modules())
    assert not any(module.training for module in model.modules())


# --- families


def attach_to_gpt2():
    return attach_lora(build_random("gpt2").requires_grad_(False), LoraConfig(r=2, dropout=0.0))


def test_gpt2_is_checkpointed():
    gradients = []
    for enabled in (False, True):
        model = attach_to_gpt2()
        slot = AdapterSlot(model)
        slot.load(random_tensors(slot, seed=1, scale=0.1))
        if enabled:
            enable_checkpointing(model, "gpt2")
        with checkpointed(model):
            loss = model(input_ids=torch.arange(12).reshape(2, 6), use_cache=False).logits.square().mean()
        loss.backward()
        gradients.append(torch.cat([parameter.grad.ravel() for parameter in slot.parameters]))
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, atol=float(1e-4 * gradients[0].abs().max()))


def test_a_family_without_checkpointing_is_refused_by_name():
    model = attach_to_gpt2()
    model.get_base_model().supports_gradient_checkpointing = False
    with pytest.raises(BackboneError, match="'old-model' .gpt2. cannot be checkpointed"):
        enable_checkpointing(model, "old-model")
