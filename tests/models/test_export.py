"""Exported models answer as the policies and selectors of the project do, without the project."""

import json
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.config import PolicyConfig
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.export import ExportError, export_model
from components.models.policy import Policy
from components.models.selector import Comparison
from components.models.selector_model import Selector
from components.models.store import AdapterError
from tests.support.adapters import random_tensors
from tests.support.chat_templates import write_chat_policy

PROMPT = "Where is order 1234?"
"""The prompt of the README's snippet."""
LLAMA_FORMATS = {
    "chat": {"chat_date": "2026-01-31"},
    "system": {"chat_date": "2026-01-31", "system": "Be brief."},
    "turns": {"chat_date": "2026-01-31", "chat": "turns"},
    "plain": {"chat": "none"},
}


def save_random_adapter(model, folder):
    """A PEFT folder of an adapter that changes the model's answers."""
    wrapped = attach_lora(load_backbone(model.backbone, "cpu"), model.lora)
    tensors = random_tensors(AdapterSlot(wrapped), seed=1, scale=0.3)
    return export_adapter(tensors, model.lora, model.backbone, folder, model.template)


@pytest.fixture(scope="module")
def policy_config(debug):
    return debug.policy


@pytest.fixture(scope="module")
def adapter(policy_config, tmp_path_factory):
    return save_random_adapter(policy_config, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def policy(policy_config, adapter):
    return Policy(policy_config, "cpu", adapter)


@pytest.fixture(scope="module")
def peft_folder(policy_config, adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    export_model(adapter, policy_config, folder, merge=False)
    return folder


@pytest.fixture(scope="module")
def merged_folder(policy_config, adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    export_model(adapter, policy_config, folder, merge=True)
    return folder


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


def test_the_adapter_loads_onto_a_fresh_backbone_and_gives_the_policys_logits(
    policy_config, policy, peft_folder
):
    fresh = load_backbone(policy_config.backbone, "cpu")
    model = PeftModel.from_pretrained(fresh, peft_folder)
    ids = policy.encode(PROMPT)
    assert torch.equal(logits(model, ids), logits(policy.model, ids))
    with model.disable_adapter():
        assert not torch.allclose(logits(model, ids), logits(policy.model, ids), atol=0.1)


def test_peft_finds_the_backbone_by_the_adapters_configuration(policy, peft_folder):
    model = AutoPeftModelForCausalLM.from_pretrained(peft_folder)
    ids = policy.encode(PROMPT)
    assert torch.equal(logits(model, ids), logits(policy.model, ids))


def test_the_merged_model_has_the_policys_logits(policy, merged_folder):
    model = AutoModelForCausalLM.from_pretrained(merged_folder)
    assert not hasattr(model, "peft_config")
    ids = policy.encode(PROMPT)
    torch.testing.assert_close(logits(model, ids), logits(policy.model, ids), rtol=1e-4, atol=1e-4)


def test_the_merged_model_generates_with_the_policys_settings_by_default(policy, merged_folder):
    settings = AutoModelForCausalLM.from_pretrained(merged_folder).generation_config
    assert settings.eos_token_id == policy.model.generation_config.eos_token_id
    assert not settings.do_sample


@pytest.mark.parametrize("merge", [False, True])
def test_the_snippet_of_the_readme_answers_as_the_policy_does(
    merge, policy, peft_folder, merged_folder, monkeypatch
):
    variables = run_readme(merged_folder if merge else peft_folder, monkeypatch)
    ids = variables["output"][0, variables["inputs"].shape[1] :].tolist()
    ((completion,),) = policy.generate([PROMPT], seed=0)
    assert variables["inputs"][0].tolist() == policy.encode(PROMPT)
    assert tuple(i for i in ids if i not in variables["form"]["stop_ids"]) == completion.ids


@pytest.mark.parametrize("settings", LLAMA_FORMATS.values(), ids=LLAMA_FORMATS)
def test_the_snippet_makes_the_policys_input_of_each_format(settings, tmp_path, monkeypatch):
    config = write_chat_policy("llama-3.2", tmp_path / "backbone", **settings)
    adapter = save_random_adapter(config, tmp_path / "adapter")
    policy = Policy(config, "cpu", adapter)
    export_model(adapter, config, tmp_path / "export", merge=True)
    variables = run_readme(tmp_path / "export", monkeypatch)
    assert variables["inputs"][0].tolist() == policy.encode(PROMPT)
    assert variables["form"]["stop_ids"] == policy.model.generation_config.eos_token_id


def test_the_chat_template_prints_the_day_of_the_run(tmp_path):
    config = write_chat_policy("dated", tmp_path / "backbone", chat_date="2026-01-31")
    export_model(save_random_adapter(config, tmp_path / "adapter"), config, tmp_path / "export", merge=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    turns = [{"role": "user", "content": PROMPT}]
    assert "31 Jan 2026" in tokenizer.apply_chat_template(turns, tokenize=False)


def test_a_tokenizer_has_no_chat_template_where_prompts_are_given_without_one(tmp_path):
    config = write_chat_policy("qwen2", tmp_path / "backbone", chat="none")
    export_model(save_random_adapter(config, tmp_path / "adapter"), config, tmp_path / "export", merge=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template is None


def test_a_merged_model_has_the_layers_that_were_used(debug, tmp_path):
    content = debug.policy.model_dump(mode="json")
    config = PolicyConfig.model_validate(content | {"backbone": content["backbone"] | {"layers": 1}})
    adapter = save_random_adapter(config, tmp_path / "adapter")
    export_model(adapter, config, tmp_path / "merged", merge=True)
    export_model(adapter, config, tmp_path / "peft", merge=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.num_hidden_layers == 1
    assert "num_hidden_layers=1" in (tmp_path / "peft" / "README.md").read_text()
    with pytest.raises(AdapterError, match="first 1 layers"):
        export_model(adapter, debug.policy, tmp_path / "other", merge=True)


@pytest.mark.parametrize("merge", [False, True])
def test_the_snippet_of_a_selector_gives_its_logits(merge, debug, tmp_path, monkeypatch):
    selector = Selector(debug.selector, "cpu")
    tensors = random_tensors(selector.slot, seed=1, scale=0.3)
    selector.slot.load(tensors)
    config = debug.selector
    adapter = export_adapter(tensors, config.lora, config.backbone, tmp_path / "adapter", config.template)
    export_model(adapter, config, tmp_path / "export", merge)
    variables = run_readme(tmp_path / "export", monkeypatch)
    texts = variables["texts"]
    comparison = Comparison(texts["prompt"], texts["response_a"], texts["response_b"])
    expected = torch.tensor(selector.logits([comparison])[0])
    torch.testing.assert_close(variables["logits"], expected, rtol=1e-4, atol=1e-4)


def test_the_format_has_the_text_of_the_template(policy, peft_folder):
    template = json.loads((peft_folder / "prompt_format.json").read_text())["template"]
    assert template.replace("{prompt}", PROMPT) == policy.template.render(prompt=PROMPT)


def test_a_folder_with_files_is_refused(policy_config, adapter, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="is not an empty folder"):
        export_model(adapter, policy_config, tmp_path, merge=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
