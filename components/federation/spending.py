"""What the rounds of a federation release of its clients' data, and what that costs."""

from __future__ import annotations

import math
from typing import Any

from components.config import FederationConfig, UserError
from components.config.privacy import ClientPrivacy, LabelPrivacy
from components.federation.private_sums import (
    ServerSecrets,
    check_noise,
    noise_plan,
    signal_warning,
    trained_names,
)
from components.federation.protocol import ServerState
from components.models.store import AdapterStore
from components.privacy.ledger import Release, accountant_of, epsilon_of
from components.results import PrivacySpent

OUTSIDE = (
    "who is in the federation, which jobs fail and how long they take, and what the preparation does with all"
    " pairs: their numbers by client, and which prompts the server has"
)


def privacy_spent(
    config: FederationConfig, clients: int, rounds: int, repeated: int = 0
) -> PrivacySpent | None:
    """The epsilon of all that the clients have released; None without federation.privacy.

    Args:
        config: of the rounds.
        clients: of the federation (M).
        rounds: that are complete.
        repeated: see NoisePlan.releases.
    """
    privacy = config.privacy
    if privacy is None:
        return None
    if isinstance(privacy, LabelPrivacy):
        return _label(privacy)
    plan = noise_plan(config, clients)
    releases = plan.releases(rounds, repeated)
    return PrivacySpent(
        unit=privacy.unit,
        epsilon=None if privacy.simulated else epsilon_of(releases, privacy.delta),
        delta=privacy.delta,
        relation="one client contributes nothing",
        sampling=f"in turns, each client at most once in {plan.separation} rounds",
        accountant=accountant_of(plan.releases(1)),
        outside=OUTSIDE,
    )


def _label(privacy: LabelPrivacy) -> PrivacySpent:
    """Randomised response releases each verdict once, before the first job.

    All further jobs, and all that the server does, read the noised verdicts alone (post-processing, Dwork and
    Roth 2014, proposition 2.1).
    """
    releases = [Release(mechanism="randomised-response", epsilon=privacy.epsilon)]
    return PrivacySpent(
        unit=privacy.unit,
        epsilon=None if privacy.simulated else epsilon_of(releases, delta=0.0),
        delta=0.0,
        relation="one verdict is exchanged",
        sampling="each verdict is released once",
        accountant=accountant_of(releases),
        outside=f"texts{', and accuracies, which are by the true verdicts' * privacy.exact_measures}",
    )


def server_secrets(config: FederationConfig, store: AdapterStore, seed: int) -> ServerSecrets:
    """The server's secrets of a federation, which protects its clients."""
    assert isinstance(config.privacy, ClientPrivacy)
    return ServerSecrets(store, seed if config.privacy.simulated else None)


def repeated_sums(config: FederationConfig, state: ServerState[Any], store: AdapterStore) -> int:
    """How many sums of clients were released beside one for each step."""
    if not isinstance(config.privacy, ClientPrivacy):
        return 0
    return server_secrets(config, store, state.seed).repeated


def begin_private_rounds(config: FederationConfig, state: ServerState[Any], store: AdapterStore) -> list[str]:
    """Refuse rounds that cannot be protected; that noise exceeds what a round can move by far, as a sentence.

    Raises:
        UserError: naming the key, or what is missing.
    """
    if not isinstance(config.privacy, ClientPrivacy):
        return []
    plan = noise_plan(config, len(state.clients))
    adapter = store.get(state.initial)
    values = sum(adapter[name].numel() for name in trained_names(adapter, config.options.local().frozen))
    check_noise(plan, values)
    secrets = server_secrets(config, store, state.seed)
    if 0 < state.round < config.rounds and secrets.is_lost:
        raise UserError(
            f"{secrets.folder} has no secret any more, without which further rounds are not protected: resume"
            " the run where it is, or start a new run."
        )
    if not state.round and (ends := budget_ends(config, state, 0)):
        raise UserError(f"{ends}: use more noise, or a larger target.")
    return list(filter(None, [signal_warning(plan, values)]))


def budget_ends(config: FederationConfig, state: ServerState[Any], repeated: int) -> str:
    """Why no further round may begin, as a sentence; empty where one may.

    See NoisePlan.releases for `repeated`.
    """
    privacy = config.privacy
    if not isinstance(privacy, ClientPrivacy) or privacy.target_epsilon is None:
        return ""
    plan = noise_plan(config, len(state.clients))
    cost = epsilon_of(plan.releases(state.round + 1, repeated), privacy.delta)
    if cost <= privacy.target_epsilon * (1 + 1e-9):
        return ""
    shown = f"{cost:.4g}" if math.isfinite(cost) else "infinite"
    return (
        f"the rounds end after {state.round} of {config.rounds}: one more would have an epsilon of {shown},"
        f" above federation.privacy.target_epsilon {privacy.target_epsilon:g}"
    )
