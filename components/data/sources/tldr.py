"""Source `tldr`: OpenAI's human comparisons of TL;DR summaries (hub; Stiennon et al., 2020).

FedBiscuit section 6. A client is a worker: 53 of them made the 92,858 comparisons of the training
part (table 5). The server's prompts are posts of the TL;DR data that are in no comparison ("we
ensure a post does not appear in both datasets"): 60% of them are reserved for supervised
fine-tuning, 40% are used here (table 5: 42,782). The test split of the TL;DR posts (6,553) gives
the evaluation prompts; the human TL;DR is the human answer. A post is identified by its id where both
data sets have one, and by its text without case, spacing and punctuation.

The hub's comparisons are a loading script; its parquet conversion (revision refs/convert/parquet)
is read instead.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from components.config import DataConfig, NameOrFolder
from components.data.raw import (
    BareText,
    Identifier,
    Name,
    NeededText,
    RawRow,
    Text,
    collect,
    column_names,
    if_null,
    one_of,
)
from components.data.records import DataError, Pair, Prompt, SourceData
from components.data.rows import CONVERSION, RawRows, from_folder, from_hub
from components.data.same_text import same_text
from components.data.sources.source import Source
from components.data.splits import position
from components.seeding import generator

HUB = "openai/summarize_from_feedback"
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
PostId = Annotated[Identifier, if_null("")]


class PostRow(RawRow):
    """A post with its author's summary."""

    id: PostId = ""
    subreddit: NeededText
    title: Text
    post: NeededText
    summary: BareText

    @property
    def prompt(self) -> str:
        """The post as a prompt."""
        return f"SUBREDDIT: r/{self.subreddit}\nTITLE: {self.title.strip()}\nPOST: {self.post.strip()}"


class PostPromptRow(RawRow):
    """A post that is a prompt already, with its author's summary in either of two columns."""

    id: PostId = ""
    prompt: Text = ""
    completion: Text = ""
    label: Text = ""


class ComparedPost(RawRow):
    """The post of a comparison; a news article has none, and neither title nor subreddit."""

    id: PostId = ""
    post: Text = ""
    title: Text = ""
    subreddit: NeededText | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        for column, exists in (
            ("title", "title" in self.model_fields_set),
            ("subreddit", self.subreddit is not None),
        ):
            if self.post and not exists:
                raise ValueError(
                    f"has a post without a {column}; there are: {', '.join(sorted(self.model_fields_set))}"
                )
        return self


class SummaryRow(RawRow):
    """A summary in a comparison."""

    text: BareText


class Extra(RawRow):
    """The worker's confidence in a comparison."""

    confidence: float | None = None


class ComparisonRow(RawRow):
    """Two summaries of a post, and the worker's choice."""

    info: ComparedPost
    summaries: list[SummaryRow]
    choice: Annotated[int, one_of({0: "the first summary is better", 1: "the second"})]
    worker: Name
    extra: Extra | None = None

    @field_validator("summaries")
    @classmethod
    def _check_two(cls, summaries: list[SummaryRow]) -> list[SummaryRow]:
        if len(summaries) != 2:
            raise ValueError(f"must be a list of two summaries, but has {len(summaries)}")
        return summaries

    @property
    def post(self) -> PostRow:
        """The post; its texts are empty if it is a news article."""
        info = self.info
        return PostRow(
            id=info.id, subreddit=info.subreddit or "", title=info.title, post=info.post, summary=""
        )

    def pair(self) -> Pair | str:
        """The pair, with the confidence as margin, or the reason why there is none."""
        chosen, rejected = (self.summaries[i].text for i in (self.choice, 1 - self.choice))
        if not self.info.post:
            return "not a Reddit post"  # the validation part also holds news articles
        if not chosen or not rejected:
            return "empty summary"
        if chosen == rejected:
            return "both summaries the same"
        return Pair(
            self.post.prompt,
            chosen,
            rejected,
            client_id=self.worker,
            domain=f"r/{self.info.subreddit}",
            margin=self.extra.confidence if self.extra else None,
        )


