"""FIRM's local steps: hand-computed values on a tiny model, and known optima of a table policy."""

import numpy as np
import pytest
import torch

from components.config import MultiObjective, OptimizerConfig, PpoConfig
from components.learning import mgda
from components.learning.loop import Training, TrainingError, draw_minibatches
from components.learning.multi_objective import (
    compute_objective_gradients,
    fixed_weights,
    train_multi_objective_ppo,
    update_kl_coefficient,
)
from components.learning.ppo import compute_gae, masked_mean, policy_loss, whiten
from components.learning.rollouts import PPOClientState, RunningMoments, sample_rollout
from components.models.resident import ResidentPolicy
from components.models.rewards.base import RewardError
from components.seeding import derive, generator
from tests.support.adapters import random_tensors
from tests.support.reward_functions import score_length, score_vowels
from tests.support.table_policy import TablePolicy

PROMPTS = ["one", "a second question", "and the third of them", "four", "the fifth prompt here", "six"]
OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-2, betas=[0.9, 0.999], weight_decay=0.0, clip=None)
SGD = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0, clip=None)
FAST_CRITIC = {"critic_lr": 1e-2}
PPO = PpoConfig(clip=0.2)
REWARDS = {"long": score_length, "vowels": score_vowels}


@pytest.fixture(scope="module")
def shared_resident(debug):
    torch.set_num_threads(1)
    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 12}), "cpu")


@pytest.fixture(scope="module")
def adapter(shared_resident):
    return random_tensors(shared_resident.slot, seed=1, scale=0.2)


@pytest.fixture
def resident(shared_resident, adapter):
    """The tiny policy with a random adapter in its slot."""
    shared_resident.slot.load(adapter)
    return shared_resident


def configure(beta=0.01, preference=None, weights=None, **ppo):
    """The objective of a method with the rewards of REWARDS, with a constant penalty."""
    return MultiObjective(
        objectives={name: [name] for name in REWARDS},
        ppo=PpoConfig(**{"target_kl": None} | ppo),
        beta=beta,
        preference=preference,
        weights=weights,
    )


def initial_state(resident, kl=0.1, objectives=tuple(REWARDS)):
    hidden = resident.model.get_input_embeddings().embedding_dim
    return PPOClientState.initial(objectives, hidden, PpoConfig(kl=kl, target_kl=None))


def settings(steps, batch_size=6, optimizer=OPTIMIZER, seed=5):
    return Training(steps, batch_size, optimizer, seed)


def flatten(tensors):
    return torch.cat([tensor.double().ravel() for tensor in tensors])


# --- moments of scores and the controller of the penalty


def test_moments_are_those_of_all_scores_so_far():
    parts = [np.array([1.0, 4.0]), np.array([2.0]), np.array([7.0, -3.0, 0.5])]
    moments = RunningMoments()
    for part in parts:
        moments = moments.update(part)
    scores = np.concatenate(parts)
    assert moments.count == 6
    assert moments.mean == pytest.approx(scores.mean())
    assert moments.squares == pytest.approx(scores.var() * 6)
    assert np.allclose(moments.normalize(scores), (scores - scores.mean()) / scores.std(), atol=1e-6)


def test_equal_scores_are_normalized_to_0():
    scores = np.full(3, 5.0)
    assert np.allclose(RunningMoments().update(scores).normalize(scores), 0)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (12.0, 0.1 * (1 + 0.2 * 16 / 100)),
        (6.6, 0.1 * (1 + 0.1 * 16 / 100)),
        (0.0, 0.1 * (1 - 0.2 * 16 / 100)),
        (-3.0, 0.1 * (1 - 0.2 * 16 / 100)),
    ],
)
def test_the_controller_changes_its_coefficient_by_at_most_a_fifth_per_horizon(kl, expected):
    coefficient = update_kl_coefficient(0.1, kl, target=6.0, completions=16, horizon=100)
    assert coefficient == pytest.approx(expected)


