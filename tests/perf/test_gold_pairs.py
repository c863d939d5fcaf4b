"""Pairs that a policy sampled, labeled by ROUGE-L against expert summaries."""

import json

import pytest

from components.config import DataConfig, RecipeError, check_section
from components.data.sources import load
from components.data.sources.aclsum import ASPECTS, Paper, read_papers
from components.io import write_json
from components.models.policy import Policy
from components.recipes import load_recipe
from perf.gold_pairs import GoldSettings, gold_scores, make_pairs, papers_of, rouge_l, sample_completions

SUMMARIES = {"challenge": "parsing is slow", "approach": "we prune the search", "outcome": "twice as fast"}
PAPERS = [Paper(f"p{n}", f"TITLE: paper {n}", "lead", SUMMARIES) for n in range(4)]
TEXTS = ["parsing is slow today", "we prune the search", "twice as fast", "nothing"]
COMPLETIONS = {paper.id: TEXTS for paper in PAPERS}


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    assert rouge_l("a b c d", "a x c d") == pytest.approx(0.75)
    assert rouge_l("a b", "c d") == 0.0


def test_the_chosen_text_is_closer_to_the_summary_of_the_annotators_aspect():
    rows = list(make_pairs(PAPERS, COMPLETIONS, GoldSettings(papers=4), annotators=6))
    assert {row["client_id"]: row["domain"] for row in rows} == {
        f"annotator-0{n}": ASPECTS[n % 3] for n in range(6)
    }
    for row in rows:
        reference = SUMMARIES[row["domain"]]
        assert rouge_l(row["chosen"], reference) > rouge_l(row["rejected"], reference)


def test_a_completion_is_in_one_pair_of_an_annotator_and_papers_are_drawn_without_replacement():
    rows = list(make_pairs(PAPERS, COMPLETIONS, GoldSettings(papers=3), annotators=1))
    texts = [(row["prompt"], text) for row in rows for text in (row["chosen"], row["rejected"])]
    assert len(set(texts)) == len(texts)
    assert len({row["prompt"] for row in rows}) <= 3


def test_completions_of_equal_score_or_without_text_make_no_pair():
    equal = {paper.id: ["other", "words"] for paper in PAPERS}
    empty = {paper.id: ["", "parsing is slow"] for paper in PAPERS}
    assert list(make_pairs(PAPERS, equal, GoldSettings(), 3)) == []
    assert list(make_pairs(PAPERS, empty, GoldSettings(), 3)) == []


def test_the_pairs_of_a_policys_samples_are_read_as_clients(debug, tmp_path):
    policy = Policy(debug.policy, "cpu")
    papers = papers_of(debug)[:12]
    settings = GoldSettings(papers=12, completions=6, temperature=1.5)
    completions = sample_completions(policy, papers, settings)
    assert completions == sample_completions(policy, papers, settings)
    rows = list(make_pairs(papers, completions, settings))
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = {"source": "jsonl", "path": str(path), "options": {"judge_clients": 0.2, "align_share": 0.2}}
    source = load(check_section(DataConfig, values, "recipe.yaml", "data"), 0)
    owners = {pair.client_id for pair in source.pairs}
    assert owners <= {row["client_id"] for row in rows}
    assert not owners & {pair.client_id for pair in source.judge}


def test_a_recipe_of_other_texts_has_no_gold_summaries():
    with pytest.raises(RecipeError, match="data.source is 'chitchat'"):
        papers_of(load_recipe("debug", ["data={source: chitchat}"]))


def test_the_gold_score_of_a_run_is_the_mean_over_answers_and_aspects(tmp_path):
    paper = read_papers()[0]
    own = {"text": paper.summaries["outcome"]}
    rows = [{"prompt": paper.prompt, "aligned": own, "base": {"text": "zzz"}}]
    write_json(tmp_path / "evaluation" / "answers.json", rows)
    scores = gold_scores(tmp_path)
    assert scores["aligned"]["outcome"] == pytest.approx(1.0)
    assert scores["aligned"]["gold"] == pytest.approx(sum(scores["aligned"][name] for name in ASPECTS) / 3)
    assert scores["base"]["gold"] == 0.0
