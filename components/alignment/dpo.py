"""Alignment of the policy by DPO on labeled pairs (FedBiscuit eqs. 2 and 9), in the loop of the clients.

The reference is explicit. `base`: the backbone without an adapter. `sft`: an adapter is merged into
the backbone first, and the result is the reference; weights in bfloat16, whose steps are larger than an
update of LoRA, have it as a frozen adapter below the trained one. `round_start`: an adapter is trained
further, and its initial values are the reference.

Optimizer, schedule and clipping are those of TRL's DPOTrainer, and so is the loss, but a step's loss
is the mean over its pairs: TRL takes the mean over micro-batches, which differs where the last of an
epoch is smaller. Both completions of a pair share one forward pass over their prompt, and pairs of
similar length share a micro-batch, so that little of it is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments

from components.alignment.label import LabeledPair
from components.concurrency import concurrent_parts, run_concurrently
from components.config import OptimizerConfig, PolicyConfig, UserError
from components.config.alignment import DpoConfig
from components.learning.kl import as_dpo_reference, kl_to_reference
from components.learning.loop import (
    Loss,
    Parameters,
    RowLosses,
    Rows,
    StepFigures,
    Training,
    TrainingError,
    train,
)
from components.learning.objectives import dpo_loss
from components.learning.preference import count_tokens
from components.models.adapters import (
    AdapterSlot,
    attach_lora,
    export_adapter,
    from_peft_options,
    read_adapter,
    stack_adapters,
    to_peft_config,
)
from components.models.backbone import choose_dtype, find_active_dropout
from components.models.checkpointing import enable_checkpointing
from components.models.fused_lora import fuse_lora
from components.models.head import check_lm_head
from components.models.logprobs import TokenRow, completion_logprobs
from components.models.peft_folder import check_adapter_fits, check_adapter_folder, module_sizes
from components.models.policy import Policy
from components.seeding import derive, generator

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called with (step, number of steps, metrics of the step) after each optimizer step."""
FIGURES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""Metrics of a step that are means over its pairs, under their names in TRL."""
FROZEN = "reference"
"""Name in PEFT of an adapter that stays as it is."""


@dataclass(frozen=True)
class DpoResult:
    """Result of a DPO training."""

    adapter: Path  # PEFT folder of the aligned policy, after the last step
    checkpoints: dict[Path, int]  # optimizer step by PEFT folder
    # Metrics of each step: FIGURES, grad_norm, learning_rate, step and epoch. With max_kl, steps of a
    # checkpoint have kl_sequence, see kl_to_reference.
    history: list[dict[str, float]]
    # pairs, steps, epochs (where max_kl limits them), and the KL to the reference
    metrics: dict[str, float]


@dataclass(frozen=True)
class Step:
    """The place of an optimizer step in a training."""

    rows: Rows  # its pairs, sorted by length
    epochs_done: float  # passes over the pairs after it, with the part of the present one
    checkpoints: tuple[str, ...]  # folders that are saved after it


def align_policy(
    policy: Policy,
    config: DpoConfig,
    pairs: Sequence[LabeledPair],
    folder: Path,
    kl_prompts: Sequence[str],
    seed: int,
    progress: Progress | None = None,
) -> DpoResult:
    """Align a LoRA policy by DPO on labeled pairs.

    Args:
        policy: an open policy without an adapter; it has the trained one afterwards.
        folder: receives epoch-1/, epoch-2/, ..., step-N/, ... and final/, all of them PEFT folders.
        kl_prompts: prompts on which the KL to the reference is estimated after the training.
        seed: determines a new adapter's initial values, the order of the pairs, and dropout.
    """
    if not pairs:
        raise UserError(
            "there are no labeled pairs to align with: all completions of each prompt were equal or empty."
            " Raise alignment.prompts, alignment.completions or alignment.temperature."
        )
    if config.max_kl is not None and not kl_prompts:
        raise UserError(
            "alignment.dpo.max_kl is measured on held-out prompts, and there are none: leave it out, or"
            " hold out prompts (data.test)"
        )
    check_lm_head(cast("PreTrainedModel", policy.model), policy.config.backbone.name)
    model = prepare_model(policy, config, seed)
    rows = [(policy.encode(pair["prompt"]), pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs]
    steps = list(plan_steps(rows, config, seed))
    loss = TokenDpoLoss(policy, model, rows, config)
    checkpoints: dict[Path, int] = {}
    history: list[dict[str, float]] = []

    def measure_kl() -> dict[str, float]:
        backbone, is_training = policy.model, model.training
        policy.model = model.eval()
        try:
            return kl_to_reference(policy, kl_prompts, seed, reference=loss.reference_adapter)
        finally:
            policy.model = backbone
            model.train(is_training)

    def finish_step(trained: StepFigures) -> bool:
        """Record a step, and save its checkpoints; whether the training ends here."""
        number, step = trained.step + 1, steps[trained.step]
        entry = dict(zip(FIGURES, loss.figures[step.rows].mean(0).tolist(), strict=True))
        entry |= {"grad_norm": trained.gradient_norm, "learning_rate": trained.learning_rate}
        entry |= {"step": number, "epoch": step.epochs_done}
        history.append(entry)
        for name in step.checkpoints:
            checkpoints[save_adapter(model, policy.config, config, folder / name)] = number
        if progress is not None:
            progress(number, len(steps), entry)
        if config.max_kl is None or not step.checkpoints:
            return False
        kl = measure_kl()["kl_sequence"]
        entry["kl_sequence"] = kl
        return kl > config.max_kl

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    schedule = OptimizerConfig(lr=config.lr, scheduler=config.lr_scheduler, clip=config.max_grad_norm)
    training = Training(
        len(steps),
        config.batch_size,
        schedule,
        derive(seed, "dropout", 0),
        config.micro_batch_size,
        progress=finish_step,
    )
    batches = [step.rows for step in steps]
    try:
        train(model, parameters, batches, loss, training, optimizer=build_optimizer(parameters, config))
    except TrainingError:
        raise UserError("the DPO loss became NaN or infinite: lower alignment.dpo.lr.") from None
    metrics = {"pairs": float(len(pairs)), "steps": float(len(history))}
    if config.max_kl is not None:
        metrics["epochs"] = history[-1]["epoch"]
    metrics |= measure_kl()
    policy.model = model
    adapter = save_adapter(model, policy.config, config, folder / "final")
    return DpoResult(adapter, checkpoints, history, metrics)


class TokenDpoLoss(Loss):
    """DPO on sampled tokens, with the figures of each pair."""

    def __init__(self, policy: Policy, model: PeftModel, rows: Sequence[TokenRow], config: DpoConfig) -> None:
        """Compute the log-probabilities under the reference, before the model is trained."""
        self.policy, self.model, self.rows, self.beta = policy, model, rows, config.beta
        dtype = choose_dtype(policy.config.backbone.dtype, policy.device)
        self._is_bf16 = policy.device.startswith("cuda") and str(dtype) == "torch.bfloat16"
        self.concurrent = not self._is_bf16
        self.figures = np.zeros((len(rows), len(FIGURES)))  # of the last step that a pair was in
        # An adapter that is trained further, or above a frozen one, is the reference before the first step.
        is_reference = config.reference == "round_start" or FROZEN in model.peft_config
        self.reference_adapter = AdapterSlot(model).read() if is_reference else None
        with as_dpo_reference(model, self.reference_adapter):
            self.reference = self._compute_logprobs(2 * config.micro_batch_size)  # [N, 2]

    def _compute_logprobs(self, batch_size: int) -> torch.Tensor:
        order = sorted(range(len(self.rows)), key=lambda n: (_width(self.rows[n]), n))
        values = torch.zeros(len(self.rows), 2, dtype=torch.float32, device=self.policy.device)
        self.model.eval()

        def compute(batch: list[int]) -> None:
            with torch.no_grad():
                values[batch] = self.logprobs(batch)

        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        halves = self.concurrent and not find_active_dropout(self.model)
        parts = concurrent_parts(torch.device(self.policy.device)) if halves else 1
        run_concurrently([partial(compute, batch) for batch in batches], at_once=parts)
        return values

    def logprobs(self, indices: Sequence[int]) -> torch.Tensor:
        """Summed log-probabilities of the chosen and the rejected completions, [n, 2] fp32."""
        base = cast("PreTrainedModel", self.model.get_base_model())
        pad_token_id = cast(int, self.policy.tokenizer.pad_token_id)
        rows = [self.rows[n] for n in indices]
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_bf16):
            return completion_logprobs(base, rows, pad_token_id).float()

    def __call__(self, rows: Rows) -> RowLosses:
        logprobs = self.logprobs(rows.tolist())
        reference = self.reference[rows.tolist()]
        losses = dpo_loss(logprobs[:, 0], logprobs[:, 1], reference[:, 0], reference[:, 1], self.beta)
        rewards = self.beta * (logprobs - reference).detach().double()
        margins = rewards[:, 0] - rewards[:, 1]
        columns = [losses.detach().double(), *rewards.T, (margins > 0).double(), margins]
        columns += logprobs.detach().double().T
        self.figures[rows] = torch.stack(columns, 1).cpu().numpy()
        return RowLosses(losses, count_tokens([self.rows[n] for n in rows]))


def build_optimizer(parameters: Parameters, config: DpoConfig) -> torch.optim.Optimizer:
    """The optimizer that transformers' Trainer, and TRL's with it, has by this name."""
    on_cpu = parameters[0].device.type == "cpu"
    arguments = TrainingArguments(
        optim=config.optimizer, learning_rate=config.lr, report_to="none", use_cpu=on_cpu
    )
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer: torch.optim.Optimizer = optimizer_class(
        [{"params": list(parameters), "weight_decay": arguments.weight_decay}], **settings
    )
    return optimizer


def plan_steps(rows: Sequence[TokenRow], config: DpoConfig, seed: int) -> Iterator[Step]:
    """The steps of a training: each epoch takes all pairs in an order of its own."""
    number = 0
    for epoch in range(1, config.epochs + 1):
        order = generator(seed, "dpo order", epoch).permutation(len(rows)).tolist()
        for start in range(0, len(order), config.batch_size):
            number += 1
            end = min(start + config.batch_size, len(order))
            batch = sorted(order[start:end], key=lambda n: (_width(rows[n]), n))
            names = []
            if config.checkpoint_every and number % config.checkpoint_every == 0:
                names.append(f"step-{number}")
            if end == len(order):
                names.append(f"epoch-{epoch}")
            yield Step(np.array(batch), epoch - 1 + end / len(order), tuple(names))


def _width(row: TokenRow) -> int:
    return sum(map(len, row))


def prepare_model(policy: Policy, config: DpoConfig, seed: int) -> PeftModel:
    """The model that is trained: with a new adapter, or with one that is trained further."""
    backbone = policy.config.backbone
    base = cast("PreTrainedModel", policy.model)
    if config.reference != "base":
        folder = Path(config.reference_adapter or "")
        shapes = check_adapter_folder(folder, "alignment.dpo.reference_adapter", backbone)
        check_adapter_fits(folder, shapes, base)
    if config.reference == "round_start":
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
        fuse_lora(model)
    else:
        is_merged = config.reference == "sft" and base.dtype == torch.float32
        if is_merged:
            base = cast("PreTrainedModel", PeftModel.from_pretrained(base, folder).merge_and_unload())
        model = attach_lora(base, policy.config.lora)
        if config.reference == "sft" and not is_merged:
            attach_frozen(model, folder, list(module_sizes(shapes)))
        slot = AdapterSlot(model)
        slot.load(slot.initial_adapter(seed))
    if policy.device.startswith("cuda") or backbone.gradient_checkpointing:
        enable_checkpointing(model, backbone.name)
    return model


def attach_frozen(model: PeftModel, folder: Path, modules: list[str]) -> None:
    """Add an adapter of these modules that is not trained, in fp32 and without dropout."""
    tensors, lora = read_adapter(folder)
    options = to_peft_config(lora.model_copy(update={"dropout": 0.0, "target_modules": modules}))
    with torch.random.fork_rng(devices=[]):  # PEFT draws initial values from the global generator
        model.add_adapter(FROZEN, options)
    layers: Any = model.base_model
    layers.set_adapter([FROZEN, "default"])
    for name, parameter in model.named_parameters():
        if FROZEN in name.split("."):
            stored = tensors[name.replace(f".{FROZEN}.", ".")]
            parameter.data = stored.to(parameter.device, torch.float32)
            parameter.requires_grad_(False)


def save_adapter(model: PeftModel, policy: PolicyConfig, config: DpoConfig, folder: Path) -> Path:
    """Save the trained policy as a PEFT folder for the plain backbone.

    Neither the optimizer nor anything pickled is saved, and no hub is contacted. With the reference
    `sft` the trained adapter lies on top of the reference's, so that both are saved as one adapter,
    whose rank is the sum of their ranks.
    """
    tensors = AdapterSlot(model).read()
    lora_config: Any = model.peft_config["default"]
    lora = from_peft_options(lora_config.to_dict(), tensors)
    if config.reference == "sft":
        merged = read_adapter(Path(config.reference_adapter or ""))
        tensors, lora = stack_adapters(merged, (tensors, lora))
    return export_adapter(tensors, lora, policy.backbone, folder, policy.template)
