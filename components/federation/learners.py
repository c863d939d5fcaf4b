"""What a client trains and scores on a model that stays resident on one device: the selector, or the policy. One class for each kind of model.

An objective names what is trained; components/federation/clients.py has the table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from components.config import OptimizerConfig, Recipe
from components.federation.private import Home
from components.federation.strategy import Job, options_of
from components.learning.references import References
from components.models import eight_bit
from components.models.parts import PersonalParts

if TYPE_CHECKING:
    import torch

    from components.learning.local import TrainingCurve
    from components.learning.offline_ppo import PpoCurve
    from components.models.adapters import Adapter


@dataclass(frozen=True)
class Compared:
    """How U models find the chosen completions of N pairs against the rejected ones.

    Attributes:
        margins: [U, N], above 0 where a model is right: log-odds of a selector, differences of the implicit rewards over beta of a policy.
        rewards: [U, N], implicit rewards of the chosen completions over beta; None of a selector.
        others: [U, N] each, other differences that a model is right by where they are above 0. Of a policy 'summed', of the completions'
            log-likelihoods, and 'per_token', of their means over tokens; of a reward head 'explicit', of its rewards.
    """

    margins: np.ndarray
    rewards: np.ndarray | None = None
    others: dict[str, np.ndarray] = field(default_factory=dict)

    def of(self, models: Sequence[int]) -> Compared:
        """Of these models, in this order; one may come twice."""
        places = list(models)
        return Compared(self.margins[places], None if self.rewards is None else self.rewards[places], {name: values[places] for name, values in self.others.items()})


def joined(parts: Sequence[tuple[Sequence[int], Compared]]) -> Compared:
    """One table of the columns that each part has; the parts have as many models, and all columns between them."""
    order = np.argsort([n for rows, _ in parts for n in rows])

    def columns(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(values, axis=1)[:, order]

    given = [compared for _, compared in parts]
    return Compared(
        columns([one.margins for one in given]), None if given[0].rewards is None else columns([one.rewards for one in given]),
        {name: columns([one.others[name] for one in given]) for name in given[0].others})


class Learner(Protocol):
    """What a client trains and scores, on a model that stays resident on one device.

    Methods whose clients keep something to themselves need the client's home, and its job; others do without.
    """

    @property
    def model(self) -> torch.nn.Module: ...

    def initial_adapter(self, seed: int) -> Adapter: ...

    def train(self, rows: list[dict], adapter: Adapter, seed: int, home: Home | None = None, job: Job | None = None) -> tuple[Adapter, dict[str, float]]: ...

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]: ...

    def compare(self, rows: list[dict], adapters: Sequence[Adapter], home: Home | None = None) -> Compared: ...


class SelectorLearner:
    """Trains the binary selector by cross-entropy; scores it by its mean validation cross-entropy."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        from components.models.selector import Selector

        check_optimizer(recipe, device)
        self.federation = recipe.federation
        self.selector = Selector(recipe.selector, device)

    @property
    def model(self) -> torch.nn.Module:
        return self.selector.model

    def initial_adapter(self, seed: int) -> Adapter:
        return self.selector.slot.initial_adapter(seed)

    def train(self, rows: list[dict], adapter: Adapter, seed: int, home: Home | None = None, job: Job | None = None) -> tuple[Adapter, dict[str, float]]:
        from components.learning.selector import train_selector

        config = self.federation
        trained, curve = train_selector(
            self.selector, rows, adapter, config.steps_of(len(rows)), config.batch_size, config.optimizer, seed)
        return trained, curve_metrics(curve)

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]:
        from components.learning.selector import validation_losses

        return validation_losses(self.selector, rows, adapters)

    def compare(self, rows: list[dict], adapters: Sequence[Adapter], home: Home | None = None) -> Compared:
        """Log-odds that the chosen completion is better under each adapter."""
        from components.learning.selector import score_pairs

        result = np.zeros((len(adapters), len(rows)))
        for u, adapter in enumerate(adapters):
            self.selector.slot.load(adapter)
            result[u] = score_pairs(self.selector, rows)
        return Compared(result)


