"""The command `fed-rlhf`. It imports flows; no flow imports it.

Heavy packages are imported inside the commands, so that `--help` and completion answer at once.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from flows.owner_cli import SocketsOption, owner

if TYPE_CHECKING:
    from pydantic import BaseModel

    from components.config.benchmark import Benchmark
    from components.owners.jobs import Receipt
    from flows.process import Parameters

P = ParamSpec("P")

app = typer.Typer(
    name="fed-rlhf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, since Rich takes longer to import than all other modules of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(owner)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Overrides of recipe keys.", show_default=False),
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


class Scaffold(StrEnum):
    """What `fed-rlhf new` writes."""

    RECIPE = "recipe"
    METHOD = "method"
    SOURCE = "source"


def _complete_recipe(incomplete: str) -> list[str]:
    from components.recipes.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def _complete_benchmark(incomplete: str) -> list[str]:
    from components.recipes.benchmarks import benchmark_names

    return [name for name in benchmark_names() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    from tasks.runs import list_runs

    return [run.id for run in list_runs() if run.id.startswith(incomplete)]


def _complete_run_or_benchmark(incomplete: str) -> list[str]:
    from tasks.runs import list_runs_and_benchmarks

    return [run.id for run in list_runs_and_benchmarks() if run.id.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a recipe, or path of a YAML file.", autocompletion=_complete_recipe
    ),
]
QUOTES = '"""'
"""Around a prompt of several lines."""
NAMES = "the beginning of an id, or `latest`, suffices."
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help=f"Id or folder of a run; {NAMES}", autocompletion=_complete_run),
]
RunOrBenchmarkArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=f"Id or folder of a run or a benchmark; {NAMES}",
        autocompletion=_complete_run_or_benchmark,
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the log instead of the live view.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON (fields: docs/reference/json.md).")]


