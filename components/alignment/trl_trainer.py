"""DPO by TRL's DPOTrainer on sampled tokens (`alignment.dpo.trainer: trl`).

TRL computes the reference of a model without an adapter by disabling the new one, and keeps a
frozen copy "ref" of an adapter that is trained further. The trainer receives the tokens that the
policy sampled: given text, it would append an end-of-sequence token to completions that were cut at
the length limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.alignment.dpo_model import (
    AlignmentError,
    DpoPair,
    Ends,
    Progress,
    TrainedPolicy,
    initialize_adapter,
    load_initial_model,
    save_adapter,
)
from components.config import DpoConfig, PolicyConfig
from components.models.adapters import to_peft_config
from components.models.backbone import choose_dtype
from components.models.lora_targets import check_targets
from components.models.policy import Policy

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer


def train_with_trl(
    policy: Policy,
    pairs: Sequence[DpoPair],
    config: DpoConfig,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
    ends: Ends | None = None,
) -> TrainedPolicy:
    """Train a policy by TRL's DPOTrainer; arguments and errors as of `build_trainer`.

    Raises:
        AlignmentError: a loss is not finite.
    """
    with completion_positions_only():
        trainer = build_trainer(policy, pairs, config, folder, seed, progress, ends)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    if not all(math.isfinite(entry["loss"]) for entry in history):
        raise AlignmentError("the DPO loss became NaN or infinite: lower alignment.dpo.lr.")
    return TrainedPolicy(trained_model(trainer).eval(), history)


def build_trainer(
    policy: Policy,
    pairs: Sequence[DpoPair],
    config: DpoConfig,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
    ends: Ends | None = None,
) -> DPOTrainer:
    """Build a DPOTrainer for tokenized pairs; its `model` is the PEFT model that is trained.

    Args:
        policy: an open policy without an adapter.
        pairs: labeled pairs.
        config: hyperparameters and the reference.
        folder: receives the checkpoints.
        seed: see DpoSettings.
        progress: called after each optimizer step.
        ends: says at each checkpoint whether it is the last one; None: all epochs are trained.

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
    if has_new_adapter:
        check_targets(model, policy.config.lora)
    trainer = PretokenizedTrainer(
        model=model,
        args=_training_arguments(policy, config, folder, seed),
        train_dataset=_tokenized(policy, pairs),
        processing_class=policy.tokenizer,
        callbacks=[_checkpoint_callback(policy.config, config, folder, progress, ends)],
        peft_config=to_peft_config(policy.config.lora) if has_new_adapter else None,
    )
    trainer.remove_callback(PrinterCallback)
    if has_new_adapter:
        initialize_adapter(trained_model(trainer), seed)
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
        gradient_checkpointing=on_cuda or policy.config.backbone.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
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
    policy: PolicyConfig,
    config: DpoConfig,
    folder: Path,
    progress: Progress | None,
    ends: Ends | None,
) -> TrainerCallback:
    """Callback that saves the adapter as PEFT folders, reports progress, and may end the training."""
    from transformers import TrainerCallback

    class Checkpoints(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if config.checkpoint_every and state.global_step % config.checkpoint_every == 0:
                save_adapter(objects["model"], policy, config, folder / f"step-{state.global_step}")
                self._check_end(control, objects["model"], state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            save_adapter(objects["model"], policy, config, folder / f"epoch-{round(state.epoch)}")
            self._check_end(control, objects["model"], state.global_step)

        def _check_end(self, control: Any, model: PeftModel, step: int) -> None:
            if ends is not None and not control.should_training_stop and ends(model, step):
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            logs = objects.get("logs")
            if progress is not None and logs and "loss" in logs:
                progress(state.global_step, state.max_steps, logs)

    return Checkpoints()


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
