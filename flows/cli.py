"""The command `fed-rlhf`. It imports flows; no flow imports it.

Heavy packages are imported inside the commands, so that `--help` and completion answer at once.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from flows.process import RunRequest

app = typer.Typer(
    name="fed-rlhf",
    help="Align language models with preference data that stay with their owners.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, since Rich takes longer to import than all other modules of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Settings on top of the recipe.", show_default=False),
]


class Stage(StrEnum):
    """Stages of dvc.yaml."""

    CHECK_RECIPE = "check_recipe"
    FETCH_BACKBONE = "fetch_backbone"
    GROW_TREES = "grow_trees"
    PREPARE = "prepare"
    FEDERATE = "federate"
    ALIGN = "align"
    EVALUATE = "evaluate"
    REPORT = "report"


def _complete_recipe(incomplete: str) -> list[str]:
    from components.recipes import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def _complete_benchmark(incomplete: str) -> list[str]:
    from components.benchmarks import benchmark_names

    return [name for name in benchmark_names() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    from tasks.runs import list_runs

    return [run.id for run in list_runs() if run.id.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a recipe, or path of a YAML file.", autocompletion=_complete_recipe
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id or folder of a run.", autocompletion=_complete_run)
]


@app.command()
def run(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Run a recipe from its data to its report."""
    from flows.process import RunRequest

    _run(RunRequest(recipe, tuple(overrides or [])))


@app.command()
def resume(run: RunArgument) -> None:
    """Resume a stopped run with its own recipe.

    It continues after its last committed step.
    """
    from flows.process import RunRequest

    _run(RunRequest(None, (), run))


def _run(request: RunRequest) -> None:
    from flows.process import exit_status, run_recipe

    def call(name: str) -> State[Any]:
        from flows.fed_rlhf import fed_rlhf

        state: State[Any] = fed_rlhf(
            recipe=name, overrides=list(request.overrides), resume=request.resume, return_state=True
        )
        return state

    raise typer.Exit(exit_status(lambda: run_recipe(request, call)))


@app.command()
def check(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Check a recipe and what it needs; estimate memory and disk."""
    from flows.process import RunRequest, check_recipe, exit_status

    raise typer.Exit(exit_status(lambda: check_recipe(RunRequest(recipe, tuple(overrides or [])))))


@app.command()
def runs() -> None:
    """List past runs, the latest last.

    The columns are recipe, method, state, headline figures, age and size.
    """
    from flows.process import exit_status

    raise typer.Exit(exit_status(_list_runs))


def _list_runs() -> int:
    from components.paths import runs_root
    from tasks.run_table import format_size, run_statuses

    statuses = run_statuses()
    if not statuses:
        print(f"there are no runs under {runs_root()}")
        return 0
    rows = [
        [
            status.id,
            status.recipe,
            status.method,
            status.state,
            status.headline or "-",
            status.age,
            format_size(status.size),
        ]
        for status in statuses
    ]
    _print_table(["run", "recipe", "method", "state", "headline", "age", "size"], rows)
    return 0


@app.command()
def show(run: RunArgument) -> None:
    """Show the table of a finished run, or where a run stopped."""
    from flows.process import exit_status

    def command() -> int:
        from tasks.run_table import describe_run
        from tasks.runs import find_run

        print(describe_run(find_run(run)))
        return 0

    raise typer.Exit(exit_status(command))


@app.command()
def delete(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Id or folder of a run or a benchmark.", autocompletion=_complete_run
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete the folder of a run or a benchmark. What it logged to MLflow stays."""
    from flows.process import exit_status

    def command() -> int:
        from tasks.run_table import delete_folder, find_deletable

        folder = find_deletable(run)
        if not yes:
            typer.confirm(f"Delete {folder}?", abort=True)
        delete_folder(folder)
        print(f"deleted {folder}")
        return 0

    raise typer.Exit(exit_status(command))


@app.command()
def recipes() -> None:
    """List the recipes of the package."""
    from flows.process import exit_status

    raise typer.Exit(exit_status(_list_recipes))


def _list_recipes() -> int:
    from components.recipes import load_recipe, recipe_names

    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        rows.append(
            [
                name,
                recipe.federation.method,
                recipe.data.source,
                str(recipe.federation.rounds),
                recipe.policy.backbone.name,
            ]
        )
    _print_table(["recipe", "method", "source", "rounds", "policy"], rows)
    return 0


@app.command()
def methods() -> None:
    """List the federated methods, including those of plug-ins."""
    from flows.process import exit_status

    raise typer.Exit(exit_status(_list_methods))


def _list_methods() -> int:
    import sys

    from components.config.federation import METHODS

    rows = []
    for name in METHODS.names():
        options = METHODS.load(name)
        lines = (sys.modules[options.__module__].__doc__ or "").strip().splitlines()
        rows.append([name, options.trained_model, lines[0] if lines else ""])
    _print_table(["method", "trains", "description"], rows)
    return 0


@app.command()
def benchmark(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a benchmark, or path of a YAML file (default: summarization).",
            autocompletion=_complete_benchmark,
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Resume a benchmark, with its own arms and seeds.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the benchmark and its recipes; estimate memory and disk.")
    ] = False,
) -> None:
    """Compare methods over several seeds in one report."""
    from flows.process import exit_status

    if name is not None and "=" in name:  # an override; the name was left out
        overrides = [name, *(overrides or [])]
        name = None
    settings = overrides or []
    raise typer.Exit(exit_status(lambda: _benchmark(name, settings, resume, check)))


