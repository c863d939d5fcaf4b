"""Local objectives: what a client minimizes in its local training.

A method's options hold one of these sections, or one of several, told apart by `kind`. They are the
only place of the coefficients' defaults; components/learning implements the losses.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from components.config.registry import one_of
from components.config.section import Section


class Objective(Section):
    """A local objective; the base of the sections below."""

    loss: ClassVar[str] = ""
    """Its `Loss` (components/learning/loop.py), as module and class; empty where the trainer has its own."""


class SelectorObjective(Objective):
    """Cross-entropy of the binary choice between two completions (FedBiscuit eq. 7)."""

    kind: Literal["selector"] = "selector"


class SftObjective(Objective):
    """Negative log-likelihood of the chosen completions (FedBiscuit section 7.1, baseline FedAvg)."""

    loss: ClassVar[str] = "components.learning.preference:SftLoss"
    kind: Literal["sft"] = "sft"


class DpoObjective(Objective):
    """Direct preference optimization against the frozen backbone (FedBiscuit eq. 2)."""

    loss: ClassVar[str] = "components.learning.preference:PreferenceLoss"
    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """Inverse temperature of the implicit reward; Rafailov et al. 2023: 0.1, DRIFT appendix A:
    0.2."""


class SequenceAdvantage(Section):
    """Each completion of a pair has the advantage of its reward over the pair's mean, at every token.

    The reward is the score less the KL penalty of the completion, so the two advantages are plus and
    minus half the difference of the rewards. The leave-one-out baseline of RLOO (Ahmadian et al.
    2024) with two completions gives the same up to a factor of 2.
    """

    kind: Literal["sequence"] = "sequence"


class CriticAdvantage(Section):
    """GAE of the tokens' rewards with a value head, which a client keeps between rounds."""

    kind: Literal["critic"] = "critic"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of GAE; FedPDPO D.3.1: 0.95."""
    value: float = Field(0.5, ge=0)
    """Coefficient of the value loss; FedPDPO D.3.1: 0.5."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the value head, which starts at 0; D.3.1 names none."""


class PairPpoObjective(Objective):
    """PPO on the clients' own scored pairs, with sequence-level advantages (FedPDPO D.3.1)."""

    loss: ClassVar[str] = "components.learning.pair_ppo:PairPpoLoss"
    kind: Literal["ppo"] = "ppo"
    clip: float = Field(0.2, gt=0, lt=1)
    """Clip range of the ratio, and of the value if there is one; FedPDPO D.3.1: 0.2."""
    kl: float = Field(0.1, ge=0)
    """Coefficient of the KL penalty to the reference; FedPDPO D.3.1: 0.1."""
    entropy: float = Field(0.01, ge=0)
    """Coefficient of the entropy; FedPDPO D.3.1: 0.01."""
    epochs: int = Field(4, ge=1)
    """Passes over all pairs of the client in a round, in place of local_steps and local_epochs;
    FedPDPO D.3.1: 4."""
    minibatch: int = Field(4, ge=1)
    """Pairs per minibatch, in place of batch_size; FedPDPO D.3.1: 4."""
    target_kl: float = Field(0.01, gt=0)
    """Estimated KL from the received policy (nats per token). A step whose minibatch shows a larger
    one is not taken, and the client's training ends; FedPDPO D.3.1: 0.01."""


Advantage = Annotated[SequenceAdvantage | CriticAdvantage, one_of(SequenceAdvantage, CriticAdvantage)]
"""Type of an option that takes sequence-level advantages, or those of a critic."""


class OfflinePpoObjective(PairPpoObjective):
    """PPO on the clients' own scored pairs, with advantages of either kind (FedPDPO D.3.1)."""

    advantage: Advantage = Field(default_factory=SequenceAdvantage)
    """sequence: plus and minus half the difference of the pair's rewards at every token; critic:
    GAE with a value head that stays with the client. D.3.1 has 'advantages from reward differences'
    and a GAE parameter."""

    @property
    def critic(self) -> CriticAdvantage | None:
        """The critic's options; None without a critic."""
        return self.advantage if isinstance(self.advantage, CriticAdvantage) else None


