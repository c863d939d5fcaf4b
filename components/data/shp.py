"""Source `shp`: answers on Reddit and their readers' votes (hub, stanfordnlp/SHP; Ethayarajh et al., 2022; FedBiscuit section 6).

A raw row is a question (`history`), two answers to it, and a label that is 1 where answer A has the higher score, so
where A won. (The paper's published code reads 1 as "B is better".) Each label is held against the scores beside it: a
row whose scores do not bear its label out is dropped and counted; where most rows are such, the column is not what it
should be, and nothing is loaded. No owner is known: use data.partition dirichlet, over the 18 subreddits.

Where the paper is of two minds, or silent
    length       "no more than 512 tokens", as for SteamSHP (the paper's StreamSHP), which reads T5 tokens of one text that
                 holds the question, both answers and a few words around them. That text is counted here. Nothing is cut:
                 SHP's authors advise to cut long questions to make room, of which the paper says nothing. (Table 5 keeps
                 260,814 of 348,718 training pairs; the hub was out of reach when this was written, so neither was tried.)
    prompts      table 5 has 4,293 unlabelled prompts, "SHP Test"; section 6 speaks of 2.6K Reddit questions. 60% of
                 the former are the latter, which is one reading that fits both, and the default of align_share.
    judge        a 'selector' judge, which the paper does not use, gets its pairs from validation questions, so that all
                 training pairs stay with the clients.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from components.config import BackboneConfig, DataConfig, Section
from components.data.records import SPLITS, DataError, SourceData
from components.data.registry import CountedSourceData, pairs_dataset, prompts_dataset, source
from components.data.reserve import JUDGE
from components.data.rows import SUFFIXES, check_text, find_file, from_hub, read_file
from components.data.splits import normal, position

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "stanfordnlp/SHP"
TEXTS = ("post_id", "domain", "history", "human_ref_A", "human_ref_B")
COLUMNS = (*TEXTS, "labels", "score_A", "score_B")
FRAME = "POST: \n\n RESPONSE A: \n\n RESPONSE B: \n\n Which response is better? RESPONSE"
"""What stands around the three texts in SteamSHP's input, by its model card; only its length is used."""
FIELDS = ("prompt", "chosen", "rejected")
CONTRADICTED = "label that the scores do not bear out"
JUDGE_TEST = 0.2
BATCH = 1000

Pair = dict[str, Any]


class ShpOptions(Section):
    """Options of the source shp."""

    max_tokens: int | None = Field(512, ge=1, description="Longest pair, question and both answers together (tokens of `tokenizer`); FedBiscuit section 6: 512. None keeps all and needs no tokenizer.")
    tokenizer: str = Field("google/flan-t5-xl", min_length=1, description="Whose tokens are counted: a hub id or folder of a tokenizer, or 'embedded', which needs no hub and counts "
                           "differently. The default is SteamSHP's backbone.")
    align_share: float = Field(0.6, ge=0, le=1, description="Share of the test questions that are the server's unlabelled prompts; their pairs are left out, so 1 leaves none to measure "
                               "the selector on. FedBiscuit's table 5 has 4,293 test prompts, its section 6 says 2.6K.")
    judge_share: float = Field(0.5, ge=0, le=1, description="Share of the validation questions whose pairs train the judge, a fifth of them held out to measure it.")


@source("shp", ShpOptions)
def load(data: DataConfig, options: ShpOptions, seed: int) -> SourceData:
    """Pairs of the hub's three splits, the server's prompts and the judge's pairs.

    Of the test questions those that are not the server's are the prompts to evaluate on; their references are the
    answers that won, the highest score first. data.path names a folder with files train, validation and test
    (.jsonl, .jsonl.gz, .json or .parquet) of the hub set's schema, read in place of the hub.

    A group is a post. Posts that ask the same question are one group; where it stands in two splits, the held-out one
    keeps it. So no question is in two clients or in two splits.

    Raises:
        DataError: the data or the tokenizer cannot be read, or most labels contradict their scores.
    """
    by_split, dropped = {}, Counter()
    for split in SPLITS:
        by_split[split], counts = read_votes(_raw(data, split), split, data.path or f"{HUB} (split {split})")
        dropped.update(counts)
    by_split, dropped["question also in a held-out split"] = one_split_a_question(by_split)
    if options.max_tokens is not None:
        tokenizer = _tokenizer(options.tokenizer)
        for split, pairs in by_split.items():
            lengths = token_counts(pairs, tokenizer)
            by_split[split] = [pair for pair, length in zip(pairs, lengths, strict=True) if length <= options.max_tokens]
            dropped[f"over {options.max_tokens} tokens"] += len(pairs) - len(by_split[split])

    judged, rest = _apart(by_split["validation"], "judge", options.judge_share, seed)
    align, tested = _apart(by_split["test"], "align", options.align_share, seed)
    dropped["question given to the server"] = len(align)
    asked: dict[str, list[Pair]] = {}
    for pair in sorted(tested, key=lambda pair: -pair["score"]):
        asked.setdefault(pair["prompt"], []).append(pair)
    prompts = [(pair["prompt"], [], "align") for pair in align]
    prompts += [(prompt, list(dict.fromkeys(pair["chosen"] for pair in pairs)), "test") for prompt, pairs in asked.items()]
    held_out, taught = _apart(judged, "judge's test", JUDGE_TEST, seed)
    judged = [pair | {"client_id": JUDGE, "split": split} for pairs, split in ((taught, "train"), (held_out, "test")) for pair in pairs]
    return CountedSourceData(
        pairs_dataset([*by_split["train"], *rest, *tested], "shp"), prompts_dataset(prompts, "shp"), pairs_dataset(judged, "shp"),
        dropped={reason: n for reason, n in dropped.items() if n})