# --- rollouts


@pytest.fixture
def rollout_state(resident):
    """A state whose head of one objective is not 0."""
    state = initial_state(resident, kl=0.3)
    state.heads["vowels"][:] = torch.linspace(-0.1, 0.1, len(state.heads["vowels"]))
    return state


LAMBDA = configure(estimator={"gae_lambda": 0.9})


def test_a_rollout_has_the_scores_and_the_tokens_of_its_completions(resident, rollout_state):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, rollout_state, LAMBDA.ppo, seed=4)
    assert rollout.scores.shape == (6, 2)
    assert np.array_equal(rollout.scores[:, 0], score_length(PROMPTS, rollout.texts))
    assert rollout.mask.sum(1).tolist() == [len(completion) for _, completion in rollout.rows]


def test_the_moments_are_updated_by_the_scores_of_a_rollout(resident, rollout_state):
    rollout, state = sample_rollout(resident, PROMPTS, REWARDS, rollout_state, LAMBDA.ppo, seed=4)
    for j, name in enumerate(REWARDS):
        assert state.moments[name] == RunningMoments().update(rollout.scores[:, j])


def test_the_kl_of_a_rollout_is_the_mean_log_ratio_of_its_completions(resident, rollout_state):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, rollout_state, LAMBDA.ppo, seed=4)
    with torch.no_grad():
        policy = resident.tokens(rollout.rows)
        reference = resident.tokens(rollout.rows, reference=True)
    expected = float(((policy.logprobs - reference.logprobs) * policy.mask).sum(1).mean())
    assert rollout.kl == pytest.approx(expected, rel=1e-5)
    assert abs(rollout.kl) > 1e-3


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_rewards_are_the_penalty_at_each_token_and_the_normalized_score_at_the_last(
    resident, rollout_state, j, name
):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, rollout_state, LAMBDA.ppo, seed=4)
    with torch.no_grad():
        policy = resident.tokens(rollout.rows)
        reference = resident.tokens(rollout.rows, reference=True)
    head = rollout_state.heads[name]
    values = (policy.states @ head[:-1] + head[-1]) * policy.mask
    rewards = -0.3 * (policy.logprobs - reference.logprobs) * policy.mask
    scores = rollout.scores[:, j]
    for row, score in enumerate((scores - scores.mean()) / scores.std()):
        rewards[row, int(policy.mask[row].sum()) - 1] += score
    advantages, returns = compute_gae(rewards, values, policy.mask, 1.0, 0.9)
    assert torch.allclose(rollout.advantages.critic.returns[j], returns, atol=1e-4)
    assert torch.allclose(rollout.advantages.values[j], whiten(advantages, policy.mask), atol=1e-4)
    assert torch.allclose(rollout.advantages.critic.old[j], values, atol=1e-5)


def test_without_normalization_and_penalty_the_return_is_the_score(resident):
    config = configure(normalize=False, estimator={"gae_lambda": 1.0})
    rollout, _ = sample_rollout(
        resident, PROMPTS, REWARDS, initial_state(resident, kl=0.0), config.ppo, seed=4
    )
    first_returns = [
        row[mask][0] for row, mask in zip(rollout.advantages.critic.returns[0], rollout.mask, strict=True)
    ]
    assert np.allclose(first_returns, rollout.scores[:, 0])


@pytest.mark.slow
def test_the_completions_are_a_function_of_the_seed_alone(resident, rollout_state):
    raw = configure(normalize=False, estimator={"gae_lambda": 1.0})
    first, _ = sample_rollout(resident, PROMPTS, REWARDS, rollout_state, LAMBDA.ppo, seed=4)
    second, _ = sample_rollout(resident, PROMPTS, REWARDS, initial_state(resident, kl=0.0), raw.ppo, seed=4)
    assert first.texts == second.texts


COOL = configure(temperature=0.5)


