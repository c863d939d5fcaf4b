"""DPO in which both completions of a pair share one forward pass over their prompt.

Loss, optimizer, schedule, clipping and checkpoints are those of TRL's DPOTrainer; the order of the
pairs is not. The loop runs on `accelerate.Accelerator`. In a launch of P processes, each with a
policy on its own device, each takes every P-th micro-batch of a step, and without dropout the step
is that of one process up to rounding. The flow runs it in one process; several were run on the CPU
only. One process on the CPU, without dropout, computes two micro-batches at a time.

A step's loss is the mean over its pairs. TRL takes the mean over micro-batches, which differs where
the last of an epoch is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
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
from components.concurrency import concurrent_parts, run_concurrently
from components.config import DpoConfig
from components.learning.loop import Gradients, add_gradients, gradients_of
from components.learning.objectives import dpo_loss
from components.models.adapters import AdapterSlot, add_adapter_slot, attach_lora, from_peft_config
from components.models.backbone import choose_dtype, find_active_dropout
from components.models.checkpointing import enable_checkpointing
from components.models.fused_lora import fuse_lora
from components.models.logprobs import TokenRow, completion_logprobs
from components.models.policy import Policy
from components.seeding import derive, generator, seeded

if TYPE_CHECKING:
    import peft
    import torch
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainingArguments

REFERENCE = "ref"
"""Name of the frozen copy of an adapter that is trained further, as in TRL."""
FIGURES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""Metrics of a step that are means over its pairs."""


@dataclass(frozen=True)
class Step:
    """An optimizer step.

    Attributes:
        number: from 1.
        epoch: from 1.
        epochs_done: passes over the pairs after the step, with the part of the present one.
        ends_epoch: whether it is the epoch's last.
        micro_batches: indices of its pairs, [at most micro_batch_size] each.
    """

    number: int
    epoch: int
    epochs_done: float
    ends_epoch: bool
    micro_batches: list[list[int]]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return sum(map(len, self.micro_batches))


