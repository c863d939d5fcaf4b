"""The context of a client: its rows, private store, rewards, and received adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from components.data.records import DataError, Pair, choose_prompts, read_clients, read_pairs
from components.federation.clients.private import PrivateState, PrivateStore, private_root
from components.federation.protocol import MeasureJob
from components.io import read_json
from components.models.store import Adapter, AdapterHash, AdapterStore
from components.names import file_name
from components.privacy.labels import NoisedVerdicts
from components.privacy.secrets import kept_secret
from components.seeding import generator


@dataclass(frozen=True)
class ClientContext:
    """One client's side of the federation."""

    client: str  # empty for the server's own measurements
    adapters: AdapterStore  # from which it receives adapters, and to which it sends them
    pairs: Path  # the prepared pairs, of which it reads its own rows
    store: PrivateStore  # its private store
    rewards: Path  # folder with the places of trained rewards
    previous_job_key: str = ""  # of its last accepted job; empty before the first one
    position: int | None = None  # among the sorted names of all clients; None: by clients.json
    # The randomised response that is applied to the rows; None: they are read as they are.
    verdicts: NoisedVerdicts | None = None

    def load_adapter(self, digest: AdapterHash) -> Adapter:
        """An adapter that the client is sent."""
        return self.adapters.get(digest)

    def rows(self, split: str) -> list[Pair]:
        """The client's own pairs of a split, with noised verdicts where these are protected."""
        rows = read_pairs(self.pairs, self.client, split)
        return rows if self.verdicts is None else self.verdicts.apply(rows)

    @property
    def measured_flip(self) -> float:
        """Probability with which the verdicts of `drawn_rows` are exchanged."""
        if self.verdicts is None or self.verdicts.exact_measures:
            return 0.0
        return self.verdicts.flip

    @property
    def loss_flip(self) -> float:
        """Probability with which the verdicts of `rows` are exchanged, where losses are corrected for it."""
        return 0.0 if self.verdicts is None else self.verdicts.loss_flip

    def drawn_rows(self, job: MeasureJob) -> list[Pair]:
        """The pairs that a job measures, in their order; where these are not all, the client draws them."""
        rows = self.rows(job.split)
        if self.verdicts is not None and self.verdicts.exact_measures:
            rows = read_pairs(self.pairs, self.client, job.split)
        if job.pairs is None or job.pairs >= len(rows):
            return rows
        drawn = generator(job.seed, "measured pairs", self.client).choice(len(rows), job.pairs, replace=False)
        return [rows[n] for n in sorted(drawn)]

    def private_state(self) -> PrivateState | None:
        """The state after the client's last accepted job; None before the first one."""
        return self.store.load(self.previous_job_key)

    def assigned_reward(self, names: Sequence[str]) -> str:
        """The client's reward, of several that are assigned round-robin by the clients' sorted names."""
        if len(names) == 1:
            return names[0]
        position = self.position
        if position is None:
            position = client_positions(self.pairs.parent)[self.client]
        return names[position % len(names)]

    def pair_scores(self, rows: Sequence[Pair], reward: str) -> npt.NDArray[np.float64]:
        """Scores of the client's training pairs by a reward: of chosen and rejected, [N, 2]."""
        kept = self.store.load_scores(reward)
        scores = {} if kept is None else kept.scores
        missing = [row.pair_id for row in rows if row.pair_id not in scores]
        if missing:
            raise DataError(
                f"client {self.client} has no scores of {len(missing)} pairs by reward '{reward}' (such as"
                f" {missing[0]}): resume the run, which scores them before the rounds."
            )
        return np.array([scores[row.pair_id] for row in rows], dtype=np.float64).reshape(len(rows), 2)

    def held_out_prompts(self, limit: int | None, seed: int) -> list[str]:
        """The server's held-out prompts, or a seeded sample of them."""
        return [row.prompt for row in choose_prompts(self.pairs.parent, "test", limit, seed)]

    def trained_reward(self, name: str) -> Path | None:
        """The folder of a reward that was trained before the rounds; None for other rewards."""
        path = self.rewards / f"{file_name(name)}.trained.json"
        if not path.is_file():
            return None
        return self.rewards / str(read_json(path)["folder"])


@dataclass(frozen=True)
class ClientContexts:
    """Opens the clients' contexts of one federation."""

    adapters: AdapterStore  # that adapters are exchanged by; updates are written beside its folder
    pairs: Path  # the prepared pairs
    # The federation's folder, which says where private stores and rewards are; None: that of `adapters`.
    home: Path | None = None
    positions: Mapping[str, int] | None = None  # see ClientContext.position
    secret: Path | None = None  # of the one owner of the pairs; None: one in each private store
    outside: bool = False  # whether the pairs are of owners outside the federation, whom nothing protects

    @property
    def federation(self) -> Path:
        """The federation's folder."""
        return self.home or self.adapters.root.parent

    def open(self, client: str, previous_job_key: str = "") -> ClientContext:
        return ClientContext(
            client,
            self.adapters,
            self.pairs,
            PrivateStore(private_root(self.federation), client),
            rewards_folder(self.federation),
            previous_job_key,
            None if self.positions is None else self.positions.get(client),
        )

    def without_secret(self, clients: Iterable[str]) -> list[str]:
        """Those of some clients whose private stores have no secret."""
        root = private_root(self.federation)
        return [client for client in clients if not PrivateStore(root, client).has_secret]

    def client_secret(self, client: str) -> bytes:
        """The secret of a client, see components.privacy.secrets."""
        if self.secret is not None:
            return kept_secret(self.secret)
        return PrivateStore(private_root(self.federation), client).secret()


def client_positions(prepared: Path) -> dict[str, int]:
    """The position of each client of a prepared folder among the sorted names of all."""
    return {name: position for position, name in enumerate(sorted(read_clients(prepared)))}


def rewards_folder(federation: Path) -> Path:
    """The folder with the places of trained rewards, in the federation's folder."""
    return federation / "rewards"
