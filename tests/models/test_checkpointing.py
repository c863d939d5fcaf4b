"""Gradient checkpointing: the same gradients from fewer stored values, on every path of a backbone."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

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
from tests.support.reward_functions import score_length, score_vowels
from tests.support.training import train_pairs

SGD = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=None)
ONE_STEP = Training(1, 4, SGD, seed=3)
DPO = DpoObjective()
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


def checkpointing(config, dropout=0.05):
    """A model's section with gradient checkpointing."""
    backbone = config.backbone.model_copy(update={"gradient_checkpointing": True})
    lora = config.lora.model_copy(update={"dropout": dropout})
    return config.model_copy(update={"backbone": backbone, "lora": lora})


def plain(config, dropout=0.05):
    lora = config.lora.model_copy(update={"dropout": dropout})
    return config.model_copy(update={"lora": lora})


@pytest.fixture(scope="module")
def selectors(debug):
    """The tiny selector without and with checkpointing, with dropout."""
    torch.set_num_threads(1)
    return [Selector(configure(debug.selector), "cpu") for configure in (plain, checkpointing)]


@pytest.fixture(scope="module")
def policies(debug):
    """The tiny policy without and with checkpointing, with dropout and personal modules."""
    config = debug.policy.model_copy(update={"max_new_tokens": 20})
    return [ResidentPolicy(configure(config), "cpu", MODULES) for configure in (plain, checkpointing)]


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
    initial = random_tensors(selectors[0].slot, seed=1, scale=0.2)
    trained, stored = [], []
    for selector in selectors:
        with saved_bytes() as sizes:
            trained.append(train_selector(selector, PAIRS, initial, ONE_STEP)[0])
        stored.append(sum(sizes.values()))
    assert_same(*trained, initial)
    assert stored[1] < 0.6 * stored[0]


