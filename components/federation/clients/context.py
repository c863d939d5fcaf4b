"""The context of a client: its rows, private store, rewards, and received adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from components.data.records import DataError, PairRow, choose_prompts, read_clients, read_rows
from components.federation.clients.private import PrivateState, PrivateStore, private_root
from components.io import read_json
from components.models.store import Adapter, AdapterHash, AdapterStore
from components.names import file_name


@dataclass(frozen=True)
class ClientContext:
    """One client's side of the federation."""

    client: str  # empty for the server's own measurements
    adapters: AdapterStore  # from which it receives adapters, and to which it sends them
    pairs: Path  # the prepared pairs, of which it reads its own rows
    store: PrivateStore  # its private store
    rewards: Path  # folder with the scores of frozen rewards, and with the places of trained ones
    previous_job_key: str = ""  # of its last accepted job; empty before the first one

    def load_adapter(self, digest: AdapterHash) -> Adapter:
        """An adapter that the client is sent."""
        return self.adapters.get(digest)

    def rows(self, split: str) -> list[PairRow]:
        """The client's own pairs of a split."""
        return read_rows(self.pairs, self.client, split)

    def chosen_rows(self, split: str, positions: Sequence[int] | None) -> list[PairRow]:
        """The client's pairs of a split at these positions; None for all."""
        rows = self.rows(split)
        return rows if positions is None else [rows[n] for n in positions]

    def private_state(self) -> PrivateState | None:
        """The state after the client's last accepted job; None before the first one."""
        return self.store.load(self.previous_job_key)

    def assigned_reward(self, names: Sequence[str]) -> str:
        """The client's reward, of several that are assigned round-robin by the clients' sorted names."""
        if len(names) == 1:
            return names[0]
        position = sorted(read_clients(self.pairs.parent)).index(self.client)
        return names[position % len(names)]

    def pair_scores(self, rows: Sequence[PairRow], reward: str) -> npt.NDArray[np.float64]:
        """Scores of the client's pairs by a frozen reward: of chosen and rejected, [N, 2]."""
        path = self.rewards / f"{file_name(reward)}.parquet"
        scores = {row["pair_id"]: (row["chosen"], row["rejected"]) for row in read_rows(path, self.client)}
        missing = [row["pair_id"] for row in rows if row["pair_id"] not in scores]
        if missing:
            raise DataError(
                f"{path} has no scores of {len(missing)} pairs of client {self.client} (such as"
                f" {missing[0]}): delete it, and resume the run."
            )
        return np.array([scores[row["pair_id"]] for row in rows], dtype=np.float64).reshape(len(rows), 2)

    def held_out_prompts(self, limit: int | None, seed: int) -> list[str]:
        """The server's held-out prompts, or a seeded sample of them."""
        return [row["prompt"] for row in choose_prompts(self.pairs.parent, "test", limit, seed)]

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
        )


def rewards_folder(federation: Path) -> Path:
    """The folder with the scores of frozen rewards, in the federation's folder."""
    return federation / "rewards"
