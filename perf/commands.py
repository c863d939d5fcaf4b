"""The commands of `python -m perf`; see perf/__main__.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.environment import available_cores
from perf import throughput
from perf.costs import compare_generation, compare_steps
from perf.harness import IDLE_LOAD, Ratios, check_load
from perf.harness import record as record_ratios
from perf.orchestration import compare_orchestration
from perf.peers.comparisons import compare_flower, compare_trl

Measurement = Callable[[str, int], Ratios]
"""Of a recipe's name, and the number of timed runs of each kind."""

MEASUREMENTS: dict[str, Measurement] = {
    "selector-step": compare_steps,
    "generation": compare_generation,
    "orchestration": compare_orchestration,
}
"""What the flow benchmark/performance measures, too."""

RecipeName = Annotated[str, typer.Option("--recipe", help="Name or path of a recipe.")]
Pairs = Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")]
Record = Annotated[Path | None, typer.Option(help="File to which the ratios are appended as a JSON line.")]
BesideOthers = Annotated[bool, typer.Option("--beside-others", help="Measure beside other work, too.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Benchmarks of time and memory, as tables.",
)


def _add(name: str, measure: Measurement) -> None:
    @app.command(name, help=(measure.__doc__ or "").partition("\n\n")[0])
    def run(
        recipe: RecipeName = "summarization/demo",
        pairs: Pairs = 3,
        beside_others: BesideOthers = False,
        record: Record = None,
    ) -> None:
        _run(name, recipe, beside_others, record, lambda: measure(recipe, pairs))


def _run(
    name: str, recipe: str, beside_others: bool, path: Path | None, measure: Callable[[], Ratios]
) -> None:
    load = check_load(math.inf if beside_others else IDLE_LOAD)
    ratios = measure()
    if path is not None:
        record_ratios(path, name, recipe, load, ratios)


for _name, _measure in MEASUREMENTS.items():
    _add(_name, _measure)


@app.command()
def peers(
    recipe: RecipeName = "summarization/demo",
    pairs: Pairs = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of a run.")] = 1,
    clients_at_once: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Clients of a round that train concurrently; by default 1, and then 2."),
    ] = None,
    only: Annotated[Literal["flower", "trl"] | None, typer.Option(help="Compare with one of them.")] = None,
    beside_others: BesideOthers = False,
    record: Record = None,
) -> None:
    """A round of FedBis beside Flower, and a client of FedDPO beside TRL, on equal work."""

    def measure() -> Ratios:
        ratios: Ratios = {}
        if only != "trl":
            for number in clients_at_once or (1, 2)[: available_cores()]:
                ratios |= compare_flower(recipe, pairs, rounds, number)
        if only != "flower":
            ratios |= compare_trl(recipe, pairs)
        return ratios

    _run("peers", recipe, beside_others, record, measure)


app.command("throughput")(throughput.show_throughput)
