"""PPO on existing pairs: hand-computed rewards, the loss at the received policy, and training."""

import numpy as np
import pytest
import torch

from components.config import OfflinePpoObjective, OptimizerConfig
from components.learning.dpo import count_pair_tokens, pair_logprobs
from components.learning.local import LocalTraining
from components.learning.offline_ppo import (
    OfflinePPOLoss,
    ScoredPairs,
    compute_rollout,
    draw_ppo_minibatches,
    train_offline_ppo,
    unique_rows,
)
from components.models.personalized import as_reference
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS

CONFIG = OfflinePpoObjective(
    clip=0.2, kl=0.1, value=0.5, entropy=0.01, gae_lambda=0.95, epochs=2, minibatch=2, target_kl=1e9
)
SCORES = np.array([[1.0, 0.0], [3.0, -1.0], [0.5, 0.5], [2.0, 0.0], [-1.0, -3.0], [0.0, 4.0]])


def with_values(**values):
    """CONFIG with other values."""
    return CONFIG.model_copy(update=values)


def settings(rows, lr=1e-2, seed=0):
    """A training whose steps have this number of rows."""
    return LocalTraining(steps=rows, batch_size=1, optimizer=OptimizerConfig(lr=lr), seed=seed)


@pytest.fixture
def adapter(resident_policy):
    return random_tensors(resident_policy.slot, seed=1, scale=0.2)


@pytest.fixture
def resident(resident_policy, adapter):
    """The tiny policy with a random adapter in its slot."""
    resident_policy.slot.load(adapter)
    return resident_policy


@pytest.fixture(scope="module")
def reference(resident_policy):
    """Log-probabilities of the tokens of chosen and rejected under the frozen backbone."""
    logprobs = []
    with torch.no_grad(), as_reference(resident_policy.model):
        for pair in PAIRS:
            tokens = resident_policy.tokens([resident_policy.encode_pair(pair)])
            logprobs.append([values[mask] for values, mask in zip(tokens.logprobs, tokens.mask, strict=True)])
    return logprobs


@pytest.fixture(scope="module")
def data(reference):
    return ScoredPairs(PAIRS, SCORES, reference)


# --- minibatches


def test_each_epoch_passes_over_as_many_pairs_as_the_budget_allows_in_an_order_of_its_own():
    minibatches = draw_ppo_minibatches(100, CONFIG, settings(24))
    rows = np.concatenate(minibatches)
    assert [len(minibatch) for minibatch in minibatches] == [2] * 12
    assert sorted(rows[:12]) == sorted(rows[12:])
    assert len(set(rows[:12])) == 12
    assert not np.array_equal(rows[:12], rows[12:])


def test_a_small_client_uses_all_its_pairs():
    minibatches = draw_ppo_minibatches(3, CONFIG, settings(24))
    assert [len(minibatch) for minibatch in minibatches] == [2, 1, 2, 1]


def test_an_epoch_has_at_least_one_minibatch():
    assert len(draw_ppo_minibatches(100, CONFIG, settings(1))) == 2


def test_the_budget_counts_the_rows_of_accumulated_minibatches():
    accumulating = OptimizerConfig(accumulation=3)
    training = LocalTraining(steps=2, batch_size=4, optimizer=accumulating, seed=0)
    assert len(np.concatenate(draw_ppo_minibatches(100, CONFIG, training))) == 24


def test_minibatches_are_a_function_of_the_seed():
    first, again, different = (
        np.concatenate(draw_ppo_minibatches(100, CONFIG, settings(24, seed=seed))) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, different)


def test_unique_rows_are_sorted_and_without_repetition():
    assert unique_rows([np.array([4, 1]), np.array([1, 0])]).tolist() == [0, 1, 4]


# --- the rollout and the loss


UNDISCOUNTED = with_values(entropy=0.0, gae_lambda=1.0, epochs=1)


def test_the_log_probabilities_of_a_rollout_are_those_of_the_received_policy(resident, data):
    rollout = compute_rollout(resident, data, UNDISCOUNTED)
    sums = torch.from_numpy(pair_logprobs(resident, PAIRS, 4)).reshape(-1).float()
    assert torch.allclose((rollout.old * rollout.mask).sum(1), sums, atol=1e-3)


