"""Sums of clients' contributions with noise: numbers, noise, turns, budgets, and what leaves a client."""

import math
from collections import Counter
from itertools import count
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from components.config import UserError
from components.config.privacy import ClientPrivacy
from components.federation import private_sums
from components.federation.aggregators import ExpectedMean
from components.federation.clients.worker import run_job
from components.federation.private_sums import (
    NoisePlan,
    ServerSecrets,
    check_noise,
    contribution,
    contribution_fault,
    noise_plan,
    noised_mean,
    signal_warning,
)
from components.federation.protocol import MeasureJob
from components.federation.rounds import ask_step, plan_step
from components.federation.sampling import take_turns
from components.federation.server import Server
from components.federation.spending import budget_ends, privacy_spent
from components.federation.transport import InProcessTransport
from components.models.store import AdapterStore
from components.privacy.clipping import grid_bits, grid_width
from components.privacy.factors import sensitivity
from components.privacy.ledger import epsilon_of, gaussian_epsilon
from components.privacy.noise import gaussian
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop, run_bare_loop
from tests.support.variants import PROTECTED, SMALL, VARIANTS

NAMES = ("x.lora_A.weight", "x.lora_B.weight")
BEFORE = {NAMES[0]: torch.arange(6.0).reshape(2, 3), NAMES[1]: torch.ones(3, 2)}
VALUES = 12


def privacy(**changed):
    section = {"clip": 1.0, "noise_multiplier": 0.7, "delta": 0.01, "noise": "independent"}
    return ClientPrivacy(**section | changed)


def plan_of(section, cohort=2, rounds=6, separation=3):
    return NoisePlan(section, cohort, rounds, separation)


@pytest.fixture
def secrets(tmp_path, monkeypatch):
    """A server's secrets, the same ones each time, since draws from them are compared by their deviation."""
    numbers = count()
    fixed = SimpleNamespace(token_bytes=lambda size: next(numbers).to_bytes(size))
    monkeypatch.setattr("components.privacy.secrets.secrets", fixed)
    return ServerSecrets(AdapterStore(tmp_path / "federation" / "adapters"), None)


NOTHING = {name: torch.zeros_like(tensor) for name, tensor in BEFORE.items()}


def mean(secrets, section, cells=NOTHING, step="0", previous="", frozen=(), **changed):
    return noised_mean(
        BEFORE, cells, plan_of(section, **changed), secrets, (step, "policy"), previous, frozen
    )


def moved(adapter, name=NAMES[0]):
    return (adapter[name].double() - BEFORE[name].double()).flatten().numpy()


# --- numbers


def test_a_contribution_is_the_clipped_movement_in_cells():
    far = {name: tensor + 2.0 for name, tensor in BEFORE.items()}
    cells = contribution(far, BEFORE, 0.5, ())
    width = grid_width(0.5, VALUES)
    norm = math.sqrt(sum(float((cell.double() * width).square().sum()) for cell in cells.values()))
    assert 0.45 < norm <= 0.5
    frozen = contribution(far, BEFORE, 0.5, ("A",))
    assert not frozen[NAMES[0]].any() and frozen[NAMES[1]].any()
    assert float(frozen[NAMES[1]][0, 0]) * grid_width(0.5, 6) == pytest.approx(0.5 / math.sqrt(6), rel=0.05)


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_the_mean_has_a_fixed_denominator_and_noise_of_the_planned_deviation(secrets, noise):
    """The noise is that of the plan, whatever the contributions are."""
    section = privacy(noise=noise)
    plan = plan_of(section)
    expected = 0.7 * (math.sqrt(2) if noise == "independent" else sensitivity(3, 6))
    assert plan.deviation == pytest.approx(expected)
    one = {name: torch.full_like(tensor, 2.0) for name, tensor in BEFORE.items()}
    for cells, shift in ((NOTHING, 0.0), (one, 2.0)):
        for name in NAMES:
            drawn = [
                moved(mean(secrets, section, cells, step=str(step))[0], name)
                - shift * grid_width(1.0, VALUES) / 2
                for step in range(400)
            ]
            deviation = np.std(np.concatenate(drawn))
            assert deviation == pytest.approx(expected / 2, rel=0.08), "over A = 2 clients, C = 1"
            assert abs(np.mean(drawn)) < 4 * expected / 2 / math.sqrt(2400)


