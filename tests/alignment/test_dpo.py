"""DPO on the tiny backbone: what is saved, the KL, and its limit."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from components.alignment.dpo import TokenDpoLoss, align_policy, prepare_model, save_adapter
from components.config import UserError
from components.learning.kl import kl_to_reference
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy
from components.models.store import AdapterError
from tests.support.adapters import random_tensors
from tests.support.dpo import PAIRS, REFERENCES


def align(debug, config, folder, kl_prompts=(), pairs=PAIRS[:4], policy=None, **options):
    """Align the tiny policy by DPO."""
    policy = Policy(policy or debug.policy, "cpu")
    return align_policy(policy, config, pairs, folder, kl_prompts, seed=0, **options)


# --- The reference


@pytest.mark.parametrize("reference", REFERENCES)
def test_training_starts_at_the_reference(debug, config_with, reference):
    policy = Policy(debug.policy, "cpu")
    policy.model = prepare_model(policy, config_with(reference), 0)
    initial = AdapterSlot(policy.model).read() if reference == "round_start" else None
    assert kl_to_reference(policy, ["a paper", "another"], seed=0, reference=initial) == {
        "kl_sequence": pytest.approx(0, abs=1e-6),
        "kl_token": pytest.approx(0, abs=1e-6),
    }


def test_a_reference_is_not_rounded_into_a_backbone_in_bfloat16_and_its_policy_is_what_is_saved(
    debug, config_with, tmp_path
):
    backbone = debug.policy.backbone.model_copy(update={"dtype": "bfloat16"})
    config = debug.policy.model_copy(update={"backbone": backbone})
    slot = AdapterSlot(attach_lora(load_backbone(backbone, "cpu"), config.lora))
    lora = config.lora.model_copy(update={"dropout": 0.5})
    folder = export_adapter(random_tensors(slot, 0, 0.01), lora, backbone, tmp_path / "earlier")
    dpo = config_with("sft", folder)
    policy = Policy(config, "cpu")
    before = torch.get_rng_state()
    model = prepare_model(policy, dpo, 0)
    assert torch.equal(torch.get_rng_state(), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "default" in name}
    ids = torch.tensor([[50, 51, 52]])
    saved = save_adapter(model, config, dpo, tmp_path / "saved")
    opened = {"plain": Policy(config, "cpu"), "saved": Policy(config, "cpu", saved)}
    logits = {name: one.model(input_ids=ids).logits.detach() for name, one in opened.items()}
    logits["trained"] = model.train()(input_ids=ids).logits.detach()
    effect = (logits["saved"] - logits["plain"]).abs().mean()
    assert effect > 0
    assert (logits["trained"] - logits["saved"]).abs().mean() < 0.2 * effect
    rows = [(pair["prompt"], pair["chosen_ids"], pair["rejected_ids"]) for pair in PAIRS]
    rows = [(policy.encode(prompt), chosen, rejected) for prompt, chosen, rejected in rows]
    loss = TokenDpoLoss(policy, model, rows, dpo)
    with torch.no_grad():
        assert torch.equal(loss.logprobs(list(range(len(rows)))), loss.reference)


# --- The training


def test_the_initial_values_of_a_new_adapter_are_fp32_and_a_function_of_the_seed(debug, config_with):
    adapters = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(adapters))
        slot = AdapterSlot(prepare_model(Policy(debug.policy, "cpu"), config_with(), seed))
        adapters.append(slot.read())
        assert {parameter.dtype for parameter in slot.parameters} == {torch.float32}
    name = next(name for name in adapters[0] if "lora_A" in name)
    assert torch.equal(adapters[0][name], adapters[1][name])
    assert not torch.equal(adapters[0][name], adapters[2][name])


@pytest.fixture(scope="module")
def alignment(debug, tmp_path_factory):
    """An alignment of two epochs, its calls of progress, and a number that was drawn after it."""
    config = debug.alignment.dpo.model_copy(
        update={
            "lr": 5e-2,
            "batch_size": 4,
            "micro_batch_size": 2,
            "epochs": 2,
        }
    )
    folder = tmp_path_factory.mktemp("alignment")
    calls = []
    torch.manual_seed(1)
    result = align(
        debug,
        config,
        folder,
        ["a paper", "another"],
        PAIRS[:4] * 2,
        progress=lambda step, steps, logs: calls.append((step, steps)),
    )
    return SimpleNamespace(result=result, folder=folder, calls=calls, drawn_after=torch.rand(1))


def test_alignment_takes_and_reports_its_steps_lowers_the_loss_and_leaves_the_reference(alignment):
    assert alignment.result.metrics["pairs"] == 8
    assert alignment.result.metrics["steps"] == len(alignment.result.history) == 4
    assert alignment.calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    first, *_, last = alignment.result.history
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["loss"] < first["loss"]
    assert alignment.result.metrics["kl_sequence"] > alignment.result.metrics["kl_token"] > 1e-4


def test_alignment_does_not_change_the_state_of_torchs_generator(alignment):
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), alignment.drawn_after)


def test_peft_opens_a_checkpoint_of_each_epoch_and_the_last_one_is_the_result(alignment, debug):
    from peft import PeftModel

    paths = [alignment.folder / name for name in ("epoch-1", "epoch-2", "final")]
    assert [*alignment.result.checkpoints, alignment.result.adapter] == paths
    ids = torch.tensor([[50, 51, 52]])
    logits = [load_backbone(debug.policy.backbone, "cpu")(input_ids=ids).logits]
    for path in paths:
        model = PeftModel.from_pretrained(load_backbone(debug.policy.backbone, "cpu"), path).eval()
        logits.append(model(input_ids=ids).logits)
    backbone, first, second, final = logits
    assert torch.equal(second, final)
    assert not torch.allclose(first, second, atol=1e-4)
    assert not torch.allclose(first, backbone, atol=1e-4)


def test_nothing_in_the_folder_is_pickled(alignment):
    files = {path.name for path in alignment.folder.rglob("*") if path.is_file()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "prompt_template.txt"}


@pytest.mark.parametrize(
    ("reference", "rank", "alpha"), [("base", 4, 32.0), ("round_start", 2, 4.0), ("sft", 6, 6.0)]
)
def test_the_saved_folder_gives_the_logits_of_the_trained_policy_and_states_its_rank_and_scale(
    debug, config_with, tmp_path, reference, rank, alpha
):
    """It is opened on the plain backbone. The LoRA of the reference may differ from the recipe's."""
    lora = debug.policy.lora.model_copy(update={"r": 4, "alpha": 32.0})
    policy = Policy(debug.policy.model_copy(update={"lora": lora}), "cpu")
    result = align_policy(policy, config_with(reference, lr=5e-2), PAIRS, tmp_path, [], seed=0)
    ids = torch.tensor([[50, 51, 52]])
    with torch.no_grad():
        trained, saved, backbone = (
            opened.model(input_ids=ids).logits
            for opened in (policy, Policy(debug.policy, "cpu", result.adapter), Policy(debug.policy, "cpu"))
        )
    assert torch.allclose(saved, trained, atol=1e-5)
    assert not torch.allclose(saved, backbone, atol=1e-3)
    options = json.loads((result.adapter / "adapter_config.json").read_text())
    assert (options["r"], options["lora_alpha"]) == (rank, alpha)
    tensors = load_file(result.adapter / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {rank}


# --- The KL


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 1.0), ("float32", 0.7), ("bfloat16", 1.0)])
def test_the_kl_is_summed_over_the_vocabulary_at_each_sampled_token_from_fp32_logits(
    debug, reference_adapter, dtype, temperature
):
    """Computed here for one sample: sum_t sum_v p log(p / q), p the policy and q the backbone."""
    backbone = debug.policy.backbone.model_copy(update={"dtype": dtype})
    policy = Policy(debug.policy.model_copy(update={"backbone": backbone}), "cpu", reference_adapter)
    completion = policy.generate(["a paper"], 4, temperature)[0][0]
    prompt = policy.encode("a paper")
    ids = torch.tensor([[*prompt, *completion.ids]])

    def logprobs():
        base = policy.model.get_base_model()
        hidden = base.base_model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        logits = hidden.float() @ base.get_output_embeddings().weight.float().T
        return (logits / temperature).log_softmax(-1)

    with torch.no_grad():
        p = logprobs()
        with policy.model.disable_adapter():
            q = logprobs()
    expected = (p.exp() * (p - q)).sum().item()
    kl = kl_to_reference(policy, ["a paper"], 4, temperature)
    assert expected > 1e-3
    assert kl["kl_sequence"] == pytest.approx(expected, rel=1e-4)
    assert kl["kl_token"] == pytest.approx(expected / len(completion.ids), rel=1e-4)