def test_the_last_layer_of_a_selector_is_computed_at_one_position_and_not_checkpointed(selectors):
    assert is_checkpointed(selectors[0].model) == [False, False]
    assert is_checkpointed(selectors[1].model) == [True, False]
    rows = []

    def record(module, args, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        rows.append(states.shape[1])

    layer = selectors[1].model.get_base_model().base_model.layers[-1]
    hook = layer.register_forward_hook(record)
    try:
        train_selector(selectors[1], PAIRS, random_tensors(selectors[1].slot, seed=1, scale=0.2), ONE_STEP)
    finally:
        hook.remove()
    assert set(rows) == {1}


def test_scores_do_not_depend_on_checkpointing(selectors):
    adapter = random_tensors(selectors[0].slot, seed=2, scale=0.2)
    scores = []
    for selector in selectors:
        selector.slot.load(adapter)
        scores.append(score_pairs(selector, PAIRS))
    assert np.array_equal(*scores)


def test_the_parts_of_a_minibatch_are_checkpointed_concurrently(debug, two_threads):
    selectors = [
        Selector(configure(debug.selector, dropout=0.0), "cpu") for configure in (plain, checkpointing)
    ]
    initial = random_tensors(selectors[0].slot, seed=1, scale=0.2)
    trained = [train_selector(selector, PAIRS, initial, ONE_STEP)[0] for selector in selectors]
    assert_same(*trained, initial)


# --- policies


def test_gradients_of_dpo_on_packed_rows_are_the_same(policies):
    initial = random_tensors(policies[0].slot, seed=1, scale=0.2)
    reference = pair_logprobs(policies[0], PAIRS, 4, reference=True)
    trained, stored = [], []
    for policy in policies:
        policy.personal.load(policies[0].personal.initial_modules(0))
        with saved_bytes() as sizes:
            trained.append(train_pairs(policy, PAIRS, initial, DPO, ONE_STEP, reference=reference).adapter)
        stored.append(sum(sizes.values()))
    assert is_checkpointed(policies[1].model) == [True, True]
    assert_same(*trained, initial)
    assert stored[1] < 0.8 * stored[0]


def test_gradients_of_sft_are_the_same(policies):
    initial = random_tensors(policies[0].slot, seed=1, scale=0.2)
    trained = []
    for policy in policies:
        policy.personal.load(policies[0].personal.initial_modules(0))
        trained.append(train_pairs(policy, PAIRS, initial, SftObjective(), ONE_STEP).adapter)
    assert_same(*trained, initial)


@pytest.mark.parametrize("group", ["personal", "shared"])
def test_steps_of_pdpo_are_the_same_in_micro_batches_too(policies, group):
    adapter = random_tensors(policies[0].slot, seed=1, scale=0.2)
    modules = policies[0].personal.initial_modules(0)
    reference = pair_logprobs(policies[0], PAIRS, 4, reference=True)
    training = Training(2, 4, OptimizerConfig(lr=1e-2), seed=3, micro_batch_size=3)
    trained = []
    for policy in policies:
        policy.personal.load(modules)
        shared = train_pairs(policy, PAIRS, adapter, PDPO, training, group, reference=reference).adapter
        trained.append({**policy.personal.read(), **shared})
    assert_same(*trained, {**modules, **adapter})


def test_no_gradient_passes_through_the_backbone_in_a_personal_step(policies):
    policy = policies[1]
    policy.personal.load(policy.personal.initial_modules(0))
    requires_grad = []
    layer = policy.model.get_base_model().base_model.layers[0]
    hook = layer.register_forward_hook(
        lambda module, args, output: requires_grad.append(
            (output if isinstance(output, torch.Tensor) else output[0]).requires_grad
        )
    )
    reference = pair_logprobs(policy, PAIRS, 4, reference=True)
    try:
        train_pairs(policy, PAIRS, None, PDPO, ONE_STEP, "personal", reference=reference)
    finally:
        hook.remove()
    assert set(requires_grad) == {False}


# --- passes in evaluation mode


def test_ppo_on_pairs_which_has_no_dropout_is_checkpointed(policies):
    initial = random_tensors(policies[0].slot, seed=1, scale=0.2)
    scores = np.array([[1.0, 0.0]] * len(PAIRS))
    ppo = OfflinePpoObjective(epochs=1, minibatch=6)
    trained, stored = [], []
    for policy in policies:
        policy.personal.load(policies[0].personal.initial_modules(0))
        with saved_bytes() as sizes:
            trained.append(train_pairs(policy, PAIRS, initial, ppo, ONE_STEP, scores=scores).adapter)
        stored.append(sum(sizes.values()))
    assert_same(*trained, initial)
    assert stored[1] < 0.8 * stored[0]


def test_gradients_of_several_objectives_are_checkpointed(policies):
    rewards = {"long": score_length, "vowels": score_vowels}
    objective = MultiObjective(
        objectives={name: [name] for name in rewards}, ppo=PpoConfig(target_kl=None), beta=0.01
    )
    gradients, stored = [], []
    for policy in policies:
        policy.personal.load(policies[0].personal.initial_modules(0))
        policy.slot.load(random_tensors(policy.slot, seed=1, scale=0.2))
        ppo = MultiObjectivePpo(policy, rewards, objective, ONE_STEP)
        rollout = ppo.sample(["one", "a second"], seed=4)
        with saved_bytes() as sizes:
            gradients.append(ppo.gradients(*rollout, np.arange(2)).gradients)
        stored.append(sum(sizes.values()))
        assert not any(module.training for module in policy.model.modules())
    assert torch.allclose(*gradients, atol=float(1e-4 * gradients[0].abs().max()))
    assert stored[1] < 0.8 * stored[0]


def test_only_the_layers_themselves_change_their_mode(policies):
    model = policies[1].model.eval()
    with checkpointed(model):
        layers = model.get_base_model().base_model.layers
        assert all(layer.training for layer in layers)
        assert not any(child.training for layer in layers for child in layer.children())
        assert not model.training
    assert not any(module.training for module in model.modules())


def test_without_checkpointing_no_mode_changes(policies):
    model = policies[0].model.eval()
    with checkpointed(model):
        assert not any(module.training for module in model.modules())


# --- families


def build_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config).requires_grad_(False).eval()
    return attach_lora(model, LoraConfig(r=2, dropout=0.0))


def test_gpt2_is_checkpointed():
    gradients = []
    for enabled in (False, True):
        model = build_gpt2()
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
    model = build_gpt2()
    model.get_base_model().supports_gradient_checkpointing = False
    with pytest.raises(BackboneError, match="'old-model' .gpt2. cannot be checkpointed"):
        enable_checkpointing(model, "old-model")
