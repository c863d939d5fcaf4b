"""Runs jobs, and stores each finished update under its job's key.

A retried or resumed shard of clients continues with those that have no update yet.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from components.config import FederationConfig, Recipe, UserError
from components.config.privacy import ClientPrivacy, LabelPrivacy
from components.federation.clients import TRAINERS
from components.federation.clients.context import ClientContext, ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.postprocessing import Context, origin_of, split_counts
from components.federation.private_sums import contribution
from components.federation.protocol import ClientResult, Failure, Job, TrainJob, Update
from components.io import write_atomically
from components.models.store import Adapter, AdapterStore
from components.privacy.labels import NoisedVerdicts
from components.privacy.secrets import simulated_secret
from components.progress import ClientDone, progress
from components.results import Traffic
from components.seeding import derive

log = logging.getLogger(__name__)


def build_trainer(recipe: Recipe, device: str, name: str = "") -> Trainer:
    """A trainer with its model on a device; without a name that of the recipe's method."""
    return TRAINERS.load(name or recipe.federation.options.trainer)(recipe, device)


def trainer_key(recipe: Recipe, name: str = "") -> str:
    """Equal for recipes that one trainer carries out; see build_trainer for the name."""
    sections = ("selector", "policy", "federation", "rewards", "runtime")
    return name + recipe.fingerprint(*sections, *(("alignment", "evaluation") if name else ()))


def failure(client: str, error: BaseException, contexts: ClientContexts) -> Failure:
    """What the server learns of a job's error: its type, and a code.

    The text may quote rows of the client, and stays in the client's private store.
    """
    code = contexts.open(client).store.record_error(error)
    return Failure(client, f"{type(error).__name__} (errors/{code}.txt of its private store)")


def run_job(job: Job, trainer: Trainer, contexts: ClientContexts, recipe: Recipe) -> Update:
    """Carry out a job, or read the update of an earlier time that it was carried out.

    What the client reads and sends is protected as the recipe says, and its post-processors are applied.
    """
    update = finished_update(job, contexts.adapters) or _carry_out(job, trainer, contexts, recipe)
    log.info("client %s is done", job.client, extra=progress(ClientDone(job.client)))
    return update


def _carry_out(job: Job, trainer: Trainer, contexts: ClientContexts, recipe: Recipe) -> Update:
    from components.learning.loop import TrainingError  # imports transformers

    store, config = contexts.adapters, recipe.federation
    postprocessors = config.postprocessors
    protects_client = isinstance(config.privacy, ClientPrivacy) and not contexts.outside
    if protects_client and not isinstance(job, TrainJob):
        raise UserError(
            f"a job '{job.kind}' of a client would give away more than the sums that federation.privacy"
            " accounts for: unit 'client' allows training jobs alone"
        )
    own = open_context(job, contexts, recipe)
    try:
        result = trainer.run(job, own)
    except TrainingError as error:
        if not protects_client:
            raise
        own.store.record_error(error)  # that it fails would tell of its pairs
        result = ClientResult(tensors=store.get(job.received[0]))
    kept = result.kept_bytes
    if postprocessors:
        moving, counts = (None, {}) if result.tensors is None else split_counts(result.tensors)
        result = replace(result, tensors=moving)
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
                    raise UserError(
                        f"the post-processor '{postprocessor.kind}' adds or drops the {part} of a job"
                        f" '{job.kind}': return a copy of the result with what it changes"
                        " (dataclasses.replace)"
                    )
            result = changed
        if result.tensors is not None:
            result = replace(result, tensors=result.tensors | counts)
    if protects_client:
        result = protected(result, store.get(job.received[0]), config)
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


def protected(result: ClientResult, origin: Adapter, config: FederationConfig) -> ClientResult:
    """A client's contribution to a sum with noise: nothing else of the result leaves the client."""
    assert isinstance(config.privacy, ClientPrivacy) and result.tensors is not None
    cells = contribution(result.tensors, origin, config.privacy.clip, config.options.local().frozen)
    return ClientResult(tensors=cells, kept_bytes=result.kept_bytes)


def open_context(job: Job, contexts: ClientContexts, recipe: Recipe) -> ClientContext:
    """The context in which a client carries a job out, whose rows have noised verdicts with privacy."""
    context = contexts.open(job.client, job.previous_job_key)
    privacy = recipe.federation.privacy
    if not isinstance(privacy, LabelPrivacy):
        return context
    if privacy.simulated:
        secret = simulated_secret(recipe.seed, job.client)
    else:
        secret = contexts.client_secret(job.client)
    verdicts = NoisedVerdicts(privacy.flip, secret, privacy.debias, privacy.exact_measures)
    return replace(context, verdicts=verdicts)


def finished_update(job: Job, store: AdapterStore) -> Update | None:
    """The update of a job that was carried out before; None if it, or its adapter, is missing or damaged."""
    try:
        update = Update.model_validate_json(update_path(job, store).read_bytes())
        if update.adapter is not None:
            store.get(update.adapter)
    except (FileNotFoundError, ValueError):  # AdapterError and ValidationError are ValueErrors
        return None
    return update


def update_path(job: Job, store: AdapterStore) -> Path:
    """Where the update of a job is stored: in a folder beside that of the adapters."""
    return store.root.parent / "updates" / f"{job.key()}.json"