def test_without_prompts_there_is_no_kl(debug, reference_adapter):
    assert kl_to_reference(Policy(debug.policy, "cpu", reference_adapter), [], seed=4) == {}


# --- Errors


def test_alignment_without_pairs_or_with_a_missing_reference_adapter_is_refused(debug, config_with, tmp_path):
    with pytest.raises(UserError, match="no labeled pairs"):
        align(debug, config_with(), tmp_path, pairs=[])
    config = config_with("sft", tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=r"reference_adapter .*nowhere: this is not a PEFT adapter folder"):
        prepare_model(Policy(debug.policy, "cpu"), config, 0)


# --- The limit of the KL


def test_training_ends_at_the_first_checkpoint_whose_kl_is_above_the_limit(debug, config_with, tmp_path):
    sizes = {"batch_size": 2, "micro_batch_size": 2}
    config = config_with(epochs=6, lr=3e-2, max_kl=1e-4, checkpoint_every=3, **sizes)
    result = align(debug, config, tmp_path, ["paper 1", "paper 2"])
    assert result.metrics["kl_sequence"] > 1e-4
    assert result.metrics["steps"] == len(result.history) == 2
    assert result.metrics["epochs"] == 1
    assert result.checkpoints == {tmp_path / "epoch-1": 2}
    assert (tmp_path / "epoch-1").is_dir()


