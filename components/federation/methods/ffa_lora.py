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

from typing import ClassVar, Literal

from components.config import Recipe, RecipeError
from components.federation.aggregators.aggregator import Aggregator, AnyAggregator, Contributions
from components.federation.aggregators.exact import ExactMean
from components.federation.pair_training import AveragedPairTraining
from components.models.store import Adapter


class FrozenFactorMean(Aggregator):
    """Another aggregator's combination of the factors B, with the server's factors A.

    The mean of equal factors A differs from them by rounding, and a weighted sum may scale them.
    """

    kind: Literal["frozen-factor"] = "frozen-factor"
    factors_b: AnyAggregator
    """Combines the factors B."""

    @property
    def rescales(self) -> bool:
        return self.factors_b.rescales

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        combined, metrics = self.factors_b.combine(server, contributions)
        frozen = {name: tensor for name, tensor in server.items() if ".lora_A." in name}
        return {**combined, **frozen}, metrics


class FfaLora(AveragedPairTraining):
    """Options of FFA-LoRA; the aggregator combines the factors B."""

    frozen_factors: ClassVar[tuple[Literal["A", "B"], ...]] = ("A",)

    @property
    def combiner(self) -> Aggregator:
        """The aggregator; only the factors B differ among clients."""
        return FrozenFactorMean(factors_b=self.aggregator)

    def check(self, recipe: Recipe) -> None:
        """Refuse the aggregator `exact` too, whose result has other factors A."""
        super().check(recipe)
        if isinstance(self.aggregator, ExactMean):
            raise RecipeError(
                "federation.options.aggregator 'exact' changes the factors A, which federation.method"
                " 'ffa_lora' keeps fixed so that every mean is exact: use another aggregator, such as"
                " 'participation'."
            )