@pytest.mark.slow
def test_completions_are_sampled_at_the_temperature(resident):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, initial_state(resident), COOL.ppo, seed=4)
    assert rollout.texts == [samples[0].text for samples in resident.policy.generate(PROMPTS, 4, 0.5)]
    assert rollout.texts != [samples[0].text for samples in resident.policy.generate(PROMPTS, 4, 1.0)]


def test_log_probabilities_are_those_of_the_logits_divided_by_the_temperature(resident):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, initial_state(resident), COOL.ppo, seed=4)
    base = resident.model.get_base_model()
    for n, (prompt, completion) in enumerate(rollout.rows):
        with torch.no_grad():
            logits = base(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.5).log_softmax(1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(rollout.old[n, : len(completion)], expected, atol=1e-4)


def test_the_policy_that_sampled_has_no_kl_from_itself_at_its_temperature(resident):
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, initial_state(resident), COOL.ppo, seed=4)
    assert compute_objective_gradients(resident, rollout, np.arange(6), PPO).kl < 1e-9


def test_an_untrained_policy_has_no_kl_from_the_reference(resident):
    resident.slot.load(resident.slot.initial_adapter(0))
    state = initial_state(resident)
    rollout, _ = sample_rollout(resident, PROMPTS, REWARDS, state, configure().ppo, seed=0)
    assert rollout.kl == 0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda prompts, texts: np.full(len(texts), np.nan), "NaN or infinite"),
        (lambda prompts, texts: np.zeros(2), "one finite number for each"),
        (lambda prompts: 1 / 0, "failed on 6 responses: TypeError"),
        (lambda prompts, texts: ["much"] * len(texts), "failed on 6 responses: ValueError"),
    ],
)
def test_a_reward_without_finite_scores_is_refused_by_name(resident, reward, words):
    state = initial_state(resident, objectives=("broken",))
    with pytest.raises(RewardError, match=f"the reward of objective 'broken' (?s:.*){words}"):
        sample_rollout(resident, PROMPTS, {"broken": reward}, state, configure().ppo, seed=0)


def test_a_reward_that_changes_its_arguments_does_not_affect_other_rewards(resident):
    def spoil(prompts, texts):
        texts.sort()
        prompts.clear()
        return np.arange(len(texts), dtype=float)

    config = configure()
    state = initial_state(resident, objectives=("spoil", "long"))
    alone, _ = sample_rollout(resident, PROMPTS, {"long": score_length}, state, config.ppo, seed=0)
    rewards = {"spoil": spoil, "long": score_length}
    together, _ = sample_rollout(resident, PROMPTS, rewards, state, config.ppo, seed=0)
    assert together.texts == alone.texts
    assert np.array_equal(together.scores[:, 1], alone.scores[:, 0])


# --- gradients


@pytest.fixture
def rollout(resident):
    state = initial_state(resident)
    return sample_rollout(resident, PROMPTS, REWARDS, state, configure().ppo, seed=2)[0]


def test_the_gradients_of_all_objectives_come_from_one_forward_pass(resident, rollout, monkeypatch):
    calls = []
    tokens = ResidentPolicy.tokens

    def record(self, rows, **options):
        calls.append(len(rows))
        return tokens(self, rows, **options)

    monkeypatch.setattr(ResidentPolicy, "tokens", record)
    indices = np.array([4, 1, 0])
    gradients = compute_objective_gradients(resident, rollout, indices, PPO)
    assert calls == [3]
    assert gradients.gradients.shape == (2, sum(p.numel() for p in resident.slot.parameters))
    assert not gradients.states.requires_grad
    assert gradients.kl == pytest.approx(0, abs=1e-9)
    assert gradients.tokens == sum(len(rollout.rows[n][0]) + len(rollout.rows[n][1]) for n in indices)


