"""Alignment of the policy by DPO on labeled pairs, with TRL (FedBiscuit eqs. 2 and 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from components.alignment.dpo_trainer import (
    AlignmentError,
    DpoPair,
    Progress,
    build_trainer,
    completion_positions_only,
    load_initial_model,
    save_adapter,
    trained_model,
)
from components.alignment.kl import kl_to_reference
from components.config import DpoConfig, PolicyConfig
from components.models.head import check_lm_head
from components.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl.trainer.dpo_trainer import DPOTrainer

__all__ = [
    "AlignmentError",
    "DpoPair",
    "DpoResult",
    "DpoSettings",
    "align_policy",
    "build_trainer",
    "completion_positions_only",
    "kl_to_reference",
    "load_initial_model",
]


@dataclass(frozen=True)
class DpoSettings:
    """Settings of an alignment.

    Attributes:
        policy: the backbone, its LoRA, and its template.
        dpo: hyperparameters and the reference.
        device: where the policy is trained.
        seed: determines the adapter's initial values, the order of the pairs, and dropout.
    """

    policy: PolicyConfig
    dpo: DpoConfig
    device: str
    seed: int


@dataclass(frozen=True)
class DpoResult:
    """Result of a DPO training.

    Attributes:
        adapter: PEFT folder of the aligned policy, after the last epoch.
        checkpoints: optimizer step by PEFT folder: after each epoch, and every `checkpoint_every`
            steps.
        history: TRL's metrics by optimizer step (loss, rewards/accuracies, rewards/margins, ...).
        metrics: pairs, steps, and the KL to the reference, see kl_to_reference.
    """

    adapter: Path
    checkpoints: dict[Path, int]
    history: list[dict[str, float]]
    metrics: dict[str, float]


def align_policy(
    settings: DpoSettings,
    pairs: Sequence[DpoPair],
    folder: Path,
    kl_prompts: Sequence[str],
    progress: Progress | None = None,
) -> DpoResult:
    """Align a LoRA policy by DPO on labeled pairs.

    Args:
        settings: the policy, DPO's hyperparameters, the device, and the seed.
        pairs: labeled pairs.
        folder: receives epoch-1/, epoch-2/, ..., step-N/, ... and final/, all of them PEFT folders.
        kl_prompts: prompts on which the KL to the reference is estimated after the training.
        progress: called after each optimizer step.

    Raises:
        AlignmentError: there are no pairs, a loss is not finite, or the reference cannot be read.
        BackboneError: the backbone computes its logits in a way that TRL's fused head does not
            reproduce.
    """
    import torch

    config = settings.dpo
    if not pairs:
        raise AlignmentError(
            "there are no labeled pairs to align with: all completions of each prompt were equal or empty."
            " Raise alignment.prompts, alignment.completions or alignment.temperature."
        )
    policy = Policy(settings.policy, settings.device)
    # Without an adapter, the policy's model is the backbone itself.
    check_lm_head(cast("PreTrainedModel", policy.model), settings.policy.backbone.name)
    cuda_devices = [torch.device(settings.device)] if settings.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda_devices), completion_positions_only():
        trainer = build_trainer(policy, pairs, config, folder, settings.seed, progress)
        trainer.train()
    history = _loss_history(trainer)
    model = trained_model(trainer).eval()
    # A PEFT model has the attributes of its backbone.
    policy.model = cast("PreTrainedModel", model)
    steps = trainer.state.global_step
    metrics = {
        "pairs": len(pairs),
        "steps": steps,
        **kl_to_reference(policy, kl_prompts, settings.seed),
    }
    return DpoResult(
        adapter=save_adapter(model, settings.policy, config, folder / "final"),
        checkpoints=_checkpoint_steps(config, folder, steps),
        history=history,
        metrics=metrics,
    )


def _loss_history(trainer: DPOTrainer) -> list[dict[str, float]]:
    """TRL's metrics of each logged step.

    Raises:
        AlignmentError: a loss is not finite.
    """
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    if not all(math.isfinite(entry["loss"]) for entry in history):
        raise AlignmentError("the DPO loss became NaN or infinite: lower alignment.dpo.lr.")
    return history


def _checkpoint_steps(config: DpoConfig, folder: Path, steps: int) -> dict[Path, int]:
    """Optimizer step of each checkpoint that the training has saved."""
    checkpoints = {
        folder / f"epoch-{epoch}": round(epoch * steps / config.epochs)
        for epoch in range(1, config.epochs + 1)
    }
    if config.checkpoint_every:
        saved_steps = range(config.checkpoint_every, steps + 1, config.checkpoint_every)
        checkpoints |= {folder / f"step-{step}": step for step in saved_steps}
    return checkpoints
