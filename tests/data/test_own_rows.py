"""Rows of users' own files: TRL's conversations, numbers for names, csv, other columns, invalid rows."""

import csv
import json

import datasets
import pandas as pd
import pytest

from components.config import RecipeError
from components.data.records import DataError
from components.data.sources import load
from components.recipes import load_recipe
from tests.support.sources import WHOLE_FILE, data_config, write_jsonl


def messages(*turns):
    """Messages as TRL has them: the role is a letter before the text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def own(path, rows, **settings):
    return data_config(source="jsonl", path=write_jsonl(path, rows), options=WHOLE_FILE, **settings)


def one_pair(tmp_path, row, **settings):
    (pair,) = load(own(tmp_path / "p.jsonl", [row], test=1e-9, validation=0, **settings), 0).pairs
    return pair.prompt, pair.chosen, pair.rejected


# --- conversations


def test_conversations_of_a_saved_data_set_are_read(tmp_path):
    prompts = [messages(f"u Question {n}?") for n in range(4)]
    columns = {"chosen": "a Yes.", "rejected": "a No."}
    table = {"prompt": prompts} | {name: [messages(turn)] * 4 for name, turn in columns.items()}
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "saved"))
    data = data_config(
        source="parquet", path=str(tmp_path / "saved"), options=WHOLE_FILE, test=1e-9, validation=0
    )
    assert sorted(pair.prompt for pair in load(data, 0).pairs) == [f"Question {n}?" for n in range(4)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt": messages("u Human: a\n\nAssistant: b\n\nHuman: c")}, "cannot be told apart"),
        ({"chosen": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "calls a tool"),
        ({"prompt": "", "chosen": messages("a b")}, "but its roles are: none"),
        (
            {"prompt": messages("u a"), "chosen": [{"role": "human", "content": "b"}]},
            "write one of these roles",
        ),
        ({"chosen": [{"from": "gpt", "value": "b"}]}, "but has no role and no content: write 'from'"),
        ({"chosen": None}, "'chosen' is null, but a list of messages is needed"),
        *(
            ({"chosen": [{"role": "assistant", "content": "b", key: "c"}]}, f"has {key} beside its content")
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        (
            {
                "prompt": "",
                "chosen": messages("u a", "a b", "u c", "a d"),
                "rejected": messages("u a", "a e", "u c", "a d"),
            },
            "'chosen' must be one message of the assistant",
        ),
    ],
)
def test_conversations_that_are_no_pair_are_refused(tmp_path, changed, words):
    row = {"prompt": messages("u Hi?"), "chosen": messages("a Yes."), "rejected": messages("a No.")}
    with pytest.raises(DataError, match=rf"row 1: .*{words}") as caught:
        one_pair(tmp_path, row | changed)
    assert len(str(caught.value).splitlines()) == 1


def test_empty_reasoning_is_none(tmp_path):
    """Tables give each message all keys that one of them has."""
    answers = {
        name: [{"role": "assistant", "content": name, "thinking": None}] for name in ("chosen", "rejected")
    }
    assert one_pair(tmp_path, {"prompt": messages("u Hi?")} | answers) == ("Hi?", "chosen", "rejected")


def test_a_prompt_of_text_is_the_same_with_completions_of_either_form(tmp_path):
    prompt = "Human: a\n\nAssistant: b\n\nHuman: c"
    plain = one_pair(tmp_path, {"prompt": prompt, "chosen": "Yes.", "rejected": "No."})
    answers = {"chosen": messages("a Yes."), "rejected": messages("a No.")}
    assert one_pair(tmp_path, {"prompt": prompt} | answers) == plain


# --- names, columns, csv


def test_a_missing_column_names_the_nearest_and_the_key_that_renames_it(tmp_path):
    words = r"'prompt' is missing; .* did you mean 'promt'\? 'data\.columns={prompt: promt}' renames"
    with pytest.raises(DataError, match=words):
        one_pair(tmp_path, {"promt": "p", "chosen": "c", "rejected": "r"})
    with pytest.raises(
        DataError, match=r"there are: x0, .* x39, and 10 more; 'data\.columns={prompt: \.\.\., "
    ):
        one_pair(tmp_path, {f"x{n}": 1 for n in range(50)})
    row = {"prompt": messages("u a"), "choosen": messages("a b"), "rejected": messages("a c")}
    with pytest.raises(DataError, match=r"'chosen' is missing; .* did you mean 'choosen'\?"):
        one_pair(tmp_path, row)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "data.columns={prompt: q}",
            r"data\.columns is not used with data\.source 'aclsum': it is for .*csv",
        ),
        ("data.drop_invalid=0.1", r"data\.drop_invalid is not used with data\.source 'aclsum'"),
    ],
)
def test_keys_of_files_are_refused_with_other_sources(override, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe("debug", [override])


def test_a_column_that_rows_do_not_have_cannot_be_renamed():
    overrides = ["data.source=csv", "data.path=x.csv", "data.options={}", "data.columns={promt: q}"]
    with pytest.raises(RecipeError, match=r"data\.columns: .*'promt' .* Did you mean 'prompt'\?"):
        load_recipe("debug", overrides)


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_csv_gives_the_pairs_of_jsonl(tmp_path):
    rows = [
        {"prompt": f'Say "{n}",\nplease', "chosen": "c", "rejected": "r,", "client_id": f"{n % 3}"}
        | {"domain": "d", "group": "", "split": "", "margin": n / 2}
        for n in range(20)
    ]
    of_json = load(own(tmp_path / "p.jsonl", rows), 0)
    path = write_csv(tmp_path / "p.csv", [row | {"": n} for n, row in enumerate(rows)])  # pandas' index
    of_csv = load(data_config(source="csv", path=path, options=WHOLE_FILE), 0)
    assert of_csv.pairs == of_json.pairs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt;chosen;rejected\na;b;c\n", "line 1: the separator must be a comma"),
        (
            "prompt,chosen,rejected\n" + ",".join(["\"[{'role': 'user', 'content': 'a'}]\""] * 3),
            "another notation",
        ),
    ],
)
def test_csv_of_another_form_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "p.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"p\.csv.*{words}"):
        load(data_config(source="csv", path=str(path), options=WHOLE_FILE), 0)


# --- invalid rows


GOOD = [{"prompt": f"p{n}", "chosen": "c", "rejected": "r"} for n in range(17)]
BAD = [
    {"prompt": "p", "chosen": " ", "rejected": "r"},
    {"prompt": "p", "chosen": 3, "rejected": "r"},
    {"chosen": "c", "rejected": "r"},
]


def test_invalid_rows_are_dropped_and_counted_up_to_their_share(tmp_path):
    found = load(own(tmp_path / "p.jsonl", GOOD + BAD, drop_invalid=0.15), 0)
    assert found.dropped["invalid row"] == 3
    assert sorted(pair.prompt for pair in found.pairs) == sorted(row["prompt"] for row in GOOD)
    (warning,) = found.warnings
    assert warning.startswith("invalid rows: 3 (left out), the first: ")
    assert warning.endswith("p.jsonl, row 18: column 'chosen' is empty.")


def test_what_is_no_json_or_has_one_name_twice_is_an_error_in_any_case(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join([json.dumps(GOOD[0]), "{"]), encoding="utf-8")
    with pytest.raises(DataError, match="line 2: this is not valid JSON"):
        load(data_config(source="jsonl", path=str(tmp_path / "p.jsonl"), drop_invalid=0.9), 0)
    (tmp_path / "p.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r", "chosen": "d"}\n')
    with pytest.raises(DataError, match=r"line 1: .*an object has the name 'chosen' twice.*; expected one"):
        load(data_config(source="jsonl", path=str(tmp_path / "p.jsonl")), 0)


def test_the_row_of_a_missing_renamed_column_is_named_where_invalid_rows_are_dropped(tmp_path):
    rows = [{"question": f"p{n}", "chosen": "c", "rejected": "r"} for n in range(9)]
    found = load(
        own(tmp_path / "p.jsonl", [*rows, GOOD[0]], drop_invalid=0.1, columns={"prompt": "question"}), 0
    )
    assert found.warnings[0].endswith("row 10: column 'question' is missing.")


def test_empty_texts_are_a_warning_with_their_row_where_none_may_be_dropped(tmp_path):
    found = load(own(tmp_path / "p.jsonl", [*GOOD, BAD[0]]), 0)
    assert found.warnings[0].startswith("invalid rows: 1 (kept, and data.drop_invalid leaves them out)")
    assert found.warnings[0].endswith("row 18: column 'chosen' is empty.")
    assert "invalid row" not in found.dropped


def test_owners_that_a_table_holds_as_floats_are_whole_numbers(tmp_path):
    table = pd.DataFrame([row | {"client_id": n % 3} for n, row in enumerate(GOOD)])
    table.loc[0, "client_id"] = None
    table.to_parquet(tmp_path / "p.parquet")
    data = data_config(source="parquet", path=str(tmp_path / "p.parquet"), options=WHOLE_FILE)
    assert {pair.client_id for pair in load(data, 0).pairs} == {"", "0", "1", "2"}


@pytest.mark.parametrize("column", ["client_id", "group"])
def test_whole_numbers_that_floats_do_not_tell_apart_are_refused_with_their_row(tmp_path, column):
    rows = [row | {column: float(2**53 - 1 - n)} for n, row in enumerate(GOOD)]
    pairs = load(own(tmp_path / "p.jsonl", rows, test=1e-9, validation=0), 0).pairs
    assert len({getattr(pair, column) for pair in pairs}) == len(GOOD)
    words = (
        rf"row 18: column '{column}' is a number above 2\^53 that is stored as a float.*: write ids as text"
    )
    with pytest.raises(DataError, match=words):
        load(own(tmp_path / "p.jsonl", [*rows, GOOD[0] | {column: 2.0**53}]), 0)


SECRET = "My diagnosis"
SECRETS = [
    {"chosen": {"text": SECRET}},
    {"margin": SECRET},
    {"client_id": f"{SECRET} "},
    {"domain": [SECRET]},
    {"split": SECRET},
    {"chosen": [{"role": SECRET, "content": "x"}], "rejected": []},
    {"chosen": [{SECRET: "x"}], "rejected": []},
    {"chosen": [SECRET], "rejected": []},
    {"prompt": SECRET, "chosen": ""},
]


@pytest.mark.parametrize("changed", SECRETS)
def test_neither_a_warning_nor_an_error_quotes_a_row(tmp_path, changed):
    rows = [*GOOD, GOOD[0] | changed]
    warnings = load(own(tmp_path / "p.jsonl", rows, drop_invalid=0.1), 0).warnings
    assert "row 18: column '" in warnings[0]
    assert SECRET not in str(warnings)
    with pytest.raises(DataError, match="row 18: column '") as error:
        load(own(tmp_path / "p.jsonl", rows, drop_invalid=0.01), 0)
    assert SECRET not in str(error.value)


def test_a_warning_on_rows_that_lack_a_column_names_none_that_they_have(tmp_path):
    row = {SECRET: 1, "chosen": "c", "rejected": "r"}
    (warning,) = load(own(tmp_path / "p.jsonl", [*GOOD, row], drop_invalid=0.1), 0).warnings
    assert warning.endswith("row 18: column 'prompt' is missing.")


@pytest.mark.parametrize("content", [f'"{SECRET}"\n', f'["{SECRET}"]', f"{SECRET};x\n"])
def test_an_error_of_a_file_does_not_quote_it(tmp_path, content):
    kind = "csv" if ";" in content else "json"
    path = tmp_path / f"p.{kind}"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=rf"p\.{kind}, ") as error:
        load(data_config(source="csv" if kind == "csv" else "jsonl", path=str(path)), 0)
    assert SECRET not in str(error.value)


def test_a_row_of_another_split_than_its_file_is_named(tmp_path):
    (tmp_path / "pairs").mkdir()
    write_jsonl(tmp_path / "pairs" / "train.jsonl", [*GOOD, GOOD[0] | {"prompt": SECRET, "split": "test"}])
    with pytest.raises(
        DataError, match="row 18: column 'split' is 'test', but the file is of .* train"
    ) as error:
        load(data_config(source="jsonl", path=str(tmp_path / "pairs"), options=WHOLE_FILE), 0)
    assert SECRET not in str(error.value)


def test_white_space_around_an_owner_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 1: column 'client_id' has white space around it: remove"):
        one_pair(tmp_path, GOOD[0] | {"client_id": "a "})
