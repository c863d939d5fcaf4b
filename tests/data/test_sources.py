import gzip
import subprocess
import sys
from collections import Counter
from itertools import product

import pyarrow as pa
import pyarrow.parquet
import pytest

from components.config import PROMPT_SOURCES, SOURCES, DataConfig, RecipeError, SourceOptions
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.report import PartitionSummary
from components.data.rows import read_file
from components.data.sources.hub_pairs import HhRlhf
from components.data.tables import pairs_frame
from tests.support.sources import WHOLE, WHOLE_FILE, data_config, read_jsonl, write_jsonl


def own(**more):
    return {"prompt": "Which?", "chosen": "This.", "rejected": "That."} | more


@pytest.mark.slow
def test_checking_a_data_section_imports_no_heavy_library():
    heavy = "'torch', 'datasets', 'pandas', 'pyarrow', 'great_expectations', 'aclsum', 'chitchat_dataset'"
    code = (
        "import sys; from components.config import DataConfig; DataConfig(source='aclsum');"
        f" print([name for name in ({heavy}) if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SOURCES.names())
def test_a_registered_source_is_a_source(name):
    assert issubclass(SOURCES.load(name), sources.Source)


@pytest.mark.parametrize("name", PROMPT_SOURCES.names())
def test_a_registered_prompt_source_is_a_prompt_source(name):
    assert issubclass(PROMPT_SOURCES.load(name), sources.PromptSource)


def test_every_registered_source_is_in_the_table_of_the_package():
    listed = {line.split()[0] for line in sources.__doc__.splitlines() if line.startswith("    ")}
    assert listed == {*SOURCES.builtin, *PROMPT_SOURCES.builtin}


def test_options_are_of_the_source_that_the_section_names():
    data = data_config(source="tldr", options={"judge_workers": 0})
    assert type(data.options) is SOURCES.load("tldr")
    assert data.options.judge_workers == 0
    assert data.options.align_share == 0.4


def test_a_section_with_its_defaults_is_the_same_section():
    data = data_config(source="mixture", options={"sources": [{"source": "shp"}, {"source": "webgpt"}]})
    assert data_config(**data.model_dump(mode="json")) == data


def test_an_object_that_does_not_load_is_refused_as_a_source():
    data = DataConfig().model_copy(update={"options": SourceOptions()})
    with pytest.raises(TypeError, match="source 'aclsum'"):
        sources.load(data, 0)


def test_an_unknown_source_names_the_nearest_one():
    with pytest.raises(
        RecipeError, match=r"recipe.yaml: key 'data.source' is 'jsonline': .*Did you mean 'jsonl'"
    ):
        data_config(source="jsonline")


def test_an_unknown_option_of_a_source_names_the_nearest_one(fixtures):
    with pytest.raises(
        RecipeError, match=r"data.options.judge_worker'; did you mean 'data.options.judge_workers'"
    ):
        data_config(source="tldr", path=str(fixtures / "tldr"), options={"judge_worker": 1})


# --- tldr


def tldr(fixtures, seed=0, **options):
    return sources.load(
        DataConfig(
            source="tldr",
            path=str(fixtures / "tldr"),
            options={"judge_workers": 1, "align_share": 1.0} | options,
        ),
        seed,
    )


def raw_comparisons(fixtures):
    return read_jsonl(fixtures / "tldr" / "comparisons.jsonl")


def post(name, text):
    """A post as OpenAI's own files have it."""
    return {
        "id": f"t3_{name}",
        "subreddit": "tales",
        "title": "What happened",
        "post": text,
        "summary": "in short",
    }


def comparison(worker, name, text):
    """A comparison in which either of two summaries won."""
    summaries = [{"text": f"A summary of {name} that goes on"}, {"text": f"{name} in short"}]
    return {
        "info": {"id": f"t3_{name}", "post": text, "title": "What happened", "subreddit": "tales"},
        "summaries": summaries,
        "choice": len(text) % 2,
        "worker": worker,
        "extra": {},
    }


def tldr_folder(fixtures, folder, **parts):
    """A folder of the fixture's files, some of them replaced."""
    for name in ("comparisons", "posts", "posts_test", "comparisons_validation"):
        if name in parts:
            write_jsonl(folder / f"{name}.jsonl", parts[name])
        elif (fixtures / "tldr" / f"{name}.jsonl").is_file():
            (folder / f"{name}.jsonl").write_bytes((fixtures / "tldr" / f"{name}.jsonl").read_bytes())
    return str(folder)


def tldr_of(fixtures, folder, seed=0, align_share=1.0, **parts):
    return sources.load(
        DataConfig(
            source="tldr",
            path=tldr_folder(fixtures, folder, **parts),
            options={"judge_workers": 1, "align_share": align_share},
        ),
        seed,
    )


def test_the_summary_that_the_tldr_worker_preferred_is_chosen_in_either_place(fixtures):
    raw = read_jsonl(fixtures / "tldr" / "comparisons.jsonl")
    assert {row["choice"] for row in raw} == {0, 1}
    preferences = {
        (r["info"]["post"], r["worker"]): (
            r["summaries"][r["choice"]]["text"].strip(),
            r["summaries"][1 - r["choice"]]["text"].strip(),
        )
        for r in raw[:-2]
    }
    data = tldr(fixtures)
    rows = [*data.pairs, *data.judge]
    assert len(rows) == len(preferences) == 20
    for row in rows:
        assert (row.chosen, row.rejected) == preferences[row.prompt.partition("\nPOST: ")[2], row.client_id]
    assert "Basil on a north window rots although it is watered daily." in {row.chosen for row in rows}


def test_tldr_clients_are_workers_and_the_judges_workers_are_others(fixtures):
    data = tldr(fixtures)
    clients = {row.client_id for row in data.pairs}
    judges = {row.client_id for row in data.judge}
    assert len(judges) == 1
    assert len(clients) == 3
    assert not clients & judges
    assert judges != {"worker-four"}  # too few pairs to be a judge
    assert data.pairs[0].prompt.startswith("SUBREDDIT: r/")
    assert data.pairs[0].domain.startswith("r/")


COMPARISON = {
    "info": {"id": "t3_x", "post": "It rained.", "title": "Rain", "subreddit": "tales"},
    "summaries": [{"text": "Rain."}, {"text": "Sun."}],
    "choice": 0,
    "worker": "w",
    "extra": {"confidence": 3},
}


def info_without(*columns):
    return {"info": {c: v for c, v in COMPARISON["info"].items() if c not in columns}}


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        (
            "comparisons",
            info_without("title"),
            "column 'info' has a post without a title; there are: id, post, subreddit",
        ),
        (
            "comparisons",
            info_without("subreddit"),
            "column 'info' has a post without a subreddit; there are: id, post, title",
        ),
        (
            "comparisons",
            {"info": COMPARISON["info"] | {"subreddit": None}},
            "column 'info' has a post without a subreddit",
        ),
        (
            "comparisons",
            {"info": COMPARISON["info"] | {"post": 7}},
            r"column 'info.post' must be text, but is 7 \(int\)",
        ),
        (
            "comparisons",
            {"info": COMPARISON["info"] | {"title": ["Rain"]}},
            r"column 'info.title' must be text, but is \['Rain'\] \(list\)",
        ),
        (
            "comparisons",
            {"info": None},
            "column 'info' must be an object with .*, but is None",
        ),
        (
            "comparisons",
            {"summaries": None},
            "column 'summaries' must be a list of objects with text, but is None",
        ),
        (
            "comparisons",
            {"summaries": ["a", "b"]},
            r"column 'summaries\[0\]' must be an object with text, but is 'a' \(str\)",
        ),
        (
            "comparisons",
            {"summaries": [{"text": "a"}, {}]},
            r"column 'summaries\[1\].text' is missing; there are: none",
        ),
        (
            "comparisons",
            {"summaries": [{"text": "a"}, {"text": 2}]},
            r"column 'summaries\[1\].text' must be text, but is 2 \(int\)",
        ),
        (
            "comparisons",
            {"summaries": [{"text": "a"}]},
            "column 'summaries' must be a list of two summaries, but has 1",
        ),
        (
            "comparisons",
            {"choice": 1.0},
            r"column 'choice' must be 0 \(the first summary is better\) or 1 \(the second\), but is 1.0",
        ),
        ("comparisons", {"worker": 7}, r"column 'worker' must be text, but is 7 \(int\)"),
        ("comparisons", {"worker": []}, r"column 'worker' must be text, but is \[\] \(list\)"),
        (
            "comparisons",
            {"worker": None},
            "column 'worker' is empty, but each row needs one",
        ),
        ("comparisons", {"worker": "\ud800"}, "column 'worker' holds half a character"),
        ("comparisons", {"extra": 7}, "column 'extra' must be an object with .*, but is 7"),
        (
            "comparisons",
            {"extra": {"confidence": "x"}},
            r"column 'extra.confidence' must be a number, but is 'x' \(str\)",
        ),
        ("posts", {"prompt": 7, "completion": "x"}, r"column 'prompt' must be text, but is 7 \(int\)"),
        (
            "posts",
            {"prompt": "SUBREDDIT: r/a\nTITLE: b\nPOST: c", "completion": ["x"]},
            r"column 'completion' must be text, but is \['x'\] \(list\)",
        ),
        (
            "posts_test",
            {"prompt": "SUBREDDIT: r/a\nTITLE: b\nPOST: c", "label": 1},
            r"column 'label' must be text, but is 1 \(int\)",
        ),
        (
            "posts",
            {"post": "c", "summary": "d"},
            "expected columns prompt .* or subreddit, title, post and summary; there are: post, summary",
        ),
        ("posts", post("x", "c") | {"title": 3}, r"column 'title' must be text, but is 3 \(int\)"),
        ("posts", post("x", "c") | {"post": None}, "column 'post' is null, but text is needed"),
    ],
)
def test_tldr_names_the_file_the_row_and_the_wrong_field(fixtures, tmp_path, part, change, sentence):
    good = read_jsonl(fixtures / "tldr" / f"{part}.jsonl")
    broken = COMPARISON | change if part == "comparisons" else change
    with pytest.raises(DataError, match=rf"{part}.jsonl, row {len(good) + 1}: {sentence}"):
        tldr_of(fixtures, tmp_path, **{part: [*good, broken]})


