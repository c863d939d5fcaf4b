"""PPO on existing pairs: hand-computed rewards, the loss at the received policy, and training."""

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.config.local_objectives import CriticAdvantage, OfflinePpoObjective
from components.learning.loop import Training
from components.learning.pair_ppo import PairPpoLoss, draw_minibatches, sequence_advantages
from components.learning.pair_scores import pair_logprobs
from components.learning.preference import count_tokens
from tests.support.pairs import PAIRS, SCORES
from tests.support.training import build_loss, open_personal_policy, train_pairs

CONFIG = OfflinePpoObjective(clip=0.2, kl=0.1, entropy=0.01, epochs=2, minibatch=2, target_kl=1e9)
CRITIC = CriticAdvantage(gae_lambda=1.0, value=0.5, lr=1e-2)


def with_values(**values):
    """CONFIG with other values."""
    return CONFIG.model_copy(update=values)


def settings(lr=1e-2, seed=0, **optimizer):
    """A training; its steps and its batch size are not used."""
    return Training(1, 1, OptimizerConfig(lr=lr, **optimizer), seed)


def build_ppo(resident, objective, **data):
    """The loss of all pairs at the policy that the model holds."""
    return build_loss(resident, PAIRS, objective, scores=SCORES, **data)


def train_ppo(resident, objective, training, scores=SCORES, **options):
    """Train the adapter in the slot on all pairs."""
    return train_pairs(resident, PAIRS, None, objective, training, scores=scores, **options)


@pytest.fixture
def learnt(resident):
    """Tensors of a critic that has learnt something."""
    return {
        "critic.weight": torch.full((1, resident.model.config.hidden_size), 0.1),
        "critic.bias": torch.tensor([0.3]),
    }


# --- minibatches


@pytest.mark.parametrize(("pairs", "sizes"), [(10, [4, 4, 2]), (1, [1])])
def test_each_epoch_passes_over_all_pairs(pairs, sizes):
    minibatches = draw_minibatches(pairs, with_values(epochs=3, minibatch=4), seed=0)
    assert [len(minibatch) for minibatch in minibatches] == sizes * 3
    epochs = np.concatenate(minibatches).reshape(3, pairs)
    assert np.array_equal(np.sort(epochs), [range(pairs)] * 3)


def test_the_order_of_an_epoch_is_its_own_and_a_function_of_the_seed():
    first, again, different = (
        np.concatenate(draw_minibatches(100, CONFIG, seed=seed)).tolist() for seed in (0, 0, 1)
    )
    assert first == again != different
    assert first[:100] != first[100:]


def test_the_loss_draws_a_part_of_the_rounds_minibatches_by_the_rounds_seed():
    training = settings(seed=7)
    complete = draw_minibatches(6, CONFIG, seed=0)
    parts = [
        PairPpoLoss.draw_minibatches(CONFIG, 6, training, part, round_seed=0)
        for part in (lambda steps: steps[:2], lambda steps: steps[-4:])
    ]
    assert [len(part) for part in parts] == [2, 4]
    drawn = [*parts[0], *parts[1]]
    assert all(np.array_equal(first, second) for first, second in zip(drawn, complete, strict=True))


# --- sequence-level advantages


def test_advantages_are_plus_and_minus_half_the_difference_of_the_rewards_of_a_pair():
    penalties = [torch.tensor(row) for row in ([0.1, 0.3], [0.0], [0.0, 0.0, 0.0], [-0.5])]
    advantages = sequence_advantages(np.array([[3.0, 1.0], [-2.0, 2.0]]), penalties)
    # The rewards are 3 - 0.4 and 1, and -2 and 2 + 0.5.
    assert advantages.tolist() == pytest.approx([0.8, -0.8, -2.25, 2.25])


def test_every_token_of_a_completion_has_the_completions_advantage(resident):
    rollout = build_ppo(resident, with_values(kl=0.0))
    half = (SCORES[:, :1] - SCORES[:, 1:]) / 2 * np.array([[1.0, -1.0]])
    expected = torch.from_numpy(half).float().reshape(-1, 1) * rollout.mask
    assert torch.allclose(rollout.advantages, expected)
    assert rollout.tensors() == {}, "there is no critic"


# --- the rollout and the loss


UNDISCOUNTED = with_values(entropy=0.0, advantage=CRITIC, epochs=1)


