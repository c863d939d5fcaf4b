"""The trainer of clients with private modules (FedPDPO algorithm 1, FedPer, FedRep)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from components.config import DpoObjective, OfflinePpoObjective, PdpoObjective, Recipe
from components.data.records import PairRow, Pairs
from components.federation.clients.base import ClientResult, unsupported_job
from components.federation.clients.context import ClientContext
from components.federation.clients.policy import (
    CRITIC,
    ResidentPolicyTrainer,
    drawn_rows,
    pack_critic,
    ppo_metrics,
    training_metrics,
)
from components.federation.clients.private import PrivateState
from components.federation.clients.rates import RateMemory
from components.federation.personalization import PersonalizedMethod
from components.federation.protocol import Job, TrainJob
from components.learning.local import LocalTraining, TrainingError
from components.learning.offline_ppo import TrainedModules, draw_ppo_minibatches
from components.learning.pdpo import (
    INITIAL_SCALE,
    ModuleGroup,
    PDPOConfig,
    PersonalizedMetrics,
    interpolate_reward_weight,
    personal_slot,
    split_rates,
    train_pdpo,
    trainable_modules,
)
from components.learning.preference_scores import PreferenceScores
from components.results import Metrics
from components.seeding import derive

if TYPE_CHECKING:
    import torch

    from components.learning.offline_ppo import Critic
    from components.models.adapters import Adapter
    from components.models.logprobs import TokenRow
    from components.models.policy import Policy

STEP_METRICS = ("loss", "seconds", "steps", "excluded", "kl", "pairs", "stopped")
"""Metrics of each step where a round has two of them."""


S = TypeVar("S")
SEEDS: dict[ModuleGroup, str] = {"personal": "own half", "shared": "shared half"}
"""Names from which the seeds of the two steps of a round are derived."""


@dataclass(frozen=True)
class TrainingMemory:
    """What a client remembers beside its private modules.

    Attributes:
        scale: s of FedPDPO eq. 7.
        rates: the decay of its learning rates.
    """

    scale: float = INITIAL_SCALE
    rates: RateMemory = field(default_factory=RateMemory)

    @classmethod
    def of(cls, state: PrivateState | None) -> TrainingMemory:
        """The memory of a client's state; the initial one without a state."""
        return cls() if state is None else cls(state.numbers["scale"], RateMemory.of(state.numbers))

    def numbers(self) -> dict[str, float]:
        """The numbers as the private store keeps them."""
        return {"scale": self.scale} | self.rates.numbers()


