"""The workspace of a run: its adapters and clients, and the device pool of its models."""

from __future__ import annotations

from components.config import Recipe
from components.federation.clients.context import ClientContexts
from components.federation.outcome import Workspace
from components.models.adapters import AdapterStore
from tasks.devices import POOL
from tasks.runs import Run


def open_workspace(run: Run, recipe: Recipe) -> Workspace:
    """The workspace of a run."""
    contexts = ClientContexts(AdapterStore(run.federation / "adapters"), run.prepared / "pairs.parquet")
    return Workspace(
        recipe,
        contexts,
        lend_trainer=lambda: POOL.borrow_trainer(recipe),
        lend_device=lambda: POOL.borrow(recipe.runtime),
    )
