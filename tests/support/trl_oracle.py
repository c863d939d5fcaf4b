"""DPO by TRL's DPOTrainer on sampled tokens, with which the project's trainer is compared."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from datasets import Dataset
from peft import PeftModel
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from components.alignment.label import LabeledPair
from components.config.alignment import DpoConfig
from components.models.adapters import AdapterSlot, to_peft_config
from components.models.policy import Policy


class PretokenizedTrainer(DPOTrainer):
    """A trainer on token ids: given text, it would end completions that were cut at the length limit."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def build_trainer(
    policy: Policy, pairs: Sequence[LabeledPair], config: DpoConfig, folder: Path, seed: int
) -> DPOTrainer:
    """Build a DPOTrainer on the CPU; its `model` is the PEFT model that is trained.

    TRL computes the reference of a model without an adapter by disabling the new one, and keeps a frozen
    copy "ref" of an adapter that is trained further.
    """
    model = policy.model
    if config.reference != "base":
        is_trained = config.reference == "round_start"
        model = PeftModel.from_pretrained(model, config.reference_adapter, is_trainable=is_trained)
        model = model if is_trained else model.merge_and_unload()
    has_new_adapter = not isinstance(model, PeftModel)
    rows = [
        {
            "prompt_ids": policy.encode(pair["prompt"]),
            "chosen_ids": pair["chosen_ids"],
            "rejected_ids": pair["rejected_ids"],
        }
        for pair in pairs
    ]
    arguments = DPOConfig(
        output_dir=str(folder),
        beta=config.beta,
        optim=config.optimizer,
        learning_rate=config.lr,
        lr_scheduler_type=config.lr_scheduler,
        max_grad_norm=config.max_grad_norm,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
        precompute_ref_log_probs=True,
        max_length=None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = PretokenizedTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
        peft_config=to_peft_config(policy.config.lora) if has_new_adapter else None,
    )
    if has_new_adapter:
        slot = AdapterSlot(trainer.model)
        slot.load(slot.initial_adapter(seed))
    return trainer


def train_with_trl(
    policy: Policy, pairs: Sequence[LabeledPair], config: DpoConfig, folder: Path, seed: int
) -> tuple[PeftModel, list[dict[str, float]]]:
    """Train a policy by TRL's DPOTrainer; the model, and the metrics of each step."""
    with completion_positions_only():
        trainer = build_trainer(policy, pairs, config, folder, seed)
        trainer.train()
    return trainer.model.eval(), [row for row in trainer.state.log_history if "loss" in row]


@contextmanager
def completion_positions_only() -> Iterator[None]:
    """Let TRL's fused head leave out the logits of prompts, as it does where Triton is installed."""
    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield
