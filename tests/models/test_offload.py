"""Backbones whose layers are offloaded: the same scores, samples and training, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from components.alignment.dpo import align_policy
from components.config import BackboneConfig, DpoObjective, OptimizerConfig, RecipeError, UserError
from components.learning.loop import Training
from components.learning.pair_scores import pair_logprobs
from components.learning.selector_training import train_selector
from components.models.adapters import AdapterSlot, export_adapter
from components.models.backbone import BackboneError, fetch_backbone, load_backbone
from components.models.offload import place_modules
from components.models.policy import Policy
from components.models.resident import ResidentPolicy
from components.models.selector import Comparison
from components.models.selector_model import Selector
from components.recipes import load_recipe
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.random_models import build_random
from tests.support.training import train_pairs

OFFLOADED = {"device_map": {"model.layers.0": "disk"}}
COMPARISONS = [Comparison(*pair.texts) for pair in PAIRS]
WITH_ADAPTER = ["alignment.dpo.reference=sft", "alignment.dpo.reference_adapter=x"]
TRAINING = Training(steps=3, batch_size=4, optimizer=OptimizerConfig(lr=1e-2), seed=1)


@pytest.fixture(params=[False, True], ids=["plain", "checkpointed"])
def sections(request, debug):
    """A function that gives a section of the recipe with its backbone on the device, and partly on disk."""

    def build(section):
        settings = getattr(debug, section)
        common = settings.backbone.model_copy(update={"gradient_checkpointing": request.param})
        backbones = (common, common.model_copy(update=OFFLOADED))
        return [settings.model_copy(update={"backbone": backbone}) for backbone in backbones]

    return build


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def devices(model):
    return Counter(parameter.device.type for parameter in model.parameters())


def test_a_layer_on_disk_has_no_weights_in_memory_and_gives_the_same_logits():
    plain, offloaded = (
        load_backbone(BackboneConfig(name="tiny-random", **x), "cpu") for x in ({}, OFFLOADED)
    )
    assert devices(plain) == {"cpu": 20}
    assert devices(offloaded) == {"cpu": 11, "meta": 9}
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        assert torch.equal(plain(ids).logits, offloaded(ids).logits)
    assert devices(offloaded) == {"cpu": 11, "meta": 9}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_selector_scores_and_trains_as_on_the_device(sections, threads):
    torch.set_num_threads(threads)
    results = []
    for section in sections("selector"):
        selector = Selector(section, "cpu")
        start = random_tensors(selector.slot, seed=1, scale=0.2)
        trained, metrics = train_selector(selector, PAIRS, start, TRAINING)
        results.append((trained, metrics.losses, selector.logits(COMPARISONS)))
        assert selector.one_position
        assert devices(selector.model)["meta"] == 9 * (section.backbone.device_map is not None)
    torch.set_num_threads(1)
    (plain, plain_losses, plain_logits), (trained, losses, logits) = results
    assert losses == plain_losses
    assert np.array_equal(logits, plain_logits)
    assert_equal(plain, trained)


def test_a_clients_dpo_is_that_on_the_device(sections):
    results = []
    for section in sections("policy"):
        resident = ResidentPolicy(section, "cpu")
        reference = pair_logprobs(resident, PAIRS, 4, reference=True)
        start = random_tensors(resident.slot, seed=1, scale=0.2)
        trained = train_pairs(resident, PAIRS, start, DpoObjective(), TRAINING, reference=reference)
        results.append((reference, trained.adapter))
    assert np.array_equal(results[0][0], results[1][0])
    assert_equal(results[0][1], results[1][1])


def test_the_servers_dpo_is_that_on_the_device(debug, sections, tmp_path):
    adapters = []
    pairs = [{"prompt": f"p {n}", "chosen_ids": [40 + n, 2], "rejected_ids": [50, n]} for n in range(4)]
    sizes = {"batch_size": 4, "micro_batch_size": 2, "lr": 1e-2, "epochs": 1}
    for section in sections("policy"):
        dpo = debug.alignment.dpo.model_copy(update=sizes)
        policy = Policy(section, "cpu")
        align_policy(policy, dpo, pairs, tmp_path, [], 0)
        adapters.append(AdapterSlot(policy.model).read())
    assert_equal(*adapters)


def sample(policy):
    rows = policy.generate(["a paper", "another one"], 3, temperature=1.0, count=3)
    return [completion.ids for row in rows for completion in row]


@pytest.mark.parametrize("threads", [1, 2])
def test_samples_of_a_backbone_are_those_on_the_device(sections, threads):
    torch.set_num_threads(threads)
    plain, offloaded = (sample(Policy(section, "cpu")) for section in sections("policy"))
    torch.set_num_threads(1)
    assert plain == offloaded


def test_samples_with_an_adapter_of_a_folder_are_those_on_the_device(sections, tmp_path):
    """Offloaded weights are not merged, so the logits differ by rounding."""
    plain, offloaded = sections("policy")
    slot = AdapterSlot(Policy(plain, "cpu").attach_lora(plain.lora))
    tensors = random_tensors(slot, seed=1, scale=0.2)
    folder = export_adapter(tensors, plain.lora, plain.backbone, tmp_path / "adapter")
    policies = [Policy(section, "cpu", folder) for section in (plain, offloaded)]
    assert_equal(AdapterSlot(policies[1].model).read(), tensors)
    assert sample(policies[0]) == sample(policies[1])
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        assert torch.equal(*(policy.model(ids).logits for policy in policies))


def place(device, max_memory):
    backbone = BackboneConfig(name="tiny-random", device_map="auto", max_memory=max_memory)
    config = AutoConfig.from_pretrained(fetch_backbone("tiny-random"), num_hidden_layers=4)
    return place_modules(backbone, config, torch.float32, device)


@pytest.mark.parametrize(
    ("device", "max_memory", "expected"),
    [
        ("cpu", {}, ["cpu", "cpu", "cpu", "cpu"]),
        ("cpu", {"device": "183KB"}, ["cpu", "cpu", "cpu", "cpu"]),
        ("cpu", {"device": "182KB"}, ["cpu", "cpu", "disk", "disk"]),
        ("cpu", {"device": "80KB"}, ["disk", "disk", "disk", "disk"]),
        ("cuda:1", {"device": "150KB", "cpu": "40KB"}, ["cuda:1", "cuda:1", "cpu", "disk"]),
        ("cuda:1", {"device": "80KB", "cpu": "80KB"}, ["cpu", "cpu", "disk", "disk"]),
    ],
)
def test_auto_fills_the_device_and_then_the_memory(device, max_memory, expected):
    """The embeddings and the norm take 33,536 bytes, and a layer 37,120; one is computed on the device."""
    places = place(device, max_memory)
    assert [places.pop(f"model.layers.{n}") for n in range(4)] == expected
    assert places.keys() == {"model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"}
    assert set(places.values()) == {device}


def test_a_device_without_room_for_the_rest_and_a_layer_is_refused():
    words = r"embeddings, the head and one layer of 'tiny-random' need .*raise"
    with pytest.raises(UserError, match=words):
        place("cpu", {"device": "50KB"})


def test_weights_that_are_converted_while_they_are_loaded_cannot_stay_on_disk(tmp_path):
    build_random("mixtral", num_local_experts=2).save_pretrained(tmp_path)
    backbone = BackboneConfig(name=str(tmp_path), **OFFLOADED)
    with pytest.raises(BackboneError, match=r"\(mixtral\) cannot stay on disk, .*leave 'disk' out"):
        load_backbone(backbone, "cpu")


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp", "model.layers.2"])
def test_what_is_no_layer_is_refused(name):
    words = rf"'{name}', which is no layer of 'tiny-random': .*model\.layers\.0"
    with pytest.raises(UserError, match=words):
        load_backbone(BackboneConfig(name="tiny-random", device_map={name: "disk"}), "cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backbone.device_map=balanced"], "device_map"),
        (["backbone={device_map: auto, quantization: 8bit}"], "not quantized"),
        (["backbone.max_memory={cpu: 1GiB}"], "max_memory is for device_map 'auto'"),
        (["backbone={device_map: auto, max_memory: {cpu: 1 apple}}"], "max_memory.cpu is '1 apple'"),
        (["backbone.device_map=auto", *WITH_ADAPTER], "leave out policy.backbone.device_map"),
    ],
)
def test_placements_that_are_not_supported_are_refused(overrides, message):
    backbone, *others = overrides
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", [f"policy.{backbone}", *others])


def test_a_recipe_without_placement_has_the_fingerprint_of_earlier_ones():
    stored = load_recipe("debug").policy.backbone.model_dump(mode="json")
    assert not {"device_map", "max_memory"} & stored.keys()
