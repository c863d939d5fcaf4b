"""FedBiscuit on adapters of one tensor of size 3: algorithm 1 replayed by hand, and whole federations on the tiny backbone."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from components.config import FederationConfig, RecipeError
from components.data.records import read_clients
from components.federation import clients, fedbis
from components.federation.commits import Commits
from components.federation.fedbis import FedBis
from components.federation.fedbiscuit import FedBiscuit, Options, build
from components.federation.grouping import balanced_groups, least_loss_groups
from components.federation.rounds import run_federation
from components.federation.sampling import sample_clients
from components.federation.strategy import Update, build_federation, build_strategy
from components.models.adapters import AdapterStore

NAMES = [f"c{i}" for i in range(6)]
SHARES = dict(zip(NAMES, (30, 25, 15, 10, 10, 10), strict=True))
START = [1.0, 0.0, -1.0]


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def federation(store):
    return build_federation({n: {"train": k, "validation": 1, "test": 1} for n, k in SHARES.items()}, store.put({"a": torch.tensor(START)}), 3)


def biscuit(store, rounds=20, cohort=3, selectors=3, **options) -> FedBiscuit:
    return build(FederationConfig(rounds=rounds, clients_per_round=cohort, selectors=selectors), Options(**{"warmup_rounds": 2, "regroup_every": 3} | options), store)


def trained_values(job) -> list[float]:
    """What a client answers: a function of who and when."""
    return [float(NAMES.index(job.client)), job.round + 0.5, -2.0]


LOSSES = {name: [0.1 + 0.2 * ((i + u) % 3) for u in range(3)] for i, name in enumerate(NAMES)}     # c0 and c3 want 0, c1 and c4 want 2, c2 and c5 want 1


def answers(store, jobs, losses=LOSSES):
    return [Update(job, None, tuple(losses[job.client]), {}) if job.kind == "score" else Update(job, store.put({"a": torch.tensor(trained_values(job))}), (), {}) for job in jobs]


def play(strategy, store, federation, until: int, seed=0):
    """All steps of the rounds before `until`, and the last state."""
    state, steps = strategy.init(federation, seed), []
    while state.round < until:
        jobs = strategy.plan(state, state.round)
        new = strategy.aggregate(state, answers(store, jobs))
        steps.append((state, jobs, new))
        state = new
    return steps, state


def values(store, ref):
    return store.get(ref)["a"].tolist()


def test_the_warm_up_trains_one_selector_after_the_other_and_counts_inside_the_rounds(store, federation):
    steps, state = play(biscuit(store), store, federation, until=6)
    assert [{job.slot for job in jobs} for _, jobs, _ in steps] == [{"selector-0"}] * 2 + [{"selector-1"}] * 2 + [{"selector-2"}] * 2
    assert [len(jobs) for _, jobs, _ in steps] == [3] * 6 and (state.round, state.step, state.phase) == (6, 6, "group")
    for before, jobs, new in steps:
        assert all(job.adapters == (before.adapters[job.slot],) for job in jobs)
        assert {name for name in new.adapters if new.adapters[name] != before.adapters[name]} == {jobs[0].slot}
    assert len({ref.hash for ref in state.adapters.values()}) == 3, "other clients make other selectors"
    assert steps[2][0].adapters["selector-1"] == federation.initial, "each starts from the same adapter"


def test_a_warm_up_round_is_a_round_of_fedbis(store, federation):
    for weighting in ("paper", "participation"):
        strategy = biscuit(store, weighting=weighting)
        plain = fedbis.build(FederationConfig(rounds=20, clients_per_round=3), fedbis.Options(weighting=weighting), store)
        state = strategy.init(federation, 0)
        jobs = strategy.plan(state, 0)
        expected = plain.aggregate(plain.init(federation, 0), answers(store, plain.plan(plain.init(federation, 0), 0)))
        assert strategy.aggregate(state, answers(store, jobs)).adapters["selector-0"] == expected.adapters["selector"]


def test_clients_are_grouped_after_the_warm_up_and_every_tau_rounds_with_all_of_them_scoring_all_selectors(store, federation):
    steps, _ = play(biscuit(store), store, federation, until=14)
    grouped = [(before.round, jobs, new) for before, jobs, new in steps if before.phase == "group"]
    assert [round for round, _, _ in grouped] == [6, 9, 12]
    for round, jobs, new in grouped:
        assert [job.client for job in jobs] == NAMES and {job.kind for job in jobs} == {"score"}
        assert {job.adapters for job in jobs} == {tuple(new.adapters[f"selector-{u}"] for u in range(3))}
        assert (new.round, new.phase) == (round, "train"), "the round is not over"
        assert new.assigned == {"c0": "selector-0", "c1": "selector-2", "c2": "selector-1", "c3": "selector-0", "c4": "selector-2", "c5": "selector-1"}
        assert new.memory == {"grouped_at": round, "losses": LOSSES}
    assert [new.log["moved"] for _, _, new in grouped] == [0, 0, 0] and grouped[0][2].log["selector-1/size"] == 2


def test_in_a_clustered_round_each_sampled_client_trains_the_selector_of_its_group(store, federation):
    steps, state = play(biscuit(store), store, federation, until=9)
    for before, jobs, _ in steps[7:]:
        assert [job.client for job in jobs] == sample_clients(NAMES, 3, 0, before.round)
        assert all(job.slot == before.assigned[job.client] and job.adapters == (before.adapters[job.slot],) for job in jobs)
    assert state.round == 9


@pytest.mark.parametrize("weighting", ["paper", "participation"])
def test_equation_6_by_hand(store, federation, weighting):
    """paper: (1 - sum p_m) phi_u + sum p_m phi_m; participation: the members' mean by p_m. Selectors without a member stay."""
    strategy = biscuit(store, weighting=weighting)
    steps, _ = play(strategy, store, federation, until=9)
    for before, jobs, new in steps[7:]:
        for slot in before.adapters:
            members = {job.client: trained_values(job) for job in jobs if job.slot == slot}
            mass = sum(SHARES[m] for m in members) / 100
            server = values(store, before.adapters[slot])
            moved = [sum(SHARES[m] / 100 * v[i] for m, v in members.items()) for i in range(3)]
            if not members:
                assert new.adapters[slot] == before.adapters[slot] and f"{slot}/members" not in new.log
                continue
            expected = [(1 - mass) * s + v for s, v in zip(server, moved, strict=True)] if weighting == "paper" else [v / mass for v in moved]
            assert values(store, new.adapters[slot]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert new.log[f"{slot}/weight_sum"] == pytest.approx(mass if weighting == "paper" else 1.0)
            assert new.log[f"{slot}/server_step"] == pytest.approx(math.dist(expected, server), rel=1e-4)
            assert new.log[f"{slot}/members"] == len(members)


def test_the_old_term_of_equation_6_is_the_servers_adapter_and_not_one_that_a_client_trained(store, federation):
    """The published code takes the last client's trained adapter for it; with p = 0.1 the cluster must move a tenth of the way."""
    strategy = biscuit(store, weighting="paper")
    _, state = play(strategy, store, federation, until=7)
    (job,) = [replace(strategy.plan(state, 7)[0], client="c5", slot="selector-1", adapters=(state.adapters["selector-1"],))]
    before = np.array(values(store, state.adapters["selector-1"]))
    far = before + 10.0
    new = strategy.aggregate(state, [Update(job, store.put({"a": torch.tensor(far, dtype=torch.float32)}), (), {})])
    assert np.array(values(store, new.adapters["selector-1"])) == pytest.approx(before + 1.0, rel=1e-5)


def test_a_client_without_validation_pairs_or_without_an_answer_has_no_vote_and_keeps_its_group(store, federation):
    strategy = biscuit(store)
    _, state = play(strategy, store, federation, until=9)
    assert state.phase == "group" and state.assigned["c1"] == "selector-2"
    turned = LOSSES | {"c0": LOSSES["c2"], "c2": LOSSES["c0"], "c1": [float("nan")] * 3}
    jobs = [job for job in strategy.plan(state, 9) if job.client != "c4"]        # c4 failed
    new = strategy.aggregate(state, answers(store, jobs, turned))
    assert new.assigned["c1"] == new.assigned["c4"] == "selector-2" and new.log["without_vote"] == 2
    assert new.assigned["c0"] != state.assigned["c0"] and new.log["moved"] == sum(new.assigned[n] != state.assigned[n] for n in NAMES) > 0
    table = np.array([[float("nan")] * 3 if n == "c4" else turned[n] for n in NAMES])
    assert [int(new.assigned[n][-1]) for n in NAMES] == balanced_groups(table, [int(state.assigned[n][-1]) for n in NAMES]).tolist()


def test_the_recipe_says_by_which_procedure_clients_are_grouped(store, federation):
    level = dict(zip(NAMES, (0.9, 0.1, 0.2, 0.8, 0.3, 0.7), strict=True))     # how hard a client's pairs are; selector 0 is better for everybody
    lead = {name: [level[name] + loss / 10 - (0.6 if u == 0 else 0) for u, loss in enumerate(row)] for name, row in LOSSES.items()}
    groups = {}
    for grouping in ("paper", "least_loss"):
        strategy = biscuit(store, grouping=grouping)
        _, state = play(strategy, store, federation, until=6)
        groups[grouping] = strategy.aggregate(state, answers(store, strategy.plan(state, 6), lead)).assigned
    table = np.array([lead[name] for name in NAMES])
    assert groups["paper"] == {n: f"selector-{u}" for n, u in zip(NAMES, balanced_groups(table), strict=True)}
    assert groups["least_loss"] == {n: f"selector-{u}" for n, u in zip(NAMES, least_loss_groups(table), strict=True)} != groups["paper"]


def test_more_selectors_than_clients_and_clients_who_cannot_be_grouped_are_refused_before_any_training(store, federation):
    with pytest.raises(RecipeError, match="federation.selectors is 7, but only 6 clients take part"):
        biscuit(store, selectors=7, rounds=30).init(federation, 0)
    mute = build_federation({n: {"train": k, "validation": 0, "test": 1} for n, k in SHARES.items()}, federation.initial, 3)
    with pytest.raises(RecipeError, match="no client has validation pairs: raise data.validation"):
        biscuit(store).init(mute, 0)


def test_aggregation_does_not_depend_on_the_order_of_arrival_to_the_byte(store, federation):
    numbers = torch.Generator().manual_seed(0)
    start = store.put({"a": torch.zeros(400)})
    for weighting in ("paper", "participation"):
        strategy = biscuit(store, weighting=weighting, cohort=6)
        _, state = play(strategy, store, federation, until=7)
        state = replace(state, adapters=dict.fromkeys(state.adapters, start))
        updates = [Update(job, store.put({"a": torch.randn(400, generator=numbers)}), (), {}) for job in strategy.plan(state, 7)]
        results = {tuple(ref.hash for ref in strategy.aggregate(state, order).adapters.values()) for order in itertools.islice(itertools.permutations(updates), 0, 720, 37)}
        assert len(results) == 1


def test_aggregation_leaves_the_state_as_it_was(store, federation):
    strategy = biscuit(store)
    steps, _ = play(strategy, store, federation, until=8)
    again, _ = play(strategy, store, federation, until=8)
    assert [s[0] for s in steps] == [s[0] for s in again]


def test_one_selector_is_fedbis(store):
    assert type(biscuit(store, selectors=1)) is FedBis and biscuit(store, selectors=1, weighting="paper").options.weighting == "paper"


def test_a_warm_up_that_takes_all_rounds_and_an_even_ensemble_are_refused(store):
    with pytest.raises(RecipeError, match=r"federation.rounds is 6, but the warm-up alone takes 6 \(federation.options.warmup_rounds 2 for each of 3 selectors\)"):
        biscuit(store, rounds=6)
    assert isinstance(build_strategy(FederationConfig(method="fedbiscuit", rounds=7, selectors=3, options={"warmup_rounds": 2}), store), FedBiscuit)
    with pytest.raises(ValueError, match="an ensemble needs an odd number of selectors"):
        FederationConfig(method="fedbiscuit", selectors=4)


# --- whole federations on the tiny backbone

@pytest.fixture(scope="module")
def recipe(debug):
    options = {"warmup_rounds": 1, "regroup_every": 2}
    return debug.model_copy(update={"federation": debug.federation.model_copy(update={
        "method": "fedbiscuit", "selectors": 3, "rounds": 7, "clients_per_round": 3, "options": options})})


@pytest.fixture(scope="module")
def learner(recipe):
    torch.set_num_threads(1)
    return clients.SelectorLearner(recipe, "cpu")


def whole(recipe, prepared, folder, learner):
    commits = Commits(folder, "here")
    federation = build_federation(read_clients(prepared), commits.store.put(learner.initial_adapter(recipe.seed)), 3)
    return run_federation(recipe, federation, prepared / "pairs.parquet", commits, learner), commits


@pytest.fixture(scope="module")
def uninterrupted(recipe, prepared, tmp_path_factory, learner):
    return whole(recipe, prepared, tmp_path_factory.mktemp("whole"), learner)


class Dies(RuntimeError):
    pass


@pytest.mark.parametrize("jobs_done", [1, 4, 9, 11, 13, 17, 20, 25])
def test_a_federation_that_stops_in_any_phase_goes_on_to_the_same_bytes(uninterrupted, recipe, prepared, tmp_path, learner, jobs_done):
    """Jobs 0-8 are the warm-up, 9-12 the first grouping, then 6 of training, 4 of grouping, and so on."""
    state, commits = uninterrupted
    left = iter(range(jobs_done))

    class Mortal:
        initial_adapter = staticmethod(learner.initial_adapter)

        def train(self, *arguments):
            if next(left, None) is None:
                raise Dies
            return learner.train(*arguments)

        def score(self, *arguments):
            if next(left, None) is None:
                raise Dies
            return learner.score(*arguments)

    with pytest.raises(Dies):
        whole(recipe, prepared, tmp_path, Mortal())
    again, resumed = whole(recipe, prepared, tmp_path, learner)
    assert {n: r.hash for n, r in again.adapters.items()} == {n: r.hash for n, r in state.adapters.items()}
    assert (again.assigned, again.memory, again.round, again.step) == (state.assigned, state.memory, state.round, state.step)
    (_, records), (_, expected) = resumed.latest(), commits.latest()
    assert [(r["phase"], r["assigned"], r["adapters"]) for r in records] == [(r["phase"], r["assigned"], r["adapters"]) for r in expected]


def test_a_federation_has_the_phases_of_algorithm_1(uninterrupted):
    state, commits = uninterrupted
    _, records = commits.latest()
    assert [r["phase"] for r in records] == ["train"] * 3 + ["group", "train", "train"] * 2
    assert [r["round"] for r in records] == [0, 1, 2, 3, 3, 4, 5, 5, 6] and state.round == 7
    assert all(len(c["losses"]) == 3 and all(map(math.isfinite, c["losses"])) for r in records if r["phase"] == "group" for c in r["clients"].values())
    assert set(state.assigned) == {"ada", "bea", "cyd", "dan"} and len({r.hash for r in state.adapters.values()}) == 3