def test_tldr_accepts_a_comparison_without_a_title_a_confidence_or_a_reference(fixtures, tmp_path):
    rows = [
        COMPARISON | {"info": COMPARISON["info"] | {"title": None}, "extra": None},
        COMPARISON | {"info": {"id": "x", "article": "News."}},
    ]
    data = tldr_of(
        fixtures,
        tmp_path,
        comparisons=[*raw_comparisons(fixtures), *rows],
        posts=[post("p", "A new one.") | {"summary": None}],
    )
    assert "SUBREDDIT: r/tales\nTITLE: \nPOST: It rained." in [
        row.prompt for row in (*data.pairs, *data.judge)
    ]
    assert data.dropped["not a Reddit post"] == 2
    assert [p.references for p in data.prompts if p.split == "align"] == [[]]


def test_tldr_counts_the_rows_that_make_no_pair(fixtures):
    assert tldr(fixtures).dropped == {
        "not a Reddit post": 1,
        "both summaries the same": 1,
        "post that is in a comparison": 1,
    }


def test_posts_of_tldr_comparisons_with_other_punctuation_are_not_prompts(fixtures):
    prompts = tldr(fixtures).prompts
    assert not any("basil" in row.prompt.lower() for row in prompts)
    assert Counter(row.split for row in prompts) == {"align": 12, "test": 4}
    assert prompts[0].references == ["kettle is broken"]


