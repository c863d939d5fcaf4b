"""A classifier is read at the last token of the whole text, as transformers' own pipeline reads one text."""

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GemmaConfig,
    GemmaForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    pipeline,
)

from components.data.records import Pair
from components.learning.reward_model import TrainedReward, train_reward
from components.models.backbone import BackboneError
from components.models.rewards.classifier import ClassifierReward, ResponseFormat, RewardModel
from tests.support.chat_templates import build_chat_tokenizer, family
from tests.support.recording import record_calls
from tests.support.tokenizers import write_backbone

PROMPTS = ["why?", "a longer question than the others, which pads them", "so"]
RESPONSES = ["because", "it is", "no reason at all, really"]
TURNS = "user: {prompt}\nassistant: {response}"
TEMPLATES = {
    "bare": TURNS,
    "bos": "{bos}" + TURNS,
    "eos": TURNS + "{eos}",
    "bos-eos": "{bos}" + TURNS + "{eos}",
    "end-of-turn": "{bos}" + TURNS + "{end}\n",
}
CLASSIFIERS = {
    "llama": (LlamaConfig, LlamaForSequenceClassification),
    "gemma": (GemmaConfig, GemmaForSequenceClassification),
    "gpt2": (GPT2Config, GPT2ForSequenceClassification),
}


def fill_marks(template, shape):
    for mark, token in (("{bos}", shape.bos), ("{eos}", shape.eos), ("{end}", shape.end_of_turn)):
        template = template.replace(mark, token)
    return template


def build_tokenizer(shape, pad, adds_bos, adds_eos=False):
    tokenizer = build_chat_tokenizer(shape)
    bos = f"{shape.bos} " if adds_bos else ""
    eos = f" {shape.eos}" if adds_eos else ""
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (shape.bos, shape.eos)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}$A{eos}", special_tokens=tokens
    )
    tokenizer.pad_token = {"eos": shape.eos, "mark": shape.marks[0], "none": None}[pad]
    return tokenizer


def write_classifier(folder, kind, tokenizer):
    config_class, model_class = CLASSIFIERS[kind]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = config_class(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **sizes, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def scores_of_pipeline(name, texts):
    """Scores of transformers' pipeline, a text at a time, with the special tokens that the texts contain.

    Without a padding token the model reads the last token.
    """
    model = AutoModelForSequenceClassification.from_pretrained(name)
    model.config.pad_token_id = None
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(name))
    options = {"function_to_apply": "none", "add_special_tokens": False}
    return [classify(text, **options)[0]["score"] for text in texts]


