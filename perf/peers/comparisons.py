"""A round of FedBis against Flower, and a client of FedDPO against a trainer of TRL."""

from __future__ import annotations

import tempfile
from pathlib import Path

from components.config import Recipe, UserError
from perf.comparison import Comparison, Ratios, format_seconds, format_speed_up, median_ratio
from perf.peers.environment import SCRIPTS, peer_variables, peers_python
from perf.peers.exchange import load_peer_recipe, prepared_folder, write_exchange
from perf.peers.runs import OURS, Measurements, Program, alternate, largest_difference, own_program

FLOWER = "flower"
TUNED = "flower-tuned"
TRL = "trl"
CLIENTS = 3
"""Clients of FedDPO in a run; the first one is not timed."""
FEDDPO = ("federation.method=feddpo", "federation.batch_size=1", "federation.optimizer.lr=2e-4")
"""Overrides of a recipe with another method, those of the benchmark `summarization`."""
RUN_FLOWER = "import flower_app; flower_app.main()"


def compare_flower(comparison: Comparison, rounds: int = 1, clients_at_once: int = 1) -> Ratios:
    """Print the times of a round of FedBis through the flow and in Flower, plain and tuned.

    Args:
        comparison: recipe and repeats.
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
    from tasks.devices import available_cores

    if clients_at_once > available_cores():
        raise UserError(
            f"{clients_at_once} clients cannot train at once on {available_cores()} cores: choose at most one"
            " per core."
        )
    overrides = [f"federation.rounds={rounds + 1}", f"runtime.cpu_workers={clients_at_once}"]
    recipe = load_peer_recipe(comparison.recipe, overrides)
    if recipe.federation.method != "fedbis":
        raise UserError(
            f"federation.method of the recipe '{comparison.recipe}' is '{recipe.federation.method}', but the"
            " Flower app trains the selector of fedbis: choose a recipe such as summarization/demo."
        )
    python = peers_python()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder)
        programs = {
            OURS: own_program("rounds", folder),
            FLOWER: _flower_program(python, folder, clients_at_once),
            TUNED: _flower_program(python, folder, clients_at_once, "--tuned"),
        }
        measured = alternate(programs, comparison.repeats)
    clients = recipe.federation.clients_per_round
    print(
        f"\nA round of {clients} clients, {clients_at_once} at once"
        f" ({_describe(comparison.recipe, recipe)}; median of {rounds})"
    )
    return _print_table(measured, "round")


def _flower_program(python: Path, folder: Path, clients_at_once: int, *arguments: str) -> Program:
    from tasks.devices import available_cores

    command = [str(python), "-c", RUN_FLOWER, str(folder), "--cores", str(available_cores())]
    command += ["--clients-at-once", str(clients_at_once), *arguments]
    return Program(command, peer_variables(), folder)


def compare_trl(comparison: Comparison) -> Ratios:
    """Print the times of a client of FedDPO with the resident model, and with a new DPOTrainer.

    Args:
        comparison: recipe, whose method and batch size are replaced if it is not feddpo, and repeats.

    Returns:
        the speed-up.

    Raises:
        UserError: the recipe cannot be compared, the peers cannot be installed, or one of them fails.
        AssertionError: TRL does other work.
    """
    from components.data.prepare import prepare
    from tasks.devices import available_cores

    recipe = load_feddpo_recipe(comparison.recipe)
    python = peers_python()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(recipe.data, recipe.seed, prepared_folder(folder))
        write_exchange(recipe, folder, CLIENTS)
        threads = str(recipe.runtime.torch_threads or available_cores())
        command = [str(python), str(SCRIPTS / "trl_client.py"), str(folder), "--threads", threads]
        programs = {OURS: own_program("clients", folder), TRL: Program(command, peer_variables(), folder)}
        measured = alternate(programs, comparison.repeats)
    timed = len(measured[OURS].work) - 1
    print(f"\nA client ({_describe(comparison.recipe, recipe)}; median of {timed})")
    return _print_table(measured, "client")


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
    from tasks.devices import available_cores

    federation = recipe.federation
    return (
        f"{name}: {federation.method}, {federation.local_steps} steps of {federation.batch_size} rows;"
        f" {available_cores()} cores"
    )


def _print_table(measured: dict[str, Measurements], unit: str) -> Ratios:
    """Print the times of all programs, and the project's speed-up against each peer."""
    ours = measured[OURS]
    for name, measurements in measured.items():
        print(f"  {name:<14} {format_seconds(measurements.seconds, 1)}")
    ratios = {}
    for name, peer in measured.items():
        if name == OURS:
            continue
        print(f"  {OURS} against {name}: {format_speed_up(peer.seconds, ours.seconds)}")
        first, last = largest_difference(ours.work, peer.work)
        print(f"    largest difference of losses: {first:.1e} in first steps, {last:.1e} in last steps")
        ratios[f"peers/{unit}_against_{name.replace('-', '_')}"] = median_ratio(peer.seconds, ours.seconds)
    return ratios
