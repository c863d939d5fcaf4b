"""Source `ultrafeedback`: answers to instructions of many kinds (hub, kaitchup/UltraFeedback-prompt-chosen-rejected; Cui et al., 2023; FedPDPO D.1.1).

The hub was out of reach when this was written, so its exact schema could not be checked. Two forms of it are read: chosen and
rejected are texts, or lists of chat messages, of which the last turn of the assistant is the answer. No owner is known: use
data.partition iid, or the source mixture. Of 17.1 thousand rows FedPDPO takes 12,000 and 895, without saying which: data.max_pairs
and data.test come near.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.plain import FIELDS, PlainOptions, load_plain
from components.data.records import DataError, SourceData
from components.data.registry import source
from components.data.rows import check_text

HUB = "kaitchup/UltraFeedback-prompt-chosen-rejected"


@source("ultrafeedback", PlainOptions)
def load(data: DataConfig, options: PlainOptions, seed: int) -> SourceData:
    """The pairs, in splits drawn by prompt; data.path names a file of the hub set's schema, or a folder with files train and test.

    Raises:
        DataError: the data cannot be read, lack a column, or hold no usable pair.
    """
    return load_plain(data, options, seed, "ultrafeedback", HUB, FIELDS, make_pair)


def make_pair(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The pair of a row.

    Raises:
        DataError: the prompt is not text, or a completion is neither text nor a list of messages with a turn of the assistant.
    """
    pair = {"prompt": row["prompt"]} | {c: _answer(row[c], c, where) for c in ("chosen", "rejected")}
    check_text(pair, FIELDS, where)
    return pair


def _answer(value: Any, column: str, where: str) -> Any:
    """A text as it is; of a list of messages what the assistant said last."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value):
        raise DataError(f"{where}: column '{column}' must be text or a list of messages, each an object with role and content, but is {str(value)[:60]!r}")
    said = [message["content"] for message in value if message["role"] == "assistant"]
    if not said:
        raise DataError(f"{where}: column '{column}' is a list of {len(value)} messages without a turn of the assistant, which would be the answer")
    return said[-1]
