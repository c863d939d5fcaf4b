"""The sources of plain pairs, on small files of the hub's schemas."""

import pytest

from components.config import DataConfig, RecipeError
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.sources.hub_pairs import CITATION, CodeVulnerability, Imdb, UltraFeedback, WebGpt
from tests.support.sources import WHOLE, data_config, prepared_rows, write_jsonl


def review(i, **more):
    """A raw row of imdb, in which each better ending is bright and each worse one dull."""
    start = f"Film number {i} was"
    return {
        "prompt": start,
        "chosen": f"{start} bright{' and kind' * (i % 3)}, {i}.",
        "rejected": f"{start} dull{' and slow' * (i % 2)}, {i}.",
        "chosen_reward": 1.0 + i / 10,
        "rejected_reward": 0.5,
    } | more


def code(i, **more):
    return {
        "lang": ("Go", "c++", "Ruby")[i % 3],
        "vulnerability": f"Weakness {i}.",
        "system": "",
        "question": f"Write program {i}.",
        "chosen": f"safe({i})" + " # checked" * (i % 2),
        "rejected": f"unsafe({i})" + " # quick" * (i % 3),
    } | more


def compared(i, **more):
    """A raw row of webgpt; of odd ones the second answer is the better."""
    answers = [f"Sound answer {i} [1]. More [2, 3].", f"Poor answer {i}."]
    scores = [0.5, -0.25]
    first = i % 2
    return {
        "question": {"dataset": "eli5", "id": f"q{i}", "full_text": f"Why is it {i}?"},
        "answer_0": answers[first],
        "answer_1": answers[1 - first],
        "score_0": scores[first],
        "score_1": scores[1 - first],
    } | more


def program(i, **more):
    return {
        "prompt": f"Print {i}.",
        "chosen": f"print({i})" + "  # done" * (i % 2),
        "rejected": f"prin({i})" + "  # well" * (i % 3),
    } | more


def talk(i, **more):
    """A raw row of ultrafeedback with chat messages."""

    def conversation(text):
        return [
            {"role": "user", "content": f"Name {i}."},
            {"role": "assistant", "content": "An earlier word."},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": text},
        ]

    return {
        "prompt": f"Name {i}.",
        "chosen": conversation(f"A helpful name {i}."),
        "rejected": conversation(f"No name {i}" + ", sorry." * (i % 2)),
    } | more


HUBS = {
    "imdb": (review, "yuasosnin/imdb-dpo"),
    "code-vulnerability": (code, "CyberNative/Code_Vulnerability_Security_DPO"),
    "webgpt": (compared, "openai/webgpt_comparisons"),
    "py-dpo": (program, "jondurbin/py-dpo-v0.1"),
    "ultrafeedback": (talk, "kaitchup/UltraFeedback-prompt-chosen-rejected"),
}


def load(source, rows, folder, seed=0, options=WHOLE):
    return sources.load(
        data_config(source=source, path=write_jsonl(folder / "rows.jsonl", rows), options=options), seed
    )


