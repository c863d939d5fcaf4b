"""Source `webgpt`: two long answers to a question, scored against each other by people (hub, openai/webgpt_comparisons; Nakano et al., 2021; FedPDPO D.1.1).

The answer with the higher score is chosen, and the margin is the difference; rows with equal scores are ties and are dropped. No
owner is known: use data.partition iid or margin, or the source mixture. The hub has one split of 19.6 thousand rows, of
which FedPDPO takes 12,000 and 1,434, without saying which: data.max_pairs and data.test come near.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from components.config import DataConfig
from components.data.plain import PlainOptions, check_finite, load_plain
from components.data.records import DataError, SourceData
from components.data.registry import source
from components.data.rows import check_text

HUB = "openai/webgpt_comparisons"
ANSWERS = ("answer_0", "answer_1")
SCORES = ("score_0", "score_1")
MARK = re.compile(r"[ \t]*\[\d+(?:\s*,\s*\d+)*\]")


class WebgptOptions(PlainOptions):
    """Options of the source webgpt."""

    references: Literal["keep", "remove"] = Field("keep", description="What becomes of the marks in answers that cite a quote, such as [1] or [1, 2]; a list of numbers in brackets is always read as one.")


@source("webgpt", WebgptOptions)
def load(data: DataConfig, options: WebgptOptions, seed: int) -> SourceData:
    """The pairs, in splits drawn by question; data.path names a file of the hub set's schema, or a folder with files train and test.

    Raises:
        DataError: the data cannot be read, lack a column, or hold no usable pair.
    """
    return load_plain(data, options, seed, "webgpt", HUB, ("question", *ANSWERS, *SCORES), partial(make_pair, references=options.references))


def make_pair(row: Mapping[str, Any], where: str, references: str = "keep") -> dict[str, Any] | str:
    """The pair of a row, with its margin; or 'tie'.

    Args:
        row: question (text, or an object with full_text), answer_0, answer_1, score_0, score_1.
        where: for errors.
        references: see WebgptOptions.

    Raises:
        DataError: a value has the wrong type.
    """
    question = row["question"]
    if isinstance(question, Mapping):
        if "full_text" not in question:
            raise DataError(f"{where}: column 'question' must be text, or an object with full_text, but has: {', '.join(map(str, question)) or 'nothing'}")
        question = question["full_text"]
    texts = {"question": question} | {c: row[c] for c in ANSWERS}
    check_text(texts, texts, where)
    check_finite(row, SCORES, where)
    margin = float(row["score_0"] - row["score_1"])
    if not margin:
        return "tie"
    answers = [MARK.sub("", row[c] or "") if references == "remove" else row[c] for c in ANSWERS]
    chosen, rejected = answers if margin > 0 else answers[::-1]
    return {"prompt": question, "chosen": chosen, "rejected": rejected, "margin": abs(margin)}
