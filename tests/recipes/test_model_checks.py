"""`fed-rlhf check` finds models that a run would fail with, from their config.json and tokenizers."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from components.config import BackboneConfig
from components.models.backbone import (
    BackboneError,
    check_architecture,
    check_weights,
    fetch_backbone,
    load_backbone,
)
from components.models.rewards.classifier import ClassifierReward
from components.recipes import check_recipe, load_recipe
from components.recipes.model_checks import model_uses
from tests.support.chat_templates import write_chat_policy
from tests.support.command_line import fed_rlhf, refusal
from tests.support.random_models import build_random
from tests.support.tokenizers import build_tokenizer, write_backbone

FEDDPO = ["federation.method=feddpo", "federation.options={}"]


@pytest.fixture
def model(tmp_path):
    """A local copy of the tiny model."""
    return shutil.copytree(fetch_backbone("tiny-random"), tmp_path / "model")


def edit(path, **values):
    """Set values of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def check(model, *overrides):
    """The error of `fed-rlhf check` with a model as policy and as selector."""
    names = [f"policy.backbone.name={model}", f"selector.backbone.name={model}"]
    return refusal("check", "debug", *names, *overrides)


def test_a_model_that_fits_is_accepted(model):
    result = fed_rlhf("check", "debug", f"policy.backbone.name={model}", f"selector.backbone.name={model}")
    assert result.exit_code == 0
    assert "debug: the recipe is valid" in result.stdout


def rename_weights(model, rename):
    """Give the weights of a model other names; None leaves one out."""
    path = model / "model.safetensors"
    weights = {name: tensor for old, tensor in load_file(path).items() if (name := rename(old))}
    save_file(weights, path, metadata={"format": "pt"})


def without(part):
    return lambda name: None if part in name else name


WITHOUT = {
    "a prefix": (lambda name: f"_orig_mod.{name}", r"lack \d+ .* have \d+ .* such as _orig_mod"),
    "a layer": (without("layers.1."), "lack 9 of its weights, such as model.layers.1."),
    "an embedding": (without("embed"), "lack 2 of its weights"),
    "one weight": (without("1.mlp.up_proj"), r"lack 1 of its weights, such as \S+up_proj.weight. They"),
    "a name": (lambda name: name.replace("self_attn", "attention"), r"lack 8 .* such as \S+attention"),
}


@pytest.mark.parametrize(("rename", "words"), WITHOUT.values(), ids=WITHOUT)
def test_a_model_whose_files_lack_weights_is_refused_by_check_and_when_it_is_loaded(model, rename, words):
    rename_weights(model, rename)
    error = check(model)
    assert re.search(f"'{model}': its files {words}", error), error
    assert len(error.strip().splitlines()) == 1
    with pytest.raises(BackboneError, match=words):
        load_backbone(BackboneConfig(name=str(model)), "cpu")


def test_weights_of_layers_that_a_recipe_leaves_out_may_be_missing(model):
    rename_weights(model, lambda name: name if "layers.1." not in name else None)
    layers = ["policy.backbone.layers=1", "selector.backbone.layers=1"]
    names = [f"policy.backbone.name={model}", f"selector.backbone.name={model}"]
    result = fed_rlhf("check", "debug", *names, *layers)
    assert result.exit_code == 0, result.output
    assert load_backbone(BackboneConfig(name=str(model), layers=1), "cpu").config.num_hidden_layers == 1


def test_weights_of_another_shape_or_a_damaged_file_are_refused(model):
    weights = model / "model.safetensors"
    width = json.loads((model / "config.json").read_text())["intermediate_size"]
    edit(model / "config.json", intermediate_size=48)
    shapes = rf"down_proj.weight has the shape \[\d+, {width}\] in its files, but .* \[\d+, 48\]"
    assert re.search(f"backbone '{model}': its weight .*{shapes}", check(model))
    with pytest.raises(BackboneError, match=shapes):
        load_backbone(BackboneConfig(name=str(model)), "cpu")
    for content in (weights.read_bytes()[:-1000], b"no weights"):
        weights.write_bytes(content)
        assert f"backbone '{model}': a file of its weights cannot be read" in check(model)
        with pytest.raises(BackboneError, match="a file of its weights cannot be read .*download it again"):
            load_backbone(BackboneConfig(name=str(model)), "cpu")


def test_a_pad_token_beyond_the_embedding_is_refused(model):
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(model)
    error = check(model)
    assert f"pad_token '<padding>' has the id {rows}, but the embedding has {rows} rows" in error
    assert "resize the embedding" in error


