"""Sums of clients' contributions with differential privacy of a client (unit `client`).

    a client        D = its movement; clipped to the norm C, and rounded to the grid (privacy/clipping.py)
    the server      phi = phi + (1 / A) (g sum of D + z),  A clients of a round by the recipe

A is fixed, so that a client which is missing, or has no pairs, counts as D = 0, and nobody changes the weight
of another. Clients take turns (`round-robin`): each is asked at most once in b = floor(M / A) rounds, and k
times in all, of R. z has one of two kinds of noise, with sigma = federation.privacy.noise_multiplier:

    independent     discrete Gaussian of deviation sigma C sqrt(k), for each round
    banded          correlated over the rounds (privacy/factors.py), of w with deviation sigma C sens(b, R)

The noise follows from the server's secret, the step and the sum itself, so that a repeated step has the same,
and one with other clients has other noise. The secret, and the noise that later rounds need, are in a folder
beside that of the federation, which nobody else may read.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from components.config import FederationConfig, UserError
from components.config.privacy import ClientPrivacy
from components.io import PRIVATE, write_atomically
from components.models.store import AdapterStore
from components.privacy.clipping import clip_to_grid, grid_bits, grid_width
from components.privacy.factors import Vector, correlated, participations, sensitivity
from components.privacy.ledger import Release, solve_sigma
from components.privacy.noise import Stream, discrete_gaussian, gaussian
from components.privacy.secrets import digest, kept_secret, simulated_secret

if TYPE_CHECKING:
    from components.models.store import Adapter

ATTEMPTS = "sums.txt"
"""A line for each sum that was released: its step, its adapter, and the name of its noise."""
LARGEST_TABLE = 1 << 20
"""Largest deviation of discrete noise, in cells: its table takes 400 MB."""
LARGEST_SUM = 1 << 24
"""Integers below it are exact in fp32, in which sums of contributions are taken."""


@dataclass(frozen=True)
class NoisePlan:
    """The noise of all rounds of a recipe."""

    privacy: ClientPrivacy
    cohort: int  # A
    rounds: int  # R
    separation: int  # b

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise over the sensitivity of all rounds."""
        own = self.privacy.noise_multiplier
        if own is not None:
            return own
        assert self.privacy.target_epsilon is not None
        return solve_sigma(self.privacy.target_epsilon, self.privacy.delta)

    def moved(self, rounds: int) -> float:
        """Sensitivity of so many rounds to one client, in units of C."""
        if self.privacy.noise == "independent":
            return math.sqrt(participations(rounds, self.separation))
        return sensitivity(self.separation, rounds)

    @property
    def deviation(self) -> float:
        """Standard deviation of the fresh noise of a round, in units of C."""
        return self.sigma * self.moved(self.rounds)

    def releases(self, rounds: int, repeated: int = 0) -> list[Release]:
        """What so many rounds have released of a client that took part as often as it can.

        Args:
            rounds: that are complete.
            repeated: sums that were released besides, because a round was repeated with other clients.
        """
        releases = []
        if rounds:
            releases.append(Release(mechanism="gaussian", sigma=self.deviation / self.moved(rounds)))
        if repeated:
            releases.append(Release(mechanism="gaussian", sigma=self.deviation, steps=repeated))
        return releases

    @property
    def name(self) -> str:
        """All that the noise depends on beside the secret, the step and the sum."""
        return f"{self.privacy.model_dump_json()} {self.cohort} {self.rounds} {self.separation}"