class ExclusionConfig(Section):
    """Pairs that are excluded from a step (FedPDPO D.3), see components/learning/preference.py."""

    deviations: float = Field(2.0, gt=0)
    """k: deviations below the median margin of the minibatch; FedPDPO D.3: 2."""
    max_share: float = Field(0.5, ge=0, lt=1)
    """Maximum share of a minibatch that is excluded; FedPDPO D.3: 0.5."""


class PdpoObjective(Objective):
    """Personalized DPO: DPO with the margin of an explicit reward head added (FedPDPO eq. 8)."""

    loss: ClassVar[str] = "components.learning.preference:PreferenceLoss"
    kind: Literal["pdpo"] = "pdpo"
    beta: float = Field(0.1, gt=0)
    """Inverse temperature of the implicit reward; FedPDPO D.3: 0.1."""
    reward_weight: Annotated[list[float], Field(min_length=2, max_length=2)] = Field([0.5, 1.5])
    """w_r in the first and in the last round, linear in between; FedPDPO D.3: 0.5 and 1.5."""
    scale_momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of the moving average of s (eq. 7); FedPDPO D.3: 0.95."""
    max_scale: float = Field(10.0, ge=1)
    """Largest s of a minibatch (eq. 7), whose denominator may be close to 0. The cap is ours."""
    exclusion: ExclusionConfig | None = Field(default_factory=ExclusionConfig)
    """Pairs that are excluded from a step; null excludes none."""


class GaeEstimator(Section):
    """GAE with a value head for each objective, whitened over the rollout, as in FIRM A.1.

    The KL penalty is part of each token's reward. Schulman et al. 2016.
    """

    implementation: ClassVar[str] = "components.learning.estimators:Gae"
    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of GAE; rewards are not discounted."""
    critic_lr: float = Field(1e-3, gt=0)
    """Learning rate of the value heads; that of the policy is federation.optimizer.lr."""
    samples: ClassVar[int] = 1


class RlooEstimator(Section):
    """The reward of a completion, less the mean reward of the other completions of its prompt.

    The KL penalty is part of the reward. Advantages are not divided by a deviation, so that the
    gradients of the objectives keep the lengths that MGDA compares. Ahmadian et al. 2024, Back to
    Basics, section 3.
    """

    implementation: ClassVar[str] = "components.learning.estimators:Rloo"
    kind: Literal["rloo"] = "rloo"
    samples: int = Field(4, ge=2, le=10_000)
    """Completions of each prompt; they count in batch_size."""


class GrpoEstimator(Section):
    """The reward of a completion in standard deviations from the mean of its prompt's completions.

    The KL penalty is a term of the loss, by the estimator k3, and the loss is the mean over the
    completions of the mean over their tokens. Shao et al. 2024, DeepSeekMath, section 4.1.
    """

    implementation: ClassVar[str] = "components.learning.estimators:Grpo"
    kind: Literal["grpo"] = "grpo"
    samples: int = Field(4, ge=2, le=10_000)
    """Completions of each prompt; they count in batch_size."""


AdvantageEstimator = Annotated[
    GaeEstimator | RlooEstimator | GrpoEstimator, one_of(GaeEstimator, RlooEstimator, GrpoEstimator)
]
"""Type of an option that takes an estimator of advantages."""