@pytest.mark.parametrize("source", HUBS)
def test_every_row_becomes_a_pair_or_is_counted_and_splits_are_drawn_by_prompt(source, tmp_path):
    make, _ = HUBS[source]
    rows = [make(i // 2) for i in range(160)]
    data = load(source, rows, tmp_path, options={})
    assert len(data.pairs) + len(data.judge) + data.dropped["prompt given to the server"] == 160
    assert set(data.dropped) == {"prompt given to the server"}
    assert {row.split for row in data.pairs} == {"train", "validation", "test"}
    assert len(data.judge)
    splits = {row.prompt: row.split for row in data.pairs}
    assert {(row.prompt, row.split) for row in data.pairs} == set(splits.items())
    assert {p.prompt for p in data.prompts if p.split == "test"} == {
        prompt for prompt, split in splits.items() if split == "test"
    }
    assert {row.client_id for row in data.pairs} == {""}


@pytest.mark.parametrize("source", HUBS)
def test_the_splits_are_loaded_from_the_hub_without_remote_code(source, tmp_path, monkeypatch):
    import datasets

    requests = []

    def load_dataset(name, config=None, **more):
        requests.append((name, config, more))
        return [make(i) for i in (range(80) if more["split"] == "train" else range(70, 100))]

    make, hub = HUBS[source]
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = sources.load(DataConfig(source=source, revision="abc", options=WHOLE), 0)
    has_test = source in ("imdb", "ultrafeedback")
    splits = ("train", "test") if has_test else ("train",)
    assert requests == [
        (hub, None, {"split": split, "revision": "abc", "data_dir": None}) for split in splits
    ]
    assert len(data.pairs) == (100 if has_test else 80)


@pytest.mark.parametrize("source", HUBS)
def test_a_row_without_a_column_or_with_another_type_is_named_by_file_row_and_column(
    source, tmp_path, monkeypatch
):
    import datasets

    make, hub = HUBS[source]
    column = {"webgpt": "answer_1"}.get(source, "rejected")
    bare = {k: v for k, v in make(1).items() if k != column}
    with pytest.raises(DataError, match=rf"rows.jsonl, row 2: column '{column}' is missing; there are: "):
        load(source, [make(0), bare], tmp_path)
    with pytest.raises(
        DataError, match=rf"rows.jsonl, row 2: column '{column}' must be text, but is 7 \(int\)"
    ):
        load(source, [make(0), make(1) | {column: 7}], tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [make(0), bare])
    with pytest.raises(DataError, match=rf"{hub} \(split train\), row 2: column '{column}' is missing"):
        sources.load(DataConfig(source=source), 0)


@pytest.mark.parametrize("source", HUBS)
def test_empty_texts_and_answers_that_are_the_same_make_no_pair_and_are_counted(source, tmp_path):
    make, _ = HUBS[source]
    columns = {"webgpt": ("answer_0", "answer_1")}.get(source, ("chosen", "rejected"))
    bare = make(2)
    same = make(3)
    nothing = bare["prompt"] + " " if source == "imdb" else " "
    rows = [
        *(make(i) for i in range(40)),
        bare | {columns[0]: nothing},
        bare | dict.fromkeys(columns, nothing),
        same | {columns[1]: same[columns[0]]},
    ]
    rows.append(make(4) | ({"question": "  "} if "question" in make(4) else {"prompt": ""}))
    data = load(source, rows, tmp_path)
    assert len(data.pairs) == 40
    assert data.dropped == {"empty text": 3, "both answers the same": 1}


def test_rows_that_make_no_pair_at_all_are_refused_with_the_reasons(tmp_path):
    with pytest.raises(
        DataError,
        match=r"rows.jsonl: none of the 3 rows .*margin not above 0: 2, .* begin with its prompt: 1\)",
    ):
        load(
            "imdb",
            [review(0, chosen_reward=0.0), review(1, chosen_reward=-1.0), review(2, prompt="Another")],
            tmp_path,
        )


def test_a_folder_with_a_test_file_keeps_it_and_drops_training_rows_of_its_prompts(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [program(i) for i in range(20)])
    write_jsonl(tmp_path / "test.jsonl", [program(19, prompt=" print   19."), program(30)])
    data = sources.load(DataConfig(source="py-dpo", path=str(tmp_path), options=WHOLE), 0)
    assert sorted(p.prompt for p in data.pairs if p.split == "test") == ["Print 30.", "print   19."]
    assert len(data.pairs) == 21
    assert data.dropped == {"prompt also in the test split": 1}
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"expected a file train \(.*\), and optionally test, in this folder"):
        sources.load(DataConfig(source="py-dpo", path=str(tmp_path)), 0)


# --- imdb


def test_imdb_removes_the_prompt_from_both_completions_and_the_margin_is_the_difference_of_the_rewards(
    tmp_path,
):
    data = load("imdb", [review(i) for i in range(40)], tmp_path)
    assert all(p.chosen.startswith(" bright") and p.rejected.startswith(" dull") for p in data.pairs)
    assert {p.prompt: round(p.margin, 6) for p in data.pairs} == {
        f"Film number {i} was": round(0.5 + i / 10, 6) for i in range(40)
    }


def test_imdb_removes_the_prompt_once_from_a_completion_that_repeats_it():
    (pair,), _ = Imdb().make_pairs([review(0, prompt="no", chosen="no no yes", rejected="no never")], "here")
    assert (pair.chosen, pair.rejected) == (" no yes", " never")


@pytest.mark.parametrize(
    "prompt", ["Film number 0 was", " Film number 0 was", "Film number 0 was ", "Film number 0 w", "Film"]
)
def test_imdb_prompts_and_continuations_are_together_the_texts_of_the_data_set(prompt):
    chosen, rejected = "Film number 0 was bright.", "Film number 0 was dull."
    start = prompt[: len(prompt) - len(prompt.lstrip())]
    row = review(0, prompt=prompt, chosen=f"{start}{chosen} ", rejected=start + rejected)
    (pair,), dropped = Imdb().make_pairs([row], "here")
    assert dropped == {}
    assert pair.prompt == prompt.strip()
    assert pair.prompt + pair.chosen == chosen
    assert pair.prompt + pair.rejected == rejected


@pytest.mark.parametrize("source", ["code-vulnerability", "py-dpo", "webgpt"])
def test_answers_have_no_white_space_around_them(source, tmp_path):
    make, _ = HUBS[source]
    columns = {"webgpt": ("answer_0", "answer_1")}.get(source, ("chosen", "rejected"))
    rows = [make(i) | {column: f" {make(i)[column]}\n" for column in columns} for i in range(40)]
    for pair in load(source, rows, tmp_path).pairs:
        assert pair.chosen == pair.chosen.strip()
        assert pair.rejected == pair.rejected.strip()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chosen_reward": 0.5}, "margin not above 0"),
        ({"chosen_reward": 0.25}, "margin not above 0"),
        ({"chosen": "The film was bright."}, "completion that does not begin with its prompt"),
        ({"rejected": "was dull."}, "completion that does not begin with its prompt"),
    ],
)
def test_an_imdb_row_whose_margin_is_not_above_0_or_that_has_another_prompt_is_counted(change, reason):
    pairs, dropped = Imdb().make_pairs([review(0), review(1, **change)], "here")
    assert [pair.prompt for pair in pairs] == ["Film number 0 was"]
    assert dropped == {reason: 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("high", "must be a number, but is 'high'"),
        (None, "must be a number, but is None"),
        (float("nan"), "must be a finite number, but is nan"),
    ],
)
def test_an_imdb_reward_that_is_no_number_is_refused(value, words):
    with pytest.raises(DataError, match=f"here, row 1: column 'rejected_reward' {words}"):
        Imdb().make_pairs([review(0, rejected_reward=value)], "here")


