"""Every hub source on a local folder with the files, columns and types that its data set has on the hub.

The folder has the data set's id as its relative path, so that `datasets` reads it in place of the
hub. The layouts are those of the data sets' public cards, file lists and conversion commits:

    openai/summarize_from_feedback, openai/webgpt_comparisons, ybisk/piqa: main is a loading script;
        the branch refs/convert/parquet has <configuration>/<split>/0000.parquet and no README
    stanfordnlp/SHP, Anthropic/hh-rlhf: folders of JSON lines at the root
    the others: data/<split>-*.parquet, or one file at the root, or configurations that the card names

Where a type is not documented, it is the narrowest that holds the values.
"""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config import DataConfig
from components.config.data import PromptsConfig
from components.data import sources
from components.data.questions import load_questions
from components.data.rows import read_file

STRING = pa.string()
TEXTS = pa.list_(STRING)
QUOTES = pa.struct({"title": TEXTS, "extract": TEXTS})
TOKENS = pa.struct({"prefix": pa.list_(pa.int32()), "completion": pa.list_(pa.int32())})
WEBGPT = {
    "question": pa.struct({"dataset": STRING, "id": STRING, "full_text": STRING}),
    "quotes_0": QUOTES,
    "answer_0": STRING,
    "tokens_0": TOKENS,
    "score_0": pa.float32(),
    "quotes_1": QUOTES,
    "answer_1": STRING,
    "tokens_1": TOKENS,
    "score_1": pa.float32(),
}
COMPARISONS = {
    "info": pa.struct(dict.fromkeys(("id", "post", "title", "subreddit", "site", "article"), STRING)),
    "summaries": pa.list_(pa.struct(dict.fromkeys(("text", "policy", "note"), STRING))),
    "choice": pa.int32(),
    "worker": STRING,
    "batch": STRING,
    "split": STRING,
    "extra": pa.struct({"confidence": pa.int32()}),
}
AXES = dict.fromkeys(("overall", "accuracy", "coverage", "coherence"), pa.int32()) | {
    "compatible": pa.bool_()
}
"""Columns of the ratings beside the comparisons, which must not be read with them."""


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A working folder whose subfolders stand for data sets of the hub, with a cache of its own."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write_parquet(path, rows, types=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(list(types.items())) if types else None
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def load(source, **data):
    return sources.load(DataConfig(source=source, **data), 0)


