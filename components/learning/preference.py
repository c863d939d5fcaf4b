"""Losses on a client's pairs: supervised, DPO, and personalized DPO (FedPDPO section 3.2.2).

The reference is the frozen backbone (FedBiscuit eq. 2). With a reward head h, which stays with the
client, the margin of DPO is that of FedPDPO eq. 6:

    m = log pi(y_w) / pi_ref(y_w) - log pi(y_l) / pi_ref(y_l) + w_r s (h(y_w) - h(y_l))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from components.config import DpoObjective, PdpoObjective
from components.config.local_objectives import ExclusionConfig
from components.learning.client_data import ClientData
from components.learning.loop import Loss, RowLosses, Rows, Trained
from components.learning.objectives import corrected, dpo_margin_loss, pdpo_loss, sft_loss
from components.models.logprobs import TokenRow
from components.seeding import restored

EPSILON = 1e-8
"""Epsilon of eq. 7, for minibatches whose explicit margins are all 0; the paper has no value."""
INITIAL_SCALE = 1.0
"""Initial value of the moving average of eq. 7.

The implicit margins of a client's first minibatch are 0. An average that started from that
minibatch would be 0 too, and the gradient of the reward head would vanish.
"""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def count_tokens(rows: Sequence[TokenRow]) -> int:
    """Tokens of rows; a prompt counts once for each of its completions."""
    return sum(len(prompt) * len(completions) + sum(map(len, completions)) for prompt, *completions in rows)


class SftLoss(Loss):
    """Negative log-likelihood of the chosen completions, per token (FedBiscuit section 7.1, FedAvg)."""

    def __init__(self, data: ClientData) -> None:
        self.resident = data.resident
        self.flip = data.flip  # with it the loss of the rejected completions is a part of the corrected one
        self.encoded = [
            data.resident.encode(*(pair.texts if self.flip else pair.texts[:2])) for pair in data.pairs
        ]

    def __call__(self, rows: Rows) -> RowLosses:
        encoded = [self.encoded[n] for n in rows]
        logprobs = self.resident.logprobs(encoded)
        lengths = torch.tensor([list(map(len, row[1:])) for row in encoded], device=logprobs.device)
        losses = sft_loss(logprobs, lengths)
        values = corrected(losses[:, 0], losses[:, 1], self.flip) if self.flip else losses[:, 0]
        return RowLosses(values, count_tokens(encoded))


class PreferenceLoss(Loss):
    """DPO (FedBiscuit eq. 2), or personalized DPO where the client has a reward head (FedPDPO eq. 8).

    Without a reward head the objective `pdpo` is DPO with its exclusion (ablation A2 of FedPDPO).
    """

    def __init__(self, data: ClientData) -> None:
        objective = data.objective
        if not isinstance(objective, DpoObjective | PdpoObjective):
            raise TypeError(f"the loss of DPO has no objective '{objective.kind}'")
        self.resident = data.resident
        self.encoded = data.encode_pairs()
        self.reference = data.reference_logprobs()
        self.beta, self.flip = objective.beta, data.flip
        self.exclusion: ExclusionConfig | None = None
        self.reward_head: Any = None
        self.scale = data.numbers.get("scale", INITIAL_SCALE)  # s of eq. 7
        if isinstance(objective, PdpoObjective):
            self.exclusion = objective.exclusion
            personal = data.resident.personal
            self.reward_head = None if personal is None else personal.head.reward
            self.momentum, self.max_scale = objective.scale_momentum, objective.max_scale
            # w_r: linear from the first to the last round (section 3.2.2; D.3: 0.5 to 1.5). D.3 also names
            # a "baseline 0.8" without saying of what; it is not used.
            first, last = objective.reward_weight
            self.reward_weight = first + (last - first) * data.progress
        self.dpo_loss = 0.0  # of plain DPO, the sum over all pairs
        self.seen = self.excluded = 0  # pairs
        self.logprobs = torch.zeros(2, dtype=torch.float64)  # sums over them, of chosen and rejected
        self._row_weights: list[torch.Tensor] = []  # of the micro-batches to come

    def __call__(self, rows: Rows) -> RowLosses:
        implicit, explicit, logprobs = self._margins(rows)
        tokens = count_tokens([self.encoded[n] for n in rows])
        if self._row_weights:
            return RowLosses(self._losses(implicit, explicit) * self._row_weights.pop(0), tokens)
        is_kept = self._observe(implicit, explicit, logprobs)
        losses = self._losses(implicit, explicit)
        if self.exclusion is None:
            return RowLosses(losses, tokens)
        return RowLosses(losses[is_kept], tokens)

    def begin_minibatch(self, micro_batches: Sequence[Rows]) -> None:
        """Compute s and the excluded pairs of several micro-batches, which depend on all margins.

        The margins have the dropout of the micro-batches that follow.
        """
        if len(micro_batches) == 1 or (self.reward_head is None and self.exclusion is None):
            return
        with torch.no_grad(), restored(self.resident.policy.device):
            margins = [self._margins(rows) for rows in micro_batches]
        implicit = torch.cat([part for part, *_ in margins])
        explicit = [part for _, part, _ in margins if part is not None]
        logprobs = torch.cat([part for *_, part in margins])
        is_kept = self._observe(implicit, torch.cat(explicit) if explicit else None, logprobs)
        weights = is_kept * (len(is_kept) / is_kept.sum())  # so that the mean is that of the kept pairs
        self._row_weights = list(torch.split(weights, [len(rows) for rows in micro_batches]))

    def metrics(self, trained: Trained) -> dict[str, float]:
        """Also those of DPO and PDPO.

        They are `dpo`, which the decay of learning rates follows (D.3.1), `excluded`, a share, `scale`, and
        the mean log-likelihoods of chosen and rejected completions (nats), which may both fall while their
        difference rises (arXiv 2502.07599).
        """
        chosen, rejected = (self.logprobs / self.seen).tolist()
        exchanged = self.flip * (chosen - rejected) / (1 - 2 * self.flip)
        chosen, rejected = chosen + exchanged, rejected - exchanged  # for exchanged verdicts
        metrics = trained.metrics() | {"dpo": self.dpo_loss / self.seen}
        metrics |= {"logps_chosen": chosen, "logps_rejected": rejected}
        if self.exclusion is not None:
            metrics["excluded"] = self.excluded / self.seen
        return metrics | self.numbers()

    def numbers(self) -> dict[str, float]:
        return {} if self.reward_head is None else {"scale": self.scale}

    def _margins(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Implicit margins [n] of pairs, the explicit ones if there is a reward head, and log-likelihoods.

        The latter, [n, 2], have no gradient.
        """
        encoded = [self.encoded[n] for n in rows]
        explicit = None
        if self.reward_head is None:
            logprobs = self.resident.logprobs(encoded)
        else:
            logprobs, features = self.resident.logprobs_and_features(encoded, self.reward_head.pooling)
            rewards = self.reward_head(features)
            explicit = rewards[:, 0] - rewards[:, 1]
        ref = torch.as_tensor(self.reference[rows], dtype=torch.float32, device=logprobs.device)
        implicit = (logprobs[:, 0] - ref[:, 0]) - (logprobs[:, 1] - ref[:, 1])
        return implicit, explicit, logprobs.detach()

    def _observe(
        self, implicit: torch.Tensor, explicit: torch.Tensor | None, logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Update s, the counts and the sums by pairs; which of these are kept, [n] bool."""
        self.logprobs += logprobs.double().sum(dim=0).cpu()
        self.dpo_loss += dpo_margin_loss(implicit, self.beta, self.flip).sum().item()
        margins = implicit
        if explicit is not None:
            self.scale = update_scale(self.scale, implicit, explicit, self.momentum, self.max_scale)
            margins = implicit + self.reward_weight * self.scale * explicit
        self.seen += len(margins)
        if self.exclusion is None:
            return torch.ones(len(margins), dtype=torch.bool, device=margins.device)
        is_excluded = find_excluded(margins, self.exclusion)
        self.excluded += int(is_excluded.sum())
        return ~is_excluded

    def _losses(self, implicit: torch.Tensor, explicit: torch.Tensor | None) -> torch.Tensor:
        if explicit is None:
            return dpo_margin_loss(implicit, self.beta, self.flip)
        return pdpo_loss(implicit, explicit, self.scale, self.reward_weight, self.beta, self.flip)


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
    determines s for the rest of the training. The margins, [N] each, get no gradient.
    """
    ratio = float(implicit.detach().abs().mean() / (explicit.detach().abs().mean() + EPSILON))
    return momentum * scale + (1 - momentum) * min(ratio, max_scale)


def find_excluded(margins: torch.Tensor, exclusion: ExclusionConfig) -> torch.Tensor:
    """Find the pairs of a minibatch that the model contradicts much more than the others, [N] bool.

    D.3 of FedPDPO specifies only "sample exclusion threshold (k = 2, maximum exclusion ratio 0.5)".
    The implementation guards against wrong labels: a pair is excluded if its margin (eq. 6) is below
    the minibatch's median by more than k median absolute deviations, scaled to a standard deviation.
    If more pairs than the maximum share qualify, those with the lowest margins are excluded; if the
    spread is 0, none is. The median is used because in a minibatch of 8 pairs a single outlier
    changes the mean and the standard deviation so much that it is rarely k deviations away.
    """
    values = margins.detach().double()
    median = values.quantile(0.5)
    spread = MAD_TO_DEVIATION * (values - median).abs().quantile(0.5)
    is_outlier = (values < median - exclusion.deviations * spread) & (spread > 0)
    lowest = values.argsort(stable=True)[: int(exclusion.max_share * len(values))]
    is_lowest = torch.zeros_like(is_outlier)
    is_lowest[lowest] = True
    return is_outlier & is_lowest