def test_sixty_percent_of_the_tldr_posts_are_reserved_for_supervised_fine_tuning(fixtures, tmp_path):
    posts = [post(f"p{i}", f"It happened on day {i} and nobody knew.") for i in range(1000)]
    data = tldr_of(fixtures, tmp_path, posts=posts, align_share=0.4)
    used = {p.prompt for p in data.prompts if p.split == "align"}
    assert abs(len(used) - 400) < 50
    assert data.dropped["post reserved for supervised fine-tuning"] == 1000 - len(used)
    assert used == {
        p.prompt
        for p in tldr_of(fixtures, tmp_path, posts=posts[::-1], align_share=0.4).prompts
        if p.split == "align"
    }


def test_an_edited_post_of_a_tldr_comparison_is_recognized_by_its_id(fixtures, tmp_path):
    posts = [
        post("a2", "EDIT: it was the cassette, thank you all."),
        post("zz", "EDIT: it was the cassette, thank you all, too."),
    ]
    data = tldr_of(fixtures, tmp_path, posts=posts)
    assert [p.prompt.rpartition(" ")[2] for p in data.prompts if p.split == "align"] == ["too."]
    assert data.dropped["post that is in a comparison"] == 1


def test_a_post_whose_only_tldr_comparison_makes_no_pair_is_no_prompt(fixtures, tmp_path):
    lonely = comparison("w9", "lonely", "Nobody could tell the two summaries of this apart.") | {
        "summaries": [{"text": "Same."}, {"text": " Same. "}]
    }
    posts = [post("q1", "Nobody could tell  the two summaries of this apart"), post("q2", "Everybody could.")]
    data = tldr_of(fixtures, tmp_path, comparisons=[*raw_comparisons(fixtures), lonely], posts=posts)
    assert [p.prompt.rpartition("POST: ")[2] for p in data.prompts if p.split == "align"] == [
        "Everybody could."
    ]


