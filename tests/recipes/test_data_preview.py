"""The data of a recipe, read before a run starts."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from components.config import RecipeError, UserError
from components.data.prepare import prepare
from components.data.records import DataError
from components.recipes import check_recipe, data_preview, load_recipe, validation_process
from components.recipes.data_preview import assembled, describe_data, preview_data
from components.recipes.inputs import open_inputs, store_inputs
from tests.support.pipeline import ROOT
from tests.support.sources import write_jsonl

ROWS = [
    {"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "client_id": f"owner-{n % 12}"}
    for n in range(240)
]


@pytest.fixture
def own(tmp_path):
    """The recipe debug with rows of a user's own."""

    def recipe(rows=ROWS, **settings):
        path = write_jsonl(tmp_path / "pairs.jsonl", rows)
        overrides = {"data.source": "jsonl", "data.path": path, "data.options": "{judge_clients: 0.2}"}
        return load_recipe("debug", [f"{key}={value}" for key, value in (overrides | settings).items()])

    return recipe


def test_the_numbers_are_those_of_the_preparation(own, tmp_path):
    recipe = own()
    found = preview_data(recipe)
    prepared = prepare(recipe.data, recipe.seed, tmp_path / "prepared")
    assert found.rows == prepared.rows
    assert found.clients == prepared.partition.clients - len(prepared.clients_without_train)
    assert f"{prepared.rows.pairs} pairs of 4 clients" in describe_data(found)
    assert "(owner not among the clients, see data.clients)" in describe_data(found)


def test_owners_without_a_training_pair_are_named_and_their_pairs_are_not_among_the_sizes(own):
    idle = [row | {"split": "test"} for row in ROWS if row["client_id"] == "owner-3"][:1]
    rows = [row | {"split": "train" if n // 12 % 3 else "test"} for n, row in enumerate(ROWS)]
    rows = [row for row in rows if row["client_id"] != "owner-3"] + idle
    settings = {"data.clients": "null", "data.options": "{}", "evaluation.judge": "{kind: autoj}"}
    found = preview_data(own(rows, **settings))
    assert found.clients == 10, "another one has the pairs of the judge"
    assert found.without_training == ("owner-3",)
    assert min(found.sizes) > 1, "that of owner-3"
    assert "clients without a training pair, which train in no round: 1 (owner-3)\n" in describe_data(found)


FEDBISCUIT = {
    "federation.method": "fedbiscuit",
    "federation.options": "{selectors: 3, warmup_rounds: 1}",
    "federation.rounds": 12,
}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data.clients": 20}, r"data\.clients is 20, but .* 10 owners .* set data\.clients to 10"),
        ({"federation.clients_per_round": 11, "data.clients": "null"}, "but only 10 clients"),
        ({**FEDBISCUIT, "federation.options": "{selectors: 11, warmup_rounds: 1}"}, "but only 4 clients"),
        ({**FEDBISCUIT, "data.validation": 0}, "no client has validation pairs"),
        ({"data.options": "{judge_clients: 0}"}, "the judge has 0 training and 0 held-out pairs"),
        ({"data.test": 1e-6}, "leaves no held-out"),
        ({"data.partition": "margin"}, "no margin"),
    ],
)
def test_what_would_fail_a_run_is_refused_before_it_starts(own, settings, words):
    recipe = own(**settings)
    with pytest.raises((DataError, RecipeError), match=words) as refused:
        check_recipe(recipe)
    assert len(str(refused.value).splitlines()) == 1


def test_expectations_and_repeats_are_checked_on_demand(own):
    twice = own([*ROWS, ROWS[5]])
    repeats = "pairs that repeat an earlier one of the same owner: 1;"
    assert preview_data(twice).warnings[0].startswith(repeats)
    empty = own([ROWS[0] | {"chosen": " "}, *ROWS[1:]], **{"data.clients": "null"})
    assert preview_data(empty).rows is not None
    with pytest.raises(DataError, match="'chosen is not empty'"):
        preview_data(empty, with_expectations=True).expectations()


def test_expectations_are_checked_beside_the_rest_or_here_if_that_process_is_lost(own, monkeypatch):
    monkeypatch.setattr(validation_process, "sys", SimpleNamespace(modules={}))  # as if nothing were imported
    monkeypatch.setattr(validation_process, "_beside", [])
    empty = own([ROWS[0] | {"chosen": " "}, *ROWS[1:]], **{"data.clients": "null"})

    def check(recipe):
        with pytest.raises(DataError, match="'chosen is not empty'"):
            preview_data(recipe, with_expectations=True).expectations()
        return validation_process._beside[0]._process

    process = check(empty)
    preview_data(empty, with_expectations=True)  # of a check that fails before it waits for the answer
    assert check(empty) is process
    send = validation_process.ValidationProcess._send
    lose = lambda beside, data: (process.kill(), process.join(), send(beside, data))  # noqa: E731
    monkeypatch.setattr(validation_process.ValidationProcess, "_send", lose)
    assert check(empty) is process, "it was lost at work"
    assert validation_process.validation_process()._process is not process


