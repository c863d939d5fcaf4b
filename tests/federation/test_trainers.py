"""What a client trains and scores: the selector, or the policy on chosen completions or by DPO."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from components.config import DpoObjective
from components.config.federation import METHODS as REGISTERED
from components.data.records import read_pairs
from components.federation.clients import TRAINERS
from components.federation.clients.worker import build_trainer, run_job
from components.federation.local import proximal_wrap
from components.federation.methods.fedbis import FedBis
from components.federation.protocol import GradientJob, MeasureJob, TrainJob
from components.learning.client_data import ClientData
from components.learning.loop import draw_minibatches
from components.learning.pair_scores import pair_logprobs
from components.learning.selector_training import compare, validation_losses
from components.models.resident import ResidentPolicy
from components.models.selector import Comparison
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS

METHODS = {"dpo": "feddpo", "sft": "fedavg", "selector": "fedbis"}


def make_recipe(kind, *overrides):
    method = f"federation.method={METHODS[kind]}"
    return load_recipe("debug", [method, "federation.batch_size=3", "federation.local_steps=2", *overrides])


def make_trainer(kind, *overrides):
    return build_trainer(make_recipe(kind, *overrides), "cpu")


@pytest.fixture(scope="module")
def dpo_trainer():
    return make_trainer("dpo")


@pytest.fixture(scope="module")
def sft_trainer():
    return make_trainer("sft")


@pytest.fixture(scope="module")
def selector_trainer():
    return make_trainer("selector")


@pytest.fixture(params=["dpo", "sft"])
def policy_trainer(request):
    return request.getfixturevalue(f"{request.param}_trainer")


@pytest.fixture(params=METHODS)
def trainer(request):
    return request.getfixturevalue(f"{request.param}_trainer")


@pytest.fixture(scope="module")
def adapter(resident_policy):
    return random_tensors(resident_policy.slot, seed=1, scale=0.2)


def train_job(contexts, adapter, seed=3, client="ada"):
    return TrainJob(client=client, round=0, seed=seed, adapters=(contexts.adapters.put(adapter),))


def measure_logprobs(trainer, adapter, pairs=PAIRS):
    """Log-probabilities of chosen and rejected, [N, 2], under an adapter."""
    trainer.resident.slot.load(adapter)
    return pair_logprobs(trainer.resident, pairs, 6)


def losses_job(adapters):
    """A job for the validation losses of adapters."""
    return MeasureJob(client="ada", round=0, seed=1, adapters=adapters, split="validation", losses=True)


# --- all trainers


def test_every_method_names_a_registered_trainer():
    names = {REGISTERED.load(name).trainer for name in REGISTERED.names()}
    assert names | {"rewards"} == set(TRAINERS.names()), "'rewards' scores pairs before the rounds"


@pytest.mark.parametrize(("kind", "model"), [("sft", "policy"), ("dpo", "policy"), ("selector", "selector")])
def test_a_method_names_the_section_of_the_model_that_its_trainer_trains(kind, model):
    assert make_recipe(kind).federation.options.trained_model == model


def test_a_training_has_the_tensors_of_the_initial_adapter_and_its_losses_steps_and_tokens(trainer, contexts):
    initial = trainer.initial_adapter(0)
    result = trainer.run(train_job(contexts, initial), contexts.open("ada"))
    scalars = result.metrics.scalars
    assert set(result.tensors) == set(initial)
    assert any(not torch.equal(result.tensors[name], initial[name]) for name in initial)
    assert result.rows == 8
    assert scalars["steps"] == 2
    assert scalars["tokens"] > 0
    assert scalars["loss"] == pytest.approx((scalars["loss_first"] + scalars["loss_last"]) / 2)


def test_a_training_is_a_function_of_its_job(trainer, contexts):
    adapter = trainer.initial_adapter(0)
    first = trainer.run(train_job(contexts, adapter), contexts.open("ada")).tensors
    trainer.run(train_job(contexts, adapter, seed=4, client="bea"), contexts.open("bea"))
    torch.manual_seed(99)
    second = trainer.run(train_job(contexts, adapter), contexts.open("ada")).tensors
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor)


def test_a_job_of_another_kind_is_refused_by_trainer_and_kind(trainer, contexts):
    digest = contexts.adapters.put(trainer.initial_adapter(0))
    job = GradientJob(client="ada", round=0, seed=1, adapters=(digest,))
    with pytest.raises(TypeError, match=f"{type(trainer).__name__} has no jobs of kind '{job.kind}'"):
        trainer.run(job, contexts.open("ada"))


# --- policies


def test_a_policy_measures_no_losses_of_adapters(policy_trainer, contexts, adapter):
    job = losses_job((contexts.adapters.put(adapter),))
    with pytest.raises(TypeError, match="'measure'"):
        policy_trainer.run(job, contexts.open("ada"))


def test_margins_and_rewards_of_a_policy_are_implicit_rewards_over_beta(policy_trainer, adapter):
    initial = policy_trainer.initial_adapter(0)
    policy = measure_logprobs(policy_trainer, adapter)
    reference = measure_logprobs(policy_trainer, initial)
    scores = policy_trainer.score_pairs(PAIRS, adapter, None)
    ratios = policy - reference
    assert np.allclose(scores.margins[0], ratios[:, 0] - ratios[:, 1], atol=1e-4)
    assert np.allclose(scores.rewards[0], ratios[:, 0], atol=1e-4)
    assert np.abs(scores.rewards[0]).max() > 1e-3


def test_margins_of_likelihoods_are_summed_and_per_token(policy_trainer, adapter):
    logprobs = measure_logprobs(policy_trainer, adapter)
    encoded = [policy_trainer.resident.encode(*pair.texts)[1:] for pair in PAIRS]
    lengths = np.array([[len(completion) for completion in completions] for completions in encoded])
    margins = policy_trainer.score_pairs(PAIRS, adapter, None).margins_by_metric
    per_token = logprobs / lengths
    assert np.allclose(margins["summed"][0], logprobs[:, 0] - logprobs[:, 1], atol=1e-4)
    assert np.allclose(margins["per_token"][0], per_token[:, 0] - per_token[:, 1], atol=1e-4)


def test_the_reference_has_margins_and_rewards_of_0_and_no_pairs_have_no_scores(policy_trainer, adapter):
    policy_trainer.resident.slot.load(adapter)
    scores = policy_trainer.score_pairs(PAIRS, policy_trainer.initial_adapter(0), None)
    assert not scores.margins.any()
    assert not scores.rewards.any()
    assert policy_trainer.score_pairs([], adapter, None).margins.shape == (1, 0)


@pytest.mark.parametrize("rows", [PAIRS[:3], PAIRS[3:]], ids=["first", "second"])
def test_each_clients_pairs_are_scored_against_their_own_reference(dpo_trainer, adapter, rows):
    for other_rows in (PAIRS[:3], PAIRS[3:], PAIRS[:3]):
        dpo_trainer.score_pairs(other_rows, adapter, None)
    shared = dpo_trainer.score_pairs(rows, adapter, None).margins
    assert np.array_equal(shared, make_trainer("dpo").score_pairs(rows, adapter, None).margins)


# --- the cache of the reference

QUESTIONS = [replace(PAIRS[n % len(PAIRS)], prompt=f"question {n}", pair_id=str(n)) for n in range(7)]


@pytest.fixture
def new_trainer():
    return make_trainer("dpo", "federation.batch_size=2", "federation.local_steps=1")


@pytest.fixture
def scored_rows(new_trainer, monkeypatch):
    """Indices of the questions that the model scores, one list per call."""
    calls = []
    score = ResidentPolicy.score
    encoded = [new_trainer.resident.encode(*row.texts) for row in QUESTIONS]

    def record(self, rows, *arguments, **options):
        calls.append([encoded.index(row) for row in rows])
        return score(self, rows, *arguments, **options)

    monkeypatch.setattr(ResidentPolicy, "score", record)
    return calls


def reference_logprobs(trainer, rows, used=None, batch_size=4):
    """Log-probabilities under the reference, as the loss of a client has them."""
    used = np.arange(len(rows)) if used is None else np.array(used)
    data = ClientData(trainer.resident, DpoObjective(), rows, used, trainer.reference_cache, batch_size)
    return data.reference_logprobs()


def test_the_reference_is_computed_once_and_only_for_used_rows(new_trainer, scored_rows):
    """A batch has four questions; seven are cut into four and three."""
    logprobs = reference_logprobs(new_trainer, QUESTIONS, [6])
    assert scored_rows == [[6]]
    assert np.isnan(logprobs[:6]).all()
    reference_logprobs(new_trainer, QUESTIONS)
    assert sorted(len(rows) for rows in scored_rows[1:]) == [3, 4]
    reference_logprobs(new_trainer, QUESTIONS)
    assert len(scored_rows) == 3


def test_the_reference_of_a_row_does_not_depend_on_earlier_calls(new_trainer, dpo_trainer):
    expected = reference_logprobs(make_trainer("dpo"), QUESTIONS)
    reference_logprobs(new_trainer, QUESTIONS, [3, 6])
    reference_logprobs(new_trainer, QUESTIONS[::2])
    assert np.array_equal(reference_logprobs(new_trainer, QUESTIONS), expected)
    assert np.allclose(reference_logprobs(dpo_trainer, QUESTIONS, batch_size=6), expected, atol=1e-4)


def test_training_does_not_depend_on_cached_references(new_trainer, contexts, adapter):
    reference_logprobs(new_trainer, contexts.open("ada").rows("train")[::2])
    other = make_trainer("dpo", "federation.batch_size=2", "federation.local_steps=1")
    job = train_job(contexts, adapter)
    first, second = (trainer.run(job, contexts.open("ada")).tensors for trainer in (new_trainer, other))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor)


@pytest.fixture
def client_data(monkeypatch):
    """The data of each loss that trainers build."""
    built = []

    def record(*arguments):
        built.append(ClientData(*arguments))
        return built[-1]

    monkeypatch.setattr("components.federation.clients.policy_trainer.ClientData", record)
    return built


def test_the_used_pairs_are_those_of_the_minibatches(new_trainer, contexts, adapter, client_data):
    new_trainer.run(train_job(contexts, adapter, seed=5), contexts.open("ada"))
    (data,) = client_data
    (minibatch,) = draw_minibatches(8, 2, 1, seed=5)
    assert data.used.tolist() == sorted(minibatch)
    assert data.batch_size == 4


@pytest.mark.parametrize(("round", "rounds", "progress"), [(0, 1, 0.0), (1, 3, 0.5), (2, 3, 1.0)])
def test_a_loss_is_told_the_share_of_rounds_that_are_over(
    round, rounds, progress, contexts, adapter, client_data
):
    trainer = make_trainer("dpo", f"federation.rounds={rounds}", "federation.local_steps=1")
    trainer.run(train_job(contexts, adapter).model_copy(update={"round": round}), contexts.open("ada"))
    assert [data.progress for data in client_data] == [progress]


# --- selectors


def test_both_orders_of_a_pair_come_from_training_rows(prepared, contexts):
    """Pairs are split first and swapped afterwards, so no trained comparison is a held-out pair."""
    trainer = make_trainer("selector", "federation.local_steps=6")
    with mock.patch.object(trainer.selector, "encode", wraps=trainer.selector.encode) as encode:
        run_job(train_job(contexts, trainer.initial_adapter(0)), trainer, contexts, load_recipe("debug"))
    comparisons = [call.args[0] for call in encode.call_args_list]
    rows = read_pairs(prepared / "pairs.parquet", "ada")
    prompts = {comparison.prompt for comparison in comparisons}
    assert prompts == {row.prompt for row in rows if row.split == "train"}
    assert not prompts & {row.prompt for row in rows if row.split != "train"}
    assert len(comparisons) == 2 * 8
    assert {Comparison(c.prompt, c.second, c.first) for c in comparisons} == set(comparisons)


def test_a_score_job_gives_the_validation_loss_of_each_selector(selector_trainer, contexts):
    adapters = [selector_trainer.initial_adapter(seed) for seed in (0, 1)]
    refs = tuple(contexts.adapters.put(adapter) for adapter in adapters)
    context = contexts.open("ada")
    result = selector_trainer.run(losses_job(refs), context)
    expected = validation_losses(selector_trainer.selector, context.rows("validation"), adapters)
    assert result.losses == tuple(expected)
    assert result.tensors is None
    assert result.rows == 2


def test_selectors_score_pairs_and_compare_completions_in_the_order_of_the_adapters(
    selector_trainer, random_adapter
):
    adapters = [random_adapter(1), random_adapter(2)]
    scores = selector_trainer.score_pairs(PAIRS, adapters)
    comparisons = [Comparison(*pair.texts) for pair in PAIRS]
    odds = compare(selector_trainer.selector, comparisons, adapters)
    assert scores.margins.shape == odds.shape == (2, 6)
    assert scores.rewards is None
    alone = selector_trainer.score_pairs(PAIRS, adapters[1:])
    assert np.allclose(scores.margins[1], alone.margins[0])
    assert not np.allclose(scores.margins[0], scores.margins[1])


class ProximalFrozenSelector(FedBis):
    """FedBis with a proximal term, whose clients do not train the factors A."""

    weight: float

    def local(self):
        return replace(super().local(), frozen=("A",), wrap=proximal_wrap(self.weight))


def train_proximal(contexts, adapter, weight):
    """The adapter and the metrics of two steps at a client, with a proximal term of this weight."""
    recipe = make_recipe("selector", "federation.optimizer.name=sgd", "federation.optimizer.lr=0.1")
    options = ProximalFrozenSelector(weight=weight)
    federation = recipe.federation.model_copy(update={"options": options})
    trainer = build_trainer(recipe.model_copy(update={"federation": federation}), "cpu")
    result = trainer.run(train_job(contexts, adapter), contexts.open("ada"))
    return result.tensors, result.metrics.scalars


def test_a_selector_has_the_proximal_term_and_the_frozen_factors_of_its_method(contexts, selector_trainer):
    adapter = random_tensors(selector_trainer.selector.slot, seed=1, scale=0.2)
    plain, metrics = train_proximal(contexts, adapter, 0.0)
    _, proximal = train_proximal(contexts, adapter, 5.0)
    for name, tensor in adapter.items():
        assert torch.equal(plain[name], tensor) == (".lora_A." in name)
    assert proximal["loss_first"] == pytest.approx(metrics["loss_first"], rel=1e-6)
    assert proximal["loss_last"] > metrics["loss_last"]


@pytest.mark.parametrize(("method", "options"), [("fedper", "{shared_layers: 1}"), ("fedrep", "{}")])
def test_clients_with_private_modules_have_the_proximal_term_of_their_method(
    monkeypatch, contexts, method, options
):
    chosen = [f"federation.method={method}", f"federation.options={options}", "federation.optimizer.lr=1e-2"]
    recipe = load_recipe("debug", [*chosen, "federation.local_steps=6", "federation.batch_size=8"])
    scalars = {}
    cls = REGISTERED.load(method)
    plain = cls.local
    for weight in (0.0, 100.0):
        wrap = proximal_wrap(weight)
        monkeypatch.setattr(cls, "local", lambda self, wrap=wrap: replace(plain(self), wrap=wrap))
        trainer = build_trainer(recipe, "cpu")
        result = trainer.run(train_job(contexts, trainer.initial_adapter(0)), contexts.open("ada"))
        scalars[weight] = result.metrics.scalars
    if method == "fedper":
        assert scalars[100.0]["loss_first"] == scalars[0.0]["loss_first"]
    assert scalars[100.0]["loss_last"] > scalars[0.0]["loss_last"]
