"""Calls of functions, recorded while they are made."""

from collections.abc import Callable
from typing import Any

import pytest


def record_calls(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, read: Callable[..., Any]
) -> list[Any]:
    """The list to which each call of a function adds what `read` makes of its arguments."""
    recorded: list[Any] = []
    function = getattr(owner, name)

    def record(*arguments: Any, **named: Any) -> Any:
        recorded.append(read(*arguments, **named))
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, record)
    return recorded
