"""The hub: whether it answers, the config.json of a model, and the commit that a revision names.

The libraries ask for each file of a model six times, and wait in between, where nothing answers. Here the hub
is asked once; if it does not answer, the libraries are told to read their cache alone, for all models and
data sets, until a later question is answered.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

REMEMBERED_SECONDS = 60.0
"""How long an answer of the hub, or its silence, stands for further questions of this process."""
LIMIT = "HF_HUB_ETAG_TIMEOUT"
"""The hub library's environment variable for the seconds in which the hub has to answer."""
DEFAULT_LIMIT = 3.0
QUIET_SECONDS = 2.0
"""A question that takes longer is named in the log."""
RETRY_SECONDS = 1.0
COMMIT = re.compile("[0-9a-f]{40}")
HEADER = "X-Repo-Commit"


@dataclass(frozen=True)
class Answer:
    """What the hub has answered when it was asked for a config.json."""

    moment: float  # by the monotonic clock
    text: str = ""
    commit: str | None = None
    failure: str = ""  # why there is no text
    is_server_error: bool = False  # the hub answers by an error of its own
    is_reached: bool = True


_asking = Lock()
_answers: dict[str, Answer] = {}
"""By address; that of a hub that does not answer by its own one."""


def is_hub_id(name: str) -> bool:
    """Whether a name is none of a folder here, and can be one of the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if Path(name).is_dir():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def find_cached(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a model in the hub's cache, in the folder of its commit."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, revision=revision or "main")
    return Path(cached) if isinstance(cached, str) else None


def read_config(name: str, revision: str | None, local_only: bool = False) -> str:
    """The config.json of a hub id, from the cache or by one request without retries.

    Raises:
        OSError: there is none.
    """
    if (cached := find_cached(name, "config.json", revision)) is not None:
        return cached.read_text(encoding="utf-8")
    if local_only or _is_offline():
        reason = "no request was made" if local_only else "HF_HUB_OFFLINE is set"
        raise OSError(_no_copy(f"the hub cannot be reached ({reason})"))
    answer = _ask(name, revision)
    if not answer.is_reached:
        raise OSError(_no_copy(answer.failure))
    if answer.failure:
        raise OSError(answer.failure)
    return answer.text


def unreachable_reason(name: str, revision: str | None, repo_type: str | None = None) -> str | None:
    """Why the hub is unreachable. It is asked first, for a model or a data set; None if it answers.

    A name that is no hub id, and a hub that the user has switched off, is left to the libraries: None.
    """
    if _is_offline() or not is_hub_id(name):
        return None
    answer = _ask(name, revision, repo_type)
    return None if answer.is_reached else answer.failure


def require_reachable(name: str, revision: str | None) -> None:
    """Ask the hub before the libraries ask it for a model.

    Raises:
        OSError: it does not answer, or by an error of its own, and its cache has nothing of the model.
    """
    if _is_offline() or not is_hub_id(name):
        return
    answer = _ask(name, revision)
    if answer.is_reached and not answer.is_server_error:
        return
    if not any(find_cached(name, file, revision) for file in ("config.json", "tokenizer_config.json")):
        raise OSError(_no_copy(answer.failure))


def find_commit(name: str, revision: str | None) -> str | None:
    """The commit that a revision of a hub id is now: by the hub, or else by its cache; None if unknown."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    if not _is_offline() and (commit := _ask(name, revision).commit) is not None:
        return commit
    cached = find_cached(name, "config.json", revision)
    return None if cached is None else cached.parent.name


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


def _is_offline() -> bool:
    """Whether the user has switched the hub off."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) and _endpoint() not in _answers


def _ask(name: str, revision: str | None, repo_type: str | None = None) -> Answer:
    """The hub's answer, of which one is remembered for a while. The libraries ask only a hub that answers."""
    from huggingface_hub import hf_hub_url

    endpoint = _endpoint()
    url = hf_hub_url(name, "config.json", repo_type=repo_type, revision=revision or "main", endpoint=endpoint)
    with _asking:
        for key in (endpoint, url):
            known = _answers.get(key)
            if known is not None and time.monotonic() - known.moment <= REMEMBERED_SECONDS:
                return known
        if endpoint in _answers:
            _switch(offline=False)
            del _answers[endpoint]
        answer = _request(url, "HEAD" if repo_type else "GET")
        _answers[url if answer.is_reached else endpoint] = answer
        if not answer.is_reached:
            log.warning("%s: models and data sets come from its cache alone", answer.failure)
            _switch(offline=True)
    return answer


def _switch(offline: bool) -> None:
    """Let the libraries ask the hub, or not. `datasets` keeps a copy of the setting."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = offline
    config = sys.modules.get("datasets.config")
    if config is not None and "HF_DATASETS_OFFLINE" not in os.environ:
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = offline  # type: ignore[attr-defined]


def _request(url: str, method: str) -> Answer:
    """The answer to a question. A thread waits for it, since looking up a name has no limit of its own."""
    from huggingface_hub import constants

    limit = max(1.0, constants.HF_HUB_ETAG_TIMEOUT) if os.environ.get(LIMIT) else DEFAULT_LIMIT
    answers: SimpleQueue[Answer] = SimpleQueue()
    Thread(target=lambda: answers.put(_fetch(url, method, 2 * limit)), daemon=True).start()
    quiet = min(QUIET_SECONDS, limit)
    try:
        return answers.get(timeout=quiet)
    except Empty:
        log.warning("waiting for the hub (%s) ...", urlsplit(url).hostname)
    try:
        return answers.get(timeout=limit - quiet)
    except Empty:
        reason = f"no answer within {limit:g} s; {LIMIT} sets another limit"
        return Answer(time.monotonic(), failure=_unreached(reason), is_reached=False)


def _fetch(url: str, method: str, timeout: float) -> Answer:
    """The answer to a request of the hub's library, with its proxies, certificates and token.

    What fails at once is asked for again, since a connection may be lost.
    """
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    options: dict[str, Any] = {
        "headers": build_hf_headers(),
        "timeout": timeout,
        "follow_redirects": True,
    }
    start = time.monotonic()
    while True:
        try:
            response = get_session().request(method, url, **options)
            break
        except Exception as error:  # of the client that the library chose; HF_ENDPOINT may be no address
            if time.monotonic() - start > RETRY_SECONDS:
                reason = str(error) or type(error).__name__
                return Answer(time.monotonic(), failure=_unreached(reason), is_reached=False)
            time.sleep(RETRY_SECONDS)
    commit = next((r.headers[HEADER] for r in (*response.history, response) if HEADER in r.headers), None)
    if response.is_success:
        return Answer(time.monotonic(), response.text, commit)
    failure = f"the hub answers {response.status_code} ({response.reason_phrase})"
    return Answer(time.monotonic(), "", commit, failure, is_server_error=response.status_code >= 500)


def _unreached(reason: str) -> str:
    return f"the hub cannot be reached ({reason})"


def _no_copy(failure: str) -> str:
    return f"{failure}, and its cache has no copy"