def train_packed(
    policy: Policy,
    pairs: Sequence[DpoPair],
    config: DpoConfig,
    folder: Path,
    seed: int,
    progress: Progress | None = None,
    ends: Ends | None = None,
) -> TrainedPolicy:
    """Train a policy by DPO on packed pairs.

    Args:
        policy: an open policy without an adapter; its head is one that `check_lm_head` accepts.
        pairs: labeled pairs.
        config: hyperparameters and the reference.
        folder: receives the checkpoints.
        seed: determines the initial values of a new adapter, the order of the pairs, and dropout.
        progress: called after each optimizer step.
        ends: says at each checkpoint whether it is the last one; None: all epochs are trained.

    Raises:
        AlignmentError: a loss is not finite, or the reference adapter cannot be read.
    """
    model = prepare_model(policy, config, seed)
    arguments = _training_arguments(policy, config, folder)
    accelerator = _build_accelerator(policy)
    rows = [(policy.encode(pair["prompt"]), pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs]
    steps = list(plan_steps(rows, config, seed))
    loss = PairLoss(policy, model, rows, config, accelerator)
    optimization = Optimization(loss, arguments, len(steps))
    history = []
    with seeded(policy.device, derive(seed, "dropout", accelerator.process_index)):
        for step in steps:
            entry = optimization.take_step(step)
            if not math.isfinite(entry["loss"]):
                raise AlignmentError("the DPO loss became NaN or infinite: lower alignment.dpo.lr.")
            history.append(entry)
            if accelerator.is_main_process:
                for name in _checkpoint_names(step, config):
                    save_adapter(model, policy.config, config, folder / name)
                if progress is not None:
                    progress(step.number, len(steps), entry)
            if ends is not None and any(_checkpoint_names(step, config)) and ends(model, step.number):
                break
    accelerator.wait_for_everyone()
    return TrainedPolicy(model.eval(), history)


def prepare_model(policy: Policy, config: DpoConfig, seed: int) -> PeftModel:
    """The model that is trained: with a new adapter, or with one that is trained further.

    An adapter that is trained further has a frozen copy named REFERENCE.

    Raises:
        AlignmentError: the reference adapter cannot be read.
        BackboneError: the layers of the policy cannot be checkpointed.
    """
    from peft import PeftModel

    model = load_initial_model(policy, config)
    if not isinstance(model, PeftModel):
        model = attach_lora(model, policy.config.lora)
        initialize_adapter(model, seed)
    else:
        fuse_lora(model)
        adapter = AdapterSlot(model).read()
        lora = from_peft_config(cast("peft.LoraConfig", model.peft_config["default"]), adapter)
        add_adapter_slot(model, lora, REFERENCE).load(adapter)
    backbone = policy.config.backbone
    if policy.device.startswith("cuda") or backbone.gradient_checkpointing:
        enable_checkpointing(model, backbone.name)
    return model


def plan_steps(rows: Sequence[TokenRow], config: DpoConfig, seed: int) -> Iterator[Step]:
    """The steps of a training: each epoch takes all pairs in an order of its own.

    Within a step, pairs of similar length share a micro-batch, so that little of it is padding.
    """
    number = 0
    for epoch in range(1, config.epochs + 1):
        order = generator(seed, "dpo order", epoch).permutation(len(rows)).tolist()
        for start in range(0, len(order), config.batch_size):
            number += 1
            batch = sorted(order[start : start + config.batch_size], key=lambda n: (_width(rows[n]), n))
            size = config.micro_batch_size
            micro_batches = [batch[n : n + size] for n in range(0, len(batch), size)]
            end = min(start + config.batch_size, len(order))
            done = epoch - 1 + end / len(order)
            yield Step(number, epoch, done, end == len(order), micro_batches)


def _width(row: TokenRow) -> int:
    return sum(map(len, row))


def _checkpoint_names(step: Step, config: DpoConfig) -> Iterator[str]:
    """Folders of the checkpoints that are saved after a step."""
    if config.checkpoint_every and step.number % config.checkpoint_every == 0:
        yield f"step-{step.number}"
    if step.ends_epoch:
        yield f"epoch-{step.epoch}"


class PairLoss:
    """The DPO loss of pairs, with gradients for the adapter.

    Attributes:
        accelerator: of the processes that share the steps.
        parameters: those that are trained.
        reference: [N, 2], summed log-probabilities of the completions under the reference.
    """

    def __init__(
        self,
        policy: Policy,
        model: PeftModel,
        rows: Sequence[TokenRow],
        config: DpoConfig,
        accelerator: Accelerator,
    ) -> None:
        self.accelerator = accelerator
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._policy = policy
        self._model = model
        self._rows = rows
        self._config = config
        # The loop calls a module, so that the gradients of several processes are averaged.
        module = _logprob_module(model, cast(int, policy.tokenizer.pad_token_id), policy.device)
        self._module: torch.nn.Module = accelerator.prepare_model(module, device_placement=False)
        self.reference = self._compute_reference()

    def _compute_reference(self) -> torch.Tensor:
        """Log-probabilities under the reference, in batches that the processes share."""
        import torch

        from components.models.personalized import as_reference

        order = sorted(range(len(self._rows)), key=lambda n: (_width(self._rows[n]), n))
        size = 2 * self._config.micro_batch_size
        batches = [order[n : n + size] for n in range(0, len(order), size)]
        values = torch.zeros(len(self._rows), 2, device=self._policy.device)
        # An adapter that is trained further is its own reference before the first step.
        is_adapter = REFERENCE in self._model.peft_config
        self._model.eval()

        def compute(batch: list[int]) -> None:
            with torch.no_grad():
                values[batch] = self.logprobs(batch)

        own = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        with nullcontext() if is_adapter else as_reference(self._model):
            run_concurrently([partial(compute, batch) for batch in own], at_once=self._parts())
        return cast("torch.Tensor", self.accelerator.reduce(values, "sum"))

    def logprobs(self, indices: Sequence[int]) -> torch.Tensor:
        """Summed log-probabilities of the chosen and the rejected completions, [n, 2] fp32."""
        values: torch.Tensor = self._module([self._rows[n] for n in indices])
        return values

    def accumulate(self, step: Step) -> dict[str, float]:
        """Add the gradient of a step's mean loss, and return the means of FIGURES over its pairs."""
        import torch

        accelerator = self.accelerator
        processes = accelerator.num_processes
        own = step.micro_batches[accelerator.process_index :: processes]
        rounds = math.ceil(len(step.micro_batches) / processes)
        sums = torch.zeros(len(FIGURES), device=self._policy.device, dtype=torch.float64)
        self._model.train()
        if self._parts() > 1:
            return self._accumulate_concurrently(step)
        for n in range(rounds):
            # All processes take part in each exchange of gradients, one without pairs with weight 0.
            indices = own[n] if n < len(own) else step.micro_batches[0]
            weight = processes / step.pairs if n < len(own) else 0.0
            with accelerator.no_sync(self._module) if n < rounds - 1 else nullcontext():
                losses, figures = self._losses(indices)
                accelerator.backward(losses.sum() * weight)
            if n < len(own):
                sums += figures
        means = cast("torch.Tensor", accelerator.reduce(sums, "sum")) / step.pairs
        return dict(zip(FIGURES, means.tolist(), strict=True))

    def _parts(self) -> int:
        """Micro-batches that this process computes concurrently."""
        alone = self.accelerator.num_processes == 1 and self.accelerator.mixed_precision == "no"
        if not alone or find_active_dropout(self._model):
            return 1
        return concurrent_parts(self.parameters[0].device)

    def _accumulate_concurrently(self, step: Step) -> dict[str, float]:
        """`accumulate` with several micro-batches at a time, whose gradients are added in their order."""
        import torch

        def compute(indices: list[int]) -> tuple[Gradients, torch.Tensor]:
            losses, figures = self._losses(indices)
            return gradients_of(losses.sum() / step.pairs, self.parameters), figures

        sums = torch.zeros(len(FIGURES), dtype=torch.float64)
        parts = self._parts()
        for start in range(0, len(step.micro_batches), parts):
            calls = [partial(compute, batch) for batch in step.micro_batches[start : start + parts]]
            for gradients, figures in run_concurrently(calls):
                add_gradients(self.parameters, gradients)
                sums += figures
        return dict(zip(FIGURES, (sums / step.pairs).tolist(), strict=True))

    def _losses(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [n] of pairs, and the sums of FIGURES over them."""
        import torch

        beta = self._config.beta
        logprobs = self.logprobs(indices)
        reference = self.reference[list(indices)]
        losses = dpo_loss(logprobs[:, 0], logprobs[:, 1], reference[:, 0], reference[:, 1], beta)
        rewards = beta * (logprobs - reference).detach().double()
        margins = rewards[:, 0] - rewards[:, 1]
        columns = [
            losses.detach().double(),
            rewards[:, 0],
            rewards[:, 1],
            (margins > 0).double(),
            margins,
            logprobs[:, 0].detach().double(),
            logprobs[:, 1].detach().double(),
        ]
        return losses, torch.stack(columns).sum(1)


class Optimization:
    """Optimizer steps with the optimizer, the schedule and the clipping of transformers' Trainer."""

    def __init__(self, loss: PairLoss, arguments: TrainingArguments, steps: int) -> None:
        from transformers import Trainer, get_scheduler

        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        self._loss = loss
        self._max_norm = arguments.max_grad_norm
        groups = [{"params": loss.parameters, "weight_decay": arguments.weight_decay}]
        self._optimizer: Any = optimizer_class(groups, **settings)
        self._scheduler: Any = get_scheduler(arguments.lr_scheduler_type, self._optimizer, 0, steps)

    def take_step(self, step: Step) -> dict[str, float]:
        """Take a step, and return its entry of the history."""
        self._optimizer.zero_grad(set_to_none=True)
        figures = self._loss.accumulate(step)
        norm = self._loss.accelerator.clip_grad_norm_(self._loss.parameters, self._max_norm)
        rate = float(self._scheduler.get_last_lr()[0])
        self._optimizer.step()
        self._scheduler.step()
        return figures | {
            "grad_norm": float(norm),
            "learning_rate": rate,
            "step": step.number,
            "epoch": step.epochs_done,
        }


def _logprob_module(model: PeftModel, pad_token_id: int, device: str) -> torch.nn.Module:
    """A module whose forward pass computes `completion_logprobs` under the active adapter."""
    import torch

    class LogProbs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, rows: Sequence[TokenRow]) -> torch.Tensor:
            base = cast("PreTrainedModel", self.model.get_base_model())
            return completion_logprobs(base, rows, pad_token_id, device)

    return LogProbs()


def _training_arguments(policy: Policy, config: DpoConfig, folder: Path) -> TrainingArguments:
    """The arguments from which transformers chooses the optimizer and the schedule."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        optim=config.optimizer,
        learning_rate=config.lr,
        lr_scheduler_type=config.lr_scheduler,
        max_grad_norm=config.max_grad_norm,
        use_cpu=not policy.device.startswith("cuda"),
        report_to="none",
    )


def _build_accelerator(policy: Policy) -> Accelerator:
    """The processes of the launch, with bf16 autocast where the policy is in bf16 on CUDA."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    on_cuda = policy.device.startswith("cuda")
    dtype = choose_dtype(policy.config.backbone.dtype, policy.device)
    precision = "bf16" if on_cuda and str(dtype) == "torch.bfloat16" else "no"
    # Processes may compute different numbers of batches, so a pass must not exchange buffers.
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=not on_cuda, mixed_precision=precision, kwargs_handlers=[exchange])
    accelerator.gradient_accumulation_steps = 1  # the loop weights its micro-batches itself
    return accelerator
