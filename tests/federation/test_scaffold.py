"""SCAFFOLD: hand-computed steps of clients and server, and the control variates of a run."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from components.config import OptimizerConfig, RecipeError
from components.federation.clients.private import PrivateState, PrivateStore, private_root
from components.federation.methods.fedbis import FedBis
from components.federation.protocol import TrainJob
from components.federation.step_answers import validate_updates
from components.learning.loop import Loss, RowLosses, Training, train
from components.learning.wrapped_losses import ControlVariates, LocalTraining
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop, prepare_rewards, run_bare_loop
from tests.support.bound_methods import TENSOR, bind_method, get_values, make_update, small_federation

START = [1.0, 0.0, -2.0]
PAIRS = {"ada": 6, "bea": 1, "cyd": 1}
SGD = "federation.optimizer={name: sgd, lr: 0.1, clip: null}"


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


# --- the server


def bind_scaffold(store, **options):
    bound = bind_method(store, "scaffold", 2, **options)
    return bound, bound.start(small_federation(store, PAIRS, START, 2), 0)


def answer(store, bound, state, movements, changes):
    """The state after a round in which each sampled client has this movement and this change of c_m."""
    jobs = bound.plan(state)
    updates = []
    start = store.get(state.adapters["policy"])[TENSOR]
    for job, movement, change in zip(jobs, movements, changes, strict=True):
        sent = store.put({TENSOR: start + tensor(*movement), f"control/{TENSOR}": tensor(*change)})
        updates.append(make_update(job, sent, kept=1))
    return bound.aggregate(state, updates), [job.client for job in jobs]


MOVEMENTS = [(2.0, 0.0, 0.0), (0.0, -4.0, 2.0)]
CHANGES = [(3.0, 0.0, 0.0), (0.0, 6.0, -3.0)]


@pytest.mark.parametrize(("rate", "policy"), [(1.0, [2.0, -2.0, -1.0]), (0.5, [1.5, -1.0, -1.5])])
def test_the_server_moves_by_its_rate_times_the_mean_movement_and_c_by_the_change_over_all_clients(
    store, rate, policy
):
    bound, state = bind_scaffold(store, server_lr=rate)
    state, _ = answer(store, bound, state, MOVEMENTS, CHANGES)
    assert get_values(store, state.adapters["policy"]) == pytest.approx(policy)
    assert get_values(store, state.memory.control) == pytest.approx([1.0, 2.0, -1.0])
    assert state.metrics.scalars["control_norm"] == pytest.approx(6**0.5)


def test_c_adds_up_over_the_rounds_and_is_attached_to_later_jobs(store):
    bound, state = bind_scaffold(store)
    assert [job.attached for job in bound.plan(state)] == [{}, {}]
    for number in (1, 2):
        state, names = answer(store, bound, state, MOVEMENTS, CHANGES)
        assert get_values(store, state.memory.control) == pytest.approx([number, 2.0 * number, -number])
        assert set(state.memory.job_keys) >= set(names)
        for job in bound.plan(state):
            assert job.attached == {"control": state.memory.control}
            assert job.received == (state.adapters["policy"], state.memory.control)
    assert get_values(store, state.adapters["policy"]) == pytest.approx([3.0, -4.0, 0.0])


def test_weights_by_pairs_count_in_both_means(store):
    bound, state = bind_scaffold(store, weights="pairs")
    state, names = answer(store, bound, state, MOVEMENTS, CHANGES)
    first, second = (PAIRS[name] / 8 for name in names)
    policy = get_values(store, state.adapters["policy"])
    assert policy[0] == pytest.approx(1 + 2 * first / (first + second))
    assert policy[1] == pytest.approx(-4 * second / (first + second))
    assert get_values(store, state.memory.control) == pytest.approx([3 * first, 6 * second, -3 * second])


def test_an_update_without_control_variates_is_refused(store):
    bound, state = bind_scaffold(store)
    job = bound.plan(state)[0]
    template = bound.method.update_template(state, store.get(state.initial))
    updates = [make_update(job, store.put({TENSOR: tensor(*START)}))]
    accepted, refused = validate_updates(updates, store, template)
    assert not accepted
    assert f"control/{TENSOR}" in refused[0].reason


# --- a client


class Linear(Loss):
    """The loss <gradient, weight> of each row, whose gradient is the same everywhere."""

    def __init__(self, weight, gradient):
        self.weight = weight
        self.gradient = gradient

    def __call__(self, rows):
        return RowLosses(self.value().expand(len(rows)), len(rows))

    def value(self):
        return (self.gradient * self.weight).sum()


class Quadratic(Linear):
    """The loss |weight - gradient|^2 / 2 of each row, whose gradient is weight - gradient."""

    def value(self):
        return (self.weight - self.gradient).square().sum() / 2


def train_client(loss_type, steps, server=None, own=None, lr=0.5):
    """Train a weight of (1, 0, -2) with the gradient or the target (1, 2, 3); the weight, and the result."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(tensor(*START))
    attached = {} if server is None else {"control": {TENSOR: server}}
    kept = {} if own is None else {f"control/{TENSOR}": own}
    plain = loss_type(model.weight, tensor(1.0, 2.0, 3.0))
    loss = ControlVariates(plain, LocalTraining({TENSOR: model.weight}, lr, attached, kept), "control")
    training = Training(steps, 1, OptimizerConfig(name="sgd", lr=lr, clip=None), seed=0)
    train(model, [model.weight], training.draw_minibatches(1), loss, training)
    return model.weight.detach(), loss.sent({}), loss.tensors()


