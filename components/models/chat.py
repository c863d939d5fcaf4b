"""OpenAI-compatible chat endpoints: a judge, or an evaluator of thoughts, that runs elsewhere.

A request that meets a passing fault (status 429 or 5xx, a broken connection, an answer of another form) is repeated
with growing pauses; the key comes from the environment and stands in no message.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from components.config import EndpointOptions

if TYPE_CHECKING:
    import httpx

LONGEST_WAIT = 60.0
CUT = ("length", "content_filter")
"""finish_reason of an answer that did not end by itself."""


class Reply(NamedTuple):
    """What a model wrote, and whether it ended by itself, and not at a limit."""

    text: str
    finished: bool


class ChatEndpoint:
    """An endpoint; a text is the user's only turn."""

    def __init__(self, options: EndpointOptions, model: str, max_new_tokens: int, who: str, error: type[Exception]) -> None:
        """Look for the key.

        Args:
            options: where it is and how it is asked.
            model: its name there.
            max_new_tokens: longest answer (tokens).
            who: what it is, for messages, e.g. "the judge's endpoint".
            error: raised where it cannot be asked.
        """
        self.options, self.model, self.max_new_tokens, self.who, self.error = options, model, max_new_tokens, who, error
        self.url = f"{options.base_url.rstrip('/')}/chat/completions"
        self._key = read_key(options, who, error)

    def ask(self, texts: Sequence[str], temperature: float = 0.0) -> list[Reply]:
        """An answer to each text, in their order; the first failure ends the others.

        Raises:
            Exception: the error that was named: a request was refused, or all its repetitions failed.
        """
        import httpx

        stopped = threading.Event()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.options.concurrency)
        with httpx.Client(headers=headers, timeout=self.options.timeout, limits=limits) as client, ThreadPoolExecutor(self.options.concurrency) as pool:
            asked = [pool.submit(self._ask, client, text, temperature, stopped) for text in texts]
            try:
                return [answer.result() for answer in asked]
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, client: httpx.Client, text: str, temperature: float, stopped: threading.Event) -> Reply:
        import httpx

        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": temperature or 0, "max_tokens": self.max_new_tokens}
        body = {name: value for name, value in (body | self.options.request).items() if value is not None}
        for attempt in range(self.options.retries + 1):
            wait = min(LONGEST_WAIT, self.options.backoff * 2**attempt)
            try:
                answer = client.post(self.url, json=body)
            except httpx.RequestError as error:
                fault = f"gave no answer ({type(error).__name__}: {self._safe(str(error))})"
            else:
                if answer.status_code == 200:
                    reply = _reply(answer)
                    if reply is not None:
                        return reply
                    fault = f"answered in another form than a chat completion's: {self._safe(answer.text)!r}"
                else:
                    fault = f"answered {answer.status_code} {answer.reason_phrase}: {self._safe(answer.text)!r}"
                    if answer.status_code != 429 and answer.status_code < 500:
                        raise self.error(f"{self.who} {self.url} {fault}. See {self.options.where}: model, base_url, api_key_env, request.")
                    wait = _retry_after(answer, wait)
            if attempt < self.options.retries and stopped.wait(wait):
                break
        raise self.error(f"{self.who} {self.url} {fault}; {attempt + 1} requests for one answer failed. "
                         f"See whether it is up and how many requests it takes ({self.options.where}: base_url, concurrency, retries, backoff, timeout).")

    def _safe(self, text: str) -> str:
        """One line of what a server said, without the key, should it have said that."""
        hidden = text.replace(self._key, "[key]") if self._key else text
        return " ".join(hidden.split())[:200]


def read_key(options: EndpointOptions, who: str, error: type[Exception]) -> str | None:
    """The endpoint's key, from the environment variable that the options name.

    Raises:
        Exception: the error that was named: the variable is not set, or holds what no header can carry; its value is not shown.
    """
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise error(f"the environment variable {options.api_key_env}, which should hold the key of {who} ({options.where}.api_key_env), is not set: set it where the run is started.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise error(f"the environment variable {options.api_key_env} ({options.where}.api_key_env) holds spaces or other characters that a key cannot have: set it anew.")
    return key


def _reply(answer: httpx.Response) -> Reply | None:
    """What the model wrote; None where the answer has another form. No content (a refusal) is an empty answer, and one that gives no reason for its end ended by itself."""
    try:
        choice = answer.json()["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Reply(content or "", reason not in CUT) if isinstance(content, str | None) else None


def _retry_after(answer: httpx.Response, otherwise: float) -> float:
    """The seconds that a Retry-After header asks for; a date there, or none, leaves the wait as it was."""
    asked = answer.headers.get("retry-after", "")
    return min(LONGEST_WAIT, float(asked)) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", asked) else otherwise