class PersonalizedTrainer(ResidentPolicyTrainer):
    """Trains the shared adapter and a client's private modules, one after the other or together."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        options = recipe.federation.options
        if not isinstance(options, PersonalizedMethod):
            raise TypeError("the trainer 'personalized' needs the options of a PersonalizedMethod")
        super().__init__(recipe, device, options.personal_modules)
        self._options = options
        self._seed = recipe.seed
        self._modules = personal_slot(self.resident)
        self._critic: Critic | None = None

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        """Take a round's steps on the client's training pairs.

        The private state is written after each step, so that a repeated job resumes from a finished
        personal step.
        """
        if not isinstance(job, TrainJob):
            raise unsupported_job(self, job)
        rows = context.rows("train")
        previous = context.private_state()
        memory = TrainingMemory.of(previous)
        self._load_client_model(context.load_adapter(job.adapter), previous)
        self._critic = self.load_critic(previous)
        if self._options.personal_step is None:
            steps = {"shared": self._train(rows, context, job, memory, "all")}
        else:
            steps = self._train_apart(rows, context, job, memory)
        last = steps["shared"]
        rates = memory.rates
        if "dpo" in last.scalars:
            dpo = float(np.mean([step.scalars["dpo"] for step in steps.values()]))
            rates = rates.after_round(dpo, self._federation.rate_decay)
        memory = TrainingMemory(last.scalars["scale"], rates)
        state = PrivateState(self._read_private_tensors(), memory.numbers())
        saved = context.store.save(job.key(), job.previous_job_key, state)
        return ClientResult(
            tensors=self._modules.shared.read(),
            rows=len(rows),
            metrics=round_metrics(steps, memory),
            kept_bytes=saved.size,
        )

    def _train_apart(
        self, rows: Sequence[PairRow], context: ClientContext, job: TrainJob, memory: TrainingMemory
    ) -> dict[str, Metrics]:
        """The personal step, unless an earlier attempt completed it, and the shared step."""
        completed = context.store.load_personal_step(job.key())
        if completed is None:
            personal = self._train(rows, context, job, memory, "personal")
            state = PrivateState(self._read_private_tensors(), personal.scalars)
            context.store.save_personal_step(job.key(), state)
        else:
            self._modules.load(module_tensors(completed.tensors))
            self._critic = self.load_critic(completed)
            personal = Metrics(scalars=completed.numbers)
        memory = replace(memory, scale=personal.scalars["scale"])
        shared = self._train(rows, context, job, memory, "shared")
        return {"personal": personal, "shared": shared}

    def _train(
        self,
        rows: Sequence[PairRow],
        context: ClientContext,
        job: TrainJob,
        memory: TrainingMemory,
        group: ModuleGroup,
    ) -> Metrics:
        """Train a group of modules; `scale` of the metrics is s afterwards."""
        training = self._local_training(len(rows), memory, job.seed, group)
        objective = self._objective
        if isinstance(objective, OfflinePpoObjective):
            minibatches = self._part(draw_ppo_minibatches(len(rows), objective, job.seed), group)
            with trainable_modules(self.resident, group) as parameters:
                own_rate, groups = split_rates(self.resident, parameters, group, training.personal_lr)
                modules = TrainedModules(own_rate, groups, self._critic)
                ppo = self.train_ppo(rows, context, minibatches, modules, objective, training)
            return ppo_metrics(ppo).merged(Metrics(scalars={"scale": memory.scale}))
        reference = self.reference_logprobs(rows, drawn_rows(len(rows), training))
        loss = replace(self._loss(job.round), initial_scale=memory.scale)
        metrics = train_pdpo(self.resident, rows, reference, group, loss, training)
        return pdpo_metrics(metrics)

    def _local_training(
        self, rows: int, memory: TrainingMemory, seed: int, group: ModuleGroup
    ) -> LocalTraining:
        """The training of a group of modules, which is a part of the round's steps."""
        config = self._federation
        steps = len(self._part(range(config.local_steps_for(rows)), group))
        personal_lr = memory.rates.learning_rate(self._options.personal_lr, config.rate_decay)
        optimizer = self.decayed_optimizer(memory.rates)
        if group == "personal":
            optimizer = optimizer.model_copy(update={"lr": personal_lr})
        if group in SEEDS:
            seed = derive(seed, SEEDS[group])
        return LocalTraining(
            steps,
            config.batch_size,
            optimizer,
            seed,
            personal_lr=personal_lr,
            micro_batch_size=config.micro_batch_size,
        )

    def _part(self, steps: Sequence[S], group: ModuleGroup) -> Sequence[S]:
        """The steps of a round in which a group of modules is trained; see StepLength.divide."""
        length = self._options.personal_step
        if length is None:
            return steps
        personal, shared = length.divide(len(steps))
        if group == "personal":
            return steps[:personal]
        return steps[-shared:]

    def _loss(self, round: int) -> PDPOConfig:
        """The loss of a round: PDPO, or DPO as its special case."""
        objective = self._objective
        if isinstance(objective, DpoObjective):
            return PDPOConfig(beta=objective.beta, reward_weight=0.0, momentum=0.0, exclusion=None)
        if not isinstance(objective, PdpoObjective):
            raise TypeError(f"{type(self).__name__} cannot train the objective '{objective.kind}'")
        start, end = objective.reward_weight
        return PDPOConfig(
            beta=objective.beta,
            reward_weight=interpolate_reward_weight(start, end, round, self._federation.rounds),
            momentum=objective.scale_momentum,
            max_scale=objective.max_scale,
            exclusion=objective.exclusion,
        )

    def score_client_pairs(self, pairs: Pairs, adapter: Adapter, context: ClientContext) -> PreferenceScores:
        """Scores by the shared adapter with the client's private modules.

        The reward head's margins are 'explicit'.
        """
        self._load_client_model(adapter, context.private_state())
        logprobs, explicit = self._measure(pairs)
        reference = self.reference_logprobs(pairs)
        return self._preference_scores(
            pairs, logprobs[None], reference, None if explicit is None else explicit[None]
        )

    def client_policy(self, adapter: Adapter, context: ClientContext) -> Policy:
        """The resident policy with the shared adapter and the client's private modules."""
        self._load_client_model(adapter, context.private_state())
        return self.resident.policy

    def _load_client_model(self, adapter: Adapter, state: PrivateState | None) -> None:
        """Load the shared adapter, and the private modules or their initial values."""
        initial = self._modules.initial_modules
        self._modules.load(module_tensors(state.tensors) if state else initial(self._seed))
        self._modules.shared.load(adapter)

    def _measure(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-probabilities [N, 2], and the reward head's margins [N], of the model that is loaded."""
        from components.learning.dpo import pair_logprobs

        reward_head = self._modules.head.reward
        if reward_head is None:
            return pair_logprobs(self.resident, pairs, self._score_batch_size), None
        if not pairs:
            return np.zeros((0, 2)), np.zeros(0)

        def measure(rows: list[TokenRow]) -> torch.Tensor:
            import torch

            logprobs, features = self.resident.logprobs_and_features(rows, reward_head.pooling)
            rewards = reward_head(features)
            return torch.cat([logprobs, rewards[:, :1] - rewards[:, 1:]], 1)

        rows = [self.resident.encode_pair(pair) for pair in pairs]
        measured = self.resident.map_batches(rows, self._score_batch_size, measure)
        return measured[:, :2], measured[:, 2]

    def _read_private_tensors(self) -> Adapter:
        """The private modules and the critic.

        Raises:
            TrainingError: a value is NaN or infinite; the client keeps its previous state.
        """
        tensors = self._modules.read() | pack_critic(self._critic)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise TrainingError(
                    f"the client's private tensor '{name}' has values that are NaN or infinite after its"
                    " last step: lower the learning rates"
                )
        return tensors


def module_tensors(tensors: Adapter) -> Adapter:
    """The tensors of private modules among those of a private store."""
    return {name: value for name, value in tensors.items() if not name.startswith(CRITIC)}


def pdpo_metrics(metrics: PersonalizedMetrics) -> Metrics:
    """A step by PDPO or DPO as metrics; `scale` is s afterwards."""
    scalars = {
        "dpo": metrics.dpo_loss,
        "excluded": metrics.excluded,
        "scale": metrics.scale,
    }
    return training_metrics(metrics).merged(Metrics(scalars=scalars))


def round_metrics(steps: dict[str, Metrics], memory: TrainingMemory) -> Metrics:
    """A client's round as metrics.

    Args:
        steps: by name ('personal', 'shared'), the steps of the round.
        memory: what the client remembers after it.

    Returns:
        the shared step's metrics, the totals of steps, tokens and seconds, and STEP_METRICS of each
        step under its name where there are two.
    """
    totals = {
        name: sum(step.scalars[name] for step in steps.values()) for name in ("steps", "tokens", "seconds")
    }
    scalars = steps["shared"].scalars | totals | {"scale": memory.scale, "decay": memory.rates.decay}
    if len(steps) > 1:
        for step_name, step in steps.items():
            for name in STEP_METRICS:
                if name in step.scalars:
                    scalars[f"{step_name}/{name}"] = step.scalars[name]
    return Metrics(scalars=scalars)
