"""An owner's log of what left it: each message, written before it is handed over.

    <home>/sent.jsonl

It belongs to the owner, and nothing else reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from components.config import UserError
from components.federation.protocol import Failure, Job, Update
from components.io import PRIVATE
from components.models.store import AdapterStore
from components.owners.codec import encode_answer
from components.results import Result

LOG = "sent.jsonl"


class SentTensor(Result):
    """A tensor of an adapter that was sent."""

    shape: tuple[int, ...]
    norm: float


class SentMessage(Result):
    """An answer to a job, as it was sent."""

    at: datetime
    run: str
    when: str  # in the run
    kind: str  # of the job
    job: str  # its key
    client: str
    received: dict[str, int]  # bytes of each adapter that the job was about, by sha256
    sha256: str  # of the message
    bytes: int  # of the message and of the adapter that followed it
    tensors: dict[str, SentTensor] = Field(default_factory=dict)  # of the adapter
    update: Update | None = None
    failure: str | None = None  # the reason, of a job without an update


def log_message(home: Path, run: str, job: Job, answer: Update | Failure, store: AdapterStore) -> None:
    """Append an answer to the log of an owner."""
    message = encode_answer(answer)
    sent = 0
    tensors: dict[str, SentTensor] = {}
    if isinstance(answer, Update) and answer.adapter is not None:
        sent = store.size(answer.adapter)
        for name, tensor in sorted(store.get(answer.adapter).items()):
            tensors[name] = SentTensor(shape=tuple(tensor.shape), norm=float(tensor.double().norm()))
    entry = SentMessage(
        at=datetime.now(UTC),
        run=run,
        when=job.when,
        kind=job.kind,
        job=job.key(),
        client=job.client,
        received={digest: store.size(digest) for digest in job.received},
        sha256=hashlib.sha256(message).hexdigest(),
        bytes=len(message) + sent,
        tensors=tensors,
        update=answer if isinstance(answer, Update) else None,
        failure=answer.reason if isinstance(answer, Failure) else None,
    )
    descriptor = os.open(home / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(entry.model_dump_json().encode() + b"\n")


def read_log(home: Path) -> Iterator[SentMessage]:
    """What has left an owner, in its order.

    Raises:
        UserError: the folder is no owner's, or has sent nothing.
    """
    path = home / LOG
    if not path.is_file():
        raise UserError(
            f"{home} has no {LOG}: give the home of an owner, such as owners/NAME of the folder of a run with"
            " runtime.transport=processes."
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield SentMessage.model_validate_json(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise UserError(f"{path} is damaged at line {number}: remove this line.") from None


def describe(message: SentMessage, with_tensors: bool = False) -> Iterator[str]:
    """A message in lines of text."""
    when = message.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    yield (
        f"{when}  {message.run}, {message.when}: {message.kind} of {message.client},"
        f" {message.bytes:,} bytes, sha256 {message.sha256[:12]}, job {message.job}"
    )
    if message.failure is not None:
        yield f"    failed: {message.failure}"
    update = message.update
    if update is None:
        return
    if update.adapter is not None:
        norm = sum(tensor.norm**2 for tensor in message.tensors.values()) ** 0.5
        yield f"    {len(message.tensors)} tensors, norm {norm:.6g}, sha256 {update.adapter[:12]}"
    if with_tensors:
        for name, tensor in message.tensors.items():
            yield f"        {name} {list(tensor.shape)} norm {tensor.norm:.6g}"
    figures = {"rows": float(update.rows)} | update.metrics.scalars
    yield "    " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
    for name, series in update.metrics.series.items():
        yield f"    {name}: {len(series)} values from {series[0]:.6g} to {series[-1]:.6g}"
    if update.losses:
        yield "    losses " + ", ".join(f"{loss:.6g}" for loss in update.losses)
    if update.output is not None:
        yield f"    output {update.output}"
