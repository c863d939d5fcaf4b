"""What a step's jobs give: the updates that are accepted, or sums of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from components.federation.aggregation import movement
from components.federation.aggregators import Sum, sum_updates
from components.federation.postprocessing import origin_of, split_counts
from components.federation.protocol import Failure, Job, Update, by_client
from components.models.store import Adapter, AdapterError, AdapterHash, AdapterStore, check_adapter
from components.results import ClientRecord, ClientTotal

Weights = Mapping[str, Mapping[str, float]]
"""By name of a sum, the weight of each client that it is of; a client is in one sum."""


@dataclass(frozen=True)
class StepAnswers:
    """The answers to the jobs of a step, in the order of the clients' names.

    A step of single updates has `updates`; one of sums has `sums`, and no update.
    """

    clients: Sequence[str]  # whose updates are accepted
    updates: Sequence[Update] = ()
    sums: Mapping[str, Sum] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)  # keys of the jobs after which clients keep a state
    # What the clients did: each, where a step has single updates or the clients permit it; else the total.
    figures: Mapping[str, ClientRecord] = field(default_factory=dict)
    total: ClientTotal | None = None
    failed: Sequence[Failure] = ()
    refused: Sequence[Failure] = ()


def collect(
    jobs: Sequence[Job],
    answers: Iterable[Update | Failure],
    store: AdapterStore,
    template: Adapter,
    max_ratio: float | None = None,
    fault: Callable[[Adapter], str] | None = None,
) -> StepAnswers:
    """Separate the updates of a step that can be used from others; arguments as of validate_updates."""
    updates, failed, foreign = match_answers(jobs, answers)
    received = {job.client: job.received[0] for job in jobs}
    accepted, damaged = validate_updates(updates, store, template, received, max_ratio, fault)
    fields = ClientRecord.model_fields
    return StepAnswers(
        clients=[update.client for update in accepted],
        updates=accepted,
        kept={update.client: update.job for update in accepted if update.traffic.kept},
        figures={
            update.client: ClientRecord(**{name: getattr(update, name) for name in fields})
            for update in accepted
        },
        failed=failed,
        refused=by_client([*damaged, *foreign]),
    )


def add_up(answers: StepAnswers, store: AdapterStore, weights: Weights, client_figures: bool) -> StepAnswers:
    """The sums of accepted updates, which are dropped; the clients' figures too unless they are permitted.

    A sum to which no client has contributed is left out.
    """
    sums = {}
    for name, shares in weights.items():
        members = [update for update in answers.updates if update.client in shares]
        if members:
            sums[name] = sum_updates(store, members, shares)
    summed = replace(answers, updates=(), sums=sums)
    if client_figures or not answers.clients:
        return summed
    return replace(summed, figures={}, total=ClientTotal.of(list(answers.figures.values())))


def match_answers(
    jobs: Sequence[Job], answers: Iterable[Update | Failure]
) -> tuple[list[Update], list[Failure], list[Failure]]:
    """The answers to the jobs of a step: updates, failures, and what is refused.

    An update that names another job, or that is a second one, is refused. A client whose job has no
    answer has failed. Each list is in the order of the clients' names.
    """
    expected = {job.client: (job.key(), job.adapter_name) for job in jobs}
    updates: dict[str, Update] = {}
    failures: dict[str, Failure] = {}
    refused = []
    for answer in answers:
        client = answer.client
        if isinstance(answer, Failure):
            failures[client] = answer
        elif (answer.job, answer.adapter_name) != expected.get(client):
            refused.append(Failure(client, f"its update answers job {answer.job}, not that of this step"))
        elif client in updates:
            refused.append(Failure(client, "it has sent a second update in this step"))
        else:
            updates[client] = answer
    for client in expected.keys() - updates.keys() - failures.keys() - {other.client for other in refused}:
        failures[client] = Failure(client, "there is no answer")
    return by_client(list(updates.values())), by_client(list(failures.values())), by_client(refused)


def validate_updates(
    updates: Sequence[Update],
    store: AdapterStore,
    template: Adapter,
    received: Mapping[str, AdapterHash] = MappingProxyType({}),
    max_ratio: float | None = None,
    fault: Callable[[Adapter], str] | None = None,
) -> tuple[list[Update], list[Failure]]:
    """Separate updates that can be aggregated from others, in the order of the clients' names.

    An update with NaN or infinite values, another shape or type, or a missing or an additional tensor
    is refused, and the reason names the tensor. So is one whose norm, after what the client received is
    subtracted, is more than `max_ratio` times the median of those in the step that are not 0; two updates
    have the smaller one as their median, and a single one is accepted.

    Args:
        template: has the names, shapes and types of the expected tensors.
        received: the adapter that each client was sent.
        max_ratio: None accepts any norm.
        fault: says why tensors cannot be used; empty if they can.
    """
    accepted = []
    refused = []
    norms: dict[str, float] = {}
    origin = lru_cache(maxsize=1)(store.get)  # most methods send all clients the same adapter
    for update in by_client(updates):
        try:
            if update.adapter is not None:
                tensors = store.get(update.adapter)
                check_adapter(tensors, template)
                if fault is not None and (reason := fault(tensors)):
                    raise AdapterError(f"its update {reason}")
                if max_ratio is not None:
                    moved, _ = split_counts(tensors)
                    norms[update.client] = movement(moved, origin_of(moved, origin(received[update.client])))
            accepted.append(update)
        except AdapterError as error:
            refused.append(Failure(update.client, str(error)))
    positive = [norm for norm in norms.values() if norm > 0]
    median = statistics.median_low(positive) if positive else 0.0
    for client, norm in norms.items():
        if max_ratio is not None and norm > max_ratio * median:
            reason = (
                f"its update has norm {norm:.3g}, {norm / median:.3g} times the median of the clients"
                f" (federation.max_update_ratio {max_ratio:g})"
            )
            refused.append(Failure(client, reason))
    outliers = {failure.client for failure in refused}
    return [update for update in accepted if update.client not in outliers], by_client(refused)
