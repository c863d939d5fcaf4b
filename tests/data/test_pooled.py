"""data.pooled: one client has all training pairs, and held-out pairs stay with their owners."""

import pytest

from components.config import RecipeError
from components.data.data_report import read_report
from components.data.prepare import prepare
from components.data.records import DataError, read_clients
from components.recipes import load_recipe
from components.recipes.data_preview import preview_data
from components.recipes.load import dump_recipe
from tests.support.sources import WHOLE_FILE, data_config, prepared_rows, write_jsonl


def pairs(owner=lambda n: f"o{n % 5}", count=120):
    return [
        {
            "prompt": f"Question {n}?",
            "chosen": f"Yes {n}.",
            "rejected": f"No {n}{'!' * (n % 3)}",
            "client_id": owner(n),
        }
        for n in range(count)
    ]


def prepared(tmp_path, rows, **settings):
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    folder = tmp_path / ("pooled" if settings.get("pooled") else "apart")
    prepare(data_config(source="jsonl", path=path, options=WHOLE_FILE, **settings), 0, folder)
    return folder


def test_the_pooled_client_has_all_training_pairs_and_the_others_their_held_out_ones(tmp_path):
    apart = prepared(tmp_path, pairs())
    pooled = prepared(tmp_path, pairs(), pooled=True)
    rows = {folder: prepared_rows(folder, "pairs") for folder in (apart, pooled)}
    for split in ("train", "validation"):
        assert {row["pair_id"] for row in rows[apart] if row["split"] == split} == {
            row["pair_id"] for row in rows[pooled] if row["split"] == split
        }
    assert {row["client_id"] for row in rows[pooled] if row["split"] != "test"} == {"pooled"}
    held_out = [
        {(row["client_id"], row["pair_id"]) for row in own if row["split"] == "test"} for own in rows.values()
    ]
    assert held_out[0] == held_out[1]
    counts, before = read_clients(pooled), read_clients(apart)
    assert counts["pooled"] == {
        "train": sum(own["train"] for own in before.values()),
        "validation": sum(own["validation"] for own in before.values()),
        "test": 0,
    }
    assert {name: own["test"] for name, own in counts.items() if name != "pooled"} == {
        name: own["test"] for name, own in before.items()
    }
    assert read_report(pooled).rows == read_report(apart).rows


@pytest.mark.parametrize("method", ["drift", "fedamp", "fedpdpo", "few_shot", "alone"])
def test_methods_whose_clients_have_models_of_their_own_are_refused(method):
    chosen = ["federation.method=feddpo", "federation.options.average_over=self"]
    chosen = chosen if method == "alone" else [f"federation.method={method}"]
    with pytest.raises(RecipeError, match="data.pooled has one client, but federation.method"):
        load_recipe("debug", ["data.pooled=true", *chosen])


def test_an_owner_of_that_name_is_refused(tmp_path):
    with pytest.raises(DataError, match="data.pooled names a client 'pooled'"):
        prepared(tmp_path, pairs(lambda n: ("pooled", "other")[n % 2]), pooled=True)


def test_the_pooled_client_takes_the_steps_of_all_clients_of_a_round(tmp_path):
    federated = load_recipe("debug").federation
    pooled = load_recipe("debug", ["data.pooled=true"])
    assert pooled.federation.clients_per_round == 1
    assert pooled.federation.local_steps == federated.clients_per_round * federated.local_steps
    assert preview_data(pooled).clients == 1
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(pooled))
    assert load_recipe(str(path)) == pooled, "a run's own recipe is as it is"