class Tldr(Source):
    """Options of the source tldr."""

    not_judgements: ClassVar[str] = ""
    lends_verdicts: ClassVar[bool] = False

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
        """
        rows = list(ComparisonRow.read(*self._raw(data, "comparisons")))
        posts = self._raw(data, "posts")
        test_posts = self._raw(data, "posts_test")
        pairs, dropped = collect(rows, ComparisonRow.pair)
        counts = Counter(pair.client_id for pair in pairs)
        judges = self._draw_judges(counts, seed)
        other_rows: list[ComparisonRow] = []
        if not self.judge_workers:  # comparisons of the validation part that make a pair, by other workers
            others = ComparisonRow.read(*self._raw(data, "comparisons_validation"))
            other_rows = [row for row in others if row.worker not in counts and isinstance(row.pair(), Pair)]
        names = (_post_names(row.post.prompt, row.info.id) for row in (*rows, *other_rows))
        compared = frozenset(chain.from_iterable(names))
        align, test, left_out = self._prompts(posts, test_posts, compared, seed)
        judged, _ = collect(other_rows, ComparisonRow.pair)
        judged += [pair for pair in pairs if pair.client_id in judges]
        return SourceData(
            [pair for pair in pairs if pair.client_id not in judges],
            [*align, *test],
            judged,
            dropped=dict(dropped + left_out),
        )

    def _draw_judges(self, counts: Mapping[str, int], seed: int) -> set[str]:
        ranked = sorted(counts, key=lambda worker: (-counts[worker], worker))
        candidates = sorted(ranked[: (len(ranked) + 1) // 2])
        if self.judge_workers > len(candidates):
            raise DataError(
                f"data.options.judge_workers is {self.judge_workers}, but only {len(candidates)} workers have"
                " enough pairs: use at most that many"
            )
        drawn = generator(seed, "judges").permutation(len(candidates))[: self.judge_workers]
        return {candidates[i] for i in drawn}

    def _prompts(
        self, posts: RawRows, test_posts: RawRows, compared: frozenset[str], seed: int
    ) -> tuple[list[Prompt], list[Prompt], Counter[str]]:
        """The prompts to align on and to evaluate on, and the number of dropped posts by reason."""
        dropped: Counter[str] = Counter()
        test: list[Prompt] = []
        held_out: set[str] = set()
        for prompt, human_summary, names in _read_posts(test_posts):
            held_out |= names
            if names & compared:
                dropped["test post that is in a comparison"] += 1
            else:
                test.append(Prompt(prompt, [human_summary] if human_summary else [], "test"))
        align: list[Prompt] = []
        for prompt, human_summary, names in _read_posts(posts):
            if names & compared:
                dropped["post that is in a comparison"] += 1
            elif names & held_out:
                dropped["post that is in the test too"] += 1
            elif not position(seed, "align", prompt) < self.align_share:
                dropped["post reserved for supervised fine-tuning"] += 1
            else:
                align.append(Prompt(prompt, [human_summary] if human_summary else [], "align"))
        return align, test, dropped

    def _raw(self, data: DataConfig, part: str) -> RawRows:
        """The rows of a part of the data."""
        if data.path is None:
            split = HUB_SPLITS[part]
            if part.startswith("comparisons"):
                revision = data.revision or CONVERSION
                return from_hub(HUB, split=split, revision=revision, data_dir="comparisons")
            return from_hub(os.fspath(self.posts), split=split, revision=self.posts_revision)
        return from_folder(Path(data.path), part, ("comparisons", "posts", "posts_test"))


def _read_posts(raw: RawRows) -> Iterable[tuple[str, str, frozenset[str]]]:
    """Prompt, human TL;DR and names of each post."""
    rows, where = raw
    for number, row in enumerate(rows, 1):
        post = read_post(row, f"{where}, row {number}")
        yield post.prompt, post.summary, _post_names(post.prompt, post.id)


def read_post(row: Mapping[str, Any], where: str) -> PostRow:
    """Read a post in any of the public schemas."""
    if all(column in row for column in POST_COLUMNS):
        return PostRow.read_one(row, where)
    shown = PostPromptRow.read_one(row, where)
    match = POST.match(shown.prompt)
    if match is None or not shown.model_fields_set & {"completion", "label"}:
        raise DataError(
            f"{where}: expected columns prompt ('SUBREDDIT: r/... TITLE: ... POST: ...') and completion or"
            f" label, or subreddit, title, post and summary; there are: {column_names(row)}"
        )
    texts = dict(zip(("subreddit", "title", "post"), match.groups(), strict=True))
    has_completion = "completion" in shown.model_fields_set
    return PostRow(id=shown.id, summary=shown.completion if has_completion else shown.label, **texts)


def _post_names(prompt: str, own_id: str) -> frozenset[str]:
    """What identifies a post: its text, and its id if it has one.

    The text is without case, spacing and punctuation, in which copies of it differ.
    """
    text = re.sub(r"[\W_]+", "", same_text(prompt.partition("\nPOST: ")[2]))
    names = (text, f"t3_{own_id.removeprefix('t3_')}" if own_id else "")
    return frozenset(name for name in names if name)