def test_the_same_sum_has_the_same_noise_and_others_have_other_noise(secrets, tmp_path):
    section = privacy()
    one = {name: torch.ones_like(tensor) for name, tensor in BEFORE.items()}
    first, _ = mean(secrets, section, one)
    assert all(torch.equal(mean(secrets, section, one)[0][name], first[name]) for name in NAMES)
    elsewhere = ServerSecrets(AdapterStore(tmp_path / "other" / "adapters"), None)
    step = grid_width(1.0, VALUES) / 2
    fewer = moved(mean(secrets, section)[0]) + step  # with the movement of the first
    for other in (
        moved(mean(elsewhere, section, one)[0]),
        moved(mean(secrets, section, one, step="1")[0]),
        fewer,
    ):
        assert not np.array_equal(other, moved(first))
    assert secrets.folder == tmp_path / "federation-server"
    assert (secrets.folder / "secret").stat().st_mode & 0o777 == 0o600


def test_frozen_factors_get_no_noise(secrets):
    new, _ = mean(secrets, privacy(), frozen=("A",))
    assert torch.equal(new[NAMES[0]], BEFORE[NAMES[0]])
    assert not torch.equal(new[NAMES[1]], BEFORE[NAMES[1]])


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_noise_of_another_scale_does_not_tell_the_sum(secrets, noise):
    """With common random words, two times the first less the second would be the sum."""
    one = {name: torch.full_like(tensor, 3.0) for name, tensor in BEFORE.items()}
    first, second = (
        moved(mean(secrets, privacy(noise=noise, noise_multiplier=sigma), one)[0]) for sigma in (1.0, 2.0)
    )
    step = grid_width(1.0, VALUES) / 2
    assert np.median(np.abs(2 * first - second - 3.0 * step)) > 1.5 * step  # of one value it may be by chance
    for changed in ({"rounds": 5}, {"cohort": 3}, {"previous": "x"}):
        if noise == "independent" or "previous" not in changed:
            other, _ = mean(secrets, privacy(noise=noise), one, **changed)
            assert not np.array_equal(moved(other), moved(mean(secrets, privacy(noise=noise), one)[0]))


def test_banded_noise_takes_the_noise_of_earlier_rounds_away(secrets, monkeypatch):
    """z_t = w_t - c_1 z_(t-1) - c_2 z_(t-2), with w_t of the stream of its own round."""
    drawn = []
    monkeypatch.setattr(private_sums, "gaussian", lambda *args: drawn.append(gaussian(*args)) or drawn[-1])
    section = privacy(noise="banded")
    names, steps = [""], []
    for step in range(6):
        new, name = mean(secrets, section, step=str(step), previous=names[-1])
        names.append(name)
        steps.append(moved(new) / (grid_width(1.0, VALUES) / 2))
    fresh = drawn[::2]  # of the first tensor
    for t in range(2, 6):
        expected = fresh[t] - 0.5 * steps[t - 1] - 0.375 * steps[t - 2]
        np.testing.assert_allclose(steps[t], expected, atol=1e-3)
    assert len(list(secrets.folder.glob("*.npz"))) == 3, "the last, and b - 1 before it"
    (secrets.folder / f"{names[-1]}.npz").unlink()
    with pytest.raises(UserError, match="the noise of an earlier round, is missing"):
        mean(secrets, section, step="6", previous=names[-1])


def test_a_repeated_round_with_other_clients_is_a_further_release(secrets):
    section = privacy()
    plan = plan_of(section)
    one = {name: torch.ones_like(tensor) for name, tensor in BEFORE.items()}
    for cells, repeated in ((one, 0), (one, 0), (NOTHING, 1)):
        mean(secrets, section, cells)
        assert secrets.repeated == repeated
    mean(secrets, section, one, step="1")
    assert secrets.repeated == 1
    exact = math.sqrt(1 / (0.7**2) + 1 / plan.deviation**2)
    assert epsilon_of(plan.releases(6, 1), 0.01) == pytest.approx(gaussian_epsilon(exact, 0.01))


def test_noise_that_cannot_be_drawn_and_sums_that_are_not_exact_are_refused():
    largest = ((1 << 24) - 1) >> grid_bits(VALUES)
    with pytest.raises(UserError, match=f"use at most {largest}"):
        check_noise(plan_of(privacy(), cohort=largest + 1), VALUES)
    check_noise(plan_of(privacy(), cohort=largest), VALUES)
    check_noise(plan_of(privacy(noise="banded"), rounds=500, separation=1), 540_000)
    with pytest.raises(UserError, match="use 'banded', less noise, or train fewer values"):
        check_noise(plan_of(privacy(noise_multiplier=20.0), rounds=500, separation=1), 540_000)


