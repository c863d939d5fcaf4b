"""Tasks of the federated rounds: the clients' work on a device, and the server's step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.futures import PrefectFuture

from components.config import Recipe
from components.data.records import DataError
from components.federation.commits import Commits
from components.federation.strategy import Failure, Federation, Job, ServerState, Strategy, Update, build_federation
from components.models.adapters import AdapterRef, AdapterStore
from components.seeding import generator
from tasks.devices import POOL
from tasks.runs import read_json, write_json
from tasks.uncached import task


class ClientsFailed(RuntimeError):
    """Some clients of a shard failed; the others' updates are kept.

    Attributes:
        reasons: by client.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"client {name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons


@task()
def form_federation(recipe: Recipe, trains: str, prepared: Path, commits: Commits) -> Federation:
    """Who takes part, and the adapter that everybody starts from."""
    from components.data.records import read_clients

    with POOL.borrow_learner(recipe, trains) as learner:
        initial = commits.store.put(learner.initial_adapter(recipe.seed))
    return build_federation(read_clients(prepared), initial, recipe.federation.clients_per_round)


def _shard_name() -> str:
    jobs = runtime.task_run.parameters["shard"]
    return f"round {jobs[0].round + 1}: {jobs[0].kind} {', '.join(job.client for job in jobs)}"


@task(task_run_name=_shard_name)
def run_clients(shard: list[Job], recipe: Recipe, pairs: Path, store: Path) -> list[Update]:
    """Carry out the jobs of a shard of clients, one after the other, on one device.

    A client that fails does not keep the others from their work. Updates that an earlier attempt finished are taken
    as they are, so a retry repeats only what failed.

    Raises:
        ClientsFailed: after all were tried, naming those that failed.
    """
    from components.federation.clients import run_job

    updates, reasons = [], {}
    with POOL.borrow_learner(recipe, shard[0].objective, mapped=True) as learner:
        for job in shard:
            try:
                updates.append(run_job(job, learner, pairs, AdapterStore(store)))
            except Exception as error:
                reasons[job.client] = f"{type(error).__name__}: {error}"
    if reasons:
        raise ClientsFailed(reasons)
    return updates


def gather(futures: Sequence[PrefectFuture], shards: Sequence[list[Job]], store: AdapterStore) -> list[Update | Failure]:
    """An update or a failure for each job, once all mapped tasks have ended.

    Of a shard whose task failed for good, the clients that had finished still count.
    """
    from components.federation.clients import finished_update

    outcomes: list[Update | Failure] = []
    for future, jobs in zip(futures, shards, strict=True):
        future.wait()
        if future.state.is_completed():
            outcomes += future.result()
            continue
        error = future.result(raise_on_failure=False)
        reasons = error.reasons if isinstance(error, ClientsFailed) else {}
        for job in jobs:
            update = finished_update(job, store)
            outcomes.append(update or Failure(job.client, reasons.get(job.client, f"{future.state.name}: {future.state.message}")))
    return outcomes


@task(task_run_name="close step {state.step}")
def close_step(
    strategy: Strategy, state: ServerState, jobs: list[Job], outcomes: list[Update | Failure], recipe: Recipe, commits: Commits
) -> tuple[ServerState, dict[str, Any]]:
    """Screen the updates, check the quorum, aggregate and commit."""
    from components.federation import rounds

    return rounds.close_step(strategy, state, jobs, outcomes, recipe.federation.quorum, commits)


def sample_evenly(pairs: list[dict[str, Any]], most: int | None, seed: int) -> list[dict[str, Any]]:
    """At most so many pairs, in their order: a seeded sample in which every client has as many as the others, as far as it has them."""
    if most is None or most >= len(pairs):
        return pairs
    turns: dict[str, list[int]] = {}
    for n in generator(seed, "accuracy pairs").permutation(len(pairs)):
        turns.setdefault(pairs[n]["client_id"], []).append(int(n))
    order = sorted((turn, client, n) for client, rows in turns.items() for turn, n in enumerate(rows))
    return [pairs[n] for n in sorted(n for _, _, n in order[:most])]


@task()
def measure_accuracy(
    recipe: Recipe, trains: str, prepared: Path, store: Path, state: ServerState, record: Path, personal: bool = False, private: bool = False,
) -> dict[str, Any]:
    """Accuracy on the clients' held-out pairs; measured once, and read from the record afterwards.

    Of the majority of all adapters; and, where clients are assigned adapters, under `assigned` of the one that each uses.
    Of a personal method it is that of each client's own adapter on its own pairs, and where clients have parts of their own
    (`private`), of the server's adapter with these, measured in the client's place.
    """
    from components.data.records import read_rows
    from components.evaluation.accuracy import assigned_accuracy, client_accuracy
    from components.federation.learners import joined
    from components.federation.private import home_of

    if record.is_file():
        return read_json(record)
    names, pairs = sorted(state.adapters), read_rows(prepared / "pairs.parquet", split="test").to_list()
    own = {client.name: state.adapters[client.name] if personal else state.adapters[names[0]] for client in state.federation.clients} if personal or private else {}
    if own:
        pairs = [pair for pair in pairs if pair["client_id"] in own]
        if not pairs:
            raise DataError("no held-out pair belongs to a client that trains: each client's own adapter is measured on its own pairs; raise data.test, or use fewer clients.")
    held_out = sample_evenly(pairs, recipe.federation.accuracy_pairs, recipe.seed)
    if own:
        found = []
        with POOL.borrow_learner(recipe, trains) as learner:
            for name in sorted({pair["client_id"] for pair in held_out}):
                rows = [n for n, pair in enumerate(held_out) if pair["client_id"] == name]
                some, stored = [held_out[n] for n in rows], AdapterStore(store)
                found.append((rows, learner.compare(some, [stored.get(own[name])], home_of(name, stored, prepared / "pairs.parquet", state.memory.get("last", {}).get(name, "")) if private else None)))
        compared = joined(found)
        measured = client_accuracy(compared.margins, held_out, compared.rewards, compared.others)
        write_json(record, measured)
        return measured
    distinct = {ref.hash: ref for ref in state.adapters.values()}  # before the rounds all are the same
    with POOL.borrow_learner(recipe, trains) as learner:
        compared = learner.compare(held_out, [AdapterStore(store).get(ref) for ref in distinct.values()])
    compared = compared.of([list(distinct).index(state.adapters[name].hash) for name in names])
    measured = client_accuracy(compared.margins, held_out, compared.rewards, compared.others)
    if state.assigned:
        measured["assigned"] = assigned_accuracy(compared.margins, names, state.assigned, held_out, compared.rewards, compared.others)
    write_json(record, measured)
    return measured


@task()
def export_adapters(recipe: Recipe, trains: str, store: Path, adapters: dict[str, AdapterRef], folder: Path) -> dict[str, Path]:
    """Write adapters as PEFT folders, each under its name as far as a folder can have it."""
    from components.federation.clients import trained_model
    from components.models.adapters import export_adapter, folder_names

    stored, model = AdapterStore(store), trained_model(recipe, trains)
    folders = folder_names(list(adapters))
    return {name: export_adapter(stored.get(ref), model.lora, model.backbone.name, folder / folders[name]) for name, ref in adapters.items()}
