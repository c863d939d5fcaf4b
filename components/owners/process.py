"""The process of an owner: it carries out requests, one after the other, and keeps its model between them."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import re
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from components.config import InputFile, NameOrFolder, Recipe, TemplateFile, UserError
from components.config.privacy import LabelPrivacy
from components.config.runtime import RuntimeConfig
from components.data.sources.owners import owner_names
from components.environment import (
    available_cores,
    release_memory,
    set_torch_threads,
    use_deterministic_kernels,
)
from components.federation.clients.context import ClientContexts
from components.federation.clients.trainer import Trainer
from components.federation.clients.worker import build_trainer, failure, run_job, trainer_key
from components.federation.protocol import Failure, Job, Update
from components.io import FullDiskError
from components.learning.reference_cache import ReferenceCache
from components.models.store import AdapterStore
from components.owners.codec import (
    FULL_DISK,
    PRIVATE_STORES,
    CodecError,
    OwnerRequest,
    decode,
    encode_answer,
    top_folder,
)
from components.owners.home import OwnerConfig, find_config, find_secret, salted_digest
from components.owners.jobs import ForgetJob, PublishJob
from components.owners.publish import publish
from components.owners.run_folder import OwnerRunFolder
from components.owners.sent_log import log_message
from components.owners.shared_model import SHARED
from components.recipes.checks import check_sections
from components.recipes.inputs import named_files
from components.results import Result

log = logging.getLogger(__name__)
STARTS = b"job starts: "
"""Beginning of what the host learns before a job. The seconds that it may take ('' if any) follow, a space,
and when it is carried out."""
ENDS = b"job ends"
IDLE = b"idle"
WRONG_OWNER = "the job is for another owner than the one here"


class OwnerProcess:
    """Carries out the requests for the clients of one owner.

    A second process of the owner, after the first one has lost its host, waits until the first has ended.
    """

    def __init__(self, home: Path, device: str, host: socket.socket) -> None:
        """The process.

        Args:
            home: the owner's folder.
            device: of its model.
            host: gives connections, and learns when jobs start and end.
        """
        self._home = home
        self._device = device
        self._host = host
        self._config = find_config(home)
        self._resident: tuple[str, Trainer] | None = None
        self._device_failed = False

    def serve(self) -> None:
        """Answer the requests of each connection that the host gives, until the host has ended."""
        self._home.mkdir(parents=True, exist_ok=True)
        self._home.chmod(0o700)
        with (self._home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while True:
                data, descriptors, *_ = socket.recv_fds(self._host, 1, 1)
                if not data:
                    return
                with Connection(descriptors[0]) as connection:
                    try:
                        self._answer(connection)
                    except (EOFError, ConnectionError) as error:  # the server has ended
                        log.warning("a connection was lost: %s", type(error).__name__)
                self._host.send(IDLE)
                if self._device_failed:
                    return

    def _answer(self, connection: Connection) -> None:
        try:
            request = decode(connection.recv_bytes())
            folders = set(map(top_folder, request.files))
            if PRIVATE_STORES in folders:
                raise CodecError("a request names files of a private store, which is the owner's alone")
            folder = OwnerRunFolder(self._home / "runs" / request.run)
            if request.jobs and all(isinstance(job, ForgetJob) for job in request.jobs):
                self._forget(connection, request, folder)
                return
            if self._config is not None:
                check_request(request, self._config, self._home, folder)
            folder.receive(request, lambda digests: _fetch(connection, digests))
            recipe = with_own_runtime(folder.recipe(request), self._config)
            contexts = folder.contexts(request, find_secret(self._home))
            if self._config is not None:
                check_recipe(recipe, self._config)
        except (EOFError, ConnectionError):
            raise
        except (UserError, OSError) as error:
            full = isinstance(error, FullDiskError)
            reason = str(error) if isinstance(error, UserError) else type(error).__name__
            connection.send_bytes(encode_answer(Failure("", FULL_DISK if full else reason)))
            return
        for job in request.jobs:
            try:
                answer = self._carry_out(job, recipe, contexts)
            except FullDiskError:
                connection.send_bytes(encode_answer(Failure("", FULL_DISK)))
                return
            log_message(self._home, request.run, job, answer, contexts.adapters)
            connection.send_bytes(encode_answer(answer))
            if isinstance(answer, Update) and answer.adapter is not None:
                connection.send_bytes(contexts.adapters.path(answer.adapter).read_bytes())

    def _forget(self, connection: Connection, request: OwnerRequest, folder: OwnerRunFolder) -> None:
        connection.send_bytes(b"[]")  # no file is needed
        for job in request.jobs:
            answer: Update | Failure
            if self._config is None or job.client != self._config.name:
                answer = Failure(job.client, WRONG_OWNER)
            else:
                answer = _answer_of(job, folder.remove())
            log_message(self._home, request.run, job, answer, AdapterStore(folder.folder))
            connection.send_bytes(encode_answer(answer))

    def _carry_out(self, job: Job, recipe: Recipe, contexts: ClientContexts) -> Update | Failure:
        runtime = recipe.runtime
        prepare_device(runtime, self._device)
        if self._config is not None and job.client != self._config.name:
            return Failure(job.client, WRONG_OWNER)
        try:
            if isinstance(job, PublishJob):
                if self._config is None:
                    raise TypeError("a simulated owner has no data of its own to publish")
                self._host.send(STARTS + f" {job.kind}".encode())  # without a limit of seconds
                try:
                    prepared = contexts.pairs.parent
                    return _answer_of(job, publish(self._home, self._config, recipe, prepared, job.prompts))
                finally:
                    self._host.send(ENDS)
            limit = "" if runtime.client_timeout is None else str(runtime.client_timeout)
            trainer = self._trainer(recipe, job.trainer)
            self._host.send(STARTS + f"{limit} {job.when}: {job.kind}".encode())
            try:
                return run_job(job, trainer, contexts, recipe)
            finally:
                self._host.send(ENDS)
        except FullDiskError:
            raise
        except (Exception, SystemExit) as error:
            self._resident = None
            self._device_failed = self._device != "cpu"  # an error may have left its context unusable
            return failure(job.client, error, contexts)

    def _trainer(self, recipe: Recipe, name: str) -> Trainer:
        key = trainer_key(recipe, name)
        if self._resident is None or self._resident[0] != key:
            self._resident = None
            release_memory()
            trainer = SHARED.take(key, self._device) or build_trainer(recipe, self._device, name)
            trainer.reference_cache = ReferenceCache()
            self._resident = (key, trainer)
        return self._resident[1]


def check_request(request: OwnerRequest, config: OwnerConfig, home: Path, folder: OwnerRunFolder) -> None:
    """Refuse a request that would change the rows of an owner that has its own, or is about other rows.

    Raises:
        CodecError: in a sentence without a word of the rows.
    """
    pairs = "prepared/pairs.parquet"
    if request.pairs != pairs or "prepared" in map(top_folder, request.files):
        raise CodecError("a request names other pairs than those that the owner has prepared")
    published = request.digests.get(config.name)
    path = folder.folder / pairs
    if published and (not path.is_file() or salted_digest(home, path) != published):
        raise CodecError(
            "the pairs here are not those that the owner has published for the run: start a new run"
        )


def check_recipe(recipe: Recipe, config: OwnerConfig) -> None:
    """Refuse a recipe that an owner with rows of its own does not take part in.

    Raises:
        UserError: naming what does not fit.
    """
    if config.name not in owner_names(recipe):
        raise CodecError(f"the recipe does not name owner {config.name} in data.options.owners")
    privacy = recipe.federation.privacy
    spends = privacy.epsilon if isinstance(privacy, LabelPrivacy) else math.inf
    if config.max_epsilon is not None and spends > config.max_epsilon:
        raise CodecError(
            f"owner {config.name} takes part with federation.privacy, unit 'label', and an epsilon of at"
            f" most {config.max_epsilon:g}"
        )
    for key, named in named_files(recipe):
        if isinstance(named, TemplateFile):
            is_local = named.text is None
        elif isinstance(named, InputFile):
            is_hash = re.fullmatch("[0-9a-f]{64}", named.sha256 or "") is not None
            is_local = not (is_hash or (named.sha256 is None and isinstance(named, NameOrFolder)))
        else:
            continue  # a model, of which only weights are read
        if is_local:
            raise CodecError(
                f"{key} names a file of the owner's machine: the server sends what its recipe names"
            )
    check_sections(recipe)


def _answer_of(job: Job, output: Result) -> Update:
    """The answer to a job without an adapter."""
    return Update(job=job.key(), client=job.client, rows=0, output=output.model_dump(mode="json"))


def with_own_runtime(recipe: Recipe, config: OwnerConfig | None) -> Recipe:
    """The recipe with the threads of an owner that has its own rows; None: it is simulated."""
    if config is None:
        return recipe
    own = {"torch_threads": config.torch_threads, "cpu_workers": 1}
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update=own)})


def prepare_device(runtime: RuntimeConfig, device: str) -> None:
    """Let this process compute on a device as a client does."""
    set_torch_threads(runtime.threads_of_client or available_cores())
    use_deterministic_kernels(device)


def _fetch(connection: Connection, digests: Sequence[str]) -> list[bytes]:
    connection.send_bytes(json.dumps(digests).encode())
    return [connection.recv_bytes() for _ in digests]
