"""The client half of all methods that train the policy on pairs; it knows no loss and no method.

    load the received adapter, and the client's private modules if the method has some
    for each stage of the round (a single one, or a personal and a shared one):
        train its modules by the loss of the method's objective
    write what the client keeps; send the shared adapter

The reference of DPO and PPO is the frozen backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from components.config import LocalObjective, PairPpoObjective, Recipe
from components.data.records import Pair
from components.federation.clients.context import ClientContext
from components.federation.clients.policy_client import PolicyClient
from components.federation.clients.private import PrivateState
from components.federation.clients.rates import RATE_NUMBERS, RateMemory
from components.federation.local import Adaptation
from components.federation.protocol import ClientResult, Job, TrainJob
from components.learning.client_data import ClientData
from components.learning.loop import (
    Loss,
    ParameterGroup,
    Parameters,
    Part,
    Rows,
    Training,
    TrainingError,
    draw_minibatches,
    train,
)
from components.learning.meta_learning import MetaLoss, adapt, group_meta_batches
from components.learning.pair_scores import PreferenceScores, pair_logprobs, policy_scores
from components.learning.wrapped_losses import LocalTraining
from components.models.eight_bit import check_support
from components.models.resident import ResidentPolicy
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.logprobs import TokenRow
    from components.models.store import Adapter

LOSS = "loss."
"""Prefix of the tensors of a loss in a client's private store, beside those of private modules."""
TrainedPart = Literal["personal", "shared", "all"]
"""What is trained: the private modules, the shared adapter, or both."""
SEEDS: dict[TrainedPart, str] = {"personal": "own half", "shared": "shared half"}
"""Names from which the seeds of the two stages of a round are derived."""
STAGE_METRICS = ("loss", "seconds", "steps", "excluded", "kl", "pairs", "stopped")
"""Metrics of each stage where a round has two of them."""


@dataclass
class ClientRound:
    """A client's round: its job, its pairs, and what it keeps, which each stage of the round replaces."""

    job: TrainJob
    context: ClientContext
    rows: Sequence[Pair]
    rates: RateMemory  # of the round; they decay after it
    numbers: dict[str, float]  # `Loss.numbers`
    tensors: Adapter  # `Loss.tensors`
    sent: Callable[[Adapter], Adapter] = dict  # `Loss.sent`, of the shared adapter's stage