def test_a_rollout_has_the_log_probabilities_of_the_received_policy_and_the_values_of_the_critic(
    resident, learnt
):
    rollout = build_ppo(resident, UNDISCOUNTED, tensors=learnt)
    sums = torch.from_numpy(pair_logprobs(resident, PAIRS, 4)).reshape(-1).float()
    assert torch.allclose((rollout.old * rollout.mask).sum(1), sums, atol=1e-3)
    tokens = resident.tokens([resident.encode(*PAIRS[0].texts)])
    values = 0.1 * tokens.states[0].sum(-1) + 0.3
    size = int(tokens.mask[0].sum())
    assert torch.allclose(rollout.values[0, :size], values[:size], atol=1e-4)


def test_pairs_are_evaluated_in_batches_with_the_values_that_each_has_by_itself(
    resident, learnt, monkeypatch
):
    sizes = []
    compute = resident.tokens

    def record(rows, **options):
        sizes.append(len(rows))
        return compute(rows, **options)

    monkeypatch.setattr(resident, "tokens", record)
    rollout = build_ppo(resident, UNDISCOUNTED, tensors=learnt)
    assert sizes[:2] == [4, 2], "batches of ClientData.batch_size, before those of the reference"
    for n, pair in enumerate(PAIRS):
        alone = compute([resident.encode(*pair.texts)])
        for side, mask in enumerate(alone.mask):
            row, size = 2 * n + side, int(mask.sum())
            assert int(rollout.mask[row].sum()) == size
            assert torch.allclose(rollout.old[row, :size], alone.logprobs[side, :size], atol=1e-5)
            values = rollout.critic.values(alone)[side, :size]
            assert torch.allclose(rollout.values[row, :size], values, atol=1e-5)


def test_with_a_critic_the_reward_is_the_penalty_at_each_token_and_the_centered_score_at_the_last(
    resident, learnt
):
    rollout = build_ppo(resident, UNDISCOUNTED, tensors=learnt)
    with torch.no_grad():
        reference = resident.tokens([resident.encode(*pair.texts) for pair in PAIRS], reference=True)
    halves = np.stack([SCORES[:, 0] - SCORES[:, 1], SCORES[:, 1] - SCORES[:, 0]], axis=1).reshape(-1) / 2
    for row, score in enumerate(halves):
        size = int(reference.mask[row].sum())
        rewards = -0.1 * (rollout.old[row, :size] - reference.logprobs[row, :size])
        rewards[-1] += score
        # With lambda 1 and no discount the return is the sum of the later rewards, whatever the values.
        returns = torch.stack([rewards[t:].sum() for t in range(size)])
        assert torch.allclose(rollout.returns[row, :size], returns, atol=1e-4)
        assert not rollout.returns[row, size:].any()


def test_the_advantages_of_a_critic_are_whitened(resident, learnt):
    rollout = build_ppo(resident, UNDISCOUNTED, tensors=learnt)
    advantages = rollout.advantages[rollout.mask]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(advantages.var(unbiased=False)) == pytest.approx(1, abs=1e-3)


def measure(loss, pairs):
    """Losses of a minibatch."""
    rows = np.array(pairs)
    loss.begin_minibatch([rows])
    return loss(rows)


def test_at_the_received_policy_the_loss_is_minus_the_mean_advantage_and_the_kl_is_0(resident):
    loss = build_ppo(resident, with_values(entropy=0.0))
    losses = measure(loss, [4, 1])
    means = (loss.advantages.sum(1) / loss.mask.sum(1)).reshape(6, 2).mean(1)
    assert torch.allclose(losses.values, -means[[4, 1]], atol=1e-4)
    assert loss.distances == [pytest.approx(0.0, abs=1e-6)]
    assert losses.tokens == count_tokens([resident.encode(*PAIRS[n].texts) for n in (4, 1)])


def test_only_the_used_pairs_are_evaluated(resident):
    some = build_ppo(resident, CONFIG, used=np.array([1, 4]))
    complete = build_ppo(resident, CONFIG)
    assert len(some.old) == 4
    expected, computed = (measure(loss, [4, 1]).values for loss in (complete, some))
    assert torch.allclose(computed, expected, atol=1e-6)


def test_a_loss_of_ppo_without_a_reward_is_refused(resident):
    with pytest.raises(TypeError, match="the objective 'ppo' needs a reward"):
        build_loss(resident, PAIRS, CONFIG)


def test_the_entropy_is_subtracted_from_the_loss(resident):
    without = measure(build_ppo(resident, with_values(entropy=0.0)), [4]).values
    with_entropy = measure(build_ppo(resident, with_values(entropy=0.5)), [4]).values
    tokens = resident.tokens([resident.encode(*PAIRS[4].texts)])
    entropy = ((tokens.entropies * tokens.mask).sum(1) / tokens.mask.sum(1)).mean()
    assert with_entropy.tolist() == pytest.approx((without - 0.5 * entropy).tolist(), abs=1e-4)


