"""TRL's DPOTrainer on sampled tokens, and the adapters that it saves.

Two things are explicit here that TRL infers from its input:

- The reference. `base`: the backbone without an adapter. `sft`: an adapter is merged into the
  backbone first, and the result is the reference. `round_start`: an adapter is trained further, and
  a frozen copy of it is the reference.
- The tokens. The trainer receives the tokens that the policy sampled. Given text, it would append
  an end-of-sequence token to completions that were cut at the length limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from components.config import DpoConfig, PolicyConfig, UserError
from components.models.adapters import (
    AdapterSlot,
    export_adapter,
    from_peft_config,
    read_adapter,
    stack_adapters,
    to_peft_config,
)
from components.models.backbone import choose_dtype
from components.models.policy import Policy

if TYPE_CHECKING:
    import peft
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called with (step, number of steps, TRL's logs) after each optimizer step."""


class AlignmentError(UserError, ValueError):
    """Pairs or a reference that the policy cannot be aligned with."""


class DpoPair(TypedDict):
    """A labeled pair: the prompt, and the tokens of both completions."""

    prompt: str
    chosen_ids: list[int]
    rejected_ids: list[int]


def load_initial_model(policy: Policy, config: DpoConfig) -> PreTrainedModel | PeftModel:
    """Prepare the model for which TRL chooses the reference that the recipe names.

    Returns:
        a model without an adapter, on which a new adapter is trained (TRL then computes the
        reference with the adapter disabled), or a PEFT model whose adapter is trained further (TRL
        then keeps a frozen copy of it as "ref").

    Raises:
        AlignmentError: the reference adapter cannot be read.
    """
    from peft import PeftModel

    if config.reference == "base":
        return policy.model
    folder = Path(config.reference_adapter or "")
    if not (folder / "adapter_config.json").is_file():
        raise AlignmentError(
            f"alignment.dpo.reference_adapter {folder} is not a PEFT adapter folder: adapter_config.json is"
            " missing there."
        )
    model = PeftModel.from_pretrained(policy.model, folder, is_trainable=config.reference == "round_start")
    if config.reference == "round_start":
        return model
    return cast("PreTrainedModel", model.merge_and_unload())


def build_trainer(
    policy: Policy,
    pairs: Sequence[DpoPair],
    config: DpoConfig,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
) -> DPOTrainer:
    """Build a DPOTrainer for tokenized pairs; its `model` is the PEFT model that is trained.

    Args:
        policy: an open policy without an adapter.
        pairs: labeled pairs.
        config: hyperparameters and the reference.
        folder: receives the checkpoints.
        seed: see DpoSettings.
        progress: called after each optimizer step.

    Raises:
        AlignmentError: the reference adapter cannot be read.
    """
    from peft import PeftModel
    from transformers import PrinterCallback
    from trl.trainer.dpo_trainer import DPOTrainer

    class PretokenizedTrainer(DPOTrainer):
        """A trainer on prompt_ids, chosen_ids and rejected_ids instead of text."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    model = load_initial_model(policy, config)
    has_new_adapter = not isinstance(model, PeftModel)
    trainer = PretokenizedTrainer(
        model=model,
        args=_training_arguments(policy, config, folder, seed),
        train_dataset=_tokenized(policy, pairs),
        processing_class=policy.tokenizer,
        callbacks=[_checkpoint_callback(policy.config, config, folder, progress)],
        peft_config=to_peft_config(policy.config.lora) if has_new_adapter else None,
    )
    trainer.remove_callback(PrinterCallback)
    if has_new_adapter:
        _initialize_adapter(trained_model(trainer), seed)
    return trainer


def _tokenized(policy: Policy, pairs: Sequence[DpoPair]) -> Dataset:
    from datasets import Dataset

    rows = [
        {
            "prompt_ids": policy.encode(pair["prompt"]),
            "chosen_ids": pair["chosen_ids"],
            "rejected_ids": pair["rejected_ids"],
        }
        for pair in pairs
    ]
    return Dataset.from_list(rows)


def _training_arguments(policy: Policy, config: DpoConfig, folder: Path, seed: int) -> DPOConfig:
    from trl.trainer.dpo_config import DPOConfig

    on_cuda = policy.device.startswith("cuda")
    dtype = choose_dtype(policy.config.backbone.dtype, policy.device)
    return DPOConfig(
        output_dir=str(folder),
        beta=config.beta,
        loss_type=["sigmoid"],
        optim=config.optimizer,
        learning_rate=config.lr,
        lr_scheduler_type=config.lr_scheduler,
        max_grad_norm=config.max_grad_norm,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=2 * config.micro_batch_size,
        max_length=None,
        bf16=on_cuda and str(dtype) == "torch.bfloat16",
        fp16=False,
        use_cpu=not on_cuda,
        gradient_checkpointing=on_cuda,
        seed=seed % 2**31,
        data_seed=seed % 2**31,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_cuda,
    )


def _checkpoint_callback(
    policy: PolicyConfig, config: DpoConfig, folder: Path, progress: Progress | None
) -> TrainerCallback:
    """Callback that saves the adapter as PEFT folders during the training, and reports progress."""
    from transformers import TrainerCallback

    class Checkpoints(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if config.checkpoint_every and state.global_step % config.checkpoint_every == 0:
                save_adapter(objects["model"], policy, config, folder / f"step-{state.global_step}")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            save_adapter(objects["model"], policy, config, folder / f"epoch-{round(state.epoch)}")

        def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            logs = objects.get("logs")
            if progress is not None and logs and "loss" in logs:
                progress(state.global_step, state.max_steps, logs)

    return Checkpoints()


def _initialize_adapter(model: PeftModel, seed: int) -> None:
    """Set a new adapter's initial values, in fp32."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            # TRL makes them bf16 on an 8-bit backbone, in which a step of 1e-6 would be lost.
            parameter.data = parameter.data.float()
    slot = AdapterSlot(model)
    slot.load(slot.initial_adapter(seed))


def trained_model(trainer: DPOTrainer) -> PeftModel:
    """The PEFT model that a trainer trains."""
    return cast("PeftModel", trainer.model)


@contextmanager
def completion_positions_only() -> Iterator[None]:
    """Let TRL's fused head compute logits at completion positions only, on every device.

    TRL 1.16 does so if Triton is available. Otherwise it also computes the logits of the prompts,
    which spares compilers a recompilation for each new shape. The CPU has no such compiler, and
    most tokens belong to prompts here.
    """
    from unittest import mock

    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield


def save_adapter(model: PeftModel, policy: PolicyConfig, config: DpoConfig, folder: Path) -> Path:
    """Save the trained policy as a PEFT folder for the plain backbone.

    Neither the optimizer nor anything pickled is saved, and no hub is contacted. With the reference
    `sft` the trained adapter lies on top of the merged one, so that both are saved as one adapter,
    whose rank is the sum of their ranks.
    """
    tensors = {
        name.replace(".default.", "."): parameter.detach().float().cpu()
        for name, parameter in model.named_parameters()
        if ".default." in name
    }
    lora = from_peft_config(cast("peft.LoraConfig", model.peft_config["default"]))
    if config.reference == "sft":
        merged = read_adapter(Path(config.reference_adapter or ""))
        tensors, lora = stack_adapters(merged, (tensors, lora))
    return export_adapter(tensors, lora, policy.backbone.name, folder)
