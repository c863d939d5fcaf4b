"""FIRM's local steps: hand-computed values on a tiny model, and known optima of a table policy."""

import numpy as np
import pytest
import torch

from components.config import MultiObjective, OptimizerConfig, PpoConfig
from components.learning import mgda
from components.learning.estimators import RunningMoments, update_kl_coefficient
from components.learning.loop import Training, TrainingError, draw_minibatches
from components.learning.multi_objective_ppo import MultiObjectivePpo
from components.learning.ppo import compute_gae, masked_mean, policy_loss, whiten
from components.learning.rollouts import sample_rollout
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


def settings(steps, batch_size=6, optimizer=OPTIMIZER, seed=5):
    return Training(steps, batch_size, optimizer, seed)


def build(resident, config, training=None, rewards=REWARDS, kept=({}, {})):
    """PPO of a client that kept these numbers and tensors."""
    return MultiObjectivePpo(resident, rewards, config, training or settings(1), *kept)


def kept_by(ppo):
    return ppo.numbers(), ppo.tensors()


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


LAMBDA = configure(estimator={"gae_lambda": 0.9}, kl=0.3)


@pytest.fixture
def started(resident):
    """PPO of a client whose value head of one objective is not 0."""
    numbers, tensors = kept_by(build(resident, LAMBDA))
    head = torch.linspace(-0.1, 0.1, len(tensors["value/vowels"]))
    return build(resident, LAMBDA, kept=(numbers, tensors | {"value/vowels": head}))


@pytest.fixture
def sampled(started):
    """A rollout with its advantages."""
    return started.sample(PROMPTS, seed=4)


def test_a_rollout_has_the_scores_and_the_tokens_of_its_completions(sampled):
    rollout, advantages = sampled
    assert advantages.shape == (2, *rollout.tokens.mask.shape)
    assert np.array_equal(rollout.scores["long"], score_length(PROMPTS, rollout.texts))
    assert rollout.tokens.mask.sum(1).tolist() == [len(completion) for _, completion in rollout.rows]


def test_the_moments_are_updated_by_the_scores_of_a_rollout(started, sampled):
    rollout, _ = sampled
    for name in REWARDS:
        assert started.estimator.moments[name] == RunningMoments().update(rollout.scores[name])


def test_the_kl_of_a_rollout_is_the_mean_log_ratio_of_its_completions(resident, sampled):
    rollout, _ = sampled
    with torch.no_grad():
        policy = resident.tokens(rollout.rows)
        reference = resident.tokens(rollout.rows, reference=True)
    expected = float(((policy.logprobs - reference.logprobs) * policy.mask).sum(1).mean())
    assert rollout.kl == pytest.approx(expected, rel=1e-5)
    assert abs(rollout.kl) > 1e-3


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_rewards_are_the_penalty_at_each_token_and_the_normalized_score_at_the_last(
    resident, started, sampled, j, name
):
    rollout, sampled_advantages = sampled
    with torch.no_grad():
        policy = resident.tokens(rollout.rows)
        reference = resident.tokens(rollout.rows, reference=True)
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


RAW = configure(normalize=False, estimator={"gae_lambda": 1.0}, kl=0.0)


def test_without_normalization_and_penalty_the_return_is_the_score(resident):
    ppo = build(resident, RAW)
    rollout, _ = ppo.sample(PROMPTS, seed=4)
    returns = zip(ppo.estimator.returns[0], rollout.tokens.mask, strict=True)
    assert np.allclose([row[mask][0] for row, mask in returns], rollout.scores["long"])


@pytest.mark.slow
def test_the_completions_are_a_function_of_the_seed_alone(resident, sampled):
    again, _ = build(resident, RAW).sample(PROMPTS, seed=4)
    assert sampled[0].texts == again.texts


COOL = configure(temperature=0.5)


@pytest.fixture
def cool(resident):
    return sample_rollout(resident, PROMPTS, REWARDS, COOL.ppo, seed=4)


@pytest.mark.slow
def test_completions_are_sampled_at_the_temperature(resident, cool):
    assert cool.texts == [samples[0].text for samples in resident.policy.generate(PROMPTS, 4, 0.5)]
    assert cool.texts != [samples[0].text for samples in resident.policy.generate(PROMPTS, 4, 1.0)]