def with_critic(**values):
    """UNDISCOUNTED with other options of the critic."""
    return UNDISCOUNTED.model_copy(update={"advantage": CRITIC.model_copy(update=values)})


def test_the_loss_of_the_critic_has_no_gradient_of_the_policy(resident, learnt):
    loss = build_ppo(resident, UNDISCOUNTED, tensors=learnt)
    losses = measure(loss, [4]).values
    policy = torch.autograd.grad(losses.sum(), resident.slot.parameters, retain_graph=True)
    without = measure(build_ppo(resident, with_critic(value=0.0), tensors=learnt), [4]).values
    expected = torch.autograd.grad(without.sum(), resident.slot.parameters)
    assert all(torch.equal(first, second) for first, second in zip(policy, expected, strict=True))
    (own,) = torch.autograd.grad(losses.sum(), [loss.critic.head.weight])
    assert own.abs().max() > 0


# --- training


@pytest.mark.parametrize("sign", [1, -1])
def test_training_makes_the_completion_with_the_higher_score_more_likely(sign, resident):
    scores = np.array([[5.0, -5.0]] * 6) * sign
    config = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3)
    before = pair_logprobs(resident, PAIRS, 4)
    metrics = train_ppo(resident, config, settings(), scores).metrics
    change = pair_logprobs(resident, PAIRS, 4) - before
    assert (sign * (change[:, 0] - change[:, 1]) > 0).all()
    assert metrics["steps"] == 12
    assert metrics["pairs"] == 6
    assert metrics["stopped"] == 0
    assert metrics["kl"] > 0


FAR = with_values(kl=0.0, entropy=0.0, epochs=6, minibatch=3, target_kl=1e-4)


def test_no_step_is_taken_from_a_policy_beyond_the_target_kl(resident, adapter):
    """The first step leads beyond the target; the second minibatch shows it, and the round ends."""
    trained, metrics, figures, _ = train_ppo(resident, FAR, settings(lr=5e-2))
    assert metrics["stopped"] == 1
    assert metrics["kl"] > 1e-4
    assert len(figures.losses) == len(figures.gradient_norms) == 1
    assert metrics["pairs"] == 3
    resident.slot.load(adapter)
    only = draw_minibatches(len(PAIRS), FAR, 0)[:1]
    again = train_ppo(resident, FAR, settings(lr=5e-2), minibatches=only)
    assert again.metrics["stopped"] == 0
    assert all(torch.equal(value, trained[name]) for name, value in again.adapter.items())


def test_minibatches_are_not_accumulated(resident):
    assert train_ppo(resident, CONFIG, settings(accumulation=3)).metrics["steps"] == 6


def test_the_gradient_of_the_critic_is_clipped_apart_from_the_policys(resident, adapter, learnt):
    """A step of plain gradient descent is as long as the clipped gradient, times the rate."""
    objective = with_critic(value=1e6).model_copy(update={"minibatch": 6})
    training = settings(lr=1.0, name="sgd", clip=1e-2)
    trained, _, _, loss = train_ppo(resident, objective, training, tensors=learnt)
    policy = torch.cat([(trained[name] - adapter[name]).reshape(-1) for name in adapter]).norm()
    head = (loss.tensors()["critic.weight"] - learnt["critic.weight"]).norm()
    assert float(policy) == pytest.approx(1e-2, rel=1e-3)
    assert 0 < float(head) <= 1e-2 * CRITIC.lr * (1 + 1e-6)


def test_a_critic_learns_from_one_training_to_the_next(resident):
    new = build_ppo(resident, UNDISCOUNTED)
    assert not any(value.any() for value in new.tensors().values())
    kept = train_ppo(resident, UNDISCOUNTED, settings()).loss.tensors()
    assert all(value.any() for value in kept.values())
    again = build_ppo(resident, UNDISCOUNTED, tensors=kept)
    assert again.values.abs().max() > 0
    assert all(torch.equal(again.tensors()[name], value) for name, value in kept.items())


def test_dropout_is_off_so_the_first_step_is_at_the_received_policy(debug, adapter):
    resident = open_personal_policy(debug.policy, dropout=0.5)
    resident.slot.load(adapter)
    config = with_values(entropy=0.0, epochs=1)
    metrics = train_ppo(resident, config, settings(lr=1e-9)).metrics
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)


def test_the_same_seed_gives_the_same_bytes(resident, adapter):
    def train(seed):
        resident.slot.load(adapter)
        return train_ppo(resident, CONFIG, settings(seed=seed)).adapter

    first = train(0)
    torch.manual_seed(5)
    again = train(0)
    different = train(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], different[name]) for name in first)
