"""SFT, DPO and personalized DPO: hand-computed scales and excluded pairs, and what each step trains."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from components.config import DpoObjective, OptimizerConfig, PdpoObjective, PersonalModules
from components.config.local_objectives import ExclusionConfig, OfflinePpoObjective, SftObjective
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.learning.client_data import ClientData
from components.learning.loop import Training
from components.learning.pair_scores import implicit_margins, pair_logprobs
from components.learning.preference import (
    PreferenceLoss,
    find_excluded,
    interpolate_reward_weight,
    update_scale,
)
from components.learning.references import ReferenceCache
from components.models.resident import ResidentPolicy
from tests.support.pairs import PAIRS
from tests.support.training import build_loss, train_pairs

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.01)
SFT, DPO = SftObjective(), DpoObjective(beta=0.5)
EXCLUSION = ExclusionConfig(deviations=2.0, max_share=0.5)


def pdpo(reward_weight=0.8, momentum=0.95, exclusion=None):
    """An objective whose reward weight is the same in all rounds."""
    return PdpoObjective(
        reward_weight=[reward_weight] * 2, scale_momentum=momentum, exclusion=exclusion, max_scale=1e9
    )


# --- the scale and the weight of the reward


def test_a_minibatch_with_explicit_margins_near_zero_has_the_largest_scale():
    tiny = torch.tensor([1e-7, -1e-7])
    assert update_scale(1.0, torch.tensor([1.0, -1.0]), tiny, momentum=0.0) > 1e6
    scale = update_scale(1.0, torch.tensor([1.0, -1.0]), tiny, momentum=0.95, max_scale=10.0)
    assert scale == pytest.approx(0.95 * 1.0 + 0.05 * 10.0)


def test_a_scale_below_the_largest_is_not_changed_by_it():
    margins = torch.tensor([1.0, -3.0]), torch.tensor([0.5, -0.5])
    assert update_scale(9.0, *margins, momentum=0.0, max_scale=4.5) == pytest.approx(4.0, abs=1e-6)


def test_the_scale_is_the_ratio_of_mean_absolute_margins():
    scale = update_scale(9.0, torch.tensor([1.0, -3.0]), torch.tensor([0.5, -0.5]), momentum=0.0)
    assert scale == pytest.approx(4.0)


def test_the_scale_is_smoothed_by_its_momentum():
    scale = update_scale(2.0, torch.tensor([1.0, -3.0]), torch.tensor([0.5, -0.5]), momentum=0.95)
    assert scale == pytest.approx(0.95 * 2 + 0.05 * 4)


def test_the_scale_stays_finite_without_margins():
    assert update_scale(1.0, torch.zeros(2), torch.zeros(2), momentum=0.95) == pytest.approx(0.95)


def test_the_reward_weight_rises_linearly_from_the_first_round_to_the_last():
    weights = [interpolate_reward_weight([0.5, 1.5], round / 4) for round in range(5)]
    assert weights == pytest.approx([0.5, 0.75, 1.0, 1.25, 1.5])


# --- excluded pairs


@pytest.fixture
def margins():
    """Margins with one far below the median and one far above it."""
    return torch.tensor([1.0, 1.2, 0.8, 1.1, 0.9, 1.0, -5.0, 9.0])


def test_pairs_far_below_the_median_are_excluded_and_pairs_far_above_it_are_not(margins):
    assert find_excluded(margins, EXCLUSION).tolist() == [False] * 6 + [True, False]


def test_no_pair_is_excluded_within_a_large_number_of_deviations(margins):
    assert not find_excluded(margins, ExclusionConfig(deviations=100.0, max_share=0.5)).any()


@pytest.mark.parametrize(("offset", "is_excluded"), [(-1e-3, True), (1e-3, False)])
def test_a_pair_is_excluded_beyond_k_scaled_median_absolute_deviations(margins, offset, is_excluded):
    # The median is 1.0. The deviations are 0, .2, .2, .1, .1, 0, 6 and 8, and their median is 0.15.
    margins[2] = 1 - 2 * 1.4826 * 0.15 + offset
    assert bool(find_excluded(margins, EXCLUSION)[2]) == is_excluded


@pytest.mark.parametrize(
    ("max_share", "expected"),
    [
        (0.5, [False] * 5 + [True] * 3),
        (0.25, [False] * 6 + [True, True]),
        (0.0, [False] * 8),
    ],
)
def test_at_most_a_share_of_the_minibatch_is_excluded_and_these_are_the_lowest_pairs(max_share, expected):
    margins = torch.tensor([5.0, 5.1, 5.2, 5.3, 5.4, -1.0, -3.0, -2.0])
    assert find_excluded(margins, ExclusionConfig(deviations=0.5, max_share=max_share)).tolist() == expected


@pytest.mark.parametrize("lowest", [0.0, -1e-9])
def test_no_pair_is_excluded_if_the_margins_have_no_spread(lowest):
    assert not find_excluded(torch.tensor([0.0] * 7 + [lowest]), EXCLUSION).any()


# --- training


@pytest.fixture(scope="module")
def resident(debug):
    torch.set_num_threads(1)
    modules = PersonalModules(
        bottleneck=BottleneckConfig(width=4, dropout=0.1), reward=RewardHeadConfig(width=3, dropout=0.1)
    )
    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 20}), "cpu", modules)


@pytest.fixture
def personal(resident):
    """Initial personal modules, which are loaded into the model."""
    tensors = resident.personal.initial_modules(0)
    resident.personal.load(tensors)
    return tensors


@pytest.fixture
def shared(resident):
    """An initial shared adapter, which is loaded into the model."""
    tensors = resident.slot.initial_adapter(0)
    resident.slot.load(tensors)
    return tensors


def settings(steps=3, batch_size=4, optimizer=OPTIMIZER):
    return Training(steps, batch_size, optimizer, seed=7)


ONE_STEP = settings(steps=1, batch_size=6)
LONG = Training(12, 4, OptimizerConfig(lr=1e-2), seed=1)


def train_group(resident, group, objective=None, training=None, **data):
    """Train a group of modules from what the model holds."""
    return train_pairs(resident, PAIRS, None, objective or pdpo(), training or settings(), group, **data)


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_personal_step_trains_the_personal_modules_alone(resident, personal, shared):
    losses = train_group(resident, "personal").figures.losses
    after = resident.personal.read()
    changed = {name.split(".")[0] for name in personal if not torch.equal(personal[name], after[name])}
    assert changed == {"bottleneck", "head", "reward"}
    assert equal(resident.slot.read(), shared)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] > 0


def test_a_shared_step_trains_the_shared_adapter_alone(resident, personal, shared):
    _, metrics, figures, _ = train_group(resident, "shared")
    assert equal(resident.personal.read(), personal)
    assert not equal(resident.slot.read(), shared)
    assert all(math.isfinite(value) for value in (*figures.losses, metrics["scale"], metrics["dpo"]))


def test_all_modules_are_trained_together(resident, personal, shared):
    train_group(resident, "all")
    assert not equal(resident.personal.read(), personal)
    assert not equal(resident.slot.read(), shared)


@pytest.mark.parametrize("group", ["personal", "shared"])
def test_frozen_parameters_require_gradients_again_after_a_step(resident, personal, shared, group):
    train_group(resident, group)
    assert all(parameter.requires_grad for parameter in resident.personal.parameters)
    assert all(parameter.requires_grad for parameter in resident.slot.parameters)


@pytest.mark.parametrize(("group", "passes_gradients"), [("personal", False), ("shared", True)])
def test_gradients_pass_through_the_backbone_in_a_shared_step_alone(
    resident, personal, shared, group, passes_gradients
):
    requires_grad = []

    def record(module, args, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        requires_grad.append(states.requires_grad)

    hook = resident.model.get_base_model().model.layers[-1].register_forward_hook(record)
    try:
        train_group(resident, group, reference=np.zeros((6, 2)))
    finally:
        hook.remove()
    assert set(requires_grad) == {passes_gradients}


def test_without_reward_weight_the_first_loss_is_that_of_the_reference(resident, personal, shared):
    figures = train_group(resident, "personal", pdpo(reward_weight=0.0), ONE_STEP).figures
    assert figures.losses == pytest.approx([math.log(2)], abs=1e-5)
    # The last projection of the bottleneck is 0, so only weight decay changes the first one.
    decayed = personal["bottleneck.encode.bias"] * (1 - 1e-4)
    assert torch.equal(resident.personal.read()["bottleneck.encode.bias"], decayed)


def test_the_reward_head_is_trained_from_the_first_step(resident, personal, shared):
    metrics = train_group(resident, "personal", training=ONE_STEP).metrics
    assert metrics["dpo"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["loss"] != pytest.approx(math.log(2), abs=1e-6)
    change = resident.personal.read()["reward.score.weight"] - personal["reward.score.weight"]
    assert change.abs().min() > 1e-3


@contextmanager
def without_dropout(model):
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


def compute_loss_by_autograd(resident, config):
    """The PDPO loss of all pairs from its formula, and its scale, whose initial value is 1."""
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)
    logprobs, features = resident.logprobs_and_features([resident.encode_pair(pair) for pair in PAIRS])
    implicit = (logprobs - torch.from_numpy(reference).float()) @ torch.tensor([1.0, -1.0])
    rewards = resident.personal.head.reward(features)
    explicit = rewards[:, 0] - rewards[:, 1]
    ratio = float(implicit.detach().abs().mean() / (explicit.detach().abs().mean() + 1e-8))
    scale = config.scale_momentum + (1 - config.scale_momentum) * ratio
    margins = implicit + config.reward_weight[0] * scale * explicit
    return torch.nn.functional.softplus(-config.beta * margins).mean(), scale


def test_one_step_is_that_of_autograd_and_adamw(resident, personal, shared):
    config = pdpo(reward_weight=1.25, momentum=0.5)
    resident.model.eval()
    with without_dropout(resident.model):
        loss, scale = compute_loss_by_autograd(resident, config)
        gradients = torch.autograd.grad(loss, resident.personal.parameters)
        expected = [parameter.detach().clone().requires_grad_() for parameter in resident.personal.parameters]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
        torch.optim.AdamW(expected, lr=1e-2, betas=tuple(OPTIMIZER.betas), weight_decay=0.01).step()
        metrics = train_group(resident, "personal", config, ONE_STEP).metrics
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["scale"] == pytest.approx(scale, rel=1e-4)
    after = resident.personal.read()
    for name, parameter in zip(resident.personal.names, expected, strict=True):
        change = float((after[name] - personal[name]).abs().max())
        assert torch.allclose(after[name], parameter.detach(), atol=2e-3 * max(1e-2, change)), name


@pytest.fixture
def contradicted(resident):
    """A maker of references under which the model contradicts one pair by a distance."""
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)

    def make(distance):
        changed = reference.copy()
        changed[2] += [distance, -distance]
        return changed

    return make


def train_shared(resident, shared, objective, reference=None):
    """One shared step from the initial adapter."""
    resident.slot.load(shared)
    return train_group(resident, "shared", objective, ONE_STEP, reference=reference)


def test_an_exclusion_of_no_share_excludes_no_pair(resident, personal, shared):
    without = train_shared(resident, shared, pdpo())
    with_exclusion = train_shared(resident, shared, pdpo(exclusion=ExclusionConfig(max_share=0.0)))
    assert equal(with_exclusion.adapter, without.adapter)
    assert with_exclusion.metrics["excluded"] == 0
    assert "excluded" not in without.metrics


def test_the_share_of_excluded_pairs_is_reported(resident, contradicted, personal, shared):
    complete = train_shared(resident, shared, pdpo())
    trained = train_shared(resident, shared, pdpo(exclusion=EXCLUSION), contradicted(100.0))
    assert trained.metrics["excluded"] >= 1 / 6
    assert not equal(trained.adapter, complete.adapter)


def test_an_excluded_pair_has_no_gradient(resident, contradicted, personal, shared):
    objective = pdpo(reward_weight=0.0, exclusion=EXCLUSION)
    first = train_shared(resident, shared, objective, contradicted(200.0))
    second = train_shared(resident, shared, objective, contradicted(300.0))
    assert equal(first.adapter, second.adapter)


def test_gradients_of_several_minibatches_are_averaged_for_a_step(resident, personal, shared):
    objective = pdpo(reward_weight=0.0)  # s would differ between the minibatches
    whole = train_shared(resident, shared, objective)
    accumulating = settings(1, 3, OPTIMIZER.model_copy(update={"accumulation": 2}))
    parts = train_pairs(resident, PAIRS, shared, objective, accumulating)
    assert len(parts.figures.losses) == len(whole.figures.losses) == 1
    assert parts.figures.losses == pytest.approx(whole.figures.losses, rel=1e-4)
    assert parts.figures.tokens == whole.figures.tokens
    for name, tensor in whole.adapter.items():
        assert torch.allclose(parts.adapter[name], tensor, atol=1e-4)


def test_the_scale_starts_from_what_the_client_kept_and_is_kept(resident, personal, shared):
    """The margins of the reference are 0, so a minibatch has a ratio of 0."""
    trained = train_group(resident, "shared", training=ONE_STEP, numbers={"scale": 4.0})
    assert trained.metrics["scale"] == pytest.approx(0.95 * 4.0, abs=1e-4)
    assert trained.loss.numbers() == {"scale": trained.metrics["scale"]}


def test_the_reward_weight_is_that_of_the_progress(resident, personal):
    objective = PdpoObjective(reward_weight=[0.5, 1.5])
    weights = [build_loss(resident, PAIRS, objective, progress=share).reward_weight for share in (0, 0.5, 1)]
    assert weights == [0.5, 1.0, 1.5]


def test_the_bytes_do_not_depend_on_the_generator_of_the_process(resident, personal, shared):
    train_group(resident, "personal")
    first = resident.personal.read()
    torch.manual_seed(99)
    resident.personal.load(personal)
    train_group(resident, "personal")
    assert equal(first, resident.personal.read())


# --- supervised training and DPO of a policy without private modules

OBJECTIVES = pytest.mark.parametrize("objective", [SFT, DPO], ids=["sft", "dpo"])


def test_the_loss_of_dpo_is_refused_for_another_objective(resident_policy):
    objective = OfflinePpoObjective()
    with pytest.raises(TypeError, match="the loss of DPO has no objective 'ppo'"):
        PreferenceLoss(ClientData(resident_policy, objective, PAIRS, np.arange(6), ReferenceCache(), 4))


@OBJECTIVES
def test_the_initial_adapter_is_not_changed(resident_policy, objective):
    initial = resident_policy.slot.initial_adapter(0)
    copy = {name: tensor.clone() for name, tensor in initial.items()}
    trained = train_pairs(resident_policy, PAIRS, initial, objective, settings(steps=2))
    assert equal(copy, initial)
    assert not equal(trained.adapter, initial)


@pytest.mark.slow
@OBJECTIVES
def test_the_same_seed_gives_the_same_bytes(resident_policy, objective):
    initial = resident_policy.slot.initial_adapter(0)
    first, second = (
        train_pairs(resident_policy, PAIRS, initial, objective, settings(steps=4)) for _ in range(2)
    )
    assert equal(first.adapter, second.adapter)


@pytest.mark.slow
def test_supervised_training_makes_the_chosen_completions_more_likely(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    losses = train_pairs(resident_policy, PAIRS, initial, SFT, LONG).figures.losses
    reference = pair_logprobs(resident_policy, PAIRS, 4, reference=True)
    assert (pair_logprobs(resident_policy, PAIRS, 4)[:, 0] > reference[:, 0]).all()
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.slow
def test_dpo_makes_the_implicit_rewards_prefer_the_chosen_completions(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    _, metrics, figures, _ = train_pairs(resident_policy, PAIRS, initial, DPO, LONG)
    reference = pair_logprobs(resident_policy, PAIRS, 4, reference=True)
    assert (implicit_margins(pair_logprobs(resident_policy, PAIRS, 4), reference) > 0).all()
    assert figures.losses[0] == pytest.approx(math.log(2), abs=1e-4), "training starts at the reference"
    assert metrics["dpo"] == pytest.approx(metrics["loss"])
    assert not {"excluded", "scale"} & set(metrics)