class PolicyLearner:
    """Trains the policy on the chosen completions ('sft') or by DPO with the frozen backbone as the reference ('dpo').

    Attributes:
        references: the reference's log-probabilities of the pairs that were used so far.
    """

    def __init__(self, recipe: Recipe, device: str, objective: str, parts: PersonalParts | None = None) -> None:
        from components.learning.policy import ResidentPolicy

        check_optimizer(recipe, device)
        self.federation, self.objective = recipe.federation, objective
        self.options = options_of(recipe.federation)
        self.beta = None if objective == "sft" else self.options.beta
        self.proximal = getattr(self.options, "proximal", 0.0)
        self.by_ppo = getattr(self.options, "objective", "dpo") == "ppo"
        self.reward = next(iter(recipe.rewards), "")
        self.resident = ResidentPolicy(recipe.policy, device, parts)
        self.references = References()

    @property
    def model(self) -> torch.nn.Module:
        return self.resident.model

    def initial_adapter(self, seed: int) -> Adapter:
        return self.resident.slot.initial_adapter(seed)

    def train(self, rows: list[dict], adapter: Adapter, seed: int, home: Home | None = None, job: Job | None = None) -> tuple[Adapter, dict[str, float]]:
        from components.learning.policy import train_dpo, train_sft

        config = self.federation
        steps = config.steps_of(len(rows))
        if self.objective == "sft":
            trained, curve = train_sft(self.resident, rows, adapter, steps, config.batch_size, config.optimizer, seed, proximal=self.proximal)
        elif self.by_ppo:
            self.resident.slot.load(adapter)
            curve = self._ppo(rows, at_home(home), self.resident.slot.parameters, steps, config.optimizer, seed)
            return self.resident.slot.read(), ppo_metrics(curve)
        else:
            trained, curve = train_dpo(
                self.resident, rows, adapter, self._reference(rows, self._drawn(rows, steps, seed)), self.beta, steps, config.batch_size, config.optimizer, seed,
                proximal=self.proximal)
        return trained, curve_metrics(curve)

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]:
        """Mean DPO loss, or mean negative log-likelihood a token of the chosen completions, under each adapter; NaN without rows."""
        import torch

        from components.learning.objectives import dpo_loss, sft_loss
        from components.learning.policy import pair_logprobs

        if not rows:
            return [float("nan")] * len(adapters)
        losses, lengths = [], torch.tensor([len(self.resident.encode(row["prompt"], row["chosen"])[1]) for row in rows])
        for adapter in adapters:
            self.resident.slot.load(adapter)
            chosen, rejected = torch.from_numpy(pair_logprobs(self.resident, rows, self.batch_size)).T
            if self.objective == "sft":
                losses.append(float(sft_loss(chosen, lengths).mean()))
            else:
                losses.append(float(dpo_loss(chosen, rejected, *torch.from_numpy(self._reference(rows)).T, self.beta).mean()))
        return losses

    def compare(self, rows: list[dict], adapters: Sequence[Adapter], home: Home | None = None) -> Compared:
        """Implicit rewards and log-likelihoods under each adapter. One whose B are all 0 is the reference itself, and nothing is computed for it."""
        from components.learning.policy import pair_logprobs

        reference = self._reference(rows)
        found = np.zeros((len(adapters), len(rows), 2))
        for u, adapter in enumerate(adapters):
            if any(tensor.any() for name, tensor in adapter.items() if ".lora_B." in name):
                self.resident.slot.load(adapter)
                found[u] = pair_logprobs(self.resident, rows, self.batch_size)
            else:
                found[u] = reference
        return self._compared(rows, found, reference)

    def _compared(self, rows: list[dict], found: np.ndarray, reference: np.ndarray, explicit: np.ndarray | None = None) -> Compared:
        lengths = np.array([[len(part) for part in self.resident.encode_pair(row)[1:]] for row in rows]).reshape(len(rows), 2)
        ratios = found - reference
        return Compared(
            ratios[..., 0] - ratios[..., 1], ratios[..., 0],
            {"summed": found[..., 0] - found[..., 1], "per_token": (found / lengths)[..., 0] - (found / lengths)[..., 1]} | ({} if explicit is None else {"explicit": explicit}))

    @property
    def batch_size(self) -> int:
        """Pairs scored at once: twice a training step's."""
        return 2 * self.federation.batch_size

    def _drawn(self, rows: list[dict], steps: int, seed: int) -> np.ndarray:
        """Indices of the rows that a training of so many steps draws."""
        from components.learning.local import minibatches

        config = self.federation
        return np.unique(np.concatenate(list(minibatches(len(rows), config.batch_size, steps * config.optimizer.accumulation, seed))))

    def _ppo(self, rows: list[dict], home: Home, parameters: Sequence[torch.nn.Parameter], steps: int, optimizer: OptimizerConfig, seed: int) -> PpoCurve:
        """Train parameters by PPO, from what is in the resident model, with as many passes of pairs as so many steps of the recipe have."""
        from components.learning.offline_ppo import Ppo, ppo_batches, train_offline_ppo

        config = Ppo(**self.options.ppo.model_dump())
        batches = ppo_batches(len(rows), steps * self.federation.batch_size * optimizer.accumulation, config, seed)
        reference = self._token_reference(rows, np.unique(np.concatenate(batches)))
        return train_offline_ppo(self.resident, rows, home.scores(rows, self.reward), reference, parameters, config, batches, optimizer, seed, self.proximal)

    def _token_reference(self, rows: list[dict], used: np.ndarray) -> list[list[torch.Tensor]]:
        """The reference's log-probabilities of each token of chosen and of rejected; none of rows that are not among the indices `used`."""
        wanted = set(used.tolist())
        return [self.references.tokens(self.resident, self.resident.encode_pair(row)) if n in wanted else [] for n, row in enumerate(rows)]

    def _reference(self, rows: list[dict], used: np.ndarray | None = None) -> np.ndarray:
        """The reference's log-probabilities, [N, 2]; NaN in rows that are not among the indices `used`."""
        known = np.full((len(rows), 2), np.nan)
        for n in range(len(rows)) if used is None else used:
            known[n] = self.references.sums(self.resident, self.resident.encode_pair(rows[n]))
        return known


def at_home(home: Home | None) -> Home:
    """The home that a learner was given.

    Raises:
        TypeError: none was.
    """
    if home is None:
        raise TypeError("this method's clients have something of their own: their home is needed")
    return home


def check_optimizer(recipe: Recipe, device: str) -> None:
    """Refuse an optimiser that a device cannot run, before anything is trained.

    Raises:
        EightBitError: see components/models/eight_bit.py.
    """
    eight_bit.check("federation.optimizer.name", recipe.federation.optimizer.name, device)


def curve_metrics(curve: TrainingCurve) -> dict[str, float]:
    """A local training as numbers for the record."""
    return {
        "loss_first": curve.losses[0], "loss_last": curve.losses[-1], "loss": sum(curve.losses) / len(curve.losses),
        "gradient_norm": sum(curve.gradient_norms) / len(curve.gradient_norms), "steps": len(curve.losses), "tokens": curve.tokens, "seconds": curve.seconds}


def ppo_metrics(curve: PpoCurve) -> dict[str, float]:
    """A round of PPO as numbers for the record."""
    return curve_metrics(curve) | {"kl": curve.kl, "stopped": float(curve.stopped)}