@pytest.mark.pipeline
def test_a_check_leaves_no_semaphore_to_the_system():
    lines = [
        "from components.recipes import load_recipe",
        "from components.recipes.data_preview import preview_data",
        "print(preview_data(load_recipe('debug', []), with_expectations=True).expectations())",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "leaked semaphore" not in done.stderr


def test_the_judge_is_checked_for_each_recipe_with_the_same_data(own):
    without = own(**{"data.options": "{judge_clients: 0}", "evaluation.judge": "{kind: autoj}"})
    assert preview_data(without).rows is not None
    with pytest.raises(DataError, match="the judge has 0 training"):
        preview_data(own(**{"data.options": "{judge_clients: 0}"}))


def test_folders_that_cannot_be_walked_end_in_a_sentence(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "link").symlink_to("/nowhere")
    data = ["data.source=jsonl", "data.options={judge_clients: 0.2}"]
    assert preview_data(load_recipe("debug", [f"data.path={tmp_path}", *data])).rows is not None
    with pytest.raises(UserError):
        preview_data(load_recipe("debug", ["data.path=/proc", *data]))


def test_a_share_of_invalid_rows_is_that_of_the_whole_file(own, monkeypatch):
    monkeypatch.setattr(data_preview, "MAX_BYTES", 100)
    monkeypatch.setattr(data_preview, "HEAD", 20)
    recipe = own([{"prompt": "no"}, *ROWS], **{"data.drop_invalid": 0.01})
    assert "the first 20 rows were read" in describe_data(preview_data(recipe))


def test_of_large_files_only_the_first_rows_are_read(own, monkeypatch):
    monkeypatch.setattr(data_preview, "MAX_BYTES", 100)
    monkeypatch.setattr(data_preview, "HEAD", 100)
    assert "of the data, the first 100 rows were read" in describe_data(
        preview_data(own([*ROWS, {"prompt": "no"}]))
    )
    with pytest.raises(DataError, match="row 51: columns 'chosen', 'rejected' are missing"):
        preview_data(own([*ROWS[:50], {"prompt": "no"}, *ROWS[50:]]))


def test_data_of_the_hub_are_not_read(own, tmp_path):
    assert "data.source tldr" in describe_data(preview_data(load_recipe("summarization/tldr")))
    recipe = own(**{"data.test_prompts": "{source: alpaca_eval}"})
    assert "data.test_prompts.source alpaca_eval" in describe_data(preview_data(recipe))
    parts = [{"source": "jsonl", "path": str(tmp_path / "pairs.jsonl")}, {"source": "hh-rlhf"}]
    options = json.dumps({"sources": parts})
    mixture = load_recipe("debug", ["data.source=mixture", f"data.options={options}", "data.clients=2"])
    assert "data.options.sources[1].source hh-rlhf" in describe_data(preview_data(mixture))


def test_embedded_data_are_read():
    found = preview_data(load_recipe("debug"))
    assert found.rows is not None
    assert found.rows.pairs > 0
    assert found.unread == ""


def test_data_that_changed_are_read_again(own):
    first = preview_data(own()).rows
    second = preview_data(own(ROWS[:120])).rows
    assert first.pairs + first.judge > second.pairs + second.judge


def test_a_run_whose_data_are_copies_takes_what_its_check_has_read(own, tmp_path):
    rows = [{"prompt": "no"}, *ROWS]
    recipe = own(rows, **{"data.drop_invalid": 0.01})
    copied = open_inputs(store_inputs(recipe, tmp_path / "inputs"), tmp_path / "inputs")
    read = assembled(copied.data, copied.seed)
    assert assembled(recipe.data, recipe.seed) is read
    assert str(tmp_path / "inputs") not in str(read.warnings)
    assert str(recipe.data.path) in str(read.warnings)
    own([*rows, {**ROWS[0], "prompt": "another"}])
    changed = assembled(recipe.data, recipe.seed)
    assert changed is not read
    assert changed.rows.source == read.rows.source + 1


def test_pairs_of_large_files_do_not_stay_in_memory(own, monkeypatch):
    preview_data(own())
    assert data_preview._last
    monkeypatch.setattr(data_preview, "KEPT_BYTES", 100)
    monkeypatch.setattr(data_preview, "_last", {})
    assert preview_data(own()).rows is not None
    assert data_preview._last == {}


def test_a_time_limit_of_jobs_that_cannot_be_ended_is_refused_before_a_run_starts(own):
    recipe = own(**{"runtime.client_timeout": 5})
    with pytest.raises(RecipeError, match=r"client_timeout needs runtime\.transport 'processes'"):
        check_recipe(recipe)
