"""FedBiscuit on adapters of three values: algorithm 1 with hand-computed results."""

import itertools
import math

import numpy as np
import pytest
import torch

from components.config import RecipeError
from components.federation.commits import Commits
from components.federation.grouping import balanced_groups, least_loss_groups
from components.federation.methods.fedbiscuit import GroupingMemory
from components.federation.sampling import sample_clients
from components.recipes import load_recipe
from tests.support.bare_loop import run_bare_loop
from tests.support.bound_methods import (
    bind_method,
    get_values,
    make_update,
    make_updates,
    put_values,
    small_federation,
)

NAMES = [f"c{i}" for i in range(6)]
PAIRS = dict(zip(NAMES, (30, 25, 15, 10, 10, 10), strict=True))
START = [1.0, 0.0, -1.0]
LOSSES = {name: [0.1 + 0.2 * ((i + u) % 3) for u in range(3)] for i, name in enumerate(NAMES)}
"""c0 and c3 have their lowest loss on selector 0, c1 and c4 on selector 2, c2 and c5 on selector 1."""
SLOTS = ["selector-0", "selector-1", "selector-2"]
CLUSTERS = dict(zip(NAMES, [SLOTS[0], SLOTS[2], SLOTS[1]] * 2, strict=True))
NO_VOTE = [math.nan] * 3


@pytest.fixture
def federation(store):
    return small_federation(store, PAIRS, START, clients_per_round=3)


def fedbiscuit(store, rounds=20, clients=3, **options):
    defaults = {"selectors": 3, "warmup_rounds": 2, "regroup_every": 3}
    return bind_method(store, "fedbiscuit", clients, rounds, **(defaults | options))


def trained_values(job):
    """What a client trains: a function of the client and the round."""
    return [float(NAMES.index(job.client)), job.round + 0.5, -2.0]


def answer(store, jobs, losses=LOSSES):
    return [
        make_update(job, losses=losses[job.client])
        if job.kind == "measure"
        else make_update(job, put_values(store, trained_values(job)))
        for job in jobs
    ]


def play(bound, store, federation, until):
    """All steps of the rounds before `until` as (state, jobs, new state), and the last state."""
    state = bound.start(federation, 0)
    steps = []
    while state.round < until:
        jobs = bound.plan(state)
        new = bound.aggregate(state, answer(store, jobs))
        steps.append((state, jobs, new))
        state = new
    return steps, state


def group_names(groups):
    return {name: f"selector-{group}" for name, group in zip(NAMES, groups, strict=True)}


# --- warm-up


def test_the_warm_up_trains_and_changes_one_selector_after_the_other_within_the_rounds(store, federation):
    steps, state = play(fedbiscuit(store), store, federation, until=6)
    slots = [{job.adapter_name for job in jobs} for _, jobs, _ in steps]
    assert slots == [{"selector-0"}] * 2 + [{"selector-1"}] * 2 + [{"selector-2"}] * 2
    assert [len(jobs) for _, jobs, _ in steps] == [3] * 6
    assert (state.round, state.step, state.phase) == (6, 6, "grouping")
    for before, jobs, new in steps:
        adapter_name = jobs[0].adapter_name
        assert {job.adapter for job in jobs} == {before.adapters[adapter_name]}
        assert {name for name, digest in new.adapters.items() if digest != before.adapters[name]} == {
            adapter_name
        }
    assert steps[2][0].adapters["selector-1"] == federation.initial
    assert len(set(state.adapters.values())) == 3


@pytest.mark.parametrize("aggregator", ["paper", "participation", "uniform"])
def test_a_warm_up_round_is_a_round_of_fedbis(store, federation, aggregator):
    fedbis = bind_method(store, "fedbis", 3, 20, aggregator=aggregator)
    bounds = (fedbiscuit(store, aggregator=aggregator), fedbis)
    first, second = (play(bound, store, federation, until=1)[1].adapters for bound in bounds)
    assert first["selector-0"] == second["selector"]


# --- grouping


def test_all_clients_score_all_selectors_after_the_warm_up_and_every_tau_rounds_and_are_grouped(
    store, federation
):
    steps, _ = play(fedbiscuit(store), store, federation, until=14)
    groupings = [step for step in steps if step[0].phase == "grouping"]
    loss = np.mean([LOSSES[name][int(adapter_name[-1])] for name, adapter_name in CLUSTERS.items()])
    assert [before.round for before, _, _ in groupings] == [6, 9, 12]
    for before, jobs, new in groupings:
        assert [(job.client, job.kind) for job in jobs] == [(name, "measure") for name in NAMES]
        assert {job.adapters for job in jobs} == {tuple(before.adapters[name] for name in SLOTS)}
        assert (new.round, new.phase, new.logged_at) == (before.round, "train", before.round)
        assert new.adapters == before.adapters
        assert new.memory == GroupingMemory(assignment=CLUSTERS, grouped_at=before.round, losses=LOSSES)
        assert new.metrics.scalars["moved"] == 0
        assert new.metrics.scalars["selector-1/size"] == 2
        assert new.metrics.scalars["loss_of_group"] == pytest.approx(loss)


