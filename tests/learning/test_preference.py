"""SFT, DPO and personalized DPO: hand-computed scales and excluded pairs, and what each step trains."""

import math

import numpy as np
import pytest
import torch

from components.config import DpoObjective, OptimizerConfig, PdpoObjective
from components.config.local_objectives import ExclusionConfig, OfflinePpoObjective, SftObjective
from components.learning.client_data import ClientData
from components.learning.loop import Training
from components.learning.pair_scores import pair_logprobs
from components.learning.preference import PreferenceLoss, find_excluded, update_scale
from components.learning.reference_cache import ReferenceCache
from tests.support.pairs import PAIRS
from tests.support.training import build_loss, open_personal_policy, train_pairs

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.01)
SFT, DPO = SftObjective(), DpoObjective(beta=0.5)
EXCLUSION = ExclusionConfig(deviations=2.0, max_share=0.5)


def pdpo(reward_weight=0.8, momentum=0.95, exclusion=None):
    """An objective whose reward weight is the same in all rounds."""
    return PdpoObjective(
        reward_weight=[reward_weight] * 2, scale_momentum=momentum, exclusion=exclusion, max_scale=1e9
    )


# --- the scale and the weight of the reward


@pytest.mark.parametrize(
    ("implicit", "explicit", "scale", "momentum", "max_scale", "expected"),
    [
        ([1.0, -3.0], [0.5, -0.5], 9.0, 0.0, 4.5, 4.0),  # the ratio of mean absolute margins
        ([1.0, -3.0], [0.5, -0.5], 2.0, 0.95, 4.5, 0.95 * 2 + 0.05 * 4),
        ([1.0, -1.0], [1e-7, -1e-7], 1.0, 0.95, 10.0, 0.95 * 1 + 0.05 * 10),
        ([0.0, 0.0], [0.0, 0.0], 1.0, 0.95, 4.5, 0.95),  # epsilon keeps it finite
    ],
)
def test_the_scale_is_a_moving_average_of_the_ratio_of_margins_up_to_its_maximum(
    implicit, explicit, scale, momentum, max_scale, expected
):
    updated = update_scale(scale, torch.tensor(implicit), torch.tensor(explicit), momentum, max_scale)
    assert updated == pytest.approx(expected, abs=1e-6)


# --- excluded pairs


MARGINS = torch.tensor([1.0, 1.2, 0.8, 1.1, 0.9, 1.0, -5.0, 9.0])
"""Margins with one far below the median and one far above it."""


def test_pairs_far_below_the_median_are_excluded_and_pairs_far_above_it_are_not():
    assert find_excluded(MARGINS, EXCLUSION).tolist() == [False] * 6 + [True, False]


@pytest.mark.parametrize(("offset", "is_excluded"), [(-1e-3, True), (1e-3, False)])
def test_a_pair_is_excluded_beyond_k_scaled_median_absolute_deviations(offset, is_excluded):
    # The median is 1.0. The deviations are 0, .2, .2, .1, .1, 0, 6 and 8, and their median is 0.15.
    margins = MARGINS.clone()
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


def settings(steps=3, batch_size=4, optimizer=OPTIMIZER):
    return Training(steps, batch_size, optimizer, seed=7)


ONE_STEP = settings(steps=1, batch_size=6)
LONG = Training(12, 4, OptimizerConfig(lr=1e-2), seed=1)


def train_group(resident, group, objective=None, training=None, **data):
    """Train a group of modules from what the model holds."""
    return train_pairs(resident, PAIRS, None, objective or pdpo(), training or settings(), group, **data)


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def resident(personal_policy):
    """The policy with an initial adapter, whose implicit margins are 0."""
    personal_policy.slot.load(personal_policy.slot.initial_adapter(0))
    return personal_policy


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("personal", {"bottleneck", "head", "reward"}),
        ("shared", {"base_model"}),
        ("all", {"bottleneck", "head", "reward", "base_model"}),
    ],
)
def test_a_step_trains_the_modules_of_its_group_alone(resident, group, expected):
    before = resident.personal.read() | resident.slot.read()
    _, metrics, figures, _ = train_group(resident, group)
    after = resident.personal.read() | resident.slot.read()
    assert {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])} == expected
    assert all(math.isfinite(value) for value in (*figures.losses, metrics["scale"], metrics["dpo"]))
    assert all(parameter.requires_grad for parameter in resident.personal.parameters)
    assert all(parameter.requires_grad for parameter in resident.slot.parameters)


@pytest.mark.parametrize(("group", "passes_gradients"), [("personal", False), ("shared", True)])
def test_gradients_pass_through_the_backbone_in_a_shared_step_alone(resident, group, passes_gradients):
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


def test_without_reward_weight_the_first_loss_is_that_of_the_reference(resident):
    before = resident.personal.read()["bottleneck.encode.bias"]
    figures = train_group(resident, "personal", pdpo(reward_weight=0.0), ONE_STEP).figures
    assert figures.losses == pytest.approx([math.log(2)], abs=1e-5)
    # The last projection of the bottleneck is 0, so only weight decay changes the first one.
    assert torch.equal(resident.personal.read()["bottleneck.encode.bias"], before * (1 - 1e-4))


def compute_loss_by_autograd(resident, config):
    """The PDPO loss of all pairs from its formula, and its scale, whose initial value is 1."""
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)
    logprobs, features = resident.logprobs_and_features([resident.encode(*pair.texts) for pair in PAIRS])
    implicit = (logprobs - torch.from_numpy(reference).float()) @ torch.tensor([1.0, -1.0])
    rewards = resident.personal.head.reward(features)
    explicit = rewards[:, 0] - rewards[:, 1]
    ratio = float(implicit.detach().abs().mean() / (explicit.detach().abs().mean() + 1e-8))
    scale = config.scale_momentum + (1 - config.scale_momentum) * ratio
    margins = implicit + config.reward_weight[0] * scale * explicit
    return torch.nn.functional.softplus(-config.beta * margins).mean(), scale


