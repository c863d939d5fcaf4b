"""Personalized DPO on one client's pairs (FedPDPO section 3.2.2).

A client's round consists of a personal step and a shared step with the same loss (algorithm 1):
first the personal modules are trained and the shared adapter is frozen, then the other way round.
In the personal step no gradient passes through the backbone. Without a reward head the loss is that
of plain DPO.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from components.config import ExclusionConfig
from components.learning.dpo import count_pair_tokens
from components.learning.local import (
    LocalTraining,
    LoopOptions,
    ParameterGroup,
    TrainingMetrics,
    add_proximal_term,
    train,
)
from components.learning.objectives import dpo_margin_loss, pdpo_loss
from components.seeding import restored

if TYPE_CHECKING:
    import torch

    from components.learning.offline_ppo import OfflinePPOMetrics
    from components.models.logprobs import TokenRow
    from components.models.personalized import PersonalSlot
    from components.models.resident import Pair, ResidentPolicy

ModuleGroup = Literal["personal", "shared", "all"]
"""What is trained: the personal modules, the shared adapter, or both."""
EPSILON = 1e-8
"""Epsilon of eq. 7, for minibatches whose explicit margins are all 0; the paper has no value."""
INITIAL_SCALE = 1.0
"""Initial value of the moving average of eq. 7.

