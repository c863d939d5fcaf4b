"""What the loss of a client's training is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from components.config import LocalObjective
from components.data.records import Pair
from components.learning.reference_cache import ReferenceCache
from components.models.logprobs import TokenRow
from components.models.resident import ResidentPolicy
from components.models.store import Adapter


@dataclass(frozen=True)
class ClientData:
    """The model, the pairs of one client, and what the client kept after its last round."""

    resident: ResidentPolicy  # holds the received adapter, and the client's private modules
    objective: LocalObjective  # the section with the coefficients of the loss
    pairs: Sequence[Pair]
    used: npt.NDArray[np.int64]  # sorted indices of the pairs that the minibatches contain
    reference_cache: ReferenceCache
    batch_size: int  # pairs per batch in which the reference is computed
    read_scores: Callable[[], npt.NDArray[np.float64]] | None = None  # [N, 2], by the recipe's reward
    progress: float = 0.0  # share of the rounds that are over: 0 in the first one, 1 in the last one
    numbers: Mapping[str, float] = field(default_factory=dict)  # `Loss.numbers` of the last training
    tensors: Adapter = field(default_factory=dict)  # `Loss.tensors` of the last training
    flip: float = 0.0  # probability of exchanged verdicts, for which losses are corrected

    def encode_pairs(self) -> list[TokenRow]:
        """Token ids of all pairs."""
        return [self.resident.encode(*pair.texts) for pair in self.pairs]

    def reference_logprobs(self) -> npt.NDArray[np.float64]:
        """Summed log-probabilities of chosen and rejected under the frozen backbone, [N, 2].

        Those of pairs that are not used are NaN.
        """
        used = set(self.used.tolist())
        return self.reference_cache.completion_logprobs(
            self.resident, self.encode_pairs(), self.batch_size, used
        )

    def reference_tokens(self) -> list[list[torch.Tensor]]:
        """For each used pair, the log-probabilities of the tokens of chosen and of rejected."""
        used = set(self.used.tolist())
        rows = self.encode_pairs()
        tokens = self.reference_cache.token_logprobs(self.resident, rows, self.batch_size, used)
        return [tokens[n] for n in self.used]

    def scores(self) -> npt.NDArray[np.float64]:
        """Scores of chosen and rejected of the used pairs, [n, 2]."""
        if self.read_scores is None:
            raise TypeError(f"the objective '{self.objective.kind}' needs a reward")
        return self.read_scores()[self.used]
