"""Tests that run on claimed devices alone; test_claimed_cuda.py starts them in a process of their own."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from components.config import BackboneConfig, OptimizerConfig, UserError
from components.config.alignment import DpoConfig
from components.config.thoughts import EvaluatorOptions, ThoughtsConfig
from components.data.records import Pair
from components.learning.loop import Training
from components.recipes import check_recipe, load_recipe
from tests.claimed_cuda.devices import MISMATCHES, NONDETERMINISTIC, UNREPEATABLE, DeviceMismatch
from tests.conftest import ROOT
from tests.support.bare_loop import open_loop, prepare_rewards

VARIANTS = yaml.safe_load((Path(ROOT) / "tests" / "golden" / "variants.yaml").read_text(encoding="utf-8"))
VARIANTS = {name: overrides for name, overrides in VARIANTS.items() if not name.startswith("_")}
COUNT = int(os.environ["CLAIMED_DEVICES"])
LAST = f"cuda:{COUNT - 1}"
PAIRS = [Pair(f"paper {n}", f"the {n} finding", f"{n} pages", client_id="c") for n in range(6)]


def clients_at_a_time(run):
    """The tasks of a round."""
    federation = run.run.recipe().federation
    return -(-federation.clients_per_round // federation.clients_per_task)


def with_backbone(section, dtype="auto"):
    """A model's section with the tiny backbone in a type."""
    return section.model_copy(update={"backbone": BackboneConfig(name="tiny-random", dtype=dtype)})


def test_a_recipe_that_exceeds_the_memory_of_a_device_is_refused(ran):
    torch.ones(1, device=LAST)
    check_recipe(load_recipe("debug"))
    settings = ["selector.max_length=2048", "federation.batch_size=65536"]
    with pytest.raises(UserError, match="the stage 'rounds' needs .* GB, and cuda:0 has 85.9 GB"):
        check_recipe(load_recipe("debug", settings))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "fedbis-groups"])  # the data have none
def test_the_rounds_of_a_method_are_on_one_device(name, prepared, tmp_path, ran):
    from components.federation.clients.worker import build_trainer

    recipe = load_recipe("debug", [*VARIANTS[name], f"runtime.devices=[{LAST}]"])
    prepare_rewards(recipe, prepared, tmp_path, tmp_path / "judges")
    loop = open_loop(recipe, prepared, tmp_path, build_trainer(recipe, LAST))
    state = loop.run()
    assert set(ran.operations) == {LAST}
    for digest in state.adapters.values():
        for tensor in loop.commits.store.get(digest).values():
            assert tensor.dtype == torch.float32
            assert tensor.isfinite().all()


@pytest.fixture
def ray_processes(ray_settings, monkeypatch):
    """The GPUs that have run each task on Ray, by the words of the task's function."""
    from tasks import ray_tasks

    gpus = defaultdict(set)

    def map_task(task, calls, runtime):
        count = ray_tasks.reserve_gpus().count
        gpus[task.fn.__name__.replace("_", " ")] |= {number % count for number in range(len(calls))}
        return submit(task, calls, runtime)

    submit = ray_tasks.map_task
    monkeypatch.setattr(ray_tasks, "map_task", map_task)
    yield gpus
    for name, numbers in gpus.items():
        print(f"GPUS {name}: {sorted(numbers)}")


