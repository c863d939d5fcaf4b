"""The cost of a round of DRIFT at the server by the number of clients, against a double loop over pairs.

    python -m perf graph-costs [2 4 8 16 32] [--loop 16] [--plot costs.html]

Adapters have the shape of rank-16 LoRA on all attention projections of Llama-3.1-8B (DRIFT section 7
and appendix A), and random values around a common adapter. They are in memory, or, above --in-memory
clients, read from their files while they are compared, as in a run. Each number of clients is measured
in a process of its own, so that each has a peak memory of its own: the adapters, and what the
computation adds. The double loop computes the distribution of each client once, and each pair by
scipy's rel_entr in fp64, which is the direct translation of eqs. 6 to 8.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer

from perf.harness import in_process, peak_mb, show

if TYPE_CHECKING:
    import pandas as pd
    import torch

LAYERS = 32
HIDDEN = 4096
KEYS = 1024
"""Of Llama-3.1-8B: layers, hidden size, and the width of its keys and values."""
DELTA = 0.2
"""Divergence threshold of the timed shortest paths."""
BYTES = 4
"""Of a value in fp32."""
Adapters = Sequence[Mapping[str, "torch.Tensor"]]
Matrix = npt.NDArray[np.float64]
Count = Annotated[int, typer.Option(min=1)]


def compare_clients(
    clients: Annotated[list[int] | None, typer.Argument(min=1, help="By default 2, 4, 8, 16 and 32.")] = None,
    loop: Annotated[int, typer.Option(help="Clients up to which the double loop is timed.")] = 16,
    in_memory: Annotated[int, typer.Option(help="Clients up to which adapters are in memory.")] = 64,
    rank: Count = 16,
    layers: Count = LAYERS,
    plot: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
) -> None:
    """The cost of a round of DRIFT at the server by the number of clients."""
    import pandas as pd

    numbers = sorted(set(clients or (2, 4, 8, 16, 32)))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_adapters(folder, numbers[-1], rank, layers)
        try:
            for count in numbers:
                cost = in_process(measure, folder, count, count <= in_memory, count <= loop)
                rows.append(cost | {"memory / adapters": cost.pop("memory") / (count * size)})
        finally:  # what was measured before one failed, for example for lack of memory
            values = f"{size / BYTES / 1e6:.1f} million values, {size / 1e6:.1f} MB per adapter"
            frame = pd.DataFrame(rows)
            show(f"Seconds at rank {rank} on q, k, v, o of {layers} layers: {values}", frame)
    if plot:
        draw(frame, plot)


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


def measure(folder: str, count: int, in_memory: bool, loop: bool) -> dict[str, float]:
    """The cost for so many of the first adapters of a folder.

    Args:
        folder: of write_adapters.
        count: number of clients.
        in_memory: whether the adapters are read before the measurement.
        loop: whether the double loop is timed as well; without it, its figures are NaN.

    Returns:
        seconds of the steps, and of the double loop; and bytes of the adapters and of the computation:
        the largest resident set minus the one before the adapters, including the pages of mapped files
        that were read.
    """
    import torch

    from components.federation import graph

    names = [f"client-{index:03d}" for index in range(count)]
    graph.divergence_matrix([{"a": torch.zeros(1)}] * 2)  # loads libraries, and starts threads
    before = peak_mb()
    adapters = _open(Path(folder), count, in_memory)
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
    memory = (peak_mb() - before) * 2**20
    seconds, difference = _time_loop(adapters, matrix) if loop else (math.nan, math.nan)
    return {
        "clients": count,
        "divergences": compared - start,
        "graph": weighted - compared,
        "averages": averaged - weighted,
        "all": averaged - start,
        "memory": memory,
        "double loop": seconds,
        "its time / ours": seconds / (compared - start),
        "largest relative difference": difference,
    }


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


def draw(costs: pd.DataFrame, path: Path) -> None:
    """Draw seconds by the number of clients, on logarithmic axes."""
    from components.charts import line_chart, write_charts

    names = {
        "divergences": "divergences of all pairs",
        "graph": "spanning tree and all shortest paths",
        "averages": "weighted averages",
        "double loop": "double loop over pairs (scipy)",
    }
    long = costs.rename(columns=names).melt("clients", list(names.values())).dropna()
    points = list(zip(long["variable"], long["clients"], long["value"], strict=True))
    figure = line_chart("A round of DRIFT at the server", "clients", "seconds", points)
    figure.update_xaxes(type="log", tickvals=costs["clients"].tolist())
    figure.update_yaxes(type="log")
    write_charts([figure], path)