def test_a_token_beyond_the_embedding_that_is_not_used_is_accepted(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    assert len(tokenizer) > json.loads((model / "config.json").read_text())["vocab_size"]
    check_recipe(load_recipe("debug", [f"policy.backbone.name={model}"]))


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("where", ["policy", "selector"])
def test_a_template_with_tokens_beyond_the_embedding_is_refused(model, tmp_path, where):
    from transformers import AutoTokenizer

    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    overrides = []
    if where == "policy":
        tokenizer.chat_template = CHAT
        overrides = FEDDPO
    else:
        file = tmp_path / "selector.txt"
        file.write_text("<|im_start|>{prompt}\nA: {response_a}\nB: {response_b}\nBetter:")
        overrides = [f"selector.template={file}"]
    tokenizer.save_pretrained(model)
    error = check(model, *overrides)
    assert f"{where}.backbone" in error
    assert f"the token '<|im_start|>' of the id {rows}, but the embedding has {rows} rows" in error


def test_an_end_of_a_turn_beyond_the_embedding_is_refused(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = CHAT.replace("<|im_start|>", "")
    tokenizer.save_pretrained(model)
    assert "the token '<|im_end|>'" in check(model, *FEDDPO)


def test_a_policy_whose_chat_template_prints_the_present_day_is_accepted(tmp_path):
    policy = write_chat_policy("llama-3.2", tmp_path)
    name = f"policy.backbone.name={policy.backbone.name}"
    assert check_recipe(load_recipe("debug", [name, *FEDDPO])).unread == ()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy.backbone.name=./no/model"], "policy.backbone.name"),
        (["policy.backbone.name=/no/model"], "policy.backbone.name"),
        (["policy.backbone.name=~/no-model"], "policy.backbone.name"),
        (["selector.backbone.name=no/such/model"], "selector.backbone.name"),
        (["evaluation.judge.selector.backbone.name=../no-model"], "evaluation.judge.selector.backbone.name"),
        (
            ["federation.options={objective: ppo}", FEDDPO[0], "rewards={r: {name: ./no-model}}"],
            "rewards.r.name",
        ),
        (["evaluation.judge={kind: reward, reward: {name: ./no-model}}"], "evaluation.judge.reward.name"),
        (["evaluation.judge={kind: autoj, model: ./no-model}"], "evaluation.judge.model"),
        (
            ["thoughts={questions: [{set: csqa}], evaluator: {model: ./no-model}}"],
            "thoughts.evaluator.model",
        ),
        (["data={source: shp, options: {tokenizer: ./no-model}}"], "data.options.tokenizer"),
        (
            [*FEDDPO, "alignment.dpo={reference: sft, reference_adapter: ./no-model}"],
            "alignment.dpo.reference_adapter",
        ),
    ],
)
def test_a_path_of_a_model_that_does_not_exist_is_refused(overrides, key):
    error = refusal("check", "debug", *overrides)
    assert f"{key}: there is no file or folder" in error
    assert "correct the path" in error


def test_a_file_is_no_model(model):
    assert "is a file, and a model is a folder" in check(model / "config.json")


