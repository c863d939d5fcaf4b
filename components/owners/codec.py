"""What a server and an owner send each other: JSON with a version, and files by the hashes of their bytes.

The server sends a request with jobs. The owner says which of the request's files it lacks, the server sends
these, and the owner answers each job by an update, which the adapter follows, or by a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, SerializeAsAny, ValidationError

from components.config import Registry, UserError
from components.federation.protocol import Failure, Job, Update
from components.results import Result

SCHEMA = 1
"""Version of what is sent. An owner answers no request of another version."""
PRIVATE_STORES = "federation-clients"
"""Folder of private stores, which are sent to nodes of Ray alone."""
FOLDERS = ("inputs", "prepared", "federation", "exchange", PRIVATE_STORES)
"""Where files of a request may be."""
FULL_DISK = "no space is left at the owner"
"""Reason of a failure after which an owner can do no further job."""
RELEASE = b""
"""Sent in place of a greeting: processes that wait for requests end."""
PROTOCOL = "components.federation.protocol"
JOBS: Registry[type[Job]] = Registry(
    "kind of a job",
    "fed_rlhf.jobs",
    {
        "train": f"{PROTOCOL}:TrainJob",
        "gradients": f"{PROTOCOL}:GradientJob",
        "measure": f"{PROTOCOL}:MeasureJob",
        "generate": f"{PROTOCOL}:GenerateJob",
        "score-pairs": f"{PROTOCOL}:ScorePairsJob",
        "publish": "components.owners.jobs:PublishJob",
        "forget": "components.owners.jobs:ForgetJob",
    },
    f"{PROTOCOL}:Job",
)


class CodecError(UserError):
    """A message that cannot be read. The sentence quotes nothing of it."""


def _job(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    digests = [*values.get("adapters", ()), *values.get("attached", {}).values()]
    if not all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in digests):
        raise ValueError("expected hashes of adapters")
    if not re.fullmatch("[0-9a-f]*", str(values.get("previous_job_key", ""))):
        raise ValueError("expected the key of a job")
    return JOBS.load(str(values.get("kind"))).model_validate_json(json.dumps(values))


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError("expected a path within the folder of the run")
    return path


def top_folder(path: str) -> str:
    """The folder of a run in which a path is."""
    return PurePosixPath(path).parts[0]


def _among_folders(path: str) -> str:
    if top_folder(path) not in FOLDERS:
        raise ValueError(f"expected a path in one of {', '.join(FOLDERS)}")
    return path


AnyJob = Annotated[SerializeAsAny[Job], BeforeValidator(_job)]
"""A job of the class that its kind names."""
InnerPath = Annotated[str, AfterValidator(_inside)]
"""A path relative to the folder of a run, with slashes, that does not leave it."""
SentPath = Annotated[InnerPath, AfterValidator(_among_folders)]
"""Such a path of a file that is sent."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class OwnerRequest(Result):
    """Jobs for the clients of one owner.

    Paths are relative to the owner's folder of the run, which has the layout of a run folder.
    """

    schema_version: int = SCHEMA
    run: InnerPath  # name of the folder of the run
    recipe: dict[str, JsonValue]
    exchange: InnerPath  # folder of the adapters and updates that are exchanged
    pairs: InnerPath  # file of the clients' pairs
    jobs: tuple[AnyJob, ...]
    digests: dict[str, str] = Field(default_factory=dict)  # that owners have published for the run, by name
    positions: dict[str, int] = Field(default_factory=dict)  # of the jobs' clients among all, by name
    files: dict[SentPath, Sha256]  # sha256 of each file that the jobs read, beside the owner's own


class Greeting(Result):
    """How a connection to a host begins."""

    home: str  # of the owner
    recipe: dict[str, JsonValue] | None = None  # whose model the host may load for all simulated owners
    trainer: str = ""  # of the jobs that follow, see Job.trainer


def encode(request: OwnerRequest) -> bytes:
    """A request as JSON."""
    return request.model_dump_json().encode()


def decode(data: bytes) -> OwnerRequest:
    """The request of its JSON.

    Raises:
        CodecError: it is of another version, or is no request.
    """
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise CodecError("a request is no JSON with a schema_version") from None
    if version != SCHEMA:
        raise CodecError(
            f"a request has schema version {version!r}, and this owner reads {SCHEMA}: install the same"
            " version of fed-rlhf on both sides"
        )
    try:
        return OwnerRequest.model_validate_json(data)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, one["loc"])) for one in error.errors(include_input=False))
        raise CodecError(f"a request cannot be read at: {places}") from None


def encode_answer(answer: Update | Failure) -> bytes:
    """An answer to a job as JSON; numbers that are not finite are kept."""
    if isinstance(answer, Update):
        return answer.model_dump_json().encode()
    return json.dumps({"client": answer.client, "reason": answer.reason}).encode()


def decode_answer(data: bytes) -> Update | Failure:
    """The answer of its JSON.

    Raises:
        CodecError: it is no answer.
    """
    try:
        values = json.loads(data)
        if values.keys() == {"client", "reason"}:
            return Failure(str(values["client"]), str(values["reason"]))
        return Update.model_validate_json(data)
    except (ValueError, AttributeError):  # a ValidationError is a ValueError
        raise CodecError("an owner's answer is neither an update nor a failure") from None