def test_one_step_is_that_of_autograd_and_adamw(resident):
    config = pdpo(reward_weight=1.25, momentum=0.5)
    before = resident.personal.read()
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
        change = float((after[name] - before[name]).abs().max())
        assert torch.allclose(after[name], parameter.detach(), atol=2e-3 * max(1e-2, change)), name
    assert (after["reward.score.weight"] - before["reward.score.weight"]).abs().min() > 1e-3


def test_an_excluded_pair_has_no_gradient_and_is_a_part_of_the_reported_share(
    personal_policy, adapter, contradicted
):
    """By SGD, since the first step of AdamW depends on the signs of the gradient alone."""
    sgd = settings(optimizer=OptimizerConfig(name="sgd", lr=1.0, clip=None))
    complete, excluding, of_others = (
        train_pairs(
            personal_policy,
            PAIRS,
            adapter,
            pdpo(reward_weight=0.0, exclusion=exclusion),
            sgd,
            minibatches=[np.array(rows)],
            reference=contradicted(300),
        )
        for exclusion, rows in ((None, range(6)), (EXCLUSION, range(6)), (None, [0, 1, 3, 4, 5]))
    )
    assert all(torch.allclose(excluding.adapter[n], of_others.adapter[n], atol=1e-5) for n in adapter)
    assert any(not torch.allclose(excluding.adapter[n], complete.adapter[n], atol=1e-4) for n in adapter)
    assert excluding.metrics["excluded"] == pytest.approx(1 / 6)
    assert "excluded" not in complete.metrics


def test_the_scale_starts_from_what_the_client_kept_and_is_kept(resident):
    """The margins of the reference are 0, so a minibatch has a ratio of 0."""
    trained = train_group(resident, "shared", training=ONE_STEP, numbers={"scale": 4.0})
    assert trained.metrics["scale"] == pytest.approx(0.95 * 4.0, abs=1e-4)
    assert trained.loss.numbers() == {"scale": trained.metrics["scale"]}


def test_the_reward_weight_is_that_of_the_progress(resident):
    objective = PdpoObjective(reward_weight=[0.5, 1.5])
    weights = [build_loss(resident, PAIRS, objective, progress=share).reward_weight for share in (0, 0.5, 1)]
    assert weights == [0.5, 1.0, 1.5]


def test_the_bytes_do_not_depend_on_the_generator_of_the_process(debug):
    resident = open_personal_policy(debug.policy, dropout=0.1)
    personal = resident.personal.initial_modules(0)
    trained = []
    for seed in (1, 99):
        torch.manual_seed(seed)
        resident.personal.load(personal)
        train_group(resident, "personal")
        trained.append(resident.personal.read())
    assert equal(*trained)


# --- supervised training and DPO of a policy without private modules


def test_the_loss_of_dpo_is_refused_for_another_objective(resident_policy):
    objective = OfflinePpoObjective()
    with pytest.raises(TypeError, match="the loss of DPO has no objective 'ppo'"):
        PreferenceLoss(ClientData(resident_policy, objective, PAIRS, np.arange(6), ReferenceCache(), 4))


@pytest.mark.parametrize("objective", [SFT, DPO], ids=["sft", "dpo"])
def test_the_same_seed_gives_the_same_bytes_and_the_initial_adapter_is_not_changed(
    resident_policy, objective
):
    initial = resident_policy.slot.initial_adapter(0)
    copy = {name: tensor.clone() for name, tensor in initial.items()}
    first, second = (train_pairs(resident_policy, PAIRS, initial, objective, settings()) for _ in range(2))
    assert equal(first.adapter, second.adapter)
    assert equal(copy, initial)
    assert not equal(first.adapter, initial)


def test_supervised_training_makes_the_chosen_completions_more_likely(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    losses = train_pairs(resident_policy, PAIRS, initial, SFT, LONG).figures.losses
    reference = pair_logprobs(resident_policy, PAIRS, 4, reference=True)
    assert (pair_logprobs(resident_policy, PAIRS, 4)[:, 0] > reference[:, 0]).all()
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_the_first_step_reports_the_log_likelihoods_of_the_reference(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    whole = Training(1, len(PAIRS), LONG.optimizer, seed=0)
    metrics = train_pairs(resident_policy, PAIRS, initial, DPO, whole).metrics
    reference = pair_logprobs(resident_policy, PAIRS, 4, reference=True)
    assert metrics["logps_chosen"] == pytest.approx(reference[:, 0].mean(), abs=1e-3)
    assert metrics["logps_rejected"] == pytest.approx(reference[:, 1].mean(), abs=1e-3)


def test_dpo_makes_the_implicit_rewards_prefer_the_chosen_completions(resident_policy):
    initial = resident_policy.slot.initial_adapter(0)
    _, metrics, figures, _ = train_pairs(resident_policy, PAIRS, initial, DPO, LONG)
    reference = pair_logprobs(resident_policy, PAIRS, 4, reference=True)
    ratios = pair_logprobs(resident_policy, PAIRS, 4) - reference
    assert (ratios[:, 0] > ratios[:, 1]).all()
    assert figures.losses[0] == pytest.approx(math.log(2), abs=1e-4), "training starts at the reference"
    assert metrics["dpo"] == pytest.approx(metrics["loss"])
    moved = metrics["logps_chosen"] - metrics["logps_rejected"]
    assert moved > reference[:, 0].mean() - reference[:, 1].mean(), "the mean over the training"
    assert not {"excluded", "scale"} & set(metrics)
