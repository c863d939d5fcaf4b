"""FIRM's local steps: hand-computed values on a tiny model, and known optima of a table policy."""

from functools import partial

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig, PpoConfig, UserError
from components.learning import mgda
from components.learning.estimators import RunningMoments, update_kl_coefficient
from components.learning.loop import Training, TrainingError, draw_minibatches
from components.learning.ppo import compute_gae, whiten
from components.learning.rollouts import sample_rollout
from components.models.resident import ResidentPolicy
from components.seeding import derive, generator
from tests.support.multi_objective import ADAMW, REWARDS, build_ppo, train_table
from tests.support.reward_functions import score_length

PROMPTS = ["one", "a second question", "and the third of them", "four", "the fifth prompt here", "six"]
SGD = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0, clip=None)
FAST_CRITIC = {"critic_lr": 1e-2}


def flatten(tensors):
    return torch.cat([tensor.double().ravel() for tensor in tensors])


# --- moments of scores and the controller of the penalty


def test_moments_are_those_of_all_scores_so_far():
    scores = np.array([1.0, 4.0, 2.0, 7.0, -3.0, 0.5])
    moments = RunningMoments()
    for part in np.split(scores, [2, 3]):
        moments = moments.update(part)
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


LAMBDA = {"estimator": {"gae_lambda": 0.9}, "kl": 0.3}


@pytest.fixture
def started(short_policy):
    """PPO of a client whose value head of one objective is not 0."""
    ppo = build_ppo(short_policy, **LAMBDA)
    tensors = ppo.tensors()
    tensors["value/vowels"] = torch.linspace(-0.1, 0.1, len(tensors["value/vowels"]))
    return build_ppo(short_policy, kept=(ppo.numbers(), tensors), **LAMBDA)


@pytest.fixture
def sampled(started):
    """A rollout with its advantages."""
    return started.sample(PROMPTS, seed=4)


def test_a_rollout_has_the_scores_and_the_tokens_of_its_completions(sampled):
    rollout, advantages = sampled
    assert advantages.shape == (2, *rollout.tokens.mask.shape)
    assert np.array_equal(rollout.scores["long"], score_length(PROMPTS, rollout.texts))
    assert rollout.tokens.mask.sum(1).tolist() == [len(completion) for _, completion in rollout.rows]


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_rewards_are_the_penalty_at_each_token_and_the_normalized_score_at_the_last(
    short_policy, started, sampled, j, name
):
    rollout, sampled_advantages = sampled
    with torch.no_grad():
        policy = short_policy.tokens(rollout.rows)
        reference = short_policy.tokens(rollout.rows, reference=True)
    head = started.tensors()[f"value/{name}"]
    values = (policy.states @ head[:-1] + head[-1]) * policy.mask
    rewards = -0.3 * (policy.logprobs - reference.logprobs) * policy.mask
    scores = rollout.scores[name]
    for row, score in enumerate((scores - scores.mean()) / scores.std()):
        rewards[row, int(policy.mask[row].sum()) - 1] += score
    advantages, returns = compute_gae(rewards, values, policy.mask, 1.0, 0.9)
    assert torch.allclose(started.estimator.returns[j], returns, atol=1e-4)
    assert torch.allclose(sampled_advantages[j], whiten(advantages, policy.mask), atol=1e-4)
    assert torch.allclose(started.estimator.values[j], values, atol=1e-5)


COOL = PpoConfig(temperature=0.5)


@pytest.fixture
def cool(short_policy):
    return sample_rollout(short_policy, PROMPTS, REWARDS, COOL, seed=4)


def test_completions_are_sampled_at_the_temperature(short_policy, cool):
    assert cool.texts == [samples[0].text for samples in short_policy.policy.generate(PROMPTS, 4, 0.5)]
    assert cool.texts != [samples[0].text for samples in short_policy.policy.generate(PROMPTS, 4, 1.0)]