@pytest.mark.parametrize(
    ("file", "text"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", None), ("config.json", "[]")],
)
def test_a_folder_with_a_damaged_file_is_refused(model, file, text):
    if text is None:
        for path in model.glob("*token*"):
            path.unlink()
    else:
        (model / file).write_text(text)
    error = check(model)
    assert f"{'the tokenizer' if 'token' in file else 'the config.json'} of '{model}' cannot be read" in error


def test_more_layers_than_the_model_has_are_refused(model):
    assert "has 2 layers, but 9 were requested" in check(model, "selector.backbone.layers=9")
    embedded = ["policy.backbone.name=tiny-random", "policy.backbone.layers=9", *FEDDPO]
    assert "has 2 layers, but 9 were requested" in refusal("check", "debug", *embedded)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("{{kind: classifier, name: '{model}', max_length: 512}}", "has 64 positions, but max_length is 512"),
        (
            "{{kind: trained, template: '{{prompt}}|{{response}}', max_length: 512,"
            " training: {{backbone: {{name: '{model}'}}}}}}",
            "evaluation.judge.reward.training.backbone",
        ),
    ],
)
def test_the_reward_of_a_judge_is_checked(tmp_path, reward, words):
    config = {"model_type": "bert", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    judge = "{kind: reward, reward: " + reward.format(model=tmp_path) + "}"
    assert words in refusal("check", "debug", f"evaluation.judge={judge}")


def test_a_local_model_of_an_autoj_judge_is_checked_for_its_context_and_its_weights(model):
    edit(model / "config.json", max_position_embeddings=64)
    error = refusal("check", "debug", f"evaluation.judge={{kind: autoj, model: '{model}'}}")
    assert "has a context of at most 64 tokens" in error
    rename_weights(model, without("layers.1."))
    edit(model / "config.json", max_position_embeddings=8192)
    error = refusal("check", "debug", f"evaluation.judge={{kind: autoj, model: '{model}'}}")
    assert f"'{model}': its files lack 9 of its weights" in error


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "xlm-roberta", "is_decoder": False}, "is an encoder"),
        ({"model_type": "bert-generation"}, "is an encoder"),
        ({"model_type": "bart"}, "an encoder and a decoder"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "whisper"}, "an encoder and a decoder"),
        ({"model_type": "musicgen"}, "an encoder and a decoder"),
        ({"model_type": "git"}, "reads images or sounds"),
        ({"model_type": "fuyu"}, "reads images or sounds"),
        ({"model_type": "xlnet"}, "another order"),
    ],
)
def test_models_that_only_load_as_causal_language_models_are_refused(config, words):
    with pytest.raises(BackboneError, match=words):
        check_architecture("a", config)


def test_decoders_of_text_are_accepted():
    kinds = (
        "llama qwen2 qwen3 qwen2_moe gemma gemma2 gemma3_text mistral mixtral phi3 gpt2 gpt_neox falcon opt"
    )
    for kind in [*kinds.split(), "bloom", "mpt", "gptj", "mamba", "openai-gpt", "biogpt", "gemma4_text"]:
        check_architecture(kind, {"model_type": kind})
    check_architecture("bert", {"model_type": "bert", "is_decoder": True})


def test_weights_that_a_model_does_not_use_are_named_but_for_those_of_layers_that_are_left_out(model):
    path = model / "model.safetensors"
    weights = load_file(path)
    more = {"model.layers.0.self_attn.q_proj.extra": weights["model.norm.weight"].clone()}
    save_file(weights | more, path, metadata={"format": "pt"})
    own = [f"{name}.backbone={{name: '{model}', layers: 1}}" for name in ("policy", "selector")]
    result = fed_rlhf("check", "debug", *own)
    assert result.exit_code == 0
    output = result.stdout + result.stderr
    assert "policy.backbone" in output
    assert "its files have 1 weights that the model does not use, such as model.layers.0.self_attn" in output
    save_file(weights, path, metadata={"format": "pt"})
    result = fed_rlhf("check", "debug", *own)
    assert "does not use" not in result.stdout + result.stderr


@pytest.mark.parametrize("lacks", ["score.weight", "layers.0.self_attn.q_proj.weight"])
def test_a_local_classifier_that_lacks_weights_is_refused_by_check(tmp_path, lacks):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, num_labels=1, max_position_embeddings=4096, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    kept = {name: weights[name] for name in weights if not name.endswith(lacks)}
    save_file(kept, path, metadata={"format": "pt"})
    rewards = f"rewards={{helpful: {{kind: classifier, name: '{tmp_path}'}}}}"
    error = refusal("check", "debug", FEDDPO[0], "federation.options={objective: ppo}", rewards)
    assert "has no weights for" in error
    assert lacks in error