def noise_plan(config: FederationConfig, clients: int) -> NoisePlan:
    """The noise of rounds with so many clients; the recipe protects clients."""
    assert isinstance(config.privacy, ClientPrivacy)
    separation = max(1, clients // config.clients_per_round)
    return NoisePlan(config.privacy, config.clients_per_round, config.rounds, separation)


def contribution(tensors: Adapter, origin: Adapter, clip: float, frozen: tuple[str, ...]) -> Adapter:
    """What a client sends in place of its adapter: its movement in cells of the grid.

    Args:
        tensors: the trained adapter.
        origin: the adapter that the client received.
        clip: C.
        frozen: LoRA factors that are not trained; their movement is 0.
    """
    trained = trained_names(tensors, frozen)
    cells = clip_to_grid({name: tensors[name] - origin[name] for name in trained}, clip)
    return {name: tensor.new_zeros(tensor.shape) for name, tensor in tensors.items()} | cells


def trained_names(adapter: Adapter, frozen: tuple[str, ...]) -> list[str]:
    """The names of the tensors that clients train, sorted."""
    return sorted(name for name in adapter if not any(f".lora_{factor}." in name for factor in frozen))


class ServerSecrets:
    """The folder of the server's secret, and of the noise that later rounds need."""

    def __init__(self, store: AdapterStore, simulated_seed: int | None) -> None:
        """The folder beside that of the federation whose adapters a store has.

        Args:
            store: of the federation.
            simulated_seed: from which the secret follows; None: from the system's entropy.
        """
        federation = store.root.parent
        self.folder = federation.with_name(f"{federation.name}-server")
        self._seed = simulated_seed

    @property
    def secret(self) -> bytes:
        """The server's secret; the first call makes it."""
        if self._seed is not None:
            return simulated_secret(self._seed, "")
        secret = kept_secret(self.folder / "secret")
        self.folder.chmod(0o700)
        return secret

    @property
    def is_lost(self) -> bool:
        """Whether there is no secret, which a run that has released sums has had."""
        return self._seed is None and not (self.folder / "secret").is_file()

    def remove(self) -> None:
        """Remove the folder: with the secret, sums without their noise could be computed from commits."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def repeated(self) -> int:
        """How many sums were made beside one for each step and adapter."""
        lines = self._attempts()
        return len(lines) - len({line.rpartition(" ")[0] for line in lines})

    def note(self, purpose: tuple[str, ...], name: str) -> None:
        """Write down that a sum is about to be released; the same sum again is the same release."""
        line = f"{' '.join(purpose)} {name}"
        lines = self._attempts()
        if line not in lines:
            content = "".join(f"{one}\n" for one in (*lines, line))
            write_atomically(self.folder / ATTEMPTS, content.encode(), PRIVATE)
            self.folder.chmod(0o700)

    def _attempts(self) -> list[str]:
        path = self.folder / ATTEMPTS
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []

    def earlier(self, name: str, count: int) -> list[dict[str, Vector]]:
        """The noise of a sum and of those before it, the latest first, at most so many.

        Raises:
            UserError: it is missing, without which later noise would be wrong.
        """
        found: list[dict[str, Vector]] = []
        while name and len(found) < count:
            path = self._path(name)
            if not path.is_file():
                raise UserError(
                    f"{path}, the noise of an earlier round, is missing: later rounds cannot be protected"
                    " without it. Start a new run."
                )
            with np.load(path) as file:
                found.append({key: file[key] for key in file.files if key != "previous"})
                name = str(file["previous"])
        return found

    def keep(self, name: str, previous: str, noise: dict[str, Vector], count: int) -> None:
        """Write the noise of a sum, and the name of that before it; of earlier ones `count` are kept."""
        content = io.BytesIO()
        np.savez(content, previous=np.array(previous), **noise)  # type: ignore[arg-type]
        write_atomically(self._path(name), content.getvalue(), PRIVATE)
        needed = {self._path(one) for one in (name, *self._chain(previous, count))}
        for path in self.folder.glob("*.npz"):
            if path not in needed:
                path.unlink()

    def _chain(self, name: str, count: int) -> Iterator[str]:
        """The name, and those before it, at most so many."""
        while name and count and self._path(name).is_file():
            yield name
            with np.load(self._path(name)) as file:
                name, count = str(file["previous"]), count - 1

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"


def noised_mean(
    before: Adapter,
    cells: Adapter,
    plan: NoisePlan,
    secrets: ServerSecrets,
    purpose: tuple[str, ...],
    previous: str,
    frozen: tuple[str, ...],
) -> tuple[Adapter, str]:
    """The server's new adapter (fp32), and the name of its noise.

    Args:
        before: phi.
        cells: the sum of the clients' contributions in cells of the grid, fp32.
        plan: the noise.
        secrets: of the server.
        purpose: what the sum is of: the step, and the adapter's name.
        previous: name of the noise of the round before; empty before the first one.
        frozen: see `contribution`.
    """
    import torch

    names = trained_names(before, frozen)
    values = sum(before[name].numel() for name in names)
    sums = {name: cells[name].double().flatten().numpy() for name in names}
    # Noise that differs in its scale alone would tell the sum, so the key has all that it is made of.
    parts = (*purpose, plan.name, previous, *(before[name].numpy().tobytes().hex() for name in names))
    content = digest(secrets.secret, *parts, *(sums[name].tobytes().hex() for name in names)).hex()
    secrets.note(purpose, content)
    per_clip = 2.0 ** grid_bits(values)  # cells that are as wide as C
    fresh = {
        name: _draw(plan, Stream(secrets.secret, name, content), len(own), per_clip)
        for name, own in sums.items()
    }
    noise = fresh
    if plan.privacy.noise == "banded":
        earlier = secrets.earlier(previous, plan.separation - 1)
        noise = {
            name: correlated(own, [step[name] for step in earlier], plan.separation)
            for name, own in fresh.items()
        }
        secrets.keep(content, previous, noise, plan.separation - 1)
    width = grid_width(plan.privacy.clip, values) / plan.cohort
    new = dict(before)
    for name in names:
        moved = torch.from_numpy(width * (sums[name] + noise[name])).reshape(before[name].shape)
        new[name] = (before[name].double() + moved).float()
    return new, content


def _draw(plan: NoisePlan, stream: Stream, count: int, per_clip: float) -> npt.NDArray[np.float64]:
    """Fresh noise of a round, in cells."""
    deviation = plan.deviation * per_clip
    if plan.privacy.noise == "independent":
        return discrete_gaussian(stream, count, deviation).astype(np.float64)
    return gaussian(stream, count, deviation)


def check_noise(plan: NoisePlan, values: int) -> None:
    """Refuse noise that cannot be drawn, and sums that are not exact.

    Args:
        plan: the noise.
        values: number of trained values.

    Raises:
        UserError: naming the key, and what is possible.
    """
    if plan.cohort << grid_bits(values) >= LARGEST_SUM:
        raise UserError(
            f"federation.clients_per_round is {plan.cohort}, and sums of so many clients of {values} values"
            f" are not exact: use at most {(LARGEST_SUM - 1) >> grid_bits(values)}, or train fewer values."
        )
    cells = plan.deviation * 2 ** grid_bits(values)
    if plan.privacy.noise == "independent" and cells > LARGEST_TABLE:
        raise UserError(
            f"federation.privacy.noise 'independent' would need a table of {cells:.3g} cells a deviation, of"
            f" at most {LARGEST_TABLE}: use 'banded', less noise, or train fewer values."
        )


def contribution_fault(tensors: Adapter, clip: float, frozen: tuple[str, ...]) -> str:
    """Why tensors are no contribution that the noise is made for, in words; empty if they are one."""
    trained = trained_names(tensors, frozen)
    if any(bool((tensor != tensor.round()).any()) for tensor in tensors.values()):
        return "has values that are not on the grid"
    if any(bool(tensor.any()) for name, tensor in tensors.items() if name not in trained):
        return "moves tensors that are not trained"
    values = sum(tensors[name].numel() for name in trained)
    squares = sum(float(tensors[name].double().square().sum()) for name in trained)
    if math.sqrt(squares) * grid_width(clip, values) > clip * (1 + 1e-9):
        return "is longer than federation.privacy.clip"
    return ""


def signal_warning(plan: NoisePlan, values: int) -> str:
    """That noise exceeds what a round can move by far, as a sentence; empty where it does not."""
    ratio = plan.deviation * math.sqrt(values) / plan.cohort
    if ratio <= 20:
        return ""
    return (
        f"federation.privacy: the noise of a round is {ratio:.0f} times its largest possible movement: train"
        " fewer values (a smaller rank, fewer layers, ffa_lora), or use more clients in a round."
    )
