"""Every hub source on a local folder with the files, columns and types that its data set has on the hub."""

import pytest
from pydantic import ValidationError

from components.config import DataConfig, RecipeError
from components.config.data import PromptsConfig
from components.config.thoughts import QuestionsConfig
from components.data import sources
from components.data.questions import load_questions, load_section
from components.data.rows import read_file
from components.recipes import load_recipe
from tests.support.hub_data import (
    dialogues,
    write_code_vulnerability,
    write_hh,
    write_imdb,
    write_py_dpo,
    write_safe_rlhf_prompts,
    write_shp,
    write_tldr,
    write_ultrafeedback,
    write_webgpt,
)
from tests.support.hub_questions import QUESTION_SETS, write_question_set


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A working folder whose subfolders stand for data sets of the hub, with a cache of its own."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def load(source, **data):
    return sources.load(DataConfig(source=source, **data), 0)


# --- pairs


def test_tldr_reads_the_folder_of_comparisons_of_the_conversion_branch(hub, fixtures):
    rows = read_file(fixtures / "tldr" / "comparisons.jsonl")
    posts = {}
    for part, split in (("posts", "train"), ("posts_test", "test")):
        raw = read_file(fixtures / "tldr" / f"{part}.jsonl")
        posts[split] = [{"prompt": row["prompt"], "completion": row.get("completion", "")} for row in raw]
    write_tldr(hub, {"train": rows, "validation": rows}, posts)
    options = {"judge_workers": 1}
    loaded = load("tldr", options=options)
    local = load("tldr", options=options, path=str(fixtures / "tldr"))
    assert len(loaded.pairs) > 0
    assert loaded.pairs == local.pairs
    assert [row.prompt for row in loaded.prompts] == [row.prompt for row in local.prompts]


def test_shp_reads_the_folders_of_all_subreddits(hub, fixtures):
    splits = ("train", "validation", "test")
    write_shp(hub, {split: list(read_file(fixtures / "shp" / f"{split}.jsonl")) for split in splits})
    options = {"max_tokens": None}
    loaded = load("shp", options=options, partition="dirichlet", clients=2)
    local = load("shp", options=options, partition="dirichlet", clients=2, path=str(fixtures / "shp"))
    assert len(loaded.pairs) > 0
    assert set(loaded.pairs) == set(local.pairs)


def test_hh_rlhf_reads_one_folder_with_its_splits(hub):
    for start, subset in ((0, "helpful-base"), (100, "harmless-base")):
        middle = start + 20
        splits = {"train": dialogues(range(start, middle)), "test": dialogues(range(middle, middle + 5))}
        write_hh(hub, subset, splits)
    loaded = load("hh-rlhf", options={"subset": "helpful-base", "align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 25
    assert [row.split for row in loaded.pairs].count("test") == 5
    assert all(int(row.prompt.split()[-1]) < 100 for row in loaded.pairs)


def test_imdb_has_prompts_in_its_completions_and_two_splits(hub):
    write_imdb(hub, {"train": range(20), "test": range(20, 24)})
    loaded = load("imdb", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 24
    assert [row.split for row in loaded.pairs].count("test") == 4
    assert not loaded.pairs[0].chosen.startswith("I saw")


def test_ultrafeedback_keeps_its_test_split(hub):
    write_ultrafeedback(hub, range(30), range(30, 35))
    loaded = load("ultrafeedback", options={"align_share": 0, "judge_share": 0})
    assert [row.split for row in loaded.pairs].count("test") == 5
    assert len(loaded.pairs) == 35


def test_webgpt_reads_the_conversion_of_its_script(hub):
    write_webgpt(hub, range(30))
    loaded = load("webgpt", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 30
    assert {row.margin for row in loaded.pairs} == {1.0}


def test_a_file_at_the_root_of_a_data_set_is_read_beside_others(hub):
    write_py_dpo(hub, range(30))
    assert len(load("py-dpo", options={"align_share": 0, "judge_share": 0}).pairs) == 30
    write_code_vulnerability(hub, range(30))
    loaded = load("code-vulnerability", options={"align_share": 0, "judge_share": 0})
    assert len(loaded.pairs) == 30
    write_safe_rlhf_prompts(hub, range(9))
    loaded = sources.load_prompts(PromptsConfig(source="safe-rlhf"), "data.align_prompts", 0)
    assert len(loaded.prompts) == 9


# --- questions

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
    write_question_set(hub, name)
    (question,), dropped = load_questions(name)
    assert question.set == name
    assert dict(question.options)[question.answer] == RIGHT[name]
    assert not dropped


@pytest.mark.parametrize("name", ["aqua", "cose", "csqa", "mathqa", "medmcqa", "medqa", "piqa"])
def test_a_recipe_may_name_another_split_of_a_question_set(hub, name):
    write_question_set(hub, name, held_out=3)
    assert len(load_section(QuestionsConfig(set=name, split="validation"), 0, "k")[0]) == 3
    assert len(load_section(QuestionsConfig(set=name), 0, "k")[0]) == 1


def test_a_split_of_a_local_file_is_refused():
    with pytest.raises(ValidationError, match="split 'test' is of the hub set, and path names a local file"):
        QuestionsConfig(set="aqua", split="test", path="aqua.jsonl")


def test_different_splits_of_a_set_may_have_the_same_part():
    trees = "thoughts={questions: [{set: aqua}]}"
    answers = "evaluation.questions={questions: [{set: aqua, split: SPLIT}]}"
    data = "data={source: thoughts, partition: natural}"
    load_recipe("debug", [data, trees, answers.replace("SPLIT", "test")])
    with pytest.raises(RecipeError, match="have questions in common"):
        load_recipe("debug", [data, trees, answers.replace("SPLIT", "train")])