def test_log_probabilities_are_those_of_the_logits_divided_by_the_temperature(resident, cool):
    base = resident.model.get_base_model()
    for n, (prompt, completion) in enumerate(cool.rows):
        with torch.no_grad():
            logits = base(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.5).log_softmax(1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(cool.tokens.logprobs[n, : len(completion)], expected, atol=1e-4)


def test_the_policy_that_sampled_has_no_kl_from_itself_at_its_temperature(resident):
    ppo = build(resident, COOL)
    assert ppo.gradients(*ppo.sample(PROMPTS, seed=4), np.arange(6)).kl < 1e-9


def test_an_untrained_policy_has_no_kl_from_the_reference(resident):
    resident.slot.load(resident.slot.initial_adapter(0))
    assert sample_rollout(resident, PROMPTS, REWARDS, configure().ppo, seed=0).kl == 0


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
    with pytest.raises(RewardError, match=f"the reward of objective 'broken' (?s:.*){words}"):
        sample_rollout(resident, PROMPTS, {"broken": reward}, configure().ppo, seed=0)


def test_a_reward_that_changes_its_arguments_does_not_affect_other_rewards(resident):
    def spoil(prompts, texts):
        texts.sort()
        prompts.clear()
        return np.arange(len(texts), dtype=float)

    alone = sample_rollout(resident, PROMPTS, {"long": score_length}, configure().ppo, seed=0)
    rewards = {"spoil": spoil, "long": score_length}
    together = sample_rollout(resident, PROMPTS, rewards, configure().ppo, seed=0)
    assert together.texts == alone.texts
    assert np.array_equal(together.scores["long"], alone.scores["long"])


# --- gradients


@pytest.fixture
def ppo(resident):
    return build(resident, configure())


def test_the_gradients_of_all_objectives_come_from_one_forward_pass(resident, ppo, monkeypatch):
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
    assert gradients.gradients.shape == (2, sum(p.numel() for p in resident.slot.parameters))
    assert not gradients.states.requires_grad
    assert gradients.kl == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("j", [0, 1])
def test_each_gradient_is_that_of_its_objectives_loss(resident, ppo, j):
    rollout, advantages = ppo.sample(PROMPTS, seed=2)
    indices = np.array([4, 1, 0])
    gradients = ppo.gradients(rollout, advantages, indices)
    tokens = resident.tokens([rollout.rows[n] for n in indices])
    width = tokens.mask.shape[1]
    own = advantages[j][indices, :width]
    losses = policy_loss(tokens.logprobs, rollout.tokens.logprobs[indices, :width], own, 0.2)
    loss = masked_mean(losses, tokens.mask)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, resident.slot.parameters)])
    assert torch.allclose(gradients.gradients[j], expected, atol=1e-6)
    assert expected.norm() > 1e-4
    assert gradients.losses[j] == pytest.approx(loss.item(), abs=1e-6)
    assert loss.item() == pytest.approx(-float(masked_mean(own, tokens.mask)), abs=1e-4)


