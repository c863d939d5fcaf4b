"""FIRM's local steps: rollouts and gradients by hand on a tiny model, and known optima on a policy that is a table."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.config import OptimizerConfig
from components.learning import mgda
from components.learning.local import TrainingError
from components.learning.multi_objective import (
    ClientState,
    Coefficients,
    Moments,
    fixed_weights,
    next_coefficient,
    objective_gradients,
    roll_out,
    train_multi,
)
from components.learning.policy import ResidentPolicy, Tokens
from components.learning.ppo import gae, masked_mean, policy_loss, whiten
from tests.learning.test_offline_ppo import load_random, tiny_policy

PROMPTS = ["one", "a second question", "and the third of them", "four", "the fifth prompt here", "six"]
OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-2, betas=[0.9, 0.999], weight_decay=0.0, clip=None)


def long(prompts, texts):
    return np.array([float(len(text)) for text in texts])


def vowels(prompts, texts):
    return np.array([sum(text.count(v) for v in "aeiou") - 0.1 * len(prompt) for prompt, text in zip(prompts, texts, strict=True)])


SCORERS = {"long": long, "vowels": vowels}


@pytest.fixture(scope="module")
def resident(debug):
    return tiny_policy(debug, 12)


@pytest.fixture
def moved(resident):
    load_random(resident)
    return resident


def first(resident, kl=0.1, names=tuple(SCORERS)):
    return ClientState.first(names, resident.model.get_input_embeddings().embedding_dim, kl)


def test_moments_are_those_of_all_scores_so_far_and_normalise_them():
    parts = [np.array([1.0, 4.0]), np.array([2.0]), np.array([7.0, -3.0, 0.5])]
    moments = Moments()
    for part in parts:
        moments = moments.joined(part)
    whole = np.concatenate(parts)
    assert (moments.count, moments.mean, moments.squares) == (6, pytest.approx(whole.mean()), pytest.approx(whole.var() * 6))
    assert np.allclose(moments.normalised(whole), (whole - whole.mean()) / whole.std(), atol=1e-6)
    assert np.allclose(Moments().joined(np.full(3, 5.0)).normalised(np.full(3, 5.0)), 0)


@pytest.mark.parametrize(("kl", "after"), [(6.0, 0.1), (12.0, 0.1 * (1 + 0.2 * 16 / 100)), (6.6, 0.1 * (1 + 0.1 * 16 / 100)), (0.0, 0.1 * (1 - 0.2 * 16 / 100)), (-3.0, 0.1 * (1 - 0.2 * 16 / 100))])
def test_the_controller_moves_its_coefficient_by_at_most_a_fifth_a_horizon(kl, after):
    assert next_coefficient(0.1, kl, 6.0, 16, 100) == pytest.approx(after)


def test_a_rollouts_rewards_are_the_penalty_at_each_token_and_the_normalised_score_at_the_last(moved):
    state, config = first(moved, kl=0.3), Coefficients(lam=0.9)
    state.heads["vowels"][:] = torch.linspace(-0.1, 0.1, len(state.heads["vowels"]))
    rollout, after = roll_out(moved, PROMPTS, SCORERS, state, config, seed=4)
    assert rollout.scores.shape == (6, 2) and np.array_equal(rollout.scores[:, 0], long(PROMPTS, rollout.texts)) and rollout.mask.sum(1).tolist() == [len(c) for _, c in rollout.rows]
    assert after.moments == {name: Moments().joined(rollout.scores[:, j]) for j, name in enumerate(SCORERS)}
    with torch.no_grad():
        now, then = moved.tokens(rollout.rows), moved.tokens(rollout.rows, reference=True)
    assert rollout.kl == pytest.approx(float(((now.logprobs - then.logprobs) * now.mask).sum(1).mean()), rel=1e-5) and abs(rollout.kl) > 1e-3
    for j, name in enumerate(SCORERS):
        head = state.heads[name]
        values = (now.states @ head[:-1] + head[-1]) * now.mask
        rewards = -0.3 * (now.logprobs - then.logprobs) * now.mask
        for row, score in enumerate((rollout.scores[:, j] - rollout.scores[:, j].mean()) / rollout.scores[:, j].std()):
            rewards[row, int(now.mask[row].sum()) - 1] += score
        advantages, returns = gae(rewards, values, now.mask, 1.0, 0.9)
        assert torch.allclose(rollout.returns[j], returns, atol=1e-4) and torch.allclose(rollout.advantages[j], whiten(advantages, now.mask), atol=1e-4)
        assert torch.allclose(rollout.values[j], values, atol=1e-5)
    raw, _ = roll_out(moved, PROMPTS, SCORERS, first(moved, kl=0.0), replace(config, normalise=False, lam=1.0), seed=4)
    assert raw.texts == rollout.texts and np.allclose([row[mask][0] for row, mask in zip(raw.returns[0], raw.mask, strict=True)], raw.scores[:, 0])


def test_a_policy_at_a_temperature_samples_from_and_is_scored_by_the_logits_over_it(moved):
    cool, _ = roll_out(moved, PROMPTS, SCORERS, first(moved), Coefficients(temperature=0.5), seed=4)
    assert cool.texts == [some[0].text for some in moved.policy.generate(PROMPTS, 4, 0.5)] != [some[0].text for some in moved.policy.generate(PROMPTS, 4, 1.0)]
    with torch.no_grad():
        for n, (prompt, completion) in enumerate(cool.rows):
            logits = moved.model.get_base_model()(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            wanted = (logits / 0.5).log_softmax(1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert torch.allclose(cool.old[n, : len(completion)], wanted, atol=1e-4)
    _, _, drift, _, _ = objective_gradients(moved, cool, np.arange(6), moved.slot.parameters, 0.2)
    assert drift < 1e-9  # the policy is still the one that sampled, at the same temperature


def test_before_anything_is_trained_the_policy_is_the_reference(resident):
    resident.slot.load(resident.slot.initial_adapter(0))
    assert roll_out(resident, PROMPTS, SCORERS, first(resident), Coefficients(), 0)[0].kl == 0


def test_the_gradients_of_all_objectives_come_from_one_forward_pass_and_are_each_ones_own(moved, monkeypatch):
    rollout, _ = roll_out(moved, PROMPTS, SCORERS, first(moved), Coefficients(), seed=2)
    parameters, indices, asked = moved.slot.parameters, np.array([4, 1, 0]), []
    tokens = ResidentPolicy.tokens
    monkeypatch.setattr(ResidentPolicy, "tokens", lambda self, rows, **more: asked.append(len(rows)) or tokens(self, rows, **more))
    gradients, losses, kl, states, count = objective_gradients(moved, rollout, indices, parameters, 0.2)
    assert asked == [3] and gradients.shape == (2, sum(p.numel() for p in parameters)) and not states.requires_grad and kl == pytest.approx(0, abs=1e-9)
    assert count == sum(len(part) for n in indices for part in rollout.rows[n])
    for j in range(2):
        now = tokens(moved, [rollout.rows[n] for n in indices])
        width = now.mask.shape[1]
        loss = masked_mean(policy_loss(now.logprobs, rollout.old[indices, :width], rollout.advantages[j][indices, :width], 0.2), now.mask)
        alone = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        assert torch.allclose(gradients[j], alone, atol=1e-6) and losses[j] == pytest.approx(loss.item(), abs=1e-6) and alone.norm() > 1e-4
        assert loss.item() == pytest.approx(-float(masked_mean(rollout.advantages[j][indices, :width], now.mask)), abs=1e-4)


def test_one_step_is_mgda_and_adamw_by_hand(moved):
    start = moved.slot.read()
    config = Coefficients(epochs=1, minibatch=6, beta=0.05, preference={"vowels": 3.0})
    _, curve = train_multi(moved, PROMPTS, SCORERS, first(moved), moved.slot.parameters, config, 1, 6, OPTIMIZER, 1e-3, seed=5)
    after = moved.slot.read()
    moved.slot.load(start)
    from components.learning.local import minibatches
    from components.seeding import derive, generator

    (drawn,) = minibatches(6, 6, 1, derive(5, "prompts"))
    rollout, _ = roll_out(moved, [PROMPTS[n] for n in drawn], SCORERS, first(moved), config, derive(5, "rollout", 0))
    gradients, losses, *_ = objective_gradients(moved, rollout, generator(5, "epoch", 0, 0).permutation(6), moved.slot.parameters, 0.2)
    weights = mgda.solve((gradients.double() @ gradients.double().T).numpy(), 0.05, [1.0, 3.0])
    assert [curve.weights[name][0] for name in SCORERS] == pytest.approx(list(weights)) and curve.losses == [pytest.approx(float(weights @ losses))]
    step, at = torch.as_tensor(weights, dtype=torch.float32) @ gradients, 0
    for name, tensor in start.items():
        g = step[at : at + tensor.numel()].reshape(tensor.shape)
        assert torch.allclose(after[name], tensor - 1e-2 * g / (g.abs() + 1e-8), atol=1e-5)     # AdamW's first step
        at += tensor.numel()
    assert curve.gradient_norms == [pytest.approx(float(step.norm()), rel=1e-5)] and curve.tokens == sum(len(p) + len(c) for p, c in rollout.rows)


def test_a_step_is_no_longer_than_the_clip_of_gradients_and_the_direction_is_the_same(moved):
    start, steps = moved.slot.read(), []
    plain = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0, clip=None)
    for clip in (None, 1e-3):
        moved.slot.load(start)
        _, curve = train_multi(moved, PROMPTS, SCORERS, first(moved), moved.slot.parameters, Coefficients(epochs=1, minibatch=6), 1, 6, plain.model_copy(update={"clip": clip}), 1e-3, seed=5)
        steps.append(torch.cat([(value - start[name]).double().ravel() for name, value in moved.slot.read().items()]))
    assert float(steps[0].norm()) == pytest.approx(0.5 * curve.gradient_norms[0], rel=1e-3) and curve.gradient_norms[0] > 1e-2
    assert float(steps[1].norm()) == pytest.approx(0.5 * 1e-3, rel=1e-2) and float(steps[0] @ steps[1] / steps[0].norm() / steps[1].norm()) > 0.999


def test_tokens_whose_ratio_or_value_has_left_the_clip_are_pulled_no_further(moved):
    start, found = moved.slot.read(), {}
    plain = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0, clip=None)
    for clip in (1e-6, 0.9):
        moved.slot.load(start)
        state, curve = train_multi(moved, PROMPTS, {"long": long}, first(moved, 0.0, ("long",)), moved.slot.parameters, Coefficients(epochs=8, minibatch=6, clip=clip), 1, 6, plain, 1e-2, seed=5)
        found[clip] = curve.drift, float(state.heads["long"].norm())
    (narrow, near), (wide, far) = found[1e-6], found[0.9]
    assert narrow[1] == pytest.approx(wide[1]) and narrow[-1] < 0.2 * wide[-1] and near < 0.8 * far


def test_opposite_objectives_without_regularisation_cancel(moved):
    config = Coefficients(epochs=1, minibatch=6, beta=0.0)
    _, curve = train_multi(moved, PROMPTS, {"up": long, "down": lambda p, t: -long(p, t)}, first(moved, 0.0, ("up", "down")), moved.slot.parameters, config, 2, 6, OPTIMIZER, 1e-3, seed=1)
    assert np.allclose(curve.weights["up"], 0.5, atol=1e-3) and max(curve.gradient_norms) < 1e-4


def test_fixed_weights_are_taken_as_they_are_and_a_single_objective_is_plain_ppo(moved):
    start = moved.slot.read()
    assert fixed_weights(list(SCORERS), Coefficients(weights={"vowels": 1.0})).tolist() == [0.0, 1.0] and fixed_weights(list(SCORERS), Coefficients()) is None
    results = []
    for scorers, weights in ((SCORERS, {"long": 1.0}), ({"long": long}, None)):
        moved.slot.load(start)
        state, curve = train_multi(moved, PROMPTS, scorers, first(moved, names=tuple(scorers)), moved.slot.parameters, Coefficients(weights=weights, minibatch=3), 2, 4, OPTIMIZER, 1e-2, seed=3)
        results.append((moved.slot.read(), curve.losses, state.heads["long"]))
    assert all(torch.allclose(results[0][0][name], results[1][0][name], atol=1e-4) for name in start) and np.allclose(results[0][1], results[1][1], atol=1e-5)
    assert torch.allclose(results[0][2], results[1][2], atol=1e-4) and results[0][2].abs().max() > 1e-2


def test_the_gradient_of_mixed_losses_is_the_mixture_of_the_gradients_by_one_backward_pass(moved, monkeypatch):
    rollout, _ = roll_out(moved, PROMPTS, SCORERS, first(moved), Coefficients(), seed=2)
    apart, *_ = objective_gradients(moved, rollout, np.arange(6), moved.slot.parameters, 0.2)
    asked, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: asked.append(1) or grad(*a, **k))
    mixed, *_ = objective_gradients(moved, rollout, np.arange(6), moved.slot.parameters, 0.2, np.array([0.3, 0.7]))
    assert len(asked) == 1 and mixed.shape[0] == 1 and torch.allclose(mixed[0], 0.3 * apart[0] + 0.7 * apart[1], atol=1e-5)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not_and_a_state_is_gone_on_with(moved):
    start, found = moved.slot.read(), []
    config = Coefficients(target_kl=0.05, horizon=50)
    for seed in (7, 7, 8):
        moved.slot.load(start)
        state, curve = train_multi(moved, PROMPTS, SCORERS, first(moved), moved.slot.parameters, config, 2, 4, OPTIMIZER, 1e-2, seed)
        found.append((moved.slot.read(), state, curve))
    same = [all(torch.equal(found[0][0][name], other[0][name]) for name in start) and all(torch.equal(found[0][1].heads[n], other[1].heads[n]) for n in SCORERS) for other in found[1:]]
    assert same == [True, False]
    state, curve = found[0][1:]
    assert curve.coefficient[0] == 0.1 and curve.coefficient[1] == next_coefficient(0.1, curve.kl[0], 0.05, 4, 50) and state.kl == next_coefficient(curve.coefficient[1], curve.kl[1], 0.05, 4, 50)
    assert state.moments["long"].count == 8 and all(head.abs().max() > 0 for head in state.heads.values()) and len(curve.losses) == 2 * 3 * 1
    again, more = train_multi(moved, PROMPTS, SCORERS, state, moved.slot.parameters, config, 1, 4, OPTIMIZER, 1e-2, 9)
    assert more.coefficient == [state.kl] and again.moments["long"].count == 12


@pytest.mark.parametrize(("scorer", "words"), [(lambda p, t: np.full(len(t), np.nan), "NaN or infinite"), (lambda p, t: np.zeros(2), "one finite number for each"), (lambda p: 1 / 0, "failed on 6 responses: TypeError"), (lambda p, t: ["much"] * len(t), "failed on 6 responses: ValueError")])
def test_a_reward_that_gives_no_number_is_refused_by_name(resident, scorer, words):
    with pytest.raises(TrainingError, match=f"the reward of objective 'broken' (?s:.*){words}"):
        roll_out(resident, PROMPTS, {"broken": scorer}, first(resident, names=("broken",)), Coefficients(), 0)


def test_a_reward_that_changes_its_texts_changes_them_for_nobody_else(resident):
    def spoils(prompts, texts):
        texts.sort()
        prompts.clear()
        return np.arange(len(texts), dtype=float)

    alone, _ = roll_out(resident, PROMPTS, {"long": long}, first(resident, names=("long",)), Coefficients(), 0)
    beside, _ = roll_out(resident, PROMPTS, {"spoils": spoils, "long": long}, first(resident, names=("spoils", "long")), Coefficients(), 0)
    assert beside.texts == alone.texts and np.array_equal(beside.scores[:, 1], alone.scores[:, 0])


class Table:
    """A policy that says one token of V, whatever the prompt: its optimum is known."""

    def __init__(self, reference):
        self.reference = torch.as_tensor(reference, dtype=torch.float32).log()
        self.logits = torch.nn.Parameter(self.reference.clone())
        self.model, self.policy = SimpleNamespace(eval=lambda: None), SimpleNamespace(device="cpu", generate=self.generate, encode=lambda prompt: [0])

    def generate(self, prompts, seed, temperature, max_new_tokens=None):
        drawn = np.random.default_rng(seed).choice(len(self.logits), len(prompts), p=(self.logits / temperature).detach().double().softmax(0).numpy())
        return [[SimpleNamespace(ids=(int(n),), text=str(n))] for n in drawn]

    def tokens(self, rows, reference=False, temperature=1.0):
        logprobs = ((self.reference if reference else self.logits) / temperature).log_softmax(0)[[completion[0] for _, completion in rows]][:, None]
        return Tokens(logprobs, torch.zeros_like(logprobs), torch.ones(len(rows), 1, 1), torch.ones(len(rows), 1, dtype=torch.bool))

    def trained(self, rewards, kl, steps, seed=0, lr=0.02, **more):
        scorers = {name: (lambda prompts, texts, table=table: np.array([table[int(t)] for t in texts])) for name, table in rewards.items()}
        state = ClientState.first(list(rewards), 1, kl)
        _, curve = train_multi(
            self, ["x"] * 128, scorers, state, [self.logits], Coefficients(epochs=2, minibatch=64, normalise=False, **more), steps, 128, OPTIMIZER.model_copy(update={"lr": lr}), 0.05, seed)
        return (self.logits / more.get("temperature", 1.0)).detach().softmax(0).numpy(), curve


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_reaches_the_known_optimum_of_a_reward_with_a_penalty(temperature):
    """argmax of E r - kl KL(pi, pi_ref) is pi_ref exp(r / kl), normalised; at a temperature both are the tempered policies."""
    reference, reward, kl = np.array([0.4, 0.3, 0.2, 0.1]), [0.0, 1.0, 2.0, 1.5], 1.0
    found, curve = Table(reference).trained({"r": reward}, kl, 150, temperature=temperature)
    reference = reference ** (1 / temperature) / (reference ** (1 / temperature)).sum()
    best = reference * np.exp(np.array(reward) / kl)
    best /= best.sum()
    assert np.abs(found - best).max() < 0.04 < np.abs(reference - best).max() and np.mean(curve.kl[-20:]) == pytest.approx(float((best * np.log(best / reference)).sum()), abs=0.06)


def test_between_two_objectives_the_compromise_wins_and_a_preference_moves_it():
    rewards = {"a": [1.0, 0.0, 0.7], "b": [0.0, 1.0, 0.7]}
    found, curve = Table([1 / 3] * 3).trained(rewards, 0.05, 60, beta=0.01)
    assert found[2] > 0.8 and math.isclose(np.mean(curve.weights["a"]), 0.5, abs_tol=0.15)
    shares = []
    for liked in (0.05, 1.0, 20.0):
        found, curve = Table([1 / 3] * 3).trained(rewards, 0.05, 60, beta=5.0, preference={"a": liked})
        shares.append(found @ rewards["a"])
        assert curve.weights["a"][0] + curve.weights["b"][0] == pytest.approx(1)
    assert shares[0] < shares[1] - 0.2 and shares[2] > shares[1] + 0.1


def test_the_values_learn_what_a_completion_is_worth():
    _, curve = Table([0.5, 0.5]).trained({"r": [1.0, 1.0]}, 0.0, 60)
    assert curve.value_loss[0] == pytest.approx(0.5, abs=0.05) and curve.value_loss[-1] < 0.01
