"""The client's side of the personalised methods: its parts are swapped into the resident model, trained there, and written to its own store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import PolicyConfig, Recipe
from components.federation.learners import Compared, PolicyLearner, Visit, curve_metrics
from components.federation.private import PrivateState, PrivateStore
from components.federation.strategy import options_model
from components.models.policy import PersonalPolicies, Policy
from components.seeding import derive

if TYPE_CHECKING:
    from components.learning.pdpo import HalfCurve
    from components.models.adapters import Adapter


@dataclass(frozen=True)
class Memory:
    """What a client remembers beside its parts.

    Attributes:
        scale: s of eq. 7.
        decay: by which its learning rates are multiplied.
        dpo: mean DPO loss of its last round; NaN before that.
    """

    scale: float
    decay: float = 1.0
    dpo: float = float("nan")

    def numbers(self) -> dict[str, float]:
        """As the store keeps it."""
        return {"scale": self.scale, "decay": self.decay} | ({} if np.isnan(self.dpo) else {"dpo": self.dpo})


class PersonalLearner(PolicyLearner):
    """Trains the LoRA that travels and a client's own parts, one after the other or together, by PDPO or DPO (components/federation/personal.py)."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        options = options_model(recipe.federation.method, "recipe").model_validate(recipe.federation.options)
        super().__init__(recipe, device, "personal", options.parts())
        self.seed, self.slot = recipe.seed, self.resident.personal

    def train(self, rows: list[dict], adapter: Adapter, seed: int, visit: Visit | None = None) -> tuple[Adapter, dict[str, float]]:
        """A round of a client. Its state is written after each half, so that a job that is done again takes up a finished one."""
        from components.learning.pdpo import FIRST_SCALE

        if visit is None:
            raise TypeError("a personalised method trains in a visit to a client's own store")
        before = visit.store.before(visit.round)
        memory = Memory(**before.numbers) if before else Memory(FIRST_SCALE)
        curves: dict[str, dict[str, float]] = {}
        self.slot.load(before.tensors if before else self.slot.initial(self.seed))
        self.slot.shared.load(adapter)
        if self.options.halves == "together":
            curve = self._half(rows, visit.round, memory, seed, own=True, shared=True)
            memory, curves["shared"] = replace(memory, scale=curve.scale), half_metrics(curve)
        else:
            half = visit.store.half(visit.round, visit.key)
            if half is not None:
                self.slot.load(half.tensors)
                curves["own"] = {name.removeprefix("own/"): value for name, value in half.numbers.items() if name.startswith("own/")}
                memory = replace(memory, scale=half.numbers["scale"])
            else:
                curve = self._half(rows, visit.round, memory, derive(seed, "own half"), own=True, shared=False)
                memory, curves["own"] = replace(memory, scale=curve.scale), half_metrics(curve)
                visit.store.save(visit.round, visit.key, PrivateState(self.slot.read(), memory.numbers() | {f"own/{name}": value for name, value in curves["own"].items()}), half=True)
            curve = self._half(rows, visit.round, memory, derive(seed, "shared half"), own=False, shared=True)
            memory, curves["shared"] = replace(memory, scale=curve.scale), half_metrics(curve)
        now = float(np.mean([curve["dpo"] for curve in curves.values()]))
        decay = self.options.rate_decay
        if decay is not None and now > memory.dpo:  # not where it is NaN
            memory = replace(memory, decay=memory.decay * decay.factor)
        kept = visit.store.save(visit.round, visit.key, PrivateState(self.slot.read(), replace(memory, dpo=now).numbers()))
        together = {name: sum(curve[name] for curve in curves.values()) for name in ("steps", "tokens", "seconds")}
        halves = {f"{half}/{name}": value for half, curve in curves.items() for name, value in curve.items() if len(curves) > 1 and name in ("loss", "seconds", "steps", "excluded")}
        return self.slot.shared.read(), curves["shared"] | together | halves | {"scale": memory.scale, "decay": memory.decay, "bytes_kept": kept.size}

    def _half(self, rows: list[dict], round: int, memory: Memory, seed: int, own: bool, shared: bool) -> HalfCurve:
        from components.learning.pdpo import train_half

        config, options = self.federation, self.options
        steps, rate = config.steps_of(len(rows)), config.optimizer.lr
        if own and not shared:
            rate = options.personal_lr
            steps = options.personal_steps or (config.steps_of(len(rows), options.personal_epochs) if options.personal_epochs else steps)
        least = options.rate_decay.least if options.rate_decay else 0.0
        rate = max(rate * memory.decay, min(rate, least))
        return train_half(
            self.resident, rows, self._reference(rows, self._drawn(rows, steps, seed)), own, shared, options.objective(round, config.rounds), memory.scale, steps,
            config.batch_size, config.optimizer.model_copy(update={"lr": rate}), seed)

    def compare(self, rows: list[dict], adapters: Sequence[Adapter], state: PrivateState | None = None) -> Compared:
        """Implicit and explicit rewards and log-likelihoods under each adapter with a client's own parts; its first ones where it has not trained yet."""
        tensors = state.tensors if state else self.slot.initial(self.seed)
        found, explicit = np.zeros((len(adapters), len(rows), 2)), np.zeros((len(adapters), len(rows)))
        for u, adapter in enumerate(adapters):
            self.slot.load(tensors)
            self.slot.shared.load(adapter)
            found[u], explicit[u] = self._measure(rows)
        return self._compared(rows, found, self._reference(rows), explicit if self.slot.head.reward else None)

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]:
        """Refused: no personalised method asks for losses, and without a client's own parts they would say nothing.

        Raises:
            TypeError: always.
        """
        raise TypeError("a personalised method has no 'score' jobs")

    def _measure(self, rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities, [N, 2], and explicit margins, [N], of what is in the slots."""
        import torch

        if self.slot.head.reward is None:
            from components.learning.policy import pair_logprobs

            return pair_logprobs(self.resident, rows, self.batch_size), np.zeros(len(rows))
        encoded = [self.resident.encode_pair(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (sum(map(len, encoded[i])), i))
        found, explicit = np.zeros((len(rows), 2)), np.zeros(len(rows))
        self.resident.model.eval()
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                chunk = order[start : start + self.batch_size]
                logprobs, features = self.resident.logprobs_and_features([encoded[i] for i in chunk])
                rewards = self.slot.head.reward(features)
                found[chunk], explicit[chunk] = logprobs.cpu().numpy(), (rewards[:, 0] - rewards[:, 1]).cpu().numpy()
        return found, explicit


def half_metrics(curve: HalfCurve) -> dict[str, float]:
    """A half as numbers for the record."""
    return curve_metrics(curve) | {"dpo": curve.dpo, "excluded": curve.excluded}


class PrivatePolicies(PersonalPolicies):
    """Policies of clients that have parts of their own, on one backbone: those of a client, from its own store, are swapped in when it asks."""

    def __init__(self, recipe: Recipe, device: str, adapter: Adapter, clients: Path, names: Sequence[str], round: int) -> None:
        """Load the backbone.

        Args:
            recipe: its policy, its method and its seed.
            device: where to.
            adapter: the server's, the same for all.
            clients: their own stores.
            names: of the clients.
            round: rounds that are done.
        """
        from components.models.adapters import attach
        from components.models.personalized import PersonalSlot

        config: PolicyConfig = recipe.policy
        self.clients = sorted(names)
        self.policy = Policy(config, device)
        self.policy.model = attach(self.policy.model, config.lora).eval()
        options = options_model(recipe.federation.method, "recipe").model_validate(recipe.federation.options)
        self._slot, self._adapter, self._stores, self._round = PersonalSlot(self.policy.model, options.parts()), adapter, clients, round
        self._first, self._now = self._slot.initial(recipe.seed), ""
        self.policy.model.eval()

    def of(self, client: str) -> Policy:
        """The policy of a client, until another one is asked for.

        Raises:
            PolicyError: there is no such client.
        """
        self.check(client)
        if client != self._now:
            state = PrivateStore(self._stores, client).before(self._round)
            self._slot.load(state.tensors if state else self._first)
            self._slot.shared.load(self._adapter)
            self._now = client
        return self.policy
