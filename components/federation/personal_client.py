"""The client's side of the methods that end with another model for each client: what a client has of its own is put into the resident model, and trained there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import Recipe
from components.federation.learners import Compared, PolicyLearner, at_home, curve_metrics
from components.federation.private import Home, PrivateState, home_of
from components.federation.strategy import Job, options_of
from components.learning.local import TrainingError
from components.models.adapters import AdapterStore
from components.models.policy import PersonalPolicies, Policy
from components.seeding import derive

if TYPE_CHECKING:
    import torch

    from components.learning.meta import Loss
    from components.learning.pdpo import HalfCurve
    from components.learning.policy import Row
    from components.models.adapters import Adapter


class HomeLearner(PolicyLearner, ABC):
    """A learner whose clients do not use the server's adapter as it is."""

    @abstractmethod
    def become(self, adapter: Adapter, home: Home) -> None:
        """Put into the resident model what a client has made of the server's adapter."""

    def compare(self, rows: list[dict], adapters: Sequence[Adapter], home: Home | None = None) -> Compared:
        """Implicit rewards, rewards of a reward head, and log-likelihoods under what a client has made of each adapter."""
        found, explicit = np.zeros((len(adapters), len(rows), 2)), np.zeros((len(adapters), len(rows)))
        for u, adapter in enumerate(adapters):
            self.become(adapter, at_home(home))
            found[u], explicit[u] = self._measure(rows)
        return self._compared(rows, found, self._reference(rows), explicit if self._reward is not None else None)

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]:
        """Refused: none of these methods asks for losses, and an adapter without what a client makes of it would say nothing.

        Raises:
            TypeError: always.
        """
        raise TypeError("a personalised method has no 'score' jobs")

    @property
    def _reward(self):
        return self.resident.personal.head.reward if self.resident.personal else None

    def _measure(self, rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities, [N, 2], and explicit margins, [N], of what is in the resident model."""
        if self._reward is None or not rows:
            from components.learning.policy import pair_logprobs

            return pair_logprobs(self.resident, rows, self.batch_size), np.zeros(len(rows))

        def values(asked: list[Row]) -> torch.Tensor:
            logprobs, features = self.resident.logprobs_and_features(asked)
            rewards = self._reward(features)
            return torch.cat([logprobs, rewards[:, :1] - rewards[:, 1:]], 1)

        import torch

        found = self.resident.in_batches([self.resident.encode_pair(row) for row in rows], self.batch_size, values)
        return found[:, :2], found[:, 2]


class MetaLearner(HomeLearner):
    """Trains an adapter from which a few steps on a client's own pairs lead to its own (components/federation/perfedavg.py)."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        super().__init__(recipe, device, "meta")
        self.seed = recipe.seed

    def train(self, rows: list[dict], adapter: Adapter, seed: int, home: Home | None = None, job: Job | None = None) -> tuple[Adapter, dict[str, float]]:
        """The round's meta-steps."""
        from components.learning.meta import meta_batches, train_meta

        config, options = self.federation, self.options
        batches = meta_batches(len(rows), config.batch_size, config.steps_of(len(rows)) * config.optimizer.accumulation, options.inner_steps, seed)
        self.resident.slot.load(adapter)
        loss = self._loss(rows, [indices for step in batches for indices in step], at_home(home))
        trained, curve = train_meta(self.resident, loss, batches, options.inner_lr, config.optimizer.model_copy(update={"lr": options.outer_lr, "accumulation": 1}), seed)
        return trained, curve_metrics(curve) | {"steps": sum(len(step) for step in batches)}  # gradients, so that it can be compared

    def become(self, adapter: Adapter, home: Home) -> None:
        """The inner steps on the client's own training pairs, the same each time that they are asked for with the same adapter."""
        from components.learning.meta import adapt, meta_batches

        rows, seed = home.training_rows(), derive(self.seed, "adapt", home.client)
        ((*inner, _),) = meta_batches(len(rows), self.federation.batch_size, self.options.inner_steps + 1, self.options.inner_steps, seed)
        self.resident.slot.load(adapter)
        adapt(self.resident, self._loss(rows, inner, home), inner, self.options.inner_lr, seed)

    def _loss(self, rows: list[dict], batches: Sequence[np.ndarray], home: Home) -> Loss:
        """Of DPO; or of PPO against the adapter that is in the slot, without a value head."""
        from components.learning.offline_ppo import Ppo, ppo_rows
        from components.learning.policy import dpo_rows

        used = np.unique(np.concatenate(list(batches)))
        if not self.by_ppo:
            return dpo_rows(self.resident, rows, self._reference(rows, used), self.beta)
        return ppo_rows(self.resident, rows, home.scores(rows, self.reward), self._token_reference(rows, used), used, Ppo(**self.options.ppo.model_dump()))[0]


@dataclass(frozen=True)
class Memory:
    """What a client remembers beside its parts.

    Attributes:
        scale: s of eq. 7.
        decay: by which its learning rates are multiplied.
        dpo: mean DPO loss of its last round (of PPO its own); NaN before that.
    """

    scale: float
    decay: float = 1.0
    dpo: float = float("nan")

    def numbers(self) -> dict[str, float]:
        """As the store keeps it."""
        return {"scale": self.scale, "decay": self.decay} | ({} if np.isnan(self.dpo) else {"dpo": self.dpo})


class PersonalLearner(HomeLearner):
    """Trains the LoRA that travels and a client's own parts, one after the other or together, by PDPO or DPO (components/federation/personal.py)."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        options = options_of(recipe.federation)
        super().__init__(recipe, device, "personal", options.parts())
        self.seed, self.slot = recipe.seed, self.resident.personal

    def train(self, rows: list[dict], adapter: Adapter, seed: int, home: Home | None = None, job: Job | None = None) -> tuple[Adapter, dict[str, float]]:
        """A round of a client. Its state is written after each half, so that a job that is done again takes up a finished one."""
        from components.learning.pdpo import FIRST_SCALE

        home, before, key = at_home(home), at_home(home).state(), job.key()
        memory = Memory(**before.numbers) if before else Memory(FIRST_SCALE)
        curves: dict[str, dict[str, float]] = {}
        self.slot.load(before.tensors if before else self.slot.initial(self.seed))
        self.slot.shared.load(adapter)
        if self.options.halves == "together":
            curve = self._half(rows, home, job.round, memory, seed, own=True, shared=True)
            memory, curves["shared"] = replace(memory, scale=curve.scale), half_metrics(curve)
        else:
            half = home.store.half(key)
            if half is not None:
                self.slot.load(half.tensors)
                curves["own"] = {name.removeprefix("own/"): value for name, value in half.numbers.items() if name.startswith("own/")}
                memory = replace(memory, scale=half.numbers["scale"])
            else:
                curve = self._half(rows, home, job.round, memory, derive(seed, "own half"), own=True, shared=False)
                memory, curves["own"] = replace(memory, scale=curve.scale), half_metrics(curve)
                home.store.save(key, home.last, PrivateState(self._finite(), memory.numbers() | {f"own/{name}": value for name, value in curves["own"].items()}), half=True)
            curve = self._half(rows, home, job.round, memory, derive(seed, "shared half"), own=False, shared=True)
            memory, curves["shared"] = replace(memory, scale=curve.scale), half_metrics(curve)
        now = float(np.mean([curve["dpo"] for curve in curves.values()]))
        decay = self.options.rate_decay
        if decay is not None and now > memory.dpo:  # not where it is NaN
            memory = replace(memory, decay=memory.decay * decay.factor)
        kept = home.store.save(key, home.last, PrivateState(self._finite(), replace(memory, dpo=now).numbers()))
        together = {name: sum(curve[name] for curve in curves.values()) for name in ("steps", "tokens", "seconds")}
        halves = {f"{half}/{name}": value for half, curve in curves.items() for name, value in curve.items() if len(curves) > 1 and name in ("loss", "seconds", "steps", "excluded", "kl", "stopped")}
        return self.slot.shared.read(), curves["shared"] | together | halves | {"scale": memory.scale, "decay": memory.decay, "bytes_kept": kept.size}

    def _half(self, rows: list[dict], home: Home, round: int, memory: Memory, seed: int, own: bool, shared: bool) -> HalfCurve:
        from components.learning.pdpo import HalfCurve, train_half, trained_parts

        config, options = self.federation, self.options
        steps, rate = config.steps_of(len(rows)), config.optimizer.lr
        if own and not shared:
            rate = options.personal_lr
            steps = options.personal_steps or (config.steps_of(len(rows), options.personal_epochs) if options.personal_epochs else steps)
        least = options.rate_decay.least if options.rate_decay else 0.0
        rate = max(rate * memory.decay, min(rate, least))
        optimizer = config.optimizer.model_copy(update={"lr": rate})
        if self.by_ppo:
            with trained_parts(self.resident, own, shared) as parameters:
                curve = self._ppo(rows, home, parameters, steps, optimizer, seed)
            return HalfCurve(curve.losses, curve.gradient_norms, curve.tokens, curve.seconds, memory.scale, sum(curve.losses) / len(curve.losses), 0.0, (curve.kl, curve.stopped))
        return train_half(
            self.resident, rows, self._reference(rows, self._drawn(rows, steps, seed)), own, shared, options.loss(round, config.rounds), memory.scale, steps,
            config.batch_size, optimizer, seed)

    def _finite(self) -> Adapter:
        """What is in the slot of the client's own parts.

        Raises:
            TrainingError: a value is NaN or infinite, by the tensor's name; the client keeps what it had.
        """
        tensors = self.slot.read()
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise TrainingError(f"the client's own tensor '{name}' has values that are NaN or infinite after its last step: lower the learning rates")
        return tensors

    def become(self, adapter: Adapter, home: Home) -> None:
        """The client's own parts, its first ones where it has not trained yet, with the server's adapter."""
        state = home.state()
        self.slot.load(state.tensors if state else self.slot.initial(self.seed))
        self.slot.shared.load(adapter)


def half_metrics(curve: HalfCurve) -> dict[str, float]:
    """A half as numbers for the record."""
    by_ppo = {} if curve.ppo is None else {"kl": curve.ppo[0], "stopped": float(curve.ppo[1])}
    return curve_metrics(curve) | {"dpo": curve.dpo, "excluded": curve.excluded} | by_ppo


class ClientPolicies(PersonalPolicies):
    """Policies of clients that make something of their own of the server's adapter, on one resident model: a client's is put into it when it asks."""

    def __init__(self, learner: HomeLearner, adapter: Adapter, store: AdapterStore, pairs: Path, last: Mapping[str, str]) -> None:
        """Over a learner.

        Args:
            learner: of the method.
            adapter: the server's, the same for all.
            store: beside which the clients' own are.
            pairs: the prepared pairs.
            last: key of each client's last job, see Home; empty where it has none.
        """
        self.clients, self.policy = sorted(last), learner.resident.policy
        self._learner, self._adapter, self._homes, self._now = learner, adapter, {name: home_of(name, store, pairs, key) for name, key in last.items()}, ""
        learner.resident.model.eval()

    def of(self, client: str) -> Policy:
        """The policy of a client, until another one is asked for.

        Raises:
            PolicyError: there is no such client.
        """
        self.check(client)
        if client != self._now:
            self._learner.become(self._adapter, self._homes[client])
            self._now = client
        return self.policy
