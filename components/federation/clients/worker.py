"""Runs jobs, and stores each finished update under its job's key.

A retried or resumed shard of clients continues with those that have no update yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from components.config import Recipe
from components.federation.clients import TRAINERS
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.method import method_of
from components.federation.postprocessing import Context, PostProcessor, origin_of
from components.federation.protocol import FederationError, Job, PrivateJob, Update
from components.io import write_atomically
from components.models.store import AdapterStore
from components.progress import CLIENTS, UnitDone, progress
from components.results import Traffic
from components.seeding import derive

log = logging.getLogger(__name__)


def build_trainer(recipe: Recipe, device: str, name: str = "") -> Trainer:
    """A trainer with its model on a device; without a name that of the recipe's method."""
    return TRAINERS.load(name or method_of(recipe.federation).trainer)(recipe, device)


def run_job(
    job: Job, trainer: Trainer, contexts: ClientContexts, postprocessors: Sequence[PostProcessor] = ()
) -> Update:
    """Carry out a job, or read the update of an earlier time that it was carried out.

    The post-processors are applied to what the client sends.
    """
    update = finished_update(job, contexts.adapters) or _carry_out(job, trainer, contexts, postprocessors)
    log.info("client %s is done", job.client, extra=progress(UnitDone(CLIENTS, job.client)))
    return update


def _carry_out(
    job: Job, trainer: Trainer, contexts: ClientContexts, postprocessors: Sequence[PostProcessor]
) -> Update:
    store = contexts.adapters
    previous_job_key = job.previous_job_key if isinstance(job, PrivateJob) else ""
    result = trainer.run(job, contexts.open(job.client, previous_job_key))
    kept = result.kept_bytes
    if postprocessors:
        origin = {} if result.tensors is None else origin_of(result.tensors, store.get(job.received[0]))
        context = Context(
            round=job.round,
            kind=job.kind,
            adapter_name=job.adapter_name,
            participants=job.participants,
            weight=job.weight,
            client=job.client,
            seed=derive(job.seed, "postprocessing", *(() if job.is_step else (job.client,))),
            origin=origin,
        )
        for postprocessor in postprocessors:
            changed = postprocessor.at_client(result, context)
            for part in ("tensors", "output"):
                if (getattr(changed, part) is None) != (getattr(result, part) is None):
                    raise FederationError(
                        f"the post-processor '{postprocessor.kind}' adds or drops the {part} of a job"
                        f" '{job.kind}': return a copy of the result with what it changes"
                        " (dataclasses.replace)"
                    )
            result = changed
    sent = None if result.tensors is None else store.put(result.tensors)
    traffic = Traffic(
        received=sum(map(store.size, set(job.received))),
        sent=store.size(sent) if sent is not None else 0,
        kept=kept,
    )
    update = Update(
        job=job.key(),
        client=job.client,
        adapter_name=job.adapter_name,
        adapter=sent,
        losses=list(result.losses),
        rows=result.rows,
        metrics=result.metrics,
        traffic=traffic,
        output=result.output,
    )
    write_atomically(update_path(job, store), update.model_dump_json().encode())
    return update


def finished_update(job: Job, store: AdapterStore) -> Update | None:
    """The update of a job that was carried out before; None if it, or its adapter, is missing or damaged."""
    try:
        update = Update.model_validate_json(update_path(job, store).read_bytes())
        if update.adapter is not None:
            store.get(update.adapter)
    except (FileNotFoundError, ValueError):  # AdapterError and ValidationError are ValueErrors
        return None
    return update.model_copy(update={"adapter_name": job.adapter_name})  # files of earlier versions have none


def update_path(job: Job, store: AdapterStore) -> Path:
    """Where the update of a job is stored: in a folder beside that of the adapters."""
    return store.root.parent / "updates" / f"{job.key()}.json"
