"""Advantages of several completions per prompt, estimates of the KL, and moments that clients keep."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.config import MultiObjective, OptimizerConfig, PpoConfig, RecipeError
from components.learning.loop import Training, build_optimizer
from components.learning.multi_objective_ppo import (
    MultiObjectivePpo,
    load_moments,
    read_moments,
    solve_weights,
)
from components.learning.ppo import estimate_kl, leave_one_out, masked_mean, normalize_groups, policy_loss
from components.learning.rollouts import sample_rollout
from components.models.resident import ResidentPolicy
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.reward_functions import score_length, score_vowels
from tests.support.table_policy import TablePolicy

PROMPTS = ["one", "a second question", "and the third of them"]
REWARDS = {"long": score_length, "vowels": score_vowels}
RLOO = {"kind": "rloo", "samples": 2}
GRPO = {"kind": "grpo", "samples": 2}
ADAMW = OptimizerConfig(name="adamw", lr=1e-2, betas=[0.9, 0.999], weight_decay=0.0, clip=None)


@pytest.fixture(scope="module")
def shared_resident(debug):
    torch.set_num_threads(1)
    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 12}), "cpu")


@pytest.fixture
def resident(shared_resident):
    """The tiny policy with a random adapter in its slot."""
    shared_resident.slot.load(random_tensors(shared_resident.slot, seed=1, scale=0.2))
    return shared_resident


def ppo_config(estimator, **values):
    return PpoConfig(**{"estimator": estimator, "target_kl": None, "kl": 0.3} | values)


def build(resident, ppo, rewards=REWARDS, training=None, kept=({}, {})):
    """PPO of a client that kept these numbers and tensors."""
    objective = MultiObjective(objectives={name: [name] for name in rewards}, ppo=ppo, beta=0.01)
    training = training or Training(1, 6, ADAMW, seed=0)
    return MultiObjectivePpo(resident, rewards, objective, training, *kept)


def sample(resident, ppo):
    return build(resident, ppo).sample(PROMPTS, seed=4)


# --- functions of rewards


def test_the_baseline_of_a_completion_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 4.0, 7.0, 2.0, 2.0, 5.0])
    expected = [1 - 5.5, 4 - 4, 7 - 2.5, 2 - 3.5, 2 - 3.5, 5 - 2]
    assert leave_one_out(rewards, 3).tolist() == pytest.approx(expected)


def test_groups_are_normalized_each_by_its_own_deviation():
    rewards = torch.tensor([1.0, 4.0, 7.0, 2.0, 2.0, 2.0])
    assert normalize_groups(rewards, 3).tolist() == pytest.approx([-1, 0, 1, 0, 0, 0], abs=1e-3)


@pytest.mark.parametrize("function", [leave_one_out, normalize_groups])
def test_advantages_of_a_prompt_have_no_sum_and_do_not_depend_on_a_shift(function):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = function(rewards, 4)
    assert torch.allclose(advantages.reshape(3, 4).sum(1), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(function(rewards + 5, 4), advantages)


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
def test_the_completions_of_a_prompt_are_consecutive_and_differ(resident, estimator):
    rollout, _ = sample(resident, ppo_config(estimator))
    prompts = [prompt for prompt, _ in rollout.rows]
    assert prompts == [resident.policy.encode(prompt) for prompt in PROMPTS for _ in range(2)]
    completions = [tuple(completion) for _, completion in rollout.rows]
    assert all(first != second for first, second in zip(completions[::2], completions[1::2], strict=True))
    assert np.array_equal(rollout.scores["long"], score_length([], rollout.texts))


def token_kl(resident, rollout):
    with torch.no_grad():
        policy = resident.tokens(rollout.rows)
        reference = resident.tokens(rollout.rows, reference=True)
    return (policy.logprobs - reference.logprobs) * policy.mask, reference.logprobs


def normalized(scores):
    return (scores - scores.mean()) / scores.std()


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_the_advantage_by_rloo_is_the_difference_of_penalized_rewards_at_every_token(resident, j, name):
    rollout, advantages = sample(resident, ppo_config(RLOO))
    kl, _ = token_kl(resident, rollout)
    rewards = normalized(rollout.scores[name]) - 0.3 * kl.sum(1).numpy()
    differences = (rewards.reshape(3, 2) - rewards.reshape(3, 2)[:, ::-1]).reshape(-1)
    expected = torch.as_tensor(differences, dtype=torch.float32)[:, None] * rollout.tokens.mask
    assert torch.allclose(advantages[j], expected, atol=1e-4)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(("j", "name"), list(enumerate(REWARDS)))
def test_the_advantage_by_grpo_is_the_sign_of_the_difference_of_two_scores(resident, j, name):
    """The deviation of two values is their difference over the root of 2."""
    rollout, advantages = sample(resident, ppo_config(GRPO))
    scores = rollout.scores[name].reshape(3, 2)
    signs = np.sign(scores - scores[:, ::-1]).reshape(-1) / np.sqrt(2)
    expected = torch.as_tensor(signs, dtype=torch.float32)[:, None] * rollout.tokens.mask
    assert torch.allclose(advantages[j], expected, atol=1e-3)


@pytest.mark.parametrize("estimator", ["{kind: gae}", "{kind: rloo}"])
def test_k3_is_refused_as_a_part_of_the_reward(estimator):
    options = f"objectives: {{a: [a]}}, ppo: {{estimator: {estimator}, kl_estimator: k3}}"
    with pytest.raises(RecipeError, match=r"kl_estimator 'k3' is not for.*whose rewards contain.*Use k1"):
        load_recipe("debug", ["federation.method=firm", f"federation.options={{{options}}}"])


def test_the_kl_of_a_rollout_is_estimated_as_the_options_say(resident):
    rollouts = {name: sample(resident, ppo_config(GRPO, kl_estimator=name))[0] for name in ("k1", "k3")}
    log_ratio, _ = token_kl(resident, rollouts["k1"])
    assert rollouts["k1"].kl == pytest.approx(float(log_ratio.sum(1).mean()), rel=1e-4)
    k3 = ((-log_ratio).exp() - 1 + log_ratio).sum(1).mean()
    assert rollouts["k3"].kl == pytest.approx(float(k3), rel=1e-4)
    assert rollouts["k3"].kl > 0


def test_scores_are_clipped_before_completions_without_an_end_are_penalized(resident, monkeypatch):
    """Completions have 12 tokens at most, and one of them is made to end by itself."""
    generate = type(resident.policy).generate

    def end_the_first(self, *arguments, **options):
        groups = generate(self, *arguments, **options)
        first, *others = groups[0]
        ended = SimpleNamespace(ids=first.ids, text=first.text, finished=True)
        rest = [SimpleNamespace(ids=c.ids, text=c.text, finished=False) for c in others]
        return [[ended, *rest], *groups[1:]]

    monkeypatch.setattr(type(resident.policy), "generate", end_the_first)
    ppo = ppo_config(RLOO, kl=0.0, normalize=False, max_reward=0.5, missing_eos_penalty=3.0)
    rollout, advantages = sample(resident, ppo)
    clipped = rollout.scores["vowels"][:2].clip(-0.5, 0.5)
    difference = clipped[0] - (clipped[1] - 3.0)
    assert advantages[1][0, 0].item() == pytest.approx(difference, abs=1e-5)
    assert rollout.finished.tolist() == [True] + 5 * [False]


@pytest.mark.parametrize("estimator", [RLOO, GRPO])
def test_policies_are_measured_by_one_completion_of_a_prompt(resident, estimator):
    rollout = sample_rollout(resident, PROMPTS, REWARDS, ppo_config(estimator), seed=4)
    expected = sample_rollout(resident, PROMPTS, REWARDS, ppo_config("gae"), seed=4)
    assert len(rollout.rows) == 3
    assert rollout.texts == expected.texts
    assert rollout.kl == expected.kl


# --- gradients


def objective_loss(resident, rollout, advantages, by_completion, penalty):
    tokens = resident.tokens(rollout.rows)
    losses = policy_loss(tokens.logprobs, rollout.tokens.logprobs, advantages, 0.2)
    if penalty:
        log_ratio = tokens.logprobs - token_kl(resident, rollout)[1]
        losses = losses + penalty * ((-log_ratio).exp() - 1 + log_ratio)
    return masked_mean(losses, tokens.mask, by_completion).mean()


@pytest.mark.parametrize(("estimator", "by_completion", "penalty"), [(RLOO, False, 0.0), (GRPO, True, 0.3)])
def test_the_loss_is_a_mean_over_tokens_or_completions_with_the_penalty_of_grpo(
    resident, estimator, by_completion, penalty
):
    ppo = build(resident, ppo_config(estimator))
    rollout, advantages = ppo.sample(PROMPTS, seed=4)
    gradients = ppo.gradients(rollout, advantages, np.arange(6))
    for j in range(2):
        loss = objective_loss(resident, rollout, advantages[j], by_completion, penalty)
        parts = torch.autograd.grad(loss, resident.slot.parameters)
        expected = torch.cat([part.reshape(-1) for part in parts])
        assert torch.allclose(gradients.gradients[j], expected, atol=1e-5)
        assert gradients.losses[j] == pytest.approx(loss.item(), abs=1e-5)
        assert expected.norm() > 1e-4


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("estimator", [RLOO, GRPO])
def test_micro_batches_have_the_gradients_of_the_minibatch(resident, estimator, size):
    computed = []
    for micro_batch_size in (None, size):
        training = Training(1, 6, ADAMW, 0, micro_batch_size)
        ppo = build(resident, ppo_config(estimator), training=training)
        computed.append(ppo.gradients(*ppo.sample(PROMPTS, seed=4), np.arange(6)))
    whole, parts = computed
    assert torch.allclose(parts.gradients, whole.gradients, atol=1e-5)
    assert parts.losses == pytest.approx(whole.losses, abs=1e-5)
    assert parts.kl == pytest.approx(whole.kl, abs=1e-6)


def test_rloo_keeps_the_relative_lengths_of_gradients_that_grpo_and_gae_remove(resident):
    """The second objective is the first one ten times: only with rloo is its gradient ten times as long."""
    lengths = {}
    rewards = {
        "long": score_length,
        "vowels": lambda prompts, texts: 10 * score_length(prompts, texts),
    }
    for kind, estimator in {"rloo": RLOO, "grpo": GRPO, "gae": {"kind": "gae"}}.items():
        ppo = build(resident, ppo_config(estimator, normalize=False, kl=0.0), rewards)
        rollout, advantages = ppo.sample(PROMPTS, seed=4)
        short, long = ppo.gradients(rollout, advantages, np.arange(len(rollout.rows))).gradients
        lengths[kind] = float(long.norm() / short.norm())
    assert lengths["rloo"] == pytest.approx(10, rel=1e-3)
    assert lengths["grpo"] == pytest.approx(1, rel=1e-2)
    assert lengths["gae"] == pytest.approx(1, rel=1e-2)


def test_the_weights_of_mgda_favour_the_shorter_gradient():
    config = MultiObjective(objectives={"a": ["a"], "b": ["b"]}, ppo=PpoConfig(), beta=1e-6)
    weights = solve_weights(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), ["a", "b"], config)
    assert weights.tolist() == pytest.approx([0.9, 0.1], abs=1e-3)


# --- training


def train_table(estimator, kl, steps=60, lr=0.05, kept=({}, {}), **coefficients):
    """Train a table policy of four tokens; returns it and its PPO."""
    table = TablePolicy([0.4, 0.3, 0.2, 0.1])
    reward = [0.0, 1.0, 2.0, 1.5]
    functions = {"r": lambda prompts, texts: np.array([reward[int(text)] for text in texts])}
    values = {"epochs": 2, "minibatch": 64, "normalize": False, "kl": kl}
    training = Training(steps, 128, ADAMW.model_copy(update={"lr": lr}), seed=0)
    ppo = build(table, ppo_config(estimator, **values | coefficients), functions, training, kept)
    ppo.train(["x"] * 128)
    return table, ppo


@pytest.mark.slow
def test_rloo_reaches_the_known_optimum_of_a_reward_with_a_penalty():
    """argmax of E r - kl KL(pi, pi_ref) is pi_ref exp(r / kl), normalized."""
    table, ppo = train_table({"kind": "rloo", "samples": 4}, kl=1.0, steps=80, lr=0.04)
    optimum = np.array([0.4, 0.3, 0.2, 0.1]) * np.exp([0.0, 1.0, 2.0, 1.5])
    optimum /= optimum.sum()
    assert np.abs(table.logits.detach().softmax(0).numpy() - optimum).max() < 0.05
    assert "value_loss" not in ppo.history


@pytest.mark.slow
def test_grpo_makes_the_best_completion_the_likeliest():
    table, ppo = train_table({"kind": "grpo", "samples": 4}, kl=0.05)
    assert table.logits.detach().softmax(0)[2] > 0.8
    assert ppo.history["kl"][-1] > ppo.history["kl"][0]


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_step_samples_as_many_completions_as_the_batch_has(kind, monkeypatch):
    calls = []
    generate = TablePolicy.generate

    def record(self, prompts, seed, temperature, count=1):
        calls.append((len(prompts), count))
        return generate(self, prompts, seed, temperature, count)

    monkeypatch.setattr(TablePolicy, "generate", record)
    train_table({"kind": kind, "samples": 8}, kl=0.1, steps=2)
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


def test_an_optimizer_without_moments_begins_at_0():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([parameter], ADAMW)
    assert read_moments(optimizer, "policy") == {}
    load_moments(optimizer, "policy", {})
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gae", "rloo"])
def test_moments_are_part_of_a_clients_state_if_they_are_kept(kind):
    _, kept = train_table({"kind": kind}, kl=0.1, steps=1, keep_moments=True)
    _, forgotten = train_table({"kind": kind}, kl=0.1, steps=1)
    tensors = kept.tensors()
    owners = {"policy", "critic"} if kind == "gae" else {"policy"}
    assert {name.split("/")[1] for name in tensors if name.startswith("optimizer/")} == owners
    assert set(forgotten.tensors()) == ({"value/r"} if kind == "gae" else set())
    steps = {owner: tensors[f"optimizer/{owner}/0/step"].item() for owner in owners}
    again = (kept.numbers(), tensors)
    _, following = train_table({"kind": kind}, kl=0.1, steps=1, kept=again, keep_moments=True)
    for owner in owners:
        assert following.tensors()[f"optimizer/{owner}/0/step"].item() == 2 * steps[owner] > 0
