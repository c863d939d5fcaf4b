"""Source `tldr`: OpenAI's human comparisons of TL;DR summaries (hub; Stiennon et al., 2020).

FedBiscuit section 6. A client is a worker: 53 of them made the 92,858 comparisons of the training
part (table 5). The server's prompts are posts of the TL;DR data that are in no comparison ("we
ensure a post does not appear in both datasets"): 60% of them are reserved for supervised
fine-tuning, 40% are used here (table 5: 42,782). The test split of the TL;DR posts (6,553) gives
the evaluation prompts; the human TL;DR is the reference. A post is identified by its id where both
data sets have one, and by its text without case, spacing and punctuation.

The hub's comparisons are a loading script; its parquet conversion (revision refs/convert/parquet)
is read instead.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, NameOrFolder
from components.data.records import DataError, Pair, SourceData
from components.data.rows import (
    CONVERSION,
    SUFFIXES,
    check_columns,
    check_number,
    check_text,
    from_hub,
    read_file,
    require_file,
)
from components.data.sources.base import Source
from components.data.sources.plain import RawSplit
from components.data.splits import position
from components.data.tables import Prompt, pairs_dataset, prompts_dataset
from components.seeding import generator

HUB = "openai/summarize_from_feedback"
COLUMNS = ("info", "summaries", "choice", "worker")
POST_COLUMNS = ("subreddit", "title", "post", "summary")
HUB_SPLITS = {
    "comparisons": "train",
    "comparisons_validation": "validation",
    "posts": "train",
    "posts_test": "test",
}
"""Split on the hub of each part of the data."""
POST = re.compile(
    r"SUBREDDIT: r/(.*?)\s*\nTITLE: (.*?)\s*\nPOST: (.*?)\s*(?:TL;DR:\s*)?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Comparison:
    """A comparison that makes a pair.

    Attributes:
        pair: the pair.
        post_names: what identifies its post.
    """

    pair: Pair
    post_names: frozenset[str]


class Options(Source):
    """Options of the source tldr."""

    posts: NameOrFolder = Field(
        NameOrFolder("trl-lib/tldr"),
        description=(
            "Hub data set of the TL;DR posts with columns prompt and completion (or label), or title, post,"
            " subreddit, summary."
        ),
    )
    posts_revision: str | None = Field(None, description="Hub revision of the posts.")
    align_share: float = Field(
        0.4,
        gt=0,
        le=1,
        description=(
            "Share of the posts that are the server's prompts; FedBiscuit section 6: 0.4, the rest is"
            " reserved for SFT."
        ),
    )
    judge_workers: int = Field(
        3,
        ge=0,
        description=(
            "Workers that are reserved to train the judge, drawn from those with at least the median number"
            " of pairs; 0 reserves none and takes the comparisons' validation part, from workers who are"
            " not in the training part."
        ),
    )

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the comparisons of the training part by worker, and the server's prompts.

        data.path names a folder with files comparisons, posts, posts_test, and
        comparisons_validation if judge_workers is 0 (.jsonl, .jsonl.gz or .parquet), of the hub's
        schemas, which are read in place of the hub.

        Raises:
            DataError: the data cannot be read, lack a column, or have values of a wrong type.
        """
        raw = self._raw(data, "comparisons")
        posts = self._raw(data, "posts")
        test_posts = self._raw(data, "posts_test")
        comparisons, dropped = read_comparisons(raw)
        judges = self._draw_judges(comparisons, seed)
        other_judges = [] if self.judge_workers else self._validation_judges(data, comparisons)
        compared = _compared_posts(raw.rows, other_judges)
        align, test, left_out = self._prompts(posts, test_posts, compared, seed)
        pairs = [comparison.pair for comparison in comparisons]
        judged = [comparison.pair for comparison in other_judges]
        judged += [pair for pair in pairs if pair.client_id in judges]
        return SourceData(
            pairs_dataset((pair for pair in pairs if pair.client_id not in judges), "tldr"),
            prompts_dataset([*align, *test], "tldr"),
            pairs_dataset(judged, "tldr"),
            dropped=dict(Counter(dropped) + left_out),
        )

    def _draw_judges(self, comparisons: Sequence[Comparison], seed: int) -> set[str]:
        counts = Counter(comparison.pair.client_id for comparison in comparisons)
        ranked = sorted(counts, key=lambda worker: (-counts[worker], worker))
        candidates = sorted(ranked[: (len(ranked) + 1) // 2])
        if self.judge_workers > len(candidates):
            raise DataError(
                f"data.options.judge_workers is {self.judge_workers}, but only {len(candidates)} workers have"
                " enough pairs: use at most that many"
            )
        drawn = generator(seed, "judges").permutation(len(candidates))[: self.judge_workers]
        return {candidates[i] for i in drawn}

    def _validation_judges(self, data: DataConfig, comparisons: Sequence[Comparison]) -> list[Comparison]:
        """Comparisons of the validation part by workers who are not in the training part."""
        workers = {comparison.pair.client_id for comparison in comparisons}
        validation, _ = read_comparisons(self._raw(data, "comparisons_validation"))
        return [comparison for comparison in validation if comparison.pair.client_id not in workers]

    def _prompts(
        self, posts: RawSplit, test_posts: RawSplit, compared: frozenset[str], seed: int
    ) -> tuple[list[Prompt], list[Prompt], Counter[str]]:
        """The prompts to align on and to evaluate on, and the number of dropped posts by reason."""
        dropped: Counter[str] = Counter()
        test: list[Prompt] = []
        held_out: set[str] = set()
        for prompt, reference, names in _read_posts(test_posts):
            held_out |= names
            if names & compared:
                dropped["test post that is in a comparison"] += 1
            else:
                test.append(Prompt(prompt, [reference] if reference else [], "test"))
        align: list[Prompt] = []
        for prompt, reference, names in _read_posts(posts):
            if names & compared:
                dropped["post that is in a comparison"] += 1
            elif names & held_out:
                dropped["post that is in the test too"] += 1
            elif not position(seed, "align", prompt) < self.align_share:
                dropped["post reserved for supervised fine-tuning"] += 1
            else:
                align.append(Prompt(prompt, [reference] if reference else [], "align"))
        return align, test, dropped

    def _raw(self, data: DataConfig, part: str) -> RawSplit:
        """The rows of a part of the data."""
        compared = part.startswith("comparisons")
        if data.path is None:
            split = HUB_SPLITS[part]
            if compared:
                revision = data.revision or CONVERSION
                rows = from_hub(HUB, split=split, revision=revision, data_dir="comparisons")
                return RawSplit(rows, f"{HUB} (split {split})")
            rows = from_hub(os.fspath(self.posts), split=split, revision=self.posts_revision)
            return RawSplit(rows, f"{self.posts} (split {split})")
        folder = Path(data.path)
        if not folder.is_dir():
            raise DataError(
                f"{folder}: expected a folder with files comparisons, posts and posts_test"
                f" ({', '.join(SUFFIXES)})"
            )
        file = require_file(folder, part)
        return RawSplit(read_file(file, COLUMNS if compared else ()), str(file))


def _compared_posts(rows: Iterable[Mapping[str, Any]], judged: Iterable[Comparison]) -> frozenset[str]:
    """What identifies the posts of all comparisons, those included that make no pair."""
    names: set[str] = set()
    for row in rows:
        names |= _post_names(_post(row["info"]), row["info"])
    for comparison in judged:
        names |= comparison.post_names
    return frozenset(names)


def read_comparisons(raw: RawSplit) -> tuple[list[Comparison], dict[str, int]]:
    """Read comparisons: chosen is summaries[choice]; the margin is the stated confidence.

    Args:
        raw: rows of info {id, post, title, subreddit}, summaries [{text}, {text}], choice 0 or 1,
            worker, and extra {confidence} or none.

    Returns:
        the comparisons, and the number of dropped rows by reason: not a Reddit post, an empty
        summary, or two equal summaries.

    Raises:
        DataError: a column is missing or of the wrong type, choice is neither 0 nor 1, or a row has
            not two summaries.
    """
    comparisons: list[Comparison] = []
    dropped: Counter[str] = Counter()
    for number, row in enumerate(raw.rows, 1):
        _check(row, f"{raw.where}, row {number}")
        info, summaries, choice = row["info"], row["summaries"], row["choice"]
        chosen, rejected = ((summaries[i]["text"] or "").strip() for i in (choice, 1 - choice))
        if not info.get("post"):
            dropped["not a Reddit post"] += 1  # the validation part also holds news articles
        elif not chosen or not rejected:
            dropped["empty summary"] += 1
        elif chosen == rejected:
            dropped["both summaries the same"] += 1
        else:
            pair = Pair(
                _post(info),
                chosen,
                rejected,
                client_id=row["worker"],
                domain=f"r/{info['subreddit']}",
                margin=(row.get("extra") or {}).get("confidence"),
            )
            comparisons.append(Comparison(pair, _post_names(pair.prompt, info)))
    return comparisons, dict(dropped)


def _read_posts(raw: RawSplit) -> Iterable[tuple[str, str, frozenset[str]]]:
    """Prompt, human TL;DR and names of each post."""
    for number, row in enumerate(raw.rows, 1):
        prompt, reference = read_post(row, f"{raw.where}, row {number}")
        yield prompt, reference, _post_names(prompt, row)


def read_post(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Read the prompt and the human TL;DR of a post, in any of the public schemas.

    Raises:
        DataError: the columns are not known, or have values that are not text.
    """
    if all(column in row for column in POST_COLUMNS):
        check_text(row, POST_COLUMNS, where)
        empty = [column for column in ("subreddit", "post") if row[column] is None]
        if empty:
            raise DataError(f"{where}: column '{empty[0]}' is null, but text is needed")
        return _prompt(row["subreddit"], row["title"], row["post"]), (row["summary"] or "").strip()
    answer = next((column for column in ("completion", "label") if column in row), "")
    check_text(row, ("prompt", answer), where)
    match = POST.match(row.get("prompt") or "")
    if not answer or match is None:
        raise DataError(
            f"{where}: expected columns prompt ('SUBREDDIT: r/... TITLE: ... POST: ...') and completion or"
            f" label, or subreddit, title, post and summary; there are: {', '.join(map(str, row))}"
        )
    subreddit, title, post = match.groups()
    return _prompt(subreddit, title, post), (row[answer] or "").strip()


def _check(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row that is no comparison; that of a news article has no post, title and subreddit."""
    check_columns(row, COLUMNS, where)
    info = row["info"]
    if not isinstance(info, Mapping):
        raise DataError(
            f"{where}: column 'info' must be an object with post, title and subreddit, but is {info!r}"
        )
    _check_summaries(row, where)
    _check_extra(row, where)
    texts = {f"info.{column}": info.get(column) for column in ("post", "title", "subreddit")}
    texts |= {f"summaries[{i}].text": summary["text"] for i, summary in enumerate(row["summaries"])}
    texts["worker"] = row["worker"]
    check_text(texts, texts, where)
    if not (row["worker"] or "").strip():
        raise DataError(
            f"{where}: column 'worker' is empty, but each comparison needs the worker who made it"
        )
    if info.get("post") and ("title" not in info or info.get("subreddit") is None):
        missing = "a subreddit" if "title" in info else "a title"
        raise DataError(
            f"{where}: column 'info' has a post without {missing}; there are: {', '.join(map(str, info))}"
        )


def _check_summaries(row: Mapping[str, Any], where: str) -> None:
    summaries, choice = row["summaries"], row["choice"]
    if not isinstance(summaries, list) or not all(
        isinstance(summary, Mapping) and "text" in summary for summary in summaries
    ):
        raise DataError(
            f"{where}: column 'summaries' must be a list of two objects with a text, but is {summaries!r}"
        )
    if len(summaries) != 2 or type(choice) is not int or choice not in (0, 1):
        raise DataError(
            f"{where}: expected two summaries and a choice of 0 or 1, but there are {len(summaries)} and"
            f" choice is {choice!r}"
        )


def _check_extra(row: Mapping[str, Any], where: str) -> None:
    extra = row.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise DataError(f"{where}: column 'extra' must be an object or null, but is {extra!r}")
    confidence = {"extra.confidence": extra.get("confidence")}
    check_number(confidence, confidence, where)


def _prompt(subreddit: str, title: str | None, post: str) -> str:
    return f"SUBREDDIT: r/{subreddit}\nTITLE: {(title or '').strip()}\nPOST: {post.strip()}"


def _post(info: Mapping[str, Any]) -> str:
    return _prompt(info.get("subreddit") or "", info.get("title") or "", info.get("post") or "")


def _post_names(prompt: str, row: Mapping[str, Any]) -> frozenset[str]:
    """What identifies a post: its text, and its id if it has one.

    The text is in lower case without spacing and punctuation, in which copies of it differ.
    """
    text = re.sub(r"[\W_]+", "", prompt.partition("\nPOST: ")[2].lower())
    own_id = f"t3_{str(row['id']).removeprefix('t3_')}" if row.get("id") else ""
    return frozenset(name for name in (text, own_id) if name)