def test_every_tldr_test_post_outside_the_comparisons_is_evaluated_on_and_not_aligned_on(fixtures, tmp_path):
    held_out = [post(f"t{i}", f"A long evening, number {i}, and then rain.") for i in range(30)]
    copied = post("other-id", "a long evening number 3 and then rain")
    compared = comparison("worker-one", "t7", held_out[7]["post"])
    data = tldr_of(
        fixtures,
        tmp_path,
        comparisons=[*raw_comparisons(fixtures), compared],
        posts=[copied, post("p0", "A short morning.")],
        posts_test=held_out,
    )
    test = [p for p in data.prompts if p.split == "test"]
    assert len(test) == 29
    assert all(p.references == ["in short"] for p in test)
    assert not any("number 7," in p.prompt for p in test)
    assert [p.prompt.rpartition("POST: ")[2] for p in data.prompts if p.split == "align"] == [
        "A short morning."
    ]
    assert (
        data.dropped["test post that is in a comparison"],
        data.dropped["post that is in the test too"],
    ) == (1, 1)


@pytest.mark.slow
def test_all_53_tldr_workers_are_clients_if_the_judge_is_trained_on_the_validation_part(fixtures, tmp_path):
    """Table 5: one of the workers has a single comparison, and is a client nevertheless."""
    text = "Post {} of worker {} says what happened."
    train = [
        comparison(f"w{w:02d}", f"c{w}-{i}", text.format(i, w))
        for w, i in product(range(53), range(4))
        if w or not i
    ]
    validation = [
        comparison(worker, f"v{worker}-{i}", text.format(f"v{i}", worker))
        for worker, i in product(("w01", "stranger", "guest"), range(12))
    ]
    folder = tldr_folder(fixtures, tmp_path, comparisons=train, comparisons_validation=validation)
    report = prepare(
        DataConfig(source="tldr", path=folder, clients=53, options={"judge_workers": 0, "align_share": 1.0}),
        0,
        tmp_path / "data",
    )
    assert report.partition == PartitionSummary(samples=209, clients=53, max=4, min=1, std=0.41)
    assert report.rows.left_out == {}
    assert report.rows.judge == 24


def test_tldr_reads_the_parquet_conversion_from_the_hub_and_runs_no_remote_code(fixtures, monkeypatch):
    import datasets

    requests = []

    def load_dataset(name, config=None, **more):
        requests.append((name, config, more))
        file = {"openai/summarize_from_feedback": "comparisons"}.get(
            name, "posts" if more["split"] == "train" else "posts_test"
        )
        return read_jsonl(fixtures / "tldr" / f"{file}.jsonl")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = sources.load(DataConfig(source="tldr", options={"judge_workers": 1}), 0)
    assert len(data.pairs) + len(data.judge) == 20
    assert requests[0] == (
        "openai/summarize_from_feedback",
        None,
        {"split": "train", "revision": "refs/convert/parquet", "data_dir": "comparisons"},
    )
    assert [(name, more["split"]) for name, _, more in requests[1:]] == [
        ("trl-lib/tldr", "train"),
        ("trl-lib/tldr", "test"),
    ]
    assert not any("trust_remote_code" in more for *_, more in requests)


def test_an_unreachable_hub_is_one_sentence_with_the_remedy(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand a long tail")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError,
        match=r"Hugging Face hub: Couldn't reach the Hub\. Give a local copy as data.path",
    ):
        sources.load(DataConfig(source="hh-rlhf"), 0)