def read_votes(rows: Iterable[Mapping[str, Any]], split: str, where: str) -> tuple[list[Pair], dict[str, int]]:
    """Pairs from raw rows: chosen is answer A where labels is 1, and answer B where it is 0.

    Args:
        rows: see COLUMNS; domain is the subreddit with the hub's split as its suffix ('askphysics_train'), which is
            taken off.
        split: of all rows.
        where: what the rows come from, for errors.

    Returns:
        Pairs with prompt, chosen, rejected, domain, group (the post), margin (score_ratio), score (of chosen) and
        split, and how many rows were dropped, by reason: an empty text, both answers the same, or a label that the
        scores do not bear out.

    Raises:
        DataError: a column is missing or of the wrong type, or most labels are not borne out by the scores.
    """
    pairs: list[Pair] = []
    dropped: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        _check(row, f"{where}, row {number}")
        won, lost = ("A", "B") if row["labels"] == 1 else ("B", "A")
        question, chosen, rejected = ((row[c] or "").strip() for c in ("history", f"human_ref_{won}", f"human_ref_{lost}"))
        if not row[f"score_{won}"] > row[f"score_{lost}"]:
            dropped[CONTRADICTED] += 1
        elif not (question and chosen and rejected):
            dropped["empty text"] += 1
        elif chosen == rejected:
            dropped["both answers the same"] += 1
        else:
            pairs.append({
                "prompt": question, "chosen": chosen, "rejected": rejected, "domain": re.sub(r"_(train|validation|test)$", "", row["domain"]), "group": row["post_id"],
                "margin": row.get("score_ratio"), "score": row[f"score_{won}"], "split": split})
    if dropped[CONTRADICTED] > len(pairs):
        raise DataError(f"{where}: in {dropped[CONTRADICTED]} of {len(pairs) + dropped.total()} rows the scores do not bear the label out; labels must be 1 where answer A has "
                        "the higher score and 0 where answer B has: this column means something else, or the answers were exchanged")
    return pairs, dict(dropped)


def one_split_a_question(by_split: Mapping[str, list[Pair]]) -> tuple[dict[str, list[Pair]], int]:
    """Give posts that ask the same question one group, and each group one split: test before validation before train.

    Questions are the same where they differ in case and white space only.

    Returns:
        The pairs that are left by split, and how many were dropped because their question is held out.
    """
    group_of: dict[str, str] = {}
    home: dict[str, str] = {}
    kept: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for split in reversed(SPLITS):
        for pair in by_split[split]:
            group = group_of.setdefault(normal(pair["prompt"]), pair["group"])
            if home.setdefault(group, split) == split:
                kept[split].append(pair | {"group": group})
    return kept, sum(map(len, by_split.values())) - sum(map(len, kept.values()))


def token_counts(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each pair in SteamSHP's input: the question, both answers, and the words around them.

    The pieces are tokenised apart, each text once; the whole may come out a token or two shorter.
    """
    texts = list(dict.fromkeys(pair[field] for pair in pairs for field in FIELDS))
    lengths: dict[str, int] = {}
    for start in range(0, len(texts), BATCH):
        batch = texts[start:start + BATCH]
        lengths |= zip(batch, map(len, tokenizer(batch, add_special_tokens=False)["input_ids"]), strict=True)
    frame = len(tokenizer(FRAME)["input_ids"])
    return [frame + sum(lengths[pair[field]] for field in FIELDS) for pair in pairs]


def _apart(pairs: Sequence[Pair], purpose: str, share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs of a share of the groups, and the others."""
    drawn, others = [], []
    for pair in pairs:
        (drawn if position(seed, purpose, pair["group"]) < share else others).append(pair)
    return drawn, others


def _check(row: Mapping[str, Any], where: str) -> None:
    missing = [c for c in COLUMNS if c not in row]
    if missing:
        raise DataError(f"{where}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row)) or 'none'}")
    check_text(row, TEXTS, where)
    empty = [c for c in ("post_id", "domain") if not row[c]]
    if empty:
        raise DataError(f"{where}: column '{empty[0]}' is empty, but each row needs a post and a subreddit")
    if row["labels"] not in (0, 1):
        raise DataError(f"{where}: labels must be 1 (answer A won) or 0 (answer B won), but is {row['labels']!r}")
    for column in ("score_A", "score_B", "score_ratio"):
        value = row.get(column, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{where}: column '{column}' must be a number, but is {value!r} ({type(value).__name__})")


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from components.models.backbone import BackboneError, load_tokenizer

    try:
        return load_tokenizer(BackboneConfig(name=name))
    except BackboneError:
        raise
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"the tokenizer '{name}' (data.options.tokenizer) cannot be loaded: {reason.rstrip('.')}. Name a hub id that can be reached from here, a folder, "
                        "or 'embedded'; or set data.options.max_tokens to null, and no tokens are counted.") from error


def _raw(data: DataConfig, split: str) -> Iterable[Mapping[str, Any]]:
    if data.path is None:
        return from_hub(HUB, split=split, revision=data.revision)
    folder = Path(data.path)
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder with files {', '.join(SPLITS)} ({', '.join(SUFFIXES)})")
    file = find_file(folder, split)
    if file is None:
        raise DataError(f"{folder}: the file {split} ({', '.join(SUFFIXES)}) is missing in this folder")
    return read_file(file)
