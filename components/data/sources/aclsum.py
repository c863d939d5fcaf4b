"""Source `aclsum`: synthetic annotators over expert summaries of papers (PyPI package aclsum, MIT).

ACLSum gives each paper three human-written summaries: of its challenge, its approach and its
outcome. A synthetic annotator is interested in one of these aspects. It judges four pairs of each
paper, half by a taste that all annotators share and half by its own:

    common   a whole summary against the same one truncated, or (approach and outcome) against the
             paper's first sentence
    own      its aspect's summary against each of the two other aspects' of the same paper

Papers are split first, so that no paper that is trained on is ever used to measure, and the judge's
annotators and papers are separate from the federation's. As with the workers of TL;DR, several
annotators may judge one paper.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from components.config import DataConfig
from components.data.records import DataError, Pair, Prompt, SourceData
from components.data.sources.detokenize import detokenize, is_sentence
from components.data.sources.source import Source
from components.seeding import generator

ASPECTS = ("challenge", "approach", "outcome")
BEYOND_THE_LEAD = ("approach", "outcome")
"""Aspects whose summary is preferred over the first sentence, which mostly states the challenge."""
ANNOTATORS = 12
PAPER_SHARES = (
    ("papers_per_annotator", "train_papers"),
    ("validation_papers_per_annotator", "validation_papers"),
    ("test_papers_per_annotator", "test_papers"),
    ("evaluation_prompts", "test_papers"),
)
"""Options that draw papers without replacement, and the options that say from how many."""


@dataclass(frozen=True)
class Paper:
    """A paper."""

    id: str  # in the data set
    prompt: str  # what is summarized, see show
    lead: str  # first sentence of the abstract
    summaries: Mapping[str, str]  # by aspect


@dataclass(frozen=True)
class Annotator:
    """A synthetic annotator."""

    name: str  # client id
    aspect: str  # what it is interested in
    lead_share: float  # see AclSum


class AclSum(Source):
    """Options of the source aclsum; papers of the sets sum to at most 250."""

    is_local: ClassVar[bool] = True
    not_judgements: ClassVar[str] = ""
    lends_verdicts: ClassVar[bool] = False

    judge_annotators: int = Field(
        6,
        ge=0,
        description=(
            "Annotators that train the judge and never take part in the federation; each judges all judge"
            " papers."
        ),
    )
    papers_per_annotator: int = Field(
        16, ge=1, description="Training papers a federated annotator judges; four pairs each."
    )
    validation_papers_per_annotator: int = Field(
        2, ge=0, description="Validation papers a federated annotator judges; four pairs each."
    )
    test_papers_per_annotator: int = Field(
        5, ge=1, description="Held-out papers a federated annotator judges; four pairs each."
    )
    train_papers: int = Field(90, ge=1, description="Papers that annotators draw their training papers from.")
    validation_papers: int = Field(
        10, ge=0, description="Papers that annotators draw their validation papers from."
    )
    test_papers: int = Field(
        45,
        ge=1,
        description="Papers that annotators draw their held-out papers from, and evaluation prompts.",
    )
    align_prompts: int = Field(60, ge=0, description="Papers that serve as the server's unlabeled prompts.")
    judge_papers: int = Field(45, ge=0, description="Papers of the judge, four fifths of them to train on.")
    judge_own_taste: bool = Field(
        True,
        description=(
            "Whether the judge's annotators also judge by their own tastes, which contradict each other;"
            " false: by the common taste alone."
        ),
    )
    evaluation_prompts: int = Field(
        40, ge=1, description="Held-out papers that policies are asked to summarize."
    )
    abstract_words: int | None = Field(
        None, ge=0, description="First words of the abstract that a prompt shows; None shows all of it."
    )
    request: str = Field(
        "",
        description="Instruction before each paper, where the policy's template has none.",
    )
    lead_share: float = Field(
        0.25,
        ge=0,
        le=0.5,
        description=(
            "Share of the common-taste pairs in which the paper's first sentence is rejected; in the others"
            " it is a truncated summary."
        ),
    )

    @model_validator(mode="after")
    def _check_papers(self) -> Self:
        for share, whole in PAPER_SHARES:
            if getattr(self, share) > getattr(self, whole):
                raise ValueError(
                    f"each of {share} needs a paper of its own: it is {getattr(self, share)}, but {whole} is"
                    f" only {getattr(self, whole)}"
                )
        return self

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Make the annotators' pairs, the judge's pairs and the server's prompts.

        With the natural partition data.clients annotators take part (default, and with other
        partitions: 12); annotator i is interested in aspect i modulo 3.
        """
        sets = self._paper_sets(read_papers(self.request, self.abstract_words), seed)
        count = data.clients if data.partition == "natural" and data.clients else ANNOTATORS
        annotators = self._annotators("annotator", count)
        pairs: list[Pair] = []
        for annotator in annotators:
            pairs += self._annotator_pairs(annotator, sets, seed)
        judged: list[Pair] = []
        for annotator in self._annotators("judge", self.judge_annotators):
            judged += _judge_pairs(annotator, sets["judge"], seed, self.judge_own_taste)
        true_clusters = {annotator.name: annotator.aspect for annotator in annotators}
        return SourceData(pairs, self._prompts(sets, seed), judged, true_clusters)

    def _paper_sets(self, papers: Sequence[Paper], seed: int) -> dict[str, list[Paper]]:
        sizes = {
            "train": self.train_papers,
            "validation": self.validation_papers,
            "test": self.test_papers,
            "align": self.align_prompts,
            "judge": self.judge_papers,
        }
        if sum(sizes.values()) > len(papers):
            raise DataError(
                f"data.options asks for {sum(sizes.values())} papers"
                f" ({', '.join(f'{name} {size}' for name, size in sizes.items())}), but aclsum has"
                f" {len(papers)}: make one of the sets smaller"
            )
        order = generator(seed, "aclsum", "papers").permutation(len(papers))
        sets: dict[str, list[Paper]] = {}
        start = 0
        for name, size in sizes.items():
            sets[name] = [papers[i] for i in order[start : start + size]]
            start += size
        return sets

    def _annotators(self, kind: str, count: int) -> list[Annotator]:
        width = max(2, len(str(count - 1)))
        return [
            Annotator(f"{kind}-{i:0{width}d}", ASPECTS[i % len(ASPECTS)], self.lead_share)
            for i in range(count)
        ]

    def _annotator_pairs(
        self, annotator: Annotator, sets: Mapping[str, Sequence[Paper]], seed: int
    ) -> Iterator[Pair]:
        counts = {
            "train": self.papers_per_annotator,
            "validation": self.validation_papers_per_annotator,
            "test": self.test_papers_per_annotator,
        }
        for split, count in counts.items():
            if not count:
                continue
            draw = generator(seed, "aclsum", "drawn", annotator.name, split)
            for i in sorted(draw.choice(len(sets[split]), count, replace=False)):
                yield from judge_paper(sets[split][i], annotator, split, seed)

    def _prompts(self, sets: Mapping[str, Sequence[Paper]], seed: int) -> list[Prompt]:
        papers = {"align": sets["align"], "test": sets["test"][: self.evaluation_prompts]}
        rows: list[Prompt] = []
        for split, members in papers.items():
            for paper in members:
                first = int(generator(seed, "aclsum", "reference", paper.id).integers(len(ASPECTS)))
                order = (*ASPECTS[first:], *ASPECTS[:first])
                rows.append(Prompt(paper.prompt, [paper.summaries[aspect] for aspect in order], split))
        return rows


