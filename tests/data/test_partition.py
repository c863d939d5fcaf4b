from itertools import product

import numpy as np
import pytest

from components.data.data_report import PartitionSummary
from components.data.partition import by_column, by_margin, dirichlet, iid, summarize


def questions(domains: int = 4, each: int = 200, rows: int = 3) -> tuple[list[str], list[str]]:
    """Rows of `domains` domains with `each` questions and `rows` rows a question."""
    indices = product(range(domains), range(each), range(rows))
    labels = [(f"domain {d}", f"q {d}/{q}") for d, q, _ in indices]
    return [d for d, _ in labels], [g for _, g in labels]


def skew(domains: list[str], owners: np.ndarray) -> float:
    """Mean total variation distance between a client's mixture of domains and the whole's."""
    names = sorted(set(domains))
    table = np.array(
        [[np.sum((owners == c) & (np.array(domains) == d)) for d in names] for c in np.unique(owners)],
        dtype=float,
    )
    whole = table.sum(0) / table.sum()
    return float(np.abs(table / table.sum(1, keepdims=True) - whole).sum(1).mean() / 2)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 10.0])
def test_dirichlet_keeps_the_rows_of_a_question_with_one_client_and_leaves_no_client_empty(alpha):
    domains, groups = questions()
    owners = dirichlet(domains, groups, 50, alpha, seed=3)
    assert owners.shape == (len(groups),)
    assert np.issubdtype(owners.dtype, np.integer)
    assert set(owners) == set(range(50))
    assert len(set(zip(groups, owners, strict=True))) == len(set(groups))


def test_dirichlet_gives_each_client_groups_that_no_other_has():
    domains, groups = questions(domains=2, each=6)
    owners = dirichlet(domains, groups, 12, 0.3, seed=0)
    assert len(set(zip(groups, owners, strict=True))) == 12
    assert set(owners) == set(range(12))
    owners = dirichlet(np.array([0, 0, 1, 1]), np.array([5, 5, 6, 7]), 3, 1.0, seed=0)
    assert owners[0] == owners[1]
    assert set(owners) == {0, 1, 2}
    owners = dirichlet(["a", "a", "b", "b"], ["g", "h", "g", "k"], 3, 1.0, seed=0)
    assert owners[0] == owners[2]
    assert set(owners) == {0, 1, 2}


def test_a_large_alpha_gives_clients_nearly_the_same_rows_and_a_small_one_few_domains():
    domains, groups = questions()
    narrow, wide = (skew(domains, dirichlet(domains, groups, 10, alpha, seed=1)) for alpha in (0.05, 100.0))
    assert narrow > 0.4
    assert wide < 0.1
    counts = np.bincount(dirichlet(domains, groups, 10, 1000.0, seed=1))
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_dirichlet_is_a_function_of_the_seed_and_not_of_the_order_of_rows():
    domains, groups = questions()
    owners = dirichlet(domains, groups, 10, 0.3, seed=7)
    assert (owners == dirichlet(domains, groups, 10, 0.3, seed=7)).all()
    assert (owners != dirichlet(domains, groups, 10, 0.3, seed=8)).any()
    order = np.random.default_rng(0).permutation(len(groups))
    shuffled = dirichlet([domains[i] for i in order], [groups[i] for i in order], 10, 0.3, seed=7)
    assert (owners[order] == shuffled).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["a", "a"], ["g", "g"], 2, 0.3), "2 clients cannot each own one of 1 groups"),
        ((["a"], ["g", "h"], 1, 0.3), "domains has 1 rows and groups has 2"),
        ((["a"], ["g"], 1, 0.0), "alpha is 0.0"),
        ((["a"], ["g"], 1, float("nan")), "alpha is nan"),
        ((["a"], ["g"], 0, 0.3), "n_clients is 0"),
    ],
)
def test_dirichlet_refuses_what_cannot_be_partitioned_in_a_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        dirichlet(*arguments, seed=0)


def test_iid_assigns_whole_groups_so_that_clients_have_nearly_the_same_number_of_rows():
    domains, groups = questions()
    owners = iid(groups, 7, seed=2)
    counts = np.bincount(owners)
    assert counts.max() - counts.min() <= 3  # one question
    assert len(set(zip(groups, owners, strict=True))) == len(set(groups))
    assert skew(domains, owners) < 0.1
    assert (owners == iid(groups, 7, seed=2)).all()
    assert (owners != iid(groups, 7, seed=3)).any()


def test_a_summary_has_the_columns_of_table_five():
    assert summarize([5, 1]) == PartitionSummary(samples=6, clients=2, max=5, min=1, std=2.0)
    assert summarize([3, 0]).min == 0
    assert summarize([]).clients == 0


def test_margin_divides_groups_sorted_by_their_mean_into_shards_the_greatest_first():
    margins = np.random.default_rng(0).normal(size=90)
    owners = by_margin(margins, [f"q{i}" for i in range(90)], 3)
    assert owners[np.argsort(-margins)].tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert np.issubdtype(owners.dtype, np.integer)
    owners = by_margin([9.0, 0.0, 5.0, 5.0, 4.0, 4.0], ["mixed", "mixed", "high", "high", "low", "low"], 3)
    assert owners.tolist() == [1, 1, 0, 0, 2, 2]  # the means are 4.5, 5 and 4


def test_margin_does_not_depend_on_the_order_of_rows_and_equal_margins_are_in_the_order_of_the_groups_names():
    draw = np.random.default_rng(1)
    groups = [f"q{i:02d}" for i in draw.integers(0, 40, 200)]
    margins = draw.integers(0, 3, 200) / 10
    owners = by_margin(margins, groups, 4)
    for order in (draw.permutation(200) for _ in range(20)):
        assert (by_margin(margins[order], [groups[i] for i in order], 4) == owners[order]).all()
    assert by_margin([1.0] * 4, ["d", "b", "a", "c"], 4).tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("sizes", "clients", "expected"),
    [
        ([3, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 1, 3], 2, [0, 0, 0, 1]),
        ([9, 1, 1], 3, [0, 1, 2]),
        ([1, 1, 9], 3, [0, 1, 2]),
        ([2, 2, 2, 2, 2], 2, [0, 0, 1, 1, 1]),
        ([4, 1, 1, 4], 2, [0, 0, 1, 1]),
    ],
)
def test_margin_ends_a_shard_at_the_group_nearest_to_an_even_share_and_leaves_no_client_empty(
    sizes, clients, expected
):
    rows = np.repeat(np.arange(len(sizes)), sizes).tolist()
    owners = by_margin([-float(g) for g in rows], rows, clients)
    assert [int(owners[rows.index(g)]) for g in range(len(sizes))] == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1.0, 2.0], ["g", "g"], 2), "2 clients cannot each own one of 1 groups"),
        (([1.0], ["g", "h"], 1), "margins has 1 rows and groups has 2"),
        (([1.0], ["g"], 0), "n_clients is 0"),
    ],
)
def test_margin_refuses_what_cannot_be_partitioned_in_a_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        by_margin(*arguments)


def test_each_value_of_a_column_is_a_client_or_belongs_to_one_and_others_are_refused():
    assert by_column(["Go", "C#", "Go"]) == ["Go", "C#", "Go"]
    assert by_column(["Go", "C#", "PHP"], {"a": ["Go", "PHP"]}) == ["a", None, "a"]
    with pytest.raises(
        ValueError,
        match=r"data.column_clients.web: value 'PHQ' is not known; there are: Go, PHP. Did you mean 'PHP'\?",
    ):
        by_column(["Go", "PHP"], {"web": ["PHQ"]})