def test_a_client_without_validation_pairs_or_without_an_update_has_no_vote_and_stays(store, federation):
    bound = fedbiscuit(store)
    _, state = play(bound, store, federation, until=9)
    losses = LOSSES | {"c0": LOSSES["c2"], "c2": LOSSES["c0"], "c1": NO_VOTE}
    jobs = [job for job in bound.plan(state) if job.client != "c4"]
    new = bound.aggregate(state, answer(store, jobs, losses))
    before = state.memory.assignment
    after = new.memory.assignment
    assert before["c1"] == before["c4"] == after["c1"] == after["c4"] == "selector-2"
    assert new.metrics.scalars["without_vote"] == 2
    moved = sum(after[name] != before[name] for name in NAMES)
    assert new.metrics.scalars["moved"] == moved > 0
    table = np.array([NO_VOTE if name == "c4" else losses[name] for name in NAMES])
    previous = [int(before[name][-1]) for name in NAMES]
    assert after == group_names(balanced_groups(table, previous))


def test_the_option_grouping_names_the_procedure(store, federation):
    """Selector 0 is better for all clients, which differ in how hard their pairs are."""
    level = dict(zip(NAMES, (0.9, 0.1, 0.2, 0.8, 0.3, 0.7), strict=True))
    losses = {
        name: [level[name] + loss / 10 - (0.6 if u == 0 else 0) for u, loss in enumerate(row)]
        for name, row in LOSSES.items()
    }
    assignments = {}
    for grouping in ("paper", "least_loss"):
        bound = fedbiscuit(store, grouping=grouping)
        _, state = play(bound, store, federation, until=6)
        new = bound.aggregate(state, answer(store, bound.plan(state), losses))
        assignments[grouping] = new.memory.assignment
    table = np.array([losses[name] for name in NAMES])
    assert assignments["paper"] == group_names(balanced_groups(table))
    assert assignments["least_loss"] == group_names(least_loss_groups(table))
    assert assignments["paper"] != assignments["least_loss"]


# --- clustered rounds


def test_in_a_clustered_round_each_sampled_client_trains_the_selector_of_its_cluster(store, federation):
    steps, _ = play(fedbiscuit(store), store, federation, until=9)
    for before, jobs, _ in steps[7:]:
        assert [job.client for job in jobs] == sample_clients(NAMES, 3, 0, before.round)
        for job in jobs:
            assert job.adapter_name == before.memory.assignment[job.client]
            assert job.adapter == before.adapters[job.adapter_name]


def member_weights(members, aggregator):
    """Weights of a cluster's sampled members, and whether the rest of the weight is the server's."""
    pairs = {name: PAIRS[name] / 100 for name in members}
    match aggregator:
        case "paper":
            return pairs, True
        case "uniform":
            return dict.fromkeys(members, 1 / 6), True
        case _:
            return {name: weight / sum(pairs.values()) for name, weight in pairs.items()}, False


