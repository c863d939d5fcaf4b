"""Balanced clusters from losses (FedBiscuit section 5.1): by hand, and as properties."""

import itertools

import numpy as np
import pytest

from components.federation.grouping import balanced_groups, least_loss_groups, moved, rand_index

NAN = float("nan")


def sizes(groups, selectors):
    return sorted(np.bincount(groups, minlength=selectors).tolist())


def test_where_wishes_are_balanced_everyone_gets_the_selector_of_least_loss():
    losses = [[0.1, 0.5, 0.9], [0.7, 0.2, 0.9], [0.7, 0.6, 0.3], [0.4, 0.8, 0.9], [0.9, 0.1, 0.2], [0.9, 0.8, 0.1]]
    assert balanced_groups(np.array(losses)).tolist() == [0, 1, 2, 0, 1, 2]


def test_over_the_cap_the_next_best_loss_decides_and_the_lowest_losses_stay():
    """All four want selector 0; its cap is 2, so clients 1 and 3 (losses 0.1, 0.2) stay; 0 and 2 both want 1 next, whose cap is then 1."""
    losses = np.array([[0.4, 0.5, 0.9], [0.1, 0.2, 0.3], [0.3, 0.6, 0.7], [0.2, 0.9, 0.3]])
    assert balanced_groups(losses).tolist() == [1, 0, 2, 0]


def test_the_largest_cluster_is_capped_first():
    """5 clients want selector 1, whose cap is 2; the other three go to 0, where client 5 was already. There again 2 stay, those with 0.1 and 0.55."""
    losses = np.array([[0.9, 0.1, 1.0], [0.8, 0.2, 1.0], [0.7, 0.3, 1.0], [0.6, 0.4, 1.0], [0.55, 0.5, 1.0], [0.1, 0.9, 0.5]])
    assert balanced_groups(losses).tolist() == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(("clients", "selectors"), [(1, 3), (2, 3), (3, 3), (12, 3), (13, 3), (14, 3), (53, 5), (200, 3), (7, 7), (4, 1)])
def test_sizes_differ_by_at_most_one(clients, selectors):
    for seed in range(20):
        losses = np.random.default_rng(seed).random((clients, selectors)) ** 3
        losses[:, 0] *= 0.1     # a selector that nearly everybody prefers
        found = sizes(balanced_groups(losses), selectors)
        assert sum(found) == clients and found[-1] - found[0] <= 1


def test_the_order_of_arrival_does_not_matter():
    for seed in range(30):
        numbers = np.random.default_rng(seed)
        losses = numbers.random((11, 3))
        losses[:, 1] -= 0.5
        order = numbers.permutation(11)
        assert balanced_groups(losses[order]).tolist() == balanced_groups(losses)[order].tolist()


def test_true_groups_of_equal_size_are_found_whatever_the_losses_level():
    for seed in range(20):
        numbers = np.random.default_rng(seed)
        truth = numbers.permutation(np.repeat([0, 1, 2], 4))
        losses = 0.7 + 0.05 * numbers.random((12, 1)) + 0.02 * numbers.random((12, 3)) - 0.1 * np.eye(3)[truth]
        assert balanced_groups(losses).tolist() == truth.tolist()


def test_a_client_without_a_vote_keeps_its_group():
    losses = np.array([[NAN] * 3, [0.1, 0.9, 0.9], [0.2, 0.9, 0.8], [0.9, 0.1, 0.9], [0.9, 0.9, 0.1], [NAN] * 3])
    assert balanced_groups(losses, [2, 1, 1, 0, 0, 1]).tolist() == [2, 0, 0, 1, 2, 1]


def test_clients_without_a_vote_stay_though_voters_with_low_losses_want_their_place():
    losses = np.array([[0.1, 0.5], [0.1, 0.4], [NAN, NAN], [NAN, NAN]])
    assert balanced_groups(losses, [1, 1, 0, 0]).tolist() == [1, 1, 0, 0]


def test_without_a_vote_and_without_a_group_a_client_goes_where_there_is_room():
    losses = np.array([[NAN, NAN, NAN], [0.1, 0.5, 0.9], [0.2, 0.4, 0.9]])
    assert balanced_groups(losses).tolist() == [2, 0, 1]
    for previous in (None, [-1] * 6):
        assert sizes(balanced_groups(np.full((6, 3), NAN), previous), 3) == [2, 2, 2]


