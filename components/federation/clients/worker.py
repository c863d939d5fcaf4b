"""Runs jobs, and stores each finished update under its job's key.

A retried or resumed shard of clients continues with those that have no update yet.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from components.config import Recipe
from components.federation.clients import TRAINERS
from components.federation.clients.base import ClientResult, Trainer
from components.federation.clients.context import ClientContexts
from components.federation.postprocessing import PostProcessor, process_update
from components.federation.protocol import GradientJob, Job, TrainJob, Update, method_of
from components.io import write_atomically
from components.models.adapters import AdapterRef, AdapterStore
from components.progress import CLIENTS, UnitDone, progress
from components.results import Metrics, Traffic

log = logging.getLogger(__name__)


def build_trainer(recipe: Recipe, device: str) -> Trainer:
    """The trainer of a recipe's method, with its model on a device."""
    return TRAINERS.load(method_of(recipe.federation).trainer)(recipe, device)


def run_job(
    job: Job, trainer: Trainer, contexts: ClientContexts, postprocessors: Sequence[PostProcessor] = ()
) -> Update:
    """Carry out a job, or read the update of an earlier time that it was carried out.

    Args:
        job: the job.
        trainer: on the device that the caller holds.
        contexts: opens the context of the job's client, and no other.
        postprocessors: applied to what the client sends.

    Raises:
        AdapterError, TrainingError: an adapter is damaged, or training does not stay finite.
    """
    update = finished_update(job, contexts.adapters) or _carry_out(job, trainer, contexts, postprocessors)
    log.info("client %s is done", job.client, extra=progress(UnitDone(CLIENTS, job.client)))
    return update


def _carry_out(
    job: Job, trainer: Trainer, contexts: ClientContexts, postprocessors: Sequence[PostProcessor]
) -> Update:
    store = contexts.adapters
    previous_job_key = job.previous_job_key if isinstance(job, TrainJob | GradientJob) else ""
    result = trainer.run(job, contexts.open(job.client, previous_job_key))
    sent = _store_result(job, result, store, postprocessors)
    traffic = Traffic(
        received=sum(_size(ref) for ref in job.sent_adapters) if sent is not None else 0,
        sent=_size(sent) if sent is not None else 0,
        kept=result.kept_bytes,
    )
    update = Update(job, sent, result.losses, result.rows, result.metrics, traffic)
    _write_update(update, store)
    return update


def _store_result(
    job: Job, result: ClientResult, store: AdapterStore, postprocessors: Sequence[PostProcessor]
) -> AdapterRef | None:
    if result.tensors is None:
        return None
    tensors = result.tensors
    if postprocessors:
        tensors = process_update(postprocessors, tensors, store.get(job.sent_adapters[0]), job)
    return store.put(tensors)


def _write_update(update: Update, store: AdapterStore) -> None:
    content = {
        "job": update.job.key(),
        "client": update.job.client,
        "adapter": update.adapter and update.adapter.hash,
        "losses": update.losses,
        "rows": update.rows,
        "metrics": update.metrics.model_dump(),
        "traffic": update.traffic.model_dump(),
    }
    write_atomically(_update_path(update.job, store), json.dumps(content).encode())


def finished_update(job: Job, store: AdapterStore) -> Update | None:
    """The update of a job that was carried out before.

    None if it, or its adapter, is missing or damaged.
    """
    try:
        content = json.loads(_update_path(job, store).read_bytes())
        adapter = None if content["adapter"] is None else store.ref(content["adapter"])
        if adapter is not None:
            store.get(adapter)
        return Update(
            job,
            adapter,
            tuple(content["losses"]),
            content["rows"],
            Metrics.model_validate(content["metrics"]),
            Traffic.model_validate(content["traffic"]),
        )
    except (FileNotFoundError, KeyError, ValueError):  # AdapterError is a ValueError
        return None


def _update_path(job: Job, store: AdapterStore) -> Path:
    return store.root.parent / "updates" / f"{job.key()}.json"


def _size(ref: AdapterRef) -> int:
    return Path(ref.path).stat().st_size
