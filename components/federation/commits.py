"""Committed rounds: the server's state after each step, written atomically, from which a killed run continues.

A folder holds `adapters/` (content-addressed), `updates/` (finished jobs) and `commits/00003.json` (the state after
step 3). A commit names adapters by hash, is written to a scratch file, flushed and renamed, and only after the
adapters that it names; so the newest commit that can be read is always whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config import Explained
from components.federation.strategy import Client, Federation, ServerState
from components.models.adapters import AdapterStore, write_atomically


class CommitError(Explained, RuntimeError):
    """Commits that do not belong to this run."""


class Commits:
    """The commits of one federation.

    Attributes:
        folder: holds adapters/, updates/ and commits/.
        store: the adapters.
        fingerprint: of everything that the rounds depend on (recipe sections, data); commits of another are refused.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = Path(folder), fingerprint
        self.store = AdapterStore(self.folder / "adapters")

    def latest(self) -> tuple[ServerState, list[dict[str, Any]]] | None:
        """The last committed state and the records of all steps so far, or None before the first commit.

        Raises:
            CommitError: a commit is damaged, or the folder holds another recipe's or another data set's rounds.
        """
        paths = sorted((self.folder / "commits").glob("[0-9]*.json"))
        if not paths:
            return None
        contents = []
        for path in paths:
            try:
                contents.append(json.loads(path.read_text(encoding="utf-8")))
            except ValueError:
                raise CommitError(f"{path} is damaged: delete it, and those after it, to go on from the commit before.") from None
        for path, content in zip(paths, contents, strict=True):
            if content["fingerprint"] != self.fingerprint:
                raise CommitError(
                    f"{path} was written by another recipe, on other data, or by another version of this project (fingerprint {content['fingerprint']}, this run has {self.fingerprint}): "
                    "resume it with its own recipe, or start a new run.")
        return self._load(contents[-1]["state"]), [content["record"] for content in contents if content["record"]]

    def write(self, state: ServerState, record: dict[str, Any]) -> None:
        """Commit a state, with the record of the step that led to it."""
        content = {"fingerprint": self.fingerprint, "state": self._dump(state), "record": record}
        data = json.dumps(content, indent=1, allow_nan=True).encode()
        write_atomically(self.folder / "commits" / f"{state.step:05d}.json", data)

    def clear(self) -> None:
        """Forget everything, e.g. because the recipe changed under a folder that is kept."""
        for name in ("commits", "updates", "adapters"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _dump(self, state: ServerState) -> dict[str, Any]:
        content = asdict(state)
        content["adapters"] = {name: ref.hash for name, ref in state.adapters.items()}
        content["federation"]["initial"] = state.federation.initial.hash
        return content

    def _load(self, content: dict[str, Any]) -> ServerState:
        federation = content["federation"]
        return ServerState(**content | {
            "adapters": {name: self.store.ref(digest) for name, digest in content["adapters"].items()},
            "federation": Federation(tuple(Client(**c) for c in federation["clients"]), self.store.ref(federation["initial"]))})