def plain(count, start=0, **more):
    """Rows of prompt, chosen and rejected."""
    return [
        {"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} | more
        for n in range(start, start + count)
    ]


# --- pairs


def test_tldr_reads_the_folder_of_comparisons_of_the_conversion_branch(hub, fixtures):
    rows = read_file(fixtures / "tldr" / "comparisons.jsonl")
    repository = hub / "openai" / "summarize_from_feedback"
    for split in ("train", "validation"):
        write_parquet(repository / "comparisons" / split / "0000.parquet", rows, COMPARISONS)
    rating = {"info": rows[0]["info"], "worker": "w", "summary": {"text": "t", "axes": {"overall": 3}}}
    summary = pa.struct({"text": STRING, "policy": STRING, "note": STRING, "axes": pa.struct(AXES)})
    ratings = {"info": COMPARISONS["info"], "worker": STRING, "summary": summary}
    for split in ("test", "validation"):
        write_parquet(repository / "axis" / split / "0000.parquet", [rating], ratings)
    for part, split in (("posts", "train"), ("posts_test", "test")):
        rows = read_file(fixtures / "tldr" / f"{part}.jsonl")
        posts = [{"prompt": row["prompt"], "completion": row.get("completion", "")} for row in rows]
        write_parquet(hub / f"trl-lib/tldr/data/{split}-00000-of-00001.parquet", posts)
    options = {"judge_workers": 1}
    loaded = load("tldr", options=options)
    local = load("tldr", options=options, path=str(fixtures / "tldr"))
    assert len(loaded.pairs) > 0
    assert loaded.pairs.to_list() == local.pairs.to_list()
    assert loaded.prompts["prompt"] == local.prompts["prompt"]


def test_shp_reads_the_folders_of_all_subreddits(hub, fixtures):
    for split in ("train", "validation", "test"):
        rows = read_file(fixtures / "shp" / f"{split}.jsonl")
        for subreddit in {row["domain"].rsplit("_", 1)[0] for row in rows}:
            own = [row for row in rows if row["domain"].rsplit("_", 1)[0] == subreddit]
            write_lines(hub / "stanfordnlp" / "SHP" / subreddit / f"{split}.json", own)
    options = {"max_tokens": None}
    loaded = load("shp", options=options, partition="dirichlet", clients=2)
    local = load("shp", options=options, partition="dirichlet", clients=2, path=str(fixtures / "shp"))
    assert len(loaded.pairs) > 0
    assert set(loaded.pairs["pair_id"]) == set(local.pairs["pair_id"])


def dialogues(count, start):
    return [
        {
            "chosen": f"\n\nHuman: question {n}\n\nAssistant: yes {n}",
            "rejected": f"\n\nHuman: question {n}\n\nAssistant: no {n}",
        }
        for n in range(start, start + count)
    ]


def test_hh_rlhf_reads_one_folder_with_its_splits(hub):
    repository = hub / "Anthropic" / "hh-rlhf"
    for start, subset in ((0, "helpful-base"), (100, "harmless-base")):
        write_lines(repository / subset / "train.jsonl.gz", dialogues(20, start))
        write_lines(repository / subset / "test.jsonl.gz", dialogues(5, start + 20))
    attempt = [{"transcript": "t", "rating": 1.0}]
    write_lines(repository / "red-team-attempts" / "red_team_attempts.jsonl.gz", attempt)
    loaded = load("hh-rlhf", options={"subset": "helpful-base", "align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 25
    assert loaded.pairs["split"].count("test") == 5
    assert all(int(prompt.split()[-1]) < 100 for prompt in loaded.pairs["prompt"])


def test_imdb_has_prompts_in_its_completions_and_two_splits(hub):
    rows = [
        {
            "prompt": f"I saw film {n} and",
            "chosen": f"I saw film {n} and liked it {n}",
            "rejected": f"I saw film {n} and left {n}",
            "chosen_reward": 2.0,
            "rejected_reward": -1.5,
        }
        for n in range(24)
    ]
    types = dict.fromkeys(("prompt", "chosen", "rejected"), STRING)
    types |= dict.fromkeys(("chosen_reward", "rejected_reward"), pa.float32())
    repository = hub / "yuasosnin" / "imdb-dpo" / "data"
    write_parquet(repository / "train-00000-of-00001.parquet", rows[:20], types)
    write_parquet(repository / "test-00000-of-00001.parquet", rows[20:], types)
    loaded = load("imdb", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 24
    assert loaded.pairs["split"].count("test") == 4
    assert not loaded.pairs[0]["chosen"].startswith("I saw")


def test_ultrafeedback_keeps_its_test_split(hub):
    repository = hub / "kaitchup" / "UltraFeedback-prompt-chosen-rejected" / "data"
    write_parquet(repository / "train-00000-of-00001-219261181a100452.parquet", plain(30))
    write_parquet(repository / "test-00000-of-00001-6cf4cbe421a6a6b5.parquet", plain(5, start=30))
    loaded = load("ultrafeedback", options={"align_share": 0, "judge_share": 0})
    assert loaded.pairs["split"].count("test") == 5
    assert len(loaded.pairs) == 35


def test_webgpt_reads_the_conversion_of_its_script(hub):
    rows = [
        {
            "question": {"dataset": "eli5", "id": str(n), "full_text": f"why {n}?"},
            "answer_0": f"because {n}",
            "score_0": 0.5,
            "answer_1": f"nobody knows {n}",
            "score_1": -0.5,
        }
        for n in range(30)
    ]
    write_parquet(hub / "openai" / "webgpt_comparisons" / "default/train/0000.parquet", rows, WEBGPT)
    loaded = load("webgpt", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 30
    assert set(loaded.pairs["margin"]) == {1.0}


def test_webgpts_default_revision_is_the_conversion_and_a_recipe_may_name_another(monkeypatch):
    from components.data.sources import plain as plain_sources
    from components.data.sources.webgpt import DATASET

    asked = []

    def from_hub(name, *, split, revision, data_dir):
        asked.append(revision)
        return []

    monkeypatch.setattr(plain_sources, "from_hub", from_hub)
    for revision in (None, "abc"):
        DATASET.raw_splits(DataConfig(source="webgpt", revision=revision))
    assert asked == ["refs/convert/parquet", "abc"]


def test_py_dpo_is_one_file_at_the_root(hub):
    write_parquet(hub / "jondurbin" / "py-dpo-v0.1" / "py-dpo.parquet", plain(30, id="x"))
    assert len(load("py-dpo", options={"align_share": 0, "judge_share": 0}).pairs) == 30


def test_code_vulnerability_is_json_lines_at_the_root(hub):
    rows = [
        {
            "lang": "c++",
            "vulnerability": "overflow",
            "system": "",
            "question": f"write program {n}",
            "chosen": f"safe {n}",
            "rejected": f"unsafe {n}",
        }
        for n in range(30)
    ]
    folder = hub / "CyberNative" / "Code_Vulnerability_Security_DPO"
    write_lines(folder / "secure_programming_dpo.json", rows)
    loaded = load("code-vulnerability", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 30


def test_the_prompts_of_safe_rlhf_are_json_lines_beside_a_picture(hub):
    folder = hub / "PKU-Alignment" / "PKU-SafeRLHF-prompt"
    rows = [{"prompt": f"how {n}?", "prompt_source": "s"} for n in range(9)]
    write_lines(folder / "data" / "PKU-SafeRLHF-prompts.jsonl", rows)
    (folder / "pipeline.png").write_bytes(b"\x89PNG")
    loaded = sources.load_prompts(PromptsConfig(source="safe-rlhf"), "data.align_prompts", 0)
    assert len(loaded.prompts) == 9


# --- questions

CHOICES = pa.struct({"label": TEXTS, "text": TEXTS})
QUESTION_SETS = {
    "csqa": (
        "tau/commonsense_qa/data/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Where is a wet umbrella put?",
            "question_concept": "umbrella",
            "choices": {"label": list("ABCDE"), "text": ["bed", "stand", "oven", "book", "bath"]},
            "answerKey": "B",
        },
        {
            "id": STRING,
            "question": STRING,
            "question_concept": STRING,
            "choices": CHOICES,
            "answerKey": STRING,
        },
        None,
    ),
    "cose": (
        "Salesforce/cos_e/v1.0/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Where is a wet umbrella put?",
            "choices": ["bed", "stand", "oven"],
            "answer": "stand",
            "abstractive_explanation": "it drips",
            "extractive_explanation": "wet",
        },
        None,
        "v1.0",
    ),
    "piqa": (
        "ybisk/piqa/plain_text/train/0000.parquet",
        {"goal": "Keep a door open.", "sol1": "Take it away.", "sol2": "Use a wedge.", "label": 1},
        None,
        None,
    ),
    "aqua": (
        "deepmind/aqua_rat/raw/train-00000-of-00001.parquet",
        {
            "question": "What is 3 times 4?",
            "options": ["A)7", "B)10", "C)12", "D)14", "E)16"],
            "rationale": "3 times 4 is 12.",
            "correct": "C",
        },
        None,
        "raw",
    ),
    "mathqa": (
        "regisss/math_qa/data/train-00000-of-00001.parquet",
        {
            "Problem": "what is 4 * 250 ?",
            "Rationale": "4 * 250 = 1000",
            "options": "a ) 900 , b ) 1000 , c ) 1250 , d ) 2000 , e ) none of these",
            "correct": "b",
            "annotated_formula": "multiply(4, 250)",
            "linear_formula": "multiply(n0,n1)|",
            "category": "gain",
        },
        None,
        None,
    ),
    "medmcqa": (
        "openlifescienceai/medmcqa/data/train-00000-of-00001.parquet",
        {
            "id": "a",
            "question": "Which organ pumps blood?",
            "opa": "liver",
            "opb": "heart",
            "opc": "lung",
            "opd": "skin",
            "cop": 1,
            "choice_type": "single",
            "exp": "the heart does",
            "subject_name": "Anatomy",
            "topic_name": None,
        },
        None,
        None,
    ),
    "medqa": (
        "GBaker/MedQA-USMLE-4-options/phrases_no_exclude_train.jsonl",
        {
            "question": "Which organ pumps blood?",
            "answer": "heart",
            "options": {"A": "liver", "B": "heart", "C": "lung", "D": "skin"},
            "meta_info": "step1",
            "answer_idx": "B",
            "metamap_phrases": ["organ", "blood"],
        },
        None,
        None,
    ),
    "pubmedqa": (
        "qiaojin/PubMedQA/pqa_labeled/train-00000-of-00001.parquet",
        {
            "pubid": 7,
            "question": "Does it work?",
            "context": {
                "contexts": ["We tried it."],
                "labels": ["METHODS"],
                "meshes": ["Humans"],
                "reasoning_required_pred": ["y"],
                "reasoning_free_pred": ["y"],
            },
            "long_answer": "It does.",
            "final_decision": "yes",
        },
        None,
        "pqa_labeled",
    ),
}
"""By set: the file of its training split, a row, types that are not inferred, and its configuration."""


RIGHT = {
    "csqa": "stand",
    "cose": "stand",
    "piqa": "Use a wedge.",
    "aqua": "12",
    "mathqa": "1000",
    "medmcqa": "heart",
    "medqa": "heart",
    "pubmedqa": "yes",
}


@pytest.mark.parametrize("name", QUESTION_SETS)
def test_a_question_set_is_read_from_the_files_of_the_hub(hub, name):
    file, row, types, configuration = QUESTION_SETS[name]
    path = hub / file
    if path.suffix == ".jsonl":
        write_lines(path, [row])
    else:
        write_parquet(path, [row], types)
    for split in ("validation", "test"):
        other = Path(str(path).replace("train", split))
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other)
    if configuration is not None:
        write_card(hub.joinpath(*Path(file).parts[:2]), configuration)
    (question,), dropped = load_questions(name)
    assert question.set == name
    assert dict(question.options)[question.answer] == RIGHT[name]
    assert not dropped


def write_card(repository, configuration):
    """The card of a data set with two configurations."""
    lines = ["---", "configs:"]
    for name in (configuration, "another"):
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/train-*"]
    (repository / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
