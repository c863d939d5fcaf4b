"""Committed steps: the server's state after each step, from which a stopped run resumes.

A folder holds `adapters/` (content-addressed), `updates/` (finished jobs of the next step) and
`commits/00003.json` (the state after step 3). A commit names adapters by hash, is written after them
to a scratch file, flushed and renamed, so that the newest commit that can be read is always
complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic

from components.config import UserError
from components.federation.protocol import Job, M, ServerState
from components.io import read_json, write_atomically
from components.models.store import AdapterStore
from components.results import Result, StepRecord


class CommitError(UserError, RuntimeError):
    """Commits that do not belong to this run."""


class OtherClientsError(CommitError):
    """Commits of a federation of other clients; `change` says who joined and who left."""

    def __init__(self, path: Path, change: str) -> None:
        super().__init__(
            f"{path} is of other clients: since it was written, {change}. A run keeps its clients, because"
            " each has a share in all means: resume it with the data that it began with, or start a new run."
        )
        self.change = change


class Commit(Result, Generic[M]):
    """The content of a commit."""

    fingerprint: str  # of everything that the rounds depend on
    state: ServerState[M]
    record: StepRecord | None  # the step that led to it; None for the initial state


class Commits:
    """The commits of one federation."""

    def __init__(self, folder: Path, fingerprint: str, clients: Sequence[str] = ()) -> None:
        self.folder = Path(folder)  # holds adapters/, updates/ and commits/
        self.fingerprint = fingerprint  # of everything that the rounds depend on; no other one is read
        self.clients = list(clients)  # of the data; an error names those that commits do not have
        self.store = AdapterStore(self.folder / "adapters")
        # Round of the state, and all hashes that the commit names, by name of the commit's file.
        self._known: dict[str, tuple[int, set[str]]] = {}
        self._thinned: set[str] = set()  # names of commits whose adapters are removed

    def latest(self, memory_type: type[M]) -> tuple[ServerState[M], list[StepRecord]] | None:
        """The last committed state and the records of all steps so far; None before the first commit.

        Raises:
            CommitError: a commit is damaged, or belongs to another recipe, other data, or another
                version.
        """
        paths = sorted((self.folder / "commits").glob("[0-9]*.json"))
        if not paths:
            return None
        commits = [self._read(path, memory_type) for path in paths]
        records = [commit.record for commit in commits if commit.record is not None]
        return commits[-1].state, records

    def write(self, state: ServerState[M], record: StepRecord | None) -> None:
        """Commit a state with the record of the step that led to it; the initial state has none."""
        commit: Commit[M] = Commit(fingerprint=self.fingerprint, state=state, record=record)
        path = self.folder / "commits" / f"{state.step:05d}.json"
        self._known.pop(path.name, None)
        self._thinned.discard(path.name)
        write_atomically(path, commit.model_dump_json(indent=1).encode())

    def discard(self, jobs: Sequence[Job] = (), keep_every: int = 1) -> None:
        """Remove the updates of finished steps, and adapters that nothing needs any more.

        Nothing reads an update once the state after its step is committed: what a method needs of
        it is in the state. The adapters of old states are not read either. An adapter stays that a
        job of the step that follows, its update, or one of these commits names: the last two, so
        that a run can go back by one, and those of every `keep_every`-th round. An adapter is
        removed before the update that names it, so a run that is killed in between finds the rest
        at its next call.
        """
        kept_names = {f"{job.key()}.json" for job in jobs}
        updates = sorted((self.folder / "updates").glob("*.json"))
        discarded = [path for path in updates if path.name not in kept_names]
        needed = {digest for job in jobs for digest in job.received}
        needed.update(digest for path in updates if path.name in kept_names for digest in _find_hashes(path))
        commits = self._named_adapters()
        names = list(commits)
        old = {name for name in names[:-2] if commits[name][0] % keep_every}
        needed.update(*(commits[name][1] for name in names if name not in old))
        for name in sorted(old - self._thinned):
            self._remove_adapters(commits[name][1] - needed)
            self._thinned.add(name)
        for path in discarded:
            self._remove_adapters(_find_hashes(path) - needed)
            path.unlink()

    def sweep(self, state: ServerState[Any]) -> None:
        """Remove adapters that no commit and no update names: of jobs and steps that were killed.

        They may be contributions of clients without noise. Those of the state stay.
        """
        named = {state.initial, *state.adapters.values()}
        named |= set().union(*(hashes for _, hashes in self._named_adapters().values()))
        for path in (self.folder / "updates").glob("*.json"):
            named |= _find_hashes(path)
        self._remove_adapters({path.stem for path in self.store.root.glob("*.safetensors")} - named)

    def _remove_adapters(self, hashes: Iterable[str]) -> None:
        for digest in sorted(hashes):
            self.store.path(digest).unlink(missing_ok=True)

    def _named_adapters(self) -> dict[str, tuple[int, set[str]]]:
        """`_known` of the files that exist, in their order; each file is read once."""
        paths = sorted((self.folder / "commits").glob("[0-9]*.json"))
        for path in paths:
            if path.name not in self._known:
                state = read_json(path)["state"]
                self._known[path.name] = (state["round"], _find_hashes(path))
        return {path.name: self._known[path.name] for path in paths}

    def clear(self) -> None:
        """Remove all commits, updates and adapters."""
        for name in ("commits", "updates", "adapters"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._known.clear()
        self._thinned.clear()

    def _read(self, path: Path, memory_type: type[M]) -> Commit[M]:
        try:
            content = path.read_bytes()
            commit = json.loads(content)
            fingerprint = commit["fingerprint"]
            committed = [client["name"] for client in commit["state"]["clients"]]
            if fingerprint == self.fingerprint:
                return Commit[memory_type].model_validate_json(content)  # type: ignore[valid-type]
        except (ValueError, KeyError, TypeError):
            raise CommitError(
                f"{path} is damaged: delete it, and those after it, to resume from the commit before."
            ) from None
        if self.clients and (change := changed_clients(committed, self.clients)):
            raise OtherClientsError(path, change)
        raise CommitError(
            f"{path} was written with another recipe, other data, another commit of a model of the hub, or"
            " another version of this project"
            f" (fingerprint {fingerprint}, this run has {self.fingerprint}): resume it with its own"
            " recipe, or start a new run."
        )


def changed_clients(before: Iterable[str], now: Iterable[str]) -> str:
    """Who joined and who left, in words; empty where the clients are the same."""
    joined = sorted(set(now) - set(before))
    left = sorted(set(before) - set(now))
    parts = [f"{', '.join(names)} {verb}" for names, verb in ((joined, "joined"), (left, "left")) if names]
    return " and ".join(parts)


def _find_hashes(path: Path) -> set[str]:
    """All hashes of adapters that a JSON file names."""
    return set(re.findall(r"\b[0-9a-f]{64}\b", path.read_text(encoding="utf-8", errors="ignore")))
