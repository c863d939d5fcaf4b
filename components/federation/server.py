"""What the steps of a method use at the server: sampling, training jobs, and combinations of updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from components.config import FederationConfig
from components.config.privacy import ClientPrivacy
from components.federation import aggregation
from components.federation.aggregators import Aggregator, Contributions, Sum, SumAggregator
from components.federation.postprocessing import Context, origin_of, split_counts
from components.federation.private_sums import ServerSecrets, noise_plan, noised_mean
from components.federation.protocol import ServerState, TrainJob, sent_adapters
from components.federation.sampling import sample_clients, take_turns
from components.federation.step_answers import StepAnswers
from components.models.store import AdapterHash, AdapterStore
from components.seeding import derive

if TYPE_CHECKING:
    from components.models.store import Adapter

State = ServerState[Any]
MIXED_TOGETHER = 16
"""Clients whose mixtures are computed in one pass over the adapters, and held in memory."""


@dataclass
class Server:
    """What a step of the server uses; all combinations of updates are made here."""

    config: FederationConfig
    store: AdapterStore
    answers: StepAnswers = field(default_factory=lambda: StepAnswers(()))  # to the jobs of the step
    processing: list[JsonValue] = field(default_factory=list)  # states of the post-processors
    metrics: dict[str, float] = field(default_factory=dict)  # of the post-processors
    noise: str = ""  # name of the noise of the last sum, see private_sums

    def __post_init__(self) -> None:
        self.processing = self.processing or [None] * len(self.config.postprocessors)

    def sample(self, state: State) -> list[str]:
        """The clients of a round."""
        choose = take_turns if self.config.sampling == "round-robin" else sample_clients
        return choose(state.federation.names, self.config.clients_per_round, state.seed, state.round)

    def train_jobs(
        self,
        state: State,
        sent: Callable[[str], tuple[str, AdapterHash]],
        clients: Sequence[str] | None = None,
    ) -> list[TrainJob]:
        """A training job for each client (None: the sampled ones), on the adapter that it is sent."""
        jobs = []
        for name in self.sample(state) if clients is None else clients:
            adapter_name, adapter = sent(name)
            seed = derive(state.seed, "train", state.round, name)
            key = state.memory.job_keys.get(name, "")
            job = TrainJob(
                client=name,
                round=state.round,
                seed=seed,
                adapter_name=adapter_name,
                adapters=(adapter,),
                previous_job_key=key,
            )
            jobs.append(job)
        return jobs

    def contributions(self, state: State, members: Collection[str] | None = None) -> Contributions:
        """The single updates of some clients (None: of all) as an aggregator takes them.

        Raises:
            TypeError: the step is one of sums.
        """
        if self.answers.sums:
            raise TypeError(f"the step has sums, and no single update: {', '.join(self.answers.sums)}")
        updates = [one for one in self.answers.updates if members is None or one.client in members]
        weights = state.federation.weights
        return Contributions(self.store, updates, [weights[one.client] for one in updates], len(weights))

    def mean(self, state: State, name: str, before: Adapter) -> tuple[Adapter, Sum]:
        """The weighted mean of the sum of this name, post-processed, and the sum.

        Args:
            state: before the step.
            name: of the sum.
            before: where the tensors start from, see `process`.
        """
        total = self.answers.sums[name]
        mean = aggregation.mean(total.tensors, total.weight)
        return self.process(state, mean, before, name, total.clients), total

    def combined(
        self,
        state: State,
        before: Adapter,
        adapter_name: str,
        aggregator: Aggregator,
        members: Collection[str] | None = None,
        frozen: Sequence[str] = (),
    ) -> tuple[Adapter, dict[str, float]]:
        """The combination of the updates of some clients (None: of all), post-processed, and its metrics.

        In a step of sums it is that of the sum of the adapter's name.

        Args:
            state: before the step.
            before: the server's adapter before the step.
            adapter_name: of this adapter, which the clients have trained.
            aggregator: combines the updates.
            members: names of the clients.
            frozen: LoRA factors that no client trains, which stay the server's.
        """
        if isinstance(self.config.privacy, ClientPrivacy):
            return self._noised(state, before, adapter_name, tuple(frozen))
        if self.answers.sums:
            if not isinstance(aggregator, SumAggregator):
                raise TypeError(
                    f"the aggregator '{aggregator.kind}' needs single updates, and the step has sums"
                )
            total = self.answers.sums[adapter_name]
            names: Sequence[str] = total.clients
            combined, metrics = aggregator.finish(before, total)
        else:
            contributions = self.contributions(state, members)
            names = contributions.names
            combined, metrics = aggregator.combine(before, contributions)
        # The mean of equal factors differs from them by rounding, and a weighted sum may scale them.
        for factor in frozen:
            combined |= {name: tensor for name, tensor in before.items() if f".lora_{factor}." in name}
        return self.process(state, combined, before, adapter_name, names), metrics

    def _noised(
        self, state: State, before: Adapter, adapter_name: str, frozen: tuple[str, ...]
    ) -> tuple[Adapter, dict[str, float]]:
        """As `combined`, of contributions to a sum with noise, see private_sums."""
        if set(self.answers.sums) != {adapter_name}:
            raise TypeError(
                f"clients are protected by one sum, and the step has {', '.join(self.answers.sums) or 'none'}"
            )
        total = self.answers.sums[adapter_name]
        plan = noise_plan(self.config, len(state.clients))
        secrets = ServerSecrets(self.store, state.seed if plan.privacy.simulated else None)
        purpose = (str(state.step), adapter_name)
        combined, self.noise = noised_mean(before, total.tensors, plan, secrets, purpose, self.noise, frozen)
        return self.process(state, combined, before, adapter_name, total.clients), {"weight_sum": 1.0}

    def combine(
        self,
        state: State,
        adapter_name: str,
        aggregator: Aggregator,
        members: Collection[str] | None = None,
        frozen: Sequence[str] = (),
    ) -> tuple[AdapterHash, dict[str, float]]:
        """Store a combination as the server's new adapter; arguments as of `combined`.

        Returns:
            the adapter, and the metrics of the aggregator, server_step (how far the adapter moved)
            and server_norm.
        """
        before = self.store.get(state.adapters[adapter_name])
        combined, metrics = self.combined(state, before, adapter_name, aggregator, members, frozen)
        return self.store.put(combined), metrics | aggregation.step_metrics(combined, before)

    def mix(
        self, state: State, weights: Mapping[str, Mapping[str, float]], previous: Mapping[str, AdapterHash]
    ) -> tuple[dict[str, AdapterHash], dict[str, float]]:
        """Store sum_i w_ki theta_i for each client k of the step.

        Args:
            state: before the step.
            weights: w_ki by client k and client i.
            previous: the adapter of each client before the step.

        Returns:
            the mixtures by client, and the distance of each from the client's previous adapter, as
            the metric `<client>/server_step`.
        """
        sent = sent_adapters(self.answers.updates)
        trained = dict(zip(sent, self.store.open(sent.values()), strict=True))
        names = list(weights)
        adapters: dict[str, AdapterHash] = {}
        metrics: dict[str, float] = {}
        for start in range(0, len(names), MIXED_TOGETHER):
            targets = names[start : start + MIXED_TOGETHER]
            members = sorted(set().union(*(weights[name] for name in targets)))
            rows = np.array([[weights[name].get(member, 0.0) for member in members] for name in targets])
            sources = [trained[member] for member in members]
            for name, mixture in zip(targets, aggregation.mixtures(sources, rows), strict=True):
                before = self.store.get(previous[name])
                combined = self.process(state, mixture, before, name, list(weights[name]))
                adapters[name] = self.store.put(combined)
                metrics[f"{name}/server_step"] = aggregation.distance(combined, before)
        return adapters, metrics

    def process(
        self, state: State, combined: Adapter, before: Adapter, adapter_name: str, members: Sequence[str]
    ) -> Adapter:
        """Apply the post-processors to a combination of the updates of clients.

        Args:
            state: before the step.
            combined: the combination.
            before: the server's adapter before the step; tensors of other names start from 0.
            adapter_name: name of what is combined.
            members: names of the clients.
        """
        shares = state.federation.weights
        combined, counts = split_counts(combined)
        context = Context(
            round=state.round,
            kind=state.phase,
            adapter_name=adapter_name,
            participants=tuple(members),
            weight=sum(shares[name] for name in members),
            seed=derive(state.seed, "postprocessing", state.step, adapter_name),
            origin=origin_of(combined, before) if self.config.postprocessors else {},
        )
        kinds = [postprocessor.kind for postprocessor in self.config.postprocessors]
        for place, postprocessor in reversed(list(enumerate(self.config.postprocessors))):
            done = postprocessor.at_server(combined, context, self.processing[place])
            combined = done.tensors
            # As it is committed, so that a resumed run has the same.
            self.processing[place] = json.loads(json.dumps(done.state))
            name = postprocessor.kind + (f"-{place + 1}" if kinds.count(postprocessor.kind) > 1 else "")
            self.metrics |= {f"{adapter_name}/{name}/{key}": value for key, value in done.metrics.items()}
        return combined | counts
