import numpy as np
import pytest

from components.data.partition import dirichlet, iid, natural, statistics


def questions(domains: int = 4, each: int = 200, rows: int = 3) -> tuple[list[str], list[str]]:
    """Rows of `domains` domains with `each` questions and `rows` rows a question."""
    labels = [(f"domain {d}", f"q {d}/{q}") for d in range(domains) for q in range(each) for _ in range(rows)]
    return [d for d, _ in labels], [g for _, g in labels]


def skew(domains: list[str], owners: np.ndarray) -> float:
    """Mean total variation distance between a client's mixture of domains and the whole's."""
    names = sorted(set(domains))
    table = np.array([[np.sum((owners == c) & (np.array(domains) == d)) for d in names] for c in np.unique(owners)], dtype=float)
    whole = table.sum(0) / table.sum()
    return float(np.abs(table / table.sum(1, keepdims=True) - whole).sum(1).mean() / 2)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 10.0])
def test_dirichlet_keeps_the_rows_of_a_question_with_one_client_and_leaves_no_client_empty(alpha):
    domains, groups = questions()
    owners = dirichlet(domains, groups, 50, alpha, seed=3)
    assert owners.shape == (len(groups),) and np.issubdtype(owners.dtype, np.integer)
    assert set(owners) == set(range(50))
    assert len(set(zip(groups, owners, strict=True))) == len(set(groups))


def test_dirichlet_gives_each_client_one_group_when_there_are_as_many_clients_as_groups():
    domains, groups = questions(domains=2, each=6)
    owners = dirichlet(domains, groups, 12, 0.3, seed=0)
    assert len(set(zip(groups, owners, strict=True))) == 12 and set(owners) == set(range(12))


def test_a_small_alpha_gives_clients_few_domains_and_a_large_one_nearly_the_same_mixture():
    domains, groups = questions()
    narrow, wide = (skew(domains, dirichlet(domains, groups, 10, alpha, seed=1)) for alpha in (0.05, 100.0))
    assert narrow > 0.4 and wide < 0.1


def test_a_large_alpha_gives_clients_nearly_as_many_rows_each():
    domains, groups = questions()
    counts = np.bincount(dirichlet(domains, groups, 10, 1000.0, seed=1))
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()


def test_dirichlet_is_a_function_of_the_seed_and_not_of_the_order_of_rows():
    domains, groups = questions()
    owners = dirichlet(domains, groups, 10, 0.3, seed=7)
    assert (owners == dirichlet(domains, groups, 10, 0.3, seed=7)).all()
    assert (owners != dirichlet(domains, groups, 10, 0.3, seed=8)).any()
    order = np.random.default_rng(0).permutation(len(groups))
    shuffled = dirichlet([domains[i] for i in order], [groups[i] for i in order], 10, 0.3, seed=7)
    assert (owners[order] == shuffled).all()


def test_dirichlet_takes_arrays_of_numbers():
    owners = dirichlet(np.array([0, 0, 1, 1]), np.array([5, 5, 6, 7]), 3, 1.0, seed=0)
    assert owners[0] == owners[1] and set(owners) == {0, 1, 2}


def test_a_group_that_spans_domains_still_goes_to_one_client():
    owners = dirichlet(["a", "a", "b", "b"], ["g", "h", "g", "k"], 3, 1.0, seed=0)
    assert owners[0] == owners[2] and set(owners) == {0, 1, 2}


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((["a", "a"], ["g", "g"], 2, 0.3), "2 clients cannot each own one of 1 groups"),
    ((["a"], ["g", "h"], 1, 0.3), "domains has 1 rows and groups has 2"),
    ((["a"], ["g"], 1, 0.0), "alpha is 0.0"),
    ((["a"], ["g"], 1, float("nan")), "alpha is nan"),
    ((["a"], ["g"], 0, 0.3), "n_clients is 0")])
def test_dirichlet_refuses_what_cannot_be_partitioned_in_a_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        dirichlet(*arguments, seed=0)


def test_iid_deals_whole_groups_out_so_that_clients_have_nearly_the_same_number_of_rows():
    domains, groups = questions()
    owners = iid(groups, 7, seed=2)
    counts = np.bincount(owners)
    assert counts.max() - counts.min() <= 3         # one question
    assert len(set(zip(groups, owners, strict=True))) == len(set(groups))
    assert skew(domains, owners) < 0.1
    assert (owners == iid(groups, 7, seed=2)).all() and (owners != iid(groups, 7, seed=3)).any()


def test_natural_keeps_owners_and_refuses_rows_without_one():
    assert natural(["b", "a", "b"]).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="1 of 2 rows have no client_id"):
        natural(["a", ""])


def test_statistics_are_the_columns_of_table_five():
    assert statistics([5, 1]) == {"samples": 6, "clients": 2, "max": 5, "min": 1, "std": 2.0}
    assert statistics([3, 0])["min"] == 0 and statistics([])["clients"] == 0