@pytest.mark.slow
def test_imdb_by_margin_gives_the_first_client_the_easiest_pairs(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [review(i) for i in range(90)])
    prepare(
        DataConfig(source="imdb", path=path, partition="margin", clients=3, options=WHOLE),
        0,
        tmp_path / "data",
    )
    rows = prepared_rows(tmp_path / "data")
    held = {
        client: sorted(int(r["prompt"].split()[2]) for r in rows if r["client_id"] == client)
        for client in ("client-00", "client-01", "client-02")
    }
    assert held == {"client-00": [*range(60, 90)], "client-01": [*range(30, 60)], "client-02": [*range(30)]}


# --- code-vulnerability


def test_secure_code_is_chosen_and_the_domain_is_the_language_as_it_is_write_jsonl(tmp_path):
    data = load("code-vulnerability", [code(i) for i in range(60)], tmp_path)
    assert all(p.chosen.startswith("safe") and p.rejected.startswith("unsafe") for p in data.pairs)
    assert {row.domain for row in data.pairs} == {"Go", "c++", "Ruby"}
    assert {p.prompt: p.domain for p in data.pairs}["Write program 1."] == "c++"


def test_a_system_text_is_put_before_the_question():
    rows = [
        code(0, system="You write Go."),
        code(1),
        code(2, system=None),
        code(3, system="You write Go.", question=" "),
    ]
    pairs, dropped = CodeVulnerability().make_pairs(rows, "here")
    assert [pair.prompt for pair in pairs] == [
        "You write Go.\n\nWrite program 0.",
        "Write program 1.",
        "Write program 2.",
    ]
    assert dropped == {"empty text": 1}


@pytest.mark.slow
def test_languages_are_assigned_to_the_clients_that_the_recipe_names(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [code(i) for i in range(90)])
    clients = {"systems": ["Go", "c++"], "web": ["Ruby"]}
    report = prepare(
        DataConfig(
            source="code-vulnerability",
            path=path,
            partition="column",
            column="domain",
            column_clients=clients,
        ),
        0,
        tmp_path / "data",
    )
    rows = prepared_rows(tmp_path / "data")
    assert {(r["client_id"], r["domain"]) for r in rows} == {
        ("systems", "Go"),
        ("systems", "c++"),
        ("web", "Ruby"),
    }
    assert {r["client_id"] for r in prepared_rows(tmp_path / "data", "judge")} == {"judge"}
    assert report.rows.left_out == {}


# --- webgpt


