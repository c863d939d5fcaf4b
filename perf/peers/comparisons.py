"""The project beside Flower and TRL, on equal work.

1. A round of FedBis through the flow (Prefect's tasks, commits, MLflow logging), against a Flower app
   that loads the model for each message and computes all logits, and against the same app with a
   cached model that computes two rows of the head at the answer position.
2. A client of FedDPO with the resident model, against a new DPOTrainer of TRL that loads the model.

The peers run in an environment of their own, which the first call installs from PyPI
(requirements.txt). All programs read the same token rows, minibatches and initial adapter, and their
first losses must be equal. Each runs in a process of its own, in turn; start-up, data and the first
round or client are not timed. The recipe's dropout is switched off, and the processor is used.

A program prints its work as JSON: of each round or client the seconds, and by client the losses of its
first and its last step (nats).
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import Recipe, UserError
from components.environment import available_cores
from components.io import write_atomically
from components.paths import home
from perf import harness
from perf.harness import Ratios, compare, in_process, last_line
from perf.peers.exchange import load_peer_recipe, prepared_folder, write_exchange
from perf.peers.own import Work, time_clients, time_rounds

if TYPE_CHECKING:
    import pandas as pd

OURS = "fed-rlhf"
TOLERANCE = 1e-3
"""Largest difference between first losses of the same work (nats)."""
CLIENTS = 3
"""Clients of FedDPO in a run; the first one is not timed."""
FEDDPO = ("federation.method=feddpo", "federation.batch_size=1", "federation.optimizer.lr=2e-4")
"""Overrides of a recipe with another method, those of the benchmark `summarization`."""
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SCRIPTS = Path(__file__).with_name("scripts")
"""The peers' programs, which import nothing of the project."""


def compare_flower(name: str, repeats: int, rounds: int = 1, clients_at_once: int = 1) -> Ratios:
    """Print the times of a round of FedBis through the flow and in Flower; gives the speed-ups.

    Args:
        name: of the recipe.
        repeats: runs of each program.
        rounds: timed rounds of a run, after one that is not timed.
        clients_at_once: clients of all programs that train concurrently, with an even share of the
            cores; Flower's default of two cores per client is 1 on two cores.

    Raises:
        UserError: the recipe's method is not fedbis, there are fewer cores than clients at once, the
            peers cannot be installed, or one of them fails.
        AssertionError: a peer does other work.
    """
    cores = available_cores()
    if clients_at_once > cores:
        raise UserError(
            f"{clients_at_once} clients cannot train at once on {cores} cores: choose at most one per core."
        )
    recipe = load_peer_recipe(
        name, [f"federation.rounds={rounds + 1}", f"runtime.cpu_workers={clients_at_once}"]
    )
    if recipe.federation.method != "fedbis":
        raise UserError(
            f"federation.method of the recipe '{name}' is '{recipe.federation.method}', but the"
            " Flower app trains the selector of fedbis: choose a recipe such as summarization/demo."
        )
    command = [str(peers_python()), "-c", "import flower_app; flower_app.main()"]
    command += ["--cores", str(cores), "--clients-at-once", str(clients_at_once)]
    peers = {"flower": command, "flower-tuned": [*command, "--tuned"]}
    frame = _alternate(recipe, repeats, time_rounds, peers)
    title = f"A round of {recipe.federation.clients_per_round} clients, {clients_at_once} at a time"
    ratio = f"peers/round_with_{clients_at_once}_at_once_against"
    pairs = {f"{ratio}_{peer.replace('-', '_')}": (peer, OURS) for peer in peers}
    return compare(f"{title} ({_describe(name, recipe)})", frame, pairs)


def compare_trl(name: str, repeats: int) -> Ratios:
    """Print the times of a client of FedDPO with the resident model and a new DPOTrainer; gives the speed-up.

    The method and batch size of another recipe are replaced.

    Raises:
        UserError: the recipe cannot be compared, the peers cannot be installed, or one of them fails.
        AssertionError: TRL does other work.
    """
    recipe = load_peer_recipe(name)
    if recipe.federation.method != "feddpo":
        recipe = load_peer_recipe(name, FEDDPO)
    if recipe.federation.clients_per_round < 2:
        raise UserError(
            f"federation.clients_per_round of the recipe '{name}' is 1, but the first client is not timed:"
            " choose a recipe with 2 clients or more."
        )
    threads = str(recipe.runtime.torch_threads or available_cores())
    command = [str(peers_python()), str(SCRIPTS / "trl_client.py"), "--threads", threads]
    frame = _alternate(recipe, repeats, time_clients, {"trl": command}, CLIENTS)
    pairs = {"peers/client_against_trl": ("trl", OURS)}
    return compare(f"A client, one at a time ({_describe(name, recipe)})", frame, pairs)