def test_a_folder_without_a_required_file_or_column_is_refused_with_its_name(fixtures, tmp_path):
    with pytest.raises(DataError, match=r"the file comparisons .* is missing"):
        sources.load(DataConfig(source="tldr", path=str(tmp_path)), 0)
    write_jsonl(tmp_path / "comparisons.jsonl", [{"info": {}, "summaries": [], "choice": 0}])
    (tmp_path / "posts.jsonl").write_bytes((fixtures / "tldr" / "posts.jsonl").read_bytes())
    (tmp_path / "posts_test.jsonl").write_bytes((fixtures / "tldr" / "posts_test.jsonl").read_bytes())
    with pytest.raises(
        DataError,
        match=r"comparisons.jsonl, row 1: column 'worker' is missing; there are: info, summaries, choice",
    ):
        sources.load(DataConfig(source="tldr", path=str(tmp_path)), 0)


# --- hh-rlhf


def test_the_last_turns_of_hh_dialogues_are_the_completions_and_the_rest_is_the_prompt(fixtures):
    data = sources.load(
        DataConfig(
            source="hh-rlhf",
            path=str(fixtures / "hh.jsonl"),
            options=WHOLE,
        ),
        0,
    )
    assert len(data.pairs) == 8
    assert all(r.chosen.startswith("Good answer") and r.rejected.startswith("Bad answer") for r in data.pairs)
    longer = next(r for r in data.pairs if "hydrant" in r.prompt)
    assert (
        longer.prompt == "Human: Can I park on a hydrant?\n\nAssistant: Tell me more.\n\nHuman: It is urgent."
    )


def test_hh_counts_dialogues_that_do_not_share_a_prompt(fixtures):
    rows = read_jsonl(fixtures / "hh.jsonl")
    pairs, dropped = HhRlhf().make_pairs(rows, "hh")
    assert dropped == {"dialogues without a common prompt": 1, "both answers the same": 1, "empty answer": 1}
    assert len(pairs) + sum(dropped.values()) == len(rows)


