"""Exported models answer as the policies and selectors of the project do, without the project."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from jinja2 import Environment
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.config import PolicyConfig, UserError
from components.models.adapters import AdapterSlot, attach_lora, export_adapter, read_adapter
from components.models.backbone import fetch_backbone, load_backbone
from components.models.export import export_model, with_defaults
from components.models.policy import Policy, PolicyTexts
from components.models.selector import Comparison
from components.models.selector_model import Selector
from components.models.store import AdapterError
from tests.support.adapters import random_tensors
from tests.support.chat_templates import write_chat_policy

PROMPT = "Where is order 1234?"
"""The prompt of the README's snippet."""


def save_random_adapter(model, folder):
    """A PEFT folder of an adapter that changes the model's answers."""
    wrapped = attach_lora(load_backbone(model.backbone, "cpu"), model.lora)
    tensors = random_tensors(AdapterSlot(wrapped), seed=1, scale=0.3)
    return export_adapter(tensors, model.lora, model.backbone, folder, model.template)


def export(adapter, model, folder, merge):
    export_model(adapter, model, folder, merge)
    return folder


@pytest.fixture(scope="module")
def adapter(debug, tmp_path_factory):
    return save_random_adapter(debug.policy, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def policy(debug, adapter):
    return Policy(debug.policy, "cpu", adapter)


@pytest.fixture(scope="module")
def folders(debug, adapter, tmp_path_factory):
    """The exported adapter, and the exported merged model."""
    make = tmp_path_factory.mktemp
    return [export(adapter, debug.policy, make("export"), merge) for merge in (False, True)]


def logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits


def run_readme(folder, monkeypatch):
    """The variables of the README's snippet after it has run in the folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    variables = {}
    exec(code, variables)
    return variables


def test_the_adapter_on_its_backbone_and_the_merged_model_have_the_policys_logits(policy, folders):
    model = AutoPeftModelForCausalLM.from_pretrained(folders[0])
    ids = policy.encode(PROMPT)
    assert torch.equal(logits(model, ids), logits(policy.model, ids))
    with model.disable_adapter():
        assert not torch.allclose(logits(model, ids), logits(policy.model, ids), atol=0.1)
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    assert not hasattr(model, "peft_config")
    ids = policy.encode(PROMPT)
    torch.testing.assert_close(logits(model, ids), logits(policy.model, ids), rtol=1e-4, atol=1e-4)
    assert model.generation_config.eos_token_id == policy.model.generation_config.eos_token_id
    assert not model.generation_config.do_sample


@pytest.mark.parametrize("merge", [False, True])
def test_the_snippet_of_the_readme_answers_as_the_policy_does(merge, policy, folders, monkeypatch):
    variables = run_readme(folders[merge], monkeypatch)
    ids = variables["output"][0, variables["inputs"].shape[1] :].tolist()
    ((completion,),) = policy.generate([PROMPT], seed=0)
    assert variables["inputs"][0].tolist() == policy.encode(PROMPT)
    assert tuple(i for i in ids if i not in variables["form"]["stop_ids"]) == completion.ids


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_date": "2026-01-31"},
        {"chat_date": "2026-01-31", "system": "Be brief."},
        {"chat_date": "2026-01-31", "chat": "turns"},
        {"chat": "none"},
    ],
    ids=["chat", "system", "turns", "plain"],
)
def test_the_snippet_makes_the_policys_input_of_each_format(settings, tmp_path, monkeypatch):
    config = write_chat_policy("llama-3.2", tmp_path / "backbone", **settings)
    adapter = save_random_adapter(config, tmp_path / "adapter")
    policy = Policy(config, "cpu", adapter)
    variables = run_readme(export(adapter, config, tmp_path / "export", merge=True), monkeypatch)
    assert variables["inputs"][0].tolist() == policy.encode(PROMPT)
    assert variables["form"]["stop_ids"] == policy.model.generation_config.eos_token_id


def export_tokenizer(name, folder, **settings):
    config = write_chat_policy(name, folder / "backbone", **settings)
    adapter = save_random_adapter(config, folder / "adapter")
    return AutoTokenizer.from_pretrained(export(adapter, config, folder / "export", merge=False))


def test_the_chat_template_prints_the_day_of_the_run(tmp_path):
    tokenizer = export_tokenizer("dated", tmp_path, chat_date="2026-01-31")
    turns = [{"role": "user", "content": PROMPT}]
    assert "31 Jan 2026" in tokenizer.apply_chat_template(turns, tokenize=False)


def test_a_server_that_knows_neither_arguments_nor_system_turn_renders_what_was_trained_on(tmp_path):
    settings = {"chat_template_kwargs": {"enable_thinking": False}, "system": "Say 'it' or \"é\"."}
    policy = write_chat_policy("qwen3", tmp_path / "model", **settings)
    trained = PolicyTexts(policy).render("Where?").text
    tokenizer = export_tokenizer("qwen3", tmp_path / "export", **settings)
    turns = [{"role": "user", "content": "Where?"}]
    assert trained.endswith("<think>\n\n</think>\n\n") and "é" in trained
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == trained
    other = [{"role": "system", "content": "Be brief."}, *turns]
    text = tokenizer.apply_chat_template(
        other, tokenize=False, enable_thinking=True, add_generation_prompt=True
    )
    assert "é" not in text and "<think>" not in text


def test_defaults_of_a_template_change_nothing_else_of_it():
    template = "\n\nHuman: {{ messages[-1].content }}{{ day }}"
    arguments = {"day": 'it\'s "é"', "no-name": 1, "if": 2, "True": 3}
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    turns = [{"role": "user", "content": "Hi"}]
    rendered = environment.from_string(with_defaults(template, arguments, "Be brief.")).render(messages=turns)
    assert rendered == '\n\nHuman: Hiit\'s "é"'
    assert with_defaults(template, {}, None) == template


def test_a_tokenizer_has_no_chat_template_where_prompts_are_given_without_one(tmp_path):
    assert export_tokenizer("qwen2", tmp_path, chat="none").chat_template is None


def test_a_merged_model_has_the_layers_that_were_used(debug, tmp_path):
    content = debug.policy.model_dump(mode="json")
    config = PolicyConfig.model_validate(content | {"backbone": content["backbone"] | {"layers": 1}})
    adapter = save_random_adapter(config, tmp_path / "adapter")
    export_model(adapter, config, tmp_path / "peft", merge=False)
    merged = export(adapter, config, tmp_path / "merged", merge=True)
    assert AutoModelForCausalLM.from_pretrained(merged).config.num_hidden_layers == 1
    assert "num_hidden_layers=1" in (tmp_path / "peft" / "README.md").read_text()
    with pytest.raises(AdapterError, match="first 1 layers"):
        export_model(adapter, debug.policy, tmp_path / "other", merge=True)


def test_a_policy_in_bfloat16_is_merged_in_float32_with_the_whole_of_a_small_adapter(debug, tmp_path):
    backbone = debug.policy.backbone.model_copy(update={"dtype": "bfloat16"})
    config = debug.policy.model_copy(update={"backbone": backbone})
    slot = AdapterSlot(attach_lora(load_backbone(backbone, "cpu"), config.lora))
    tensors = random_tensors(slot, seed=1, scale=0.003)
    adapter = export_adapter(tensors, config.lora, backbone, tmp_path / "adapter")
    folder = export(adapter, config, tmp_path / "export", merge=True)
    assert "It is in float32" in (folder / "README.md").read_text()
    assert 'dtype="float32"' in (folder / "README.md").read_text()
    weights = load_file(folder / "model.safetensors")
    plain = load_backbone(backbone, "cpu").state_dict()
    for name, factor in tensors.items():
        if ".lora_A." not in name:
            continue
        scale = config.lora.alpha / config.lora.r
        update = scale * tensors[name.replace("lora_A", "lora_B")] @ factor
        weight = name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] + ".weight"
        assert weights[weight].dtype == torch.float32
        torch.testing.assert_close(weights[weight], plain[weight].float() + update)


@pytest.mark.parametrize("merge", [False, True])
def test_the_snippet_of_a_selector_gives_its_logits(merge, debug, tmp_path, monkeypatch):
    adapter = save_random_adapter(debug.selector, tmp_path / "adapter")
    selector = Selector(debug.selector, "cpu")
    selector.slot.load(read_adapter(adapter)[0])
    variables = run_readme(export(adapter, debug.selector, tmp_path / "export", merge), monkeypatch)
    texts = variables["texts"]
    comparison = Comparison(texts["prompt"], texts["response_a"], texts["response_b"])
    expected = torch.tensor(selector.logits([comparison])[0])
    torch.testing.assert_close(variables["logits"], expected, rtol=1e-4, atol=1e-4)


def test_the_format_has_the_text_of_the_template(policy, folders):
    template = json.loads((folders[0] / "prompt_format.json").read_text())["template"]
    assert template.replace("{prompt}", PROMPT) == policy.template.render(prompt=PROMPT)


def test_a_folder_with_files_is_refused(debug, adapter, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        export_model(adapter, debug.policy, tmp_path, merge=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_readme_of_a_shared_adapter_says_that_it_is_no_clients_model(debug, adapter, tmp_path):
    export_model(adapter, debug.policy, tmp_path / "shared", merge=False, is_whole=False)
    text = (tmp_path / "shared" / "README.md").read_text()
    assert "# The shared adapter of models of fed-rlhf" in text
    assert "no client's model is here" in " ".join(text.split())
    for wrong in ("--merge", "The policy was evaluated", "answers as the project does"):
        assert wrong not in text, wrong


# --- what other programs expect


def peft_config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


TENSOR = re.compile(r"base_model\.model\.model\.layers\.\d+\.\w+\.(\w+)\.lora_[AB]\.weight")


def test_vllm_and_llama_cpp_can_read_the_adapter(folders):
    """As vllm/lora/peft_helper.py, vllm/lora/utils.py and llama.cpp's convert_lora_to_gguf.py read it."""
    config = peft_config(folders[0])
    assert isinstance(config["r"], int)
    assert isinstance(config["lora_alpha"], int)
    assert isinstance(config["target_modules"], list)
    assert config["bias"] == "none"
    unsupported = ("modules_to_save", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern")
    assert not [name for name in unsupported if config.get(name)]
    matches = [TENSOR.fullmatch(name) for name in load_file(folders[0] / "adapter_model.safetensors")]
    assert all(matches)
    assert {match[1] for match in matches} == set(config["target_modules"])


@pytest.mark.parametrize("merge", [False, True])
def test_the_readme_is_a_model_card_of_the_hub(merge, folders):
    data = ModelCard.load(folders[merge] / "README.md").data
    assert data.library_name == ("transformers" if merge else "peft")
    assert data.pipeline_tag == "text-generation"
    assert data.license == "apache-2.0"
    assert data.base_model is None


HUB = """
import json, sys, torch
from pathlib import Path
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from components.config import PolicyConfig
from components.models.policy import Policy
from tests.models.test_export import export, logits, save_random_adapter, PROMPT

config = PolicyConfig.model_validate_json(sys.argv[1])
out = Path(sys.argv[2])
adapter = save_random_adapter(config, out / "adapter")
exported = export(adapter, config, out / "export", merge=False)
peft = json.loads((exported / "adapter_config.json").read_text())
assert (peft["base_model_name_or_path"], peft["revision"]) == ("own/model", "v1"), peft
assert ModelCard.load(exported / "README.md").data.base_model == "own/model"
model, policy = AutoPeftModelForCausalLM.from_pretrained(exported), Policy(config, "cpu", adapter)
ids = policy.encode(PROMPT)
assert torch.equal(logits(model, ids), logits(policy.model, ids))
"""


@pytest.mark.long
@pytest.mark.pipeline
def test_an_adapter_of_a_model_of_the_hub_names_it_with_its_revision(debug, tmp_path):
    cache = tmp_path / "hub" / "models--own--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "v1").write_text("a" * 40)
    shutil.copytree(fetch_backbone("tiny-random"), cache / "snapshots" / ("a" * 40))
    content = debug.policy.model_dump(mode="json")
    content["backbone"] |= {"name": "own/model", "revision": "v1"}
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HUB, json.dumps(content), str(tmp_path)],
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