def test_a_classifier_of_other_shapes_or_that_is_quantized_is_refused_by_check(tmp_path):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    rewards = f"rewards={{helpful: {{kind: classifier, name: '{tmp_path}'}}}}"
    recipe = [FEDDPO[0], "federation.options={objective: ppo}", rewards]
    edit(tmp_path / "config.json", n_inner=32)
    words = r"its weight \S+ has the shape \[\d+.*\] in its files, but its config.json makes it \["
    assert re.search(f"reward model '{tmp_path}': {words}", refusal("check", "debug", *recipe))
    edit(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    error = refusal("check", "debug", *recipe)
    assert f"rewards.helpful.name '{tmp_path}' is a quantized checkpoint (gptq)" in error


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4"])
def test_a_quantized_checkpoint_is_refused(model, method):
    bits = {"load_in_4bit": True} if method == "bitsandbytes" else {}
    edit(model / "config.json", quantization_config={"quant_method": method} | bits)
    assert f"is a quantized checkpoint ({method})" in check(model)


@pytest.mark.parametrize("bits", [{"load_in_4bit": False, "load_in_8bit": False}, {}])
def test_an_entry_on_quantization_that_quantizes_nothing_has_no_effect(model, bits):
    plain = load_backbone(BackboneConfig(name=str(model)), "cpu")
    edit(model / "config.json", quantization_config={"quant_method": "bitsandbytes"} | bits)
    assert fed_rlhf("check", "debug", f"policy.backbone.name={model}").exit_code == 0
    loaded = load_backbone(BackboneConfig(name=str(model)), "cpu")
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("transformer.h.0.attn.masked_bias", False),  # GPT-2, GPT-J
        ("transformer.h.1.attn.bias", False),
        ("transformer.h.0.attn.attention.masked_bias", False),  # GPT-Neo
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),  # Llama
        ("transformer.h.0.attn.gate.bias", True),
    ],
)
def test_constants_in_files_of_earlier_versions_are_no_weights_that_a_model_does_not_use(
    tmp_path, name, is_named
):
    build_random("gptj", rotary_dim=4).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(1)}, path, metadata={"format": "pt"})
    assert check_weights(BackboneConfig(name=str(tmp_path)))[1] == [name] * is_named


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [
        ("qwen3_moe", "all-linear", "use some of|some of k_proj, o_proj, q_proj, v_proj"),
        ("qwen3_moe", "[gate_proj]", "gate_proj matches no module"),
        ("mixtral", "[experts]", "MixtralExperts, and LoRA needs a linear layer"),
        ("phi3", "[q_proj]", "q_proj matches no module .* qkv_proj"),
        ("gpt_neox", "[q_proj, v_proj]", "q_proj matches no module .* query_key_value"),
    ],
)
def test_targets_that_a_mixture_or_fused_layers_lack_are_refused_by_check_with_the_usable_ones(
    model, family, targets, words
):
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 8} if family == "qwen3_moe" else {}
    build_random(family, **sizes).save_pretrained(model)
    lora = [f"{name}.lora.target_modules={targets}" for name in ("policy", "selector")]
    error = check(model, *lora)
    assert re.search(words, error)
    assert re.search(r"(policy|selector)\.lora\.target_modules", error)


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        (("eos_token", "pad_token"), "neither a token that ends a text nor one that pads"),
        (("eos_token",), "has no token that ends a completion"),
    ],
    ids=["no EOS and no PAD", "no EOS"],
)
def test_a_tokenizer_without_an_end_is_refused(model, removed, words):
    edit(model / "tokenizer_config.json", **dict.fromkeys(removed))
    error = check(model, *FEDDPO)
    assert words in error
    assert "set eos_token" in error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "selector.backbone"),
        (FEDDPO, "policy.backbone"),
        (
            ["evaluation.questions={questions: [{set: chitchat}], max_new_tokens: 60}", *FEDDPO],
            "max_new_tokens",
        ),
    ],
)
def test_inputs_longer_than_the_positions_are_refused_with_the_settings_that_bound_them(
    model, overrides, words
):
    edit(model / "config.json", max_position_embeddings=100)
    error = check(model, *overrides)
    assert "has 100 positions, but its inputs have up to" in error
    assert words in error


def test_learned_positions_are_found_too(tmp_path):
    folder = tmp_path / "gpt2"
    write_backbone(build_tokenizer("gpt2"), folder)
    edit(folder / "config.json", n_positions=64)
    assert "has 64 positions" in check(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma3", "text_config": {"vocab_size": 8}}, "is a model of texts and images"),
        ({"model_type": "t5"}, "(model_type t5) is no causal language model"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "(model_type mine)"),
    ],
    ids=["texts and images", "encoder and decoder", "code of the hub"],
)
def test_a_model_that_is_no_causal_language_model_of_text_is_refused(model, config, words):
    edit(model / "config.json", **config)
    assert words in check(model)


def test_loading_refuses_such_a_model_too(tmp_path):
    from transformers import Gemma3Config

    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match="is a model of texts and images"):
        load_backbone(BackboneConfig(name=str(tmp_path)), "cpu")


