"""The client's side: a job is carried out on a resident model, with the client's own rows and nothing else.

An objective says what is trained (a method that trains something else adds its objective here). The
finished update is written beside the adapters under the job's key, so that a job that was done is never done twice:
a retried or resumed shard goes on with the clients that are left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from components.config import PolicyConfig, Recipe, SelectorConfig
from components.data.records import read_rows
from components.federation.strategy import Job, Update, options_model
from components.models import eight_bit
from components.models.adapters import AdapterStore, write_atomically

if TYPE_CHECKING:
    import torch

    from components.learning.local import TrainingCurve
    from components.models.adapters import Adapter


class Learner(Protocol):
    """What a client trains and scores, on a model that stays resident on one device."""

    @property
    def model(self) -> torch.nn.Module: ...

    def initial_adapter(self, seed: int) -> Adapter: ...

    def train(self, rows: list[dict], adapter: Adapter, seed: int) -> tuple[Adapter, dict[str, float]]: ...

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]: ...

    def compare(self, rows: list[dict], adapters: Sequence[Adapter]) -> tuple[np.ndarray, np.ndarray | None]: ...


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

    def train(self, rows: list[dict], adapter: Adapter, seed: int) -> tuple[Adapter, dict[str, float]]:
        from components.learning.selector import train_selector

        config = self.federation
        trained, curve = train_selector(
            self.selector, rows, adapter, config.local_steps, config.batch_size, config.optimizer, seed)
        return trained, curve_metrics(curve)

    def score(self, rows: list[dict], adapters: Sequence[Adapter]) -> list[float]:
        from components.learning.selector import validation_losses

        return validation_losses(self.selector, rows, adapters)

    def compare(self, rows: list[dict], adapters: Sequence[Adapter]) -> tuple[np.ndarray, None]:
        """Log-odds that the chosen completion is better under each adapter, [U, N]; a selector has no reward of a single completion."""
        from components.learning.selector import score_pairs

        result = np.zeros((len(adapters), len(rows)))
        for u, adapter in enumerate(adapters):
            self.selector.slot.load(adapter)
            result[u] = score_pairs(self.selector, rows)
        return result, None


class PolicyLearner:
    """Trains the policy on the chosen completions ('sft') or by DPO with the frozen backbone as the reference ('dpo').

    The reference's log-probabilities of an owner's pairs are computed when a pair is first used, each by itself, and
    kept: they depend on no other pair, so a resumed run has the same bytes.
    """

    def __init__(self, recipe: Recipe, device: str, objective: str) -> None:
        from components.learning.policy import ResidentPolicy

        check_optimizer(recipe, device)
        self.federation, self.objective = recipe.federation, objective
        options = options_model(recipe.federation.method, "recipe").model_validate(recipe.federation.options)
        self.beta = options.beta if objective == "dpo" else None
        self.proximal = getattr(options, "proximal", 0.0)
        self.resident = ResidentPolicy(recipe.policy, device)
        self._references: dict[tuple[str, ...], np.ndarray] = {}  # [N, 2] by the pairs' ids, NaN where not yet computed

    @property
    def model(self) -> torch.nn.Module:
        return self.resident.model

    def initial_adapter(self, seed: int) -> Adapter:
        return self.resident.slot.initial_adapter(seed)

    def train(self, rows: list[dict], adapter: Adapter, seed: int) -> tuple[Adapter, dict[str, float]]:
        from components.learning.local import minibatches
        from components.learning.policy import train_dpo, train_sft

        config = self.federation
        if self.objective == "sft":
            trained, curve = train_sft(self.resident, rows, adapter, config.local_steps, config.batch_size, config.optimizer, seed, proximal=self.proximal)
        else:
            used = np.unique(np.concatenate(list(minibatches(len(rows), config.batch_size, config.local_steps, seed))))
            trained, curve = train_dpo(
                self.resident, rows, adapter, self._reference(rows, used), self.beta, config.local_steps, config.batch_size, config.optimizer, seed,
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

    def compare(self, rows: list[dict], adapters: Sequence[Adapter]) -> tuple[np.ndarray, np.ndarray]:
        """Differences of the implicit rewards of chosen and rejected, and the rewards of chosen, both over beta, under each adapter, [U, N] each.

        An adapter whose B are all 0 is the reference itself, so all are 0 and nothing is computed for it.
        """
        from components.learning.policy import implicit_margins, pair_logprobs

        result, rewards = np.zeros((len(adapters), len(rows))), np.zeros((len(adapters), len(rows)))
        for u, adapter in enumerate(adapters):
            if not any(tensor.any() for name, tensor in adapter.items() if ".lora_B." in name):
                continue
            reference = self._reference(rows)
            self.resident.slot.load(adapter)
            found = pair_logprobs(self.resident, rows, self.batch_size)
            result[u], rewards[u] = implicit_margins(found, reference), (found - reference)[:, 0]
        return result, rewards

    @property
    def batch_size(self) -> int:
        """Pairs scored at once: twice a training step's."""
        return 2 * self.federation.batch_size

    def _reference(self, rows: list[dict], used: np.ndarray | None = None) -> np.ndarray:
        """The reference's log-probabilities, [N, 2]; NaN in rows that are not among the indices `used`, unless they are known."""
        from components.learning.policy import pair_logprobs

        known = self._references.setdefault(tuple(row["pair_id"] for row in rows), np.full((len(rows), 2), np.nan))
        for n in range(len(rows)) if used is None else used:
            if np.isnan(known[n]).any():
                known[n] = pair_logprobs(self.resident, [rows[n]], 1, reference=True)
        return known


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
        "gradient_norm": sum(curve.gradient_norms) / len(curve.gradient_norms), "tokens": curve.tokens, "seconds": curve.seconds}