The implicit margins of a client's first minibatch are 0. An average that started from that
minibatch would be 0 too, and the gradient of the reward head would vanish.
"""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class PDPOConfig:
    """The loss of one training.

    Attributes:
        beta: inverse temperature (eq. 8).
        reward_weight: w_r of the round (eq. 6).
        momentum: momentum of the moving average of s (eq. 7, D.3: 0.95).
        max_scale: largest s of a minibatch.
        exclusion: which pairs are excluded; None excludes none.
        initial_scale: s before the first minibatch.
    """

    beta: float
    reward_weight: float = 0.0
    momentum: float = 0.0
    max_scale: float = math.inf
    exclusion: ExclusionConfig | None = None
    initial_scale: float = INITIAL_SCALE


@dataclass(frozen=True)
class PersonalizedMetrics(TrainingMetrics):
    """Metrics of a personal or a shared step of a client's round.

    Attributes:
        scale: s after the last minibatch.
        dpo_loss: mean loss of plain DPO over the minibatches, which the decay of the learning rate
            depends on (D.3.1).
        excluded: share of the pairs that were excluded.
        ppo: metrics of a step by PPO; None for one by PDPO or DPO.
    """

    scale: float
    dpo_loss: float
    excluded: float
    ppo: OfflinePPOMetrics | None = None


def interpolate_reward_weight(start: float, end: float, round: int, rounds: int) -> float:
    """w_r of a round: linear from start to end (section 3.2.2; D.3: 0.5 to 1.5).

    D.3 also names a "baseline 0.8" without saying of what; it is not used.
    """
    return start + (end - start) * (round / (rounds - 1) if rounds > 1 else 0.0)


def update_scale(
    scale: float,
    implicit: torch.Tensor,
    explicit: torch.Tensor,
    momentum: float,
    max_scale: float = math.inf,
) -> float:
    """Update the moving average of the scale s of eq. 7 by a minibatch.

    The new value is momentum s + (1 - momentum) min(E|implicit| / (E|explicit| + epsilon), max_scale).
    The paper has no cap. Without it, a minibatch whose explicit margins are all close to 0
    determines s for the rest of the training.

    Args:
        scale: s before the minibatch.
        implicit: [N], implicit margins; they get no gradient.
        explicit: [N], explicit margins; they get no gradient.
        momentum: weight of the previous value; with 0 the result is the minibatch's own ratio.
        max_scale: cap of the minibatch's ratio.
    """
    ratio = float(implicit.detach().abs().mean() / (explicit.detach().abs().mean() + EPSILON))
    return momentum * scale + (1 - momentum) * min(ratio, max_scale)


def find_excluded(margins: torch.Tensor, exclusion: ExclusionConfig) -> torch.Tensor:
    """Find the pairs of a minibatch that the model contradicts much more than the others.

    D.3 of FedPDPO specifies only "sample exclusion threshold (k = 2, maximum exclusion ratio 0.5)".
    The implementation guards against wrong labels: a pair is excluded if its margin is below the
    minibatch's median by more than k median absolute deviations, scaled to a standard deviation. If
    more pairs than the maximum share qualify, those with the lowest margins are excluded; if the
    spread is 0, none is. The median is used because in a minibatch of 8 pairs a single outlier
    changes the mean and the standard deviation so much that it is rarely k deviations away.

    Args:
        margins: [N], combined margins (eq. 6).
        exclusion: k and the maximum share.

    Returns:
        [N] bool.
    """
    import torch

    values = margins.detach().double()
    median = values.quantile(0.5)
    spread = MAD_TO_DEVIATION * (values - median).abs().quantile(0.5)
    is_outlier = (values < median - exclusion.deviations * spread) & (spread > 0)
    lowest = values.argsort(stable=True)[: int(exclusion.max_share * len(values))]
    is_lowest = torch.zeros_like(is_outlier)
    is_lowest[lowest] = True
    return is_outlier & is_lowest


@contextmanager
def trainable_modules(resident: ResidentPolicy, group: ModuleGroup) -> Iterator[list[torch.nn.Parameter]]:
    """Freeze the modules that are not trained, and yield the parameters of those that are.

    Args:
        resident: a model with personal modules.
        group: what is trained.

    Raises:
        TypeError: the model has no personal modules.
    """
    slot = personal_slot(resident)
    personal = slot.parameters
    shared = slot.shared.parameters
    trained = [*(personal if group != "shared" else []), *(shared if group != "personal" else [])]
    frozen = [*(personal if group == "shared" else []), *(shared if group == "personal" else [])]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield trained
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def split_rates(
    resident: ResidentPolicy,
    parameters: Sequence[torch.nn.Parameter],
    group: ModuleGroup,
    personal_lr: float | None,
) -> tuple[list[torch.nn.Parameter], tuple[ParameterGroup, ...]]:
    """Divide trained parameters by their learning rates.

    Args:
        resident: a model with personal modules.
        parameters: those that are trained.
        group: what they are.
        personal_lr: rate of the personal modules where both are trained; None for the same rate.

    Returns:
        the parameters at the optimizer's rate, and those at a rate of their own.
    """
    if group != "all" or personal_lr is None:
        return list(parameters), ()
    slot = personal_slot(resident)
    return list(slot.shared.parameters), (ParameterGroup(slot.parameters, personal_lr),)


def personal_slot(resident: ResidentPolicy) -> PersonalSlot:
    """The slot of the personal modules of a resident model.

    Raises:
        TypeError: the model has none.
    """
    if resident.personal is None:
        raise TypeError("the model has no personal modules")
    return resident.personal


class PDPOLoss:
    """The PDPO loss of pairs by their indices (eq. 8); plain DPO if there is no reward head.

    Attributes:
        scale: s after the minibatches so far.
        dpo_losses: mean loss of plain DPO of each minibatch so far.
        excluded: number of pairs that were excluded so far.
        seen: number of pairs so far.
    """

    def __init__(
        self, resident: ResidentPolicy, pairs: Sequence[Pair], reference: np.ndarray, config: PDPOConfig
    ) -> None:
        """Encode the pairs; arguments as in `train_pdpo`."""
        self.scale = config.initial_scale
        self.dpo_losses: list[float] = []
        self.excluded = 0
        self.seen = 0
        self._resident = resident
        self._encoded = [resident.encode_pair(pair) for pair in pairs]
        self._reference = reference
        self._config = config
        self._reward_head = personal_slot(resident).head.reward
        self._row_weights: list[torch.Tensor] = []
        self._minibatch_rows = 0

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, int]:
        """The losses of the pairs that are not excluded, and the number of tokens.

        For a micro-batch of several, see `begin_minibatch`, the losses of all n pairs, weighted so
        that the mean over the minibatch's pairs is that over those that are not excluded.
        """
        config = self._config
        rows = [self._encoded[i] for i in indices]
        implicit, explicit = self._margins(indices)
        tokens = count_pair_tokens(rows)
        if self._row_weights:
            return self._losses(implicit, explicit) * self._row_weights.pop(0), tokens
        is_excluded = self._observe(implicit, explicit)
        losses = self._losses(implicit, explicit)
        return losses if config.exclusion is None else losses[~is_excluded], tokens

    def begin_minibatch(self, micro_batches: Sequence[np.ndarray]) -> None:
        """Prepare the losses of a minibatch that is computed in several micro-batches.

        The scale s and the excluded pairs depend on all its margins, which are computed first, without
        gradients and with the dropout of the micro-batches that follow.

        Args:
            micro_batches: indices of the pairs, in the order of the calls that follow.
        """
        import torch

        if len(micro_batches) == 1:
            return
        if self._reward_head is None and self._config.exclusion is None:
            self._minibatch_rows = sum(map(len, micro_batches))
            self.dpo_losses.append(0.0)
            return
        with torch.no_grad(), restored(self._resident.policy.device):
            margins = [self._margins(indices) for indices in micro_batches]
        implicit = torch.cat([part for part, _ in margins])
        explicit = [part for _, part in margins if part is not None]
        is_kept = ~self._observe(implicit, torch.cat(explicit) if explicit else None)
        weights = is_kept * (len(is_kept) / is_kept.sum())
        self._row_weights = list(torch.split(weights, [len(indices) for indices in micro_batches]))

    def _margins(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Implicit margins [n] of pairs, and the explicit ones if there is a reward head."""
        import torch

        logprobs, explicit = self._evaluate([self._encoded[i] for i in indices])
        ref = torch.as_tensor(self._reference[indices], dtype=torch.float32, device=logprobs.device)
        return (logprobs[:, 0] - ref[:, 0]) - (logprobs[:, 1] - ref[:, 1]), explicit

    def _observe(self, implicit: torch.Tensor, explicit: torch.Tensor | None) -> torch.Tensor:
        """Update the attributes by the margins of a minibatch, and find its excluded pairs, [N] bool."""
        import torch

        config = self._config
        mean = dpo_margin_loss(implicit, config.beta).mean().item()
        if self._minibatch_rows:  # of micro-batches that do not depend on each other
            self.dpo_losses[-1] += mean * len(implicit) / self._minibatch_rows
        else:
            self.dpo_losses.append(mean)
        margins = implicit
        if explicit is not None:
            self.scale = update_scale(self.scale, implicit, explicit, config.momentum, config.max_scale)
            margins = implicit + config.reward_weight * self.scale * explicit
        self.seen += len(margins)
        if config.exclusion is None:
            return torch.zeros(len(margins), dtype=torch.bool, device=margins.device)
        is_excluded = find_excluded(margins, config.exclusion)
        self.excluded += int(is_excluded.sum())
        return is_excluded

    def _losses(self, implicit: torch.Tensor, explicit: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        if explicit is None:
            return dpo_margin_loss(implicit, config.beta)
        return pdpo_loss(implicit, explicit, self.scale, config.reward_weight, config.beta)

    def _evaluate(self, rows: list[TokenRow]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N, 2], and the explicit margins [N] if there is a reward head."""
        if self._reward_head is None:
            return self._resident.logprobs(rows), None
        logprobs, features = self._resident.logprobs_and_features(rows, self._reward_head.pooling)
        rewards = self._reward_head(features)
        return logprobs, rewards[:, 0] - rewards[:, 1]


def train_pdpo(
    resident: ResidentPolicy,
    pairs: Sequence[Pair],
    reference: np.ndarray,
    group: ModuleGroup,
    config: PDPOConfig,
    training: LocalTraining,
) -> PersonalizedMetrics:
    """Train the personal modules, the shared adapter, or both; the other parameters are frozen.

    Args:
        resident: a model with personal modules. Its slots hold the initial values, and the trained
            ones afterwards.
        pairs: N records with prompt, chosen and rejected.
        reference: [N, 2], summed log-probabilities of chosen and rejected under the frozen backbone
            with its own head. Rows of pairs that the training does not draw are not used.
        group: what is trained.
        config: the loss.
        training: a row of a minibatch is a pair.

    Raises:
        TypeError: the model has no personal modules.
        TrainingError: there are no pairs, or a loss is not finite.
    """
    loss = PDPOLoss(resident, pairs, reference, config)
    with trainable_modules(resident, group) as parameters:
        own_rate, groups = split_rates(resident, parameters, group, training.personal_lr)
        metrics = train(
            resident.model,
            own_rate,
            training.draw_minibatches(len(pairs)),
            add_proximal_term(loss, parameters, training.proximal_weight),
            training.optimizer,
            LoopOptions(
                seed=training.seed,
                micro_batch_size=training.micro_batch_size,
                progress=training.progress,
                before_minibatch=loss.begin_minibatch,
                groups=groups,
            ),
        )
    return PersonalizedMetrics(
        losses=metrics.losses,
        gradient_norms=metrics.gradient_norms,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        scale=loss.scale,
        dpo_loss=sum(loss.dpo_losses) / len(loss.dpo_losses),
        excluded=loss.excluded / loss.seen,
    )
