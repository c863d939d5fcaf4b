"""The mean of the products B A, truncated to the adapters' rank.

Averaging LoRA's factors apart gives the product of two means, which is not the mean of the products
(Sun et al. 2024, FFA-LoRA, section 3). The mean of the products has rank K r for K clients of rank
r. It is

    sum_m w_m B_m A_m = [w_1 B_1 ... w_K B_K] [A_1; ...; A_K] = P Q

and its best approximation of rank r (Eckart and Young 1936) follows from the QR decompositions of P
and Q^T and an SVD of a K r x K r matrix, so that the full matrix is never formed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from components.federation.aggregators.aggregator import Aggregator, Contributions
from components.models.store import Adapter

if TYPE_CHECKING:
    import torch


class ExactMean(Aggregator):
    """The mean of the clients' products B A by their training pairs, at the adapters' rank.

    The new factors are B = U S and A = V^T, so that A has orthonormal rows, also where a singular
    value is 0 and a column of B vanishes; training can still use such a direction.
    """

    kind: Literal["exact"] = "exact"
    """Name of the aggregator."""

    def combine(self, server: Adapter, contributions: Contributions) -> tuple[Adapter, dict[str, float]]:
        """The truncated mean, and `truncation`, the lost share of the mean's squared norm."""
        total = sum(contributions.weights)
        weights = [weight / total for weight in contributions.weights]
        adapters = list(contributions.adapters())
        combined: Adapter = {}
        squared_norm = 0.0
        lost = 0.0
        for name_a in sorted(name for name in server if ".lora_A." in name):
            name_b = name_a.replace(".lora_A.", ".lora_B.")
            factors = [(adapter[name_b].double(), adapter[name_a].double()) for adapter in adapters]
            combined[name_b], combined[name_a], singular_values = truncated_mean(factors, weights)
            rank = len(server[name_a])
            squared_norm += float(singular_values.square().sum())
            lost += float(singular_values[rank:].square().sum())
        truncation = lost / squared_norm if squared_norm else 0.0
        return combined, {"weight_sum": 1.0, "truncation": truncation}


def truncated_mean(
    factors: list[tuple[torch.Tensor, torch.Tensor]], weights: list[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best approximation of rank r of sum_m w_m B_m A_m, and the singular values of that sum.

    The factors (B [out, r], A [r, in]) of each client are fp64; the results B and A fp32. There are
    min(out, in, K r) singular values.
    """
    import torch

    rank = len(factors[0][1])
    left = torch.cat([weight * b for (b, _), weight in zip(factors, weights, strict=True)], dim=1)
    right = torch.cat([a for _, a in factors], dim=0)
    left_basis, left_triangle = torch.linalg.qr(left)
    right_basis, right_triangle = torch.linalg.qr(right.T)
    u, singular_values, v_transposed = torch.linalg.svd(left_triangle @ right_triangle.T, full_matrices=False)
    b = left_basis @ (u[:, :rank] * singular_values[:rank])
    a = v_transposed[:rank] @ right_basis.T
    surplus = rank - b.shape[1]  # where the layer itself is narrower than the rank
    b = torch.nn.functional.pad(b, (0, surplus))
    a = torch.nn.functional.pad(a, (0, 0, 0, surplus))
    return b.float(), a.float(), singular_values
