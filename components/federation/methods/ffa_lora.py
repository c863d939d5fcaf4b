"""FFA-LoRA: LoRA whose factor A is frozen (Sun et al. 2024, Improving LoRA in Privacy-Preserving FL).

All clients start from the same random A, which is not trained; they train B alone, and the server
averages it (their section 4, eq. 5):

    B_m     = OPTIM(m, B_r; A_0, K)
    B_r+1   = sum of p_m B_m / sum of p_m

Since A is the same everywhere, the mean of the products B_m A_0 is the product of the mean of the
B_m with A_0: averaging is exact, which it is not for methods that train both factors. The frozen A
is a part of the files that are sent and stored, so that each of them is a complete PEFT adapter;
the traffic is that of FedDPO.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from components.config import Recipe, RecipeError
from components.federation.aggregators import ExactMean
from components.federation.local import Local
from components.federation.pair_training import AveragedPairTraining


class FfaLora(AveragedPairTraining):
    """Options of FFA-LoRA; the aggregator combines the factors B."""

    sums_protect_clients: ClassVar[bool] = True

    def local(self) -> Local:
        return replace(super().local(), frozen=("A",))

    def check(self, recipe: Recipe) -> None:
        """Refuse the aggregator `exact` too, whose result has other factors A."""
        super().check(recipe)
        if isinstance(self.aggregator, ExactMean):
            raise RecipeError(
                "federation.options.aggregator 'exact' changes the factors A, which federation.method"
                " 'ffa_lora' keeps fixed so that every mean is exact: use another aggregator, such as"
                " 'participation'."
            )
