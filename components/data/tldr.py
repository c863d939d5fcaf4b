"""Source `tldr`: OpenAI's human comparisons of TL;DR summaries (hub; Stiennon et al., 2020; FedBiscuit section 6).

A client is a worker: 53 of them made the 92,858 comparisons of the training part (table 5). The server's prompts are
posts of the TL;DR data that are in no comparison ("we ensure a post does not appear in both datasets"): 60% of them are
reserved for supervised fine-tuning, 40% are used here (table 5: 42,782). The test split of the TL;DR posts (6,553) gives
the evaluation prompts; the human TL;DR is the reference. A post is known by its id where both data sets give one, and by
its text without case, spacing and punctuation.

The hub's comparisons are a loading script; its parquet conversion (revision refs/convert/parquet) is read instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.records import DataError, SourceData
from components.data.registry import CountedSourceData, pairs_dataset, prompts_dataset, source
from components.data.rows import SUFFIXES, check_number, check_text, find_file, from_hub, read_file
from components.data.splits import position
from components.seeding import generator

HUB = "openai/summarize_from_feedback"
CONVERSION = "refs/convert/parquet"
COLUMNS = ("info", "summaries", "choice", "worker")
POST_COLUMNS = ("subreddit", "title", "post", "summary")
LEFT_OUT = {"align": "post", "test": "test post"}


class TldrOptions(Section):
    """Options of the source tldr."""

    posts: str = Field("trl-lib/tldr", description="Hub data set of the TL;DR posts with columns prompt and completion (or label), or title, post, subreddit, summary.")
    posts_revision: str | None = Field(None, description="Hub revision of the posts.")
    align_share: float = Field(0.4, gt=0, le=1, description="Share of the posts that are the server's prompts; FedBiscuit section 6: 0.4, the rest is reserved for SFT.")
    judge_workers: int = Field(3, ge=0, description="Workers set apart to train the judge, drawn from those with at least the median number of pairs; "
                               "0 sets none apart and takes the comparisons' validation part, from workers who are not in the training part.")


@source("tldr", TldrOptions)
def load(data: DataConfig, options: TldrOptions, seed: int) -> SourceData:
    """Comparisons of the training part by worker, and the server's prompts.

    data.path names a folder with files comparisons, posts, posts_test, and comparisons_validation where judge_workers
    is 0 (.jsonl, .jsonl.gz or .parquet), of the hub sets' schemas, read in place of the hub.

    Raises:
        DataError: the data cannot be read, lack a column, or hold something else in it.
    """
    (comparisons, origin), posts, test = (_raw(data, options, part) for part in ("comparisons", "posts", "posts_test"))
    pairs, counts_dropped = read_comparisons(comparisons, origin)
    dropped = Counter(counts_dropped)

    counts = Counter(r["client_id"] for r in pairs)
    ranked = sorted(counts, key=lambda w: (-counts[w], w))
    candidates = sorted(ranked[:(len(ranked) + 1) // 2])
    if options.judge_workers > len(candidates):
        raise DataError(f"data.options.judge_workers is {options.judge_workers}, but only {len(candidates)} workers have enough pairs: use at most that many")
    elsewhere: list[dict[str, Any]] = []
    if options.judge_workers == 0:
        validation, _ = read_comparisons(*_raw(data, options, "comparisons_validation"))
        elsewhere = [r for r in validation if r["client_id"] not in counts]
    judges = {candidates[i] for i in generator(seed, "judges").permutation(len(candidates))[:options.judge_workers]}

    compared = {name for row in comparisons for name in _names(_post(row["info"]), row["info"])}     # also of comparisons that make no pair
    compared |= {name for pair in elsewhere for name in pair["names"]}
    held_out: set[str] = set()
    prompts = {"test": [], "align": []}
    for (rows, where), split in ((test, "test"), (posts, "align")):
        for number, row in enumerate(rows, 1):
            prompt, reference = read_post(row, f"{where}, row {number}")
            names = _names(prompt, row)
            if names & compared:
                dropped[f"{LEFT_OUT[split]} that is in a comparison"] += 1
            elif split == "align" and names & held_out:
                dropped["post that is in the test too"] += 1
            elif split == "align" and not position(seed, "align", prompt) < options.align_share:
                dropped["post reserved for supervised fine-tuning"] += 1
            else:
                prompts[split].append((prompt, [reference] if reference else [], split))
            if split == "test":
                held_out |= names
    return CountedSourceData(
        pairs_dataset((r for r in pairs if r["client_id"] not in judges), "tldr"), prompts_dataset([*prompts["align"], *prompts["test"]], "tldr"),
        pairs_dataset([*elsewhere, *(r for r in pairs if r["client_id"] in judges)], "tldr"), dropped=dict(dropped))


def read_comparisons(rows: Iterable[Mapping[str, Any]], where: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Pairs from comparisons: chosen is summaries[choice], the other is rejected; margin is the stated confidence.

    Args:
        rows: info {id, post, title, subreddit}, summaries [{text}, {text}], choice 0 or 1, worker, extra {confidence} or none.
        where: what the rows come from, for errors.

    Returns:
        Pairs with names (what the post is known by), and how many rows were dropped, by reason: not a Reddit post, an
        empty summary, or both the same.

    Raises:
        DataError: a column is missing or of the wrong type, choice is neither 0 nor 1, or there are not two summaries.
    """
    pairs, dropped = [], Counter()
    for number, row in enumerate(rows, 1):
        _check(row, f"{where}, row {number}")
        info, summaries, choice = row["info"], row["summaries"], row["choice"]
        chosen, rejected = ((summaries[i]["text"] or "").strip() for i in (choice, 1 - choice))
        if not info.get("post"):
            dropped["not a Reddit post"] += 1       # the validation part also holds news articles
        elif not chosen or not rejected:
            dropped["empty summary"] += 1
        elif chosen == rejected:
            dropped["both summaries the same"] += 1
        else:
            pairs.append({
                "prompt": _post(info), "chosen": chosen, "rejected": rejected, "client_id": row["worker"],
                "names": _names(_post(info), info), "domain": f"r/{info['subreddit']}", "margin": (row.get("extra") or {}).get("confidence")})
    return pairs, dict(dropped)


