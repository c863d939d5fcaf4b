"""What the benchmarks share: alternating calls, their ratios and tables, and processes that measure.

    python -m perf.harness MODULE:FUNCTION ARGUMENTS

calls a function with a JSON list of arguments, and prints its result as JSON; see in_process.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from components.config import UserError
from components.environment import available_cores, configure_libraries
from components.paths import PACKAGE

if TYPE_CHECKING:
    import pandas as pd

    from components.config import Recipe
    from components.data.records import Pair

IDLE_LOAD = 0.5
"""Largest load average of the last minute beside which times are measured."""
SIZES = ("data", "selector", "federation", "policy", "alignment", "evaluation")
"""Sections of a recipe that decide how long its parts take."""

Ratios = dict[str, list[float]]
"""Paired ratios by name, such as `generation/merged_against_separate`; higher is better."""
Figures = Mapping[str, Any]
"""What a call gives of itself; its `seconds` replace those that it took."""


def alternate(calls: Mapping[str, Callable[[], Figures | None]], repeats: int) -> pd.DataFrame:
    """Make all calls in turn, in one order and then in the other.

    Returns:
        a row per call: its name, the repeat, its seconds, and the other figures that it gives.
    """
    import pandas as pd

    rows = []
    for repeat in range(repeats):
        for name in list(calls)[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            figures = calls[name]()
            seconds = time.perf_counter() - start
            rows.append({"name": name, "repeat": repeat, "seconds": seconds, **(figures or {})})
    return pd.DataFrame(rows)


def ratios(frame: pd.DataFrame, slow: str, fast: str) -> list[float]:
    """How many times faster each call of one name is than the other's of the same repeat."""
    seconds = frame.pivot(index="repeat", columns="name", values="seconds")
    paired: list[float] = (seconds[slow] / seconds[fast]).tolist()
    return paired


def compare(title: str, frame: pd.DataFrame, pairs: Mapping[str, tuple[str, str]]) -> Ratios:
    """Show what alternate measured, and how many times faster calls are than others.

    Args:
        title: what was called.
        frame: of alternate; its figures must be numbers.
        pairs: names of the slow and of the fast call, by the ratio's name.

    Returns:
        the ratios.
    """
    import pandas as pd

    groups = frame.drop(columns="repeat").groupby("name", sort=False)
    table = groups.median()
    table.insert(1, "all seconds", groups["seconds"].agg(_join))
    show(f"{title}, medians of {frame['repeat'].nunique()}", table.reset_index())
    paired = {name: ratios(frame, slow, fast) for name, (slow, fast) in pairs.items()}
    rows = [(name, median, _join(paired[name])) for name, median in medians(paired).items()]
    show("", pd.DataFrame(rows, columns=["times faster", "median", "all"]))
    return paired


def medians(ratios: Ratios) -> dict[str, float]:
    """The median of each ratio."""
    return {name: statistics.median(values) for name, values in ratios.items()}


def find_conditions(recipe: str) -> tuple[dict[str, str], dict[str, str]]:
    """The conditions of a measurement, and further settings that are recorded but not compared.

    The recipe's number of threads is set.
    """
    import torch

    loaded, device = prepare_process(recipe)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    settings = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    conditions = {
        "recipe": recipe,
        "sizes": loaded.fingerprint(*SIZES),  # a recipe that has changed is not compared with itself
        "processor": processor_name(),
        "cores": str(available_cores()),
        "device": name,
    }
    return conditions, settings


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor as Linux gives it; elsewhere what Python knows of it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def record(path: Path, name: str, recipe: str, load: float, ratios: Ratios) -> None:
    """Append what a benchmark measured, and its conditions, as a JSON line; load as of check_load."""
    from tasks.runs import git_commit

    conditions, settings = find_conditions(recipe)
    line = (
        conditions | settings | {"measurement": name, "ratios": ratios, "commit": git_commit(), "load": load}
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line, sort_keys=True)}\n")


def show(title: str, frame: pd.DataFrame) -> None:
    """Print a table; numbers have three significant digits."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(f"\n{title}" if title else "", flush=True)
    table = Table(*frame.columns, box=box.SIMPLE_HEAD)
    for row in frame.itertuples(index=False):
        table.add_row(*map(_text, row))
    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, width=width, markup=False, highlight=False).print(table)


def _text(value: object) -> str:
    if value is None or value != value:  # unlike others, NaN is not itself
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _join(values: Sequence[float]) -> str:
    return ", ".join(map(_text, values))


def in_process(function: Callable[..., Any], *arguments: Any, variables: Figures | None = None) -> Any:
    """The result of a function of a module, called in a process of its own.

    Args:
        function: its result becomes JSON.
        arguments: become JSON; a path becomes a string.
        variables: further environment variables.

    Raises:
        UserError: the function fails.
    """
    target = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "perf.harness", target, json.dumps(arguments, default=str)]
    return last_line(target, command, os.environ | (variables or {}))


def last_line(name: str, command: Sequence[str], variables: Mapping[str, str], folder: Path = PACKAGE) -> Any:
    """Run a program, and read the last line of its output as JSON.

    Raises:
        UserError: it fails, or has no such line.
    """
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if done.returncode == 0:
        try:
            return json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            lines = ["its last line is not JSON"]
    raise UserError(f"{name} could not be measured: {lines[-1]}")


def prepare_process(name: str) -> tuple[Recipe, str]:
    """A recipe and the first device that it may use, with the recipe's number of threads set."""
    from components.models.backbone import choose_devices
    from components.recipes import load_recipe
    from tasks.devices import set_threads

    recipe = load_recipe(name)
    set_threads(recipe.runtime)
    return recipe, choose_devices(recipe.runtime.devices)[0]


def load_pairs(recipe: Recipe) -> list[Pair]:
    """The preference pairs of a recipe's source."""
    from components.data.sources import load

    return load(recipe.data, recipe.seed).pairs


def peak_mb(device: str = "cpu") -> float:
    """Peak memory so far of a GPU's tensors, or of this process (MB)."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check_load(limit: float = IDLE_LOAD) -> float:
    """Refuse to measure beside other work; gives the machine's load average of the last minute.

    Raises:
        UserError: the machine's load average of the last minute is above the limit.
    """
    load = os.getloadavg()[0]
    if load > limit:
        raise UserError(
            f"the load average is {load:.2f}, and times beside other work mislead: wait until it is below"
            f" {limit}, or use --beside-others"
        )
    return load


if __name__ == "__main__":
    configure_libraries()
    print(json.dumps(resolve_name(sys.argv[1])(*json.loads(sys.argv[2]))))