def test_a_completions_reward_is_the_penalty_at_each_token_and_its_centered_score_at_the_last(
    resident, data, reference
):
    rollout = compute_rollout(resident, data, UNDISCOUNTED)
    for row in range(2 * len(PAIRS)):
        pair, side = divmod(row, 2)
        ref = reference[pair][side]
        chosen_score, rejected_score = SCORES[pair]
        size = len(ref)
        rewards = -0.1 * (rollout.old[row, :size] - ref)
        rewards[-1] += (1 - 2 * side) * (chosen_score - rejected_score) / 2
        # With lambda 1, no discount and values of 0, the return is the sum of the later rewards.
        returns = torch.stack([rewards[t:].sum() for t in range(size)])
        assert torch.allclose(rollout.returns[row, :size], returns, atol=1e-4)
        assert not rollout.returns[row, size:].any()


def test_the_advantages_of_a_rollout_are_whitened(resident, data):
    rollout = compute_rollout(resident, data, UNDISCOUNTED)
    advantages = rollout.advantages[rollout.mask]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(advantages.var(unbiased=False)) == pytest.approx(1, abs=1e-3)


def test_at_the_received_policy_the_loss_is_minus_the_mean_advantage_and_the_kl_is_0(resident, data):
    config = with_values(entropy=0.0)
    loss = OfflinePPOLoss(resident, data, np.arange(6), config)
    rollout = compute_rollout(resident, data, config)
    values, tokens = loss(np.array([4, 1]))
    means = (rollout.advantages.sum(1) / rollout.mask.sum(1)).reshape(6, 2).mean(1)
    assert torch.allclose(values, -means[[4, 1]], atol=1e-4)
    assert loss.distances == [pytest.approx(0.0, abs=1e-6)]
    assert tokens == count_pair_tokens([resident.encode_pair(PAIRS[n]) for n in (4, 1)])


def test_the_entropy_is_subtracted_from_the_loss(resident, data):
    without, _ = OfflinePPOLoss(resident, data, np.arange(6), with_values(entropy=0.0))(np.array([4]))
    with_entropy, _ = OfflinePPOLoss(resident, data, np.arange(6), with_values(entropy=0.5))(np.array([4]))
    tokens = resident.tokens([resident.encode_pair(PAIRS[4])])
    entropy = ((tokens.entropies * tokens.mask).sum(1) / tokens.mask.sum(1)).mean()
    assert with_entropy.tolist() == pytest.approx((without - 0.5 * entropy).tolist(), abs=1e-4)


# --- training


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_training_makes_the_completion_with_the_higher_score_more_likely(sign, resident, reference):
    data = ScoredPairs(PAIRS, np.array([[5.0, -5.0]] * 6) * sign, reference)
    config = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3)
    before = pair_logprobs(resident, PAIRS, 4)
    metrics = train_offline_ppo(resident, data, resident.slot.parameters, config, settings(36))
    change = pair_logprobs(resident, PAIRS, 4) - before
    assert (sign * (change[:, 0] - change[:, 1]) > 0).all()
    assert len(metrics.losses) == 12
    assert not metrics.stopped
    assert metrics.kl > 0


def test_a_round_stops_when_the_policy_is_too_far_from_the_received_one(resident, data):
    config = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3, target_kl=1e-4)
    metrics = train_offline_ppo(resident, data, resident.slot.parameters, config, settings(36, lr=5e-2))
    assert metrics.stopped
    assert metrics.kl > 1e-4
    assert 2 <= len(metrics.losses) < 12


def test_dropout_is_off_so_the_first_step_is_at_the_received_policy(debug, data):
    lora = debug.policy.lora.model_copy(update={"dropout": 0.5})
    policy = debug.policy.model_copy(update={"max_new_tokens": 20, "lora": lora})
    resident = ResidentPolicy(policy, "cpu")
    resident.slot.load({name: torch.full_like(value, 0.3) for name, value in resident.slot.read().items()})
    config = with_values(entropy=0.0, epochs=1, target_kl=1e-9)
    metrics = train_offline_ppo(resident, data, resident.slot.parameters, config, settings(6, lr=1e-9))
    assert metrics.kl == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(resident, adapter, data):
    def train(seed):
        resident.slot.load(adapter)
        train_offline_ppo(resident, data, resident.slot.parameters, CONFIG, settings(12, seed=seed))
        return resident.slot.read()

    first = train(0)
    torch.manual_seed(5)
    again = train(0)
    different = train(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], different[name]) for name in first)
