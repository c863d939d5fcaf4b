"""Balanced clusters from losses (FedBiscuit section 5.1): hand-computed cases and properties."""

import itertools

import numpy as np
import pytest

from components.federation.grouping import (
    adjusted_rand_index,
    balanced_groups,
    count_moved,
    least_loss_groups,
)

NAN = float("nan")


def sizes(groups, selectors):
    """Sizes of the clusters, sorted."""
    return sorted(np.bincount(groups, minlength=selectors).tolist())


# --- the procedure of the paper


def test_where_preferences_are_balanced_each_client_gets_the_selector_of_its_lowest_loss():
    losses = np.array([[1, 5, 9], [7, 2, 9], [7, 6, 3], [4, 8, 9], [9, 1, 2], [9, 8, 1]])
    assert balanced_groups(losses).tolist() == [0, 1, 2, 0, 1, 2]


def test_ties_of_losses_are_decided_by_the_smaller_cluster_then_by_the_lower_number():
    assert balanced_groups([[0.2, 0.9], [0.1, 0.1]]).tolist() == [0, 1]
    assert balanced_groups([[0.1, 0.1]]).tolist() == [0]


def test_above_the_cap_clients_move_to_their_next_lowest_loss_and_the_lowest_losses_stay():
    """All prefer selector 0, whose cap is 2: 1 and 3 stay. Then 0 and 2 prefer 1, whose cap is 1."""
    losses = np.array([[0.4, 0.5, 0.9], [0.1, 0.2, 0.3], [0.3, 0.6, 0.7], [0.2, 0.9, 0.3]])
    assert balanced_groups(losses).tolist() == [1, 0, 2, 0]


def test_the_largest_cluster_is_capped_first():
    """Five prefer selector 1, whose cap is 2; three move to 0, where client 5 is and two stay again."""
    losses = [[0.9, 0.1, 1], [0.8, 0.2, 1], [0.7, 0.3, 1], [0.6, 0.4, 1], [0.55, 0.5, 1], [0.1, 0.9, 0.5]]
    assert balanced_groups(np.array(losses)).tolist() == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("clients", "selectors"),
    [(1, 3), (2, 3), (3, 3), (12, 3), (13, 3), (14, 3), (53, 5), (200, 3), (7, 7), (4, 1)],
)
def test_sizes_differ_by_at_most_one_where_most_clients_prefer_one_selector(clients, selectors):
    for seed in range(20):
        losses = np.random.default_rng(seed).random((clients, selectors)) ** 3
        losses[:, 0] *= 0.1
        counts = sizes(balanced_groups(losses), selectors)
        assert sum(counts) == clients
        assert counts[-1] - counts[0] <= 1


def test_the_groups_do_not_depend_on_the_order_of_arrival():
    for seed in range(30):
        numbers = np.random.default_rng(seed)
        losses = numbers.random((11, 3))
        losses[:, 1] -= 0.5
        order = numbers.permutation(11)
        assert balanced_groups(losses[order]).tolist() == balanced_groups(losses)[order].tolist()


def test_true_groups_of_equal_size_are_recovered_at_any_level_of_the_losses():
    for seed in range(20):
        numbers = np.random.default_rng(seed)
        truth = numbers.permutation(np.repeat([0, 1, 2], 4))
        level = 0.7 + 0.05 * numbers.random((12, 1))
        losses = level + 0.02 * numbers.random((12, 3)) - 0.1 * np.eye(3)[truth]
        assert balanced_groups(losses).tolist() == truth.tolist()


# --- clients without validation pairs


def test_a_client_without_a_vote_stays_in_its_group():
    losses = np.array(
        [[NAN] * 3, [0.1, 0.9, 0.9], [0.2, 0.9, 0.8], [0.9, 0.1, 0.9], [0.9, 0.9, 0.1], [NAN] * 3]
    )
    assert balanced_groups(losses, [2, 1, 1, 0, 0, 1]).tolist() == [2, 0, 0, 1, 2, 1]


BOTH = pytest.mark.parametrize("group", [balanced_groups, least_loss_groups])
TWO_WITHOUT_A_VOTE = np.array([[0.1, 0.5], [0.1, 0.4], [NAN, NAN], [NAN, NAN]])


@BOTH
def test_clients_without_a_vote_are_not_displaced_by_voters_with_low_losses(group):
    assert group(TWO_WITHOUT_A_VOTE, [1, 1, 0, 0]).tolist() == [1, 1, 0, 0]


@BOTH
def test_a_client_without_a_vote_and_without_a_group_gets_a_free_place(group):
    losses = np.array([[NAN, NAN, NAN], [0.1, 0.5, 0.9], [0.2, 0.4, 0.9]])
    assert group(losses).tolist() == [2, 0, 1]
    assert sizes(group(TWO_WITHOUT_A_VOTE), 2) == [2, 2]
    assert group(TWO_WITHOUT_A_VOTE[:, ::-1], [-1] * 4).tolist() == [1, 1, 0, 0]