def test_in_the_first_round_a_step_is_that_of_gradient_descent():
    weight, sent, kept = train_client(Linear, 2)
    assert weight.tolist() == pytest.approx([0.0, -2.0, -5.0])
    assert sent[f"control/{TENSOR}"].tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert kept[f"control/{TENSOR}"].tolist() == pytest.approx([1.0, 2.0, 3.0])


def test_a_step_is_corrected_by_both_control_variates():
    """g - c_m + c = (1, 2, 3) - (1, 0, -1) + (0, 1, 1) = (0, 3, 5); two steps of 0.5."""
    weight, sent, kept = train_client(Linear, 2, server=tensor(0.0, 1.0, 1.0), own=tensor(1.0, 0.0, -1.0))
    assert weight.tolist() == pytest.approx([1.0, -3.0, -7.0])
    assert kept[f"control/{TENSOR}"].tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert sent[f"control/{TENSOR}"].tolist() == pytest.approx([0.0, 2.0, 4.0])


def test_the_new_control_variate_is_the_mean_of_the_gradients_along_the_way():
    """c - c_m = (1, 0, 0). Gradients (0, -2, -5) and, at (0.5, 1, 0.5), (-0.5, -1, -2.5)."""
    weight, _, kept = train_client(Quadratic, 2, server=tensor(1.0, 0.0, 0.0), own=tensor(0.0, 0.0, 0.0))
    assert weight.tolist() == pytest.approx([0.25, 1.5, 1.75])
    assert kept[f"control/{TENSOR}"].tolist() == pytest.approx([-0.25, -1.5, -3.75])


# --- the tiny model


def make_recipe(method="scaffold", rounds=1, steps=1, *overrides):
    settings = [f"federation.rounds={rounds}", f"federation.local_steps={steps}", *overrides]
    common = [f"federation.method={method}", SGD, "federation.clients_per_round=4"]
    return load_recipe("debug", [*common, *settings])


