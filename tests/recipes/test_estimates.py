"""Estimates of a recipe's costs: its stages, what is not known, and the recipes of paper scale."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from components.config import BackboneConfig, UserError
from components.models.backbone import BackboneError
from components.models.memory import StepShape
from components.recipes import estimates, load_recipe
from components.recipes.benchmarks import arm_recipe, benchmark_names, load_benchmark
from components.recipes.estimates import (
    Shapes,
    all_stages,
    check_fit,
    describe_arms,
    describe_costs,
    estimate_costs,
    estimate_disk,
    estimate_memory,
    rounds_stage,
)
from tests.support.shapes import SHAPES, hub_with_shapes

PAPER_SCALE = [
    "summarization/tldr",
    "qa/shp",
    "reasoning/paper",
    "personalized/imdb",
    "personalized/code_vulnerability",
    "personalized/cross_domain",
    "multi-objective/hh",
]
PAPER_BENCHMARKS = [name for name in benchmark_names() if name.startswith("paper-")]
A100 = 80e9
"""Bytes of the GPU that the papers used."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the config.json of models of paper scale."""
    monkeypatch.setattr(estimates, "read_model_config", hub_with_shapes(tmp_path))


@pytest.fixture
def unreachable(monkeypatch, hub_online):
    """A hub at an address where nothing listens."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def local_hub(tmp_path, monkeypatch, hub_online):
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


def test_a_selectors_recipe_has_rounds_an_alignment_and_a_judge_and_a_policys_no_alignment():
    stages = all_stages(load_recipe("summarization/demo"))
    assert [stage.name for stage in stages if stage.optimizer] == ["rounds", "alignment", "judge"]
    stages = all_stages(load_recipe("personalized/imdb"))
    assert [stage.name for stage in stages if stage.optimizer] == ["rounds", "judge"]


def test_the_rounds_take_micro_batches_of_the_longest_rows_and_pairs_share_their_prompt():
    recipe = load_recipe("summarization/demo", ["selector.max_length=300", "federation.batch_size=6"])
    assert rounds_stage(recipe).step == StepShape(6, 300, one_position=True)
    recipe = load_recipe("summarization/demo", ["selector.max_length=300", "federation.micro_batch_size=2"])
    assert rounds_stage(recipe).step.rows == 2
    step = rounds_stage(load_recipe("personalized/imdb")).step
    assert step == StepShape(8, 768, logit_positions=8 * 512, shared_prompts=True)


def test_samples_of_firm_are_a_prompt_and_a_completion_beside_the_rewards(hub):
    recipe = load_recipe("multi-objective/hh")
    stage = rounds_stage(recipe)
    assert stage.step == StepShape(8, 640, logit_positions=1024, entropies=True)
    assert [model.backbone.name for model in stage.frozen] == [
        "Ray2333/gpt2-large-helpful-reward_model",
        "Ray2333/gpt2-large-harmless-reward_model",
    ]
    both, alone = (estimate_memory(one, Shapes(), True) for one in (stage, replace(stage, frozen=())))
    assert both.total - alone.total == pytest.approx(4 * 2 * 774e6, rel=0.01)  # GPT-2 large in fp32


def test_the_alignment_on_a_gpu_is_checkpointed():
    def checkpointed(*overrides):
        stages = all_stages(load_recipe("summarization/demo", overrides))
        return [stage.backbone.gradient_checkpointing for stage in stages if stage.name == "alignment"]

    assert checkpointed() == [True]
    assert checkpointed("runtime.devices=[cpu]") == [False]


# --- figures


@pytest.mark.parametrize("name", PAPER_SCALE)
def test_the_recipes_of_paper_scale_fit_the_gpu_of_the_papers(hub, name):
    recipe = load_recipe(name)
    costs = estimate_costs(recipe, Shapes())
    assert costs.problems == {}
    for peak in costs.memory:
        assert peak.total < 0.9 * A100, peak.stage.name  # the rest is for the context and fragmentation


def recipes_of(name):
    """The recipe of each arm of a benchmark, with its first seed."""
    plan = load_benchmark(name)
    return {arm: arm_recipe(plan, arm, plan.seeds[0]) for arm in plan.arms}


@pytest.mark.parametrize("name", PAPER_BENCHMARKS)
def test_every_arm_of_a_benchmark_of_paper_scale_fits_the_gpu_of_the_papers(hub, name):
    shapes = Shapes()
    for arm, recipe in recipes_of(name).items():
        costs = estimate_costs(recipe, shapes)
        assert costs.problems == {}, arm
        assert max(peak.total for peak in costs.memory) < 0.9 * A100, arm


def test_arms_and_recipes_do_not_fit_without_micro_batches_of_their_own(hub):
    recipe = recipes_of("paper-fedbiscuit-summarization")["FedDPO"]
    section = recipe.federation.model_copy(update={"micro_batch_size": 16})
    larger = recipe.model_copy(update={"federation": section})
    assert estimate_memory(rounds_stage(larger), Shapes(), cuda=True).total > A100
    recipe = load_recipe("qa/shp", ["federation.micro_batch_size=null"])
    assert estimate_memory(rounds_stage(recipe), Shapes(), cuda=True).total > A100
    recipe = load_recipe(
        "qa/shp", ["federation.micro_batch_size=null", "selector.backbone.gradient_checkpointing=true"]
    )
    assert estimate_memory(rounds_stage(recipe), Shapes(), cuda=True).total < A100


def test_the_disk_has_the_adapters_and_updates_of_the_rounds_and_the_heads_of_clients(hub):
    # qa/shp keeps three adapters after 10 rounds, beside those of two commits and the logged ones.
    recipe = load_recipe("qa/shp")
    adapter = 4 * Shapes().of(recipe.selector.backbone).lora_values(recipe.selector.lora)
    assert estimate_disk(recipe, Shapes()) == adapter * (1 + 3 * (10 + 2) + 3 * 10 + 10)
    assert estimate_disk(load_recipe("personalized/imdb"), Shapes()) > 2 * 3 * 4 * 50257 * 768


def trees_of(*overrides):
    """The peaks of the trees of reasoning/paper: bytes of all weights, and of the rest."""
    costs = estimate_costs(load_recipe("reasoning/paper", overrides), Shapes())
    peaks = [peak for peak in costs.memory if peak.stage.name.startswith("trees")]
    return [(peak.total - peak.rest, peak.rest) for peak in peaks]


def test_models_of_trees_take_the_memory_of_their_weights_and_caches_and_none_at_an_endpoint(hub):
    ((weights, rest),) = trees_of("thoughts.loading=together", "policy.backbone.quantization=none")
    assert weights == pytest.approx(2 * (8.03e9 + 32.76e9), rel=0.001)  # parameters in bf16
    writer, evaluator = trees_of("policy.backbone.quantization=none")
    assert writer[0] + evaluator[0] == weights
    assert rest == evaluator[1]
    names = ["policy.generation_batch_size=1", "thoughts.evaluator.batch_size=4"]
    _, written = trees_of(*names)
    _, read = trees_of(*names, "thoughts.evaluator.read=expected")
    per_token = 2 * 64 * 8 * 128 * 2  # keys and values, layers, heads, size, bytes
    assert written[1] - read[1] == 4 * (640 + 1024 + 64 + 640) * per_token
    names = ["thoughts.loading=together", "thoughts.evaluator.base_url=http://127.0.0.1:1/v1"]
    ((weights, _),) = trees_of(*names)
    assert weights < 10e9


def test_a_judge_on_this_machine_and_one_that_scores_are_stages(hub):
    judge = "evaluation.judge={kind: autoj, model: meta-llama/Llama-3.1-8B, batch_size: 2}"
    recipe = load_recipe("summarization/tldr", [judge])
    *_, judge = estimate_costs(recipe, Shapes()).memory
    assert (judge.stage.name, judge.stage.step.tokens) == ("judge", 4096)
    assert judge.total - judge.rest == pytest.approx(2 * 8.03e9, rel=0.001)
    assert judge.rest > 2 * (3072 + 1024 + 64 + 3072) * 2 * 32 * 8 * 128 * 2  # the cache
    recipe = load_recipe("multi-objective/hh", ["evaluation.judge={kind: reward, reward: helpful}"])
    *_, judge = estimate_costs(recipe, Shapes()).memory
    assert judge.total - judge.rest == pytest.approx(4 * 774e6, rel=0.01)


def test_rewards_of_pairs_are_trained_and_score_alone_before_the_rounds(hub):
    training = "training: {backbone: {name: tiny-random}}"
    reward = f"rewards={{a: {{kind: trained, template: '{{prompt}} {{response}}', {training}}}}}"
    overrides = ["federation.method=feddpo", "federation.options={objective: ppo}", reward]
    costs = estimate_costs(load_recipe("debug", overrides), Shapes())
    trained, scored = costs.memory[:2]
    assert (trained.stage.name, scored.stage.name) == ("training of a", "reward a")
    assert trained.total - trained.rest == scored.total - scored.rest  # both in fp32
    assert trained.rest > scored.rest


def test_a_stage_with_a_reward_of_an_unknown_family_is_not_estimated(hub, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    recipe = load_recipe("multi-objective/hh", [f"rewards.helpful={{name: {tmp_path}}}"])
    costs = estimate_costs(recipe, Shapes())
    (problems,) = costs.problems.values()
    assert problems == ["rounds", "rollouts"]
    assert [peak.stage.name for peak in costs.memory] == ["judge", "answers"]


# --- a GPU of this machine


@pytest.fixture
def gpu(monkeypatch):
    """A maker of a machine with GPUs of so many GiB."""

    def make(*sizes):
        memory = {f"cuda:{n}": size * 2**30 for n, size in enumerate(sizes)}
        monkeypatch.setattr(estimates, "cuda_memory", lambda devices: memory)

    return make


def test_a_recipe_whose_models_do_not_fit_the_gpu_is_refused_with_their_sizes(hub, gpu):
    gpu(80)
    recipe = load_recipe(
        "reasoning/paper", ["thoughts.loading=together", "policy.backbone.quantization=none"]
    )
    with pytest.raises(UserError) as error:
        check_fit(recipe)
    assert "the stage 'trees' needs an estimated" in str(error.value)
    assert "cuda:0 has 85.9 GB" in str(error.value)
    assert "policy (meta-llama/Llama-3.1-8B) 16.1" in str(error.value)
    assert "evaluator (deepseek-ai/DeepSeek-R1-Distill-Qwen-32B) 65.5" in str(error.value)
    assert "Change thoughts.loading (in_turn)" in str(error.value)


def test_the_smallest_gpu_counts_but_for_runs_on_the_cpu_or_with_a_device_map(hub, gpu):
    check_fit(load_recipe("reasoning/paper"))
    gpu(80, 80)
    check_fit(load_recipe("reasoning/paper"))
    gpu(80, 24)
    with pytest.raises(UserError, match="'trees: evaluator' .* cuda:1 has 25.8 GB"):
        check_fit(load_recipe("reasoning/paper"))
    gpu(1)
    check_fit(load_recipe("summarization/tldr", ["runtime.devices=[cpu]"]))
    with pytest.raises(UserError, match="'judge'"):
        check_fit(load_recipe("summarization/tldr"))
    stages = ("selector", "policy", "evaluation.judge.selector")
    check_fit(load_recipe("summarization/tldr", [f"{key}.backbone.device_map=auto" for key in stages]))


def test_gpus_of_another_machine_are_a_warning(hub, gpu):
    gpu(8)
    ray = ["runtime.task_runner=ray", "runtime.ray_address=10.0.0.1:6379"]
    recipe = load_recipe("summarization/tldr", ray)
    check_fit(recipe)
    *_, warning = describe_costs(recipe).splitlines()
    assert warning.startswith("warning: if the GPUs of the cluster are like those of this machine, the stage")


def test_a_device_that_does_not_exist_is_left_to_the_run(hub):
    check_fit(load_recipe("reasoning/paper", ["runtime.devices=[cuda:7]"]))


# --- the table


def test_the_table_has_a_row_for_each_stage_of_a_recipe_or_of_the_arm_with_the_largest_peak(hub):
    lines = describe_costs(load_recipe("summarization/tldr")).splitlines()
    assert lines[0].endswith("estimated for one GPU; with runtime.devices=[cpu] for the CPU")
    assert lines[1].split() == ["stage", "batch", "x", "tokens", "weights", "rest", "total"]
    assert [line.split()[0] for line in lines[2:6]] == ["rounds", "alignment", "judge", "answers"]
    assert lines[6].startswith("estimated disk of the rounds (GB): ")
    assert len(lines) == 7
    recipes = recipes_of("paper-fedbiscuit-summarization")
    first, *others = describe_arms(recipes).splitlines()
    assert first == "the arm with the largest peak, FedDPO:"
    assert others == describe_costs(recipes["FedDPO"]).splitlines()


def test_what_is_not_known_of_arms_is_named_once(unreachable):
    unknown = load_recipe("debug", ["selector.backbone.name=nobody/has-this-model"])
    lines = describe_arms({"one": unknown, "two": unknown, "known": load_recipe("debug")}).splitlines()
    (reason,) = [line for line in lines if line.startswith("not estimated: ")]
    assert "nobody/has-this-model" in reason


def test_a_benchmark_of_which_no_arm_is_known_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("FED_RLHF_BACKBONES", str(tmp_path))
    (line,) = describe_arms({"one": load_recipe("debug")}).splitlines()
    assert line.endswith(": the first run generates it")


def test_a_backbone_on_a_hub_that_cannot_be_reached_is_one_line_and_the_rest_is_given(unreachable):
    recipe = load_recipe("debug", ["selector.backbone.name=nobody/has-this-model"])
    lines = describe_costs(recipe).splitlines()
    (rounds,) = [line for line in lines if "not estimated: rounds" in line]
    assert "nobody/has-this-model" in rounds
    assert "cannot be reached" in rounds
    assert any(line.strip().startswith("alignment (tiny-random)") for line in lines)


def test_a_config_json_is_read_from_the_hub_and_a_missing_model_is_one_line(local_hub):
    assert Shapes().of(BackboneConfig(name="somebody/model")).layers == 6
    with pytest.raises(BackboneError, match="'somebody/other' cannot be read: the hub answers 404"):
        Shapes().of(BackboneConfig(name="somebody/other"))


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
    assert line.startswith("not estimated: rounds, alignment, judge, answers, disk of the rounds: ")
    assert line.endswith(": the first run generates it")


def test_estimating_imports_no_heavy_library():
    heavy = "'torch', 'transformers', 'peft', 'datasets', 'prefect', 'mlflow'"
    code = (
        "import sys; from components.recipes.estimates import describe_costs;"
        " from components.recipes import load_recipe; describe_costs(load_recipe('debug'));"
        f" print([name for name in ({heavy}) if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
