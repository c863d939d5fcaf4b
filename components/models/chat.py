"""Client of OpenAI-compatible chat endpoints, which serve remote judges and evaluators of thoughts.

A request that fails for a passing reason (status 429 or 5xx, a broken connection, a malformed
answer) is repeated with exponential backoff. The key is read from the environment and appears in no
message.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from components.config import UserError
from components.config.thoughts import EndpointOptions
from components.models.generation import GenerationProgress
from components.models.samples import Reply, SampleKey

if TYPE_CHECKING:
    import httpx

MAX_WAIT_SECONDS = 60.0  # longest pause between two requests
TRUNCATED_REASONS = ("length", "content_filter")  # `finish_reason` of an answer that did not end by itself


class ChatEndpoint:
    """A chat endpoint. Each text is sent as the only turn of the user."""

    def __init__(self, options: EndpointOptions, model: str, max_new_tokens: int, description: str) -> None:
        """Read the key of an endpoint, which the description names in messages, as "the judge's endpoint"."""
        self.options = options
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.description = description
        self.url = f"{(options.base_url or '').rstrip('/')}/chat/completions"
        self._key = read_key(options, description)

    def write(
        self,
        prompts: Sequence[str],
        seed: int | Sequence[SampleKey] = 0,
        temperature: float = 0.0,
        progress: GenerationProgress | None = None,
    ) -> list[Reply]:
        """As `Policy.write`; the endpoint ignores the seed.

        The first failure cancels the other requests, and is a UserError: a request was refused, or all its
        repetitions failed.
        """
        import httpx

        stopped = threading.Event()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.options.concurrency)
        with (
            httpx.Client(headers=headers, timeout=self.options.timeout, limits=limits) as client,
            ThreadPoolExecutor(self.options.concurrency) as pool,
        ):
            requests = [pool.submit(self._request, client, text, temperature, stopped) for text in prompts]
            replies = []
            try:
                for request in requests:
                    replies.append(request.result())
                    if progress is not None:
                        progress(len(replies), len(prompts))
                return replies
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _request(
        self, client: httpx.Client, text: str, temperature: float, stopped: threading.Event
    ) -> Reply:
        """Send a request, and repeat it as often as the options allow until it succeeds."""
        import httpx

        options: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature or 0,
            "max_tokens": self.max_new_tokens,
        }
        options |= self.options.request
        body = {name: value for name, value in options.items() if value is not None}
        for attempt in range(self.options.retries + 1):
            wait = min(MAX_WAIT_SECONDS, self.options.backoff * 2**attempt)
            try:
                response = client.post(self.url, json=body)
            except httpx.RequestError as error:
                fault = f"gave no answer ({type(error).__name__}: {self._redact(str(error))})"
            else:
                reply = _parse_reply(response) if response.status_code == 200 else None
                if reply is not None:
                    return reply
                fault = self._describe_fault(response)
                if response.status_code != 200:
                    wait = _retry_after(response, wait)
            if attempt < self.options.retries and stopped.wait(wait):
                break
        raise UserError(
            f"{self.description} {self.url} {fault}; {attempt + 1} requests for one answer failed. "
            f"Check that it is running and how many requests it accepts ({self.options.where}: "
            "base_url, concurrency, retries, backoff, timeout)."
        )

    def _describe_fault(self, response: httpx.Response) -> str:
        """Why a response contains no reply; raises where repeating the request cannot help."""
        shown = self._redact(response.text)
        if response.status_code == 200:
            return f"answered with something that is not a chat completion: {shown!r}"
        fault = f"answered {response.status_code} {response.reason_phrase}: {shown!r}"
        if response.status_code != 429 and response.status_code < 500:
            raise UserError(
                f"{self.description} {self.url} {fault}. "
                f"Check {self.options.where}: model, base_url, api_key_env, request."
            )
        return fault

    def _redact(self, text: str) -> str:
        """A server's message as one line, with the key replaced in case the message repeats it."""
        redacted = text.replace(self._key, "[key]") if self._key else text
        return " ".join(redacted.split())[:200]


def read_key(options: EndpointOptions, description: str) -> str | None:
    """The key in the environment variable that the options name; None if they name no variable.

    A variable that is not set, or has characters that a header cannot contain, is a UserError, whose message
    does not show the value.
    """
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {options.api_key_env}, which should contain the key of {description} "
            f"({options.where}.api_key_env), is not set: set it where the run is started."
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"the environment variable {options.api_key_env} ({options.where}.api_key_env) contains spaces "
            "or other characters that a key cannot have: set it again."
        )
    return key


def _parse_reply(response: httpx.Response) -> Reply | None:
    """The reply of a response; None if the response is malformed.

    A missing content (a refusal) is an empty reply; a missing reason counts as a regular end.
    """
    try:
        choice = response.json()["choices"][0]
        content = choice["message"]["content"]
        reason = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(content, str | None):
        return None
    return Reply(content or "", reason not in TRUNCATED_REASONS)


def _retry_after(response: httpx.Response, default: float) -> float:
    """Seconds of a Retry-After header; the default if the header is missing or contains a date."""
    value = response.headers.get("retry-after", "")
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return default
    return min(MAX_WAIT_SECONDS, float(value))