def test_a_step_of_the_trainer_is_the_plain_step_and_the_correction(prepared, tmp_path):
    """After one step from phi, the plain client is at phi - eta g."""
    plain = open_loop(make_recipe("feddpo"), prepared, tmp_path / "plain")
    loop = open_loop(make_recipe(), prepared, tmp_path / "scaffold")
    job = loop.bound.plan(loop.initial_state())[0]
    store = loop.commits.store
    start = {name: t + 0.01 for name, t in store.get(job.adapter).items()}
    control = {name: torch.full_like(t, 0.5) for name, t in start.items()}
    own = {name: torch.full_like(t, 0.2) for name, t in start.items()}
    private = PrivateStore(private_root(loop.commits.folder), job.client)
    state = PrivateState({f"loss.control/{name}": t for name, t in own.items()})
    private.save("earlier", "", state)
    plain.commits.store.put(start)
    settings = {"client": job.client, "round": 0, "seed": job.seed, "adapters": (store.put(start),)}
    reference = plain.commits.store.get(plain.run_job(TrainJob(**settings)).adapter)
    attached = {"control": store.put(control)}
    corrected = TrainJob(**settings, attached=attached, previous_job_key="earlier")
    update = loop.run_job(corrected)
    sent = store.get(update.adapter)
    kept = private.load(corrected.key()).tensors
    assert update.traffic.kept > 0
    assert set(sent) == {*start, *(f"control/{name}" for name in start)}
    for name, initial in start.items():
        gradient = (initial - reference[name]) / 0.1
        assert torch.allclose(sent[name], reference[name] - 0.1 * 0.3, atol=1e-6)
        assert torch.allclose(kept[f"loss.control/{name}"], gradient, atol=1e-5)
        assert torch.allclose(sent[f"control/{name}"], gradient - 0.2, atol=1e-5)


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A run of two rounds in which all clients take part."""
    folder = tmp_path_factory.mktemp("scaffold")
    run_bare_loop(make_recipe(rounds=2, steps=2), prepared, folder)
    return open_loop(make_recipe(rounds=2, steps=2), prepared, folder)


def check_mean_of_kept(loop):
    """That c is the mean of the control variates that the clients keep, whose tensors are returned."""
    memory = loop.latest_state().memory
    stores = private_root(loop.commits.folder)
    kept = [PrivateStore(stores, name).load(key).tensors for name, key in memory.job_keys.items()]
    assert len(kept) == 4
    control = loop.commits.store.get(memory.control)
    assert any(t.any() for t in control.values())
    for name, values in control.items():
        mean = torch.stack([own[f"loss.control/{name}"] for own in kept]).mean(0)
        assert torch.allclose(values, mean, atol=1e-6)
    return kept


def test_c_is_the_mean_of_what_the_clients_keep(whole):
    check_mean_of_kept(whole)


def test_a_client_keeps_the_critic_of_ppo_beside_its_control_variate(prepared, tmp_path):
    """Clients of different sizes take different numbers of steps by PPO."""
    options = "federation.options={objective: {kind: ppo, advantage: critic}}"
    reward = "{kind: function, name: 'tests.support.reward_functions:score_length'}"
    recipe = make_recipe("scaffold", 2, 1, options, f"rewards={{length: {reward}}}")
    prepare_rewards(recipe, prepared, tmp_path, tmp_path / "judges")
    run_bare_loop(recipe, prepared, tmp_path)
    for own in check_mean_of_kept(open_loop(recipe, prepared, tmp_path)):
        assert {name.partition("/")[0] for name in own} == {
            "loss.critic.weight",
            "loss.critic.bias",
            "loss.control",
        }


def test_a_stopped_run_is_resumed_to_the_same_adapter_and_the_same_c(whole, prepared, tmp_path):
    run_bare_loop(make_recipe(rounds=1, steps=2), prepared, tmp_path)
    run_bare_loop(make_recipe(rounds=2, steps=2), prepared, tmp_path)
    resumed = open_loop(make_recipe(rounds=2, steps=2), prepared, tmp_path).latest_state()
    assert resumed.adapters == whole.latest_state().adapters
    assert resumed.memory == whole.latest_state().memory


# --- recipes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("federation.optimizer.name=adamw", r"optimizer\.name is adamw.*set federation\.optimizer\.name=sgd"),
        ("federation.optimizer.scheduler=linear", r"scheduler is linear.*optimizer\.scheduler=constant"),
        ("federation.optimizer.warmup_steps=1", r"warmup_steps is 1.*optimizer\.warmup_steps=0"),
        ("federation.optimizer.clip=1.0", r"clip is 1\.0.*without clipping: .*optimizer\.clip=null"),
        ("federation.rate_decay={factor: 0.5}", r"rate_decay is .*set federation\.rate_decay=null"),
    ],
)
def test_what_is_no_gradient_descent_at_a_constant_rate_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", ["federation.method=scaffold", SGD, override])


class ScaffoldSelectors(FedBis):
    """FedBis whose clients correct their gradients."""

    def local(self):
        return replace(super().local(), wrap=partial(ControlVariates, control="control"))


def test_clients_of_selectors_send_and_keep_control_variates_too(prepared, tmp_path):
    recipe = make_recipe("fedbis")
    federation = recipe.federation.model_copy(update={"options": ScaffoldSelectors()})
    loop = open_loop(recipe.model_copy(update={"federation": federation}), prepared, tmp_path)
    job = loop.bound.plan(loop.initial_state())[0]
    update = loop.run_job(job)
    sent = loop.commits.store.get(update.adapter)
    kept = PrivateStore(private_root(loop.commits.folder), job.client).load(job.key()).tensors
    assert kept
    assert update.traffic.kept > 0
    for name, control in kept.items():
        assert torch.equal(sent[name], control)  # c and c_m were 0
