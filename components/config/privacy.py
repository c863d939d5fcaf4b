"""The section federation.privacy: what differential privacy protects, and by which mechanism."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from components.config.section import Section


class LabelPrivacy(Section):
    """Randomised response on verdicts: which of two completions a client prefers (Warner 1965).

    Each client exchanges the completions of a pair with the probability 1 / (1 + exp(epsilon)), once for all
    jobs of a run, before anything else reads the pair. All that leaves the client is computed from the
    result, so every method can be used. Texts are not protected.
    """

    unit: Literal["label"] = "label"
    """What is protected: label, which of the two completions of a pair a client prefers."""
    epsilon: float = Field(ge=1e-3, le=20, allow_inf_nan=False)
    """Epsilon of one verdict; those of a client with n pairs cost n times as much together."""
    debias: bool = True
    """Correct the losses for the exchanged verdicts, so that their expectation is the loss of the true ones
    (Natarajan et al. 2013; rDPO, Chowdhury et al. 2024). false: the loss of the verdicts as they are."""
    exact_measures: bool = False
    """Measure accuracy by the true verdicts, outside the guarantee, for experiments on public data. false: by
    the exchanged ones, with accuracies corrected for them."""
    simulated: bool = False
    """Derive the clients' secrets from the recipe's seed, so that a run can be repeated. Whoever knows the
    seed knows the verdicts, so that such a run has no epsilon."""

    @property
    def flip(self) -> float:
        """Probability with which a verdict is exchanged."""
        return 1 / (1 + math.exp(self.epsilon))


class ClientPrivacy(Section):
    """Federated averaging with clipped contributions and noise at the server (McMahan et al. 2018).

    All pairs of a client are protected at once: it cannot be told from the results of the rounds whether one
    client has contributed anything. Who is in the federation is public. See
    components/federation/private_sums.py.
    """

    unit: Literal["client"] = "client"
    """What is protected: client, all pairs of a client."""
    clip: float = Field(gt=0, allow_inf_nan=False)
    """Largest norm of a client's contribution, the movement of its adapter in a round (C)."""
    noise_multiplier: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise over the sensitivity of all rounds to one client (sigma); null: as
    target_epsilon needs."""
    target_epsilon: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest epsilon. The rounds end before a step that would exceed it. null: none."""
    delta: float = Field(gt=0, lt=1)
    """Probability with which the guarantee may fail; below one over the number of clients."""
    noise: Literal["banded", "independent"] = "banded"
    """banded: noise that is correlated over the rounds, so that less of it is in their sum; independent:
    each round has noise of its own."""
    simulated: bool = False
    """Derive the server's secret from the recipe's seed, so that a run can be repeated. Whoever knows the
    seed knows the noise, so that such a run has no epsilon."""

    @model_validator(mode="after")
    def _check_noise(self) -> Self:
        if self.noise_multiplier is None and self.target_epsilon is None:
            raise ValueError("one of noise_multiplier and target_epsilon is needed, which say how much noise")
        return self


AnyPrivacy = LabelPrivacy | ClientPrivacy
"""The sections, told apart by `unit`."""
UNITS = {"label": LabelPrivacy, "client": ClientPrivacy}
"""By their units."""