def complete_texts(template, shape, adds_bos, adds_eos=False):
    """What a classifier is to read: BOS and EOS once each where the template or the tokenizer has them."""
    texts = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        text = fill_marks(template, shape).replace("{prompt}", prompt).replace("{response}", response)
        if adds_bos and not text.startswith(shape.bos):
            text = shape.bos + text
        if adds_eos and not text.endswith(shape.eos):
            text += shape.eos
        texts.append(text)
    return texts


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("pad", ["eos", "mark", "none"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(("kind", "shape"), [("llama", "llama-3"), ("gemma", "gemma"), ("gpt2", "llama-3")])
def test_scores_are_those_of_the_pipeline_on_each_text(tmp_path, kind, shape, template, pad, adds_bos):
    shape = family(shape)
    name = write_classifier(tmp_path, kind, build_tokenizer(shape, pad, adds_bos))
    expected = scores_of_pipeline(name, complete_texts(template, shape, adds_bos))
    for batch_size in (1, 3):
        section = ClassifierReward(name=name, template=fill_marks(template, shape), batch_size=batch_size)
        scores = RewardModel(section, "cpu").score(PROMPTS, RESPONSES)
        assert scores == pytest.approx(expected, abs=1e-5)


def assert_scores_of_pipeline(name, shape, template, texts, **options):
    section = ClassifierReward(name=name, template=fill_marks(template, shape), **options)
    scores = RewardModel(section, "cpu").score(PROMPTS, RESPONSES)
    assert scores == pytest.approx(scores_of_pipeline(name, texts), abs=1e-5)


@pytest.mark.parametrize("name", ["llama-3", "gemma", "qwen2"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_the_chat_template_is_read(tmp_path, name, adds_bos, caplog):
    shape = family(name)
    tokenizer = build_chat_tokenizer(shape)
    if shape.bos is not None:
        tokenizer = build_tokenizer(shape, "mark", adds_bos)
    folder = write_classifier(tmp_path, "llama", tokenizer)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], tokenize=False
        )
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    caplog.set_level("INFO")
    scores = RewardModel(ClassifierReward(name=folder), "cpu").score(PROMPTS, RESPONSES)
    assert scores == pytest.approx(scores_of_pipeline(folder, texts), abs=1e-5)
    assert "in its chat template" in caplog.text


def test_a_chat_template_that_prints_the_day_prints_a_fixed_one(tmp_path):
    tokenizer = build_chat_tokenizer(family("dated"))
    folder = write_classifier(tmp_path, "llama", tokenizer)
    texts = [
        f"<|begin_of_text|>Today Date: 26 Jul 2024\nuser: {prompt}<|eot_id|>assistant: {response}<|eot_id|>"
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    scores = RewardModel(ClassifierReward(name=folder), "cpu").score(PROMPTS, RESPONSES)
    assert scores == pytest.approx(scores_of_pipeline(folder, texts), abs=1e-5)


def test_a_chat_template_that_does_not_write_a_response_is_refused(tmp_path):
    tokenizer = build_tokenizer(family("llama-3"), "mark", True)
    tokenizer.chat_template = "{{ messages[0].content }}"
    folder = write_classifier(tmp_path, "llama", tokenizer)
    with pytest.raises(BackboneError, match=r"cannot be used .*give its template in the recipe"):
        RewardModel(ClassifierReward(name=folder), "cpu")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_end_that_the_tokenizer_writes_too_is_read_once(tmp_path, template):
    shape = family("llama-3")
    name = write_classifier(tmp_path, "llama", build_tokenizer(shape, "eos", True, adds_eos=True))
    assert_scores_of_pipeline(name, shape, template, complete_texts(template, shape, True, adds_eos=True))


def test_a_line_break_after_the_end_of_a_template_gives_no_second_end():
    shape = family("llama-3")
    tokenizer = build_tokenizer(shape, "eos", True, adds_eos=True)
    template = fill_marks(TEMPLATES["bos-eos"], shape)
    first, second = (
        ResponseFormat(text, 64).encode(tokenizer, [("why?", "so")])["input_ids"].tolist()
        for text in (template, template + "\n")
    )
    assert first == second


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_that_is_truncated_begins_with_bos_and_ends_in_the_end(tmp_path, adds_bos):
    shape = family("llama-3")
    tokenizer = build_tokenizer(shape, "eos", adds_bos)
    name = write_classifier(tmp_path, "llama", tokenizer)
    section = ClassifierReward(name=name, template=fill_marks(TEMPLATES["bos-eos"], shape), max_length=24)
    rows = [("a long question " * 9, "yes")]
    (ids,) = section.format.encode(RewardModel(section, "cpu").tokenizer, rows)["input_ids"].tolist()
    assert len(ids) == 24
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_pads_on_the_left_gives_the_same_scores(tmp_path):
    """A GPT-2 counts positions from the first column."""
    shape = family("llama-3")
    tokenizer = build_tokenizer(shape, "mark", True)
    tokenizer.padding_side = "left"
    name = write_classifier(tmp_path, "gpt2", tokenizer)
    assert_scores_of_pipeline(name, shape, TURNS, complete_texts(TURNS, shape, True))


def test_a_padding_token_that_the_model_does_not_have_changes_no_score(tmp_path):
    shape = family("llama-3")
    tokenizer = build_tokenizer(shape, "eos", True)
    name = write_classifier(tmp_path, "llama", tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(name)
    assert_scores_of_pipeline(name, shape, TURNS, complete_texts(TURNS, shape, True))


def test_a_trained_reward_is_trained_at_the_token_at_which_it_is_read(tmp_path, monkeypatch):
    """All its texts end in EOS, which pads them; their last tokens are what the losses depend on."""
    shape = family("llama-3")
    backbone = write_backbone(build_tokenizer(shape, "eos", True), tmp_path)
    lora = {"r": 2, "dropout": 0.0, "target_modules": ["c_attn"]}
    training = {"backbone": backbone.model_dump(), "lora": lora, "steps": 2, "batch_size": 2, "lr": 0.1}
    reward = TrainedReward(template=TURNS + shape.eos, training=training)
    rows = [Pair(prompt, response, "no") for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]

    def read_places(model, *_, input_ids, attention_mask, **__):
        places = torch.arange(input_ids.shape[1])
        read = (places * (input_ids != model.config.pad_token_id)).argmax(-1)
        return read.tolist(), (attention_mask.sum(1) - 1).tolist()

    read = record_calls(monkeypatch, GPT2ForSequenceClassification, "forward", read_places)
    model, tokenizer, losses = train_reward(reward, rows, 0, "cpu")
    assert len(losses) == 2
    assert [places for places, _ in read] == [last for _, last in read]
    assert tokenizer.pad_token == shape.eos
    assert model.config.pad_token_id == tokenizer.pad_token_id