@pytest.fixture(scope="module")
def ray_settings():
    """Lets processes of Ray find claimed devices, and read a token of the tests' own."""
    site = Path(__file__).with_name("site")
    with tempfile.NamedTemporaryFile("w") as token, pytest.MonkeyPatch.context() as patch:
        token.write(secrets.token_hex(32))
        token.flush()
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", token.name)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
        yield
        import ray

        ray.shutdown()


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_method_on_processes_of_ray_has_the_bytes_of_one_device(name, new_workplace, ray_processes):
    place = new_workplace(f"ray {name}")
    alone = place.run(*VARIANTS[name], "runtime.devices=[cuda:0]")
    devices = [f"cuda:{number}" for number in range(COUNT)]
    run = place.run(*VARIANTS[name], f"runtime.devices=[{', '.join(devices)}]")
    assert run.run.recipe().runtime.task_runner == "ray"
    assert len(ray_processes["run shard"]) >= min(COUNT, clients_at_a_time(run))
    assert_same_results(run, alone)


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
def test_a_check_names_ray_and_the_gpus(ray_settings, ran):
    from tasks.devices import describe_places

    ran.operations["check"] += 1  # it computes nothing
    clients, where = describe_places(load_recipe("debug", ["federation.clients_per_round=4"]))
    assert clients == min(COUNT, 4)
    assert where.startswith("Ray on this machine (1 node, ")
    assert where.endswith(f" {COUNT} GPUs), with a process per GPU")


