"""DPO by TRL on the tiny backbone: its loss is the paper's, its reference is the recipe's, its tokens are the policy's."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.alignment.dpo import AlignmentError, align_policy, build_trainer, completion_positions_only, kl_to_reference, starting_model
from components.models.adapters import AdapterSlot, attach, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy

PAIRS = [{"prompt": f"paper {i}", "chosen_ids": [40 + i, 41, 42, 2][: 4 - i % 2], "rejected_ids": [60, 61 + i] * (1 + i % 3)} for i in range(4)]
"""Two of the chosen ones end with EOS (id 2), two were cut at the limit; no rejected one ends with it."""


@pytest.fixture
def dpo(debug):
    return debug.alignment.dpo.model_copy(update={"batch_size": 4, "micro_batch_size": 4, "epochs": 1})


@pytest.fixture(scope="module")
def earlier(debug, tmp_path_factory):
    """An adapter of an earlier training, as a PEFT folder."""
    slot = AdapterSlot(attach(load_backbone(debug.policy.backbone, "cpu"), debug.policy.lora))
    numbers = torch.Generator().manual_seed(0)
    adapter = {n: 0.3 * torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)}
    return export_adapter(adapter, debug.policy.lora, "tiny-random", tmp_path_factory.mktemp("earlier") / "adapter")


def referring(dpo, reference, earlier):
    return dpo.model_copy(update={"reference": reference, "reference_adapter": None if reference == "base" else str(earlier)})


def log_probability(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Of a completion, from the full logits of one unpadded sequence."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float().log_softmax(-1)
    return sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(completion))


def named_reference(debug, reference, earlier):
    """The model that a recipe's reference means, built without the code under test."""
    from peft import PeftModel

    plain = load_backbone(debug.policy.backbone, "cpu")
    return plain if reference == "base" else PeftModel.from_pretrained(plain, earlier).eval()


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


