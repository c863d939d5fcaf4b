"""Source `shp`: answers on Reddit with the votes of readers (FedBiscuit section 6).

Hub data set stanfordnlp/SHP, Ethayarajh et al., 2022. A raw row is a question (`history`), two
answers to it, and a label that is 1 where answer A has the higher score, so where A won. (The
paper's published code reads 1 as "B is better".) Each label is compared with the scores: a row
whose scores contradict its label is dropped and counted; if most rows are contradictory, the column
has another meaning, and nothing is loaded. It has no owners: use data.partition dirichlet, over the
18 subreddits.

Choices where the paper is ambiguous or silent:

    length   "no more than 512 tokens", as for SteamSHP (the paper's StreamSHP), which reads T5
             tokens of one text with the question, both answers and a few words around them. That
             text is counted here. Nothing is truncated: SHP's authors advise to truncate long
             questions, of which the paper says nothing. (Table 5 has 260,814 of 348,718 training
             pairs; neither way was compared with that number.)
    prompts  table 5 has 4,293 unlabeled prompts, "SHP Test"; section 6 speaks of 2.6K Reddit
             questions. 60% of the former are the latter, which is one reading that agrees with
             both, and the default of align_share.
    judge    a 'selector' judge, which the paper does not use, is trained on validation questions,
             so that all training pairs stay with the clients.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat

from components.config import BackboneConfig, DataConfig, NamedModel
from components.data.raw import BareText, Name, RawRow, collect, one_of
from components.data.records import SPLITS, DataError, Pair, Prompt, SourceData
from components.data.rows import RawRows, from_folder, from_hub
from components.data.same_text import same_text
from components.data.sources.source import Source
from components.data.splits import JUDGE, evaluation_prompts, position

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "stanfordnlp/SHP"
FRAME = "POST: \n\n RESPONSE A: \n\n RESPONSE B: \n\n Which response is better? RESPONSE"
"""The words around the three texts in SteamSHP's input, by its model card; only its length is used.
"""
CONTRADICTED = "label that the scores do not bear out"
JUDGE_TEST_SHARE = 0.2
BATCH_SIZE = 1000


@dataclass(frozen=True)
class Vote:
    """A pair, and the score of the chosen answer."""

    pair: Pair
    score: float


class VoteRow(RawRow):
    """A question, two answers with their scores, and which won.

    domain is the subreddit with the hub's split as its suffix ('askphysics_train'), which is removed.
    """

    post_id: Name
    domain: Name
    history: BareText
    human_ref_A: BareText
    human_ref_B: BareText
    labels: Annotated[int, one_of({1: "answer A won", 0: "answer B won"})]
    score_A: FiniteFloat
    score_B: FiniteFloat
    score_ratio: FiniteFloat | None = None

    def vote(self, split: str) -> Vote | str:
        """The pair and its score, or the reason why there is none."""
        a, b = (self.human_ref_A, self.score_A), (self.human_ref_B, self.score_B)
        (chosen, score), (rejected, lower) = (a, b) if self.labels == 1 else (b, a)
        if not score > lower:
            return CONTRADICTED
        if not (self.history and chosen and rejected):
            return "empty text"
        if chosen == rejected:
            return "both answers the same"
        pair = Pair(
            self.history,
            chosen,
            rejected,
            domain=re.sub(r"_(train|validation|test)$", "", self.domain),
            group=self.post_id,
            margin=self.score_ratio,
            split=split,
        )
        return Vote(pair, score)


class Shp(NamedModel, Source):
    """Options of the source shp."""

    model_key: ClassVar[str] = "tokenizer"
    not_judgements: ClassVar[str] = "has verdicts by scores of answers, of which one decides several pairs"

    max_tokens: int | None = Field(
        512,
        ge=1,
        description=(
            "Maximum length of a pair, question and both answers together (tokens of `tokenizer`); FedBiscuit"
            " section 6: 512. null keeps all and needs no tokenizer."
        ),
    )
    tokenizer: str = Field(
        "google/flan-t5-xl",
        min_length=1,
        description=(
            "Tokenizer of max_tokens: a hub id or a folder, or 'embedded', which needs no hub and counts"
            " differently. The default is SteamSHP's backbone."
        ),
    )
    align_share: float = Field(
        0.6,
        ge=0,
        le=1,
        description=(
            "Share of the test questions that are the server's unlabeled prompts; their pairs are dropped, so"
            " with 1 no pair remains to measure the selector on. FedBiscuit's table 5 has 4,293 test prompts,"
            " its section 6 says 2.6K."
        ),
    )
    judge_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Share of the validation questions whose pairs train the judge, a fifth of them held out to"
            " measure it."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs of the hub's three splits, the server's prompts and the judge's pairs.

        The test questions that are not the server's are the prompts to evaluate on; their
        references are the answers that won, the highest score first. data.path names a folder with
        files train, validation and test (.jsonl, .jsonl.gz, .json or .parquet) of the hub's schema,
        which are read in place of the hub.

        A group is a post. Posts with the same question are one group; if it is in two splits, the
        held-out one has it. So no question is with two clients or in two splits.
        """
        by_split: dict[str, list[Vote]] = {}
        dropped: Counter[str] = Counter()
        for split in SPLITS:
            by_split[split], counts = read_votes(*_raw(data, split), split)
            dropped.update(counts)
        by_split, dropped["question also in a held-out split"] = one_split_per_question(by_split)
        if self.max_tokens is not None:
            by_split, dropped[f"over {self.max_tokens} tokens"] = self._shorten(by_split)
        judged, validation = _divide(by_split["validation"], "judge", self.judge_share, seed)
        align, tested = _divide(by_split["test"], "align", self.align_share, seed)
        dropped["question given to the server"] = len(align)
        prompts = [Prompt(vote.pair.prompt, [], "align") for vote in align]
        best_first = sorted(tested, key=lambda vote: -vote.score)
        pairs = [vote.pair for vote in (*by_split["train"], *validation, *tested)]
        return SourceData(
            pairs,
            [*prompts, *evaluation_prompts(vote.pair for vote in best_first)],
            _judge_pairs(judged, seed),
            dropped={reason: count for reason, count in dropped.items() if count},
        )

    def _shorten(self, by_split: Mapping[str, Sequence[Vote]]) -> tuple[dict[str, list[Vote]], int]:
        """The pairs of at most max_tokens tokens, and the number of dropped ones."""
        tokenizer = _tokenizer(self.location)
        short: dict[str, list[Vote]] = {}
        limit = self.max_tokens or 0
        for split, votes in by_split.items():
            lengths = token_counts([vote.pair for vote in votes], tokenizer)
            short[split] = [vote for vote, length in zip(votes, lengths, strict=True) if length <= limit]
        return short, _total(by_split) - _total(short)