def _describe(name: str, recipe: Recipe) -> str:
    federation = recipe.federation
    return (
        f"{name}: {federation.method}, {federation.local_steps} steps of {federation.batch_size} rows;"
        f" {available_cores()} cores"
    )


def _alternate(
    recipe: Recipe,
    repeats: int,
    ours: Callable[[str], list[Work]],
    peers: Mapping[str, Sequence[str]],
    clients: int | None = None,
) -> pd.DataFrame:
    """Run the project and peers in turn on the work of a recipe's rounds, of so many clients."""
    from components.data.prepare import prepare

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder, clients)
        programs: dict[str, Callable[[], list[Work]]] = {OURS: partial(in_process, ours, folder)}
        for name, command in peers.items():
            programs[name] = partial(last_line, name, [*command, str(folder)], peer_variables(), folder)
        return alternate(programs, repeats)


def alternate(programs: Mapping[str, Callable[[], list[Work]]], repeats: int) -> pd.DataFrame:
    """Run all programs in turn, of which the first is the project's; see harness.alternate.

    Returns:
        the median seconds of each run's rounds or clients without the first one, and the largest
        difference of its losses in first steps from the project's in the same repeat.

    Raises:
        UserError: a program fails.
        AssertionError: a peer does other work.
    """

    def timed(name: str) -> dict[str, Any]:
        work = programs[name]()
        return {"seconds": statistics.median(part["seconds"] for part in work[1:]), "work": work}

    frame = harness.alternate({name: partial(timed, name) for name in programs}, repeats)
    ours = frame[frame["name"] == OURS].set_index("repeat")["work"]
    frame["loss difference, first steps"] = [
        loss_difference(row.name, ours[row.repeat], row.work) for row in frame.itertuples()
    ]
    return frame.drop(columns="work")


def loss_difference(name: str, ours: Sequence[Work], peers: Sequence[Work]) -> float:
    """The largest difference between losses of first steps (nats), which must be rounding.

    Last steps are not judged, because differences of rounding grow with each step.

    Raises:
        AssertionError: clients differ, or a loss differs by more than TOLERANCE.
    """
    if [set(part["losses"]) for part in ours] != [set(part["losses"]) for part in peers]:
        raise AssertionError(f"{name} must train the clients of {OURS}: {ours} and {peers}")
    first = np.max(
        [
            abs(losses[0] - other["losses"][client][0])
            for own, other in zip(ours, peers, strict=True)
            for client, losses in own["losses"].items()
        ]
    )
    if not first <= TOLERANCE:
        raise AssertionError(
            f"{name} must do the work of {OURS}, but losses of first steps differ by {first:.4f}:"
            f" {ours} and {peers}"
        )
    return float(first)


# --- the environment of the peers


def peers_python(folder: Path | None = None) -> Path:
    """The interpreter of the peers' environment, which is made if it is missing or outdated.

    Args:
        folder: of the environment; None takes build/peers of the project's home.

    Raises:
        UserError: the environment cannot be made, for example without a network.
    """
    folder = folder or home() / "build" / "peers"
    stamp = folder / "installed.txt"
    content = f"# Python {platform.python_version()}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content:
        return python
    print(f"installing the peers into {folder} (minutes the first time) ...", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--requirement", str(REQUIREMENTS)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["no reason was given"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
            raise UserError(
                f"the peers could not be installed into {folder} ({reason.removeprefix('ERROR: ')}): check"
                " that PyPI can be reached, and run the command again."
            )
    write_atomically(stamp, content.encode())
    return python


def peer_variables() -> dict[str, str]:
    """The environment of a peer's process: that of this process, for example how threads wait."""
    own = {"FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SCRIPTS)}
    return dict(os.environ) | own
