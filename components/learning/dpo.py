"""DPO training of a policy on one client's pairs, and the implicit reward of a policy.

The reference is the frozen backbone (FedBiscuit eq. 2, baseline FedDPO). Its log-probabilities are
computed once per pair, see components/learning/references.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from components.learning.local import (
    LocalTraining,
    LossFunction,
    RecordedLoss,
    TrainingMetrics,
    train_adapter,
)
from components.learning.objectives import dpo_loss
from components.models.logprobs import TokenRow
from components.models.resident import Pair, ResidentPolicy

if TYPE_CHECKING:
    import torch

    from components.models.adapters import Adapter


@dataclass(frozen=True)
class DPOMetrics(TrainingMetrics):
    """Metrics of a training by DPO.

    Attributes:
        dpo_loss: mean over the minibatches, without a proximal term.
    """

    dpo_loss: float


def train_dpo(
    resident: ResidentPolicy,
    pairs: Sequence[Pair],
    adapter: Adapter,
    reference: np.ndarray,
    beta: float,
    training: LocalTraining,
) -> tuple[Adapter, DPOMetrics]:
    """Train an adapter by DPO on one client's pairs.

    Args:
        resident: the model; the adapter in its slot is replaced.
        pairs: N records with prompt, chosen and rejected.
        adapter: initial values; it is not changed.
        reference: [N, 2], summed log-probabilities of chosen and rejected under the reference, see
            `pair_logprobs`. Rows of pairs that the training does not draw are not used.
        beta: inverse temperature of the implicit reward.
        training: a row of a minibatch is a pair.

    Returns:
        the trained adapter (fp32, CPU) and the metrics.

    Raises:
        AdapterError: the adapter does not fit.
        TrainingError: there are no pairs, or a loss is not finite.
    """
    resident.slot.load(adapter)
    loss = RecordedLoss(build_dpo_loss(resident, pairs, reference, beta))
    trained, metrics = train_adapter(resident.model, resident.slot, len(pairs), loss, training)
    return trained, DPOMetrics(
        losses=metrics.losses,
        gradient_norms=metrics.gradient_norms,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        dpo_loss=loss.mean,
    )


def build_dpo_loss(
    resident: ResidentPolicy, pairs: Sequence[Pair], reference: np.ndarray, beta: float
) -> LossFunction:
    """The DPO loss [n] of n pairs by their indices; arguments as in `train_dpo`."""
    import torch

    encoded = [resident.encode_pair(pair) for pair in pairs]

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[i] for i in indices]
        logprobs = resident.logprobs(rows)
        ref = torch.as_tensor(reference[indices], dtype=torch.float32, device=logprobs.device)
        losses = dpo_loss(logprobs[:, 0], logprobs[:, 1], ref[:, 0], ref[:, 1], beta)
        return losses, count_pair_tokens(rows)

    return loss


def count_pair_tokens(rows: Sequence[TokenRow]) -> int:
    """Number of tokens of pairs; a prompt counts once for each of its two completions."""
    return sum(2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in rows)


def pair_logprobs(
    resident: ResidentPolicy, pairs: Sequence[Pair], batch_size: int, reference: bool = False
) -> np.ndarray:
    """Summed log-probabilities of the completions of pairs.

    Args:
        resident: the model.
        pairs: N records with prompt, chosen and rejected.
        batch_size: pairs per batch.
        reference: use the frozen backbone rather than the adapter in the slot.

    Returns:
        [N, 2] float64, chosen and rejected (nats).
    """
    if not pairs:
        return np.zeros((0, 2))
    return resident.score([resident.encode_pair(pair) for pair in pairs], batch_size, reference)


def implicit_margins(policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Margins of the implicit reward, over beta (Rafailov et al. 2023, section 4).

    Args:
        policy: [N, 2], summed log-probabilities of chosen and rejected under the policy.
        reference: [N, 2], those under the reference.

    Returns:
        [N], log pi(chosen) / pi_ref(chosen) - log pi(rejected) / pi_ref(rejected). The implicit
        reward is correct where it is above 0.
    """
    ratios = policy - reference
    margins: np.ndarray = ratios[:, 0] - ratios[:, 1]
    return margins
