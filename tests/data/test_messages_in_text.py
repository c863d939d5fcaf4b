"""A column is one of messages, which a table may hold as JSON text, or it is one of text."""

import json
from collections import Counter

import pandas as pd
import pytest

from components.config import PromptsConfig, RecipeError
from components.data.records import DataError
from components.data.sources import load, load_prompts
from components.evaluation.alpaca_inputs import model_outputs
from components.recipes import load_recipe
from tests.support.sources import WHOLE_FILE, data_config, write_jsonl


def told(*turns):
    """Messages as JSON text; the role is a letter before the text."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return json.dumps([{"role": roles[turn[0]], "content": turn[2:]} for turn in turns])


ROW = {"prompt": told("u Hi?"), "chosen": told("a Yes."), "rejected": told("a No.")}


LINES = "\n".join(json.dumps(message) for message in json.loads(told("s Be kind.", "u Hi?")))
UNREAD = {
    '[{"role": "human", "content": "Hi?"}]': r"'chosen\[0\]' has the role 'human'.* write one of these roles",
    '{"messages": [{"role": "gpt", "content": "Yes."}], "id": 1}': r"'chosen\[0\]' has the role 'gpt'",
    '[{"from": "gpt", "value": "Yes."}]': r"'chosen\[0\]' must be a message.*write 'from' as role",
    '{"conversations": [{"from": "gpt", "value": "Yes."}]}': r"'chosen\[0\]' must be a message",
    str([{"from": "gpt", "value": "Yes."}]): "'chosen' holds messages .*another notation",
    f"[{told('a Yes.')}]": r"'chosen\[0\]' must be a message.* is a list: write one list of messages",
    told("a Yes.").replace('"', r"\""): "'chosen' holds messages .*another notation",
}
"""Completions that are messages, but not as they are read, and what is said."""


def read(tmp_path, rows, kind="jsonl", source=None, **settings):
    path = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    else:
        getattr(pd.DataFrame(rows), f"to_{kind}")(path, index=False)
    options = WHOLE_FILE if source is None else {"align_share": 0, "judge_share": 0}
    whole = {"test": 1e-9, "validation": 0} | settings
    return load(data_config(source=source or kind, path=str(path), options=options, **whole), 0)


def texts(pair):
    return pair.prompt, pair.chosen, pair.rejected


PLAIN = {"prompt": "Plain?", "chosen": "Yes!", "rejected": "No!"}


def rows_of(count, row):
    """Rows like this one, with prompts of their own where these are plain text."""
    return [row | ({"prompt": f"{row['prompt']} {n}"} if row is PLAIN else {}) for n in range(count)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_column_of_messages_in_files_of_every_kind_is_read_so_and_counted(kind, tmp_path):
    found = read(tmp_path, [*rows_of(9, ROW), PLAIN], kind)
    assert Counter(map(texts, found.pairs)) == {("Hi?", "Yes.", "No."): 9, ("Plain?", "Yes!", "No!"): 1}
    (warning,) = found.warnings
    assert "in 9 of 10 rows messages as JSON text were read as messages (columns chosen, prompt," in warning


@pytest.mark.parametrize(("mode", "answer"), [("auto", ROW["chosen"]), ("messages", "Yes.")])
def test_messages_in_a_column_of_text_are_texts_unless_the_recipe_says_otherwise(mode, answer, tmp_path):
    found = read(tmp_path, [*rows_of(8, PLAIN), ROW, ROW], messages=mode)
    assert [pair.chosen for pair in found.pairs if pair.chosen != "Yes!"] == [answer] * 2
    words = "column 'chosen' is read as text, although 2 of its 10 values are messages as JSON text"
    assert any(words in warning for warning in found.warnings) == (mode == "auto")


def test_a_column_of_messages_is_text_where_the_recipe_says_so(tmp_path):
    found = read(tmp_path, [ROW], messages="text")
    assert texts(found.pairs[0]) == (ROW["prompt"], ROW["chosen"], ROW["rejected"])
    assert found.warnings == ()


@pytest.mark.parametrize("kind", [list, json.dumps])
def test_messages_of_the_system_that_become_text_of_the_user_are_counted(kind, tmp_path):
    prompts = [
        [{"role": "system", "content": text}, {"role": "user", "content": "Hi?"}] for text in ("Be kind.", "")
    ]
    answers = {name: kind(json.loads(ROW[name])) for name in ("chosen", "rejected")}
    found = read(tmp_path, [answers | {"prompt": kind(prompt)} for prompt in prompts])
    assert "in 1 of 2 rows the message of the system was put before the user's" in found.warnings[-1]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"prompt": "Hi?"}, ("Hi?", "Yes.", "No.")),
        ({"prompt": told("s Be kind.", "u Hi?")}, ("Be kind.\n\nHi?", "Yes.", "No.")),
        ({"chosen": told("u Hi?", "a Yes."), "rejected": told("u Hi?", "a No.")}, ("Hi?", "Yes.", "No.")),
        ({"prompt": [{"role": "user", "content": "Hi?"}]}, ("Hi?", "Yes.", "No.")),
        ({"chosen": f"\n {told('a Yes.')}"}, ("Hi?", "Yes.", "No.")),
        ({"chosen": '[{"content": "Yes.", "role": "assistant"}]'}, ("Hi?", "Yes.", "No.")),
        ({"chosen": '{"role": "assistant", "content": "Yes."}'}, ("Hi?", "Yes.", "No.")),
        ({"chosen": '[{"id": 1, "role": "assistant", "content": "Yes."}]'}, ("Hi?", "Yes.", "No.")),
        ({"chosen": "\ufeff" + told("a Yes.")}, ("Hi?", "Yes.", "No.")),
        ({"chosen": json.dumps(told("a Yes."))}, ("Hi?", "Yes.", "No.")),
        ({"chosen": json.dumps({"messages": json.loads(told("a Yes."))})}, ("Hi?", "Yes.", "No.")),
        (
            {"chosen": json.dumps({"id": 1, "conversations": json.loads(told("a Yes."))})},
            ("Hi?", "Yes.", "No."),
        ),
        ({"prompt": LINES.replace("\n", ",")}, ("Be kind.\n\nHi?", "Yes.", "No.")),
        ({"prompt": LINES}, ("Be kind.\n\nHi?", "Yes.", "No.")),
        (
            {"prompt": "[]", "chosen": told("u Hi?", "a Yes."), "rejected": told("u Hi?", "a No.")},
            ("Hi?", "Yes.", "No."),
        ),
    ],
    ids=[
        *["plain prompt", "system", "whole conversations", "mixed", "space", "other order", "one message"],
        *["another key", "byte order mark", "encoded twice", "object of messages"],
        *["object of conversations", "objects", "JSON lines", "no messages"],
    ],
)
def test_all_shapes_of_conversations_may_be_text(changed, expected, tmp_path):
    (pair,) = read(tmp_path, [ROW | changed]).pairs
    assert texts(pair) == expected


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt": "[{'role': 'user', 'content': 'Hi?'}]"}, "'prompt' holds messages .*another notation"),
        ({"chosen": "[{'content': 'Hi?', 'role': 'user'}\n {'a': 1}]"}, "'chosen' holds messages"),  # numpy
        ({"rejected": ROW["rejected"][:-1]}, "'rejected' holds messages .*another notation"),
        (
            {"prompt": [{"role": "user", "content": "Hi?"}], "chosen": "Yes.", "rejected": "No."},
            "'chosen' is text, but",
        ),
        ({"chosen": told("a Yes.", "u Why?")}, "must be one message of the assistant"),
        ({"rejected": ROW["rejected"][:-5]}, "'rejected' holds messages .*another notation"),
        *[({"chosen": text}, words) for text, words in UNREAD.items()],
        ({"prompt": '[{"role": "User", "content": "Hi?"}]'}, "prompt.0.' has the role 'User'"),
    ],
    ids=[
        *["Python", "numpy", "cut off", "plain answers", "a turn of the user last", "cut off in a text"],
        *[
            "human",
            "gpt",
            "from and value",
            "from and value in an object",
            "from and value by Python",
            "nested",
        ],
        *["escaped", "capitals"],
    ],
)
def test_what_is_no_conversation_is_refused(changed, words, tmp_path):
    with pytest.raises(DataError, match=rf"p\.jsonl, row 1: .*{words}"):
        read(tmp_path, [ROW | changed])
    kept = read(tmp_path, [*rows_of(9, ROW), ROW | changed], drop_invalid=0.5)
    assert len(kept.pairs) == 9
    assert kept.dropped == {"invalid row": 1}


@pytest.mark.parametrize("text", ['[{"id": 1}]', '{"role": "admin"}', "[1, 2]", "[{role: user}]"])
def test_other_texts_with_brackets_are_answers(text, tmp_path):
    (pair,) = read(tmp_path, [{"prompt": "JSON?", "chosen": text, "rejected": "No."}]).pairs
    assert pair.chosen == text


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'x'}] Write a function that sorts such lists.",
        '{"role": "admin", "content": "abc"}\nExplain this JSON.',
        told("u Hi?") + ' Return {"a": 1}',
        '{"role": "admin", "content": "abc"}',
        '"Why?" she asked.',
    ],
)
def test_a_question_about_json_is_text(text, tmp_path):
    found = read(tmp_path, [{"prompt": text, "chosen": "Yes.", "rejected": "No."}])
    assert texts(found.pairs[0]) == (text, "Yes.", "No.")
    assert found.warnings == ()


OBJECT = '{"role": "assistant", "content": "hi"}'


@pytest.mark.parametrize("answer", [OBJECT, "[{'role': 'user', 'content': 'hi'}]", told("a hi")])
@pytest.mark.parametrize("other", ["No.", None])
def test_an_answer_that_is_json_is_text_in_a_column_of_text(answer, other, tmp_path):
    asked = {"prompt": "As JSON?", "chosen": answer, "rejected": other or answer.replace("hi", "bye")}
    found = read(tmp_path, [*rows_of(9, PLAIN), asked])
    assert texts(found.pairs[-1]) == tuple(asked.values())


def test_objects_of_messages_beside_no_list_are_answers_and_named_where_all_are(tmp_path):
    rows = [
        {"prompt": f"Write {n}.", "chosen": OBJECT, "rejected": OBJECT.replace("hi", "bye")} for n in range(4)
    ]
    found = read(tmp_path, rows)
    assert found.pairs[0].chosen == OBJECT
    assert ["4 of its 4 values are messages" in warning for warning in found.warnings] == [True, True]
    assert read(tmp_path, rows[:1]).warnings == ()


@pytest.mark.parametrize("source", [None, "py-dpo"])
def test_one_completion_alone_that_is_a_column_of_messages_is_refused(source, tmp_path):
    rows = [{**ROW, "prompt": f"{n}?", "rejected": "No."} for n in range(3)]
    words = "'chosen' holds messages as text in 3 of 3 rows, but column 'rejected' does not: .* data.messages"
    with pytest.raises(DataError, match=words):
        read(tmp_path, rows, source=source)
    assert read(tmp_path, rows, source=source, messages="text").pairs[0].chosen == ROW["chosen"]


@pytest.mark.parametrize(
    "text", ['{"role": "assistant", "content": "hi"}', "[{'role': 'user', 'content': 'x'}]"]
)
def test_what_a_policy_writes_is_its_output(text):
    (output,) = model_outputs(["q"], [text], "policy", "own")
    assert output.output == text


@pytest.mark.parametrize("source", ["py-dpo", "ultrafeedback"])
def test_sources_of_the_hub_read_them_too(source, tmp_path):
    answers = {"chosen": told("u Hi?", "a Yes."), "rejected": told("u Hi?", "a No.")}
    (pair,) = read(tmp_path, [{"prompt": "Hi?", **answers}], source=source, partition="iid", clients=1).pairs
    assert texts(pair) == ("Hi?", "Yes.", "No.")


def test_sources_of_text_read_what_looks_like_messages_as_text(tmp_path):
    row = {"lang": "C", "vulnerability": "v", "system": "", "chosen": "a", "rejected": OBJECT}
    row["question"] = told("u Hi?")
    (pair,) = read(tmp_path, [row], source="code-vulnerability", partition="iid", clients=1).pairs
    assert (pair.prompt, pair.rejected) == (row["question"], OBJECT)
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": told("u Hi?")}])
    loaded = load_prompts(PromptsConfig(source="safe-rlhf", path=path), "data.test_prompts", 0)
    assert loaded.prompts == [(told("u Hi?"), [])]


def test_how_messages_are_read_is_refused_with_sources_that_have_none():
    with pytest.raises(RecipeError, match=r"data\.messages is not used with data\.source 'aclsum'.*jsonl"):
        load_recipe("debug", ["data.messages=text"])


@pytest.mark.parametrize(
    "texts",
    [
        ('[{"from": "coal", "to": "power", "value": 1}]', '[{"from": "gas", "to": "heat", "value": 2}]'),
        ("[{'from': 'coal', 'to': 'power', 'value': 1}]", "[{'from': 'gas', 'to': 'heat', 'value': 2}]"),
    ],
)
def test_lists_of_other_objects_are_text_without_a_word(tmp_path, texts):
    chosen, rejected = texts
    rows = [{"prompt": f"Flow {n}?", "chosen": f"{chosen}", "rejected": rejected} for n in range(20)]
    found = read(tmp_path, rows)
    assert found.warnings == ()
    assert {pair.chosen for pair in found.pairs} <= {chosen}


def test_one_decision_holds_for_all_splits_of_a_folder(tmp_path):
    def rows(name, count, plain):
        told = [json.dumps([{"role": "assistant", "content": f"{name} {n}"}]) for n in range(count)]
        texts = [*told, *(f"plain {n}" for n in range(plain))]
        return [
            {"prompt": f"{name} {n}?", "chosen": text, "rejected": text[::-1]} for n, text in enumerate(texts)
        ]

    folder = tmp_path / "folder"
    folder.mkdir()
    for name, count, plain in (("train", 40, 0), ("test", 7, 1)):
        made = rows(name, count, plain)
        for row in made:
            row["rejected"] = row["chosen"].replace(name, "other")
        write_jsonl(folder / f"{name}.jsonl", made)
    found = load(data_config(source="jsonl", path=str(folder), options=WHOLE_FILE), 0)
    assert not any("role" in pair.chosen for pair in found.pairs)
    assert {pair.split for pair in found.pairs} >= {"train", "test"}
