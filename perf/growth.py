"""How a run grows with its rounds: seconds per round, databases and folders.

The run has a home and a Prefect server of its own, and ends after its rounds. It is looked at while
it runs, so a size may be that of a later moment than its round.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perf.cluster import run_rounds, seconds_of_rounds
from perf.harness import show

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""After which a run is looked at, and after its last one."""
NEIGHBORS = 5
"""Last rounds whose median is the time of a round."""
PATTERNS = {
    "MLflow database": "mlflow.db*",
    "Prefect database": ".prefect/prefect.db*",
    "MLflow artifacts": "mlartifacts/**/*",
    "run folder": "runs/**/*",
    "everything": "**/*",
}
"""Files of a home by what they are."""


def show_growth(
    folder: Annotated[Path, typer.Argument(help="New home of the run, which is kept.")],
    recipe: str = "debug",
    rounds: Annotated[int, typer.Option(min=NEIGHBORS)] = 500,
) -> None:
    """Seconds per round, and MB of databases and folders, from round 5 to the last one."""
    show(f"{recipe}: seconds per round, and MB", measure_growth(folder.resolve(), recipe, rounds))


def measure_growth(home: Path, recipe: str, rounds: int) -> pd.DataFrame:
    """A row per look: the round, median seconds of the last ones, MB by PATTERNS, and the number of files."""
    import pandas as pd

    home.mkdir(parents=True)
    looks: list[dict[str, float]] = []

    def look() -> None:
        done = len(list(home.glob("runs/*/federation/commits/*.json"))) - 1  # the first is the initial state
        last = looks[-1]["round"] if looks else 0
        if done > last and (done == rounds or any(last < mark <= done for mark in ROUNDS)):
            looks.append({"round": done, **sizes(home)})

    run = run_rounds(home, recipe, rounds, [], look)
    seconds = seconds_of_rounds(run)
    frame = pd.DataFrame(looks)
    medians = [statistics.median(seconds[:done][-NEIGHBORS:]) for done in frame["round"]]
    frame.insert(1, "seconds per round", medians)
    return frame


def sizes(home: Path) -> dict[str, float]:
    """MB of a home's files by PATTERNS, and their number."""
    result: dict[str, float] = {}
    for name, pattern in PATTERNS.items():
        values = [size for path in home.glob(pattern) if (size := _size(path)) is not None]
        result[name] = sum(values) / 1e6
    return result | {"files": len(values)}


def _size(path: Path) -> int | None:
    """Bytes of a file; None for a folder, and for a file that was removed meanwhile."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None