def _total(by_split: Mapping[str, Sequence[Vote]]) -> int:
    return sum(map(len, by_split.values()))


def _judge_pairs(votes: Sequence[Vote], seed: int) -> list[Pair]:
    """The judge's pairs: training pairs, then those held out to measure it."""
    test, train = _divide(votes, "judge's test", JUDGE_TEST_SHARE, seed)
    pairs: list[Pair] = []
    for split, members in (("train", train), ("test", test)):
        pairs += [replace(vote.pair, client_id=JUDGE, split=split) for vote in members]
    return pairs


def read_votes(rows: Iterable[Mapping[str, Any]], where: str, split: str) -> tuple[list[Vote], Counter[str]]:
    """Read pairs of raw rows of a split.

    Returns:
        the pairs, with the post as group and score_ratio as margin, and the number of dropped rows
        by reason: an empty text, both answers the same, or a label that the scores contradict.
    """
    votes, dropped = collect(VoteRow.read(rows, where), lambda row: row.vote(split))
    contradicted = dropped[CONTRADICTED]
    if contradicted > len(votes):
        raise DataError(
            f"{where}: in {contradicted} of {len(votes) + dropped.total()} rows the scores do not"
            " bear the label out; labels must be 1 where answer A has the higher score and 0 where answer B"
            " has: this column means something else, or the answers were exchanged"
        )
    return votes, dropped


def one_split_per_question(
    by_split: Mapping[str, Sequence[Vote]],
) -> tuple[dict[str, list[Vote]], int]:
    """Give posts with the same question one group, and each group one split.

    The test split has priority over validation, and validation over train. Questions are the same
    if same_text says so.

    Returns:
        the pairs by split, and the number of those dropped because their question is held out.
    """
    groups: dict[str, str] = {}
    split_of_group: dict[str, str] = {}
    remaining: dict[str, list[Vote]] = {split: [] for split in SPLITS}
    for split in reversed(SPLITS):
        for vote in by_split[split]:
            group = groups.setdefault(same_text(vote.pair.prompt), vote.pair.split_group)
            if split_of_group.setdefault(group, split) == split:
                remaining[split].append(replace(vote, pair=replace(vote.pair, group=group)))
    return remaining, _total(by_split) - _total(remaining)


def token_counts(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Number of tokens of each pair in SteamSHP's input: question, both answers, and the frame.

    The texts are tokenized separately, each once; the whole may be a token or two shorter.
    """
    unique: dict[str, None] = {}
    for pair in pairs:
        unique |= dict.fromkeys((pair.prompt, pair.chosen, pair.rejected))
    texts = list(unique)
    lengths: dict[str, int] = {}
    for start in range(0, len(texts), BATCH_SIZE):
        batch = texts[start : start + BATCH_SIZE]
        encoded = tokenizer(batch, add_special_tokens=False)["input_ids"]
        lengths |= {text: len(ids) for text, ids in zip(batch, encoded, strict=True)}
    frame = len(tokenizer(FRAME)["input_ids"])
    return [frame + lengths[pair.prompt] + lengths[pair.chosen] + lengths[pair.rejected] for pair in pairs]


def _divide(votes: Sequence[Vote], purpose: str, share: float, seed: int) -> tuple[list[Vote], list[Vote]]:
    """The pairs of a share of the groups, and the others."""
    drawn: list[Vote] = []
    others: list[Vote] = []
    for vote in votes:
        in_share = position(seed, purpose, vote.pair.split_group) < share
        (drawn if in_share else others).append(vote)
    return drawn, others


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from components.models.backbone import BackboneError, load_tokenizer

    try:
        return load_tokenizer(BackboneConfig(name=name))
    except BackboneError as error:
        raise DataError(
            f"data.options.tokenizer: {str(error).rstrip('.')}; or set data.options.max_tokens to null, and"
            " no tokens are counted."
        ) from None


def _raw(data: DataConfig, split: str) -> RawRows:
    if data.path is None:
        return from_hub(HUB, split=split, revision=data.revision)
    return from_folder(Path(data.path), split, SPLITS)