def test_what_is_no_contribution_is_found():
    far = {name: tensor + 2.0 for name, tensor in BEFORE.items()}
    cells = contribution(far, BEFORE, 0.5, ("A",))
    assert contribution_fault(cells, 0.5, ("A",)) == ""
    longer = {name: 1.1 * cell.abs().max() + 0 * cell for name, cell in cells.items()}
    longer = {name: longer[name].ceil() if name == NAMES[1] else cell for name, cell in cells.items()}
    assert "longer than federation.privacy.clip" in contribution_fault(longer, 0.5, ("A",))
    assert "not on the grid" in contribution_fault({**cells, NAMES[1]: cells[NAMES[1]] / 3}, 0.5, ("A",))
    assert "not trained" in contribution_fault({**cells, NAMES[0]: torch.ones(2, 3)}, 0.5, ("A",))


# --- turns


@pytest.mark.parametrize(("clients", "cohort"), [(12, 6), (10, 3), (7, 2), (5, 5)])
def test_clients_take_turns_with_a_pause(clients, cohort):
    names = [f"client-{n}" for n in range(clients)]
    rounds = [take_turns(names, cohort, 3, round) for round in range(40)]
    assert all(len(set(members)) == cohort and members == sorted(members) for members in rounds)
    counts = Counter(name for members in rounds for name in members)
    assert max(counts.values()) - min(counts.values()) <= 1
    separation = clients // cohort
    for name in names:
        took_part = [number for number, members in enumerate(rounds) if name in members]
        assert all(np.diff(took_part) >= separation)
    assert clients == cohort or rounds != [take_turns(names, cohort, 4, round) for round in range(40)]


# --- budgets


def test_epsilon_grows_with_the_turns_and_ends_with_that_of_the_plan():
    config = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"]]).federation
    config = config.model_copy(update={"privacy": privacy(noise="banded")})
    spent = [privacy_spent(config, 4, rounds).epsilon for rounds in range(5)]
    assert spent[0] == 0 and spent == sorted(spent) and len(set(spent)) == 5
    assert spent[4] == pytest.approx(gaussian_epsilon(1 / 0.7, 0.01))
    independent = config.model_copy(update={"privacy": privacy()})
    turns = [privacy_spent(independent, 4, rounds).epsilon for rounds in range(5)]
    assert turns[1] == turns[2] < turns[3] == turns[4], "a client has one turn in two rounds"
    assert turns[4] == pytest.approx(gaussian_epsilon(1 / 0.7, 0.01))


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_noise_that_is_solved_for_reaches_the_target_and_no_more(noise):
    config = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"]]).federation
    section = privacy(noise=noise, noise_multiplier=None, target_epsilon=2.0)
    config = config.model_copy(update={"privacy": section})
    assert 1.99 < privacy_spent(config, 4, 4).epsilon <= 2.0
    assert noise_plan(config, 4).sigma > 0


def test_rounds_end_before_the_target_is_exceeded(prepared, tmp_path):
    changed = ["federation.privacy.target_epsilon=1.3", "federation.privacy.simulated=false"]
    recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"], *changed])
    loop = open_loop(recipe, prepared, tmp_path)
    state = loop.run()
    assert 0 < state.round < 4
    last = loop.records[-1].privacy
    assert last.epsilon <= 1.3 < privacy_spent(recipe.federation, 4, state.round + 1).epsilon
    assert "above federation.privacy.target_epsilon 1.3" in budget_ends(recipe.federation, state, 0)
    assert open_loop(recipe, prepared, tmp_path, loop.trainer).run() == state, "a resumed run ends there too"
    epsilons = [record.privacy.epsilon for record in loop.records]
    assert epsilons == sorted(epsilons)


def test_noise_beyond_what_a_round_can_move_is_told():
    plan = plan_of(privacy(), cohort=10)
    assert signal_warning(plan, 1000) == ""
    assert "is 73 times its largest possible movement" in signal_warning(plan, 540_000)


# --- what leaves a client


@pytest.fixture(scope="module")
def protected():
    return load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"]])