def _judge_pairs(annotator: Annotator, papers: Sequence[Paper], seed: int, own_taste: bool) -> Iterator[Pair]:
    """The pairs of one of the judge's annotators, with four fifths of the papers to train on."""
    train = len(papers) * 4 // 5
    for i, paper in enumerate(papers):
        for pair in judge_paper(paper, annotator, "train" if i < train else "test", seed):
            if own_taste or pair.domain == "common":
                yield pair


def read_papers(request: str = "", abstract_words: int | None = None) -> list[Paper]:
    """Read the papers in the order of their files, with all text detokenized.

    Papers without an abstract, or with two equal texts, are left out.

    Args:
        request: see AclSum.
        abstract_words: see AclSum.
    """
    spec = importlib.util.find_spec("aclsum")  # does not import the package and its dependencies
    if spec is None or spec.origin is None:
        raise DataError(
            "the data source aclsum needs the package aclsum: make install, or pip install -e '.[demo]' in a"
            " checkout"
        )
    folder = Path(spec.origin).parent / "dataset"
    papers: list[Paper] = []
    for name in ("train", "val", "test"):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            abstract = [detokenize(text) for text in raw["sentences"]["abstract"] if is_sentence(text)]
            title = detokenize(raw["title"]).rstrip(" *†")
            summaries = {aspect: detokenize(raw["summary"][aspect]) for aspect in ASPECTS}
            if abstract and len({*summaries.values(), abstract[0]}) == len(ASPECTS) + 1:
                prompt = show(title, " ".join(abstract), request, abstract_words)
                papers.append(Paper(raw["id"], prompt, abstract[0], summaries))
    return papers


def show(title: str, abstract: str, request: str = "", abstract_words: int | None = None) -> str:
    """A paper as a prompt, see AclSum."""
    words = abstract.split()
    if abstract_words is not None and abstract_words < len(words):
        abstract = " ".join(words[:abstract_words]) + " ..."
    lines = [f"TITLE: {title}", *([f"ABSTRACT: {abstract}"] if abstract_words != 0 else [])]
    return "\n\n".join(part for part in (request.strip(), "\n".join(lines)) if part)


def judge_paper(paper: Paper, annotator: Annotator, split: str, seed: int) -> Iterator[Pair]:
    """Make the four pairs of one annotator on one paper: two of common taste, two of its own."""
    summaries = paper.summaries
    draw = generator(seed, "aclsum", "judgement", annotator.name, paper.id)
    first, second = (summaries[ASPECTS[i]] for i in draw.permutation(len(ASPECTS))[:2])
    judgements = [("common", first, truncate(first, draw.uniform(0.4, 0.7)))]
    if draw.random() < 2 * annotator.lead_share:
        aspect = BEYOND_THE_LEAD[draw.integers(len(BEYOND_THE_LEAD))]
        judgements.append(("common", summaries[aspect], paper.lead))
    else:
        judgements.append(("common", second, truncate(second, draw.uniform(0.4, 0.7))))
    own = summaries[annotator.aspect]
    judgements += [("own", own, summaries[other]) for other in ASPECTS if other != annotator.aspect]
    for domain, chosen, rejected in judgements:
        yield Pair(paper.prompt, chosen, rejected, client_id=annotator.name, domain=domain, split=split)


def truncate(text: str, share: float) -> str:
    """The first words of a text, about that share of them, with the text's own final mark.

    Without the mark, an untrained model already detects almost all truncated texts by its absence
    (measured: 0.98 of the test pairs, by the first 4 layers of the embedded backbone).
    """
    words = text.split()
    mark = text[-1] if text[-1] in ".!?" else ""
    return " ".join(words[: max(1, round(share * len(words)))]).rstrip(" .,;:!?-–(") + mark
