"""Rows that are harmless are neither refused nor changed, merged or warned of, whatever the model's family.

2,000 rows of ten sorts, with small tokenizers of seven families.
"""

import random

import pytest
from tokenizers import AddedToken

from components.models.policy import PolicyTexts
from components.recipes import load_recipe
from components.recipes.data_preview import preview_data
from tasks import data as tasks
from tests.support.chat_templates import Family, build_chat_tokenizer, family
from tests.support.sources import prepared_rows, write_jsonl
from tests.support.tokenizers import load_family, write_backbone

ROWS = 200
"""Of each sort."""
NAMES = ("Ana", "Bo", "Chi", "Dara", "Efe", "Fen", "Gül", "Hoa")


def code(n, draw):
    indent = " " * (4 * (n % 3))
    name = f"f{n // 3}"
    body = f"{indent}def {name}(x):\n{indent}    return x[{n % 3}] + '{{role}}'\n{indent}print({name}('abc'))"
    prompt = f"What does this print?\n\n{body}"
    return prompt, f"```python\n>>> {name}('abc')\n'{'abc'[n % 3]}{{role}}'\n```", f"It prints {n} <module>."


def mathematics(n, draw):
    base, raised = n // 2 + 2, ("\u00b2", "2")[n % 2]
    prompt = f"What is {base}{raised}, if x\u2081 < {n} and \u2211 a\u1d62 \u2265 1\u00bd?"
    value = base**2 if raised == "\u00b2" else base * 10 + 2
    return prompt, f"$ {base}^{{2}} = {value} $ [{n}]", f"\u2460 It is {value + 1}!"


def html(n, draw):
    prompt = f"Mend: <table id={n}><tr><td>{n}</td></tr><pre>  x </pre><user>{n}</user>"
    return prompt, f"<p>{n}</p><s>old</s> <em>new {n}</em> &lt;br&gt;", f"<html lang='de'>{n}</html>"


def chemistry(n, draw):
    formula = (f"C{n}H\u2082O", f"C{n}H2O", f"AaBb{n}", f"aabb{n}")[n % 4]
    return f"What is {formula}?", f"{formula} \u2192 {n} mol\u207b\u00b9", f"[{formula}]\u207a of {n}"


def tables(n, draw):
    rows = "\n".join(f"| {draw.randint(0, 99)} |\t{name} |" for name in NAMES[:3])
    return f"Sum up, {n}:\n| n | name |\n|---|---|\n{rows}", f"a,b;c\n{n},{n + 1};", f"| {n} |\n|---|"


def json_texts(n, draw):
    chosen = f'{{"role": "admin", "content": "entry {n}"}}'
    return f"Write entry {n} of the access list as JSON.", chosen, f"[{{'role': 'user', 'content': {n}}}]"


def scripts(n, draw):
    words = ("स्वागत है", "いらっしゃいませ", "أهلا وسهلا", "Καλώς ήρθατε", "환영합니다", "ยินดีต้อนรับ")
    mark = ("\u0915\u093c", "\u0958")[n % 2]
    return (
        f"{words[n % 6]} {n} {mark}?",
        f"{words[(n + 1) % 6]}\u3000{n}\u00a0«{n}»",
        f"{words[(n + 2) % 6]} {n}。",
    )


def thoughts(n, draw):
    chosen = f"<think>\n{n} and {n} are {2 * n}\n</think>\n\n{2 * n}"
    return f"Double {n}, step by step.", chosen, f"<think>hm</think>{n}"


def prose(n, draw):
    writer, reader = draw.sample(NAMES, 2)
    prompt = f"{writer} wrote to {reader} about letter {n}: what is <unk>, <pad> or [MASK]?"
    return prompt, f"A placeholder! Run it with <filename> {n} <3.", f"Nothing... [citation needed] {n}"


def quotations(n, draw):
    prompt = f'Who says "Human: yes {n}" and "user\\nassistant"? <|file {n}|>'
    return prompt, f"It says: Assistant: {n} [end of text]", f"[INST {n}] << SYS >> nobody"


SORTS = (code, mathematics, html, chemistry, tables, json_texts, scripts, thoughts, prose, quotations)


def rows():
    draw = random.Random(0)
    made = []
    for sort in SORTS:
        for n in range(ROWS):
            prompt, chosen, rejected = sort(n, draw)
            texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            made.append(texts | {"client_id": f"o{n % 12}"})
    return made


def listing_tokens():
    """Tokens of a vocabulary in a tokenizer's list, and its padding, which are none of its structure."""
    tokenizer = build_chat_tokenizer(family("qwen2"))
    names = ("<filename>", "<unk>", "<pad>", "[MASK]")
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.pad_token = "!"
    return tokenizer


def thinking():
    marks = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    tokenizer = build_chat_tokenizer(
        Family(family("qwen3").template, None, "<|im_end|>", marks, "<|im_end|>")
    )
    tokenizer.add_tokens([AddedToken(name, special=True) for name in marks[2:]])
    return tokenizer


FAMILIES = {
    "llama-3": lambda folder: build_chat_tokenizer(family("llama-3")),
    "gemma": lambda folder: build_chat_tokenizer(family("gemma")),
    "qwen3": lambda folder: build_chat_tokenizer(family("qwen3")),
    "special thoughts": lambda folder: thinking(),
    "listed tokens": lambda folder: listing_tokens(),
    "mistral": lambda folder: build_chat_tokenizer(family("mistral")),
    "gpt2": lambda folder: load_family("gpt2", folder / "gpt2"),
}
assert len(SORTS) * ROWS == 2000 and len(FAMILIES) == 7


def recipe(name, tmp_path):
    backbone = write_backbone(FAMILIES[name](tmp_path), tmp_path / "model")
    path = write_jsonl(tmp_path / "p.jsonl", rows())
    own = ["data.source=jsonl", "data.options={judge_clients: 0.2, align_share: 0.1}", "data.clients=null"]
    models = [
        f"policy.backbone.name={backbone.name}",
        "policy.max_new_tokens=100",
        "policy.max_prompt_tokens=400",
    ]
    method = ["federation.method=feddpo", "federation.options={}", "policy.template=thoughts/policy"]
    return load_recipe("debug", [f"data.path={path}", *own, *models, *method])


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_refused_changed_or_merged(name, tmp_path):
    loaded = recipe(name, tmp_path)
    warnings = preview_data(loaded).warnings
    # <s> of HTML is BOS of Mistral.
    assert all("read them as ordinary text" in text for text in warnings)
    assert len(warnings) == (1 if name == "mistral" else 0)
    tasks.prepare_data.fn(loaded, tmp_path / "prepared", tmp_path / "trees")
    pairs = [row for name in ("pairs", "judge") for row in prepared_rows(tmp_path / "prepared", name)]
    prompts = prepared_rows(tmp_path / "prepared", "prompts")
    given = {(row["prompt"], row["chosen"], row["rejected"]) for row in rows()}
    kept = {(row["prompt"], row["chosen"], row["rejected"]) for row in pairs}
    assert kept <= given
    assert {row["prompt"] for row in rows()} == {row["prompt"] for row in [*pairs, *prompts]}
    texts = PolicyTexts(loaded.policy)
    for row in pairs[::40]:
        prompt, *answers = texts.encode_texts(row["prompt"], row["chosen"], row["rejected"])
        assert all(answers) and prompt
