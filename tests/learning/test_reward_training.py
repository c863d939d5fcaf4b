"""Rewards that are no ready classifier: trained here by TRL, Python functions, and what is refused."""

import json
import math

import numpy as np
import pytest
from datasets import Dataset
from pydantic import ValidationError

from components.config import RecipeError, RewardConfig
from components.data.records import DataError
from components.learning.reward import build_reward, train_reward, trained_reward
from components.models.backbone import BackboneError
from components.models.reward_functions import REWARD_FUNCTIONS, find_reward_function, reward_function

CONFIG = RewardConfig(kind="trained", template="{prompt}|{response}", max_length=64, training={"backbone": {"name": "tiny-random"}, "lora": {"dropout": 0.0}, "steps": 30, "batch_size": 8, "lr": 1e-2})


def pairs(count, split, client="judge"):
    return [{"pair_id": f"{split}{n}", "client_id": client, "split": split, "domain": "d", "prompt": f"q{n}", "chosen": "aaaa" + "b" * (n % 4), "rejected": "zzzz" + "b" * (n % 3)} for n in range(count)]


@pytest.fixture
def prepared(tmp_path):
    Dataset.from_list([*pairs(32, "train"), *pairs(9, "test")]).to_parquet(tmp_path / "judge.parquet")
    return tmp_path


def test_a_reward_that_is_trained_here_learns_its_pairs_and_is_an_ordinary_classifier_afterwards(prepared, tmp_path):
    from transformers import AutoModelForSequenceClassification

    seen = []
    score, figures = build_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu", lambda step, loss: seen.append((step, loss)))
    assert figures["accuracy"] == 1.0 and (figures["pairs"], figures["held_out_pairs"]) == (32, 9)
    assert [step for step, _ in seen] == list(range(1, 31)) and seen[0][1] == pytest.approx(math.log(2), abs=1e-5) and seen[-1][1] < 0.2   # the output begins at 0
    good, bad = score(["q1", "q2"], ["aaaa", "zzzz"])
    assert good > bad + 1
    (folder,) = (tmp_path / "rewards").iterdir()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1 and not any("lora" in name for name, _ in model.named_parameters())
    other, _ = build_reward(RewardConfig(name=str(folder), template="{prompt}|{response}", max_length=64), prepared, tmp_path, 0, "cpu")
    assert np.allclose(other(["q1"], ["aaaa"]), good)


def test_it_is_trained_once_for_its_recipe_seed_and_rows_and_one_that_was_stopped_is_begun_anew(prepared, tmp_path, monkeypatch):
    from components.learning import reward

    folder, figures = trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu")
    weights = (folder / "model.safetensors").read_bytes()
    real = reward.train_reward
    monkeypatch.setattr(reward, "train_reward", lambda *_: pytest.fail("trained again"))
    assert trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu") == (folder, figures)
    monkeypatch.setattr(reward, "train_reward", real)
    assert trained_reward(CONFIG, prepared, tmp_path / "rewards", 4, "cpu")[0] != folder
    (folder / "figures.json").unlink()      # killed before its last word
    (folder / "model.safetensors").write_bytes(b"half")
    assert trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu") == (folder, figures) and (folder / "model.safetensors").read_bytes() == weights
    assert json.loads((folder / "figures.json").read_text())["seed"] == 3
    monkeypatch.setattr(reward, "WAY", reward.WAY + 1)
    assert trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu")[0] != folder


def test_of_two_runs_that_train_the_same_reward_the_later_one_takes_the_first_ones(prepared, tmp_path, monkeypatch):
    from components.learning import reward

    real, seen = reward.train_reward, []

    def while_another_finishes(*given):
        monkeypatch.setattr(reward, "train_reward", real)
        folder, _ = trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu")
        seen.append((folder, (folder / "model.safetensors").stat().st_ino))
        return real(*given)

    monkeypatch.setattr(reward, "train_reward", while_another_finishes)
    folder, _ = trained_reward(CONFIG, prepared, tmp_path / "rewards", 3, "cpu")
    assert seen == [(folder, (folder / "model.safetensors").stat().st_ino)] and list((tmp_path / "rewards").iterdir()) == [folder]


