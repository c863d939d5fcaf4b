"""Pairs without a column of prompts, whose prompt is what chosen and rejected begin with."""

import json
from pathlib import Path

import pytest

from components.data.common_prompt import split_common_prompt
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.sources import load
from components.recipes import load_recipe
from components.recipes.data_preview import describe_data, preview_data
from tests.support.sources import WHOLE, WHOLE_FILE, data_config, read_jsonl, write_jsonl

HH = Path(__file__).resolve().parents[1] / "conformance" / "sources" / "hh-rlhf" / "rows"


def read(path, rows, **settings):
    whole = {"test": 1e-9, "validation": 0, "options": WHOLE_FILE} | settings
    return load(data_config(source="jsonl", path=write_jsonl(path, rows), **whole), 0)


def texts(found):
    return sorted((pair.prompt, pair.chosen, pair.rejected) for pair in found.pairs)


def test_rows_of_hh_rlhf_give_the_pairs_of_its_source(tmp_path):
    rows = read_jsonl(HH / "train.jsonl")
    own = read(tmp_path / "p.jsonl", rows)
    source = load(data_config(source="hh-rlhf", path=str(HH / "train.jsonl"), options=WHOLE), 0)
    assert texts(own) == texts(source)
    (warning,) = own.warnings
    assert warning.endswith(
        "p.jsonl: the prompt of 3 pairs is the common beginning of chosen and rejected, since they have none"
        " of their own."
    )


HARMLESS = {
    "prose": ("What is 2 + 2?", " It is four.", " Four, it seems."),
    "a part of a word": ("The sky is", " blue.", " blueish."),
    "one text begins the other": ("Q: Sure?\nA:", " yes", " yes indeed"),
    "other white space": ("What colour?", " Blue", "\nGreen"),
    "an empty line": ("Why?", "\n\nSo.", "\n\nNo."),
    "indented code": ("def f(x):\n    if x:\n        return x", " + 1\n", " - 1\n"),
    "mathematics": ("Let $f(x) = x^2$. Then $f'(x) =", " 2x$", " 2$"),
    "a number": ("The value of pi is", " 3.141", " 3.142"),
    "no white space": ("2+2=", "4", "5"),
    "html": ("<p>Why?</p><p>", "So</p>", "No</p>"),
    "html with attributes": ('<a href="x">Why?</a>\n<b', ' class="y">So</b>', ' id="z">No</b>'),
    "json": ('{"question": "Why?", "answer":', ' "so"}', ' "no"}'),
    "chinese": ("天空是什么颜色？答：", "蓝色。", "绿色。"),
    "japanese marks": ("空は何色？", "か\u3099", "か"),
    "thai": ("ท้องฟ้าสีอะไร? สี", "ฟ้า", "เขียว"),
    "arabic": ("ما لون السماء؟", " أزرق", " أخضر"),
    "hindi": ("आकाश का रंग क्या है?", " नीला", " नीली"),
    "korean": ("하늘은 무슨 색?", " 파란색", " 초록색"),
    "shades of a sign": ("ok?", "👍🏽", "👍🏿"),
    "a family": ("who?", "👩\u200d👧", "👩\u200d👦"),
    "flags": ("where?", "🇩🇪", "🇩🇰"),
    "a struck sign": ("so?", "=\u0338", "="),
    "a quoted marker": ('Who says "Assistant: yes"?', " Nobody.", " Somebody."),
    "a biology book": ("Human: 46 chromosomes. Chimpanzee:", " 48.", " 46."),
}


@pytest.mark.parametrize("expected", HARMLESS.values(), ids=HARMLESS)
def test_prompt_and_completion_together_are_the_text(expected):
    prompt, chosen, rejected = expected
    assert split_common_prompt(prompt + chosen, prompt + rejected) == expected


DIALOGUES = {
    "lines of another system": (
        "Be kind.\r\n\r\nHuman: Hi?\r\n\r\nAssistant: I am{}",
        "Be kind.\r\n\r\nHuman: Hi?",
        ("I am a", "I am b"),
    ),
    "an answer's common words are its own": (
        "\n\nHuman: Hi?\n\nAssistant: I am{}",
        "Human: Hi?",
        ("I am a", "I am b"),
    ),
    "of lines": ("Human: Hi?\nAssistant: I am{}", "Human: Hi?", ("I am a", "I am b")),
    "after instructions": ("Be kind.\n\nHuman: Hi?\n\nAssistant:{}", "Be kind.\n\nHuman: Hi?", ("a", "b")),
    "an answer in paragraphs": (
        "Human: Hi?\n\nAssistant: So:\n\nit is{}",
        "Human: Hi?",
        ("So:\n\nit is a", "So:\n\nit is b"),
    ),
}


@pytest.mark.parametrize(("text", "prompt", "answers"), DIALOGUES.values(), ids=DIALOGUES)
def test_the_prompt_of_dialogues_ends_before_the_last_turn(text, prompt, answers):
    assert split_common_prompt(text.format(" a"), text.format(" b")) == (prompt, *answers)


