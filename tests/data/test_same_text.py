"""One prompt that is written in several Unicode forms is one prompt, wherever prompts are compared."""

import unicodedata
from collections import defaultdict

import pytest

from components.data.data_report import read_report
from components.data.prepare import prepare
from components.data.prompts import server_prompts
from components.data.questions import read_questions
from components.data.records import Pair, Prompt, unique_prompts
from components.data.same_text import same_text
from components.data.sources import load
from components.data.splits import Shares, hold_out, in_splits
from components.versions import SAME_TEXT
from tests.support.sources import WHOLE_FILE, data_config, prepared_rows, write_jsonl

QUESTION = "Où est le café n° {n} de Zoë, \ud55c\uad6d (Straße ﬁx \u30ab\u30e9) \u2764 ?"
FORMS = {
    "composed": QUESTION,
    "decomposed": unicodedata.normalize("NFD", QUESTION),  # also the syllables of Korean
    "no-break space": QUESTION.replace(" ", "\u00a0"),
    "full width": QUESTION.replace("?", "\uff1f").replace("(", "\uff08"),
    "half-width kana": QUESTION.replace("\u30ab\u30e9", "\uff76\uff97"),
    "ligature": QUESTION.replace("ﬁ", "fi"),
    "full case folding": QUESTION.replace("ß", "SS"),
    "zero-width space": QUESTION.replace("est", "e\u200bst"),
    "soft hyphen": QUESTION.replace("café", "ca\u00adfé"),
    "byte order mark": "\ufeff" + QUESTION,
    "colored symbol": QUESTION.replace("\u2764", "\u2764\ufe0f"),
    "variant of a character": QUESTION.replace("\u2764", "\u2764\U000e0100"),
    "null character": QUESTION + "\0",
}
OTHERS = [
    *[("café", "cafe"), ("a b", "ab"), ("5 m", "5 n"), ("क्ष", "कष")],
    *[("x² + 1", "x2 + 1"), ("H₂O", "H2O"), ("2½", "21/2"), ("①", "1"), ("Ⓐ", "A")],
    ("\U0001f3f4\U000e0067\U000e0062\U000e007f", "\U0001f3f4\U000e0066\U000e0072\U000e007f"),  # two flags
]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_text_have_one_key(form):
    assert same_text(FORMS[form]) == same_text(QUESTION)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_other_texts_have_others(one, other):
    assert same_text(one) != same_text(other)


@pytest.mark.parametrize("end", ["", "é"])
def test_hidden_characters_count_in_no_text(end):
    assert same_text(f"a\x07b\0{end}") == same_text(f"ab{end}")


def test_a_key_is_computed_once_for_a_text():
    same_text.cache_clear()
    pairs = [Pair(f"Où {n} ?", "Là.", "Non.") for n in range(5)] * 2
    hold_out(in_splits({"train": pairs}, data_config(), 0)[0], "own", Shares(0.0, 0.0), 0, {})
    assert same_text.cache_info().misses == 5


CODE = "x = 0\nfor i in range(3):\n    x += 1\n    print(x)"
PROMPTS = {CODE: "1 2 3", CODE.replace("    print", "print"): "3", "Is it Aa?": "No.", "Is it AA?": "Yes."}


