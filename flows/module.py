"""`python -m flows.fed_rlhf`: the commands run, resume and check, for scripts that call the module."""

from __future__ import annotations

import argparse

from flows.cli import app
from flows.process import exit_status
from tasks.runs import find_run


def main() -> None:
    """Run the command that the arguments of this process ask for."""
    parser = argparse.ArgumentParser(prog="python -m flows.fed_rlhf")
    parser.add_argument("--recipe", help="name or path (default: summarization/demo)")
    parser.add_argument("--resume", metavar="RUN", help="resume a run, by its id or folder")
    parser.add_argument("--check", action="store_true", help="check the recipe and stop")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="overrides of recipe keys")
    asked = parser.parse_intermixed_args()
    if asked.resume is None:
        app(["check" if asked.check else "run", asked.recipe or "summarization/demo", *asked.overrides])
    if asked.recipe or asked.overrides:
        parser.error("a resumed run continues with its own recipe: leave out the recipe and the overrides")
    if asked.check:
        raise SystemExit(
            exit_status(lambda: app(["check", str(find_run(asked.resume).folder / "recipe.yaml")]))
        )
    app(["resume", asked.resume])


if __name__ == "__main__":
    main()
