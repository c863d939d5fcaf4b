"""The cost of a round of DRIFT at the server by the number of clients, against a double loop over pairs.

    python -m perf.graph_costs [--clients 2 4 8 16 32] [--loop 16] [--plot costs.html]

Adapters have the shape of rank-16 LoRA on all attention projections of Llama-3.1-8B (DRIFT section 7
and appendix A), and random values around a common adapter. They are in memory, or, above --in-memory
clients, read from their files while they are compared, as in a run. Each number of clients is measured
in a process of its own, so that each has a peak memory of its own: the adapters, and what the
computation adds. The double loop computes the distribution of each client once, and each pair by
scipy's rel_entr in fp64, which is the direct translation of eqs. 6 to 8.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.environment import configure_libraries
from components.paths import PACKAGE

if TYPE_CHECKING:
    import torch

LAYERS = 32
HIDDEN = 4096
KEYS = 1024
"""Of Llama-3.1-8B: layers, hidden size, and the width of its keys and values."""
DELTA = 0.2
"""Divergence threshold of the timed shortest paths."""
BYTES = 4
"""Of a value in fp32."""
HEADER = (
    f"{'clients':>8}{'divergences':>13}{'graph':>8}{'average':>9}{'all':>8}   {'memory / adapters':>17}"
    f"   {'double loop':>11}   speed-up   largest relative difference"
)

Adapters = Sequence[Mapping[str, "torch.Tensor"]]
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GraphCost:
    """The cost of a round at the server.

    Attributes:
        clients: number of clients.
        divergences: seconds for the divergences of all pairs.
        graph: seconds for the spanning tree and the weights of all clients.
        average: seconds for the weighted averages.
        memory: bytes of the adapters and of the computation: the largest resident set minus the one
            before the adapters, including the pages of mapped files that were read.
        loop: seconds of the double loop; None where it was not run.
        difference: largest relative difference of a divergence from the loop's; None without it.
    """

    clients: int
    divergences: float
    graph: float
    average: float
    memory: float
    loop: float | None = None
    difference: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all three steps."""
        return self.divergences + self.graph + self.average

    def row(self, adapter_bytes: int) -> str:
        """The row of the table."""
        text = (
            f"{self.clients:>8}{self.divergences:>11.2f} s{self.graph:>6.2f} s{self.average:>7.2f} s"
            f"{self.seconds:>6.1f} s   {self.memory / (self.clients * adapter_bytes):>17.2f}"
        )
        if self.loop is not None:
            text += f"   {self.loop:>9.1f} s   {self.loop / self.divergences:>7.1f}x   {self.difference:.1e}"
        return text


class MeasurementError(RuntimeError):
    """A measuring process that failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and draw it; gives the exit status."""
    options = _parse(arguments)
    configure_libraries()
    if options.measure:
        in_memory = options.measure <= options.in_memory
        cost = measure(options.folder, options.measure, in_memory, options.measure <= options.loop)
        print(json.dumps(asdict(cost)))
        return 0
    if min(*options.clients, options.rank, options.layers) < 1:
        print("error: --clients, --rank and --layers must be at least 1", file=sys.stderr)
        return 2
    try:
        costs = compare(options)
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.plot:
        plot(costs, options.plot)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.graph_costs", description="Costs of a round of DRIFT at the server."
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="numbers of clients"
    )
    parser.add_argument(
        "--loop", type=int, default=16, help="time the double loop up to this number of clients"
    )
    parser.add_argument(
        "--in-memory", type=int, default=64, help="hold adapters in memory up to this number of clients"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model")
    parser.add_argument("--plot", type=Path, help="HTML page to write")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> list[GraphCost]:
    """Print the table row by row.

    Raises:
        MeasurementError: a measuring process failed, for example for lack of memory.
    """
    costs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_adapters(folder, max(options.clients), options.rank, options.layers)
        print(
            f"rank {options.rank} on q, k, v, o of {options.layers} layers:"
            f" {size / BYTES / 1e6:.1f} million values, {size / 1e6:.1f} MB per adapter"
        )
        print(HEADER)
        for count in sorted(set(options.clients)):
            costs.append(_measure_in_process(folder, count, options))
            print(costs[-1].row(size), flush=True)
    return costs


def _measure_in_process(folder: Path, count: int, options: argparse.Namespace) -> GraphCost:
    command = [sys.executable, "-m", "perf.graph_costs", "--measure", str(count), "--folder", str(folder)]
    command += ["--loop", str(options.loop), "--in-memory", str(options.in_memory)]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["the process was killed"])[-1]
        raise MeasurementError(f"{count} clients: {reason}")
    return GraphCost(**json.loads(done.stdout.splitlines()[-1]))


def write_adapters(folder: Path, count: int, rank: int, layers: int) -> int:
    """Write adapters as numbered files; gives the size of the values of one (bytes)."""
    import torch
    from safetensors.torch import save_file

    numbers = torch.Generator().manual_seed(0)
    common: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(rank, layers).items():
        common[name] = 0.01 * torch.randn(shape, generator=numbers)
    for index in range(count):
        adapter = {
            name: tensor + 1e-3 * torch.randn(tensor.shape, generator=numbers)
            for name, tensor in common.items()
        }
        save_file(adapter, _path(folder, index))
    return sum(BYTES * tensor.numel() for tensor in common.values())