def test_in_the_sum_voters_take_the_places_of_their_lowest_losses_before_clients_without_a_vote():
    assert least_loss_groups(TWO_WITHOUT_A_VOTE).tolist() == [0, 0, 1, 1]


@BOTH
@pytest.mark.parametrize("previous", [None, [-1] * 6, [0] * 6])
def test_groups_are_balanced_where_no_client_has_a_vote(group, previous):
    assert sizes(group(np.full((6, 3), NAN), previous), 3) == [2, 2, 2]


@BOTH
def test_balanced_groups_stay_as_they_are_where_no_client_has_a_vote(group):
    assert group(np.full((6, 3), NAN), [2, 0, 1, 1, 0, 2]).tolist() == [2, 0, 1, 1, 0, 2]


@BOTH
def test_a_loss_that_is_not_finite_is_the_worst(group):
    losses = np.array([[NAN, 0.5, np.inf], [0.1, 0.2, 0.3], [np.inf, 0.9, 0.8]])
    assert group(losses).tolist() == [1, 0, 2]


@pytest.mark.parametrize("previous", [[0] * 9, [2, 1, 0] * 3])
def test_voters_are_grouped_by_their_losses_and_not_by_their_previous_group(previous):
    losses = np.random.default_rng(0).random((9, 3))
    assert balanced_groups(losses, previous).tolist() == balanced_groups(losses).tolist()


# --- the minimum of the sum of losses


def minimum_sum(losses):
    """The minimum over all groupings whose sizes differ by at most one."""
    count, selectors = losses.shape
    sums = []
    for groups in itertools.product(range(selectors), repeat=count):
        counts = sizes(groups, selectors)
        if counts[-1] - counts[0] <= 1:
            sums.append(losses[np.arange(count), list(groups)].sum())
    return min(sums)


@pytest.mark.parametrize(("clients", "selectors"), [(1, 3), (2, 3), (5, 3), (6, 3), (7, 3), (5, 5), (4, 1)])
def test_the_sum_of_losses_is_the_minimum_under_the_sizes(clients, selectors):
    for seed in range(4):
        losses = np.random.default_rng(seed).random((clients, selectors))
        groups = least_loss_groups(losses)
        counts = sizes(groups, selectors)
        assert counts[-1] - counts[0] <= 1
        assert losses[np.arange(clients), groups].sum() == pytest.approx(minimum_sum(losses))


def test_a_selector_that_is_better_for_all_disturbs_the_procedure_and_not_the_sum():
    disturbed = 0
    for seed in range(20):
        numbers = np.random.default_rng(seed)
        truth = numbers.permutation(np.repeat([0, 1, 2], 4))
        losses = 0.7 + 0.2 * numbers.random((12, 1)) - 0.05 * np.eye(3)[truth] - np.array([0.3, 0.0, 0.0])
        assert least_loss_groups(losses).tolist() == truth.tolist()
        disturbed += balanced_groups(losses).tolist() != truth.tolist()
    assert disturbed > 10


# --- arguments, and measures of a grouping


@BOTH
def test_losses_that_are_no_matrix_are_refused(group):
    with pytest.raises(ValueError, match=r"losses have shape \(3,\), expected \[clients, selectors\]"):
        group(np.zeros(3))


@pytest.mark.parametrize(
    "previous", [[0, 1], [0, 1, 2], [0, 1, -2], [0, 1, 0.5], [0, None, 1], ["a", "b", "c"]]
)
def test_previous_groups_that_do_not_fit_are_refused(previous):
    with pytest.raises(ValueError, match="previous clusters must be 3 numbers between -1 and 1"):
        balanced_groups(np.zeros((3, 2)), previous)


def test_moves_are_counted_since_the_previous_grouping():
    assert count_moved([0, 1, 2], None) == 0
    assert count_moved([0, 1, 2], [0, 2, 1]) == 2


TRUE_GROUPS = {f"c{i}": "xyz"[i % 3] for i in range(12)} | {"unknown": None}


def test_the_rand_index_of_equal_groups_under_other_names_is_1():
    assignment = {f"c{i}": f"selector-{(i + 1) % 3}" for i in range(12)} | {"unknown": "selector-0"}
    assert adjusted_rand_index(assignment, TRUE_GROUPS) == 1.0


def test_the_rand_index_of_random_groups_is_about_0():
    indices = []
    for seed in range(200):
        groups = np.random.default_rng(seed).permutation(np.arange(len(TRUE_GROUPS)) % 3).tolist()
        assignment = dict(zip(TRUE_GROUPS, groups, strict=True))
        indices.append(adjusted_rand_index(assignment, TRUE_GROUPS))
    assert abs(np.mean(indices)) < 0.05