def test_hh_uses_the_test_split_of_a_folder_and_drops_training_rows_of_its_prompts(fixtures, tmp_path):
    lines = (fixtures / "hh.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress("".join(lines[:7]).encode()))
    (tmp_path / "test.jsonl").write_text("".join(lines[6:8]))
    data = sources.load(DataConfig(source="hh-rlhf", path=str(tmp_path), options=WHOLE), 0)
    assert sorted(r.chosen[:20] for r in data.pairs if r.split == "test") == [
        "Good answer number 6",
        "Good answer number 7",
    ]
    assert data.dropped == {"prompt also in the test split": 1}


def test_hh_reads_the_real_sample_and_loses_no_row_uncounted(samples):
    path = samples / "hh_rlhf" / "harmless_base_even.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        count = sum(1 for _ in lines)
    data = sources.load(DataConfig(source="hh-rlhf", path=str(path)), 0)
    assert len(data.pairs) + len(data.judge) + sum(data.dropped.values()) == count == 1156
    assert data.dropped["empty answer"] == 2
    assert "dialogues without a common prompt" not in data.dropped


# --- jsonl and parquet


def test_own_pairs_of_three_columns_are_divided_among_clients_judge_and_server(fixtures):
    data = sources.load(DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl")), 0)
    assert len(data.pairs) + len(data.judge) + data.dropped["prompt given to the server"] == 60
    assert {row.client_id for row in data.judge} == {"judge"}
    assert {row.client_id for row in data.pairs} == {"ann", "bob", "cem"}
    tested = {r.prompt for r in data.pairs if r.split == "test"}
    by_split = {s: {r.prompt for r in data.prompts if r.split == s} for s in ("align", "test")}
    assert by_split["test"] == tested
    assert by_split["align"]
    assert not by_split["align"] & {row.prompt for row in (*data.pairs, *data.judge)}
    prompt = next(r for r in data.prompts if r.split == "test")
    assert set(prompt.references) == {r.chosen for r in data.pairs if r.prompt == prompt.prompt}


def test_own_pairs_have_the_labels_splits_and_margins_of_the_file(tmp_path):
    rows = [
        own(prompt=f"q{i}", chosen="good", rejected="bad", split=("train", "test")[i % 2], margin=i)
        for i in range(40)
    ]
    data = sources.load(
        DataConfig(
            source="jsonl",
            path=write_jsonl(tmp_path / "p.jsonl", rows),
            options=WHOLE_FILE,
        ),
        0,
    )
    assert {(r.chosen, r.rejected) for r in data.pairs} == {("good", "bad")}
    assert {(r.prompt, r.split, r.margin) for r in data.pairs} == {
        (r["prompt"], r["split"], float(r["margin"])) for r in rows
    }


def test_some_of_ten_or_more_owners_are_the_judges(tmp_path):
    rows = [own(prompt=f"q{i} {c}", client_id=f"c{c}") for c, i in product(range(20), range(5))]
    data = sources.load(DataConfig(source="jsonl", path=write_jsonl(tmp_path / "p.jsonl", rows)), 0)
    judges = {row.client_id for row in data.judge}
    assert len(judges) == 2
    assert not judges & {row.client_id for row in data.pairs}
    assert len(data.judge) == 10


def test_parquet_reads_the_same_pairs_as_jsonl(fixtures, tmp_path):
    rows = read_jsonl(fixtures / "pairs.jsonl")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    left, right = (
        sources.load(DataConfig(source=s, path=str(p)), 3).pairs
        for s, p in (("jsonl", fixtures / "pairs.jsonl"), ("parquet", tmp_path / "p.parquet"))
    )
    assert left == right


def test_a_repeated_judgment_is_a_row_with_its_own_id(tmp_path):
    rows = [own(prompt=f"q{i // 2}") for i in range(40)]
    data = sources.load(
        DataConfig(
            source="jsonl",
            path=write_jsonl(tmp_path / "p.jsonl", rows),
            options=WHOLE_FILE,
        ),
        0,
    )
    ids = pairs_frame(data.pairs, "jsonl")["pair_id"]
    assert len(data.pairs) == ids.nunique() == 40


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": \n',
            r"p.jsonl, line 2: this is not valid JSON",
        ),
        ('["a"]\n', r"line 1: expected a JSON object"),
        (
            '{"prompt": "a", "chosen": "b", "answer": "c"}\n',
            r"row 1: column 'rejected' is missing; there are: prompt, chosen, answer",
        ),
        (
            '{"prompt": "a", "chosen": 3, "rejected": "c"}\n',
            r"row 1: column 'chosen' must be text, but is 3 \(int\)",
        ),
        ('{"prompt": null, "chosen": "b", "rejected": "c"}\n', r"row 1: column 'prompt' is null"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c", "split": "dev"}\n',
            r"column 'split' must be '', 'train', 'validation' or 'test', but is 'dev'",
        ),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}\n',
            r"column 'margin' must be a number, but is 'big'",
        ),
        (
            f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {"7" * 400}}}\n',
            r"row 1: column 'margin' is a number of 400 digits, which is too large",
        ),
        ("\n", "holds no rows"),
        ("\x00\xff", "not valid JSON"),
    ],
)
def test_an_invalid_line_is_named_with_file_and_line(tmp_path, content, sentence):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=sentence) as error:
        sources.load(DataConfig(source="jsonl", path=str(path)), 0)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
        ("7" * 5000, r"Exceeds the limit \(4300 digits\) .*"),
    ],
)
def test_json_that_python_cannot_parse_is_named_with_file_and_line(tmp_path, value, reason):
    row = f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {value}}}'
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c"}}\n{row}\n')
    with pytest.raises(
        DataError,
        match=rf"p.jsonl, line 2: this JSON cannot be read \({reason}\); expected one object a line",
    ):
        read_file(tmp_path / "p.jsonl")
    (tmp_path / "p.json").write_text(f"[{row}]")
    with pytest.raises(
        DataError, match=rf"p.json: this JSON cannot be read \({reason}\); expected a list of objects"
    ):
        read_file(tmp_path / "p.json")


def test_a_missing_path_file_or_wrong_kind_of_file_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"give the file as data.path"):
        sources.load(DataConfig(source="jsonl"), 0)
    with pytest.raises(DataError, match="there is no such file"):
        sources.load(DataConfig(source="jsonl", path=str(tmp_path / "none.jsonl")), 0)
    (tmp_path / "p.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="the data source jsonl reads"):
        sources.load(DataConfig(source="jsonl", path=str(tmp_path / "p.parquet")), 0)
    with pytest.raises(DataError, match="this is not a parquet file"):
        sources.load(DataConfig(source="parquet", path=str(tmp_path / "p.parquet")), 0)
    (tmp_path / "p.jsonl.gz").write_text("not gzip")
    with pytest.raises(DataError, match="cannot be read as gzipped"):
        sources.load(DataConfig(source="jsonl", path=str(tmp_path / "p.jsonl.gz")), 0)


def test_a_lone_surrogate_is_refused_with_row_and_column(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "\\ud800 x", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"column 'prompt' holds half a character at position 0"):
        sources.load(DataConfig(source="jsonl", path=str(path)), 0)
