"""Advantages of several completions per prompt, estimates of the KL, and moments that clients keep."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from components.config import PpoConfig, RecipeError
from components.learning.loop import build_optimizer
from components.learning.multi_objective_ppo import load_moments, read_moments
from components.learning.ppo import estimate_kl, leave_one_out, masked_mean, normalize_groups, policy_loss
from components.learning.rollouts import sample_rollout
from components.recipes import load_recipe
from tests.support.multi_objective import ADAMW, REWARDS, build_ppo, train_table
from tests.support.reward_functions import score_length
from tests.support.table_policy import TablePolicy

PROMPTS = ["one", "a second question", "and the third of them"]
RLOO = {"kind": "rloo", "samples": 2}
GRPO = {"kind": "grpo", "samples": 2}


def build(policy, estimator, **options):
    return build_ppo(policy, estimator=estimator, **{"kl": 0.3} | options)


def sample(policy, estimator, **options):
    return build(policy, estimator, **options).sample(PROMPTS, seed=4)


# --- functions of rewards


def test_the_baseline_of_a_completion_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 4.0, 7.0, 2.0, 2.0, 5.0])
    expected = [1 - 5.5, 4 - 4, 7 - 2.5, 2 - 3.5, 2 - 3.5, 5 - 2]
    assert leave_one_out(rewards, 3).tolist() == pytest.approx(expected)


def test_groups_are_normalized_each_by_its_own_deviation():
    rewards = torch.tensor([1.0, 4.0, 7.0, 2.0, 2.0, 2.0])
    assert normalize_groups(rewards, 3).tolist() == pytest.approx([-1, 0, 1, 0, 0, 0], abs=1e-3)


@pytest.mark.parametrize("advantages", [leave_one_out, normalize_groups])
@pytest.mark.parametrize("samples", [2, 3, 7, 8])
def test_equal_rewards_of_a_prompt_give_exactly_0(advantages, samples):
    """The fp32 mean of 7 rewards of 100.3 is not 100.3, and a deviation would enlarge the difference."""
    rewards = torch.tensor([0.1, 20.3, 100.3]).repeat_interleave(samples)
    assert torch.equal(advantages(rewards, samples), torch.zeros(3 * samples))


def test_both_estimates_have_the_kl_as_their_mean_and_one_is_never_negative():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    kl = float((policy * (policy / reference).log()).sum())
    k1, k3 = (estimate_kl(policy.log(), reference.log(), estimator) for estimator in ("k1", "k3"))
    assert float((policy * k1).sum()) == pytest.approx(kl)
    assert float((policy * k3).sum()) == pytest.approx(kl)
    assert k1.min() < 0
    assert k3.min() >= 0


# --- rollouts


@pytest.mark.parametrize("estimator", [RLOO, GRPO])
def test_the_completions_of_a_prompt_are_consecutive_and_differ(short_policy, estimator):
    rollout, _ = sample(short_policy, estimator)
    prompts = [prompt for prompt, _ in rollout.rows]
    assert prompts == [short_policy.policy.encode(prompt) for prompt in PROMPTS for _ in range(2)]
    completions = [tuple(completion) for _, completion in rollout.rows]
    assert all(first != second for first, second in zip(completions[::2], completions[1::2], strict=True))
    assert np.array_equal(rollout.scores["long"], score_length([], rollout.texts))


def token_kl(short_policy, rollout):
    with torch.no_grad():
        policy = short_policy.tokens(rollout.rows)
        reference = short_policy.tokens(rollout.rows, reference=True)
    return (policy.logprobs - reference.logprobs) * policy.mask, reference.logprobs


def normalized(scores):
    return (scores - scores.mean()) / scores.std()


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_the_advantage_by_rloo_is_the_difference_of_penalized_rewards_at_every_token(short_policy, j, name):
    rollout, advantages = sample(short_policy, RLOO)
    kl, _ = token_kl(short_policy, rollout)
    rewards = normalized(rollout.scores[name]) - 0.3 * kl.sum(1).numpy()
    differences = (rewards.reshape(3, 2) - rewards.reshape(3, 2)[:, ::-1]).reshape(-1)
    expected = torch.as_tensor(differences, dtype=torch.float32)[:, None] * rollout.tokens.mask
    assert torch.allclose(advantages[j], expected, atol=1e-4)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_the_advantage_by_grpo_is_the_sign_of_the_difference_of_two_scores(short_policy, j, name):
    """The deviation of two values is their difference over the root of 2."""
    rollout, advantages = sample(short_policy, GRPO)
    scores = rollout.scores[name].reshape(3, 2)
    signs = np.sign(scores - scores[:, ::-1]).reshape(-1) / np.sqrt(2)
    expected = torch.as_tensor(signs, dtype=torch.float32)[:, None] * rollout.tokens.mask
    assert torch.allclose(advantages[j], expected, atol=1e-3)


@pytest.mark.parametrize("estimator", ["{kind: gae}", "{kind: rloo}"])
def test_k3_is_refused_as_a_part_of_the_reward(estimator):
    options = f"objectives: {{a: [a]}}, ppo: {{estimator: {estimator}, kl_estimator: k3}}"
    with pytest.raises(RecipeError, match=r"kl_estimator 'k3' is not for.*whose rewards contain.*Use k1"):
        load_recipe("debug", ["federation.method=firm", f"federation.options={{{options}}}"])


def test_the_kl_of_a_rollout_is_estimated_as_the_options_say(short_policy):
    rollouts = {name: sample(short_policy, GRPO, kl_estimator=name)[0] for name in ("k1", "k3")}
    log_ratio, _ = token_kl(short_policy, rollouts["k1"])
    assert rollouts["k1"].kl == pytest.approx(float(log_ratio.sum(1).mean()), rel=1e-4)
    k3 = ((-log_ratio).exp() - 1 + log_ratio).sum(1).mean()
    assert rollouts["k3"].kl == pytest.approx(float(k3), rel=1e-4)
    assert rollouts["k3"].kl > 0
    assert abs(rollouts["k1"].kl) > 1e-3


def test_scores_are_clipped_before_completions_without_an_end_are_penalized(short_policy, monkeypatch):
    """Completions have 12 tokens at most, and one of them is made to end by itself."""
    generate = type(short_policy.policy).generate

    def end_the_first(self, *arguments, **options):
        (first, second), *others = generate(self, *arguments, **options)
        return [[replace(first, finished=True), replace(second, finished=False)], *others]

    monkeypatch.setattr(type(short_policy.policy), "generate", end_the_first)
    limits = {"max_reward": 0.5, "missing_eos_penalty": 3.0}
    rollout, advantages = sample(short_policy, RLOO, kl=0.0, normalize=False, **limits)
    clipped = rollout.scores["vowels"][:2].clip(-0.5, 0.5)
    difference = clipped[0] - (clipped[1] - 3.0)
    assert advantages[1][0, 0].item() == pytest.approx(difference, abs=1e-5)
    assert rollout.finished.tolist() == [True] + 5 * [False]


@pytest.mark.parametrize("estimator", [RLOO, GRPO])
def test_policies_are_measured_by_one_completion_of_a_prompt(short_policy, estimator):
    rollout, expected = (
        sample_rollout(short_policy, PROMPTS, REWARDS, PpoConfig(estimator=kind), seed=4)
        for kind in (estimator, "gae")
    )
    assert len(rollout.rows) == 3
    assert rollout.texts == expected.texts
    assert rollout.kl == expected.kl


# --- gradients


@pytest.mark.parametrize("j", [0, 1])
@pytest.mark.parametrize(
    ("estimator", "by_completion", "penalty"), [("gae", False, 0.0), (RLOO, False, 0.0), (GRPO, True, 0.3)]
)
def test_each_gradient_is_that_of_a_mean_over_tokens_or_completions_with_the_penalty_of_grpo(
    short_policy, estimator, by_completion, penalty, j
):
    ppo = build(short_policy, estimator)
    rollout, advantages = ppo.sample(PROMPTS, seed=4)
    indices = np.array([2, 0])
    gradients = ppo.gradients(rollout, advantages, indices)
    rows = [rollout.rows[n] for n in indices]
    tokens = short_policy.tokens(rows)
    width = tokens.mask.shape[1]
    old, own = rollout.tokens.logprobs[indices, :width], advantages[j][indices, :width]
    log_ratio = tokens.logprobs - short_policy.tokens(rows, reference=True).logprobs.detach()
    losses = policy_loss(tokens.logprobs, old, own, 0.2) + penalty * ((-log_ratio).exp() - 1 + log_ratio)
    loss = masked_mean(losses, tokens.mask, by_completion).mean()
    parts = torch.autograd.grad(loss, short_policy.slot.parameters)
    expected = torch.cat([part.reshape(-1) for part in parts])
    assert torch.allclose(gradients.gradients[j], expected, atol=1e-5)
    assert gradients.losses[j] == pytest.approx(loss.item(), abs=1e-5)
    assert expected.norm() > 1e-4


def test_rloo_keeps_the_relative_lengths_of_gradients_that_grpo_and_gae_remove(short_policy):
    """The second objective is the first one ten times: only with rloo is its gradient ten times as long."""
    lengths = {}
    rewards = {
        "long": score_length,
        "vowels": lambda prompts, texts: 10 * score_length(prompts, texts),
    }
    for kind, estimator in (("rloo", RLOO), ("grpo", GRPO), ("gae", "gae")):
        ppo = build(short_policy, estimator, rewards=rewards, normalize=False, kl=0.0)
        rollout, advantages = ppo.sample(PROMPTS, seed=4)
        short, long = ppo.gradients(rollout, advantages, np.arange(len(rollout.rows))).gradients
        lengths[kind] = float(long.norm() / short.norm())
    assert lengths["rloo"] == pytest.approx(10, rel=1e-3)
    assert lengths["grpo"] == pytest.approx(1, rel=1e-2)
    assert lengths["gae"] == pytest.approx(1, rel=1e-2)


# --- training

TABLE = ([0.4, 0.3, 0.2, 0.1], {"r": [0.0, 1.0, 2.0, 1.5]})


def test_grpo_makes_the_best_completion_the_likeliest():
    policy, ppo = train_table(*TABLE, steps=60, kl=0.05, estimator={"kind": "grpo", "samples": 4})
    assert policy[2] > 0.8
    assert ppo.history["kl"][-1] > ppo.history["kl"][0]


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_step_samples_as_many_completions_as_the_batch_has(kind, monkeypatch):
    calls = []
    generate = TablePolicy.generate

    def record(self, prompts, seed, temperature, count=1):
        calls.append((len(prompts), count))
        return generate(self, prompts, seed, temperature, count)

    monkeypatch.setattr(TablePolicy, "generate", record)
    train_table(*TABLE, steps=2, estimator={"kind": kind, "samples": 8})
    assert calls == [(16, 8), (16, 8)]


# --- moments


def test_moments_continue_in_another_optimizer():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    whole = build_optimizer(parameters, ADAMW)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    first = build_optimizer(copies, ADAMW)
    gradients = [[torch.randn(p.shape) for p in parameters] for _ in range(2)]

    def step(optimizer, values, number):
        for parameter, gradient in zip(values, gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    step(whole, parameters, 0)
    step(first, copies, 0)
    second = build_optimizer(copies, ADAMW)
    other = {"optimizer/critic/0/exp_avg": torch.ones(1)}
    load_moments(second, "policy", read_moments(first, "policy") | other)
    step(whole, parameters, 1)
    step(second, copies, 1)
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))


@pytest.mark.parametrize("kind", ["gae", "rloo"])
def test_moments_are_part_of_a_clients_state_if_they_are_kept(kind):
    _, kept = train_table(*TABLE, steps=1, estimator={"kind": kind}, keep_moments=True)
    _, forgotten = train_table(*TABLE, steps=1, estimator={"kind": kind})
    tensors = kept.tensors()
    owners = {"policy", "critic"} if kind == "gae" else {"policy"}
    assert {name.split("/")[1] for name in tensors if name.startswith("optimizer/")} == owners
    assert set(forgotten.tensors()) == ({"value/r"} if kind == "gae" else set())
    steps = {owner: tensors[f"optimizer/{owner}/0/step"].item() for owner in owners}
    again = (kept.numbers(), tensors)
    _, following = train_table(*TABLE, steps=1, estimator={"kind": kind}, kept=again, keep_moments=True)
    for owner in owners:
        assert following.tensors()[f"optimizer/{owner}/0/step"].item() == 2 * steps[owner] > 0