def assert_same_results(run, alone):
    for phase in ("federation", "alignment", "evaluation"):
        results = [one.folder / phase / "result.json" for one in (run, alone)]
        assert results[0].read_bytes() == results[1].read_bytes(), phase


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
def test_a_round_in_which_a_process_of_a_gpu_is_lost_has_the_bytes_of_one_device(
    new_workplace, ray_processes
):
    place = new_workplace("lost")
    settings = ["federation.clients_per_round=4", "federation.rounds=3"]
    alone = place.run(*settings, "runtime.devices=[cuda:0]")
    killed = []

    def kill():
        while not killed:
            time.sleep(0.05)
            commits = list(place.runs.glob("*/federation/commits/00001.json"))
            busy = [one for one in psutil.Process().children(recursive=True) if is_at_work(one)]
            if len(commits) == 2 and busy:
                busy[0].kill()
                killed.append(busy[0].pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run = place.run(*settings)
    assert killed
    assert_same_results(run, alone)


def is_at_work(process):
    """Whether a process of Ray works on a shard."""
    try:
        return "run_shard" in " ".join(process.cmdline())
    except psutil.Error:
        return False


ARMS = {
    "FedBis": ["federation.rounds=1", "alignment.prompts=4"],
    "FedBiscuit": ["federation.rounds=2", *VARIANTS["fedbiscuit-least-loss"], "alignment.prompts=4"],
}
PLAN = {"recipe": "debug", "seeds": [0], "arms": ARMS, "contests": [["FedBis", "FedBiscuit"]]}


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
def test_the_arms_of_a_benchmark_are_aligned_side_by_side_with_the_bytes_of_one_device(
    new_workplace, ray_processes
):
    from flows.benchmark import benchmark

    place = new_workplace("arms")
    plan = place.folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    folders = []
    for settings in (["runtime.devices=[cuda:0]"], []):
        report, _ = place.call(lambda settings=settings: benchmark(benchmark=str(plan), overrides=settings))
        folders.append(Path(report).parent)
    alone, together = folders
    names = [path.relative_to(alone) for path in alone.rglob("result.json")]
    names += [path.relative_to(alone) for path in alone.glob("contests/*/*/*.json")]
    assert len(names) > 6
    for name in names:
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    assert ray_processes["train dpo"] == {0, 1}


PIPELINES = {
    "selectors": ["federation.clients_per_round=4", "federation.rounds=2", "selector.lora.dropout=0"],
    "private": ["federation.method=fedper", "federation.options={shared_layers: 1}", "policy.lora.dropout=0"],
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_on_all_devices_has_the_bytes_of_one(name, new_workplace, ran):
    place = new_workplace(name)
    alone = place.run(*PIPELINES[name], "runtime.devices=[cuda:0]")
    assert set(ran.operations) == {"cuda:0"}
    ran.clear()
    run = place.run(*PIPELINES[name], "runtime.task_runner=threads")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert len(ran.operations) == min(COUNT, 4)  # a round or the measurement has four clients
    assert_same_results(run, alone)


def test_losses_scores_and_samples_in_fp32_are_those_of_the_cpu(debug):
    from components.learning.selector_training import train_selector
    from components.models.policy import Policy
    from components.models.selector import Comparison
    from components.models.selector_model import Selector

    results = []
    for device in ("cpu", LAST):
        selector = Selector(with_backbone(debug.selector, "float32"), device)
        training = Training(steps=2, batch_size=4, optimizer=OptimizerConfig(lr=1e-2), seed=0)
        adapter, trained = train_selector(selector, PAIRS, selector.slot.initial_adapter(0), training)
        selector.slot.load(adapter)
        margins = selector.margins([Comparison(*pair.texts) for pair in PAIRS])
        policy = Policy(with_backbone(debug.policy, "float32"), device)
        samples = [[one.text for one in group] for group in policy.generate(["a", "paper b"], 0, 0.7, 2)]
        results.append((trained.losses, margins.tolist(), samples))
    (losses, margins, samples), (own_losses, own_margins, own_samples) = results
    assert own_losses[0] == pytest.approx(losses[0], abs=1e-4)
    assert own_margins == pytest.approx(margins, abs=1e-3)
    assert own_samples == samples


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_of_a_bf16_model_has_few_products_in_fp32(dropout, debug, ran):
    from components.learning.selector_training import train_selector
    from components.models.selector_model import Selector

    lora = debug.selector.lora.model_copy(update={"dropout": dropout})
    selector = Selector(with_backbone(debug.selector).model_copy(update={"lora": lora}), LAST)
    ran.clear()
    training = Training(steps=1, batch_size=4, optimizer=OptimizerConfig(), seed=0)
    train_selector(selector, PAIRS, selector.slot.initial_adapter(0), training)
    assert ran.products["float32"] <= 2
    assert ran.products["bfloat16"] > 20


def test_dpo_of_the_server_and_a_trained_reward_are_on_one_device(debug, tmp_path, ran):
    from components.alignment.dpo import align_policy
    from components.learning.reward_model import TrainedReward, train_reward
    from components.models.policy import Policy

    dpo = DpoConfig(epochs=1, batch_size=2, micro_batch_size=2)
    pairs = [
        {"prompt": f"paper {n}", "chosen_ids": [50, 60 + n, 2], "rejected_ids": [70, 2]} for n in range(4)
    ]
    result = align_policy(
        Policy(with_backbone(debug.policy), LAST), dpo, pairs, tmp_path, ["a paper"], seed=0
    )
    assert len(result.history) == 2
    assert set(ran.operations) == {LAST}
    ran.clear()
    training = {"backbone": {"name": "tiny-random"}, "steps": 1, "batch_size": 2}
    reward = TrainedReward(template="{prompt}|{response}", training=training)
    train_reward(reward, PAIRS, 0, LAST)
    assert set(ran.operations) == {LAST}


@pytest.mark.parametrize(
    ("settings", "precisions"),
    [({}, {"tf32"}), ({"tf32": False}, {"none"}), ({"dtype": "bfloat16"}, set())],
)
def test_a_frozen_reward_in_fp32_scores_in_tf32_and_training_does_not(settings, precisions, tmp_path, ran):
    from components.learning.reward_model import TrainedReward, train_reward
    from components.models.rewards.classifier import RewardModel

    training = {"backbone": {"name": "tiny-random"}, "steps": 1, "batch_size": 2}
    section = TrainedReward(template="{prompt}|{response}", training=training, **settings)
    model, tokenizer, _ = train_reward(section, PAIRS, 0, LAST)
    assert set(ran.precisions) == {"none"}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = RewardModel(section.as_classifier(tmp_path), LAST)
    ran.clear()
    scorer.score(["why?", "how?"], ["because", "so"])
    assert sum(ran.products.values()) > 10
    assert set(ran.precisions) == precisions
    assert torch.backends.cuda.matmul.fp32_precision == "none"


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
@pytest.mark.parametrize("devices", ["[cuda:0]", "[cuda:0,cuda:1]"])
def test_rewards_in_rounds_use_tf32_on_one_device_alone(devices, prepared, tmp_path, ran):
    from components.federation.clients.worker import build_trainer

    recipe = load_recipe("debug", [*VARIANTS["firm-weights"], f"runtime.devices={devices}"])
    prepare_rewards(recipe, prepared, tmp_path, tmp_path / "judges")
    ran.clear()
    open_loop(recipe, prepared, tmp_path, build_trainer(recipe, "cuda:0")).run()
    assert ("tf32" in ran.precisions) == (devices == "[cuda:0]")
    assert ran.precisions["none"]


def test_models_of_trees_write_and_read_on_one_device(debug, ran):
    from components.alignment.thoughts.tree_models import Request, TreeModels

    options = EvaluatorOptions(model="tiny-random", max_prompt_tokens=64, max_new_tokens=4)
    thoughts = ThoughtsConfig(questions=[{"set": "csqa"}], max_thought_tokens=4, evaluator=options)
    models = TreeModels(with_backbone(debug.policy), thoughts, LAST)
    requests = [Request(prompt=f"think {n}", seed=n) for n in range(3)]
    assert len(models.write(requests)) == 3
    assert len(models.score(requests)) == 3
    assert set(ran.operations) == {LAST}


def test_threads_train_side_by_side_each_on_its_device(debug, ran):
    from components.learning.selector_training import train_selector
    from components.models.selector_model import Selector

    selectors = [Selector(debug.selector, f"cuda:{n}") for n in range(COUNT)]
    adapters = {}

    def train(selector):
        training = Training(steps=2, batch_size=2, optimizer=OptimizerConfig(), seed=0)
        initial = selector.slot.initial_adapter(0)
        adapters[selector.device], _ = train_selector(selector, PAIRS, initial, training)

    threads = [threading.Thread(target=train, args=[selector]) for selector in selectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(adapters) == len(ran.operations) == COUNT


# --- Faults that are planted, and must be found

PLANTED = {
    "a tensor on the CPU": lambda model: torch.ones(2, device=LAST) + torch.ones(2),
    "a table on the CPU": lambda model: model(torch.zeros(1, 2, dtype=torch.long)),
    "a generator on the CPU": lambda model: torch.rand(2, device=LAST, generator=torch.Generator()),
    "an array of a tensor on the device": lambda model: torch.ones(2, device=LAST).numpy(),
    "values on the CPU at positions": lambda model: torch.ones(3, device=LAST).index_put_(
        (torch.tensor([0, 1]),), torch.ones(2)
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, debug):
    from components.models.backbone import load_backbone

    model = load_backbone(BackboneConfig(name="tiny-random"), LAST)
    with pytest.raises((DeviceMismatch, TypeError)):
        PLANTED[fault](model)
    MISMATCHES.clear()  # of the mismatch that was planted


def test_operations_without_a_deterministic_kernel_are_found():
    numbers = torch.ones(4, device=LAST)
    numbers.long().cumsum(0)
    assert not UNREPEATABLE
    numbers.cumsum(0)
    numbers.histc(2)
    assert UNREPEATABLE == ["aten.cumsum", "aten.histc"]
    UNREPEATABLE.clear()


def test_the_operations_without_a_deterministic_kernel_are_those_of_torchs_documentation(ran):
    torch.ones(1, device=LAST)
    text = torch.use_deterministic_algorithms.__doc__.split("will throw a\n")[-1].split("In addition")[0]
    assert set(re.findall(r"\* :(?:class|func):`([\w.]+)`", text)) == set(NONDETERMINISTIC)


@pytest.mark.skipif(COUNT < 2, reason="needs two devices")
def test_two_devices_in_one_operation_are_found():
    with pytest.raises(DeviceMismatch):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    MISMATCHES.clear()
