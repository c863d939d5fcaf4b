"""Tasks of the federated rounds: the clients' start, and measurements between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config import Recipe
from components.config.privacy import ClientPrivacy, LabelPrivacy
from components.data.records import (
    UNSEEN,
    DataError,
    pairs_digest,
    read_clients,
    read_true_clusters,
)
from components.data.sources.owners import has_owners
from components.evaluation.accuracy import accuracy_report, count_evenly
from components.federation import rounds
from components.federation.commits import Commits
from components.federation.local import rewarded_adapters
from components.federation.multi_objective import REWARDS_MEASURE
from components.federation.outcome import export_adapters, measure_jobs
from components.federation.private_sums import ServerSecrets
from components.federation.protocol import Federation, ServerState, build_federation
from components.federation.spending import privacy_spent
from components.federation.transport import Transport
from components.federation.unseen import join_clients, unseen_clients
from components.io import file_hash, stored
from components.learning.pair_scores import PairFigures
from components.models.store import AdapterHash
from components.names import file_name
from components.recipes.privacy_checks import check_delta
from components.results import (
    AccuracyReport,
    ExportedAdapter,
    FederationResult,
    Metrics,
    Outcome,
    RoundEvaluation,
    StepRecord,
    UnseenResult,
)
from components.versions import ROUNDS
from tasks.devices import POOL, run_on_workers
from tasks.prefect_transport import (
    TRANSPORTS,
    outside_counts,
    outside_transport,
    rounds_contexts,
    unseen_contexts,
)
from tasks.rewards import rewards_fingerprint
from tasks.runs import RESULT, Run, published_digest
from tasks.uncached import task

if TYPE_CHECKING:
    from components.federation.clients.multi_objective_trainer import MultiObjectiveTrainer


@task()
def form_federation(run: Run, recipe: Recipe, commits: Commits) -> Federation:
    """The participating clients, and the adapter that all of them start from."""
    with POOL.borrow_trainer(recipe) as trainer:
        initial = commits.store.put(trainer.initial_adapter(recipe.seed))
    groups = read_true_clusters(run.prepared)
    clients_per_round = recipe.federation.clients_per_round
    unseen = recipe.data.unseen_clients
    federation = build_federation(read_clients(run.prepared), initial, clients_per_round, groups, unseen)
    if isinstance(recipe.federation.privacy, ClientPrivacy):
        check_delta(recipe.federation.privacy, len(federation.clients))
    return federation


def check_secrets(run: Run, recipe: Recipe, records: Sequence[StepRecord]) -> None:
    """Refuse further rounds with new noise for verdicts that were released with other noise.

    Raises:
        DataError: clients that took part have no secret any more.
    """
    privacy = recipe.federation.privacy
    if not isinstance(privacy, LabelPrivacy) or privacy.simulated or recipe.runtime.transport != "prefect":
        return
    took_part = {name for record in records for name in record.clients}
    if missing := rounds_contexts(run).without_secret(sorted(took_part)):
        raise DataError(
            f"the private store of client {missing[0]} has no secret any more, so that its verdicts would be"
            " released a second time with other noise (federation.privacy): resume the run where its folder"
            " federation-clients is complete, or start a new run."
        )


def open_commits(run: Run, recipe: Recipe) -> Commits:
    """The commits of a run; their fingerprint covers all that the bytes of the rounds depend on."""
    method = recipe.federation.options
    prompts = ["prompts.parquet"] if method.sampling else []
    first = published_digest(run, recipe, pairs_digest(run.prepared))[:16]
    others = [file_hash(run.prepared / name)[:16] for name in prompts]
    parts = [
        recipe.fingerprint(*recipe.rounds_sections),
        first + rewards_fingerprint(recipe.rewards, run.prepared),
        *others,
        *(file_hash(path)[:16] for path in [run.prepared / UNSEEN / "pairs.parquet"] if path.is_file()),
        *([recipe.runtime.transport] if recipe.runtime.transport != "prefect" else []),  # has private stores
        *([] if has_owners(recipe) else [f"threads{recipe.runtime.torch_threads}x{recipe.runtime.workers}"]),
        f"v{ROUNDS}",
    ]
    clients = [name for name, splits in read_clients(run.prepared).items() if splits["train"] > 0]
    return Commits(run.federation, "-".join(parts), clients)


def evaluate_state(
    run: Run, recipe: Recipe, state: ServerState[Any], transport: Transport
) -> RoundEvaluation:
    """Measure a state on held-out pairs, and by the method's own measures.

    The measurement is stored, and read if it is stored.
    """
    method = recipe.federation.options

    def measure() -> RoundEvaluation:
        common = {"run": run, "recipe": recipe, "done": state.round}
        calls = [
            common | {"client": client, "adapter": adapter}
            for client, adapter in (rewarded_adapters(state) if method.sampling else {}).items()
        ]
        rewards = run_on_workers(measure_rewards, calls, recipe.runtime, run.folder)
        return RoundEvaluation(
            rounds_done=state.round,
            accuracy=measure_accuracy(run, recipe, method.outcome(state), state.round, transport),
            measures={REWARDS_MEASURE: Metrics.mean(rewards)} if rewards else {},
        )

    return RoundEvaluation.stored(run.federation / f"evaluation-{state.round:05d}.json", measure)


@task(name="measure rewards after {done} rounds")
def measure_rewards(run: Run, recipe: Recipe, adapter: AdapterHash, client: str, done: int) -> Metrics:
    """Rewards of a policy on the server's held-out prompts; they have a file, which benchmarks share.

    Args:
        client: whose policy it is; empty where all clients use the same.
    """

    def measure() -> dict[str, Any]:
        with POOL.borrow_trainer(recipe) as trainer:
            measuring = cast("MultiObjectiveTrainer", trainer)
            return measuring.measure_rewards(adapter, rounds_contexts(run).open("")).model_dump(mode="json")

    name = "-".join(filter(None, (REWARDS_MEASURE, file_name(client) if client else "")))
    return Metrics.model_validate(stored(run.federation / f"{name}-{done:05d}.json", measure))


def measure_accuracy(
    run: Run, recipe: Recipe, outcome: Outcome, done: int, transport: Transport
) -> AccuracyReport:
    """Accuracy of an outcome, after `done` rounds, on the held-out pairs, which each client measures itself.

    Raises:
        DataError: no held-out pair belongs to a client that it can measure.
    """
    if isinstance(recipe.federation.privacy, ClientPrivacy):
        return measure_outside(run, recipe, outcome, done)
    split = recipe.federation.accuracy_split
    counts = {name: splits[split] for name, splits in read_clients(run.prepared).items()}
    if not any(counts.values()) and split == "validation":
        raise DataError(
            "federation.accuracy_split is 'validation', but the prepared data have no validation pairs: raise"
            " data.validation, or the source's own option for them."
        )
    if outcome.clients:
        counts = {name: counts[name] for name in outcome.clients}
        if not any(counts.values()):
            raise DataError(
                "no held-out pair belongs to a participating client, and each client's own model is measured"
                f" on its own pairs: raise data.{split}, or use fewer clients."
            )
    return _report_accuracy(recipe, outcome, counts, done, transport)


def measure_outside(run: Run, recipe: Recipe, outcome: Outcome, done: int) -> AccuracyReport:
    """Accuracy of an outcome on the held-out pairs of owners outside the federation, by owner.

    Raises:
        DataError: there are none.
    """
    counts = outside_counts(run)
    with outside_transport(run, recipe, rounds_contexts(run)) as transport:
        return _report_accuracy(recipe, outcome, counts, done, transport)


def _report_accuracy(
    recipe: Recipe, outcome: Outcome, counts: Mapping[str, int], done: int, transport: Transport
) -> AccuracyReport:
    """Accuracy of an outcome on held-out pairs of clients, which have so many."""
    pairs = count_evenly(counts, recipe.federation.accuracy_pairs, recipe.seed)
    jobs = measure_jobs(outcome, recipe.federation.accuracy_split, pairs, done, recipe.seed)
    updates, missing = rounds.ask_clients(jobs, transport, recipe.federation, recipe.federation.quorum)
    return accuracy_report(
        {update.client: PairFigures.model_validate(update.output) for update in updates}, missing
    )


def unseen_path(run: Run) -> Path:
    """The file with the accuracy of clients that took part in no round."""
    return run.federation / "unseen.json"


def check_unseen(run: Run, recipe: Recipe) -> None:
    """Refuse rounds after which no client that took part in none could be measured.

    Raises:
        DataError: none of them has a pair to be measured on.
    """
    split = recipe.federation.accuracy_split
    if not any(splits[split] for splits in read_clients(unseen_contexts(run).pairs.parent).values()):
        raise DataError(
            f"federation.accuracy_split is '{split}', but no unseen client has such pairs: raise"
            f" data.{split}, or set data.unseen_clients to 0."
        )


def measure_unseen(run: Run, recipe: Recipe, commits: Commits, state: ServerState[Any]) -> UnseenResult:
    """Accuracy of clients that took part in no round, see components.federation.unseen.

    The measurement is stored, and read if it is stored.
    """
    method = recipe.federation.options
    contexts = unseen_contexts(run)
    counts = read_clients(contexts.pairs.parent)
    split = recipe.federation.accuracy_split
    held_out = {name: splits[split] for name, splits in counts.items()}
    joining = method.joining(recipe.federation, recipe.data.unseen_pairs)

    def measure() -> UnseenResult:
        clients = unseen_clients(counts, read_true_clusters(contexts.pairs.parent))
        with closing(TRANSPORTS.load(recipe.runtime.transport).open(recipe, contexts)) as transport:
            outcome = join_clients(method, state, clients, transport, recipe.federation, commits.store)
            accuracy = _report_accuracy(recipe, outcome, held_out, state.round, transport)
        return UnseenResult(
            accuracy=accuracy.assigned or accuracy,  # by the selector that each has chosen
            note=joining.note,
            own_pairs={client.name: client.training_pairs for client in clients},
        )

    return UnseenResult.stored(unseen_path(run), measure)


def store_result(run: Run, recipe: Recipe, outcome: Outcome, records: list[StepRecord]) -> FederationResult:
    """Export the outcome of the finished rounds, and store their result."""
    evaluations = [RoundEvaluation.read(path) for path in sorted(run.federation.glob("evaluation-*.json"))]
    result = FederationResult(
        outcome=outcome,
        rounds=evaluations[-1].rounds_done,
        records=records,
        evaluations=evaluations,
        adapters=export_outcome(run, recipe, outcome),
        diagnostics=list(recipe.federation.options.diagnostics),
        unseen=UnseenResult.read(unseen_path(run)) if recipe.data.unseen_clients else None,
        privacy=records[-1].privacy if records else privacy_spent(recipe.federation, 1, 0),
    ).write(run.federation / RESULT)
    ServerSecrets(rounds_contexts(run).adapters, None).remove()  # the noise is not needed any more
    return result


@task()
def export_outcome(run: Run, recipe: Recipe, outcome: Outcome) -> dict[str, ExportedAdapter]:
    """Write the final adapters as PEFT folders."""
    return export_adapters(outcome, run.federation / "final", recipe, rounds_contexts(run).adapters)
