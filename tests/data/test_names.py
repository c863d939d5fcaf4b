"""Names that nobody can tell apart are refused; names of any script are taken as they are."""

import json
from unicodedata import normalize

import pytest

from components.config import RecipeError, UserError
from components.config.benchmark import Benchmark
from components.config.section import check_section
from components.data.questions import read_questions
from components.data.records import DataError
from components.data.sources.own_files import JsonlFile
from components.recipes import load_recipe
from tests.support.sources import data_config

HIDDEN = {
    "zero-width space": ("\u200b", r"U\+200B \(zero width space\)"),
    "bidi override": ("\u202e", r"U\+202E \(right-to-left override\)"),
    "bidi isolate": ("\u2066", r"U\+2066 \(left-to-right isolate\)"),
    "soft hyphen": ("\u00ad", r"U\+00AD \(soft hyphen\)"),
    "escape": ("\x1b", r"U\+001B \(a control character\)"),
    "null": ("\0", r"U\+0000 \(a control character\)"),
    "filler": ("\u3164", r"U\+3164 \(hangul filler\)"),
    "line separator": ("\u2028", r"U\+2028 \(line separator\)"),
}
ORDINARY = [
    "ada@example.org",
    "O'Brien",
    "$\\bad{$",
    'a/b: 50% "x" <b> & co.',
    "x" * 300,
    "Łódź",
    "Ольга",
    "李小龍",
    "محمد",
    "می\u200cخواهم",
    "क्\u200dष",
    "ไทย",
    "👩\u200d⚕️",
    "e\u0301",
]


def pairs(folder, **columns):
    rows = [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no", "team": "one"} for n in range(3)]
    rows[1] |= columns
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("column", ["client_id", "domain", "group", "team"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_name_in_data_with_a_character_that_nobody_sees_is_refused_with_its_row(column, kind, tmp_path):
    character, shown = HIDDEN[kind]
    words = rf"pairs.jsonl, row 2: column '{column}' holds {shown} at position 2, which nobody sees: remove"
    with pytest.raises(DataError, match=words) as error:
        own_pairs(pairs(tmp_path, **{column: f"ab{character}c"}), "team")
    assert str(error.value).isprintable()


def own_pairs(path, column=None):
    partition = "natural" if column is None else "column"
    data = data_config(source="jsonl", path=str(path), partition=partition, column=column)
    return JsonlFile().read(data)[""].pairs


def test_a_name_in_data_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"row 2: column 'client_id' holds U\+000A .* at position 1"):
        own_pairs(pairs(tmp_path, client_id="a\nb"))


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names_are_taken_in_their_composed_form(name, tmp_path):
    pair = own_pairs(pairs(tmp_path, client_id=name, domain=name, group=name, team=name), "team")[1]
    assert (pair.client_id, pair.domain, pair.group, pair.column) == (normalize("NFC", name),) * 4


def test_a_group_may_be_a_text_of_many_lines(tmp_path):
    text = "A question.\n\n\tIt is long. " * 500
    assert own_pairs(pairs(tmp_path, group=text))[1].group == text


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_client_in_a_recipe_with_such_a_character_is_refused(kind, tmp_path):
    character, shown = HIDDEN[kind]
    clients = json.dumps({f"a{character}b": ["x"]})
    overrides = ["data.partition=column", "data.column=domain", f"data.column_clients={clients}"]
    with pytest.raises(RecipeError, match=f"{shown} at position 1, which nobody sees") as error:
        load_recipe("debug", overrides)
    assert str(error.value).isprintable()


def test_names_of_recipes_and_arms_are_short_enough_for_folders():
    with pytest.raises(RecipeError, match="'name' is 'xxx.*at most 150"):
        load_recipe("debug", [f"name={'x' * 5000}"])
    values = {"recipe": "debug", "seeds": [0]}
    with pytest.raises(RecipeError, match=r"Arm 'xxx.*use a shorter name \(at most 100 bytes\)"):
        check_section(Benchmark, values | {"arms": {"x" * 5000: []}}, "here")
    with pytest.raises(RecipeError, match=r"Arm 'aU\+200Bb': use letters, digits"):
        check_section(Benchmark, values | {"arms": {"a\u200bb": []}}, "here")
    assert check_section(Benchmark, values | {"arms": {"Ольга-1": []}}, "here").arms


def test_a_message_shows_what_nobody_sees():
    shown = str(UserError("a\u202eb\x1b[31m\ud800\u2028c\nd\té"))
    assert shown == "aU+202EbU+001B[31mU+D800U+2028c\ndU+0009é"
    assert str(UserError("a\u034fb")) == "aU+034Fb"


def test_names_in_data_and_unknown_names_are_shown_on_one_line(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"a\nb": 1} | {"x" * 500: 2} | {f"c{n}": n for n in range(60)}))
    with pytest.raises(DataError, match=r"missing; there are: 'a\\nb', x{60}, c0, .*, and 22 more"):
        own_pairs(path)
    with pytest.raises(DataError, match=r"column 'stem' is missing; there are: '\\n'$"):
        read_questions("csqa", [{"id": "1", "question": {"\n": None}, "answerKey": "A"}], "here")
    with pytest.raises(RecipeError, match=r"^recipe 'a\\n' is not known"):
        load_recipe("a\n")