def test_a_tokenizer_that_splits_the_answers_of_a_selector_is_refused_for_selectors_only(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    answer = "ĠB"
    tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"] if "".join(m) != answer]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "splits ' B' into 2 tokens" in check(model)
    check_recipe(load_recipe("debug", [f"policy.backbone.name={model}", *FEDDPO]))


def test_a_selector_without_room_for_completions_is_refused(model):
    error = check(model, "selector.max_length=20")
    assert "template" in error
    assert "raise selector.max_length" in error


def test_a_chat_template_that_refuses_the_system_turn_is_found(model):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    (model / "chat_template.jinja").write_text(template + "{{ messages[-1]['content'] }}")
    assert "no system turn" in check(model, *FEDDPO, "policy.system=Be kind.")


@pytest.mark.parametrize("key", ["policy.backbone.name", "selector.backbone.name"])
@pytest.mark.parametrize("name", ["./no/such/folder", "/nonexistent", "a/b/c"])
def test_a_local_model_that_does_not_exist_is_refused(key, name):
    assert f"{key}: there is no file or folder" in refusal("check", "debug", f"{key}={name}")


@pytest.mark.parametrize("content", [None, "{"], ids=["missing", "damaged"])
def test_a_tokenizer_that_cannot_be_read_is_refused_in_a_sentence(model, content):
    for path in model.glob("*token*"):
        path.unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    assert "cannot be read" in check(model)


def test_a_config_that_is_no_mapping_or_cannot_be_read_is_refused(model):
    (model / "config.json").write_text("[]")
    assert "expected a mapping" in check(model)
    (model / "config.json").write_text("{")
    assert "config.json" in check(model)


def test_a_day_that_is_none_is_refused_with_an_example():
    assert "give a date such as 2026-01-31" in refusal("check", "debug", "policy.chat_date=today")


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "bert", "max_position_embeddings": 96}, 96),
        ({"model_type": "roberta", "max_position_embeddings": 98, "pad_token_id": 1}, 96),
        ({"model_type": "deberta-v2", "max_position_embeddings": 96, "position_biased_input": False}, None),
    ],
    ids=["vectors", "vectors after the pad token's", "relative positions"],
)
def test_a_classifier_with_fewer_positions_than_its_inputs_is_refused(tmp_path, config, positions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = load_recipe(
        "debug",
        [
            *FEDDPO[:1],
            "federation.options={objective: ppo}",
            f"rewards={{helpful: {{name: '{tmp_path}', max_length: 97}}}}",
        ],
    )
    if positions is None:
        recipe.rewards["helpful"].check_files("rewards.helpful")
        return
    with pytest.raises(BackboneError, match=f"has {positions} positions, but max_length is 97"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        ("roberta", 2),
        ("xlm-roberta", 2),
        ("camembert", 2),
        ("mpnet", 2),
        ("longformer", 2),
        ("data2vec-text", 2),
        ("ibert", 2),
        ("luke", 2),
        ("bert", 0),
        ("electra", 0),
    ],
)
def test_the_first_position_of_a_classifier_is_that_of_its_embedding(tmp_path, kind, offset):
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    more = {"attention_window": [8], "num_hidden_layers": 1, "entity_vocab_size": 8, "pad_token_id": 1}
    config = {"model_type": kind, "max_position_embeddings": 98} | sizes | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    ClassifierReward(name=str(tmp_path), max_length=98 - offset).check_files("rewards.helpful")
    with pytest.raises(BackboneError, match=f"has {98 - offset} positions"):
        ClassifierReward(name=str(tmp_path), max_length=99 - offset).check_files("rewards.helpful")


def test_a_classifier_without_a_padding_token_is_read(tmp_path):
    config = {"model_type": "roberta", "max_position_embeddings": 98, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ClassifierReward(name=str(tmp_path), max_length=98).check_files("rewards.helpful")


def test_a_model_of_the_hub_that_cannot_be_read_is_named(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = fed_rlhf("check", "debug", "selector.backbone.name=nobody/no-model")
    assert result.exit_code == 0, result.output
    line = "not checked, since they cannot be read from here: model and tokenizer of nobody/no-model"
    assert line in result.stdout.splitlines()


def test_every_backbone_of_a_recipe_is_checked():
    recipe = load_recipe(
        "debug",
        [
            "federation.method=feddpo",
            "federation.options={objective: ppo}",
            "rewards={helpful: {kind: trained, template: '{prompt}|{response}'}}",
            "data={source: thoughts}",
            "thoughts={questions: [{set: csqa}]}",
        ],
    )
    assert next(model_uses(load_recipe("debug"))).key == "selector"
    assert [use.key for use in model_uses(recipe)] == [
        "policy",
        "evaluation.judge.selector",
        "rewards.helpful.training",
        "thoughts.evaluator",
    ]
