"""Rewards that are trained here by TRL: what they learn, their cache, and what is refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.data.records import DataError, Pair, pairs_frame, write_table
from components.learning import reward_model
from components.learning.reward_model import TrainedReward, train_reward
from components.models.backbone import BackboneError
from components.models.rewards.classifier import ClassifierReward
from components.models.rewards.reward_section import RewardResources


def build_section(steps=1, **training):
    """The section of a reward that is trained from the tiny backbone."""
    training = {
        "backbone": {"name": "tiny-random"},
        "lora": {"dropout": 0.0},
        "steps": steps,
        "batch_size": 8,
        "lr": 1e-2,
    } | training
    return TrainedReward(template="{prompt}|{response}", max_length=64, training=training)


ONE_STEP = build_section(steps=1)


def pairs(count, split):
    """Pairs whose chosen response consists of a's and whose rejected response consists of z's."""
    return [
        Pair(
            prompt=f"q{n}",
            chosen="aaaa" + "b" * (n % 4),
            rejected="zzzz" + "b" * (n % 3),
            client_id="judge",
            split=split,
        )
        for n in range(count)
    ]


def write_judge_pairs(folder: Path, train=32, test=9) -> Path:
    folder.mkdir(exist_ok=True)
    frame = pairs_frame([*pairs(train, "train"), *pairs(test, "test")], "own")
    write_table(folder / "judge.parquet", frame)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with 32 training and 9 held-out pairs of owners outside the federation."""
    return write_judge_pairs(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def place(debug, prepared, tmp_path):
    """A maker of what a reward is prepared with, in a cache of the test's own."""

    def make(seed=3, prepared=prepared):
        return RewardResources(prepared, tmp_path / "cache", seed, "cpu", debug.evaluation.judge)

    return make


# --- training


@pytest.fixture(scope="module")
def trained(debug, prepared, tmp_path_factory):
    """A reward after 30 steps: its section, its folder, its figures and the reported steps."""
    torch.set_num_threads(1)
    section = build_section(steps=30)
    reported = []
    cache = tmp_path_factory.mktemp("cache")
    resources = RewardResources(prepared, cache, 3, "cpu", debug.evaluation.judge)
    result = section.prepare(resources, lambda step, loss: reported.append((step, loss)))
    return SimpleNamespace(section=section, folder=result.folder, figures=result.figures, reported=reported)


def test_a_trained_reward_tells_the_held_out_pairs_apart(trained):
    assert trained.figures["accuracy"] == 1.0
    assert trained.figures["pairs"] == 32
    assert trained.figures["held_out_pairs"] == 9


def test_training_reports_each_step_and_lowers_the_loss_from_that_of_an_output_of_0(trained):
    assert [step for step, _ in trained.reported] == list(range(1, 31))
    assert trained.reported[0][1] == pytest.approx(math.log(2), abs=1e-5)
    assert trained.reported[-1][1] < 0.2
    assert trained.figures["loss_last"] == trained.reported[-1][1]


def test_a_trained_reward_has_the_scores_of_a_classifier_reward_of_its_folder(trained):
    classifier = ClassifierReward(name=str(trained.folder), template="{prompt}|{response}", max_length=64)
    scores, expected = (
        reward.load("cpu", folder)(["q1", "q2"], ["aaaa", "zzzz"])
        for reward, folder in ((trained.section, trained.folder), (classifier, None))
    )
    assert np.allclose(scores, expected)


def test_pairs_are_scored_by_their_two_responses(trained, debug, prepared):
    resources = RewardResources(prepared, trained.folder.parents[1], 3, "cpu", debug.evaluation.judge)
    made = trained.section.prepare(resources)
    scores = trained.section.load_pair_scorer(debug, "cpu", made.folder)(pairs(3, "train"))
    assert scores.shape == (3, 2)
    assert (scores[:, 0] > scores[:, 1] + 1).all()
    assert made.figures == trained.figures


def test_training_does_not_change_the_global_generator():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    train_reward(ONE_STEP, pairs(8, "train"), 0, "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)


# --- the cache


@pytest.fixture(scope="module")
def one_step():
    """The model, the tokenizer and the losses of ONE_STEP on the prepared pairs."""
    torch.set_num_threads(1)
    return train_reward(ONE_STEP, pairs(32, "train"), 3, "cpu")


@pytest.fixture
def trainings(one_step, monkeypatch):
    """Seeds of the trainings that are started; each returns the result of one step."""
    seeds = []

    def record(reward, rows, seed, *options):
        seeds.append(seed)
        return one_step

    monkeypatch.setattr(reward_model, "train_reward", record)
    return seeds


def test_a_reward_is_trained_once_for_the_same_section_seed_and_rows(place, trainings):
    first = ONE_STEP.prepare(place())
    assert ONE_STEP.prepare(place()) == first
    assert len(trainings) == 1


@pytest.mark.parametrize("change", ["seed", "section", "rows", "version"])
def test_another_seed_section_version_or_other_rows_have_a_training_of_their_own(
    place, prepared, trainings, tmp_path, monkeypatch, change
):
    first = ONE_STEP.prepare(place())
    if change == "version":
        monkeypatch.setattr(TrainedReward, "artifact_version", TrainedReward.artifact_version + 1)
    section = build_section(lr=2e-2) if change == "section" else ONE_STEP
    rows = write_judge_pairs(tmp_path / "other", train=31) if change == "rows" else prepared
    seed = 4 if change == "seed" else 3
    assert section.prepare(place(seed, rows)).folder != first.folder
    assert trainings == [3, seed]


def test_the_record_of_a_training_contains_what_the_key_is_made_of(place, trainings):
    folder = ONE_STEP.prepare(place()).folder
    record = json.loads((folder / "figures.json").read_text())
    assert record["seed"] == 3
    assert record["version"] == TrainedReward.artifact_version
    assert record["reward"] == ONE_STEP.model_dump(mode="json")


def test_a_training_that_was_stopped_is_repeated_with_the_same_bytes(place, trainings, monkeypatch):
    first = ONE_STEP.prepare(place())
    weights = (first.folder / "model.safetensors").read_bytes()
    (first.folder / "figures.json").unlink()  # written last
    (first.folder / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(reward_model, "train_reward", train_reward)
    assert ONE_STEP.prepare(place()) == first
    assert (first.folder / "model.safetensors").read_bytes() == weights


def test_the_later_of_two_runs_that_train_the_same_reward_uses_that_of_the_first(
    place, one_step, monkeypatch, tmp_path
):
    inodes = []

    def train_while_another_run_finishes(*arguments):
        monkeypatch.setattr(reward_model, "train_reward", lambda *arguments: one_step)
        folder = ONE_STEP.prepare(place()).folder
        inodes.append((folder / "model.safetensors").stat().st_ino)
        return one_step

    monkeypatch.setattr(reward_model, "train_reward", train_while_another_run_finishes)
    folder = ONE_STEP.prepare(place()).folder
    assert inodes == [(folder / "model.safetensors").stat().st_ino]
    assert list((tmp_path / "cache" / "rewards").iterdir()) == [folder]


# --- what is refused


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ({"name": "tiny-random", "layers": 50}, "'tiny-random' has 2 layers, but 50"),
        ({"name": "/nowhere/at/all"}, "the tokenizer of '/nowhere/at/all' cannot be read"),
    ],
)
def test_a_backbone_that_cannot_be_opened_is_refused_with_the_reason(backbone, words):
    with pytest.raises(BackboneError, match=words):
        train_reward(build_section(backbone=backbone), pairs(8, "train"), 0, "cpu")


def test_without_held_out_pairs_the_training_is_refused_with_both_numbers(place, tmp_path):
    with pytest.raises(DataError, match="4 training and 0 held-out pairs"):
        ONE_STEP.prepare(place(prepared=write_judge_pairs(tmp_path, train=4, test=0)))


def test_loading_a_reward_that_has_not_been_trained_is_refused():
    with pytest.raises(DataError, match="kind 'trained' has not been trained"):
        ONE_STEP.load("cpu", None)