@pytest.mark.parametrize("aggregator", ["paper", "participation", "uniform"])
def test_a_cluster_is_combined_as_computed_by_hand(store, federation, aggregator):
    """paper and uniform: (1 - sum w_m) phi_u + sum w_m phi_m, w_m = p_m or 1 / M; else the mean."""
    steps, _ = play(fedbiscuit(store, aggregator=aggregator), store, federation, until=9)
    trained_clusters = 0
    for (before, jobs, new), adapter_name in itertools.product(steps[7:], SLOTS):
        members = {job.client: trained_values(job) for job in jobs if job.adapter_name == adapter_name}
        if not members:
            continue
        trained_clusters += 1
        weights, residual = member_weights(members, aggregator)
        weight_sum = sum(weights.values())
        server = get_values(store, before.adapters[adapter_name])
        expected = [
            (1 - weight_sum) * residual * server[i] + sum(weights[m] * members[m][i] for m in members)
            for i in range(3)
        ]
        scalars = new.metrics.scalars
        assert get_values(store, new.adapters[adapter_name]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert scalars[f"{adapter_name}/weight_sum"] == pytest.approx(weight_sum)
        assert scalars[f"{adapter_name}/server_step"] == pytest.approx(math.dist(expected, server), rel=1e-4)
        assert scalars[f"{adapter_name}/members"] == len(members)
    assert trained_clusters > 2


def test_a_selector_without_a_sampled_member_does_not_change(store, federation):
    bound = fedbiscuit(store)
    _, state = play(bound, store, federation, until=7)
    jobs = [job for job in bound.plan(state) if job.adapter_name == bound.plan(state)[0].adapter_name]
    new = bound.aggregate(state, answer(store, jobs))
    for adapter_name in set(state.adapters) - {jobs[0].adapter_name}:
        assert new.adapters[adapter_name] == state.adapters[adapter_name]
        assert f"{adapter_name}/members" not in new.metrics.scalars


def test_the_old_term_of_equation_6_is_the_servers_adapter_and_not_a_clients(store, federation):
    """The published code takes the last client's adapter for it. With p_m = 0.1 a cluster moves a tenth."""
    bound = fedbiscuit(store, aggregator="paper")
    _, state = play(bound, store, federation, until=7)
    digest = state.adapters["selector-1"]
    job = bound.plan(state)[0].model_copy(
        update={"client": "c5", "adapter_name": "selector-1", "adapter": digest}
    )
    before = np.array(get_values(store, digest))
    new = bound.aggregate(state, [make_update(job, put_values(store, (before + 10.0).tolist()))])
    assert get_values(store, new.adapters["selector-1"]) == pytest.approx((before + 1.0).tolist(), rel=1e-5)


@pytest.mark.parametrize("aggregator", ["paper", "participation", "uniform"])
def test_the_result_does_not_depend_on_the_order_of_arrival_to_the_byte(store, federation, aggregator):
    numbers = torch.Generator().manual_seed(0)
    bound = fedbiscuit(store, aggregator=aggregator, clients=6)
    _, state = play(bound, store, federation, until=7)
    zeros = dict.fromkeys(state.adapters, put_values(store, [0.0] * 400))
    state = state.model_copy(update={"adapters": zeros})
    values = {name: torch.randn(400, generator=numbers).tolist() for name in NAMES}
    updates = make_updates(store, bound.plan(state), values)
    orders = itertools.islice(itertools.permutations(updates), 0, 720, 37)
    assert len({tuple(bound.aggregate(state, order).adapters.values()) for order in orders}) == 1


def test_aggregation_does_not_change_the_state(store, federation):
    bound = fedbiscuit(store)
    first, _ = play(bound, store, federation, until=8)
    second, _ = play(bound, store, federation, until=8)
    assert [state for state, _, _ in first] == [state for state, _, _ in second]


def test_the_outcome_is_the_ensemble_with_the_clusters(store, federation):
    bound = fedbiscuit(store)
    _, state = play(bound, store, federation, until=8)
    outcome = bound.outcome(state)
    assert outcome.votes
    assert outcome.adapters == state.adapters
    assert outcome.assignment == CLUSTERS


# --- refusals


def test_one_selector_is_fedbis(store, federation):
    fedbis = bind_method(store, "fedbis", 3, 20, aggregator="paper")
    bounds = (fedbiscuit(store, selectors=1, aggregator="paper"), fedbis)
    first, second = ((bound, play(bound, store, federation, until=4)[1]) for bound in bounds)
    assert first[0].outcome(first[1]) == second[0].outcome(second[1])
    assert first[1].metrics == second[1].metrics


def test_more_selectors_than_clients_are_refused(store, federation):
    with pytest.raises(RecipeError, match=r"federation\.options\.selectors is 7, but only 6 clients.*fewer"):
        fedbiscuit(store, selectors=7, rounds=30).start(federation, 0)


def test_clients_without_any_validation_pairs_are_refused(store):
    federation = small_federation(store, PAIRS, START, 3, validation_pairs=0)
    with pytest.raises(RecipeError, match=r"no client has validation pairs: raise data\.validation"):
        fedbiscuit(store).start(federation, 0)


def test_a_warm_up_that_takes_all_rounds_is_refused():
    options = "federation.options={selectors: 3, warmup_rounds: 2, regroup_every: 3}"
    overrides = ["federation.method=fedbiscuit", options]
    refusal = r"federation\.rounds is 6.*takes 6 .*federation\.options\.warmup_rounds 2"
    with pytest.raises(RecipeError, match=refusal):
        load_recipe("debug", [*overrides, "federation.rounds=6"])
    assert load_recipe("debug", [*overrides, "federation.rounds=7"]).federation.rounds == 7


def test_an_even_number_of_selectors_is_refused_with_the_odd_ones_beside_it():
    overrides = ["federation.method=fedbiscuit", "federation.options.selectors=4"]
    with pytest.raises(RecipeError, match=r"federation\.options\.selectors' is 4.*use 3 or 5"):
        load_recipe("debug", overrides)


# --- a whole federation


def test_a_federation_has_the_phases_of_algorithm_1(prepared, tmp_path):
    recipe = load_recipe(
        "debug",
        [
            "federation.method=fedbiscuit",
            "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 2}",
            "federation.rounds=7",
            "federation.clients_per_round=3",
            "federation.local_steps=1",
        ],
    )
    run_bare_loop(recipe, prepared, tmp_path)
    state, records = Commits(tmp_path / "federation", "bare loop").latest(GroupingMemory)
    assert [record.phase for record in records] == ["train"] * 3 + ["grouping", "train", "train"] * 2
    assert [record.round for record in records] == [0, 1, 2, 3, 3, 4, 5, 5, 6]
    assert state.round == 7
    assert set(state.memory.assignment) == {"ada", "bea", "cyd", "dan"}
    assert len(set(state.adapters.values())) == 3
    for record in records:
        for client in record.clients.values():
            assert len(client.losses) == (3 if record.phase == "grouping" else 0)
            assert all(math.isfinite(loss) for loss in client.losses)