LEARNERS: dict[str, Callable[[Recipe, str], Learner]] = {
    "selector": SelectorLearner,
    "sft": partial(PolicyLearner, objective="sft"),
    "dpo": partial(PolicyLearner, objective="dpo"),
}
"""What can be trained, by the `objective` of a job."""


def trained_model(recipe: Recipe, objective: str) -> SelectorConfig | PolicyConfig:
    """The section of the recipe whose model, with its LoRA, an objective trains."""
    return recipe.selector if objective == "selector" else recipe.policy


def run_job(job: Job, learner: Learner, pairs: Path, store: AdapterStore) -> Update:
    """Carry out a job, or give back the update of an earlier time that it was.

    Args:
        job: what to do.
        learner: on the device that this task holds.
        pairs: the prepared pairs; only rows of the job's client are read.
        store: where adapters are read and written; updates lie in the folder `updates` beside it.

    Raises:
        AdapterError, TrainingError: the adapter is damaged, or training does not stay finite.
    """
    done = finished_update(job, store)
    if done is not None:
        return done
    split = "train" if job.kind == "train" else "validation"
    rows = read_rows(pairs, job.client, split).to_list()
    if job.kind == "score":
        losses = tuple(learner.score(rows, [store.get(ref) for ref in job.adapters]))
        update = Update(job, None, losses, {"rows": len(rows)})
    else:
        trained, metrics = learner.train(rows, store.get(job.adapters[0]), job.seed)
        update = Update(job, store.put(trained), (), {"rows": len(rows), **metrics})
    content = {"adapter": update.adapter and update.adapter.hash, "losses": update.losses, "metrics": update.metrics, "job": asdict(job)}
    write_atomically(_record(job, store), json.dumps(content).encode())
    return update


def finished_update(job: Job, store: AdapterStore) -> Update | None:
    """The update of a job that was done before; None unless it was written whole and its adapter is still there, undamaged."""
    try:
        content = json.loads(_record(job, store).read_bytes())
        ref = None if content["adapter"] is None else store.ref(content["adapter"])
        if ref is not None:
            store.get(ref)
    except (FileNotFoundError, ValueError):  # AdapterError is a ValueError
        return None
    return Update(job, ref, tuple(content["losses"]), content["metrics"])


def _record(job: Job, store: AdapterStore) -> Path:
    return store.root.parent / "updates" / f"{job.key()}.json"