def test_a_client_sends_its_contribution_and_nothing_else(protected, prepared, tmp_path):
    loop = open_loop(protected, prepared, tmp_path)
    (job, *_) = loop.bound.plan(loop.initial_state())
    update = loop.run_job(job)
    assert (update.losses, update.rows, update.output) == ([], 0, None)
    assert update.metrics.scalars == {} and update.metrics.series == {}
    cells = loop.commits.store.get(update.adapter)
    assert all(torch.equal(cell, cell.round()) for cell in cells.values())
    assert any(cell.any() for cell in cells.values())


def test_whatever_a_client_computes_its_contribution_is_no_longer_than_the_clip(prepared, tmp_path):
    """Also with a learning rate that leads far, and where its losses are not finite, which nobody learns."""
    for lr, moves in ((0.5, True), (1e9, False)):
        settings = [
            f"federation.optimizer.lr={lr}",
            "federation.optimizer.clip=null",
            "federation.local_steps=3",
        ]
        recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"], *settings])
        loop = open_loop(recipe, prepared, tmp_path / f"{lr}")
        (job, *_) = loop.bound.plan(loop.initial_state())
        cells = loop.commits.store.get(loop.run_job(job).adapter)
        assert contribution_fault(cells, 0.1, ()) == ""
        assert any(cell.any() for cell in cells.values()) == moves


def test_contributions_that_are_too_long_are_refused_and_others_go_on(protected, prepared, tmp_path):
    loop = open_loop(protected, prepared, tmp_path)
    state = loop.initial_state()
    method = loop.bound.method
    jobs = plan_step(method, state, protected.federation, loop.commits.store)
    transport = InProcessTransport(protected, loop.contexts, {"": loop.trainer})
    updates = transport.run(jobs)
    far = {name: 1e6 + 0 * cell for name, cell in loop.commits.store.get(updates[0].adapter).items()}
    updates[0] = updates[0].model_copy(update={"adapter": loop.commits.store.put(far)})
    with mock.patch.object(InProcessTransport, "run", lambda self, jobs: updates):
        answers = ask_step(method, state, jobs, transport, protected.federation, loop.commits.store)
    assert list(answers.clients) == [updates[1].client]
    assert "longer than federation.privacy.clip" in answers.refused[0].reason


def test_a_step_without_its_one_sum_is_an_error(protected, prepared, tmp_path):
    loop = open_loop(protected, prepared, tmp_path)
    server = Server(protected.federation, loop.commits.store)
    with pytest.raises(TypeError, match="protected by one sum, and the step has none"):
        server.combine(loop.initial_state(), "selector", ExpectedMean())


def test_the_noise_of_the_rounds_is_that_of_the_chain_of_steps(prepared, tmp_path, monkeypatch):
    """Each round's state names its noise, from which that of the next is made."""
    seen = []
    keep = ServerSecrets.keep
    monkeypatch.setattr(ServerSecrets, "keep", lambda self, *args: seen.append(args) or keep(self, *args))
    recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"]])
    state = open_loop(recipe, prepared, tmp_path).run()
    assert len(seen) == 4 and state.noise == seen[-1][0]
    assert [previous for _, previous, *_ in seen] == ["", *(name for name, *_ in seen[:-1])]


def test_jobs_that_account_for_nothing_are_refused_at_the_client(protected, prepared, tmp_path):
    loop = open_loop(protected, prepared, tmp_path)
    adapter = loop.initial_state().initial
    job = MeasureJob(client="ada", round=0, seed=0, adapters=(adapter,), split="test")
    with pytest.raises(UserError, match="a job 'measure' of a client would give away more"):
        run_job(job, loop.trainer, loop.contexts, protected)


@pytest.mark.parametrize("method", ["feddpo", "fedprox", "ffa_lora", "fedavg"])
def test_other_methods_of_one_sum_are_protected_too(method, prepared, tmp_path):
    options = ["federation.options={aggregator: expected}"]
    recipe = load_recipe("debug", [*SMALL, *PROTECTED, f"federation.method={method}", *options])
    ended = run_bare_loop(recipe, prepared, tmp_path)
    assert ended.records[-1].privacy.epsilon is None, "its secret is that of the seed"
    assert all(record.server.scalars["server_step"] > 0 for record in ended.records)
    assert all(client.rows == 0 and not client.losses for client in ended.records[0].clients.values())
