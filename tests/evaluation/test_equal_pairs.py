"""Completions that are equal to a model that trains on them, and dialogues that are read as one turn."""

import json

import pytest
from datasets import Dataset

from components.data.data_report import read_report
from components.data.records import DataError
from components.evaluation.equal_pairs import (
    count_equal_completions,
    dialogue_warnings,
    equal_warnings,
)
from components.recipes import load_recipe
from tasks import data as tasks
from tests.support.prepared import pairs_by_owner, server_prompts, write_prepared

PREFACE = "Thank you for contacting our support team about your order. "
OWNERS = {"ada": {"train": 6, "test": 2}, "bea": {"train": 4, "validation": 2}}
TRAINED = (
    "rewards={helpful: {kind: trained, template: '{prompt}|{response}', max_length: 16,"
    " training: {backbone: {name: tiny-random}}}}"
)
REWARD_JUDGE = (
    "evaluation.judge={kind: reward, reward: {kind: trained, template: '{prompt}|{response}', max_length: 16,"
    " training: {backbone: {name: tiny-random}}}}"
)


def write(folder, clients, judge=()):
    """A prepared folder with these pairs of the clients and of the judge."""
    write_prepared(folder)
    Dataset.from_list(list(clients)).to_parquet(folder / "pairs.parquet")
    if judge:
        Dataset.from_list(list(judge)).to_parquet(folder / "judge.parquet")
    return folder


def alike(row):
    """The pair with a common beginning of 60 characters."""
    return row | {"chosen": PREFACE + row["chosen"], "rejected": PREFACE + row["rejected"]}


def recipe(*overrides):
    return load_recipe("debug", [*overrides, "data.max_equal=1"])


@pytest.mark.parametrize(
    ("method", "short", "key"),
    [
        ("federation.method=fedavg", ["policy.max_new_tokens=5"], "policy.max_new_tokens"),
        ("federation.method=feddpo", ["policy.max_new_tokens=5"], "policy.max_new_tokens"),
        ("federation.method=fedpdpo", ["policy.max_new_tokens=5"], "policy.max_new_tokens"),
        ("federation.method=fedbis", ["selector.max_length=110"], "selector.max_length"),
        ("federation.method=fedbiscuit", ["selector.max_length=110"], "selector.max_length"),
    ],
)
def test_equal_completions_are_counted_by_client_and_split_for_the_model_that_clients_train(
    tmp_path, method, short, key
):
    rows = [alike(row) if row["client_id"] == "ada" else row for row in pairs_by_owner(OWNERS)]
    folder = write(tmp_path, rows)
    options = "federation.options={}"
    counts = count_equal_completions(recipe(method, options, *short), folder)[0]
    assert counts.key == key
    assert (counts.equal, counts.same_text, counts.pairs) == (8, 0, 14)
    assert counts.by_client == {"ada": {"train": 6, "test": 2}}
    long = ["policy.max_new_tokens=90", "selector.max_length=500"]
    long_enough = count_equal_completions(recipe(method, options, *long), folder)[0]
    assert long_enough.equal == 0


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["evaluation.judge.selector.max_length=110"], "the model evaluation.judge.selector"),
        ([REWARD_JUDGE], "the reward evaluation.judge.reward"),
    ],
)
def test_equal_completions_are_counted_for_judges_that_are_trained(tmp_path, overrides, model):
    judge = [alike(row) for row in pairs_by_owner({"judge": {"train": 5, "test": 3}})]
    counts = count_equal_completions(recipe(*overrides), write(tmp_path, pairs_by_owner(OWNERS), judge))[-1]
    assert counts.model == model
    assert counts.by_client == {"judge": {"train": 5, "test": 3}}


def test_equal_completions_are_counted_for_rewards_that_are_trained_and_not_for_sampled_completions(tmp_path):
    judge = [alike(row) for row in pairs_by_owner({"judge": {"train": 5, "test": 3}})]
    firm = ["federation.method=firm", "federation.options={objectives: {helpful: [helpful]}}", TRAINED]
    counted = count_equal_completions(recipe(*firm), write(tmp_path, pairs_by_owner(OWNERS), judge))
    assert [counts.model for counts in counted] == [
        "the model evaluation.judge.selector",
        "the reward rewards.helpful",
    ]
    assert counted[1].equal == 8


def test_the_policy_reads_what_it_is_trained_on(resident_policy):
    from components.models.pair_reader import policy_pair_reader

    rows = pairs_by_owner(OWNERS)
    reader = policy_pair_reader(resident_policy.policy.config)
    assert [reader.read(row) for row in rows] == [tuple(resident_policy.encode_pair(row)[1:]) for row in rows]


def test_more_equal_pairs_than_the_share_are_refused_with_the_key_that_cures_it(tmp_path):
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [alike(row) for row in rows[:2]] + rows[2:])
    short = ["federation.method=feddpo", "federation.options={}", "policy.max_new_tokens=5"]
    strict = [*short, "data.max_equal=0.05"]
    with pytest.raises(
        DataError,
        match=r"^2 of 14 pairs .*most of client ada: 2 train\), more than the share 0\.05 that is"
        r" allowed \(data\.max_equal\): raise"
        r" policy\.max_new_tokens, or raise data\.max_equal\.$",
    ):
        count_equal_completions(load_recipe("debug", strict), folder)
    counted = count_equal_completions(load_recipe("debug", [*short, "data.max_equal=0.15"]), folder)
    (warning,) = equal_warnings(counted)
    assert "2 of 14 pairs" in warning
    assert "raise policy.max_new_tokens" in warning


