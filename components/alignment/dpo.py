"""Alignment of the policy by DPO on the labelled pairs, with TRL's DPOTrainer (FedBiscuit eqs. 2 and 9).

Two things are made explicit that TRL decides by what it is given:

- The reference. `base`: the backbone with the adapter off. `sft`: an adapter is merged into the backbone first, and
  the result is the reference. `round_start`: an adapter is trained on, and a frozen copy of it is the reference.
- The tokens. The trainer gets the very tokens that the policy sampled; given text, it would add an end-of-sequence
  token to completions that were cut at the length limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import DpoConfig, Explained, PolicyConfig
from components.models.adapters import AdapterSlot, export_adapter, peft_config, read_adapter, recipe_config, stack_adapters
from components.models.backbone import choose_dtype
from components.models.head import check_head
from components.models.policy import Policy

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from trl import DPOTrainer


class AlignmentError(Explained, ValueError):
    """Pairs or a reference that the policy cannot be aligned with."""


@dataclass(frozen=True)
class AlignmentResult:
    """What DPO made.

    Attributes:
        adapter: PEFT folder of the aligned policy (after the last epoch).
        checkpoints: PEFT folders, after each epoch and every `checkpoint_every` steps, with the step of each.
        history: TRL's metrics by optimiser step (loss, rewards/accuracies, rewards/margins, ...).
        metrics: pairs, steps, and the KL to the reference.
    """

    adapter: Path
    checkpoints: dict[Path, int]
    history: list[dict[str, float]]
    metrics: dict[str, float]


def starting_model(policy: Policy, config: DpoConfig) -> PreTrainedModel | PeftModel:
    """The model to give to TRL so that it takes the reference that the recipe names.

    Returns:
        a plain model where a new adapter is trained on it (TRL then measures to it with the adapter off), or a PEFT
        model whose adapter is trained on (TRL then keeps a frozen copy of it as "ref").

    Raises:
        AlignmentError: the reference adapter cannot be read.
    """
    from peft import PeftModel

    if config.reference == "base":
        return policy.model
    folder = Path(config.reference_adapter or "")
    if not (folder / "adapter_config.json").is_file():
        raise AlignmentError(f"alignment.dpo.reference_adapter {folder} is not a PEFT adapter folder: adapter_config.json is missing there.")
    model = PeftModel.from_pretrained(policy.model, folder, is_trainable=config.reference == "round_start")
    return model if config.reference == "round_start" else model.merge_and_unload()


def build_trainer(
    policy: Policy, pairs: Sequence[dict], config: DpoConfig, folder: Path, seed: int,
    progress: Callable[[int, int, dict[str, float]], None] | None = None,
) -> DPOTrainer:
    """A DPOTrainer over tokenised pairs; its `model` is the PEFT model that is trained. See align_policy."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class TokenisedDPOTrainer(DPOTrainer):
        """TRL's trainer, given prompt_ids, chosen_ids and rejected_ids instead of text."""

        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset

    class Checkpoints(TrainerCallback):
        """Saves the adapter after each epoch, and every so many steps, as a PEFT folder, and reports progress."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: PeftModel | None = None, **_: Any) -> None:
            if config.checkpoint_every and state.global_step % config.checkpoint_every == 0:
                save_adapter(model, policy.config, config, folder / f"step-{state.global_step}")

        def on_epoch_end(self, args: Any, state: Any, control: Any, model: PeftModel | None = None, **_: Any) -> None:
            save_adapter(model, policy.config, config, folder / f"epoch-{round(state.epoch)}")

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if progress is not None and logs and "loss" in logs:
                progress(state.global_step, state.max_steps, logs)

    on_cuda = policy.device.startswith("cuda")
    bf16 = on_cuda and str(choose_dtype(policy.config.backbone.dtype, policy.device)) == "torch.bfloat16"
    arguments = DPOConfig(
        output_dir=str(folder), beta=config.beta, loss_type=["sigmoid"], optim=config.optimizer, learning_rate=config.lr,
        lr_scheduler_type=config.lr_scheduler, max_grad_norm=config.max_grad_norm, num_train_epochs=config.epochs,
        per_device_train_batch_size=config.micro_batch_size, gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
        precompute_ref_log_probs=True, precompute_ref_batch_size=2 * config.micro_batch_size, max_length=None,
        bf16=bf16, fp16=False, use_cpu=not on_cuda, gradient_checkpointing=on_cuda, seed=seed % 2**31, data_seed=seed % 2**31,
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=on_cuda)
    rows = Dataset.from_list([
        {"prompt_ids": policy.encode(p["prompt"]), "chosen_ids": p["chosen_ids"], "rejected_ids": p["rejected_ids"]} for p in pairs])
    model = starting_model(policy, config)
    new_adapter = not isinstance(model, PeftModel)
    trainer = TokenisedDPOTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=policy.tokenizer, callbacks=[Checkpoints()],
        peft_config=peft_config(policy.config.lora) if new_adapter else None)
    trainer.remove_callback(PrinterCallback)
    if new_adapter:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # TRL makes them bf16 where the backbone has 8 bits, and a step of 1e-6 would be lost
        slot = AdapterSlot(trainer.model)
        slot.load(slot.initial_adapter(seed))
    return trainer


@contextmanager
def completion_positions_only() -> Iterator[None]:
    """Let TRL's fused head project completion positions only, on every device.

    TRL 1.16 does so where it has Triton and projects the prompt's positions too elsewhere, for the sake of compilers
    that would recompile on each new shape; the CPU has no such compiler, and prompts are most of the tokens here.
    """
    from unittest import mock

    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield


def save_adapter(model: PeftModel, policy: PolicyConfig, config: DpoConfig, folder: Path) -> Path:
    """Save the policy as a PEFT folder on the plain backbone, without the optimiser (nothing pickled) and without asking a hub for the backbone.

    With reference 'sft' the trained adapter lies on the merged one, so the two are saved as one of the sum of their ranks.
    """
    trained = {name.replace(".default.", "."): p.detach().float().cpu() for name, p in model.named_parameters() if ".default." in name}
    lora = recipe_config(model.peft_config["default"])
    if config.reference == "sft":
        trained, lora = stack_adapters(read_adapter(Path(config.reference_adapter or "")), (trained, lora))
    return export_adapter(trained, lora, policy.backbone.name, folder)


def align_policy(
    policy_config: PolicyConfig, config: DpoConfig, pairs: Sequence[dict], folder: Path, device: str, seed: int,
    kl_prompts: Sequence[str], progress: Callable[[int, int, dict[str, float]], None] | None = None,
) -> AlignmentResult:
    """Align a LoRA policy by DPO on labelled pairs.

    Args:
        policy_config: the backbone, its LoRA and its template.
        config: DPO's hyper-parameters and the reference.
        pairs: rows with prompt, chosen_ids, rejected_ids.
        folder: receives epoch-1/, epoch-2/, ..., step-N/, ... and final/, all PEFT folders.
        device: where to train.
        seed: the adapter's first values, the order of the pairs and dropout are functions of it.
        kl_prompts: prompts on which the KL to the reference is estimated afterwards.
        progress: called with (step, steps, logs) after each optimiser step.

    Raises:
        AlignmentError: there are no pairs, a loss is not finite, or the reference cannot be read.
        BackboneError: the backbone makes its logits as TRL's fused head does not.
    """
    import torch

    if not pairs:
        raise AlignmentError("there are no labelled pairs to align with: all completions of each prompt were the same or empty. Raise alignment.prompts, alignment.completions or alignment.temperature.")
    policy = Policy(policy_config, device)
    check_head(policy.model, policy_config.backbone.name)
    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []), completion_positions_only():
        trainer = build_trainer(policy, pairs, config, folder, seed, progress)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    if not all(math.isfinite(entry["loss"]) for entry in history):
        raise AlignmentError("the DPO loss became NaN or infinite: lower alignment.dpo.lr.")
    policy.model = trainer.model.eval()
    metrics = {"pairs": len(pairs), "steps": trainer.state.global_step, **kl_to_reference(policy, kl_prompts, seed)}
    checkpoints = {folder / f"epoch-{epoch + 1}": round((epoch + 1) * trainer.state.global_step / config.epochs) for epoch in range(config.epochs)}
    checkpoints |= {folder / f"step-{step}": step for step in range(config.checkpoint_every or 10**9, trainer.state.global_step + 1, config.checkpoint_every or 1)}
    return AlignmentResult(save_adapter(policy.model, policy_config, config, folder / "final"), checkpoints, history, metrics)


def kl_to_reference(policy: Policy, prompts: Sequence[str], seed: int, temperature: float = 1.0) -> dict[str, float]:
    """KL(policy || reference) in nats, on completions that the policy samples; both at a temperature.

    At each position of a sampled completion the KL of the two next-token distributions is summed exactly over the
    vocabulary (the Rao-Blackwellised estimator of the sequence KL), so one sample a prompt serves.

    Args:
        policy: a PEFT model whose adapter "ref", or whose bare backbone, is the reference.
        prompts: texts; may be empty.
        seed: of the samples.
        temperature: what the logits of both are divided by.

    Returns:
        kl_sequence (mean over completions) and kl_token (mean over their tokens); nothing without prompts.
    """
    import torch

    from components.models.personalized import as_reference

    if not prompts:
        return {}
    completions = [c[0] for c in policy.generate(prompts, seed, temperature)]
    total, tokens = 0.0, 0
    for prompt, completion in zip(prompts, completions, strict=True):
        start = policy.encode(prompt)
        ids = torch.tensor([[*start, *completion.ids]], device=policy.device)
        with torch.inference_mode():
            new = _completion_logprobs(policy.model, ids, len(start), temperature)
            if "ref" in policy.model.peft_config:
                policy.model.set_adapter("ref")
                old = _completion_logprobs(policy.model, ids, len(start), temperature)
                policy.model.set_adapter("default")
            else:
                with as_reference(policy.model):
                    old = _completion_logprobs(policy.model, ids, len(start), temperature)
        total += float((new.exp() * (new - old)).sum())
        tokens += len(completion.ids)
    return {"kl_sequence": total / len(prompts), "kl_token": total / max(tokens, 1)}


def _completion_logprobs(model: PeftModel, ids: Any, start: int, temperature: float) -> Any:
    length = ids.shape[1] - start
    return model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[0, :-1].float().div(temperature).log_softmax(-1)
