"""Prompt sources, and what a recipe puts in place of the prompts that come with its pairs."""

import json

import pytest

from components.config import PromptsConfig, check_section
from components.data import sources
from components.data.data_report import PromptSummary
from components.data.prepare import prepare
from components.data.prompts import server_prompts
from components.data.records import DataError
from tests.support.sources import data_config, prepared_rows, write_jsonl


@pytest.fixture
def prompts(fixtures):
    return fixtures / "prompts"


@pytest.fixture
def own(fixtures):
    return {"source": "jsonl", "path": str(fixtures / "pairs.jsonl")}


def load(source, path=None, **options):
    values = {"source": source, "path": path and str(path), "options": options}
    section = check_section(PromptsConfig, values, "recipe.yaml", "data.align_prompts")
    return sources.load_prompts(section, "data.align_prompts", 0)


def written(path, *prompts):
    return write_jsonl(path, [{"prompt": text} for text in prompts])


def test_alpaca_eval_reads_the_805_instructions_of_the_real_sample(samples):
    data = load("alpaca_eval", samples / "alpaca_eval" / "gpt4_1106_preview.model_outputs.json")
    assert len(data.prompts) + sum(data.dropped.values()) == 805
    assert len(data.prompts) >= 800
    assert data.answers_author == "gpt4_1106_preview"
    assert all(len(references) == 1 for _, references in data.prompts)


def test_a_hub_file_that_cannot_be_reached_names_the_key_that_takes_a_local_copy(monkeypatch):
    import huggingface_hub

    def hf_hub_download(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot find the file\nand a long tail")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    with pytest.raises(
        DataError,
        match=r"^data.align_prompts: tatsu-lab/alpaca_eval .*the file\. .* as data.align_prompts.path,",
    ):
        load("alpaca_eval")


# --- in place of the pairs' own


def chosen(own, seed=0, **sections):
    """The server's prompts by split with references, their summaries, and the clients' pairs."""
    data = data_config(**own, **sections)
    loaded = sources.load(data, seed)
    known = [(row.prompt, row.split) for row in (*loaded.pairs, *loaded.judge)]
    prompts, summaries = server_prompts(data, loaded.prompts, known, seed)
    by_split = {"align": {}, "test": {}}
    for row in prompts.to_dict("records"):
        by_split[row["split"]][row["prompt"]] = list(row["references"])
    return by_split, summaries, loaded.pairs


def of_split(pairs, split):
    return next(r.prompt for r in pairs if r.split == split)


def test_prompts_of_another_data_set_replace_those_of_one_split_only(own, prompts):
    align = {"source": "safe-rlhf", "path": str(prompts / "safe_rlhf.jsonl")}
    test = {"source": "alpaca_eval", "path": str(prompts / "alpaca_eval.json")}
    plain, nothing, pairs = chosen(own)
    first, notes, same = chosen(own, align_prompts=align)
    both, _, _ = chosen(own, align_prompts=align, test_prompts=test)
    assert nothing == {}
    assert pairs == same
    assert first["test"] == plain["test"]
    assert not set(first["align"]) & set(plain["align"])
    assert len(first["align"]) == 4
    assert both["align"] == first["align"]
    assert both["test"] == {
        r["instruction"]: [r["output"]] for r in json.loads((prompts / "alpaca_eval.json").read_text())
    }
    assert notes == {
        "align": PromptSummary(source="safe-rlhf", left_out={"prompt that came before": 1, "empty prompt": 1})
    }


def test_prompts_of_another_data_set_are_prepared_and_reported(own, prompts, tmp_path):
    sections = {
        "align_prompts": {"source": "safe-rlhf", "path": str(prompts / "safe_rlhf.jsonl")},
        "test_prompts": {"source": "alpaca_eval", "path": str(prompts / "alpaca_eval.json")},
    }
    report = prepare(data_config(**own, **sections), 0, tmp_path / "data")
    prompts_by_split, notes, _ = chosen(own, **sections)
    rows = prepared_rows(tmp_path / "data", "prompts")
    assert {r["prompt"]: r["references"] for r in rows} == prompts_by_split["align"] | prompts_by_split[
        "test"
    ]
    assert report.prompts == notes
    assert report.rows.prompts == {"align": 4, "test": 5}
    assert notes["test"].references == "a-model"