TALK = "Human: a\n\nAssistant: "
NO_BEGINNING = (
    "column 'prompt' is missing, and chosen and rejected have no common beginning.*; there are: chosen"
)
NOTHING_AFTER = "chosen or rejected has nothing after their common beginning.* leave them out"
OTHER_TURN = "differ before the assistant's last turn: .* leave them out"
NAMES_OF_PROMPTS = ("question", "Instruction", "input", "query", "prompt_text", "user_prompt")
REFUSED = {
    ("yes", "no"): NO_BEGINNING,
    ("Sure", "Surely"): NO_BEGINNING,
    (" a", " b"): NO_BEGINNING,
    ("Why? ", "Why? So."): NOTHING_AFTER,
    (TALK, f"{TALK}b"): NOTHING_AFTER,
    (f"{TALK}b\n\nHuman: c\n\nAssistant: d", f"{TALK}e"): OTHER_TURN,
    (f"{TALK}b", "Human: c\n\nAssistant: d"): OTHER_TURN,
}


@pytest.mark.parametrize(("pair", "words"), REFUSED.items())
def test_a_row_that_cannot_be_divided_is_refused_or_dropped_and_counted(pair, words, tmp_path):
    good = [{"chosen": f"Say {n}? Yes.", "rejected": f"Say {n}? No."} for n in range(9)]
    rows = [*good, dict(zip(("chosen", "rejected"), pair, strict=True))]
    with pytest.raises(DataError, match=f"row 10: .*{words}") as error:
        read(tmp_path / "p.jsonl", rows)
    assert len(str(error.value).splitlines()) == 1
    found = read(tmp_path / "p.jsonl", rows, drop_invalid=0.1)
    assert len(found.pairs) == 9
    assert found.dropped["invalid row"] == 1
    assert "invalid rows: 1 (left out), the first: " in found.warnings[-1]
    assert "row 10: " in found.warnings[-1]


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"promt": "p"}, {}, r"'prompt' is missing; .* did you mean 'promt'\?"),
        ({"Prompt": "p"}, {}, "'prompt' is missing; there are: Prompt"),
        *(({name: "p"}, {}, "'prompt' is missing; there are: .*renames") for name in NAMES_OF_PROMPTS),
        ({}, {"columns": {"prompt": "question"}}, "column 'question' is missing"),
    ],
)
def test_a_misspelt_column_of_prompts_is_an_error(row, settings, words, tmp_path):
    rows = [row | {"chosen": "Say it? Yes.", "rejected": "Say it? No."}]
    with pytest.raises(DataError, match=words):
        read(tmp_path / "p.jsonl", rows, **settings)


def test_one_row_with_a_prompt_makes_a_row_without_one_an_error(tmp_path):
    rows = [
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"chosen": "Say it? Yes.", "rejected": "Say it? No."},
    ]
    with pytest.raises(DataError, match=r"row 2: column 'prompt' is missing; there are"):
        read(tmp_path / "p.jsonl", rows)


def test_one_decision_holds_for_all_splits_of_a_folder(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"chosen": "Say it? Yes.", "rejected": "Say it? No."}])
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "r"}])
    with pytest.raises(DataError, match=r"train.jsonl, row 1: column 'prompt' is missing; there are"):
        load(data_config(source="jsonl", path=str(tmp_path), options=WHOLE_FILE), 0)


@pytest.mark.parametrize("column", ["prompt_id", "source"])
def test_other_columns_may_be_in_the_file_and_completions_may_be_renamed(column, tmp_path):
    row = {column: "7", "better": "Say it? Yes.", "rejected": "Say it? No.", "client_id": "ada"}
    found = read(tmp_path / "p.jsonl", [row], columns={"chosen": "better"})
    assert texts(found) == [("Say it?", " Yes.", " No.")]


def test_a_completion_that_is_no_text_is_named(tmp_path):
    with pytest.raises(DataError, match="row 1: column 'chosen' is null, but text is needed"):
        read(tmp_path / "p.jsonl", [{"chosen": None, "rejected": "Say it? No."}])


@pytest.mark.parametrize("write", [list, json.dumps])
@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": []}])
def test_lists_of_messages_without_a_prompt_are_counted(write, prompt, tmp_path):
    asked = {"role": "user", "content": "Hi?"}
    answers = {
        name: write([asked, {"role": "assistant", "content": name}]) for name in ("chosen", "rejected")
    }
    found = read(tmp_path / "p.jsonl", [prompt | answers])
    assert texts(found) == [("Hi?", "chosen", "rejected")]
    assert any("the prompt of 1 pairs is the common beginning" in warning for warning in found.warnings)


@pytest.mark.parametrize("prompt", ["Hi?", [{"role": "user", "content": "Hi?"}]])
def test_messages_with_a_prompt_are_not_counted(prompt, tmp_path):
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    assert read(tmp_path / "p.jsonl", [{"prompt": prompt} | answers]).warnings == ()


def test_check_and_the_report_of_the_preparation_say_how_many_there_are(tmp_path):
    rows = [
        {"chosen": f"Say {n}? Yes, {n}.", "rejected": f"Say {n}? No.", "client_id": f"o{n % 8}"}
        for n in range(80)
    ]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    sentence = "the prompt of 80 pairs is the common beginning of chosen and rejected"
    recipe = load_recipe(
        "debug", ["data.source=jsonl", f"data.path={path}", "data.options={}", "data.clients=null"]
    )
    assert sentence in describe_data(preview_data(recipe))
    report = prepare(recipe.data, 0, tmp_path / "prepared", docs=False)
    assert any(sentence in warning for warning in report.warnings)