def _print_version(requested: bool) -> None:
    """Print the version of the package, and the commit of a checkout."""
    if requested:
        from importlib.metadata import version

        from components.paths import in_checkout
        from tasks.runs import git_commit

        commit = f" (commit {git_commit()})" if in_checkout() else ""
        print(f"fed-rlhf {version('fed-rlhf')}{commit}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and the commit of a checkout.",
        ),
    ] = False,
) -> None:
    """Align language models with preference data that stay with their owners."""


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Make a function a command; a UserError is printed as a sentence, and gives status 2."""

    @app.command()
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        from flows.process import exit_status

        raise typer.Exit(exit_status(lambda: function(*args, **kwargs)))

    return call


@command
def run(recipe: RecipeArgument, overrides: Overrides = None, verbose: VerboseOption = False) -> int:
    """Run a recipe from its data to its report."""
    from components.recipes import check_recipe, load_recipe

    settings = overrides or []
    loaded = load_recipe(recipe, settings)
    _say(f"checking {recipe} ...")
    checked = check_recipe(loaded)

    def open_folder() -> Parameters:
        from tasks.devices import choose_workers  # imports torch
        from tasks.runs import HELD, open_run

        run = open_run(choose_workers(checked.recipe), settings)
        HELD.append(run)  # so that a stop before the flow locks it says how to resume it
        return {"recipe": recipe, "overrides": settings, "resume": run.id}

    return _run_pipeline(verbose, open_folder)


@command
def resume(run: RunArgument, verbose: VerboseOption = False) -> int:
    """Resume a stopped run with its own recipe.

    It continues after its last committed step.
    """
    from components.config import RecipeError
    from components.recipes import check_recipe
    from components.recipes.inputs import original_names
    from tasks.runs import RESULT, find_run, lock

    found = find_run(run)
    if found.is_pipeline:
        raise RecipeError(f"{found.folder} belongs to `dvc repro`, which goes on where it stopped: run that.")
    with lock(found):  # refuses a run that is at work, before a flow begins
        recipe = found.recipe()
        if not (found.evaluation / RESULT).is_file():
            _say(f"checking {found.id} ...")
            with original_names(recipe):
                check_recipe(recipe)
    return _run_pipeline(verbose, lambda: {"recipe": recipe.name, "resume": str(found.folder)})


def _run_pipeline(verbose: bool, parameters: Callable[[], Parameters]) -> int:
    """Run the flow, and print the table of the finished run, and where to look next."""
    from flows.process import run_flow

    status, folder = run_flow("flows.fed_rlhf:fed_rlhf", verbose, parameters)
    if status == 0:
        from tasks.runs import find_run

        finished = find_run(folder)
        print("\n" + (finished.report / "summary.txt").read_text(encoding="utf-8"))
        print(f"Next\n  open the report    fed-rlhf show {finished.id} --open")
        print(f"  use the policy     fed-rlhf export {finished.id} FOLDER")
    return status


@command
def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    json: JsonOption = False,
    print_recipe: Annotated[
        bool,
        typer.Option(
            "--print-recipe", help="Only print the whole recipe, and where each of its values comes from."
        ),
    ] = False,
) -> None:
    """Check a recipe and what it needs; estimate its costs.

    The estimates are of memory and disk.
    """
    from components.config.loading import annotated_yaml
    from components.federation.spending import privacy_spent
    from components.recipes import check_recipe
    from components.recipes.data_preview import describe_data
    from components.recipes.estimates import Shapes, describe_costs, estimate_costs
    from components.recipes.load import load_with_origins
    from components.recipes.model_checks import prompt_templates
    from components.reporting.lines import privacy_line

    loaded, origins = load_with_origins(recipe, overrides or [])
    if print_recipe:
        print(annotated_yaml(loaded.model_dump(mode="json"), origins))
        return
    if not json:
        _say(f"checking {recipe} ...")
    checked = check_recipe(loaded, with_expectations=True)
    from tasks.devices import describe_places  # imports torch

    places = describe_places(loaded)
    members = checked.data.clients or loaded.data.clients or loaded.federation.clients_per_round
    privacy = privacy_spent(loaded.federation, members, loaded.federation.rounds)
    if json:
        from flows.outputs import RecipeCheck

        costs = estimate_costs(loaded, Shapes())
        _print_json(RecipeCheck.of(recipe, checked, costs, places, privacy))
        return
    print(f"{recipe}: the recipe is valid")
    if checked.unread:
        names = ", ".join(checked.unread)
        print(f"not checked, since they cannot be read from here: model and tokenizer of {names}")
    print(describe_data(checked.data))
    templates = prompt_templates(loaded).items()
    print(f"prompt templates: {', '.join(f'{section} {name}' for section, name in templates)}")
    clients, where = places
    print(f"clients at a time: {clients}, on {where}" if clients else f"clients at a time: unknown: {where}")
    print(describe_costs(loaded))
    if privacy is not None:
        print(privacy_line(privacy))


@command
def runs(
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="List the latest N only.")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="List those of this recipe.")] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="List those of this method.")] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE", help="List those in this state: finished, running, stopped, 'not started'."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List past runs and benchmarks, the latest last.

    The columns are recipe, method, state, headline figures, time since the last write, and size. A narrow
    terminal has short cells and fewer columns; in a pipe, lines are whole.
    """
    from components.paths import runs_root
    from tasks.run_table import run_statuses, runs_table

    statuses = run_statuses(limit, recipe, method, state)
    if json:
        _print_json(statuses)
    elif statuses:
        print("\n".join(runs_table(statuses, _terminal_width())))
    else:
        is_filtered = any((recipe, method, state))
        print(f"there are no {'such runs' if is_filtered else 'runs'} under {runs_root()}")


@command
def show(
    run: RunOrBenchmarkArgument,
    json: JsonOption = False,
    open_report: Annotated[bool, typer.Option("--open", help="Open its report in a browser.")] = False,
) -> None:
    """Show a finished run or benchmark, or where it stands."""
    from tasks import run_table
    from tasks.runs import find_run_or_benchmark

    found = find_run_or_benchmark(run)
    if open_report:
        page = run_table.report_page(found)
        print(page)
        typer.launch(page.as_uri())
    elif found.is_benchmark:
        if json:
            _print_json(run_table.benchmark_details(found))
        else:
            print(run_table.describe_benchmark(found))
    elif json:
        _print_json(run_table.run_details(found))
    else:
        print(run_table.describe_run(found))