REFERENCES = ["base", "sft", "round_start"]


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_reference_is_the_model_that_the_recipe_names(debug, dpo, earlier, tmp_path, reference):
    policy = Policy(debug.policy, "cpu")
    trainer = build_trainer(policy, PAIRS, referring(dpo, reference, earlier), tmp_path, 0)
    trainer.get_train_dataloader()                      # computes the reference's log-probabilities
    with torch.no_grad():
        model = named_reference(debug, reference, earlier)
        for row, pair in zip(trainer.train_dataset, PAIRS, strict=True):
            for which in ("chosen", "rejected"):
                expected = log_probability(model, policy.encode(pair["prompt"]), pair[f"{which}_ids"]).item()
                assert row[f"ref_{which}_logps"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("reference", REFERENCES)
def test_training_starts_at_its_reference(debug, dpo, earlier, tmp_path, reference):
    policy = Policy(debug.policy, "cpu")
    trainer = build_trainer(policy, PAIRS, referring(dpo, reference, earlier), tmp_path, 0)
    loss = trainer.compute_loss(trainer.model.eval(), batch_of(trainer))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
    policy.model = trainer.model
    assert kl_to_reference(policy, ["a paper", "another"], seed=0) == {"kl_sequence": pytest.approx(0, abs=1e-6), "kl_token": pytest.approx(0, abs=1e-6)}


@pytest.mark.parametrize("reference", REFERENCES)
def test_loss_and_gradient_of_a_batch_are_those_of_equation_2_worked_from_full_logits(debug, dpo, earlier, tmp_path, reference):
    config = referring(dpo, reference, earlier).model_copy(update={"beta": 0.3})
    policy = Policy(debug.policy, "cpu")
    trainer = build_trainer(policy, PAIRS, config, tmp_path, 0)
    batch = batch_of(trainer)
    trained = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():                               # away from the start, where half of the gradient is zero
        for _, parameter in trained:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    model = trainer.model.eval()
    with completion_positions_only():                   # as in training
        found = trainer.compute_loss(model, batch)
        found_gradient = torch.autograd.grad(found, [p for _, p in trained])

    reference_model, losses = named_reference(debug, reference, earlier), []
    for pair in PAIRS:
        prompt = policy.encode(pair["prompt"])
        with torch.no_grad():
            anchor = log_probability(reference_model, prompt, pair["chosen_ids"]) - log_probability(reference_model, prompt, pair["rejected_ids"])
        margin = log_probability(model, prompt, pair["chosen_ids"]) - log_probability(model, prompt, pair["rejected_ids"])
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (margin - anchor)))
    expected = torch.stack(losses).mean()
    assert found.item() == pytest.approx(expected.item(), abs=1e-5) and abs(expected.item() - math.log(2)) > 1e-3
    for one, other in zip(found_gradient, torch.autograd.grad(expected, [p for _, p in trained]), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert max(g.abs().max() for g in found_gradient) > 1e-3


def test_the_trainer_is_given_the_policys_own_tokens_without_an_end_that_was_not_sampled(debug, dpo, tmp_path):
    policy = Policy(debug.policy, "cpu")
    trainer = build_trainer(policy, PAIRS, dpo, tmp_path, 0)
    for row, pair in zip(trainer.train_dataset, PAIRS, strict=True):
        assert row["prompt_ids"] == policy.encode(pair["prompt"])
        assert (row["chosen_ids"], row["rejected_ids"]) == (pair["chosen_ids"], pair["rejected_ids"])
    batch = batch_of(trainer)
    seen = sorted(row[keep.bool()].tolist() for row, keep in zip(batch["input_ids"], batch["completion_mask"], strict=True))
    assert seen == sorted(ids for pair in PAIRS for ids in (pair["chosen_ids"], pair["rejected_ids"]))


def test_a_long_pair_is_not_cut(debug, dpo, tmp_path):
    policy = Policy(debug.policy, "cpu")
    pairs = [pair | {"prompt": "long " * 60, "rejected_ids": [70] * 900} for pair in PAIRS]
    batch = batch_of(build_trainer(policy, pairs, dpo, tmp_path, 0))
    assert batch["completion_mask"].sum(1).max() == 900 and batch["input_ids"].shape[1] == 900 + len(policy.encode("long " * 60))


def test_the_new_adapters_first_values_are_a_function_of_the_seed_and_fp32(debug, dpo, tmp_path):
    adapters = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(adapters))
        slot = AdapterSlot(build_trainer(Policy(debug.policy, "cpu"), PAIRS, dpo, tmp_path, seed).model)
        adapters.append(slot.read())
        assert {p.dtype for p in slot.parameters} == {torch.float32}
    name = next(n for n in adapters[0] if "lora_A" in n)
    assert torch.equal(adapters[0][name], adapters[1][name]) and not torch.equal(adapters[0][name], adapters[2][name])


@pytest.fixture(scope="module")
def aligned(debug, tmp_path_factory):
    """One alignment of two epochs, and what was said during it."""
    config = debug.alignment.dpo.model_copy(update={"lr": 5e-2, "batch_size": 4, "micro_batch_size": 2, "epochs": 2})
    folder, said = tmp_path_factory.mktemp("alignment"), []
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    result = align_policy(debug.policy, config, PAIRS * 2, folder, "cpu", 0, ["a paper", "another"], progress=lambda *a: said.append(a))
    return result, folder, said, torch.equal(torch.rand(1), before)


def test_alignment_takes_the_steps_asked_for_and_lowers_the_loss(aligned):
    result, _, said, generator_kept = aligned
    assert result.metrics["pairs"] == 8 and result.metrics["steps"] == 4 == len(result.history)
    assert [(step, steps) for step, steps, _ in said] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert result.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and result.history[-1]["loss"] < result.history[0]["loss"]
    assert "rewards/margins" in result.history[0] and generator_kept


def test_the_kl_to_the_reference_is_above_zero_after_training(aligned):
    metrics = aligned[0].metrics
    assert metrics["kl_sequence"] > metrics["kl_token"] > 1e-4


