"""PPO on existing pairs: hand-computed rewards, the loss at the received policy, and training."""

import numpy as np
import pytest
import torch
from components.learning.dpo import count_pair_tokens, pair_logprobs
from components.learning.local import LocalTraining
from components.learning.offline_ppo import (
    Critic,
    OfflinePPOLoss,
    ScoredPairs,
    TrainedModules,
    compute_rollout,
    draw_ppo_minibatches,
    sequence_advantages,
    train_offline_ppo,
    unique_rows,
)

from components.config import CriticAdvantage, OfflinePpoObjective, OptimizerConfig
from components.models.personalized import as_reference
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS

CONFIG = OfflinePpoObjective(clip=0.2, kl=0.1, entropy=0.01, epochs=2, minibatch=2, target_kl=1e9)
CRITIC = CriticAdvantage(gae_lambda=1.0, value=0.5, lr=1e-2)
SCORES = np.array([[1.0, 0.0], [3.0, -1.0], [0.5, 0.5], [2.0, 0.0], [-1.0, -3.0], [0.0, 4.0]])


def with_values(**values):
    """CONFIG with other values."""
    return CONFIG.model_copy(update=values)


def settings(lr=1e-2, seed=0, **optimizer):
    """A training; its steps and its batch size are not used."""
    return LocalTraining(steps=1, batch_size=1, optimizer=OptimizerConfig(lr=lr, **optimizer), seed=seed)


def train_ppo(resident, data, config, training, critic=None):
    """Train the adapter in the slot on all pairs."""
    minibatches = draw_ppo_minibatches(len(PAIRS), config, training.seed)
    modules = TrainedModules(resident.slot.parameters, critic=critic)
    return train_offline_ppo(resident, data, minibatches, modules, config, training)


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


@pytest.fixture
def critic(resident):
    """A critic that has learnt something."""
    critic = Critic(CRITIC, resident.model.config.hidden_size, "cpu")
    critic.load({"weight": torch.full_like(critic.head.weight, 0.1), "bias": torch.tensor([0.3])})
    return critic


# --- minibatches


