"""Source `webgpt`: two long answers to a question with scores by people (Nakano et al., 2021).

Hub data set openai/webgpt_comparisons (FedPDPO D.1.1). The answer with the higher score is chosen,
and the margin is the difference; rows with equal scores are ties and are dropped. It has no owners:
use data.partition iid or margin, or the source mixture. The data set is a loading script, so its
conversion to parquet is read. It has one split of 19.6 thousand rows, of
which FedPDPO takes 12,000 and 1,434, without saying which: the source mixture takes as many (max_pairs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from components.config import DataConfig
from components.data.records import DataError, Pair, SourceData
from components.data.rows import CONVERSION, check_text
from components.data.sources.base import PairSource
from components.data.sources.plain import HubDataset, PlainSource, check_finite

ANSWERS = ("answer_0", "answer_1")
SCORES = ("score_0", "score_1")
DATASET = HubDataset("openai/webgpt_comparisons", ("question", *ANSWERS, *SCORES), revision=CONVERSION)
CITATION = re.compile(r"[ \t]*\[\d+(?:\s*,\s*\d+)*\]")


class Options(PairSource):
    """Options of the source webgpt."""

    references: Literal["keep", "remove"] = Field(
        "keep",
        description=(
            "What happens to marks in answers that cite a quote, such as [1] or [1, 2]; a list of numbers"
            " in brackets is always read as one."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs, with splits drawn by question.

        data.path names a file of the hub's schema, or a folder with files train and test.

        Raises:
            DataError: the data cannot be read, lack a column, or have no usable pair.
        """
        make = partial(make_pair, references=self.references)
        return PlainSource("webgpt", DATASET, make).load(data, self.shares, seed)


def make_pair(row: Mapping[str, Any], where: str, references: str = "keep") -> Pair | str:
    """Make the pair of a row with its margin, or return 'tie'.

    Args:
        row: question (text, or an object with full_text), answer_0, answer_1, score_0, score_1.
        where: for errors.
        references: see Options.

    Raises:
        DataError: a value has the wrong type.
    """
    question = _question(row["question"], where)
    texts = {"question": question} | {column: row[column] for column in ANSWERS}
    check_text(texts, texts, where)
    check_finite(row, SCORES, where)
    margin = float(row["score_0"] - row["score_1"])
    if not margin:
        return "tie"
    answers = [row[column] or "" for column in ANSWERS]
    if references == "remove":
        answers = [CITATION.sub("", answer) for answer in answers]
    chosen, rejected = answers if margin > 0 else answers[::-1]
    return Pair(question or "", chosen, rejected, margin=abs(margin))


def _question(question: Any, where: str) -> Any:
    if not isinstance(question, Mapping):
        return question
    if "full_text" not in question:
        raise DataError(
            f"{where}: column 'question' must be text, or an object with full_text, but has:"
            f" {', '.join(map(str, question)) or 'nothing'}"
        )
    return question["full_text"]
