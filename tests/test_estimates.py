"""Estimates of a recipe's costs: its stages, what is not known, and the recipes of paper scale."""

import json
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from components import estimates
from components.config import BackboneConfig
from components.estimates import (
    COLUMNS,
    Shapes,
    alignment_stage,
    describe_costs,
    estimate_disk,
    estimate_memory,
    rounds_stage,
    training_stages,
)
from components.models.backbone import BackboneError, read_model_config
from components.models.memory import StepShape
from components.recipes import load_recipe

SHAPES = {
    "Qwen/Qwen2-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
    | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2-1.5B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960}
    | {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "google/gemma-2b": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384}
    | {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1}
    | {"head_dim": 256, "vocab_size": 256000},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {"model_type": "llama", "hidden_size": 2048}
    | {"intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
    "meta-llama/Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096}
    | {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    "distilbert/distilgpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12}
    | {"n_positions": 1024, "vocab_size": 50257},
    "Ray2333/gpt2-large-helpful-reward_model": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36}
    | {"n_head": 20, "n_positions": 1024, "vocab_size": 50257},
}
SHAPES["mlabonne/Gemmalpaca-2B"] = SHAPES["google/gemma-2b"]
SHAPES["Ray2333/gpt2-large-harmless-reward_model"] = SHAPES["Ray2333/gpt2-large-helpful-reward_model"]
"""The published shapes of the models that recipes of paper scale name."""
PAPER_SCALE = [
    "summarization/tldr",
    "qa/shp",
    "reasoning/paper",
    "personalized/imdb",
    "personalized/code_vulnerability",
    "personalized/cross_domain",
    "multi-objective/hh",
]
A100 = 80e9
"""Bytes of the GPU that the papers used."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders with the config.json of models of the hub."""

    def read(backbone):
        if backbone.name not in SHAPES:
            return read_model_config(backbone)
        folder = tmp_path / backbone.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[backbone.name]))
        return read_model_config(backbone.model_copy(update={"name": str(folder)}))

    monkeypatch.setattr(estimates, "read_model_config", read)


@pytest.fixture
def unreachable(monkeypatch):
    """A hub at an address where nothing listens."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A hub in this process, with one model."""
    file = tmp_path / "somebody" / "model" / "resolve" / "main" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(SHAPES["distilbert/distilgpt2"]))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


# --- stages


def test_a_selectors_recipe_has_rounds_an_alignment_and_a_judge():
    stages = training_stages(load_recipe("summarization/demo"))
    assert [stage.name for stage in stages] == ["rounds", "alignment", "judge"]


def test_a_policys_recipe_has_no_alignment():
    stages = training_stages(load_recipe("personalized/imdb"))
    assert [stage.name for stage in stages] == ["rounds", "judge"]


def test_the_rounds_take_micro_batches_of_the_longest_rows():
    recipe = load_recipe("summarization/demo", ["selector.max_length=300", "federation.batch_size=6"])
    assert rounds_stage(recipe).step == StepShape(6, 300, one_position=True)
    recipe = load_recipe("summarization/demo", ["selector.max_length=300", "federation.micro_batch_size=2"])
    assert rounds_stage(recipe).step.rows == 2


def test_pairs_are_a_prompt_and_two_completions():
    step = rounds_stage(load_recipe("personalized/imdb")).step
    assert step == StepShape(8, 768, logit_positions=8 * 512, shared_prompts=True)


def test_samples_of_firm_are_a_prompt_and_a_completion_beside_the_rewards(hub):
    recipe = load_recipe("multi-objective/hh")
    stage = rounds_stage(recipe)
    assert stage.step == StepShape(8, 640, logit_positions=1024, entropies=True)
    assert [other.name for other in stage.others] == [
        backbone.name for reward in recipe.rewards.values() for backbone in reward.required_backbones()
    ]


def test_the_alignment_on_a_gpu_is_checkpointed():
    assert alignment_stage(load_recipe("summarization/demo")).step.checkpointing
    on_cpu = load_recipe("summarization/demo", ["runtime.devices=[cpu]"])
    assert not alignment_stage(on_cpu).step.checkpointing