def test_a_step_between_epochs_may_be_the_last_one(debug, config_with, tmp_path):
    config = config_with(lr=3e-2, max_kl=1e-4, checkpoint_every=3, batch_size=1, micro_batch_size=1)
    result = align(debug, config, tmp_path, ["paper 1"])
    assert result.metrics["epochs"] == pytest.approx(0.75)
    assert result.history[2]["kl_sequence"] == pytest.approx(result.metrics["kl_sequence"])
    assert "kl_sequence" not in result.history[1]
    assert result.checkpoints == {tmp_path / "step-3": 3}


def test_a_limit_that_is_not_reached_changes_nothing(debug, config_with, tmp_path):
    """The policy has dropout, which is off while the KL is measured, and on in the steps after it."""
    lora = debug.policy.lora.model_copy(update={"dropout": 0.2})
    policy = debug.policy.model_copy(update={"lora": lora})
    free, limited = (
        align(debug, config_with(max_kl=limit, epochs=2), tmp_path / str(limit), ["paper 1"], policy=policy)
        for limit in (None, 1e6)
    )
    assert [entry.pop("kl_sequence") > 0 for entry in limited.history] == [True, True]
    assert free.history == limited.history
    weights = [(result.adapter / "adapter_model.safetensors").read_bytes() for result in (free, limited)]
    assert weights[0] == weights[1]


def test_a_limit_without_prompts_to_measure_it_on_is_refused(debug, config_with, tmp_path):
    with pytest.raises(UserError, match="max_kl is measured on held-out prompts"):
        align(debug, config_with(max_kl=1.0), tmp_path)
