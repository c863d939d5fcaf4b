"""The embedded judge: a selector that is trained once for each recipe."""

import shutil

import numpy as np
import pytest
from datasets import Dataset

from components.data.records import DataError, read_pairs
from components.data.templates import load as load_template
from components.evaluation.judges.judge import JudgeResources
from components.evaluation.winrate import Verdict
from components.learning import selector_training
from components.models.selector import Comparison

FIRST, SECOND, TIE, _ = Verdict
COMPARISONS = [Comparison("p", "a " * count, "bb") for count in range(1, 9)]


@pytest.fixture(scope="module")
def section(debug):
    return debug.evaluation.judge


@pytest.fixture(scope="module")
def judge(section, prepared, tmp_path_factory):
    """The trained judge of the debug recipe."""
    return section.build(JudgeResources(prepared, tmp_path_factory.mktemp("judge"), 0, "cpu"))


@pytest.fixture
def trainings(monkeypatch):
    """The training pairs of each training."""
    pairs_of_trainings = []
    train = selector_training.train_selector

    def record_and_train(selector, pairs, *arguments):
        pairs_of_trainings.append(pairs)
        return train(selector, pairs, *arguments)

    monkeypatch.setattr(selector_training, "train_selector", record_and_train)
    return pairs_of_trainings


def with_rows(prepared, folder, change):
    """A copy of a prepared folder with other judge's pairs."""
    shutil.copytree(prepared, folder)
    rows = Dataset.from_parquet(str(folder / "judge.parquet")).to_list()
    Dataset.from_list(change(rows)).to_parquet(folder / "judge.parquet")
    return folder


def test_a_judge_is_trained_once_on_its_training_pairs_alone_and_then_read_from_the_cache(
    section, prepared, tmp_path, trainings
):
    resources = JudgeResources(prepared, tmp_path, 0, "cpu")
    first = section.build(resources)
    second = section.build(resources)
    assert len(trainings) == 1
    assert (first.selector.logits(COMPARISONS) == second.selector.logits(COMPARISONS)).all()
    assert first.figures == second.figures
    section.build(JudgeResources(prepared, tmp_path, 0, "cpu"))
    assert {(pair.client_id, pair.split) for pair in trainings[0]} == {("judge", "train")}


def test_the_figures_of_a_judge_are_its_accuracy_on_held_out_pairs_and_their_number(judge, prepared):
    held_out = read_pairs(prepared / "judge.parquet", split="test")
    assert 0 <= judge.figures["judge_accuracy"] <= 1
    assert {"judge_accuracy/common", "judge_accuracy/own"} <= judge.figures.keys()
    assert judge.figures["judge_pairs"] == 6
    assert judge.figures["judge_held_out_pairs"] == len(held_out)


def test_a_judge_is_described_by_its_backbone_and_writes_no_texts(judge):
    assert "tiny-random" in judge.description
    judge.compare(COMPARISONS)
    assert judge.texts == []


def test_the_accuracy_is_measured_on_pairs_that_the_judge_was_not_trained_on(
    section, prepared, tmp_path, monkeypatch
):
    measured = []
    score = selector_training.score_pairs

    def record_and_score(selector, pairs):
        measured.extend(pairs)
        return score(selector, pairs)

    monkeypatch.setattr(selector_training, "score_pairs", record_and_score)
    section.build(JudgeResources(prepared, tmp_path, 0, "cpu"))
    assert {pair.split for pair in measured} == {"test"}
    assert len(measured) == 4


def test_a_verdict_is_the_larger_logit_in_the_given_order(judge):
    logits = judge.selector.logits(COMPARISONS)
    expected = [FIRST if a > b else SECOND if a < b else TIE for a, b in logits]
    assert judge.compare(COMPARISONS) == expected
    assert len(np.unique(logits)) > 1


def test_the_policys_template_changes_neither_the_judges_input_nor_its_cache(
    section, prepared, tmp_path, trainings, monkeypatch
):
    template = load_template("summarization/policy", "policy")
    inputs = []
    verdicts = []
    for policy in (None, template):
        judge = section.build(JudgeResources(prepared, tmp_path, 0, "cpu", policy=policy))
        encode = judge.selector.encode
        encoded = []

        def record_and_encode(*arguments, encode=encode, encoded=encoded):
            encoded.append(encode(*arguments))
            return encoded[-1]

        monkeypatch.setattr(judge.selector, "encode", record_and_encode)
        verdicts.append(judge.compare(COMPARISONS[:4]))
        inputs.append(encoded)
    assert len(trainings) == 1
    assert len(inputs[0]) >= 4
    assert inputs[0] == inputs[1]
    assert verdicts[0] == verdicts[1]


def fewer_steps(section):
    return section.model_copy(update={"steps": section.steps - 1})


def other_rate(section):
    optimizer = section.optimizer.model_copy(update={"lr": 0.02})
    return section.model_copy(update={"optimizer": optimizer})


def fewer_layers(section):
    backbone = section.selector.backbone.model_copy(update={"layers": 1})
    selector = section.selector.model_copy(update={"backbone": backbone})
    return section.model_copy(update={"selector": selector})


@pytest.mark.parametrize("change", [fewer_steps, other_rate, fewer_layers])
def test_a_judge_with_another_section_is_trained_again(section, prepared, tmp_path, trainings, change):
    resources = JudgeResources(prepared, tmp_path, 0, "cpu")
    section.build(resources)
    change(section).build(resources)
    assert len(trainings) == 2


def test_a_judge_with_another_seed_is_trained_again(section, prepared, tmp_path, trainings):
    for seed in (0, 1):
        section.build(JudgeResources(prepared, tmp_path, seed, "cpu"))
    assert len(trainings) == 2


def test_a_judge_with_other_pairs_is_trained_again(section, prepared, tmp_path, trainings):
    changed = with_rows(
        prepared, tmp_path / "prepared", lambda rows: [*rows[:-1], rows[-1] | {"rejected": "other"}]
    )
    for folder in (prepared, changed):
        section.build(JudgeResources(folder, tmp_path / "cache", 0, "cpu"))
    assert len(trainings) == 2


@pytest.fixture
def without_held_out(prepared, tmp_path):
    """A prepared folder whose judge has training pairs only."""
    return with_rows(
        prepared, tmp_path / "prepared", lambda rows: [row for row in rows if row["split"] == "train"]
    )


def test_a_judge_without_held_out_pairs_is_refused_before_a_run_and_not_trained(
    section, without_held_out, tmp_path, trainings
):
    with pytest.raises(DataError, match="6 training and 0 held-out pairs.*'selector'"):
        section.check_data(without_held_out)
    with pytest.raises(DataError, match="6 training and 0 held-out pairs.*'selector'"):
        section.build(JudgeResources(without_held_out, tmp_path / "cache", 0, "cpu"))
    assert trainings == []


def test_a_judge_with_pairs_is_accepted_before_a_run(section, prepared):
    section.check_data(prepared)
