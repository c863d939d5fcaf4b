"""The command line of the pipeline. Everything that is wrong with a recipe is said before anything heavy is imported."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from components.config import Explained, RecipeError
from components.data.records import DataError
from components.environment import quiet
from components.recipes import load_recipe, recipe_names
from infra.servers import prefect_api


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe in this process; returns the exit status (0 done, 1 failed, 2 the recipe or the data are wrong)."""
    parser = argparse.ArgumentParser(prog="python -m flows.fed_rlhf", description="Align a language model with private preferences, federated.")
    parser.add_argument("--recipe", default="summarization/demo", help=f"name or path; there are: {', '.join(recipe_names())}")
    parser.add_argument("--resume", metavar="RUN", help="go on with an earlier run (its id or its folder), with its own recipe")
    parser.add_argument("--check", action="store_true", help="check the recipe and stop")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings on top of the recipe, e.g. federation.rounds=10")
    given = parser.parse_args(arguments)
    quiet()
    try:
        if given.resume and given.overrides:
            raise RecipeError("--resume goes on with the run's own recipe: leave the overrides out, or start a new run.")
        recipe = load_recipe(given.recipe, given.overrides)
        if given.resume:
            from tasks.runs import find_run

            recipe = find_run(given.resume).recipe()
        if given.check:
            print(f"{recipe.name}: the recipe is valid")
            return 0
        return run(given.recipe, list(given.overrides), given.resume)
    except Explained as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(recipe: str, overrides: list[str], resume: str | None) -> int:
    """Run the flow with a Prefect API of its own, or with the one that is there, and print the table at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("starting ...", flush=True)
    with prefect_api():
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        from flows.fed_rlhf import fed_rlhf

        state = fed_rlhf(recipe=recipe, overrides=overrides, resume=resume, return_state=True)
        APILogWorker.drain_all(timeout=10)  # before a server of this run's own is stopped
        EventsWorker.drain_all(timeout=10)
        if not state.is_completed():
            error = state.result(raise_on_failure=False)
            print(f"error: the run ended {state.name}: {error or state.message}", file=sys.stderr)
            return 2 if isinstance(error, RecipeError | DataError) else 1
        print("\n" + (Path(state.result()) / "report" / "summary.txt").read_text(encoding="utf-8"))
    return 0