def _shapes(rank: int, layers: int) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors of an adapter by name."""
    widths = {"q_proj": HIDDEN, "k_proj": KEYS, "v_proj": KEYS, "o_proj": HIDDEN}
    shapes = {}
    for layer in range(layers):
        for projection, width in widths.items():
            name = f"model.layers.{layer}.self_attn.{projection}"
            shapes[f"{name}.lora_A.weight"] = (rank, HIDDEN)
            shapes[f"{name}.lora_B.weight"] = (width, rank)
    return shapes


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.safetensors"


def measure(folder: Path, count: int, in_memory: bool, loop: bool) -> GraphCost:
    """The cost for the first adapters of a folder.

    Args:
        folder: the adapters of write_adapters.
        count: number of clients.
        in_memory: whether the adapters are read before the measurement.
        loop: whether the double loop is timed as well.
    """
    import torch

    from components.federation import graph

    names = [f"client-{index:03d}" for index in range(count)]
    graph.divergence_matrix([{"a": torch.zeros(1)}] * 2)  # loads libraries, and starts threads
    before = _resident_bytes()
    adapters = _open(folder, count, in_memory)
    start = time.perf_counter()
    matrix = graph.divergence_matrix(adapters)
    compared = time.perf_counter()
    clients = graph.client_graph(matrix, names)
    tree = graph.spanning_tree(clients)
    weights = [graph.mst_weights(clients, name, tree) for name in names]
    for name in names:
        graph.shortest_path_weights(clients, name, DELTA)
    weighted = time.perf_counter()
    _average(adapters, names, weights)
    averaged = time.perf_counter()
    memory = _resident_bytes() - before
    seconds, difference = _time_loop(adapters, matrix) if loop else (None, None)
    return GraphCost(
        clients=count,
        divergences=compared - start,
        graph=weighted - compared,
        average=averaged - weighted,
        memory=memory,
        loop=seconds,
        difference=difference,
    )


def _open(folder: Path, count: int, in_memory: bool) -> Adapters:
    """The adapters in memory, or in mapped files whose pages are read on access."""
    from safetensors.torch import load, load_file

    paths = [_path(folder, index) for index in range(count)]
    return [load(path.read_bytes()) if in_memory else load_file(path) for path in paths]


def _average(adapters: Adapters, names: Sequence[str], weights: Sequence[Mapping[str, float]]) -> None:
    """Compute the weighted averages of all clients, as the method does."""
    from components.federation.aggregation import mixtures
    from components.federation.method import MIXED_TOGETHER

    for start in range(0, len(names), MIXED_TOGETHER):
        targets = weights[start : start + MIXED_TOGETHER]
        members = sorted(set().union(*targets))
        rows = [[target.get(name, 0.0) for name in members] for target in targets]
        mixtures([adapters[names.index(name)] for name in members], np.array(rows))


def _time_loop(adapters: Adapters, matrix: Matrix) -> tuple[float, float]:
    """Seconds of the double loop, and the largest relative difference of the matrix from the loop's."""
    start = time.perf_counter()
    expected = double_loop(adapters)
    seconds = time.perf_counter() - start
    pairs = ~np.eye(len(adapters), dtype=bool)
    differences = np.abs(matrix - expected)[pairs] / expected[pairs]
    return seconds, float(np.max(differences, initial=0.0))


def double_loop(adapters: Adapters) -> Matrix:
    """Symmetric KL divergence of softmax(values), pair by pair, [K, K] float64."""
    from scipy.special import rel_entr, softmax

    distributions = []
    for adapter in adapters:
        values = np.concatenate([adapter[name].numpy().ravel() for name in sorted(adapter)])
        distributions.append(softmax(values.astype(np.float64)))
    matrix = np.zeros((len(adapters), len(adapters)))
    for i, p in enumerate(distributions):
        for j, q in enumerate(distributions[:i]):
            matrix[i, j] = matrix[j, i] = rel_entr(p, q).sum() + rel_entr(q, p).sum()
    return matrix


def plot(costs: Sequence[GraphCost], path: Path) -> None:
    """Draw seconds by the number of clients, on logarithmic axes."""
    from components.charts import line_chart, write_charts

    points = []
    for cost in costs:
        points += [
            ("divergences of all pairs", cost.clients, cost.divergences),
            ("spanning tree and all shortest paths", cost.clients, cost.graph),
            ("weighted averages", cost.clients, cost.average),
        ]
        if cost.loop is not None:
            points.append(("double loop over pairs (scipy)", cost.clients, cost.loop))
    figure = line_chart("A round of DRIFT at the server", "clients", "seconds", points)
    figure.update_xaxes(type="log", tickvals=[cost.clients for cost in costs])
    figure.update_yaxes(type="log")
    write_charts([figure], path)


def _resident_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
