"""data.unseen_clients: whole owners are left out of the rounds, with a few training pairs of their own."""

from collections import Counter

import pytest

from components.config import RecipeError
from components.data.data_report import read_report
from components.data.prepare import assemble, prepare
from components.data.records import DataError, read_clients, read_rows
from components.io import file_hash
from components.recipes import load_recipe
from components.recipes.data_preview import preview_data
from tests.support.sources import WHOLE_FILE, data_config, prepared_rows, write_jsonl


def pairs(owners=5, count=150):
    return [
        {
            "prompt": f"Question {n}?",
            "chosen": f"Yes {n}.",
            "rejected": f"No {n}{'!' * (n % 3)}",
            "client_id": f"o{n % owners}",
        }
        for n in range(count)
    ]


def prepared(tmp_path, rows, name="data", **settings):
    path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    prepare(data_config(source="jsonl", path=path, options=WHOLE_FILE, **settings), 3, tmp_path / name)
    return tmp_path / name


def test_unseen_clients_have_no_pair_among_those_of_the_rounds_and_few_training_pairs(tmp_path):
    every = prepared(tmp_path, pairs(), "every")
    folder = prepared(tmp_path, pairs(), unseen_clients=2, unseen_pairs=4)
    unseen = read_rows(folder / "unseen" / "pairs.parquet")
    names = set(read_clients(folder / "unseen"))
    assert len(names) == 2
    assert names == {row["client_id"] for row in unseen}
    assert not names & {row["client_id"] for row in prepared_rows(folder)}
    assert names | set(read_clients(folder)) == set(read_clients(every))
    before = read_clients(every)
    for name in names:
        counts = Counter(row["split"] for row in unseen if row["client_id"] == name)
        assert counts == {**before[name], "train": 4}
    left_out = sum(sum(before[name].values()) for name in names)
    assert read_report(folder).rows.left_out == {"owner takes part in no round": left_out}


@pytest.mark.parametrize("seed", [2, 3])  # it is unseen with one of them
def test_an_unseen_client_with_the_name_of_the_pool_is_refused_as_another_one_is(tmp_path, seed):
    names = {"o0": "pooled"}
    own = [row | {"client_id": names.get(row["client_id"], row["client_id"])} for row in pairs(owners=2)]
    path = write_jsonl(tmp_path / "data.jsonl", own)
    config = data_config(source="jsonl", path=path, options=WHOLE_FILE, unseen_clients=1, pooled=True)
    with pytest.raises(DataError, match="an owner has this name: rename it"):
        assemble(config, seed)


def test_the_pairs_of_the_rounds_have_the_bytes_of_data_without_the_unseen_owners(tmp_path):
    splits = ("train", "train", "validation", "test")
    rows = [{**row, "split": splits[n // 5 % 4]} for n, row in enumerate(pairs())]
    folder = prepared(tmp_path, rows, unseen_clients=2)
    unseen = read_clients(folder / "unseen")
    without = prepared(tmp_path, [row for row in rows if row["client_id"] not in unseen], "without")
    for name in ("pairs.parquet", "clients.json"):
        assert file_hash(folder / name) == file_hash(without / name)


def test_the_same_seed_leaves_out_the_same_clients(tmp_path):
    first, second = (prepared(tmp_path, pairs(), name, unseen_clients=1) for name in ("a", "b"))
    for name in ("pairs.parquet", "unseen/pairs.parquet", "unseen/clients.json"):
        assert file_hash(first / name) == file_hash(second / name)


def test_the_pooled_client_has_no_pair_of_unseen_clients(tmp_path):
    folder = prepared(tmp_path, pairs(), pooled=True, unseen_clients=1)
    (unseen,) = read_clients(folder / "unseen")
    known = {row["pair_id"] for row in read_rows(folder / "unseen" / "pairs.parquet")}
    assert not known & {row["pair_id"] for row in prepared_rows(folder)}
    assert unseen not in read_clients(folder)


def test_more_unseen_clients_than_can_be_left_out_are_refused(tmp_path):
    sentence = "data.unseen_clients is 5, but of 5 clients 5 have both .*use at most 4"
    with pytest.raises(DataError, match=sentence):
        prepared(tmp_path, pairs(), unseen_clients=5)
    rows = [row for row in pairs() if row["client_id"] != "o4"]
    rows += [{**pairs()[4], "client_id": "o4"}]  # a single pair is in one split
    with pytest.raises(DataError, match="of 5 clients 4 have both .*use at most 4"):
        prepared(tmp_path, rows, unseen_clients=5)
    with pytest.raises(RecipeError, match="unseen_clients is 4, which leaves none of 4 clients to train"):
        load_recipe("debug", ["data.unseen_clients=4"])


def test_rounds_that_need_more_clients_than_are_left_are_refused():
    sentence = (
        "data.clients is 4, of which data.unseen_clients leaves 1 to train, but .*clients_per_round is 2"
    )
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("debug", ["data.unseen_clients=3"])
    with pytest.raises(RecipeError, match="data.unseen_pairs is 4, but data.unseen_clients is 0"):
        load_recipe("debug", ["data.unseen_pairs=4"])
    recipe = load_recipe(
        "debug", ["data.unseen_clients=3", "data.clients=null", "federation.clients_per_round=99"]
    )
    with pytest.raises(RecipeError, match=r"only \d+ clients .*besides 3 that take part in no round"):
        preview_data(recipe)


def test_unseen_clients_are_refused_where_they_would_train_by_rewards():
    ppo = ["federation.method=fedpdpo", "data.unseen_clients=1"]
    load_recipe("debug", ppo)
    alone = ["federation.method=feddpo", "federation.options.average_over=self", "data.unseen_clients=1"]
    rewards = ["federation.options.objective={kind: ppo}", "rewards={preference: {kind: judge}}"]
    with pytest.raises(RecipeError, match=r"train their models by rewards \(preference\).*without rewards"):
        load_recipe("debug", [*alone, *rewards])