class PolicyTrainer(PolicyClient):
    """Trains the shared adapter, and a client's private modules if the method has some.

    Where the method adapts the server's adapter to each client (Per-FedAvg), it takes meta-steps
    (components/learning/meta_learning.py), and a client is measured and answers after the adaptation.
    """

    def __init__(self, recipe: Recipe, device: str) -> None:
        check_support("federation.optimizer.name", recipe.federation.optimizer.name, device)
        super().__init__(recipe, device)
        self._objective: LocalObjective = self._local.objective
        self._reward = next(iter(recipe.rewards), "")
        self._private = self.resident.personal
        self._adaptation = self._local.adaptation
        for factor in self._local.frozen:
            self.resident.slot.freeze(factor)

    @cached_property
    def _loss_type(self) -> Any:
        """The class of the objective's loss, built from ClientData."""
        if not self._objective.loss:
            raise TypeError(f"{type(self).__name__} cannot train the objective '{self._objective.kind}'")
        return resolve_name(self._objective.loss)

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Take a round's steps on the client's training pairs.

        The private state is written after each stage, so that a repeated job resumes from a finished
        personal stage, and before the update is sent.
        """
        if not isinstance(job, TrainJob):
            return super().run(job, context)
        state = context.private_state() or PrivateState({})
        rates = RateMemory.of(state.numbers)
        self._load(context.load_adapter(job.adapter), state.tensors)
        rows = context.rows("train")
        client = ClientRound(
            job,
            context,
            rows,
            rates,
            {name: value for name, value in state.numbers.items() if name not in RATE_NUMBERS},
            with_prefix(state.tensors, LOSS),
        )
        steps = self._train_stages(client)
        metrics = merge_stages(steps)
        dpo = [step["dpo"] for step in steps.values() if "dpo" in step]
        if dpo:
            rates = rates.after_round(float(np.mean(dpo)), self._config.rate_decay)
        decays = self._config.rate_decay is not None
        if decays or self._private is not None:
            metrics["decay"] = rates.decay
        kept_bytes = 0
        if decays or self._private is not None or client.tensors or client.numbers:
            kept = PrivateState(self._read_kept(client), client.numbers | rates.numbers())
            kept_bytes = context.store.save(job.key(), job.previous_job_key, kept).size
        return ClientResult(
            tensors=client.sent(self.resident.slot.read()),
            rows=len(rows),
            metrics=Metrics(scalars=metrics),
            kept_bytes=kept_bytes,
        )

    def _train_stages(self, client: ClientRound) -> dict[str, dict[str, float]]:
        """The metrics of each stage of a round."""
        if self._local.stage is None:
            return {"shared": self._train_stage(client, "all")}  # by the name of the last stage
        key = client.job.key()
        completed = client.context.store.load_personal_stage(key)  # of an earlier attempt at this job
        if completed is None:
            personal = self._train_stage(client, "personal")
            state = PrivateState(self._read_kept(client), client.numbers | personal)
            client.context.store.save_personal_stage(key, state)
        else:
            personal = client.numbers = completed.numbers
            client.tensors = with_prefix(completed.tensors, LOSS)
            self._load_private(completed.tensors)
        return {"personal": personal, "shared": self._train_stage(client, "shared")}

    def _train_stage(self, client: ClientRound, trained: TrainedPart) -> dict[str, float]:
        """Train some of the modules in their part of a round."""
        config, local, job = self._config, self._local, client.job
        personal_lr = client.rates.learning_rate(local.personal_lr, config.rate_decay)
        lr = client.rates.learning_rate(local.learning_rate(config), config.rate_decay)
        training = Training(
            config.local_steps_for(len(client.rows)),
            config.batch_size,
            config.optimizer.model_copy(update={"lr": personal_lr if trained == "personal" else lr}),
            derive(job.seed, SEEDS[trained]) if trained in SEEDS else job.seed,
            config.micro_batch_size,
        )
        part: Part = partial(self._part, trained=trained)
        objective = self._objective
        minibatches = self._loss_type.draw_minibatches(objective, len(client.rows), training, part, job.seed)
        progress = job.round / (config.rounds - 1) if config.rounds > 1 else 0.0
        loss = self._build_loss(
            client.context, client.rows, minibatches, progress, client.numbers, client.tensors
        )
        if trained != "personal":
            attached = {name: client.context.load_adapter(digest) for name, digest in job.attached.items()}
            slot = self.resident.slot
            loss = local.wrapped(loss, LocalTraining(slot.named, lr, attached, client.tensors))
        with trainable(self.resident, trained, personal_lr) as (parameters, parameter_groups):
            metrics = self._minimize(loss, minibatches, training, parameters, parameter_groups)
        client.numbers, client.sent = loss.numbers(), loss.sent
        client.tensors |= loss.tensors()
        return metrics

    def _minimize(
        self,
        loss: Loss,
        minibatches: list[Rows],
        training: Training,
        parameters: Parameters,
        parameter_groups: tuple[ParameterGroup, ...],
    ) -> dict[str, float]:
        """Train parameters on minibatches; the metrics."""
        if self._adaptation is not None:
            meta_batches = group_meta_batches(minibatches, self._adaptation.steps)
            loss = MetaLoss(loss, meta_batches, parameters, self._adaptation.lr, training.micro_batch_size)
            minibatches = loss.outer_minibatches
            training = replace(training, seed=derive(training.seed, "meta"))
        trained = train(self.resident.model, parameters, minibatches, loss, training, parameter_groups)
        return loss.metrics(trained)

    def _part(self, steps: Sequence[object], trained: TrainedPart) -> Sequence[object]:
        """The steps of a round in which some of the modules are trained; see StageLength.divide."""
        if self._local.stage is None:
            return steps
        personal, shared = self._local.stage.divide(len(steps))
        return steps[:personal] if trained == "personal" else steps[-shared:]

    def _build_loss(
        self,
        context: ClientContext,
        rows: Sequence[Pair],
        minibatches: Sequence[Rows],
        progress: float = 0.0,
        numbers: Mapping[str, float] | None = None,
        tensors: Adapter | None = None,
    ) -> Loss:
        """The loss of the method's objective; further arguments as of ClientData."""
        data = ClientData(
            self.resident,
            self._objective,
            rows,
            np.unique(np.concatenate(minibatches)),
            self.reference_cache,
            self._score_batch_size,
            partial(context.pair_scores, rows, self._reward),
            progress,
            numbers or {},
            tensors or {},
            context.loss_flip,
        )
        loss: Loss = self._loss_type(data)
        return loss

    def score_pairs(
        self, pairs: Sequence[Pair], adapter: Adapter, context: ClientContext, batch_size: int | None = None
    ) -> PreferenceScores:
        """Scores by the client's own model; 'explicit' are those of its reward head, if it has one."""
        if self._private is None and self._adaptation is None:
            return super().score_pairs(pairs, adapter, context, batch_size)
        size = batch_size or self._score_batch_size
        self.load_client(adapter, context)
        reference = self._reference_logprobs(pairs, size)
        head = None if self._private is None else self._private.head.reward
        if head is None or not pairs:
            logprobs = pair_logprobs(self.resident, pairs, size)
            explicit = None if head is None else np.zeros((1, 0))
            return policy_scores(self.resident, pairs, logprobs[None], reference, explicit)

        def measure(rows: list[TokenRow]) -> torch.Tensor:
            logprobs, features = self.resident.logprobs_and_features(rows, head.pooling)
            rewards = head(features)
            return torch.cat([logprobs, rewards[:, :1] - rewards[:, 1:]], 1)

        rows = [self.resident.encode(*pair.texts) for pair in pairs]
        measured = self.resident.map_batches(rows, size, measure)
        return policy_scores(self.resident, pairs, measured[None, :, :2], reference, measured[None, :, 2])

    def load_client(self, adapter: Adapter, context: ClientContext) -> None:
        """Load the adapter and the client's private modules, or adapt it to the client."""
        if self._adaptation is not None:
            self._adapt(adapter, self._adaptation, context)
            return
        state = context.private_state() if self._private is not None else None
        self._load(adapter, {} if state is None else state.tensors)

    def _adapt(self, adapter: Adapter, adaptation: Adaptation, context: ClientContext) -> None:
        """Take the inner steps on the client's training pairs, the same ones each time."""
        rows = context.rows("train")
        seed = derive(self._seed, "adapt", context.client)
        objective, config, slot = self._objective, self._config, self.resident.slot
        size = objective.minibatch if isinstance(objective, PairPpoObjective) else config.batch_size
        inner = list(draw_minibatches(len(rows), size, adaptation.steps, seed))
        slot.load(adapter)
        loss = self._build_loss(context, rows, inner)
        adapt(self.resident.model, slot.parameters, inner, loss, adaptation.lr, seed, config.micro_batch_size)

    def _load(self, adapter: Adapter, private: Adapter) -> None:
        """Load an adapter and private modules, whose initial values are those of a client without any."""
        self._load_private(private)
        self.resident.slot.load(adapter)

    def _load_private(self, tensors: Adapter) -> None:
        if self._private is not None:
            own = {name: value for name, value in tensors.items() if not name.startswith(LOSS)}
            self._private.load(own or self._private.initial_modules(self._seed))

    def _read_kept(self, client: ClientRound) -> Adapter:
        """The private modules, and the tensors of the loss.

        Raises:
            TrainingError: a value is NaN or infinite; the client keeps its previous state.
        """
        tensors = {} if self._private is None else self._private.read()
        tensors |= {f"{LOSS}{name}": value for name, value in client.tensors.items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise TrainingError(
                    f"the client's private tensor '{name}' has values that are NaN or infinite after its"
                    " last step: lower the learning rates"
                )
        return tensors


@contextmanager
def trainable(
    resident: ResidentPolicy, trained: TrainedPart, personal_lr: float
) -> Iterator[tuple[Parameters, tuple[ParameterGroup, ...]]]:
    """Freeze what is not trained; the parameters at the optimizer's rate, and those at their own."""
    shared = resident.slot.parameters
    private = [] if resident.personal is None else resident.personal.parameters
    others: dict[TrainedPart, Parameters] = {"personal": shared, "shared": private, "all": []}
    frozen = [parameter for parameter in others[trained] if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        parameter_groups = ((private, personal_lr),) if trained == "all" and private else ()
        yield (private if trained == "personal" else shared), parameter_groups
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def with_prefix(tensors: Adapter, prefix: str) -> Adapter:
    """The tensors of a private store whose names have a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def merge_stages(steps: dict[str, dict[str, float]]) -> dict[str, float]:
    """The metrics of a client's round.

    Returns:
        those of the shared stage, with the totals of steps, tokens and seconds, and STAGE_METRICS of
        each stage under its name where there are two.
    """
    totals = {name: sum(step[name] for step in steps.values()) for name in ("steps", "tokens", "seconds")}
    metrics = steps["shared"] | totals
    if len(steps) > 1:
        for name, step in steps.items():
            metrics |= {f"{name}/{key}": step[key] for key in STAGE_METRICS if key in step}
    return metrics