def read_post(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The prompt and the human TL;DR of a post, from any of the public schemas.

    Raises:
        DataError: the columns are not known, or hold something else than text.
    """
    if all(c in row for c in POST_COLUMNS):
        check_text(row, POST_COLUMNS, where)
        empty = [c for c in ("subreddit", "post") if row[c] is None]
        if empty:
            raise DataError(f"{where}: column '{empty[0]}' is null, but text is needed")
        return _prompt(row["subreddit"], row["title"], row["post"]), (row["summary"] or "").strip()
    answer = next((c for c in ("completion", "label") if c in row), "")
    check_text(row, ("prompt", answer), where)
    found = re.match(r"SUBREDDIT: r/(.*?)\s*\nTITLE: (.*?)\s*\nPOST: (.*?)\s*(?:TL;DR:\s*)?$", row.get("prompt") or "", re.DOTALL)
    if not answer or found is None:
        raise DataError(f"{where}: expected columns prompt ('SUBREDDIT: r/... TITLE: ... POST: ...') and completion or label, "
                        f"or subreddit, title, post and summary; there are: {', '.join(map(str, row))}")
    return _prompt(*found.groups()), (row[answer] or "").strip()


def _check(row: Mapping[str, Any], where: str) -> None:
    """Refuse a comparison that is not what read_comparisons takes; a news article has neither post nor title nor subreddit."""
    missing = [c for c in COLUMNS if c not in row]
    if missing:
        raise DataError(f"{where}: column {', '.join(map(repr, missing))} is missing; there are: {', '.join(map(str, row)) or 'none'}")
    info, summaries, choice, extra = row["info"], row["summaries"], row["choice"], row.get("extra") or {}
    if not isinstance(info, Mapping):
        raise DataError(f"{where}: column 'info' must be an object with post, title and subreddit, but is {info!r}")
    if not isinstance(summaries, list) or not all(isinstance(s, Mapping) and "text" in s for s in summaries):
        raise DataError(f"{where}: column 'summaries' must be a list of two objects with a text, but is {summaries!r}")
    if len(summaries) != 2 or type(choice) is not int or choice not in (0, 1):
        raise DataError(f"{where}: expected two summaries and a choice of 0 or 1, but there are {len(summaries)} and choice is {choice!r}")
    if not isinstance(extra, Mapping):
        raise DataError(f"{where}: column 'extra' must be an object or null, but is {extra!r}")
    texts = {f"info.{c}": info.get(c) for c in ("post", "title", "subreddit")} | {f"summaries[{i}].text": s["text"] for i, s in enumerate(summaries)} | {"worker": row["worker"]}
    check_text(texts, texts, where)
    confidence = {"extra.confidence": extra.get("confidence")}
    check_number(confidence, confidence, where)
    if not (row["worker"] or "").strip():
        raise DataError(f"{where}: column 'worker' is empty, but each comparison needs the worker who made it")
    if info.get("post") and ("title" not in info or info.get("subreddit") is None):
        raise DataError(f"{where}: column 'info' has a post without {'a title' if 'title' not in info else 'a subreddit'}; there are: {', '.join(map(str, info))}")


def _prompt(subreddit: str, title: str, post: str) -> str:
    return f"SUBREDDIT: r/{subreddit}\nTITLE: {(title or '').strip()}\nPOST: {post.strip()}"


def _post(info: Mapping[str, Any]) -> str:
    return _prompt(info.get("subreddit") or "", info.get("title") or "", info.get("post") or "")


def _names(prompt: str, row: Mapping[str, Any]) -> set[str]:
    """What a post is known by: its text in lower case, without spacing and punctuation (copies in the two data sets differ in these), and its id, if any."""
    text = re.sub(r"[\W_]+", "", prompt.partition("\nPOST: ")[2].lower())
    return {name for name in (text, f"t3_{str(row['id']).removeprefix('t3_')}" if row.get("id") else "") if name}


def _raw(data: DataConfig, options: TldrOptions, part: str) -> tuple[Iterable[Mapping[str, Any]], str]:
    """The rows of a part, and what they come from, for errors."""
    compared = part.startswith("comparisons")
    if data.path is None:
        split = {"comparisons": "train", "comparisons_validation": "validation", "posts": "train", "posts_test": "test"}[part]
        if compared:
            return from_hub(HUB, "comparisons", split=split, revision=data.revision or CONVERSION), f"{HUB} (split {split})"
        return from_hub(options.posts, split=split, revision=options.posts_revision), f"{options.posts} (split {split})"
    folder = Path(data.path)
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder with files comparisons, posts and posts_test ({', '.join(SUFFIXES)})")
    file = find_file(folder, part)
    if file is None:
        raise DataError(f"{folder}: the file {part} ({', '.join(SUFFIXES)}) is missing in this folder")
    return read_file(file, COLUMNS if compared else ()), str(file)
