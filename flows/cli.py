"""The command line of the pipeline. Everything that is wrong with a recipe is said before anything heavy is imported."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from components.config import RecipeError
from components.environment import quiet
from components.recipes import load_recipe, recipe_names


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
    except Explained.errors() as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(recipe: str, overrides: list[str], resume: str | None) -> int:
    """Run the flow with a Prefect API of its own, or with the one that is there, and print the table at the end."""
    from pathlib import Path

    from infra.servers import prefect_api

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("starting ...", flush=True)
    with prefect_api() as own_server:
        from flows.fed_rlhf import fed_rlhf
        from tasks.runs import Run

        state = fed_rlhf(recipe=recipe, overrides=overrides, resume=resume, own_server=own_server, return_state=True)
        if not state.is_completed():
            error = state.result(raise_on_failure=False)
            if isinstance(error, Explained.errors()):
                raise error
            print(f"error: the run ended {state.name}: {error or state.message}", file=sys.stderr)
            return 1
        folder = Path(state.result())
        print("\n" + Run(folder.name, folder).summary())
    return 0


class Explained:
    """The errors whose message is meant for the person in front of the screen."""

    @staticmethod
    def errors() -> tuple[type[BaseException], ...]:
        from components.data.records import DataError
        from infra.servers import ServerError

        names = [(RecipeError,), (DataError,), (ServerError,)]
        if "components.models.backbone" in sys.modules:
            from components.models.backbone import BackboneError

            names.append((BackboneError,))
        return tuple(error for group in names for error in group)