class PpoConfig(Section):
    """PPO on sampled completions (FIRM A.1), see components/learning/multi_objective_ppo.py."""

    estimator: AdvantageEstimator = Field(default_factory=GaeEstimator)
    """gae: with value heads, as in FIRM; rloo: leave-one-out among several completions of a prompt;
    grpo: normalized among several completions of a prompt."""

    epochs: int = Field(3, ge=1)
    """Passes over the completions of a local step; FIRM A.1: 3."""
    minibatch: int = Field(8, ge=1)
    """Completions per optimizer step; FIRM A.1: 8, of batches of 16."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of sampling, and of the distributions whose log-probabilities, gradients and KL
    are computed. Rewards are measured at this temperature too."""
    clip: float = Field(0.2, gt=0, lt=1)
    """Clip range of the ratio and of the values; Schulman et al. 2017: 0.2."""
    kl: float = Field(0.1, ge=0)
    """Initial coefficient of the KL penalty to the reference (normalized reward per nat)."""
    target_kl: float | None = Field(6.0, gt=0)
    """KL to the reference that an adaptive controller aims at (nats per completion); null keeps the
    coefficient constant. Ziegler et al. 2019: 6."""
    horizon: int = Field(10_000, ge=1)
    """Completions over which the controller corrects an error of a fifth; Ziegler et al. 2019:
    10,000."""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """Estimator of the KL to the reference in rewards, the controller and the metrics. k1: the log
    ratio, which may be negative; k3: 1 / ratio - 1 + log ratio, which is not, and varies less
    (Schulman 2020). Only with the estimator grpo, whose rewards have no KL."""
    normalize: bool = True
    """Normalize the scores of each objective by the running mean and standard deviation of the
    client's scores. FIRM section 5 maps scores to a fixed range, which the available text of the
    paper lacks."""
    max_reward: float | None = Field(None, gt=0)
    """Limit of the absolute value of a completion's (normalized) score; null: none."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """Subtracted from the (normalized) score of a completion that did not end within
    policy.max_new_tokens."""
    keep_moments: bool = False
    """Keep the moments of the client's optimizers in its store from round to round; otherwise they
    begin at 0 in each round."""

    @model_validator(mode="after")
    def _check_kl_estimator(self) -> Self:
        if self.kl_estimator == "k3" and not isinstance(self.estimator, GrpoEstimator):
            raise ValueError(
                f"kl_estimator 'k3' is not for the estimator '{self.estimator.kind}', whose rewards contain"
                " the KL: its mean is the KL, but as a reward it has almost no gradient towards the"
                " reference. Use k1, or the estimator grpo, which has the KL in its loss"
            )
        return self

    @model_validator(mode="after")
    def _check_controller(self) -> Self:
        if not self.kl and self.target_kl is not None:
            raise ValueError(
                "kl is 0, from which the controller cannot move it: set target_kl to null, or kl above 0"
            )
        return self


class MultiObjective(Objective):
    """Several rewards, weighted by regularized MGDA or by fixed weights (FIRM algorithm 1).

    Built by a method from its own options.
    """

    kind: Literal["multi-objective"] = "multi-objective"
    objectives: dict[str, list[str]]
    """By objective, the rewards that measure it."""
    ppo: PpoConfig
    """PPO on sampled completions."""
    beta: float = Field(ge=0)
    """Regularization of MGDA (eq. 9)."""
    preference: dict[str, float] | None = None
    """p of eq. 3 by objective."""
    weights: dict[str, float] | None = None
    """Fixed weights by objective in place of those of MGDA; they sum to one."""


LocalObjective = (
    SelectorObjective | SftObjective | DpoObjective | PairPpoObjective | PdpoObjective | MultiObjective
)
"""All local objectives, told apart by `kind`."""


def implicit_reward_scale(objective: LocalObjective) -> float | None:
    """The factor of log pi / pi_ref in the implicit reward that an objective optimizes.

    This is beta of DPO and PDPO, and the KL coefficient of offline PPO, which is the inverse
    temperature of its KL-regularized optimum. None for objectives without an implicit reward.
    """
    if isinstance(objective, DpoObjective | PdpoObjective):
        return objective.beta
    return objective.kl if isinstance(objective, PairPpoObjective) else None