@command
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help=f"Ids or folders of two or more runs; {NAMES}",
            autocompletion=_complete_run,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write a page with the tables and curves too."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare runs: the recipe's keys that differ, and figures.

    A run that is not finished has what there is so far.
    """
    from tasks.comparison import compare_runs, describe_comparison, read_curve
    from tasks.runs import find_run

    found = [find_run(run) for run in runs]
    compared = compare_runs(found)
    if json:
        _print_json(compared)
    else:
        print(describe_comparison(compared))
    if html is not None:
        from components.io import write_atomically
        from components.reporting.comparison import comparison_page
        from components.reporting.page import to_html

        page = comparison_page(compared, [read_curve(run) for run in found])
        write_atomically(html, to_html(page).encode())
        _say(f"wrote {html}")


@command
def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New or empty folder.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into its backbone, and write a whole model.")
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An adapter of the federation, in place of the aligned policy."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY",
            help="Upload the folder to this model repository of the hub, which is private if it is new.",
        ),
    ] = None,
) -> None:
    """Write the aligned policy of a run for use elsewhere.

    The folder has the PEFT adapter or a merged model, the tokenizer, and the format of the prompts.
    """
    from components.models.export import open_repository, push_folder
    from tasks.export import export_run
    from tasks.runs import find_run

    found = find_run(run)
    _say(f"exporting from {found.id} ...")
    repository = None if push_to_hub is None else open_repository(push_to_hub)
    export_run(found, folder, adapter, merge)
    print(f"exported to {folder}; its README.md says how to use it")
    if repository is not None:
        print(f"uploaded: {push_folder(folder, repository)}")


@command
def chat(
    run: RunArgument,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Of sampling; 0 takes the likeliest token each time.")
    ] = 0.0,
) -> int:
    """Let the base and the aligned policy of a run answer prompts.

    A line is a prompt, and so are the lines between two of three quotation marks; the recipe's template takes
    it. Ctrl-D ends. Each prompt is answered by itself.
    """
    from textwrap import indent

    from components.config import UserError
    from flows.process import WRONG_INPUT
    from tasks.chat import Chat
    from tasks.runs import find_run

    found = find_run(run)
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    _say(f"loading the policies of {found.id} ...")
    policies = Chat(found)
    if is_terminal:
        _say(f"A line, or a text in {QUOTES}, is a prompt for the template {policies.template}. Ctrl-D ends.")
    refused = False
    for number, prompt in enumerate(_read_prompts(is_terminal)):
        try:
            cut = policies.surplus(prompt)
            answers = policies.answer(prompt, number, temperature)
        except UserError as error:
            _say(f"prompt {number + 1}: {error}")
            refused = True
            continue
        if cut:
            limit = f"policy.max_prompt_tokens is {policies.max_prompt_tokens}"
            _say(f"prompt {number + 1}: {cut} tokens are cut off, since {limit}")
        rows = {} if is_terminal else {"prompt": prompt}
        for name, answer in answers.items():
            end = "" if answer.finished else f" [cut at {policies.max_new_tokens} tokens]"
            rows[name] = (answer.text or "(empty)") + end
        for name, text in rows.items():
            print(f"{name:9}" + indent(text, " " * 9)[9:], flush=True)
    return WRONG_INPUT if refused else 0


@command
def judge(
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS", exists=True, help="Pairs with human verdicts, as Auto-J's pairwise set."
        ),
    ],
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run, whose judge compares them.", autocompletion=_complete_run),
    ] = None,
    verdicts: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="ORIGINAL SWAPPED",
            exists=True,
            help="Files of a judge's verdicts on both orders instead.",
        ),
    ] = None,
) -> None:
    """Report how often a judge agrees with people.

    A pair counts where it gives the human verdict in both orders of the responses.
    """
    from components.config import UserError
    from components.evaluation import judge_report

    rows = judge_report.read_pairs(pairs)
    if verdicts is not None and run is None:
        original, swapped = map(judge_report.read_verdicts, verdicts)
        print(judge_report.build_judge_report(rows, original, swapped))
    elif run is not None and verdicts is None:
        from components.models.backbone import choose_devices
        from tasks.evaluation.judging import build_judge
        from tasks.runs import find_run

        found = find_run(run)
        recipe = found.recipe()
        device = choose_devices(recipe.runtime.devices)[0]
        reader = build_judge(found, recipe, device, logging.getLogger("fed-rlhf"))
        print(judge_report.measure_judge(reader, rows))
    else:
        raise UserError("give the judge by --run RUN, or its verdicts by --verdicts ORIGINAL SWAPPED")


MlflowOption = Annotated[
    bool, typer.Option("--with-mlflow", help="Delete what was logged to MLflow too; registered models stay.")
]


@command
def delete(
    run: RunOrBenchmarkArgument,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask for confirmation; RUN is then a whole id or a folder."),
    ] = False,
    with_mlflow: MlflowOption = False,
) -> None:
    """Delete the folder of a run or a benchmark. What it logged to MLflow stays without --with-mlflow."""
    from flows.process import require_tracking_server
    from tasks.deletion import delete_folder
    from tasks.runs import find_run_or_benchmark

    found = find_run_or_benchmark(run, is_whole=yes)
    if with_mlflow:
        require_tracking_server()

    def confirm(folder: Path) -> None:
        if not yes:
            typer.confirm(f"Delete {folder}{' and its runs in MLflow' if with_mlflow else ''}?", abort=True)

    print("\n".join(delete_folder(found, confirm, _print_receipt, with_mlflow)))


@command
def prune(
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Hours, days or weeks since the last write, e.g. 12h, 30d or 8w."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    with_mlflow: MlflowOption = False,
) -> int:
    """Delete runs and benchmarks whose last write is long ago.

    Those that a process works on stay.
    """
    from humanize import naturalsize

    from components.config import RecipeError
    from components.paths import runs_root
    from flows.process import FAILED, require_tracking_server
    from tasks.deletion import delete_folder, find_older, parse_age
    from tasks.run_table import runs_table
    from tasks.runs import Run

    end = datetime.now(UTC) - parse_age(older_than)
    idle, working = find_older(end)
    if working:
        print(f"running, and not deleted: {', '.join(status.run for status in working)}")
    if not idle:
        print(f"there are no runs to delete under {runs_root()} (last written more than {older_than} ago)")
        return 0
    if with_mlflow:
        require_tracking_server()
    print("\n".join(runs_table(idle, _terminal_width())))
    if not yes:
        size = naturalsize(sum(status.size for status in idle))
        runs = f"these {len(idle)} folders ({size})"
        typer.confirm(f"Delete {runs}{' and their runs in MLflow' if with_mlflow else ''}?", abort=True)
    exit_code = 0
    for status in idle:
        run = Run(status.run, status.folder)
        try:
            print("\n".join(delete_folder(run, lambda _: None, _print_receipt, with_mlflow, end)))
        except (RecipeError, OSError) as error:  # such as a process that works on it by now
            print(f"not deleted: {error}", file=sys.stderr)
            exit_code = FAILED
    return exit_code


def _print_receipt(owner: str, answer: Receipt | str) -> None:
    """Print what an owner has removed of a run, or why it has not."""
    if isinstance(answer, str):
        print(f"owner {owner} keeps its part of the run: {answer}", file=sys.stderr)
    else:
        print(f"owner {owner} has removed {answer.files} files, {answer.bytes:,} bytes")


@command
def recipes(json: JsonOption = False) -> None:
    """List the recipes of the package."""
    from flows.outputs import list_recipes

    _print_rows(list_recipes(), json)


@command
def methods(json: JsonOption = False) -> None:
    """List the federated methods, including those of plug-ins."""
    from flows.outputs import list_methods

    _print_rows(list_methods(), json)


@command
def new(
    kind: Annotated[Scaffold, typer.Argument(help="What is written.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in recipes; of the package, too.")],
) -> None:
    """Write a recipe, a method or a source to start from.

    A recipe is for pairs of your own. A method or a source is a package, with a test that passes once it is
    installed.
    """
    from flows.scaffold import write_scaffold

    print("\n".join(write_scaffold(kind.value, name)))


@command
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
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Resume a benchmark with its own arms; 'seeds=[0,1,2,3]' adds seeds to those that it has.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the benchmark and its recipes; estimate its costs, and what its seeds can decide.",
        ),
    ] = False,
    publish: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run nothing, and append the finished runs of the benchmark of --resume to this file.",
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> int:
    """Compare methods over several seeds in one report."""
    from components.config import RecipeError
    from tasks.benchmark_lines import publish_lines
    from tasks.runs import find_benchmark

    overrides = overrides or []
    if name is not None and "=" in name:  # an override; the name was left out
        overrides = [name, *overrides]
        name = None
    if publish is not None:
        if resume is None or name or overrides or check:
            raise RecipeError(
                "--publish goes with --resume FOLDER alone, the benchmark whose finished runs it publishes"
            )
        print(f"{publish}: {publish_lines(find_benchmark(resume), publish)} new lines")
        return 0
    folder = None if resume is None else find_benchmark(resume)
    name, plan = _benchmark_plan(name, overrides, folder)
    parameters = {"benchmark": name, "overrides": overrides, "resume": folder and str(folder)}
    return _run_benchmark(name, plan, folder, check, verbose, lambda: parameters)


@command
def sweep(
    recipe: RecipeArgument,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY.PATH=VALUE,VALUE", help="Values to try of recipe keys, and overrides of one value."
        ),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check the recipes, and estimate their costs; run nothing.")
    ] = False,
    verbose: VerboseOption = False,
) -> int:
    """Run a recipe with each combination of values, in one report.

    `seed=0,1` repeats all of them with these seeds. `benchmark --resume` goes on after a stop.
    """
    from components.recipes.benchmarks import plan_sweep

    plan = plan_sweep(recipe, settings)

    def open_folder() -> Parameters:
        from tasks.benchmark_folder import open_benchmark  # imports torch
        from tasks.runs import HELD, Run

        folder = open_benchmark(f"sweep-{Path(recipe).stem}", plan)
        HELD.append(Run(folder.name, folder))  # so that a stop before the flow locks it says how to go on
        return {"resume": str(folder)}

    return _run_benchmark(f"the sweep of {recipe}", plan, None, check, verbose, open_folder)


def _run_benchmark(
    name: str,
    plan: Benchmark,
    folder: Path | None,
    check: bool,
    verbose: bool,
    parameters: Callable[[], Parameters],
) -> int:
    """Check the recipes of a new benchmark, and run it unless it is only checked."""
    from components.recipes import check_recipe
    from components.recipes.benchmarks import arm_recipe
    from components.recipes.estimates import describe_arms
    from flows.process import run_flow
    from tasks.benchmark_lines import prospects

    recipes = {arm: arm_recipe(plan, arm, plan.seeds[0]) for arm in plan.arms if folder is None}
    if not check:
        _say(f"checking the recipes of {name} ...")
    for recipe in recipes.values():
        check_recipe(recipe)
    time, *power = prospects(name, plan, folder)
    if check:
        print(f"{name}: the benchmark is valid (arms: {len(plan.arms)}, seeds: {len(plan.seeds)})")
        if recipes:
            print(describe_arms(recipes))
        print("\n".join([time, *power]))
        return 0
    _say(time)

    status, report = run_flow("flows.benchmark:benchmark", verbose, parameters)
    if status == 0:
        folder = Path(report)
        print("\n" + (folder / "summary.txt").read_text(encoding="utf-8"))
        print(f"Next\n  open the report    fed-rlhf show {folder.parent.name} --open")
    return status


def _benchmark_plan(name: str | None, overrides: Sequence[str], folder: Path | None) -> tuple[str, Benchmark]:
    """The name or file of a benchmark, and what is run: a new one, or that of a folder."""
    from components.config import RecipeError
    from components.recipes.benchmarks import load_benchmark, read_benchmark
    from tasks.benchmark_folder import extend_plan

    if folder is None:
        name = name or "summarization"
        return name, load_benchmark(name, overrides)
    if name:
        raise RecipeError(
            "a resumed benchmark continues with its own arms: leave out the name, or start a new one."
        )
    path = str(folder / "benchmark.yaml")
    return path, extend_plan(read_benchmark(path), overrides)


@command
def stage(
    name: Annotated[Stage, typer.Argument(metavar="STAGE", help=f"One of: {', '.join(Stage)}.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe of the pipeline; only for the stage check_recipe.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Run folder of the pipeline.")] = Path("data/pipeline"),
    verbose: VerboseOption = False,
) -> int:
    """Run one stage of the DVC pipeline.

    `dvc repro` runs all stages in their order.
    """
    from components.config import RecipeError
    from components.recipes import check_recipe, load_recipe
    from flows.process import run_flow

    if name is Stage.CHECK_RECIPE:
        from tasks.runs import write_stage_inputs

        loaded = load_recipe(recipe or "summarization/demo", overrides or [])
        check_recipe(loaded)
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

    parameters = {"stage": name.value, "folder": str(folder.resolve())}
    return run_flow("flows.stages:run_stage", verbose, lambda: parameters)[0]


@command
def up(
    schedules: Annotated[
        bool, typer.Option("--schedules/--no-schedules", help="Run the scheduled deployments.")
    ] = True,
) -> None:
    """Start servers of Prefect and MLflow, and a worker.

    They listen on loopback. The deployments of prefect.yaml are registered.
    """
    from infra.servers import start_servers

    start_servers(schedules)


@command
def down() -> None:
    """Stop what `up` started."""
    from infra.servers import stop_servers

    stop_servers()


@command
def owners(sockets: SocketsOption = None, json: JsonOption = False) -> None:
    """List the owners of data that have been started here."""
    from components.config import UserError
    from components.owners.home import find_owners, sockets_root
    from tasks.owners import OwnerRow

    root = sockets_root(None if sockets is None else str(sockets))
    rows = [OwnerRow.of(state) for state in find_owners(root)]
    if not rows:
        raise UserError(
            f"no owner has ever been started with the sockets of {root}: start one by `fed-rlhf owner start"
            " HOME`."
        )
    _print_rows(rows, json)


def _terminal_width() -> int | None:
    """Characters of a line of the terminal; None in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _read_prompts(is_terminal: bool) -> Iterator[str]:
    """Prompts of the standard input that are not empty: lines, and texts in QUOTES."""
    lines = _read_lines(is_terminal)
    for line in lines:
        text = line.strip()
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES)
            while not text.endswith(QUOTES):
                following = next(lines, None)
                if following is None:
                    break
                text += "\n" + following.rstrip()
            text = text.removesuffix(QUOTES).strip()
        if text:
            yield text


def _read_lines(is_terminal: bool) -> Iterator[str]:
    """Lines of the standard input; a terminal shows where to type."""
    from io import TextIOWrapper

    from components.config import UserError

    if is_terminal:
        with suppress(ImportError):  # of a Python without it
            import readline  # noqa: F401  (input() has a history then)
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    try:
        yield from sys.stdin or ()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the prompts of the standard input are not UTF-8 ({error.reason}): convert them."
        ) from None


def _say(line: str) -> None:
    """Print what is being done, before libraries are imported for seconds."""
    print(line, file=sys.stderr, flush=True)


def _print_json(output: BaseModel | Sequence[BaseModel]) -> None:
    from pydantic_core import to_json

    print(to_json(output, indent=2).decode())


def _print_rows(rows: Sequence[BaseModel], json: bool) -> None:
    """Print rows as JSON, or as a table with their fields."""
    if json:
        _print_json(rows)
    else:
        from tasks.text_table import table_lines

        cells = [[str(value) for _, value in row] for row in rows]
        print("\n".join(table_lines([list(type(rows[0]).model_fields), *cells])))


if __name__ == "__main__":
    app()