@pytest.mark.parametrize("j", [0, 1])
def test_each_gradient_is_that_of_its_objectives_loss(resident, rollout, j):
    indices = np.array([4, 1, 0])
    gradients = compute_objective_gradients(resident, rollout, indices, PPO)
    tokens = resident.tokens([rollout.rows[n] for n in indices])
    width = tokens.mask.shape[1]
    advantages = rollout.advantages.values[j][indices, :width]
    losses = policy_loss(tokens.logprobs, rollout.old[indices, :width], advantages, 0.2)
    loss = masked_mean(losses, tokens.mask)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, resident.slot.parameters)])
    assert torch.allclose(gradients.gradients[j], expected, atol=1e-6)
    assert expected.norm() > 1e-4
    assert gradients.losses[j] == pytest.approx(loss.item(), abs=1e-6)
    assert loss.item() == pytest.approx(-float(masked_mean(advantages, tokens.mask)), abs=1e-4)


def test_the_gradient_of_weighted_losses_is_the_weighted_gradient_by_one_backward_pass(
    resident, rollout, monkeypatch
):
    separate = compute_objective_gradients(resident, rollout, np.arange(6), PPO).gradients
    calls = []
    grad = torch.autograd.grad

    def record(*arguments, **options):
        calls.append(1)
        return grad(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", record)
    weights = np.array([0.3, 0.7])
    combined = compute_objective_gradients(resident, rollout, np.arange(6), PPO, weights).gradients
    assert len(calls) == 1
    assert combined.shape[0] == 1
    assert torch.allclose(combined[0], 0.3 * separate[0] + 0.7 * separate[1], atol=1e-5)


# --- training


def train(resident, config, training, rewards=REWARDS, kl=0.1):
    state = initial_state(resident, kl, tuple(rewards))
    return train_multi_objective_ppo(resident, PROMPTS, rewards, state, config, training)


@pytest.mark.slow
def test_one_step_is_that_of_mgda_and_adamw(resident, adapter):
    config = configure(epochs=1, minibatch=6, beta=0.05, preference={"vowels": 3.0})
    _, metrics = train(resident, config, settings(1))
    trained = resident.slot.read()

    resident.slot.load(adapter)
    (batch,) = draw_minibatches(6, 6, 1, derive(5, "prompts"))
    prompts = [PROMPTS[n] for n in batch]
    state = initial_state(resident)
    rollout, _ = sample_rollout(resident, prompts, REWARDS, state, config.ppo, derive(5, "rollout", 0))
    order = generator(5, "epoch", 0, 0).permutation(6)
    expected = compute_objective_gradients(resident, rollout, order, PPO)
    wide = expected.gradients.double()
    weights = mgda.solve((wide @ wide.T).numpy(), 0.05, [1.0, 3.0])
    gradient = torch.as_tensor(weights, dtype=torch.float32) @ expected.gradients
    assert [metrics.weights[name][0] for name in REWARDS] == pytest.approx(list(weights))
    assert metrics.losses == [pytest.approx(float(weights @ expected.losses))]
    assert metrics.gradient_norms == [pytest.approx(float(gradient.norm()), rel=1e-5)]
    assert metrics.tokens == sum(len(prompt) + len(completion) for prompt, completion in rollout.rows)
    start = 0
    for name, tensor in adapter.items():
        g = gradient[start : start + tensor.numel()].reshape(tensor.shape)
        first_step = tensor - 1e-2 * g / (g.abs() + 1e-8)  # of AdamW
        assert torch.allclose(trained[name], first_step, atol=1e-5)
        start += tensor.numel()


@pytest.mark.slow
def test_clipping_shortens_a_step_and_keeps_its_direction(resident, adapter):
    steps = {}
    for clip in (None, 1e-3):
        resident.slot.load(adapter)
        optimizer = SGD.model_copy(update={"clip": clip})
        config = configure(epochs=1, minibatch=6)
        _, metrics = train(resident, config, settings(1, optimizer=optimizer))
        steps[clip] = flatten(resident.slot.read().values()) - flatten(adapter.values())
    assert metrics.gradient_norms[0] > 1e-2
    assert float(steps[None].norm()) == pytest.approx(0.5 * metrics.gradient_norms[0], rel=1e-3)
    assert float(steps[1e-3].norm()) == pytest.approx(0.5 * 1e-3, rel=1e-2)
    assert torch.cosine_similarity(steps[None], steps[1e-3], dim=0) > 0.999


@pytest.mark.slow
def test_tokens_whose_ratio_or_value_has_left_the_clip_are_not_moved_further(resident, adapter):
    policy_kl = {}
    head_norms = {}
    for clip in (1e-6, 0.9):
        resident.slot.load(adapter)
        config = configure(epochs=5, minibatch=6, clip=clip, estimator=FAST_CRITIC)
        state, metrics = train(
            resident, config, settings(1, optimizer=SGD), rewards={"long": score_length}, kl=0.0
        )
        policy_kl[clip] = metrics.policy_kl
        head_norms[clip] = float(state.heads["long"].norm())
    assert policy_kl[1e-6][1] == pytest.approx(policy_kl[0.9][1])
    assert policy_kl[1e-6][-1] < 0.5 * policy_kl[0.9][-1]
    assert head_norms[1e-6] < 0.8 * head_norms[0.9]


@pytest.mark.slow
def test_opposite_objectives_cancel_without_regularization(resident):
    rewards = {"up": score_length, "down": lambda prompts, texts: -score_length(prompts, texts)}
    config = configure(epochs=1, minibatch=6, beta=0.0)
    _, metrics = train(resident, config, settings(2, seed=1), rewards, kl=0.0)
    assert np.allclose(metrics.weights["up"], 0.5, atol=1e-3)
    assert max(metrics.gradient_norms) < 1e-4


def test_fixed_weights_are_in_the_order_of_the_objectives():
    weights = fixed_weights(configure(weights={"vowels": 1.0}), list(REWARDS))
    assert weights.tolist() == [0.0, 1.0]


def test_weights_are_not_fixed_by_default():
    assert fixed_weights(configure(), list(REWARDS)) is None


@pytest.mark.slow
def test_a_fixed_weight_of_1_is_plain_ppo_with_one_objective(resident, adapter):
    trained = []
    losses = []
    heads = []
    for rewards, weights in ((REWARDS, {"long": 1.0}), ({"long": score_length}, None)):
        resident.slot.load(adapter)
        config = configure(weights=weights, minibatch=3, estimator=FAST_CRITIC)
        state, metrics = train(resident, config, settings(1, batch_size=6, seed=3), rewards)
        trained.append(flatten(resident.slot.read().values()))
        losses.append(metrics.losses)
        heads.append(state.heads["long"])
    assert torch.allclose(trained[0], trained[1], atol=1e-4)
    assert np.allclose(losses[0], losses[1], atol=1e-5)
    assert torch.allclose(heads[0], heads[1], atol=1e-4)
    assert heads[0].abs().max() > 1e-2


CONTROLLED = configure(target_kl=0.05, horizon=50, estimator=FAST_CRITIC)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(resident, adapter):
    results = []
    for seed in (7, 7, 8):
        resident.slot.load(adapter)
        state, _ = train(resident, CONTROLLED, settings(1, batch_size=4, seed=seed))
        results.append(flatten([*resident.slot.read().values(), *state.heads.values()]))
    first, again, different = results
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


@pytest.mark.slow
def test_the_coefficient_of_the_penalty_is_updated_after_each_rollout(resident):
    state, metrics = train(resident, CONTROLLED, settings(2, batch_size=4, seed=7))
    first, second = metrics.kl_coefficient
    assert first == 0.1
    assert second == update_kl_coefficient(0.1, metrics.kl[0], 0.05, 4, 50)
    assert state.kl == update_kl_coefficient(second, metrics.kl[1], 0.05, 4, 50)


@pytest.mark.slow
def test_a_round_continues_from_the_state_of_the_last_one(resident):
    state, metrics = train(resident, CONTROLLED, settings(2, batch_size=4, seed=7))
    assert state.moments["long"].count == 8
    assert all(head.abs().max() > 0 for head in state.heads.values())
    assert len(metrics.losses) == 2 * 3 * 1
    following, metrics = train_multi_objective_ppo(
        resident, PROMPTS, REWARDS, state, CONTROLLED, settings(1, batch_size=4, seed=9)
    )
    assert metrics.kl_coefficient == [state.kl]
    assert following.moments["long"].count == 12


def test_without_prompts_training_is_refused(resident):
    with pytest.raises(TrainingError, match="no rows"):
        train_multi_objective_ppo(resident, [], REWARDS, initial_state(resident), configure(), settings(1))


# --- known optima


def train_table(reference, rewards, kl, steps, lr=0.05, **coefficients):
    """Train a table policy on rewards by token; returns its distribution and the metrics."""
    table = TablePolicy(reference)
    functions = {
        name: (lambda prompts, texts, scores=scores: np.array([scores[int(text)] for text in texts]))
        for name, scores in rewards.items()
    }
    config = configure(epochs=2, minibatch=64, normalize=False, estimator={"critic_lr": 0.05}, **coefficients)
    optimizer = OPTIMIZER.model_copy(update={"lr": lr})
    state = PPOClientState.initial(list(rewards), 1, config.ppo.model_copy(update={"kl": kl}))
    training = Training(steps, 128, optimizer, seed=0)
    _, metrics = train_multi_objective_ppo(table, ["x"] * 128, functions, state, config, training)
    return (table.logits / config.ppo.temperature).detach().softmax(0).numpy(), metrics


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_reaches_the_known_optimum_of_a_reward_with_a_penalty(temperature):
    """argmax of E r - kl KL(pi, pi_ref) is pi_ref exp(r / kl), normalized, at the temperature."""
    reference = np.array([0.4, 0.3, 0.2, 0.1])
    reward = [0.0, 1.0, 2.0, 1.5]
    policy, metrics = train_table(reference, {"r": reward}, 1.0, steps=70, lr=0.04, temperature=temperature)
    tempered = reference ** (1 / temperature) / (reference ** (1 / temperature)).sum()
    optimum = tempered * np.exp(np.array(reward))
    optimum /= optimum.sum()
    assert np.abs(policy - optimum).max() < 0.04
    assert np.abs(tempered - optimum).max() > 0.04
    kl = float((optimum * np.log(optimum / tempered)).sum())
    assert np.mean(metrics.kl[-20:]) == pytest.approx(kl, abs=0.06)


CONFLICT = {"a": [1.0, 0.0, 0.7], "b": [0.0, 1.0, 0.7]}
"""Rewards by token of two objectives: each has a best token, and the third is a compromise."""


@pytest.mark.slow
def test_the_compromise_of_two_objectives_wins():
    policy, metrics = train_table([1 / 3] * 3, CONFLICT, kl=0.05, steps=25, beta=0.01)
    assert policy[2] > 0.8
    assert np.mean(metrics.weights["a"]) == pytest.approx(0.5, abs=0.15)


@pytest.mark.slow
def test_a_preference_moves_the_policy_towards_its_objective():
    scores = []
    for preference in (0.05, 1.0, 20.0):
        policy, metrics = train_table(
            [1 / 3] * 3, CONFLICT, kl=0.05, steps=20, beta=5.0, preference={"a": preference}
        )
        scores.append(policy @ CONFLICT["a"])
        assert metrics.weights["a"][0] + metrics.weights["b"][0] == pytest.approx(1)
    assert scores[0] < scores[1] - 0.2
    assert scores[2] > scores[1] + 0.1


@pytest.mark.slow
def test_the_value_heads_learn_the_return_of_a_completion():
    _, metrics = train_table([0.5, 0.5], {"r": [1.0, 1.0]}, kl=0.0, steps=25)
    assert metrics.value_loss[0] == pytest.approx(0.5, abs=0.05)
    assert metrics.value_loss[-1] < 0.01