def test_more_layers_than_the_backbone_has_are_refused_and_so_is_a_backbone_that_is_not_there():
    for backbone, words in (({"name": "tiny-random", "layers": 50}, "has 2 layers, but 50"), ({"name": "/nowhere/at/all"}, "/nowhere/at/all")):
        training = {"backbone": backbone, "steps": 1}
        with pytest.raises(BackboneError, match=words):
            train_reward(RewardConfig(kind="trained", template="{prompt}|{response}", training=training), pairs(8, "train"), 0, "cpu")


def test_the_process_draws_the_same_numbers_whether_a_reward_was_trained_or_not(prepared):
    import torch

    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    train_reward(CONFIG.model_copy(update={"training": CONFIG.training.model_copy(update={"steps": 1})}), pairs(8, "train"), 0, "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_without_pairs_of_owners_outside_the_federation_it_is_refused(tmp_path):
    Dataset.from_list(pairs(4, "train")).to_parquet(tmp_path / "judge.parquet")
    with pytest.raises(DataError, match="4 training and 0 held-out pairs"):
        trained_reward(CONFIG, tmp_path, tmp_path / "rewards", 0, "cpu")


def test_clean_language_scores_above_insults_and_the_prompt_does_not_count():
    pytest.importorskip("profanity_check")
    score, known = build_reward(RewardConfig(kind="function", name="clean"), None, None, 0, "cpu")
    scores = score(["you idiot", "hello", "hello"], ["have a nice day", "you are a stupid idiot", "go to hell, moron"])
    assert known == {} and scores.dtype == np.float64 and scores[0] > 2 and scores[1:].max() < -2 and np.abs(scores).max() <= 10


def test_a_function_of_ones_own_is_registered_or_given_by_its_module():
    assert find_reward_function("tests.learning.test_multi_objective:long")(["q"], ["four"]).tolist() == [4.0]
    with pytest.raises(ValueError, match="there is a reward function 'clean' already"):
        reward_function("clean")(lambda prompts, responses: np.zeros(len(responses)))
    try:
        reward_function("mine")(lambda prompts, responses: np.ones(len(responses)))
        assert find_reward_function("mine")(["q"], ["r"]).tolist() == [1.0]
    finally:
        REWARD_FUNCTIONS.pop("mine")


@pytest.mark.parametrize(("name", "words"), [
    ("claen", "Did you mean 'clean'"), ("nowhere.at_all:f", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"), ("math:nothing", "cannot be imported"), (".x:f", "cannot be imported: TypeError"), ("math:pi", "is a float, and must be a function")])
def test_a_function_that_is_not_there_is_named(name, words):
    with pytest.raises(RecipeError, match=words):
        find_reward_function(name)


@pytest.mark.parametrize(("section", "words"), [
    ({"kind": "trained"}, "needs a template"), ({"kind": "trained", "template": "{prompt} {response}", "name": "x"}, "leave out name"), ({"kind": "function"}, "a function needs a name"),
    ({"kind": "trained", "template": "{prompt} {response}", "output": 1}, "leave out output and revision"), ({"kind": "trained", "template": "{prompt} {response}", "training": {"backbone": {"name": "embedded", "dtype": "bfloat16"}}}, "trained in float32"),
    ({"kind": "function", "name": "clean", "output": 1}, "output is of classifiers"), ({"name": "x", "training": {}}, "training is of kind 'trained'"), ({"kind": "judge", "max_length": 64}, "max_length is of classifiers")])
def test_sections_that_contradict_themselves_are_refused(section, words):
    with pytest.raises(ValidationError, match=words):
        RewardConfig.model_validate(section)
    assert RewardConfig.model_validate(CONFIG.model_dump(mode="json")) == CONFIG


def test_a_judge_is_no_reward_of_a_single_response(tmp_path):
    with pytest.raises(TypeError, match="compares two responses"):
        build_reward(RewardConfig(kind="judge"), tmp_path, tmp_path, 0, "cpu")
