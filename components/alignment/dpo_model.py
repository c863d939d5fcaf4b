"""The policy that DPO trains: its initial adapter, its reference, and the adapters that are saved.

The reference is explicit. `base`: the backbone without an adapter. `sft`: an adapter is merged into
the backbone first, and the result is the reference. `round_start`: an adapter is trained further,
and a frozen copy of it is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from components.config import DpoConfig, PolicyConfig, UserError
from components.models.adapters import (
    AdapterSlot,
    export_adapter,
    from_peft_config,
    read_adapter,
    stack_adapters,
)
from components.models.peft_folder import check_adapter_fits, check_adapter_folder
from components.models.policy import Policy

if TYPE_CHECKING:
    import peft
    from peft import PeftModel
    from transformers import PreTrainedModel

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called with (step, number of steps, metrics of the step) after each optimizer step."""


Ends = Callable[["PeftModel", int], bool]
"""Called with the model and the step at each checkpoint; the training ends there if it gives True."""


class AlignmentError(UserError, ValueError):
    """Pairs or a reference that the policy cannot be aligned with."""


class DpoPair(TypedDict):
    """A labeled pair: the prompt, and the tokens of both completions."""

    prompt: str
    chosen_ids: list[int]
    rejected_ids: list[int]


@dataclass(frozen=True)
class TrainedPolicy:
    """What a trainer returns.

    Attributes:
        model: the trained model, in evaluation mode.
        history: metrics of each optimizer step, under the names of TRL: loss, grad_norm,
            learning_rate, rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins,
            logps/chosen, logps/rejected, step and epoch. With max_kl, steps of a checkpoint have
            kl_sequence, see kl_to_reference.
    """

    model: PeftModel
    history: list[dict[str, float]]


def load_initial_model(policy: Policy, config: DpoConfig) -> PreTrainedModel | PeftModel:
    """Prepare the model from which the training starts.

    Returns:
        a model without an adapter, which is the reference, and on which a new adapter is trained;
        or a PEFT model whose adapter is trained further, and whose initial values are the
        reference.

    Raises:
        AdapterError: the reference adapter cannot be used.
    """
    from peft import PeftModel

    if config.reference == "base":
        return policy.model
    folder = Path(config.reference_adapter or "")
    shapes = check_adapter_folder(folder, "alignment.dpo.reference_adapter", policy.config.backbone)
    check_adapter_fits(folder, shapes, cast("PreTrainedModel", policy.model))
    model = PeftModel.from_pretrained(policy.model, folder, is_trainable=config.reference == "round_start")
    if config.reference == "round_start":
        return model
    return cast("PreTrainedModel", model.merge_and_unload())


def initialize_adapter(model: PeftModel, seed: int) -> None:
    """Set a new adapter's initial values, in fp32."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            # TRL makes them bf16 on an 8-bit backbone, in which a step of 1e-6 would be lost.
            parameter.data = parameter.data.float()
    slot = AdapterSlot(model)
    slot.load(slot.initial_adapter(seed))


def save_adapter(model: PeftModel, policy: PolicyConfig, config: DpoConfig, folder: Path) -> Path:
    """Save the trained policy as a PEFT folder for the plain backbone.

    Neither the optimizer nor anything pickled is saved, and no hub is contacted. With the reference
    `sft` the trained adapter lies on top of the merged one, so that both are saved as one adapter,
    whose rank is the sum of their ranks.
    """
    tensors = AdapterSlot(model).read()
    lora = from_peft_config(cast("peft.LoraConfig", model.peft_config["default"]), tensors)
    if config.reference == "sft":
        merged = read_adapter(Path(config.reference_adapter or ""))
        tensors, lora = stack_adapters(merged, (tensors, lora))
    return export_adapter(tensors, lora, policy.backbone, folder, policy.template)