def test_the_answer_with_the_higher_score_is_chosen_in_either_column(tmp_path):
    data = load("webgpt", [compared(i) for i in range(40)], tmp_path)
    assert len(data.pairs) == 40
    assert all(p.chosen.startswith("Sound") and p.rejected.startswith("Poor") for p in data.pairs)
    assert {row.margin for row in data.pairs} == {0.75}
    assert "Why is it 3?" in [row.prompt for row in data.pairs]


def test_equal_scores_are_a_tie_and_a_question_may_be_a_text(tmp_path):
    rows = [
        *(compared(i) for i in range(30)),
        compared(30, score_0=0.25, score_1=0.25),
        compared(31, score_0=0, score_1=-0.0),
        compared(32, question="Plainly asked?"),
    ]
    data = load("webgpt", rows, tmp_path)
    assert data.dropped == {"tie": 2}
    assert len(data.pairs) == 31
    assert "Plainly asked?" in [row.prompt for row in data.pairs]


def test_citation_marks_are_removed_only_if_the_option_says_so(tmp_path):
    rows = [compared(i) for i in range(20)]
    unchanged, bare = (
        load("webgpt", rows, tmp_path, options=WHOLE | more) for more in ({}, {"references": "remove"})
    )
    assert "Sound answer 4 [1]. More [2, 3]." in [row.chosen for row in unchanged.pairs]
    assert "Sound answer 4. More." in [row.chosen for row in bare.pairs]
    assert CITATION.sub("", "One [1][2] and [ab] x[12,3].") == "One and [ab] x."
    with pytest.raises(RecipeError, match=r"'data.options.references' is 'drop'.*'keep' or 'remove'"):
        load("webgpt", rows, tmp_path, options={"references": "drop"})


def test_answers_that_differ_only_in_citation_marks_are_the_same_without_them(tmp_path):
    rows = [*(compared(i) for i in range(20)), compared(21, answer_0="So [1].", answer_1="So [2].")]
    assert load("webgpt", rows, tmp_path).dropped == {}
    assert load("webgpt", rows, tmp_path, options=WHOLE | {"references": "remove"}).dropped == {
        "both answers the same": 1
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"question": {"id": "q"}},
            r"column 'question' must be text, or an object with full_text, but has: id",
        ),
        ({"question": {"full_text": 3}}, r"column 'question' must be text, but is 3"),
        ({"score_0": "1"}, r"column 'score_0' must be a number, but is '1'"),
        ({"score_1": None}, r"column 'score_1' must be a number, but is None"),
        ({"score_0": float("nan")}, r"column 'score_0' must be a finite number, but is nan"),
    ],
)
def test_a_webgpt_row_with_a_wrong_type_is_refused(change, words):
    with pytest.raises(DataError, match=f"here, row 1: {words}"):
        WebGpt().make_pairs([compared(0) | change], "here")


# --- py-dpo and ultrafeedback


def test_validated_programs_are_chosen(tmp_path):
    data = load("py-dpo", [program(i) for i in range(20)], tmp_path)
    assert all(p.chosen.startswith("print(") and p.rejected.startswith("prin(") for p in data.pairs)


def test_the_last_turn_of_the_assistant_is_the_answer_and_texts_are_unchanged(tmp_path):
    rows = [*(talk(i) for i in range(20)), talk(20, chosen="A plain name.", rejected="No plain name.")]
    rows.append(talk(21, chosen=[*talk(21)["chosen"], {"role": "user", "content": "Thank you."}]))
    data = load("ultrafeedback", rows, tmp_path)
    answers = {p.prompt: (p.chosen, p.rejected) for p in data.pairs}
    assert answers["Name 3."] == ("A helpful name 3.", "No name 3, sorry.")
    assert answers["Name 20."] == ("A plain name.", "No plain name.")
    assert answers["Name 21."][0] == "A helpful name 21."


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "a list of 0 messages without a turn of the assistant"),
        ([{"role": "user", "content": "Hm?"}], "a list of 1 messages without a turn of the assistant"),
        (
            ["A name."],
            "must be text or a list of messages, .*, but is \"\\['A name.'\\]\"",
        ),
        ([{"role": "assistant", "content": 3}], "must be text, but is 3"),
        ({"role": "assistant"}, "must be text, but is"),
    ],
)
def test_messages_without_an_answer_are_refused(value, words):
    with pytest.raises(DataError, match=f"here, row 1: column 'chosen' (is )?{words}"):
        UltraFeedback().make_pairs([talk(0, chosen=value)], "here")
