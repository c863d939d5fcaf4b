"""Training of a resident policy on pairs without a federation, as clients/policy.py does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from components.config import LocalObjective, PersonalModules, PolicyConfig
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.data.records import Pair
from components.federation.clients.policy_trainer import TrainedPart, trainable
from components.learning.client_data import ClientData
from components.learning.loop import Loss, Rows, Trained, Training, train
from components.learning.reference_cache import ReferenceCache
from components.learning.wrapped_losses import LocalTraining
from components.models.resident import ResidentPolicy

if TYPE_CHECKING:
    from components.models.store import Adapter

Array = npt.NDArray[np.float64]


def open_personal_policy(policy: PolicyConfig, dropout: float = 0.0) -> ResidentPolicy:
    """A policy with completions of up to 20 tokens and private modules, all with this dropout."""
    modules = PersonalModules(
        bottleneck=BottleneckConfig(width=4, dropout=dropout),
        reward=RewardHeadConfig(width=3, dropout=dropout),
    )
    lora = policy.lora.model_copy(update={"dropout": dropout})
    return ResidentPolicy(policy.model_copy(update={"max_new_tokens": 20, "lora": lora}), "cpu", modules)


class FixedReference(ReferenceCache):
    """A reference with given summed log-probabilities of chosen and rejected, [N, 2]."""

    def __init__(self, logprobs: Array) -> None:
        super().__init__()
        self.logprobs = logprobs

    def completion_logprobs(self, *_: Any) -> Array:
        """The given values, whatever the rows are."""
        return self.logprobs


class TrainedPairs(NamedTuple):
    """What a training ends with."""

    adapter: Adapter
    metrics: dict[str, float]
    figures: Trained
    loss: Any


def build_loss(
    resident: ResidentPolicy,
    pairs: Sequence[Pair],
    objective: LocalObjective,
    used: Rows | None = None,
    reference: Array | None = None,
    scores: Array | None = None,
    **kept: Any,
) -> Any:
    """The loss of an objective, relative to what the model holds.

    Args:
        resident: the model.
        pairs: N pairs, of which it uses the texts.
        objective: the section of the recipe.
        used: the pairs that minibatches contain; None for all.
        reference: [N, 2], log-probabilities in place of the backbone's.
        scores: [N, 2], those of a reward.
        kept: further fields of ClientData.
    """
    used = np.arange(len(pairs)) if used is None else used
    reference_cache = ReferenceCache() if reference is None else FixedReference(reference)
    read_scores = None if scores is None else lambda: scores
    data = ClientData(resident, objective, pairs, used, reference_cache, 4, read_scores, **kept)
    return resolve_name(objective.loss)(data)


def train_pairs(
    resident: ResidentPolicy,
    pairs: Sequence[Pair],
    adapter: Adapter | None,
    objective: LocalObjective,
    training: Training,
    group: TrainedPart = "shared",
    personal_lr: float | None = None,
    minibatches: Sequence[Rows] | None = None,
    wrap: Callable[[Loss, LocalTraining], Loss] | None = None,
    **data: Any,
) -> TrainedPairs:
    """Train a group of modules in place; further arguments as of build_loss.

    Args:
        resident: the model; it holds the private modules.
        pairs: as of build_loss.
        adapter: initial values; None for what the model holds.
        objective: the section of the recipe.
        training: settings.
        group: what is trained.
        personal_lr: rate of the private modules if all are trained; None for the optimizer's.
        minibatches: None draws those of the loss.
        wrap: puts a loss around that of the objective, as `Local.wrap` does.
    """
    if adapter is not None:
        resident.slot.load(adapter)
    if minibatches is None:
        loss_type: type[Loss] = resolve_name(objective.loss)
        minibatches = loss_type.draw_minibatches(objective, len(pairs), training, list, training.seed)
    loss = build_loss(resident, pairs, objective, np.unique(np.concatenate(minibatches)), **data)
    if wrap is not None:
        loss = wrap(loss, LocalTraining(resident.slot.named, training.optimizer.lr))
    lr = training.optimizer.lr if personal_lr is None else personal_lr
    with trainable(resident, group, lr) as (parameters, groups):
        figures = train(resident.model, parameters, minibatches, loss, training, groups)
    return TrainedPairs(resident.slot.read(), loss.metrics(figures), figures, loss)