def test_log_probabilities_are_those_of_the_logits_divided_by_the_temperature(short_policy, cool):
    base = short_policy.model.get_base_model()
    for n, (prompt, completion) in enumerate(cool.rows):
        with torch.no_grad():
            logits = base(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.5).log_softmax(1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(cool.tokens.logprobs[n, : len(completion)], expected, atol=1e-4)


def test_the_policy_that_sampled_has_no_kl_from_itself_at_its_temperature(short_policy):
    ppo = build_ppo(short_policy, temperature=0.5)
    assert ppo.gradients(*ppo.sample(PROMPTS, seed=4), np.arange(6)).kl < 1e-9


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda prompts, texts: np.full(len(texts), np.nan), "NaN or infinite"),
        (lambda prompts, texts: np.zeros(2), "one finite number for each"),
        (lambda prompts: 1 / 0, "failed on 6 responses: TypeError"),
        (lambda prompts, texts: ["much"] * len(texts), "failed on 6 responses: ValueError"),
    ],
)
def test_a_reward_without_finite_scores_is_refused_by_name(short_policy, reward, words):
    with pytest.raises(UserError, match=f"the reward of objective 'broken' (?s:.*){words}"):
        sample_rollout(short_policy, PROMPTS, {"broken": reward}, PpoConfig(), seed=0)


def test_a_reward_that_changes_its_arguments_does_not_affect_other_rewards(short_policy):
    def spoil(prompts, texts):
        texts.sort()
        prompts.clear()
        return np.arange(len(texts), dtype=float)

    alone = sample_rollout(short_policy, PROMPTS, {"long": score_length}, PpoConfig(), seed=0)
    rewards = {"spoil": spoil, "long": score_length}
    together = sample_rollout(short_policy, PROMPTS, rewards, PpoConfig(), seed=0)
    assert together.texts == alone.texts
    assert np.array_equal(together.scores["long"], alone.scores["long"])


# --- gradients


@pytest.fixture
def ppo(short_policy):
    return build_ppo(short_policy)


def test_the_gradients_of_all_objectives_come_from_one_forward_pass(short_policy, ppo, monkeypatch):
    rollout, advantages = ppo.sample(PROMPTS, seed=2)
    calls = []
    tokens = ResidentPolicy.tokens

    def record(self, rows, **options):
        calls.append(len(rows))
        return tokens(self, rows, **options)

    monkeypatch.setattr(ResidentPolicy, "tokens", record)
    indices = np.array([4, 1, 0])
    gradients = ppo.gradients(rollout, advantages, indices)
    assert calls == [3]
    assert gradients.gradients.shape == (2, sum(p.numel() for p in short_policy.slot.parameters))
    assert not gradients.states.requires_grad
    assert gradients.kl == pytest.approx(0, abs=1e-9)


