"""Tasks with owners that have their own rows: they prepare these for a run, are listed, and forget runs."""

from __future__ import annotations

from contextlib import closing
from typing import Self

from prefect import get_run_logger
from pydantic import BaseModel, Field

from components.config import Recipe
from components.data.data_report import PreparationReport
from components.data.sources.owners import owner_names
from components.federation.clients.context import ClientContexts
from components.federation.rounds import ask_clients
from components.models.store import AdapterStore
from components.owners.home import OwnerState, find_owner, sockets_root
from components.owners.jobs import ForgetJob, PublishJob, Receipt
from components.owners.requests import Requests
from components.owners.statements import check_statements, read_server_data, read_statements, write_prepared
from tasks.data import check_prepared, check_questions
from tasks.owner_processes import JobFailed, ask_owner, is_known_to_owners, name_at_owners
from tasks.prefect_transport import TRANSPORTS, close_exchange
from tasks.runs import Run

FORGET_SECONDS = 60.0
"""How long the receipt of an owner is waited for."""


class OwnerRow(BaseModel):
    """An owner in the table of owners."""

    owner: str = Field(description="its name")
    state: str = Field(
        description="`connected`, `busy`, `away`, `refused`, or `unknown` if it was never started"
    )
    since: str = Field(description="when it was last heard of")
    version: str = Field(description="of fed-rlhf")
    devices: str = Field(description="of its process")
    last_step: str = Field(description="its last job, and when in its run that was")

    @classmethod
    def of(cls, state: OwnerState) -> Self:
        """The row of an owner."""
        presence = state.presence
        return cls(
            owner=state.name,
            state=state.state,
            since="" if presence is None else f"{presence.at.astimezone():%Y-%m-%d %H:%M:%S}",
            version="" if presence is None else presence.version,
            devices="" if presence is None else ", ".join(presence.devices),
            last_step="" if presence is None else presence.step,
        )


def prepare_at_owners(run: Run, recipe: Recipe) -> PreparationReport:
    """Let each owner prepare its pairs, and write the server's prepared folder.

    Raises:
        UserError: an owner does not answer, or its data or the server's cannot be used.
    """
    check_questions(recipe, None)
    server = read_server_data(recipe)
    jobs = [PublishJob(client=name, seed=recipe.seed, prompts=server.prompts) for name in owner_names(recipe)]
    close_exchange(run)  # answers to a recipe of before
    with closing(TRANSPORTS.load(recipe.runtime.transport).open(recipe, _contexts(run))) as transport:
        updates, _ = ask_clients(jobs, transport, recipe.federation, quorum=1)
    close_exchange(run)
    statements = read_statements(updates)
    check_statements(statements)
    report = write_prepared(server, statements, run.prepared)
    check_prepared(recipe, run.prepared, report)
    return report


def forget_run(run: Run) -> dict[str, Receipt | str]:
    """Let the owners of a run remove what they keep of it; by owner, the receipt, or why there is none.

    Raises:
        UserError, DamagedFileError: the recipe of the run cannot be read.
    """
    if not is_known_to_owners(run.folder):
        return {}
    recipe = run.recipe()
    name = name_at_owners(run.folder)
    contexts = _contexts(run)
    requests = Requests(recipe, contexts, name)
    sockets = sockets_root(recipe.runtime.sockets)
    found: dict[str, Receipt | str] = {}
    for owner in owner_names(recipe):
        try:
            job = ForgetJob(client=owner, seed=recipe.seed)
            update = ask_owner(job, requests, contexts, sockets, FORGET_SECONDS)
            found[owner] = Receipt.model_validate(update.output)
        except JobFailed as error:
            found[owner] = f"{error}; the owner removes it by `rm -r HOME/runs/{name}`"
    return found


def _contexts(run: Run) -> ClientContexts:
    store = AdapterStore(run.exchange / "owners" / "adapters")
    return ClientContexts(store, run.prepared / "pairs.parquet", run.federation)


def show_owners(recipe: Recipe) -> list[OwnerState]:
    """The owners of a recipe, also as an artifact of the flow run."""
    from prefect.artifacts import create_table_artifact

    sockets = sockets_root(recipe.runtime.sockets)
    states = [find_owner(sockets, name) for name in owner_names(recipe)]
    create_table_artifact(
        [OwnerRow.of(state).model_dump() for state in states], key="owners", description=recipe.name
    )
    for state in states:
        if state.state not in ("connected", "busy"):
            get_run_logger().warning("owner %s: %s", state.name, state.reason)
    return states
