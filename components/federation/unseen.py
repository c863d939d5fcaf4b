"""Clients that took part in no round: what the server sends them, and what they make of it with own pairs.

    state = method.admit(state, clients)                       # the adapters that they are sent
    for each step of method.joining:                           # none where a model is used as it is
        jobs  = method.plan(state, server)                     # choose a selector, or train for a round
        state = method.join(state, updates)                    # what they have afterwards
    outcome = method.outcome(state)

Nothing of them comes back into the federation. The papers of the methods name no such clients; each
method's steps are those of a client in its first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.config import FederationConfig
from components.federation.method import Method
from components.federation.protocol import Client, Job, MeasureJob
from components.federation.rounds import ask_clients
from components.federation.server import Server, State
from components.federation.transport import Transport
from components.models.store import AdapterStore
from components.results import Outcome


def unseen_clients(counts: Mapping[str, Mapping[str, int]], groups: Mapping[str, str | None]) -> list[Client]:
    """Clients of these numbers of pairs by split, and of these groups; they have no weight in any mean."""
    return [
        Client(
            name=name,
            training_pairs=splits["train"],
            validation_pairs=splits["validation"],
            weight=0.0,
            group=groups.get(name),
        )
        for name, splits in sorted(counts.items())
    ]


def join_clients(
    method: Method,
    state: State,
    clients: Sequence[Client],
    transport: Transport,
    config: FederationConfig,
    store: AdapterStore,
) -> Outcome:
    """The outcome of clients that took part in no round.

    Args:
        method: that of the rounds.
        state: after the rounds of `Method.joining`.
        clients: see unseen_clients.
        transport: to these clients.
        config: of the rounds.
        store: of the server's adapters.

    Raises:
        UserError: a client has no answer.
    """
    steps = method.joining(config, 0).steps
    state = method.admit(state, clients)
    # The first step is in the last round, unless fine-tuning takes several rounds.
    first = max(0, config.rounds - steps)
    for number in range(first, first + steps):
        state = state.model_copy(update={"round": number})
        jobs = plan_joining(method, state, config, store)
        updates, _ = ask_clients(jobs, transport, config, quorum=1)
        state = method.join(state, updates)
    return method.outcome(state)


def plan_joining(method: Method, state: State, config: FederationConfig, store: AdapterStore) -> list[Job]:
    """The jobs of a step of such clients, all of which take part.

    Losses are measured on training pairs, of which alone they have a few to use.
    """
    everyone = config.model_copy(update={"clients_per_round": len(state.clients)})
    return [
        job.model_copy(update={"split": "train"}) if isinstance(job, MeasureJob) else job
        for job in method.plan(state, Server(everyone, store))
    ]
