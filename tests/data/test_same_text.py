"""One prompt that is written in several Unicode forms is one prompt, wherever prompts are compared."""

import unicodedata
from collections import defaultdict

import pytest

from components.data.data_report import read_report
from components.data.prepare import prepare
from components.data.prompts import server_prompts
from components.data.records import Prompt, prompts_frame
from components.data.same_text import same_text
from components.data.sources import load
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
    *[("x² + 1", "x2 + 1"), ("H₂O", "H2O"), ("2½", "21/2")],
    ("\U0001f3f4\U000e0067\U000e0062\U000e007f", "\U0001f3f4\U000e0066\U000e0072\U000e007f"),  # two flags
]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_text_have_one_key(form):
    assert same_text(FORMS[form]) == same_text(QUESTION)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_other_texts_have_others(one, other):
    assert same_text(one) != same_text(other)


def test_hidden_characters_of_ascii_do_not_count():
    assert same_text("ab\0") == same_text("ab")


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


def test_the_server_has_one_form_of_a_prompt():
    prompts = [Prompt(form, [], "test") for form in FORMS.values()]
    assert list(prompts_frame(prompts, "own")["prompt"]) == [QUESTION]


def test_an_owner_in_two_forms_is_one_owner_and_names_that_look_alike_are_named(tmp_path):
    names = {0: "Zoë", 1: unicodedata.normalize("NFD", "Zoë"), 2: "zoë", 3: "Ann\u00a0B"}
    pairs = [row | {"client_id": names[n % 4]} for n, row in enumerate(rows([QUESTION]))]
    path = write_jsonl(tmp_path / "p.jsonl", pairs)
    report = prepare(data_config(source="jsonl", path=path, options=WHOLE_FILE), 0, tmp_path / "data")
    owners = {row["client_id"] for row in prepared_rows(tmp_path / "data", "pairs")}
    assert owners == {"Zoë", "zoë", "Ann\u00a0B"}
    (warning,) = [text for text in report.warnings if "clients that differ only" in text]
    assert ": 2, such as 'Zoë' and 'zoë';" in warning
