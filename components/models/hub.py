"""Models of the hub: the config.json of one, and the commit that a revision names."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

REMEMBERED_SECONDS = 60.0
"""How long an answer of the hub, or its silence, stands for further questions of this process."""
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Answer:
    """What the hub has answered when it was asked for a config.json."""

    moment: float  # by the monotonic clock
    text: str = ""
    commit: str | None = None
    failure: str = ""  # why there is no text
    is_reached: bool = True


_answers: dict[str, Answer] = {}


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
    from huggingface_hub import constants

    if (cached := find_cached(name, "config.json", revision)) is not None:
        return cached.read_text(encoding="utf-8")
    if constants.HF_HUB_OFFLINE or local_only:
        raise OSError(
            _no_copy("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no request was made")
        )
    answer = _ask(name, revision)
    if answer.failure:
        raise OSError(answer.failure)
    return answer.text


def require_reachable(name: str, revision: str | None) -> None:
    """Ask the hub once for a model that its cache lacks, before libraries ask again and again.

    Raises:
        OSError: it does not answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not is_hub_id(name):
        return
    if any(find_cached(name, file, revision) for file in ("config.json", "tokenizer_config.json")):
        return
    answer = _ask(name, revision)
    if not answer.is_reached:
        raise OSError(answer.failure)


def find_commit(name: str, revision: str | None) -> str | None:
    """The commit that a revision of a hub id is now: by the hub, or else by its cache; None if unknown."""
    from huggingface_hub import constants

    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    if not constants.HF_HUB_OFFLINE and (commit := _ask(name, revision).commit) is not None:
        return commit
    cached = find_cached(name, "config.json", revision)
    return None if cached is None else cached.parent.name


def _ask(name: str, revision: str | None) -> Answer:
    """The hub's answer, of which one is remembered for a while."""
    from huggingface_hub import hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    url = hf_hub_url(name, "config.json", revision=revision or "main", endpoint=endpoint)
    known = _answers.get(url)
    if known is None or time.monotonic() - known.moment > REMEMBERED_SECONDS:
        known = _answers[url] = _request(url)
    return known


def _request(url: str) -> Answer:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants, get_token

    header = constants.HUGGINGFACE_HEADER_X_REPO_COMMIT
    token = get_token()
    request = Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urlopen(request, timeout=constants.HF_HUB_ETAG_TIMEOUT) as response:
            text = response.read().decode(errors="replace")
            return Answer(time.monotonic(), text, response.headers.get(header))
    except HTTPError as error:
        failure = f"the hub answers {error.code} ({error.reason})"
        return Answer(time.monotonic(), "", error.headers.get(header), failure, error.code < 500)
    except (OSError, HTTPException, ValueError) as error:  # ValueError: HF_ENDPOINT is no address
        failure = _no_copy(getattr(error, "reason", error))
        return Answer(time.monotonic(), failure=failure, is_reached=False)


def _no_copy(reason: object) -> str:
    return f"the hub cannot be reached ({reason}), and its cache has no copy"
