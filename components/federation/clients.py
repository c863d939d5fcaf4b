"""The client's side: a job is carried out on a resident model, with the client's own rows and nothing else.

An objective says what is trained ("selector" now; a method that trains something else adds its objective here). The
finished update is written beside the adapters under the job's key, so that a job that was done is never done twice:
a retried or resumed shard goes on with the clients that are left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.config import Recipe
from components.data.records import read_rows
from components.federation.strategy import Job, Update
from components.models.adapters import AdapterStore, write_atomically

if TYPE_CHECKING:
    from components.models.adapters import Adapter


class Learner(Protocol):
    """What a client trains and scores, on a model that stays resident on one device."""

    def initial_adapter(self, seed: int) -> Adapter: ...

    def train(self, rows: list[dict], adapter: Adapter, seed: int) -> tuple[Adapter, dict[str, float]]: ...

    def score(self, rows: list[dict], adapter: Adapter) -> float: ...


class SelectorLearner:
    """Trains the binary selector by cross-entropy; scores it by its mean validation cross-entropy."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        from components.models.selector import Selector

        self.federation = recipe.federation
        self.selector = Selector(recipe.selector, device)

    def initial_adapter(self, seed: int) -> Adapter:
        return self.selector.slot.initial_adapter(seed)

    def train(self, rows: list[dict], adapter: Adapter, seed: int) -> tuple[Adapter, dict[str, float]]:
        from components.learning.selector import train_selector

        config = self.federation
        trained, curve = train_selector(
            self.selector, rows, adapter, config.local_steps, config.batch_size, config.optimizer, seed)
        return trained, {
            "loss_first": curve.losses[0], "loss_last": curve.losses[-1], "loss": sum(curve.losses) / len(curve.losses),
            "gradient_norm": sum(curve.gradient_norms) / len(curve.gradient_norms), "tokens": curve.tokens, "seconds": curve.seconds}

    def score(self, rows: list[dict], adapter: Adapter) -> float:
        from components.learning.selector import validation_loss

        self.selector.slot.load(adapter)
        return validation_loss(self.selector, rows)


LEARNERS: dict[str, Callable[[Recipe, str], Learner]] = {"selector": SelectorLearner}
"""What can be trained, by the `objective` of a job."""


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
        losses = tuple(learner.score(rows, store.get(ref)) for ref in job.adapters)
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
