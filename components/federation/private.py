"""A client's own store: the parts that never leave it, and what it must remember from one round to the next.

    federation-clients/<client>/parts/<sha256>.safetensors    its parts, as in the adapter store
    federation-clients/<client>/00003.json                    after round 3 (counted from 0): which parts, and numbers
    federation-clients/<client>/00003.half.json               within round 3, after its first half

A state is written atomically, after the parts that it names. A job starts from the newest state of an earlier round, so a job
that is done again after a crash, or in a resumed run, starts from the same bytes; one that was killed in its second half takes up
its own first half. The state before the newest is kept, since a round may be killed between its clients' last write and its commit.

Only a client's own task opens its store: the methods, the server's step and the commits have no path to it (a contract in pyproject.toml).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import Explained
from components.data.records import DataError, read_rows
from components.models.adapters import AdapterStore, write_atomically

if TYPE_CHECKING:
    import numpy as np

    from components.models.adapters import Adapter


class PrivateStoreError(Explained, RuntimeError):
    """A client's own store that cannot be gone on with."""


@dataclass(frozen=True)
class PrivateState:
    """What a client has and knows.

    Attributes:
        tensors: its parts, fp32, by name.
        numbers: what else it remembers, by name.
        size: bytes of the parts' file; 0 before it is written.
    """

    tensors: Adapter
    numbers: dict[str, float] = field(default_factory=dict)
    size: int = 0


class PrivateStore:
    """One client's folder under the one of all clients' stores, which in a real federation is on its own machine."""

    def __init__(self, clients: Path, client: str) -> None:
        self.folder = Path(clients) / client_folder(client)
        self._parts = AdapterStore(self.folder / "parts")

    def before(self, round: int) -> PrivateState | None:
        """The state after the last round before this one in which the client took part; None where there was none.

        Raises:
            PrivateStoreError: states of later rounds are there, but not the one that this round began with.
        """
        known = self._rounds()
        earlier = [n for n in known if n < round]
        if not earlier and known:
            first = json.loads(self._path(min(known)).read_text(encoding="utf-8"))
            if not first["first"]:
                raise PrivateStoreError(
                    f"{self.folder}: the client's parts from before round {round + 1} are gone (those after round {min(known) + 1} are there), so that the round cannot be run again with the same result: start a new run.")
        return self._read(self._path(max(earlier))) if earlier else None

    def half(self, round: int, key: str) -> PrivateState | None:
        """The state after the first half of a job of this round, if that was done."""
        path = self._path(round, ".half")
        return self._read(path) if path.is_file() and json.loads(path.read_text(encoding="utf-8"))["key"] == key else None

    def save(self, round: int, key: str, state: PrivateState, half: bool = False) -> PrivateState:
        """Write the state after a round, or after its first half.

        Args:
            round: from 0.
            key: of the job.
            state: its size is not read.
            half: whether the second half is still to come.

        Returns:
            the state with its size.
        """
        known = self._rounds()
        earlier = [n for n in known if n < round]
        ref = self._parts.put(state.tensors)
        content = {"parts": ref.hash, "numbers": state.numbers, "key": key, "first": not earlier}
        write_atomically(self._path(round, ".half" if half else ""), json.dumps(content, indent=1).encode())
        if not half:
            for stale in [*(self._path(n) for n in earlier[:-1]), *self.folder.glob("[0-9]*.half.json")]:
                stale.unlink()
            used = {json.loads(path.read_text(encoding="utf-8"))["parts"] for path in self.folder.glob("[0-9]*.json")}
            for path in (self.folder / "parts").glob("*.safetensors"):
                if path.stem not in used:
                    path.unlink()
        return PrivateState(state.tensors, state.numbers, Path(ref.path).stat().st_size)

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.json") if path.stem.isdigit())

    def _path(self, round: int, kind: str = "") -> Path:
        return self.folder / f"{round:05d}{kind}.json"

    def _read(self, path: Path) -> PrivateState:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise PrivateStoreError(f"{path} is damaged: start a new run.") from None
        ref = self._parts.ref(content["parts"])
        return PrivateState(self._parts.get(ref), content["numbers"], Path(ref.path).stat().st_size)


@dataclass(frozen=True)
class Home:
    """A client's own side: what it has there when so many rounds are done.

    Attributes:
        client: its name.
        store: its own.
        pairs: the prepared pairs, of which it reads its own rows.
        round: rounds that are done; in a round, its number from 0.
    """

    client: str
    store: PrivateStore
    pairs: Path
    round: int

    def state(self) -> PrivateState | None:
        """What it has kept, see PrivateStore.before."""
        return self.store.before(self.round)

    def training_rows(self) -> list[dict[str, Any]]:
        """Its own training pairs."""
        return read_rows(self.pairs, self.client, "train").to_list()

    def scores(self, rows: Sequence[dict[str, Any]], reward: str) -> np.ndarray:
        """What a frozen reward model gives its own pairs: chosen and rejected, [N, 2].

        Raises:
            DataError: there are no scores of this model, or not of all the pairs.
        """
        import numpy as np

        known = {row["pair_id"]: (row["chosen"], row["rejected"]) for row in read_rows(rewards_file(self.pairs.parent, reward), self.client)}
        missing = [row["pair_id"] for row in rows if row["pair_id"] not in known]
        if missing:
            raise DataError(f"{rewards_file(self.pairs.parent, reward)} has no scores of {len(missing)} of client {self.client}'s pairs (such as {missing[0]}): delete it, and resume the run.")
        return np.array([known[row["pair_id"]] for row in rows]).reshape(len(rows), 2)


def rewards_file(prepared: Path, name: str) -> Path:
    """Where the scores of a frozen reward model lie: for each pair of a prepared folder, those of chosen and of rejected."""
    return prepared / "rewards" / f"{name}.parquet"


def home_of(client: str, adapters: AdapterStore, pairs: Path, round: int) -> Home:
    """A client's own side, whose store is beside the federation's folder."""
    return Home(client, PrivateStore(stores_beside(adapters), client), pairs, round)


def stores_beside(adapters: AdapterStore) -> Path:
    """The folder of the clients' own stores: beside the federation's, and not in it, so that whoever keeps or sends that folder (DVC does) has nothing of theirs."""
    return adapters.root.parent.with_name(f"{adapters.root.parent.name}-clients")


def client_folder(name: str) -> str:
    """The name of a client's folder: what a file system takes of its own name, and a hash of all of it."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:60]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