def test_pairs_of_the_same_text_are_counted_and_not_to_be_cured_by_a_length(tmp_path):
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [rows[0] | {"rejected": rows[0]["chosen"]}, *rows[1:]])
    (warning,) = equal_warnings(count_equal_completions(recipe(), folder))
    assert "(1 the same text, 0 after the cut" in warning
    assert "leave pairs of the same text out" in warning


def test_counts_are_taken_from_the_report_unless_the_models_section_has_changed(tmp_path):
    folder = write(tmp_path, [alike(row) for row in pairs_by_owner(OWNERS)])
    before = recipe("federation.method=feddpo", "federation.options={}")
    known = count_equal_completions(before, folder)
    (folder / "pairs.parquet").unlink()
    (folder / "judge.parquet").unlink()
    assert count_equal_completions(before, folder, known) == known
    write(tmp_path, [alike(row) for row in pairs_by_owner(OWNERS)])
    after = recipe("federation.method=feddpo", "federation.options={}", "policy.max_new_tokens=5")
    assert count_equal_completions(after, folder, known)[0].equal == 14


def own_file(path, count):
    """A file of pairs, every 30th of which has completions that differ after 60 characters only."""
    rows = []
    for n in range(count):
        preface = "" if n % 30 else PREFACE
        rows.append(
            {
                "prompt": f"My order {n} arrived broken.",
                "chosen": f"{preface}It will be replaced{' today' * (n % 2)}.",
                "rejected": f"{preface}See the manual{' again' * (n % 3)}.",
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_preparation_counts_equal_pairs_and_keeps_them(tmp_path):
    path = own_file(tmp_path / "pairs.jsonl", 240)
    overrides = [
        "data.source=jsonl",
        f"data.path={path}",
        "data.options={align_share: 0, judge_clients: 0.1}",
        "data.partition=iid",
        "data.clients=4",
        "federation.method=feddpo",
        "federation.options={}",
        "policy.max_new_tokens=8",
    ]
    loaded = load_recipe("debug", overrides)
    report = tasks.prepare_data.fn(loaded, tmp_path / "prepared", tmp_path / "trees")
    assert report == read_report(tmp_path / "prepared")
    (counts, judge) = report.equal_completions
    assert 0 < counts.equal <= 8
    assert counts.pairs == report.rows.pairs
    assert judge.key == "evaluation.judge.selector.max_length"
    assert [w for w in report.warnings if f"{counts.equal} of {counts.pairs} pairs" in w]
    assert report.metrics()["equal_completions/policy.max_new_tokens"] == counts.equal
    assert tasks.check_pairs(loaded, tmp_path / "prepared") == []
    strict = [*overrides, "data.max_equal=0"]
    with pytest.raises(DataError, match=r"raise policy\.max_new_tokens"):
        tasks.prepare_data.fn(load_recipe("debug", strict), tmp_path / "strict", tmp_path / "trees")
    changed = load_recipe("debug", [*strict, "policy.max_new_tokens=7"])
    (warning,) = tasks.check_pairs(changed, tmp_path / "prepared")
    assert "raise policy.max_new_tokens" in warning


def test_prompts_whose_turns_are_not_recognized_are_a_warning_with_their_number(tmp_path):
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [rows[0] | {"prompt": "Human: Hi. Assistant: Ho. Human: Hi."}, *rows[1:]])
    prompts = server_prompts(3)
    prompts[0]["prompt"] = "Why? Assistant: So."
    Dataset.from_list(prompts).to_parquet(folder / "prompts.parquet")
    (warning,) = dialogue_warnings(recipe("policy.chat=turns"), folder)
    assert warning.startswith("2 of 20 prompts are read as one turn of the user")
    assert "Hi." not in warning
    assert "So." not in warning, "texts of owners stay out of logs"
    assert dialogue_warnings(recipe(), folder) == []


def test_turns_of_one_speaker_in_a_row_are_a_warning_with_their_number(tmp_path):
    quoted = "Human: Hi.\n\nAssistant: She said\n\nAssistant: is a word.\n\nHuman: Ok?"
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [rows[0] | {"prompt": quoted}, *rows[1:]])
    (warning,) = dialogue_warnings(recipe("policy.chat=turns"), folder)
    assert " prompts have two turns of one speaker in a row" in warning
    assert warning.startswith("1 of ")
    assert "is a word" not in warning


def test_equal_texts_and_cut_ones_have_both_remedies(tmp_path):
    rows = pairs_by_owner(OWNERS)
    same = rows[2] | {"rejected": rows[2]["chosen"]}
    folder = write(tmp_path, [*(alike(row) for row in rows[:2]), same, *rows[3:]])
    short = ["federation.method=feddpo", "federation.options={}", "policy.max_new_tokens=5"]
    (warning,) = equal_warnings(count_equal_completions(recipe(*short), folder))
    assert "leave pairs of the same text out of the data and raise policy.max_new_tokens" in warning
