"""Messages that a table holds as JSON text are read as messages where messages are, or refused."""

import json

import pandas as pd
import pytest

from components.config import PromptsConfig
from components.data.records import DataError
from components.data.sources import load, load_prompts
from components.evaluation.alpaca_inputs import model_outputs
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


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_files_of_every_kind_are_read_so_and_the_rows_are_counted(kind, tmp_path):
    found = read(tmp_path, [ROW, {"prompt": "Plain?", "chosen": "Yes!", "rejected": "No!"}], kind)
    assert sorted(map(texts, found.pairs)) == [("Hi?", "Yes.", "No."), ("Plain?", "Yes!", "No!")]
    assert found.warnings == ("rows whose messages are JSON text: 1; they were read as messages.",)


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
        ({"chosen": "Yes.", "rejected": "No."}, "'chosen' is text, but another column is a list"),
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
    kept = read(tmp_path, [ROW, ROW, ROW | changed], drop_invalid=0.5)
    assert len(kept.pairs) == 2
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


@pytest.mark.parametrize(
    "answer", ['{"role": "user", "content": "hi"}', "[{'role': 'user', 'content': 'hi'}]"]
)
def test_an_answer_that_is_json_is_text_where_the_other_is_none(answer, tmp_path):
    rows = [{"prompt": "As JSON?", "chosen": answer, "rejected": "No."}, {**ROW, "prompt": "Hi?"}]
    found = read(tmp_path, rows)
    assert texts(found.pairs[0]) == ("As JSON?", answer, "No.")
    assert found.warnings[1:] == (
        "rows of which one completion alone is messages as text: 1; it was read as an answer that is JSON.",
    )


@pytest.mark.parametrize("source", [None, "py-dpo"])
def test_messages_in_all_rows_of_one_completion_are_refused(source, tmp_path):
    rows = [{**ROW, "prompt": f"{n}?", "rejected": "No."} for n in range(3)]
    with pytest.raises(
        DataError, match="'chosen' holds messages as text in each of the 3 rows, but .*'rejected'"
    ):
        read(tmp_path, rows, source=source)


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


def test_sources_of_text_refuse_them(tmp_path):
    row = {
        "lang": "C",
        "vulnerability": "v",
        "system": "",
        "question": told("u Hi?"),
        "chosen": "a",
        "rejected": "b",
    }
    with pytest.raises(
        DataError, match="'question' holds messages as JSON text, but plain text is read here"
    ):
        read(tmp_path, [row], source="code-vulnerability", partition="iid", clients=1)
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": told("u Hi?")}])
    with pytest.raises(DataError, match="data.test_prompts: .*'prompt' holds messages as JSON text"):
        load_prompts(PromptsConfig(source="safe-rlhf", path=path), "data.test_prompts", 0)
