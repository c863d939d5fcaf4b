"""Alignment of the policy by DPO on labeled pairs (FedBiscuit eqs. 2 and 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from components.alignment.dpo_model import AlignmentError, DpoPair, Ends, Progress, save_adapter
from components.alignment.kl import kl_to_reference
from components.alignment.packed_trainer import train_packed
from components.alignment.trl_trainer import train_with_trl
from components.config import DpoConfig, PolicyConfig
from components.models.head import check_lm_head
from components.models.policy import Policy

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ROUNDING = 1e-3
"""Tolerance of a number of epochs, which TRL rounds."""
TRAINERS = {"packed": train_packed, "trl": train_with_trl}
"""Trainers by the name in alignment.dpo.trainer."""


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
        history: metrics by optimizer step, see TrainedPolicy.
        metrics: pairs, steps, epochs (where max_kl limits them), and the KL to the reference, see
            kl_to_reference.
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
        BackboneError: the backbone computes its logits in a way that `check_lm_head` does not know.
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
    kl: dict[int, float] = {}
    ends = _kl_limit(policy, settings, kl_prompts, kl) if config.max_kl is not None else None
    with torch.random.fork_rng(devices=cuda_devices):
        trained = TRAINERS[config.trainer](policy, pairs, config, folder, settings.seed, progress, ends)
    policy.model = trained.model
    for step, value in kl.items():
        trained.history[step - 1]["kl_sequence"] = value
    steps = len(trained.history)
    epochs = trained.history[-1]["epoch"] if ends is not None else float(config.epochs)
    metrics = {
        "pairs": len(pairs),
        "steps": steps,
        **({"epochs": epochs} if ends is not None else {}),
        **kl_to_reference(policy, kl_prompts, settings.seed),
    }
    return DpoResult(
        adapter=save_adapter(trained.model, settings.policy, config, folder / "final"),
        checkpoints=_checkpoint_steps(config, folder, steps, epochs),
        history=trained.history,
        metrics=metrics,
    )


def _kl_limit(
    policy: Policy, settings: DpoSettings, prompts: Sequence[str], measured: dict[int, float]
) -> Ends:
    """Whether a model's KL to the reference is above alignment.dpo.max_kl.

    Args:
        policy: opens prompts; its model is the reference.
        settings: of the alignment.
        prompts: on which the KL is estimated.
        measured: receives the KL by step.

    Raises:
        AlignmentError: there are no prompts.
    """
    limit = settings.dpo.max_kl or 0.0
    if not prompts:
        raise AlignmentError(
            "alignment.dpo.max_kl is measured on held-out prompts, and there are none: leave it out, or"
            " hold out prompts (data.test)"
        )

    def ends(model: PeftModel, step: int) -> bool:
        backbone = policy.model
        policy.model = model.eval()
        try:
            measured[step] = kl_to_reference(policy, prompts, settings.seed)["kl_sequence"]
        finally:
            policy.model = backbone
        return measured[step] > limit

    return ends


def _checkpoint_steps(config: DpoConfig, folder: Path, steps: int, epochs: float) -> dict[Path, int]:
    """Optimizer step of each checkpoint that the training has saved."""
    checkpoints = {
        folder / f"epoch-{epoch}": round(epoch * steps / epochs)
        for epoch in range(1, int(epochs + ROUNDING) + 1)
    }
    if config.checkpoint_every:
        saved_steps = range(config.checkpoint_every, steps + 1, config.checkpoint_every)
        checkpoints |= {folder / f"step-{step}": step for step in saved_steps}
    return checkpoints
