"""The project beside Flower and TRL, on equal work.

1. A round of FedBis through the flow (Prefect's tasks, commits, MLflow logging), against a Flower app
   that loads the model for each message and computes all logits, and against the same app with a
   cached model that computes two rows of the head at the answer position.
2. A client of FedDPO with the resident model, against a new DPOTrainer of TRL that loads the model.

The peers run in an environment of their own, which the first call installs from PyPI
(requirements.txt). All programs read the same token rows, minibatches and initial adapter, and their
first losses must be equal. Each runs in a process of its own, in turn; start-up, data and the first
round or client are not timed. The recipe's dropout is switched off, and the processor is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe, UserError
from components.environment import available_cores
from perf.harness import Ratios, compare, in_process, last_line
from perf.peers.environment import SCRIPTS, peer_variables, peers_python
from perf.peers.exchange import load_peer_recipe, prepared_folder, write_exchange
from perf.peers.own import Work, time_clients, time_rounds
from perf.peers.runs import OURS, Program, alternate

if TYPE_CHECKING:
    import pandas as pd

CLIENTS = 3
"""Clients of FedDPO in a run; the first one is not timed."""
FEDDPO = ("federation.method=feddpo", "federation.batch_size=1", "federation.optimizer.lr=2e-4")
"""Overrides of a recipe with another method, those of the benchmark `summarization`."""


def compare_flower(name: str, repeats: int, rounds: int = 1, clients_at_once: int = 1) -> Ratios:
    """Print the times of a round of FedBis through the flow and in Flower, plain and tuned.

    Args:
        name: of the recipe.
        repeats: runs of each program.
        rounds: timed rounds of a run, after one that is not timed.
        clients_at_once: clients of all programs that train concurrently, with an even share of the
            cores; Flower's default of two cores per client is 1 on two cores.

    Returns:
        the speed-ups against both apps.

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
    overrides = [f"federation.rounds={rounds + 1}", f"runtime.cpu_workers={clients_at_once}"]
    recipe = load_peer_recipe(name, overrides)
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
    """Print the times of a client of FedDPO with the resident model, and with a new DPOTrainer.

    Args:
        name: of the recipe, whose method and batch size are replaced if it is not feddpo.
        repeats: runs of each program.

    Returns:
        the speed-up.

    Raises:
        UserError: the recipe cannot be compared, the peers cannot be installed, or one of them fails.
        AssertionError: TRL does other work.
    """
    recipe = load_feddpo_recipe(name)
    threads = str(recipe.runtime.torch_threads or available_cores())
    command = [str(peers_python()), str(SCRIPTS / "trl_client.py"), "--threads", threads]
    frame = _alternate(recipe, repeats, time_clients, {"trl": command}, CLIENTS)
    pairs = {"peers/client_against_trl": ("trl", OURS)}
    return compare(f"A client, one at a time ({_describe(name, recipe)})", frame, pairs)


def load_feddpo_recipe(name: str) -> Recipe:
    """A recipe of FedDPO, or another one with the settings of the benchmark's FedDPO.

    Raises:
        UserError: it cannot be compared.
    """
    recipe = load_peer_recipe(name)
    if recipe.federation.method != "feddpo":
        recipe = load_peer_recipe(name, FEDDPO)
    if recipe.federation.clients_per_round < 2:
        raise UserError(
            f"federation.clients_per_round of the recipe '{name}' is 1, but the first client is not timed:"
            " choose a recipe with 2 clients or more."
        )
    return recipe


def _alternate(
    recipe: Recipe,
    repeats: int,
    ours: Callable[[str], list[Work]],
    peers: Mapping[str, Sequence[str]],
    clients: int | None = None,
) -> pd.DataFrame:
    """Run the project and peers in turn on the same work.

    Args:
        recipe: whose rounds are the work.
        repeats: runs of each program.
        ours: does the work of an exchange folder.
        peers: commands by name, to which the exchange folder is appended.
        clients: see write_exchange.
    """
    from components.data.prepare import prepare

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder, clients)
        programs: dict[str, Program] = {OURS: partial(in_process, ours, folder)}
        for name, command in peers.items():
            programs[name] = partial(last_line, name, [*command, str(folder)], peer_variables(), folder)
        return alternate(programs, repeats)


def _describe(name: str, recipe: Recipe) -> str:
    federation = recipe.federation
    return (
        f"{name}: {federation.method}, {federation.local_steps} steps of {federation.batch_size} rows;"
        f" {available_cores()} cores"
    )
