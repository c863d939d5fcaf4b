"""Source `imdb`: beginnings of film reviews, each carried on in two ways (hub, yuasosnin/imdb-dpo; FedPDPO D.1.1).

Both completions of a raw row begin with the prompt's own text, which is taken off. The margin is the difference of their
rewards; the one with the higher reward is chosen. No owner is known: use data.partition margin (FedPDPO D.1.2) or iid. The
hub's two splits (9,000 and 1,000) are ours. Beginnings are short, so the same one may be in both: those training rows are
dropped and counted. The hub was out of reach when this was written, so how many they are has not been seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import DataConfig
from components.data.plain import PlainOptions, check_finite, load_plain
from components.data.records import SourceData
from components.data.registry import source
from components.data.rows import check_text

HUB = "yuasosnin/imdb-dpo"
TEXTS = ("prompt", "chosen", "rejected")
REWARDS = ("chosen_reward", "rejected_reward")


@source("imdb", PlainOptions)
def load(data: DataConfig, options: PlainOptions, seed: int) -> SourceData:
    """The pairs; data.path names a file of the hub set's schema, whose splits are drawn by prompt, or a folder with files train and test.

    Raises:
        DataError: the data cannot be read, lack a column, or hold no usable pair.
    """
    return load_plain(data, options, seed, "imdb", HUB, (*TEXTS, *REWARDS), make_pair, ("train", "test"))


def make_pair(row: Mapping[str, Any], where: str) -> dict[str, Any] | str:
    """The pair of a row, with its margin; or the reason that it makes none: a completion of another prompt, or a margin that is not above 0.

    Raises:
        DataError: a value has the wrong type.
    """
    check_text(row, TEXTS, where)
    check_finite(row, REWARDS, where)
    prompt, chosen, rejected = (row[c] or "" for c in TEXTS)
    margin = float(row["chosen_reward"] - row["rejected_reward"])
    if not (chosen.startswith(prompt) and rejected.startswith(prompt)):
        return "completion that does not begin with its prompt"
    if not margin > 0:
        return "margin not above 0"
    return {"prompt": prompt, "chosen": chosen.removeprefix(prompt), "rejected": rejected.removeprefix(prompt), "margin": margin}