def test_a_prompt_of_a_pair_with_other_spacing_is_not_aligned_on_and_is_counted(own, tmp_path):
    _, _, pairs = chosen(own)
    path = written(
        tmp_path / "align.jsonl",
        "A new question?",
        of_split(pairs, "train").upper().replace(" ", "  "),
        of_split(pairs, "test"),
    )
    prompts_by_split, notes, _ = chosen(own, align_prompts={"source": "safe-rlhf", "path": path})
    assert set(prompts_by_split["align"]) == {"A new question?"}
    assert notes["align"].left_out == {"in a pair or to be evaluated on": 2}


def test_a_prompt_that_is_trained_on_is_not_evaluated_on_but_one_of_a_held_out_pair_may_be(own, tmp_path):
    _, _, pairs = chosen(own)
    path = written(
        tmp_path / "test.jsonl", "A new question?", of_split(pairs, "train"), of_split(pairs, "test")
    )
    prompts_by_split, notes, _ = chosen(own, test_prompts={"source": "safe-rlhf", "path": path})
    assert set(prompts_by_split["test"]) == {"A new question?", of_split(pairs, "test")}
    assert notes["test"].left_out == {"in a training or validation pair": 1}


def test_a_prompt_of_a_validation_pair_is_not_evaluated_on(own, tmp_path):
    _, _, pairs = chosen(own)
    only = of_split(pairs, "validation")
    assert {r.split for r in pairs if r.prompt == only} == {"validation"}
    prompts_by_split, notes, _ = chosen(
        own,
        test_prompts={
            "source": "safe-rlhf",
            "path": written(tmp_path / "test.jsonl", "A new question?", only),
        },
    )
    assert set(prompts_by_split["test"]) == {"A new question?"}
    assert notes["test"].left_out == {"in a training or validation pair": 1}


def test_a_prompt_to_evaluate_on_is_not_aligned_on_although_it_came_with_the_pairs(own, tmp_path):
    many = own | {"options": {"align_share": 0.5}}
    plain, _, _ = chosen(many)
    taken = next(iter(plain["align"]))
    prompts_by_split, notes, _ = chosen(
        many,
        test_prompts={"source": "safe-rlhf", "path": written(tmp_path / "p.jsonl", "A new question?", taken)},
    )
    assert taken in prompts_by_split["test"]
    assert taken not in prompts_by_split["align"]
    assert len(prompts_by_split["align"]) == len(plain["align"]) - 1 > 0
    assert notes["align"] == PromptSummary(source="jsonl", left_out={"in a pair or to be evaluated on": 1})


def test_a_source_without_prompts_of_its_own_to_align_on_may_have_others_to_evaluate_on(own, prompts):
    prompts_by_split, _, _ = chosen(
        own | {"options": {"align_share": 0.0}},
        test_prompts={"source": "alpaca_eval", "path": str(prompts / "alpaca_eval.json")},
    )
    assert prompts_by_split["align"] == {}
    assert len(prompts_by_split["test"]) == 5


def test_max_prompts_is_a_seeded_sample(own, tmp_path):
    section = {
        "source": "safe-rlhf",
        "path": written(tmp_path / "p.jsonl", *(f"Question {i}?" for i in range(50))),
        "max_prompts": 7,
    }
    (first, notes, _), (again, _, _), (other, _, _) = (
        chosen(own, seed, align_prompts=section) for seed in (0, 0, 1)
    )
    assert len(first["align"]) == 7
    assert notes["align"].left_out == {"over max_prompts": 43}
    assert first["align"] == again["align"] != other["align"]


def test_prompts_that_are_all_in_the_pairs_are_refused(own, tmp_path):
    _, _, pairs = chosen(own)
    path = written(tmp_path / "p.jsonl", *list({r.prompt: None for r in pairs})[:3])
    with pytest.raises(DataError, match=r"data.align_prompts: of the 3 prompts of safe-rlhf none is left"):
        chosen(own, align_prompts={"source": "safe-rlhf", "path": path})