def _benchmark(name: str | None, overrides: list[str], resume: str | None, check: bool) -> int:
    from components.benchmarks import arm_recipe, load_benchmark, read_benchmark
    from components.config import RecipeError
    from components.estimates import describe_arms
    from components.recipes import validate_environment
    from flows.process import DEFAULT_BENCHMARK, run_flow
    from tasks.benchmark_folder import find_benchmark

    if resume is not None:
        if name or overrides:
            raise RecipeError(
                "a resumed benchmark continues with its own arms: leave out the name and the overrides,"
                " or start a new one."
            )
        name = str(find_benchmark(resume) / "benchmark.yaml")
        plan = read_benchmark(name)
    else:
        name = name or DEFAULT_BENCHMARK
        plan = load_benchmark(name, overrides)
    recipes = {arm: arm_recipe(plan, arm, plan.seeds[0]) for arm in plan.arms if resume is None}
    for recipe in recipes.values():
        validate_environment(recipe)
    if check:
        print(f"{name}: the benchmark is valid ({len(plan.arms)} arms, {len(plan.seeds)} seeds)")
        if recipes:
            print(describe_arms(recipes))
        return 0

    def call() -> State[Any]:
        from flows.benchmark import benchmark

        state: State[Any] = benchmark(benchmark=name, overrides=overrides, resume=resume, return_state=True)
        return state

    status, report = run_flow(call)
    if status == 0:
        folder = Path(report)
        print("\n" + (folder / "report.md").read_text(encoding="utf-8"))
        print(f"Report: {folder / 'report.html'}")
    return status


@app.command()
def stage(
    name: Annotated[Stage, typer.Argument(metavar="STAGE", help=f"One of: {', '.join(Stage)}.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe of the pipeline; only for the stage check_recipe.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Run folder of the pipeline.")] = Path("data/pipeline"),
) -> None:
    """Run one stage of the DVC pipeline.

    `dvc repro` runs all stages in their order.
    """
    from flows.process import exit_status

    raise typer.Exit(exit_status(lambda: _stage(name, folder, recipe, overrides or [])))


def _stage(name: Stage, folder: Path, recipe: str | None, overrides: list[str]) -> int:
    from components.config import RecipeError
    from components.recipes import load_recipe, validate_environment
    from flows.process import DEFAULT_RECIPE, run_flow

    if name is Stage.CHECK_RECIPE:
        from tasks.runs import write_stage_inputs

        loaded = load_recipe(recipe or DEFAULT_RECIPE, overrides)
        validate_environment(loaded)
        write_stage_inputs(loaded, folder)
        print(f"{loaded.name}: the recipe is valid")
        return 0
    if recipe is not None or overrides:
        raise RecipeError(
            f"stage {name} uses the recipe that the stage check_recipe wrote: give --recipe and overrides"
            " to that stage."
        )
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(
            f"{path} is missing: run the stage check_recipe first, or `dvc repro`, which runs all stages."
        )
    load_recipe(str(path))

    def call() -> State[Any]:
        from flows.stages import run_stage

        state: State[Any] = run_stage(name.value, str(folder.resolve()), return_state=True)
        return state

    return run_flow(call)[0]


@app.command()
def up() -> None:
    """Start servers of Prefect and MLflow, and a worker.

    They listen on loopback. The deployments of prefect.yaml are registered.
    """
    from flows.process import exit_status
    from infra.servers import start_servers

    raise typer.Exit(exit_status(start_servers))


@app.command()
def down() -> None:
    """Stop what `up` started."""
    from flows.process import exit_status
    from infra.servers import stop_servers

    raise typer.Exit(exit_status(stop_servers))


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print columns that are as wide as their widest cell."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    app()