def test_each_epoch_passes_over_all_pairs_in_an_order_of_its_own():
    minibatches = draw_ppo_minibatches(10, with_values(epochs=4, minibatch=4), seed=0)
    assert [len(minibatch) for minibatch in minibatches] == [4, 4, 2] * 4
    epochs = [np.concatenate(minibatches[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_client_with_fewer_pairs_than_a_minibatch_uses_all_of_them():
    assert [len(minibatch) for minibatch in draw_ppo_minibatches(1, CONFIG, seed=0)] == [1, 1]


def test_minibatches_are_a_function_of_the_seed():
    first, again, different = (
        np.concatenate(draw_ppo_minibatches(100, CONFIG, seed=seed)) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, different)


def test_unique_rows_are_sorted_and_without_repetition():
    assert unique_rows([np.array([4, 1]), np.array([1, 0])]).tolist() == [0, 1, 4]


# --- sequence-level advantages


def test_advantages_are_plus_and_minus_half_the_difference_of_the_rewards_of_a_pair():
    penalties = [torch.tensor(row) for row in ([0.1, 0.3], [0.0], [0.0, 0.0, 0.0], [-0.5])]
    advantages = sequence_advantages(np.array([[3.0, 1.0], [-2.0, 2.0]]), penalties)
    # The rewards are 3 - 0.4 and 1, and -2 and 2 + 0.5.
    assert advantages.tolist() == pytest.approx([0.8, -0.8, -2.25, 2.25])


def test_two_completions_with_the_same_reward_have_no_advantage():
    penalties = [torch.tensor([0.25]), torch.tensor([0.25, 0.0])]
    assert sequence_advantages(np.array([[7.0, 7.0]]), penalties).tolist() == [0.0, 0.0]


def test_every_token_of_a_completion_has_the_completions_advantage(resident, data):
    rollout = compute_rollout(resident, data, with_values(kl=0.0))
    half = (SCORES[:, :1] - SCORES[:, 1:]) / 2 * np.array([[1.0, -1.0]])
    expected = torch.from_numpy(half).float().reshape(-1, 1) * rollout.mask
    assert torch.allclose(rollout.advantages, expected)
    assert rollout.returns is None


def test_the_first_token_of_a_long_completion_is_credited_as_the_last_one(resident_policy):
    """GAE with a lambda of 0.95 and values of 0 leaves 0.95^T of the reward to the first of T tokens."""
    long = "word " * 40
    pair = {"prompt": "p", "chosen": long + "good", "rejected": long + "bad"}
    reference = [[torch.zeros(len(ids)) for ids in resident_policy.encode_pair(pair)[1:]]]
    data = ScoredPairs([pair], np.array([[1.0, -1.0]]), reference)
    rollout = compute_rollout(resident_policy, data, with_values(kl=0.0))
    lengths = rollout.mask.sum(1)
    assert rollout.advantages[0, 0] == rollout.advantages[0, lengths[0] - 1] == 1.0
    assert rollout.advantages[1, 0] == rollout.advantages[1, lengths[1] - 1] == -1.0


# --- the rollout and the loss


UNDISCOUNTED = with_values(entropy=0.0, advantage=CRITIC, epochs=1)


def test_the_log_probabilities_of_a_rollout_are_those_of_the_received_policy(resident, data):
    rollout = compute_rollout(resident, data, UNDISCOUNTED)
    sums = torch.from_numpy(pair_logprobs(resident, PAIRS, 4)).reshape(-1).float()
    assert torch.allclose((rollout.old * rollout.mask).sum(1), sums, atol=1e-3)


def test_with_a_critic_the_reward_is_the_penalty_at_each_token_and_the_centered_score_at_the_last(
    resident, data, reference, critic
):
    rollout = compute_rollout(resident, data, UNDISCOUNTED, critic)
    for row in range(2 * len(PAIRS)):
        pair, side = divmod(row, 2)
        ref = reference[pair][side]
        chosen_score, rejected_score = SCORES[pair]
        size = len(ref)
        rewards = -0.1 * (rollout.old[row, :size] - ref)
        rewards[-1] += (1 - 2 * side) * (chosen_score - rejected_score) / 2
        # With lambda 1 and no discount the return is the sum of the later rewards, whatever the values.
        returns = torch.stack([rewards[t:].sum() for t in range(size)])
        assert torch.allclose(rollout.returns[row, :size], returns, atol=1e-4)
        assert not rollout.returns[row, size:].any()


def test_the_values_of_a_rollout_are_those_of_the_clients_critic(resident, data, critic):
    rollout = compute_rollout(resident, data, UNDISCOUNTED, critic)
    tokens = resident.tokens([resident.encode_pair(PAIRS[0])])
    values = 0.1 * tokens.states[0].sum(-1) + 0.3
    size = int(tokens.mask[0].sum())
    assert torch.allclose(rollout.values[0, :size], values[:size], atol=1e-4)


def test_the_advantages_of_a_critic_are_whitened(resident, data, critic):
    rollout = compute_rollout(resident, data, UNDISCOUNTED, critic)
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


def test_the_loss_of_the_critic_has_no_gradient_of_the_policy(resident, data, critic):
    with_critic = OfflinePPOLoss(resident, data, np.arange(6), UNDISCOUNTED, critic)
    losses, _ = with_critic(np.array([4]))
    policy = torch.autograd.grad(losses.sum(), resident.slot.parameters, retain_graph=True)
    critic.config = CRITIC.model_copy(update={"value": 0.0})
    without, _ = with_critic(np.array([4]))
    expected = torch.autograd.grad(without.sum(), resident.slot.parameters)
    assert all(torch.equal(first, second) for first, second in zip(policy, expected, strict=True))
    (own,) = torch.autograd.grad(losses.sum(), [critic.head.weight])
    assert own.abs().max() > 0


# --- training


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_training_makes_the_completion_with_the_higher_score_more_likely(sign, resident, reference):
    data = ScoredPairs(PAIRS, np.array([[5.0, -5.0]] * 6) * sign, reference)
    config = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3)
    before = pair_logprobs(resident, PAIRS, 4)
    metrics = train_ppo(resident, data, config, settings())
    change = pair_logprobs(resident, PAIRS, 4) - before
    assert (sign * (change[:, 0] - change[:, 1]) > 0).all()
    assert len(metrics.losses) == 12
    assert metrics.pairs == 6
    assert not metrics.stopped
    assert metrics.kl > 0


FAR = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3, target_kl=1e-4)


def test_no_step_is_taken_from_a_policy_beyond_the_target_kl(resident, adapter, data):
    """The first step leads beyond the target; the second minibatch shows it, and the round ends."""
    metrics = train_ppo(resident, data, FAR, settings(lr=5e-2))
    assert metrics.stopped
    assert metrics.kl > 1e-4
    assert len(metrics.losses) == len(metrics.gradient_norms) == 1
    assert metrics.pairs == 3
    trained = resident.slot.read()
    resident.slot.load(adapter)
    only = draw_ppo_minibatches(len(PAIRS), FAR, 0)[:1]
    train_offline_ppo(resident, data, only, TrainedModules(resident.slot.parameters), FAR, settings(lr=5e-2))
    assert all(torch.equal(value, trained[name]) for name, value in resident.slot.read().items())


def step_sizes(resident, data, critic, training):
    """How far a step moves the policy and the critic's head."""
    before = resident.slot.read()
    head = critic.head.weight.detach().clone()
    config = UNDISCOUNTED.model_copy(update={"minibatch": 6})
    train_ppo(resident, data, config, training, critic)
    after = resident.slot.read()
    policy = torch.cat([(after[name] - before[name]).reshape(-1) for name in before])
    return policy.norm(), (critic.head.weight.detach() - head).norm()


def test_the_gradient_of_the_critic_is_clipped_apart_from_the_policys(resident, adapter, data, critic):
    """A step of plain gradient descent is as long as the clipped gradient, times the rate."""
    critic.config = CRITIC.model_copy(update={"value": 1e6})
    policy, head = step_sizes(resident, data, critic, settings(lr=1.0, name="sgd", clip=1e-2))
    assert float(policy) == pytest.approx(1e-2, rel=1e-3)
    assert float(head) <= 1e-2 * CRITIC.lr
    assert float(head) > 0


def test_a_critic_learns_from_one_training_to_the_next(resident, adapter, data):
    critic = Critic(CRITIC, resident.model.config.hidden_size, "cpu")
    assert not any(value.any() for value in critic.read().values())
    train_ppo(resident, data, UNDISCOUNTED, settings(), critic)
    kept = critic.read()
    assert all(value.any() for value in kept.values())
    again = Critic(CRITIC, resident.model.config.hidden_size, "cpu")
    again.load(kept)
    values = compute_rollout(resident, data, UNDISCOUNTED, again).values
    assert values.abs().max() > 0


def test_dropout_is_off_so_the_first_step_is_at_the_received_policy(debug, data):
    lora = debug.policy.lora.model_copy(update={"dropout": 0.5})
    policy = debug.policy.model_copy(update={"max_new_tokens": 20, "lora": lora})
    resident = ResidentPolicy(policy, "cpu")
    resident.slot.load({name: torch.full_like(value, 0.3) for name, value in resident.slot.read().items()})
    config = with_values(entropy=0.0, epochs=1)
    metrics = train_ppo(resident, data, config, settings(lr=1e-9))
    assert metrics.kl == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(resident, adapter, data):
    def train(seed):
        resident.slot.load(adapter)
        train_ppo(resident, data, CONFIG, settings(seed=seed))
        return resident.slot.read()

    first = train(0)
    torch.manual_seed(5)
    again = train(0)
    different = train(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], different[name]) for name in first)
