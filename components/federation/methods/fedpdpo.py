"""FedPDPO: a shared LoRA, and each client's own bottleneck and heads (FedPDPO sections 3 and D).

    each round, each sampled client (algorithm 1):
        (1) personal stage: LoRA is frozen; bottleneck, language-model head, reward head are trained
        (2) shared stage:   these three are frozen; LoRA is trained
        sends its LoRA, and nothing else
    server: the mean of the LoRA, weighted by the clients' pairs (line 21)

This file declares the options only. The server half is that of AveragingMethod
(components/federation/method.py); at the client,
components/federation/clients/policy_trainer.py runs the two stages. The loss of both stages is eq. 8
(components/learning/preference.py), and components/models/personalized.py has the modules. The ablations
of table 3 are options: `bottleneck: null` (A1, without bottleneck) and `reward_head: null` (A2, without
reward head).
"""

from __future__ import annotations

from pydantic import Field

from components.config import PdpoObjective, PersonalModules
from components.config.modules import BottleneckConfig, RewardHeadConfig, StageLength
from components.federation.local import Local
from components.federation.personalization import PersonalizedMethod


class FedPdpo(PersonalizedMethod):
    """Options of FedPDPO."""

    bottleneck: BottleneckConfig | None = Field(default_factory=BottleneckConfig)
    """The bottleneck adapter; null leaves it out (ablation A1)."""
    reward_head: RewardHeadConfig | None = Field(default_factory=RewardHeadConfig)
    """The explicit reward head; null leaves it out (ablation A2). The loss is then that of DPO,
    with the exclusion of `objective.exclusion`."""
    objective: PdpoObjective = Field(default_factory=PdpoObjective)
    """Loss of the personal and of the shared stage."""
    personal: StageLength = Field(default_factory=StageLength)
    """The personal stage."""

    def local(self) -> Local:
        modules = PersonalModules(bottleneck=self.bottleneck, reward=self.reward_head)
        return Local(
            self.objective,
            lr=self.lr,
            decays_rates=True,
            own="modules",
            personal=modules,
            personal_lr=self.personal.lr,
            stage=self.personal,
        )
