"""Classifier rewards: the scores of a tiny classifier, its input formats, and what is refused."""

import numpy as np
import pytest
import torch

from components.data.records import Pair
from components.models.backbone import BackboneError, fetch_backbone
from components.models.rewards.classifier import ClassifierReward, ResponseFormat, RewardModel
from tests.support.recording import record_calls

PROMPTS = ["why?", "a longer question than the others", "why?", "so"]
RESPONSES = ["because", "it is", "no reason at all, really", "yes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random classifier with two outputs, over the tiny backbone's bytes."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    source = fetch_backbone("tiny-random")
    folder = tmp_path_factory.mktemp("classifier")
    config = AutoConfig.from_pretrained(source, num_labels=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def load(folder):
    """A maker of reward models over the tiny classifier."""
    return lambda **settings: RewardModel(ClassifierReward(name=str(folder), **settings), "cpu")


# --- scores

TEMPLATE = "Q {prompt} A {response}"


def test_scores_do_not_depend_on_the_batches(load):
    scores = load(template=TEMPLATE, batch_size=3).score(PROMPTS, RESPONSES)
    one_by_one = load(template=TEMPLATE, batch_size=1)
    alone = [
        one_by_one.score([prompt], [response])[0] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert scores.dtype == np.float64
    assert np.allclose(scores, alone, atol=1e-5)
    assert len({round(score, 5) for score in scores}) == 4


@pytest.mark.parametrize(
    ("template", "texts"),
    [(TEMPLATE, ["Q why? A because"]), (None, ["why?", "because"])],
)
@pytest.mark.parametrize("output", [0, 1])
def test_a_score_is_the_chosen_output_of_the_model_on_the_formatted_texts(load, template, texts, output):
    model = load(template=template, output=output)
    with torch.no_grad():
        logits = model.model(**model.tokenizer(*texts, return_tensors="pt")).logits
    assert model.score(["why?"], ["because"])[0] == pytest.approx(float(logits[0, output]), abs=1e-5)
    assert abs(float(logits[0, 0] - logits[0, 1])) > 1e-3


def test_progress_counts_the_distinct_rows(load):
    reported = []
    model = load(batch_size=3)
    model.score(PROMPTS * 2, RESPONSES * 2, lambda done, total: reported.append((done, total)))
    assert reported == [(3, 4), (4, 4)]


def test_a_score_does_not_depend_on_the_order_of_the_rows(load, monkeypatch):
    model = load(template=TEMPLATE, batch_size=3)
    recorded = record_calls(
        monkeypatch, model.model, "forward", lambda **inputs: inputs["input_ids"].tolist()
    )
    prompts = [f"why {n}?" for n in range(8)] * 2
    responses = ["yes", "no!"] * 8
    scores = model.score(prompts, responses)
    batches = list(recorded)
    recorded.clear()
    assert np.array_equal(model.score(prompts[::-1], responses[::-1]), scores[::-1])
    assert recorded == batches
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert np.array_equal(scores[8:], scores[:8])
    assert len(set(scores)) == 8


def test_pairs_are_scored_by_their_two_responses(folder, debug):
    section = ClassifierReward(name=str(folder))
    scores = section.load_pair_scorer(debug, "cpu", None)([Pair("why?", "because", "no")])
    expected = section.load("cpu", None)(["why?", "why?"], ["because", "no"])
    assert scores.shape == (1, 2)
    assert scores[0] == pytest.approx(expected, abs=1e-6)


# --- formats


def encode(model, response_format, prompt, response) -> str:
    """The text that a classifier reads, of at most max_length tokens."""
    ids = response_format.encode(model.tokenizer, [(prompt, response)])["input_ids"]
    assert ids.shape[1] <= response_format.max_length
    return model.tokenizer.decode(ids[0])


def test_fields_in_a_prompt_are_not_filled(load):
    text = encode(load(), ResponseFormat("{prompt}|{response}", 64), "say {response} and {prompt}", "X")
    assert text == "say {response} and {prompt}|X"


@pytest.mark.parametrize(("template", "end"), [("{prompt}|{response}", "the end|yes"), (None, "yes")])
def test_a_long_prompt_is_truncated_and_the_response_is_not(load, template, end):
    text = encode(load(), ResponseFormat(template, 16), "x" * 100 + " the end", "yes")
    assert len(text) == 16
    assert text.endswith(end)


@pytest.mark.parametrize("template", [None, "{prompt}|{response}"])
def test_a_response_longer_than_the_input_loses_its_end_and_a_part_of_the_prompt_stays(load, template):
    model = load(max_length=16, template=template)
    score = model.score(["why"], ["yes " * 50])[0]
    assert np.isfinite(score)
    assert score == pytest.approx(model.score(["why"], ["yes " * 60])[0], abs=1e-6)
    assert score != pytest.approx(model.score(["how"], ["yes " * 50])[0], abs=1e-6)


# --- what is refused


def test_a_model_without_a_score_head_is_refused_by_its_missing_weight():
    section = ClassifierReward(name=str(fetch_backbone("tiny-random")))
    with pytest.raises(BackboneError, match=r"has no weights for score\.weight"):
        RewardModel(section, "cpu")


def test_an_output_that_the_model_does_not_have_is_refused_with_both_numbers(load):
    with pytest.raises(BackboneError, match="has 2 outputs, but output is 2"):
        load(output=2)


@pytest.mark.parametrize(
    "use",
    [
        lambda section: RewardModel(section, "cpu"),
        lambda section: section.check_files("rewards.helpful"),
    ],
)
def test_a_classifier_that_cannot_be_loaded_or_checked_is_refused_by_name_and_revision(tmp_path, use):
    words = r"reward model '.*nowhere' \(revision main\) could not be loaded"
    with pytest.raises(BackboneError, match=words):
        use(ClassifierReward(name=str(tmp_path / "nowhere")))


def test_the_configuration_of_a_classifier_is_enough_for_its_check(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    ClassifierReward(name=str(tmp_path)).check_files("rewards.helpful")
