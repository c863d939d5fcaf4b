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
from functools import partial
from pathlib import Path

from components.config import Recipe, UserError
from perf.harness import Ratios, compare, in_process, last_line
from perf.peers.environment import SCRIPTS, peer_variables, peers_python
from perf.peers.exchange import load_peer_recipe, prepared_folder, write_exchange
from perf.peers.own import time_clients, time_rounds
from perf.peers.runs import OURS, Program, alternate

FLOWER = "flower"
TUNED = "flower-tuned"
TRL = "trl"
CLIENTS = 3
"""Clients of FedDPO in a run; the first one is not timed."""
FEDDPO = ("federation.method=feddpo", "federation.batch_size=1", "federation.optimizer.lr=2e-4")
"""Overrides of a recipe with another method, those of the benchmark `summarization`."""
RUN_FLOWER = "import flower_app; flower_app.main()"


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
    from components.data.prepare import prepare
    from components.environment import available_cores

    if clients_at_once > available_cores():
        raise UserError(
            f"{clients_at_once} clients cannot train at once on {available_cores()} cores: choose at most one"
            " per core."
        )
    overrides = [f"federation.rounds={rounds + 1}", f"runtime.cpu_workers={clients_at_once}"]
    recipe = load_peer_recipe(name, overrides)
    if recipe.federation.method != "fedbis":
        raise UserError(
            f"federation.method of the recipe '{name}' is '{recipe.federation.method}', but the"
            " Flower app trains the selector of fedbis: choose a recipe such as summarization/demo."
        )
    python = peers_python()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder)
        programs: dict[str, Program] = {
            OURS: partial(in_process, time_rounds, folder),
            FLOWER: _flower_program(python, folder, clients_at_once),
            TUNED: _flower_program(python, folder, clients_at_once, "--tuned"),
        }
        frame = alternate(programs, repeats)
    clients = recipe.federation.clients_per_round
    title = f"A round of {clients} clients, {clients_at_once} at a time"
    ratio = f"peers/round_with_{clients_at_once}_at_once_against"
    pairs = {f"{ratio}_{peer.replace('-', '_')}": (peer, OURS) for peer in (FLOWER, TUNED)}
    return compare(f"{title} ({_describe(name, recipe)})", frame, pairs)


def _flower_program(python: Path, folder: Path, clients_at_once: int, *arguments: str) -> Program:
    from components.environment import available_cores

    command = [str(python), "-c", RUN_FLOWER, str(folder), "--cores", str(available_cores())]
    command += ["--clients-at-once", str(clients_at_once), *arguments]
    return partial(last_line, "flower", command, peer_variables(), folder)


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
    from components.data.prepare import prepare
    from components.environment import available_cores

    recipe = load_feddpo_recipe(name)
    python = peers_python()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder, CLIENTS)
        threads = str(recipe.runtime.torch_threads or available_cores())
        command = [str(python), str(SCRIPTS / "trl_client.py"), str(folder), "--threads", threads]
        programs: dict[str, Program] = {
            OURS: partial(in_process, time_clients, folder),
            TRL: partial(last_line, TRL, command, peer_variables(), folder),
        }
        frame = alternate(programs, repeats)
    pairs = {"peers/client_against_trl": (TRL, OURS)}
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


def _describe(name: str, recipe: Recipe) -> str:
    from components.environment import available_cores

    federation = recipe.federation
    return (
        f"{name}: {federation.method}, {federation.local_steps} steps of {federation.batch_size} rows;"
        f" {available_cores()} cores"
    )