def test_the_gradient_of_weighted_losses_is_the_weighted_gradient_by_one_backward_pass(
    short_policy, ppo, monkeypatch
):
    sampled = ppo.sample(PROMPTS, seed=2)
    separate = ppo.gradients(*sampled, np.arange(6)).gradients
    calls = []
    grad = torch.autograd.grad

    def record(*arguments, **options):
        calls.append(1)
        return grad(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", record)
    fixed = build_ppo(short_policy, weights={"long": 0.3, "vowels": 0.7})
    combined = fixed.gradients(*sampled, np.arange(6)).gradients
    assert len(calls) == 1
    assert combined.shape[0] == 1
    assert torch.allclose(combined[0], 0.3 * separate[0] + 0.7 * separate[1], atol=1e-5)


# --- training


def train(policy, steps=1, batch_size=6, optimizer=ADAMW, seed=5, **options):
    """PPO after its training, and the training's figures."""
    ppo = build_ppo(policy, training=Training(steps, batch_size, optimizer, seed), **options)
    return ppo, ppo.train(PROMPTS)


def test_one_step_is_that_of_mgda_and_adamw(short_policy, adapter):
    regularized = partial(build_ppo, short_policy, beta=0.05, preference={"vowels": 3.0})
    ppo = regularized(training=Training(1, 6, ADAMW, 5), epochs=1, minibatch=6)
    figures = ppo.train(PROMPTS)
    trained = short_policy.slot.read()

    short_policy.slot.load(adapter)
    (batch,) = draw_minibatches(6, 6, 1, derive(5, "prompts"))
    prompts = [PROMPTS[n] for n in batch]
    fresh = regularized()
    rollout, advantages = fresh.sample(prompts, derive(5, "rollout", 0))
    order = generator(5, "epoch", 0, 0).permutation(6)
    expected = fresh.gradients(rollout, advantages, order)
    wide = expected.gradients.double()
    weights = mgda.solve((wide @ wide.T).numpy(), 0.05, [1.0, 3.0])
    gradient = torch.as_tensor(weights, dtype=torch.float32) @ expected.gradients
    assert [ppo.history[f"lambda/{name}"][0] for name in REWARDS] == pytest.approx(list(weights))
    assert figures.losses == [pytest.approx(float(weights @ expected.losses))]
    assert figures.gradient_norms == [pytest.approx(float(gradient.norm()), rel=1e-5)]
    assert figures.tokens == sum(len(prompt) + len(completion) for prompt, completion in rollout.rows)
    start = 0
    for name, tensor in adapter.items():
        g = gradient[start : start + tensor.numel()].reshape(tensor.shape)
        first_step = tensor - 1e-2 * g / (g.abs() + 1e-8)  # of AdamW
        assert torch.allclose(trained[name], first_step, atol=1e-5)
        start += tensor.numel()


def test_clipping_shortens_a_step_and_keeps_its_direction(short_policy, adapter):
    steps = {}
    for clip in (None, 1e-3):
        short_policy.slot.load(adapter)
        optimizer = SGD.model_copy(update={"clip": clip})
        _, figures = train(short_policy, optimizer=optimizer, epochs=1, minibatch=6)
        steps[clip] = flatten(short_policy.slot.read().values()) - flatten(adapter.values())
    assert figures.gradient_norms[0] > 1e-2
    assert float(steps[None].norm()) == pytest.approx(0.5 * figures.gradient_norms[0], rel=1e-3)
    assert float(steps[1e-3].norm()) == pytest.approx(0.5 * 1e-3, rel=1e-2)
    assert torch.cosine_similarity(steps[None], steps[1e-3], dim=0) > 0.999


def test_tokens_whose_ratio_or_value_has_left_the_clip_are_not_moved_further(short_policy, adapter):
    policy_kl = {}
    head_norms = {}
    for clip in (1e-6, 0.9):
        short_policy.slot.load(adapter)
        one_reward = partial(train, short_policy, optimizer=SGD, rewards={"long": score_length})
        ppo, _ = one_reward(epochs=5, minibatch=6, clip=clip, kl=0.0, estimator=FAST_CRITIC)
        policy_kl[clip] = ppo.history["policy_kl"]
        head_norms[clip] = float(ppo.tensors()["value/long"].norm())
    assert policy_kl[1e-6][1] == pytest.approx(policy_kl[0.9][1])
    assert policy_kl[1e-6][-1] < 0.7 * policy_kl[0.9][-1]
    assert head_norms[1e-6] < 0.8 * head_norms[0.9]


def test_fixed_weights_are_in_the_order_of_the_objectives_and_there_are_none_by_default(short_policy, ppo):
    assert build_ppo(short_policy, weights={"vowels": 1.0}).weights.tolist() == [0.0, 1.0]
    assert ppo.weights is None


def test_a_fixed_weight_of_1_is_plain_ppo_with_one_objective(short_policy, adapter):
    trained = []
    for rewards, weights in ((REWARDS, {"long": 1.0}), ({"long": score_length}, None)):
        short_policy.slot.load(adapter)
        options = {"minibatch": 3, "estimator": FAST_CRITIC}
        ppo, figures = train(short_policy, seed=3, rewards=rewards, weights=weights, **options)
        values = flatten(short_policy.slot.read().values())
        trained.append((values, ppo.tensors()["value/long"], torch.tensor(figures.losses)))
    for value, expected in zip(*trained, strict=True):
        assert torch.allclose(value, expected, atol=1e-4)
    assert trained[0][1].abs().max() > 1e-2


CONTROLLED = {
    "target_kl": 0.05,
    "horizon": 50,
    "estimator": FAST_CRITIC,
    "batch_size": 4,
}


def test_the_same_seed_gives_the_same_bytes(short_policy, adapter):
    results = []
    for seed in (7, 7, 8):
        short_policy.slot.load(adapter)
        ppo, _ = train(short_policy, seed=seed, **CONTROLLED)
        results.append(flatten([*short_policy.slot.read().values(), *ppo.tensors().values()]))
    first, again, different = results
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


def test_a_round_continues_from_what_the_client_kept_after_the_last_one(short_policy):
    ppo, _ = train(short_policy, 2, seed=7, **CONTROLLED)
    numbers, tensors = ppo.numbers(), ppo.tensors()
    moments = {f"{name}/{key}" for name in REWARDS for key in ("count", "mean", "squares")}
    assert set(numbers) == {"kl"} | moments
    assert numbers["long/count"] == 8
    assert set(tensors) == {"value/long", "value/vowels"}
    assert all(head.abs().max() > 0 for head in tensors.values())
    start = build_ppo(short_policy, kept=(numbers, tensors))
    assert start.numbers() == numbers
    assert all(torch.equal(start.tensors()[name], tensors[name]) for name in tensors)
    following, _ = train(short_policy, seed=9, kept=(numbers, tensors), **CONTROLLED)
    assert following.history["kl_coefficient"] == [numbers["kl"]]
    assert following.numbers()["long/count"] == 12


def test_the_metrics_of_a_round_are_means_and_its_last_coefficient_and_kl_from_the_policy(short_policy):
    ppo, figures = train(short_policy, 2, seed=7, **CONTROLLED)
    metrics = ppo.metrics(figures)
    assert metrics["score/long"] == pytest.approx(ppo.numbers()["long/mean"])
    assert metrics["value_loss"] == pytest.approx(np.mean(ppo.history["value_loss"]))
    assert len(ppo.history["value_loss"]) == metrics["steps"] == 6
    for name in ("kl_coefficient", "policy_kl"):
        assert metrics[name] == ppo.history[name][-1] != ppo.history[name][0]
    first, second = ppo.history["kl_coefficient"]
    kl = ppo.history["kl"]
    assert first == 0.1
    assert second == update_kl_coefficient(0.1, kl[0], 0.05, 4, 50)
    assert ppo.numbers()["kl"] == update_kl_coefficient(second, kl[1], 0.05, 4, 50)


def test_without_prompts_training_is_refused(ppo):
    with pytest.raises(TrainingError, match="no rows"):
        ppo.train([])


# --- known optima


TABLE_CRITIC = {"kind": "gae", "critic_lr": 0.05}


@pytest.mark.parametrize(
    ("estimator", "temperature", "steps"),
    [(TABLE_CRITIC, 1.0, 70), (TABLE_CRITIC, 0.7, 70), ({"kind": "rloo", "samples": 4}, 1.0, 80)],
)
def test_ppo_reaches_the_known_optimum_of_a_reward_with_a_penalty(estimator, temperature, steps):
    """argmax of E r - kl KL(pi, pi_ref) is pi_ref exp(r / kl), normalized, at the temperature."""
    reference = np.array([0.4, 0.3, 0.2, 0.1])
    reward = [0.0, 1.0, 2.0, 1.5]
    options = {"temperature": temperature, "estimator": estimator}
    policy, ppo = train_table(reference, {"r": reward}, steps, lr=0.04, kl=1.0, **options)
    tempered = reference ** (1 / temperature) / (reference ** (1 / temperature)).sum()
    optimum = tempered * np.exp(np.array(reward))
    optimum /= optimum.sum()
    assert np.abs(policy - optimum).max() < 0.04
    assert np.abs(tempered - optimum).max() > 0.04
    kl = float((optimum * np.log(optimum / tempered)).sum())
    assert np.mean(ppo.history["kl"][-20:]) == pytest.approx(kl, abs=0.06)
    assert ("value_loss" in ppo.history) == (estimator == TABLE_CRITIC)


CONFLICT = {"a": [1.0, 0.0, 0.7], "b": [0.0, 1.0, 0.7]}
"""Rewards by token of two objectives: each has a best token, and the third is a compromise."""


def test_the_compromise_of_two_objectives_wins():
    policy, ppo = train_table([1 / 3] * 3, CONFLICT, 25, kl=0.05, estimator=TABLE_CRITIC)
    assert policy[2] > 0.8
    assert np.mean(ppo.history["lambda/a"]) == pytest.approx(0.5, abs=0.15)


def test_the_value_heads_learn_the_return_of_a_completion():
    _, ppo = train_table([0.5, 0.5], {"r": [1.0, 1.0]}, 25, kl=0.0, estimator=TABLE_CRITIC)
    assert ppo.history["value_loss"][0] == pytest.approx(0.5, abs=0.05)
    assert ppo.history["value_loss"][-1] < 0.01