def test_the_gradient_of_weighted_losses_is_the_weighted_gradient_by_one_backward_pass(
    resident, ppo, monkeypatch
):
    sampled = ppo.sample(PROMPTS, seed=2)
    separate = ppo.gradients(*sampled, np.arange(6)).gradients
    calls = []
    grad = torch.autograd.grad

    def record(*arguments, **options):
        calls.append(1)
        return grad(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", record)
    fixed = build(resident, configure(weights={"long": 0.3, "vowels": 0.7}))
    combined = fixed.gradients(*sampled, np.arange(6)).gradients
    assert len(calls) == 1
    assert combined.shape[0] == 1
    assert torch.allclose(combined[0], 0.3 * separate[0] + 0.7 * separate[1], atol=1e-5)


# --- training


def train(resident, config, training, rewards=REWARDS, kept=({}, {})):
    """PPO after its training, and the training's figures."""
    ppo = build(resident, config, training, rewards, kept)
    return ppo, ppo.train(PROMPTS)


@pytest.mark.slow
def test_one_step_is_that_of_mgda_and_adamw(resident, adapter):
    config = configure(epochs=1, minibatch=6, beta=0.05, preference={"vowels": 3.0})
    ppo, figures = train(resident, config, settings(1))
    trained = resident.slot.read()

    resident.slot.load(adapter)
    (batch,) = draw_minibatches(6, 6, 1, derive(5, "prompts"))
    prompts = [PROMPTS[n] for n in batch]
    fresh = build(resident, config)
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


@pytest.mark.slow
def test_clipping_shortens_a_step_and_keeps_its_direction(resident, adapter):
    steps = {}
    for clip in (None, 1e-3):
        resident.slot.load(adapter)
        optimizer = SGD.model_copy(update={"clip": clip})
        config = configure(epochs=1, minibatch=6)
        _, figures = train(resident, config, settings(1, optimizer=optimizer))
        steps[clip] = flatten(resident.slot.read().values()) - flatten(adapter.values())
    assert figures.gradient_norms[0] > 1e-2
    assert float(steps[None].norm()) == pytest.approx(0.5 * figures.gradient_norms[0], rel=1e-3)
    assert float(steps[1e-3].norm()) == pytest.approx(0.5 * 1e-3, rel=1e-2)
    assert torch.cosine_similarity(steps[None], steps[1e-3], dim=0) > 0.999


@pytest.mark.slow
def test_tokens_whose_ratio_or_value_has_left_the_clip_are_not_moved_further(resident, adapter):
    policy_kl = {}
    head_norms = {}
    for clip in (1e-6, 0.9):
        resident.slot.load(adapter)
        config = configure(epochs=5, minibatch=6, clip=clip, kl=0.0, estimator=FAST_CRITIC)
        ppo, _ = train(resident, config, settings(1, optimizer=SGD), rewards={"long": score_length})
        policy_kl[clip] = ppo.history["policy_kl"]
        head_norms[clip] = float(ppo.tensors()["value/long"].norm())
    assert policy_kl[1e-6][1] == pytest.approx(policy_kl[0.9][1])
    assert policy_kl[1e-6][-1] < 0.5 * policy_kl[0.9][-1]
    assert head_norms[1e-6] < 0.8 * head_norms[0.9]


@pytest.mark.slow
def test_opposite_objectives_cancel_without_regularization(resident):
    rewards = {"up": score_length, "down": lambda prompts, texts: -score_length(prompts, texts)}
    config = configure(epochs=1, minibatch=6, beta=0.0, kl=0.0)
    ppo, figures = train(resident, config, settings(2, seed=1), rewards)
    assert np.allclose(ppo.history["lambda/up"], 0.5, atol=1e-3)
    assert max(figures.gradient_norms) < 1e-4


def test_fixed_weights_are_in_the_order_of_the_objectives(resident):
    assert build(resident, configure(weights={"vowels": 1.0})).weights.tolist() == [0.0, 1.0]


def test_weights_are_not_fixed_by_default(resident):
    assert build(resident, configure()).weights is None


@pytest.mark.slow
def test_a_fixed_weight_of_1_is_plain_ppo_with_one_objective(resident, adapter):
    trained = []
    losses = []
    heads = []
    for rewards, weights in ((REWARDS, {"long": 1.0}), ({"long": score_length}, None)):
        resident.slot.load(adapter)
        config = configure(weights=weights, minibatch=3, estimator=FAST_CRITIC)
        ppo, figures = train(resident, config, settings(1, batch_size=6, seed=3), rewards)
        trained.append(flatten(resident.slot.read().values()))
        losses.append(figures.losses)
        heads.append(ppo.tensors()["value/long"])
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
        ppo, _ = train(resident, CONTROLLED, settings(1, batch_size=4, seed=seed))
        results.append(flatten([*resident.slot.read().values(), *ppo.tensors().values()]))
    first, again, different = results
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


@pytest.mark.slow
def test_the_coefficient_of_the_penalty_is_updated_after_each_rollout(resident):
    ppo, _ = train(resident, CONTROLLED, settings(2, batch_size=4, seed=7))
    first, second = ppo.history["kl_coefficient"]
    kl = ppo.history["kl"]
    assert first == 0.1
    assert second == update_kl_coefficient(0.1, kl[0], 0.05, 4, 50)
    assert ppo.numbers()["kl"] == update_kl_coefficient(second, kl[1], 0.05, 4, 50)


@pytest.mark.slow
def test_a_round_continues_from_what_the_client_kept_after_the_last_one(resident):
    ppo, figures = train(resident, CONTROLLED, settings(2, batch_size=4, seed=7))
    numbers, tensors = kept_by(ppo)
    assert set(numbers) == {"kl"} | {
        f"{name}/{key}" for name in REWARDS for key in ("count", "mean", "squares")
    }
    assert numbers["long/count"] == 8
    assert set(tensors) == {"value/long", "value/vowels"}
    assert all(head.abs().max() > 0 for head in tensors.values())
    assert len(figures.losses) == 2 * 3 * 1
    start = kept_by(build(resident, CONTROLLED, kept=(numbers, tensors)))
    assert start[0] == numbers
    assert all(torch.equal(start[1][name], tensors[name]) for name in tensors)
    following, _ = train(resident, CONTROLLED, settings(1, batch_size=4, seed=9), kept=(numbers, tensors))
    assert following.history["kl_coefficient"] == [numbers["kl"]]
    assert following.numbers()["long/count"] == 12


@pytest.mark.slow
def test_the_metrics_of_a_round_are_means_and_its_last_coefficient_and_kl_from_the_policy(resident):
    ppo, figures = train(resident, CONTROLLED, settings(2, batch_size=4, seed=7))
    metrics = ppo.metrics(figures)
    assert metrics["score/long"] == pytest.approx(ppo.numbers()["long/mean"])
    assert metrics["value_loss"] == pytest.approx(np.mean(ppo.history["value_loss"]))
    assert len(ppo.history["value_loss"]) == metrics["steps"] == 6
    for name in ("kl_coefficient", "policy_kl"):
        assert metrics[name] == ppo.history[name][-1] != ppo.history[name][0]


def test_without_prompts_training_is_refused(resident):
    with pytest.raises(TrainingError, match="no rows"):
        build(resident, configure()).train([])


# --- known optima


def train_table(reference, rewards, kl, steps, lr=0.05, **coefficients):
    """Train a table policy on rewards by token; returns its distribution and the history."""
    table = TablePolicy(reference)
    functions = {
        name: (lambda prompts, texts, scores=scores: np.array([scores[int(text)] for text in texts]))
        for name, scores in rewards.items()
    }
    config = configure(
        epochs=2, minibatch=64, normalize=False, kl=kl, estimator={"critic_lr": 0.05}, **coefficients
    )
    optimizer = OPTIMIZER.model_copy(update={"lr": lr})
    ppo = build(table, config, Training(steps, 128, optimizer, seed=0), functions)
    ppo.train(["x"] * 128)
    return (table.logits / config.ppo.temperature).detach().softmax(0).numpy(), ppo.history


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_reaches_the_known_optimum_of_a_reward_with_a_penalty(temperature):
    """argmax of E r - kl KL(pi, pi_ref) is pi_ref exp(r / kl), normalized, at the temperature."""
    reference = np.array([0.4, 0.3, 0.2, 0.1])
    reward = [0.0, 1.0, 2.0, 1.5]
    policy, history = train_table(reference, {"r": reward}, 1.0, steps=70, lr=0.04, temperature=temperature)
    tempered = reference ** (1 / temperature) / (reference ** (1 / temperature)).sum()
    optimum = tempered * np.exp(np.array(reward))
    optimum /= optimum.sum()
    assert np.abs(policy - optimum).max() < 0.04
    assert np.abs(tempered - optimum).max() > 0.04
    kl = float((optimum * np.log(optimum / tempered)).sum())
    assert np.mean(history["kl"][-20:]) == pytest.approx(kl, abs=0.06)


CONFLICT = {"a": [1.0, 0.0, 0.7], "b": [0.0, 1.0, 0.7]}
"""Rewards by token of two objectives: each has a best token, and the third is a compromise."""


@pytest.mark.slow
def test_the_compromise_of_two_objectives_wins():
    policy, history = train_table([1 / 3] * 3, CONFLICT, kl=0.05, steps=25, beta=0.01)
    assert policy[2] > 0.8
    assert np.mean(history["lambda/a"]) == pytest.approx(0.5, abs=0.15)


@pytest.mark.slow
def test_a_preference_moves_the_policy_towards_its_objective():
    scores = []
    for preference in (0.05, 1.0, 20.0):
        policy, history = train_table(
            [1 / 3] * 3, CONFLICT, kl=0.05, steps=20, beta=5.0, preference={"a": preference}
        )
        scores.append(policy @ CONFLICT["a"])
        assert history["lambda/a"][0] + history["lambda/b"][0] == pytest.approx(1)
    assert scores[0] < scores[1] - 0.2
    assert scores[2] > scores[1] + 0.1


@pytest.mark.slow
def test_the_value_heads_learn_the_return_of_a_completion():
    _, history = train_table([0.5, 0.5], {"r": [1.0, 1.0]}, kl=0.0, steps=25)
    assert history["value_loss"][0] == pytest.approx(0.5, abs=0.05)
    assert history["value_loss"][-1] < 0.01