def test_there_is_a_checkpoint_for_each_epoch_that_peft_opens_and_the_last_is_the_result(aligned, debug):
    from peft import PeftModel

    result, folder, _, _ = aligned
    assert [p.name for p in result.checkpoints] == ["epoch-1", "epoch-2"] and result.adapter == folder / "final"
    ids, logits = torch.tensor([[50, 51, 52]]), []
    for path in [*result.checkpoints, result.adapter]:
        model = PeftModel.from_pretrained(load_backbone(debug.policy.backbone, "cpu"), path).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
            with model.disable_adapter():
                plain = model(input_ids=ids).logits
    assert torch.equal(logits[1], logits[2])
    assert not torch.allclose(logits[0], logits[1], atol=1e-4) and not torch.allclose(logits[0], plain, atol=1e-4)


def test_nothing_in_the_folder_is_pickled(aligned):
    files = {p.name for p in aligned[1].rglob("*") if p.is_file()}
    assert files == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_saved_policy_is_the_one_that_was_trained(debug, dpo, earlier, tmp_path, reference):
    """Opened on the plain backbone, the final folder must answer as the model at the end of training did."""
    from components.alignment import dpo as module

    config, ends = referring(dpo, reference, earlier).model_copy(update={"lr": 5e-2}), []
    ids = torch.tensor([[50, 51, 52]])
    real = module.kl_to_reference

    def look(policy, prompts, seed):
        with torch.no_grad():
            ends.append(policy.model(input_ids=ids).logits)
        return real(policy, prompts, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "kl_to_reference", look)
        result = align_policy(debug.policy, config, PAIRS, tmp_path, "cpu", 0, ["a paper"])
    saved = Policy(debug.policy, "cpu", result.adapter)
    with torch.no_grad():
        assert torch.allclose(saved.model(input_ids=ids).logits, ends[0], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kl_is_summed_over_the_vocabulary_at_each_sampled_token(debug, dpo, earlier, tmp_path, temperature):
    """By hand for one greedy-free sample: sum_t sum_v p log(p / q), p the policy and q the bare backbone, both at a temperature."""
    policy = Policy(debug.policy, "cpu", earlier)
    completion = policy.generate(["a paper"], 4, temperature)[0][0]
    start = policy.encode("a paper")
    ids = torch.tensor([[*start, *completion.ids]])
    with torch.no_grad():
        p = (policy.model(input_ids=ids).logits[0, len(start) - 1:-1] / temperature).log_softmax(-1)
        with policy.model.disable_adapter():
            q = (policy.model(input_ids=ids).logits[0, len(start) - 1:-1] / temperature).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum().item()
    found = kl_to_reference(policy, ["a paper"], 4, temperature)
    assert found["kl_sequence"] == pytest.approx(expected, rel=1e-4) and found["kl_token"] == pytest.approx(expected / len(completion.ids), rel=1e-4)
    assert expected > 1e-3 and kl_to_reference(policy, [], seed=4) == {}


def test_no_pairs_and_a_missing_reference_are_refused(debug, dpo, tmp_path):
    with pytest.raises(AlignmentError, match="no labelled pairs"):
        align_policy(debug.policy, dpo, [], tmp_path, "cpu", 0, [])
    missing = dpo.model_copy(update={"reference": "sft", "reference_adapter": str(tmp_path / "nowhere")})
    with pytest.raises(AlignmentError, match=r"reference_adapter .*nowhere is not a PEFT adapter folder"):
        starting_model(Policy(debug.policy, "cpu"), missing)


@pytest.mark.parametrize(("reference", "rank", "alpha"), [("base", 4, 32.0), ("round_start", 2, 4.0), ("sft", 6, 6.0)])
def test_the_saved_folder_states_the_rank_and_scale_of_the_adapter_that_was_trained(debug, dpo, earlier, tmp_path, reference, rank, alpha):
    """The reference adapter's LoRA may differ from the recipe's."""
    policy = debug.policy.model_copy(update={"lora": debug.policy.lora.model_copy(update={"r": 4, "alpha": 32.0})})
    result = align_policy(policy, referring(dpo, reference, earlier), PAIRS, tmp_path, "cpu", 0, [])
    saved = json.loads((Path(result.adapter) / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (rank, alpha)
    tensors = load_file(Path(result.adapter) / "adapter_model.safetensors")
    assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {rank}
