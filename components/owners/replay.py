"""Carries a job out again at its owner, and compares what it gives with what was sent."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from components.config import UserError
from components.federation.clients.worker import build_trainer, run_job, update_path
from components.federation.protocol import ScorePairsJob, Update
from components.owners.codec import decode
from components.owners.home import find_config, find_secret
from components.owners.jobs import OwnerJob
from components.owners.process import prepare_device, with_own_runtime
from components.owners.run_folder import REQUEST, OwnerRunFolder
from components.owners.sent_log import read_log


def replay(home: Path, key: str | None = None, device: str = "cpu") -> tuple[str, list[str]]:
    """Carry out a job of the last request of a run again, in a copy of the owner's folder.

    The client's state before a job is kept until its next one, so that jobs of the last request can be
    repeated. Seconds are not compared. Scores of pairs are computed again, not read.

    Args:
        home: of the owner.
        key: of the job; None: the last one that has an update.
        device: on which it was carried out; another type of device has other last bits.

    Returns:
        the key of the job, and what differs, as sentences; none where both are equal.

    Raises:
        UserError: the job is not among those that can be repeated.
    """
    sent = [message for message in read_log(home) if message.update is not None]
    chosen = [message for message in sent if key in (None, message.job)]
    if not chosen:
        raise UserError(f"{home} has sent no update of a job {key}: see `fed-rlhf owner log`.")
    message = chosen[-1]
    folder = home / "runs" / message.run
    path = folder / REQUEST
    request = decode(path.read_bytes()) if path.is_file() else None
    jobs = [] if request is None else [job for job in request.jobs if job.key() == message.job]
    if request is None or not jobs or message.update is None:
        raise UserError(
            f"job {message.job} is not among those of the last request of the run {message.run}, and the"
            " client's state before it is not kept: give the key of a later job."
        )
    if isinstance(jobs[0], OwnerJob):
        raise UserError(
            f"job {message.job} is not about a model: `fed-rlhf owner check` shows what is published of the"
            " owner's data."
        )
    with tempfile.TemporaryDirectory(dir=home, prefix=".replay-") as scratch:
        copy = OwnerRunFolder(Path(scratch) / message.run)
        shutil.copytree(folder, copy.folder)
        contexts = copy.contexts(request, find_secret(home))
        recipe = with_own_runtime(copy.recipe(request), find_config(home))
        update_path(jobs[0], contexts.adapters).unlink(missing_ok=True)
        if isinstance(jobs[0], ScorePairsJob):
            contexts.open(jobs[0].client).store.remove_scores(jobs[0].reward)
        prepare_device(recipe.runtime, device)
        trainer = build_trainer(recipe, device, jobs[0].trainer)
        again = run_job(jobs[0], trainer, contexts, recipe)
    return message.job, list(_differences(message.update, again))


def _differences(sent: Update, again: Update) -> Iterator[str]:
    one, other = (
        update.model_copy(update={"metrics": update.metrics.without_seconds()}).model_dump(mode="json")
        for update in (sent, again)
    )
    for name, value in one.items():
        if value != other[name]:
            yield f"{name}: {value} was sent, and the job gives {other[name]} now"