def test_when_nobody_votes_balanced_groups_stay_as_they_are_and_others_are_balanced():
    nobody = np.full((6, 3), NAN)
    assert balanced_groups(nobody, [2, 0, 1, 1, 0, 2]).tolist() == [2, 0, 1, 1, 0, 2]
    assert sizes(balanced_groups(nobody, [0] * 6), 3) == [2, 2, 2]


def test_a_loss_that_is_not_finite_is_the_worst():
    losses = np.array([[NAN, 0.5, np.inf], [0.1, 0.2, 0.3], [np.inf, 0.9, 0.8]])
    assert balanced_groups(losses).tolist() == [1, 0, 2]


def test_voters_are_grouped_by_their_losses_and_not_by_their_last_group():
    losses = np.random.default_rng(0).random((9, 3))
    assert all(balanced_groups(losses, p).tolist() == balanced_groups(losses).tolist() for p in ([0] * 9, [2, 1, 0] * 3))


# --- the least sum of losses

def smallest(losses) -> float:
    """The least sum over all groupings whose sizes differ by at most one."""
    count, selectors = losses.shape
    return min(losses[np.arange(count), groups].sum() for groups in map(list, itertools.product(range(selectors), repeat=count))
               if sizes(groups, selectors)[-1] - sizes(groups, selectors)[0] <= 1)


@pytest.mark.parametrize(("clients", "selectors"), [(1, 3), (2, 3), (5, 3), (6, 3), (7, 3), (5, 5), (4, 1)])
def test_the_sum_of_losses_is_the_least_under_the_sizes(clients, selectors):
    for seed in range(8):
        losses = np.random.default_rng(seed).random((clients, selectors))
        groups = least_loss_groups(losses)
        found = sizes(groups, selectors)
        assert found[-1] - found[0] <= 1 and losses[np.arange(clients), groups].sum() == pytest.approx(smallest(losses))


def test_a_selector_that_is_better_for_everybody_disturbs_the_procedure_and_not_the_sum():
    disturbed = 0
    for seed in range(20):
        numbers = np.random.default_rng(seed)
        truth = numbers.permutation(np.repeat([0, 1, 2], 4))
        losses = 0.7 + 0.2 * numbers.random((12, 1)) - 0.05 * np.eye(3)[truth] - np.array([0.3, 0.0, 0.0])
        assert least_loss_groups(losses).tolist() == truth.tolist()
        disturbed += balanced_groups(losses).tolist() != truth.tolist()
    assert disturbed > 10


def test_in_the_sum_too_a_client_without_a_vote_keeps_its_group_and_goes_where_there_is_room_without_one():
    losses = np.array([[0.1, 0.5], [0.1, 0.4], [NAN, NAN], [NAN, NAN]])
    assert least_loss_groups(losses, [1, 1, 0, 0]).tolist() == [1, 1, 0, 0]
    assert sizes(least_loss_groups(losses), 2) == [2, 2] and least_loss_groups(losses)[:2].tolist() == [0, 0]
    nobody = np.full((6, 3), NAN)
    assert least_loss_groups(nobody, [2, 0, 1, 1, 0, 2]).tolist() == [2, 0, 1, 1, 0, 2] and sizes(least_loss_groups(nobody, [0] * 6), 3) == [2, 2, 2]
    assert least_loss_groups(np.array([[NAN, 0.5, np.inf], [0.1, 0.2, 0.3], [np.inf, 0.9, 0.8]])).tolist() == [1, 0, 2]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"losses have shape \(3,\), expected \[clients, selectors\]"):
        balanced_groups(np.zeros(3))
    for previous in ([0, 1], [0, 1, 3], [0, 1, 0.5], [0, None, 1], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="previous groups must be 3 numbers between -1 and 1"):
            balanced_groups(np.zeros((3, 2)), previous)


def test_moves_are_counted_since_the_last_grouping():
    assert moved([0, 1, 2], None) == 0 and moved([0, 1, 2], [0, 2, 1]) == 2


def test_the_rand_index_is_1_for_the_same_groups_under_other_names_and_about_0_by_chance():
    known = {f"c{i}": "xyz"[i % 3] for i in range(12)} | {"stranger": None}
    assert rand_index({f"c{i}": f"selector-{(i + 1) % 3}" for i in range(12)} | {"stranger": "selector-0"}, known) == 1.0
    chance = [rand_index(dict(zip(known, groups, strict=False)), known) for groups in itertools.islice(
        (np.random.default_rng(s).permutation(np.repeat([0, 1, 2], 4)).tolist() for s in itertools.count()), 200)]
    assert abs(np.mean(chance)) < 0.05
