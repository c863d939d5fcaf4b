"""A client's private store: its private modules, and the numbers that it needs in its next round.

    federation-clients/<client>/
        modules/<sha256>.safetensors    private modules, as in the adapter store
        <job key>.json                  after that job: hash of the modules, and numbers
        <job key>.personal.json         within that job, after its personal stage
        scores/<reward>.json            scores of its training pairs by a reward
        errors/<code>.txt               an error of a job, of which the server knows type and code
        secret                          of its noise, with federation.privacy, and of the codes

Files and folders are their owner's alone (0600 and 0700).

A state is written atomically, after the modules that it names. The server remembers the key of each
client's last accepted job, and the next job names it: the client starts from exactly that state, or
refuses the job. So a job that is repeated after a crash starts from the same bytes, one that was
killed in its shared stage resumes from its own personal stage, and a store that is missing, or
belongs to other rounds, is never taken for that of a client without training. The state that a job
started from is kept beside its own, since a round may be killed between its clients' last write and
its commit.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from components.config import UserError
from components.io import PRIVATE, read_json, write_atomically
from components.models.store import Adapter, AdapterError, AdapterStore
from components.names import file_name
from components.privacy.secrets import digest, kept_secret

SECRET = "secret"


@dataclass(frozen=True)
class PrivateState:
    """What a client keeps."""

    tensors: Adapter  # fp32, by name: personal modules, value heads (critic.), those of its local step
    numbers: dict[str, float] = field(default_factory=dict)  # what else it remembers, by name
    size: int = 0  # bytes of the modules' file; 0 before it is written


@dataclass(frozen=True)
class PairScores:
    """Scores of a client's training pairs by a reward."""

    fingerprint: str  # of what they depend on beside the pairs
    scores: dict[str, tuple[float, float]]  # of chosen and rejected, by the id of the pair


class PrivateStore:
    """The folder of one client, under the folder of all clients' stores."""

    def __init__(self, root: Path, client: str) -> None:
        self.client = client
        self.folder = Path(root) / file_name(client)
        self._modules = AdapterStore(self.folder / "modules", PRIVATE)

    def load(self, job_key: str) -> PrivateState | None:
        """The state after a job; None for the empty key, which stands for no job."""
        if not job_key:
            return None
        path = self._path(job_key)
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no private state of client {self.client} after its last job ({job_key}),"
                " without which its results would differ: resume the run where it was trained, or start a"
                " new run."
            )
        return self._read(path)

    def load_personal_stage(self, job_key: str) -> PrivateState | None:
        """The state after the personal stage of a job, if that was completed."""
        path = self._path(job_key, ".personal")
        return self._read(path) if path.is_file() else None

    def save(self, job_key: str, previous_job_key: str, state: PrivateState) -> PrivateState:
        """Write the state after a job, remove those no longer needed, and give it with its size.

        The state of the job that it started from is kept too.
        """
        size = self._write(self._path(job_key), state)
        needed = {self._path(job_key), self._path(previous_job_key)}
        for path in self.folder.glob("*.json"):
            if path not in needed:
                path.unlink()
        self._remove_unused_modules()
        return replace(state, size=size)

    def save_personal_stage(self, job_key: str, state: PrivateState) -> None:
        """Write the state after the personal stage of a job."""
        self._write(self._path(job_key, ".personal"), state)

    def save_scores(self, reward: str, scores: PairScores) -> None:
        """Write the scores by a reward."""
        self._write_file(self._scores_path(reward), json.dumps(asdict(scores)))

    def load_scores(self, reward: str) -> PairScores | None:
        """The scores by a reward; None before there are any."""
        path = self._scores_path(reward)
        if not path.is_file():
            return None
        content = read_json(path)
        scores = {
            name: (float(chosen), float(rejected)) for name, (chosen, rejected) in content["scores"].items()
        }
        return PairScores(content["fingerprint"], scores)

    def remove_scores(self, reward: str) -> None:
        """Remove the scores by a reward."""
        self._scores_path(reward).unlink(missing_ok=True)

    def _scores_path(self, reward: str) -> Path:
        return self.folder / "scores" / f"{file_name(reward)}.json"

    def record_error(self, error: BaseException) -> str:
        """Keep an error of a job, whose text may quote rows of the client; the code that names its file."""
        text = "".join(traceback.format_exception(error))
        code = digest(self.secret(), "error", text).hex()[:8]  # by which nobody can confirm a guessed text
        self._write_file(self.folder / "errors" / f"{code}.txt", text)
        return code

    @property
    def has_secret(self) -> bool:
        """Whether the client has a secret of this run."""
        return (self.folder / SECRET).is_file()

    def secret(self) -> bytes:
        """The client's secret of this run, which the first call makes."""
        secret = kept_secret(self.folder / SECRET)
        self._close_folders()
        return secret

    def _write(self, path: Path, state: PrivateState) -> int:
        digest = self._modules.put(state.tensors)
        content = {"modules": digest, "numbers": state.numbers}
        self._write_file(path, json.dumps(content, indent=1))
        return self._modules.size(digest)

    def _write_file(self, path: Path, text: str) -> None:
        write_atomically(path, text.encode(), PRIVATE)
        self._close_folders()

    def _close_folders(self) -> None:
        for folder in (self.folder, self.folder.parent):
            folder.chmod(0o700)

    def _remove_unused_modules(self) -> None:
        states = self.folder.glob("*.json")
        used = {json.loads(path.read_text(encoding="utf-8"))["modules"] for path in states}
        for path in self._modules.root.glob("*.safetensors"):
            if path.stem not in used:
                path.unlink()

    def _path(self, job_key: str, suffix: str = "") -> Path:
        return self.folder / f"{job_key}{suffix}.json"

    def _read(self, path: Path) -> PrivateState:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(f"{path} is damaged: start a new run.") from None
        digest = content["modules"]
        try:
            tensors = self._modules.get(digest)
        except AdapterError as error:
            raise UserError(
                f"the private modules of client {self.client} cannot be read ({error}): start a new run."
            ) from None
        return PrivateState(tensors, content["numbers"], self._modules.size(digest))


def private_root(federation: Path) -> Path:
    """The folder of all clients' stores: beside the federation's folder, and not in it.

    Whoever keeps or sends the federation's folder, as DVC does, has nothing of the clients' own.
    """
    return federation.with_name(f"{federation.name}-clients")