def test_prompts_of_one_split_stay_prompts_of_their_own_with_their_own_answers(tmp_path):
    texts = {f"{text} ({n})": answer for n in range(4) for text, answer in PROMPTS.items()}
    data = [
        {
            "prompt": text,
            "chosen": answer,
            "rejected": "?",
            "client_id": "ab"[n % 2],
            "split": ("train", "test")[n // 4 % 2],
        }
        for n, (text, answer) in enumerate(texts.items())
    ]
    spelled = {**data[4], "prompt": data[4]["prompt"] + "\n", "chosen": "another"}
    path = write_jsonl(tmp_path / "p.jsonl", [*data, spelled])
    found = load(data_config(source="jsonl", path=path, options=WHOLE_FILE), 0)
    expected = {row["prompt"]: [row["chosen"]] for row in data if row["split"] == "test"}
    expected[data[4]["prompt"]].append("another")
    assert {row.prompt: row.references for row in found.prompts} == expected
    assert found.dropped == {"prompt of the server in another spelling, which is merged": 1}


def test_questions_that_differ_in_indentation_are_both_asked():
    rows = [
        {"id": str(n), "context": text, "options": ["1", "2"], "answer": "A"}
        for n, text in enumerate([*PROMPTS, f" {CODE}\n"])
    ]
    questions, dropped = read_questions("chitchat", rows, "here")
    assert [question.id for question in questions] == ["0", "1", "2", "3"]
    assert dropped == {"question that came before": 1}


def test_spellings_of_a_group_are_one_group(tmp_path):
    names = ["file {n}", "\ufb01le {n}", "FILE {n}"]
    data = [
        row | {"group": names[k % 3].format(n=k % 20), "prompt": f"Question {k}?"}
        for k, row in enumerate(rows([QUESTION]))
    ]
    path = write_jsonl(tmp_path / "p.jsonl", data)
    prepare(data_config(source="jsonl", path=path, options=WHOLE_FILE, test=0.4), 0, tmp_path / "data")
    splits = defaultdict(set)
    for row in prepared_rows(tmp_path / "data", "pairs"):
        number = int(row["prompt"].split()[1][:-1])
        splits[number % 20].add(row["split"])
    assert len(splits) == 20
    assert all(len(own) == 1 for own in splits.values())


def rows(forms, count=60):
    """Pairs of `count` questions in each of these forms, of 12 owners, each form of another one."""
    return [
        {
            "prompt": form.format(n=n),
            "chosen": f"Merci, voyons {n} {k}.",
            "rejected": f"Non, {n} {k}{' ?' * (n % 3)}",
            "client_id": f"agent-{(n + k) % 12}",
        }
        for n in range(count)
        for k, form in enumerate(forms)
    ]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "composed"])
def test_forms_of_a_prompt_are_in_one_split_and_not_among_the_servers(form, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", rows([QUESTION, FORMS[form]]))
    prepare(data_config(source="jsonl", path=path), 0, tmp_path / "data")
    splits = defaultdict(set)
    for name in ("pairs", "judge", "prompts"):
        for row in prepared_rows(tmp_path / "data", name):
            splits[same_text(row["prompt"])].add(row["split"])
    assert {"train", "test", "align"} <= set.union(*splits.values())
    assert all(len(own) == 1 for own in splits.values())
    assert read_report(tmp_path / "data").same_text == SAME_TEXT


def test_two_sources_of_a_mixture_hold_out_the_same_prompts(tmp_path):
    parts = [
        {"source": "jsonl", "name": name, "path": write_jsonl(tmp_path / f"{name}.jsonl", rows([form]))}
        for name, form in (("one", QUESTION), ("two", FORMS["decomposed"]))
    ]
    data = load(data_config(source="mixture", partition="natural", options={"sources": parts}), 0)
    splits = defaultdict(set)
    for row in (*data.pairs, *data.judge, *data.prompts):
        splits[same_text(row.prompt)].add(row.split)
    assert all(len(own) == 1 for own in splits.values())


def test_other_prompts_for_the_server_leave_out_every_form_of_a_trained_one(tmp_path):
    texts = [FORMS["full width"].format(n=n) for n in range(4)]
    path = write_jsonl(tmp_path / "own.json", [{"instruction": text, "output": "Voilà."} for text in texts])
    section = {"source": "alpaca_eval", "path": path}
    data = data_config(source="jsonl", path="pairs.jsonl", test_prompts=section)
    known = [(QUESTION.format(n=n), "train") for n in range(3)]
    frame, summaries = server_prompts(data, [], known, 0)
    assert list(frame["prompt"]) == texts[3:]
    assert sum(summaries["test"].left_out.values()) == 3


def test_the_server_has_one_form_of_a_prompt_with_the_answers_to_all():
    forms = [QUESTION, FORMS["decomposed"], f"{QUESTION}\n", QUESTION]
    prompts = [Prompt(form, [str(n)], "test") for n, form in enumerate(forms)]
    assert unique_prompts(prompts) == ([Prompt(QUESTION, ["0", "1", "2"], "test")], 2)


def test_an_owner_in_two_forms_is_one_owner_and_names_that_look_alike_are_named(tmp_path):
    names = {0: "Zoë", 1: unicodedata.normalize("NFD", "Zoë"), 2: "zoë", 3: "Ann\u00a0B"}
    pairs = [row | {"client_id": names[n % 4]} for n, row in enumerate(rows([QUESTION]))]
    path = write_jsonl(tmp_path / "p.jsonl", pairs)
    report = prepare(data_config(source="jsonl", path=path, options=WHOLE_FILE), 0, tmp_path / "data")
    owners = {row["client_id"] for row in prepared_rows(tmp_path / "data", "pairs")}
    assert owners == {"Zoë", "zoë", "Ann\u00a0B"}
    (warning,) = [text for text in report.warnings if "clients that differ only" in text]
    assert "differ only in case, white space or code points: 2; each" in warning