# --- figures


@pytest.mark.parametrize("name", PAPER_SCALE)
def test_the_recipes_of_paper_scale_fit_the_gpu_of_the_papers(hub, name):
    recipe = load_recipe(name)
    for stage in training_stages(recipe):
        estimate = estimate_memory(stage, Shapes(), cuda=True)
        assert estimate.total < 0.9 * A100, stage.name  # the rest is for the context and fragmentation


def test_tldr_without_micro_batches_does_not_fit(hub):
    recipe = load_recipe("qa/shp", ["federation.micro_batch_size=null"])
    assert estimate_memory(rounds_stage(recipe), Shapes(), cuda=True).total > A100
    recipe = load_recipe(
        "qa/shp", ["federation.micro_batch_size=null", "selector.backbone.gradient_checkpointing=true"]
    )
    assert estimate_memory(rounds_stage(recipe), Shapes(), cuda=True).total < A100


def test_the_disk_has_the_servers_adapters_and_the_updates_of_one_round(hub):
    recipe = load_recipe("qa/shp")
    disk = estimate_disk(recipe, Shapes())
    adapter = 4 * Shapes().read(recipe.selector.backbone).lora_values(recipe.selector.lora)
    assert disk.server == adapter * (1 + 3 * (10 + 2))
    assert disk.logged == adapter * 3 * 10
    assert disk.updates == adapter * 10
    assert disk.private == 0


def test_private_modules_have_the_head_of_each_client(hub):
    disk = estimate_disk(load_recipe("personalized/imdb"), Shapes())
    assert disk.private > 2 * 3 * 4 * 50257 * 768


# --- the table


def test_the_table_has_a_row_for_each_stage_and_the_terms(hub):
    lines = describe_costs(load_recipe("summarization/tldr")).splitlines()
    assert lines[0].startswith("estimated peak memory")
    assert lines[1].split() == " ".join(COLUMNS).split()
    assert [line.split()[0] for line in lines[2:5]] == ["rounds", "alignment", "judge"]
    assert lines[5].startswith("estimated disk of the rounds (GB): ")
    assert len(lines) == 6


def test_a_backbone_on_a_hub_that_cannot_be_reached_is_one_line_and_the_rest_is_given(unreachable):
    recipe = load_recipe("debug", ["selector.backbone.name=nobody/has-this-model"])
    lines = describe_costs(recipe).splitlines()
    (rounds,) = [line for line in lines if "not estimated: rounds" in line]
    assert "nobody/has-this-model" in rounds
    assert "cannot be reached" in rounds
    assert any(line.strip().startswith("alignment (tiny-random)") for line in lines)


def test_a_config_json_is_read_from_the_hub(local_hub):
    assert Shapes().read(BackboneConfig(name="somebody/model")).layers == 6


def test_a_model_that_the_hub_does_not_have_is_one_line(local_hub):
    with pytest.raises(BackboneError, match="'somebody/other' cannot be read: the hub answers 404"):
        Shapes().read(BackboneConfig(name="somebody/other"))


def test_a_config_json_is_read_once(hub, monkeypatch):
    names = []
    read = estimates.read_model_config

    def record(backbone):
        names.append(backbone.name)
        return read(backbone)

    monkeypatch.setattr(estimates, "read_model_config", record)
    describe_costs(load_recipe("qa/shp"))
    assert names.count("google/gemma-2b") == 1


def test_an_embedded_backbone_that_has_not_been_generated_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    (line,) = describe_costs(load_recipe("debug")).splitlines()
    assert line.startswith("not estimated: rounds, alignment, judge, disk of the rounds: ")
    assert line.endswith(": the first run generates it")


def test_estimating_imports_no_heavy_library():
    heavy = "'torch', 'transformers', 'peft', 'datasets', 'prefect', 'mlflow'"
    code = (
        "import sys; from components.estimates import describe_costs;"
        " from components.recipes import load_recipe; describe_costs(load_recipe('debug'));"
        f" print([name for name in ({heavy}) if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
