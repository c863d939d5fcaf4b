"""Source `ultrafeedback`: answers to instructions of many kinds (Cui et al., 2023; FedPDPO D.1.1).

Hub data set kaitchup/UltraFeedback-prompt-chosen-rejected. Its exact schema was not verified on the
hub. Two forms are read: chosen and rejected are texts, or lists of chat messages, of which the last
turn of the assistant is the answer. It has no owners: use data.partition iid, or the source
mixture. Its test split of 895 rows stays the test split; FedPDPO tests on as many pairs. Of the 17.1
thousand training rows FedPDPO takes 12,000, without saying which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.records import DataError, Pair, SourceData
from components.data.rows import check_text
from components.data.sources.base import PairSource
from components.data.sources.plain import FIELDS, HubDataset, PlainSource, plain_pair

DATASET = HubDataset("kaitchup/UltraFeedback-prompt-chosen-rejected", FIELDS, ("train", "test"))


class Options(PairSource):
    """Options of the source ultrafeedback."""

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs, with the test split of the data set, and validation pairs drawn by prompt.

        data.path names a file of the hub's schema, or a folder with files train and test.

        Raises:
            DataError: the data cannot be read, lack a column, or have no usable pair.
        """
        return PlainSource("ultrafeedback", DATASET, make_pair).load(data, self.shares, seed)


def make_pair(row: Mapping[str, Any], where: str) -> Pair:
    """Make the pair of a row.

    Raises:
        DataError: the prompt is not text, or a completion is neither text nor a list of messages
            with a turn of the assistant.
    """
    texts = {"prompt": row["prompt"]}
    texts |= {column: _answer(row[column], column, where) for column in ("chosen", "rejected")}
    check_text(texts, FIELDS, where)
    return plain_pair(texts)


def _answer(value: Any, column: str, where: str) -> Any:
    """A text unchanged; of a list of messages the last one of the assistant."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value):
        raise DataError(
            f"{where}: column '{column}' must be text or a list of messages, each an object with role and"
            f" content, but is {str(value)[:60]!r}"
        )
    answers = [message["content"] for message in value if message["role"] == "assistant"]
    if not answers:
        raise DataError(
            f"{where}: column '{column}' is a list of {len(value)} messages without a turn of the assistant,"
            " which would be the answer"
        )
    return answers[-1]
