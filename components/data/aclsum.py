"""Source `aclsum`: annotators with tastes over the expert summaries of 250 papers (embedded, PyPI package aclsum, MIT).

ACLSum gives each paper three human-written summaries: of its challenge, its approach and its outcome. A synthetic
annotator is interested in one of these aspects. For each paper it judges four pairs, half by a taste that all
annotators share and half by its own:

    common   a whole summary against the same one cut short, or (approach and outcome) against the paper's first sentence
    own      its aspect's summary against each of the two other aspects' of the same paper

Papers are split first, so that no paper that is trained on is ever used to measure, and the judge's annotators and
papers are apart from the federation's. As with the workers of TL;DR, several annotators may judge one paper.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from components.config import DataConfig, Section
from components.data.detokenize import detokenize, is_sentence
from components.data.records import DataError, SourceData
from components.data.registry import pairs_dataset, prompts_dataset, source
from components.seeding import generator

ASPECTS = ("challenge", "approach", "outcome")
BEYOND_THE_LEAD = ("approach", "outcome")
"""Aspects whose summary is preferred over a paper's first sentence; that sentence mostly states the challenge itself."""
ANNOTATORS = 12


class AclsumOptions(Section):
    """Options of the source aclsum; papers of the sets sum to at most 250."""

    judge_annotators: int = Field(6, ge=0, description="Annotators that train the judge and never take part in the federation; each judges all judge papers.")
    papers_per_annotator: int = Field(16, ge=1, description="Training papers a federated annotator judges; four pairs each.")
    validation_papers_per_annotator: int = Field(2, ge=0, description="Validation papers a federated annotator judges; four pairs each.")
    test_papers_per_annotator: int = Field(5, ge=1, description="Held-out papers a federated annotator judges; four pairs each.")
    train_papers: int = Field(90, ge=1, description="Papers that annotators draw their training papers from.")
    validation_papers: int = Field(10, ge=0, description="Papers that annotators draw their validation papers from.")
    test_papers: int = Field(45, ge=1, description="Papers that annotators draw their held-out papers from, and evaluation prompts.")
    align_prompts: int = Field(60, ge=0, description="Papers that serve as the server's unlabelled prompts.")
    judge_papers: int = Field(45, ge=0, description="Papers of the judge, four fifths of them to train on.")
    evaluation_prompts: int = Field(40, ge=1, description="Held-out papers that policies are asked to summarise.")
    abstract_words: int | None = Field(None, ge=0, description="First words of the abstract that a prompt shows; None shows all of it.")
    request: str = Field("", description="What is asked for, put before each paper where the policy's template does not say it.")
    lead_share: float = Field(0.25, ge=0, le=0.5, description="Share of the common-taste pairs in which the paper's first sentence is rejected; in the others it is a summary cut short.")

    @model_validator(mode="after")
    def _fits(self) -> AclsumOptions:
        for share, whole in (("papers_per_annotator", "train_papers"), ("validation_papers_per_annotator", "validation_papers"),
                             ("test_papers_per_annotator", "test_papers"), ("evaluation_prompts", "test_papers")):
            if getattr(self, share) > getattr(self, whole):
                raise ValueError(f"each of {share} needs a paper of its own: it is {getattr(self, share)}, but {whole} is only {getattr(self, whole)}")
        return self


@source("aclsum", AclsumOptions)
def load(data: DataConfig, options: AclsumOptions, seed: int) -> SourceData:
    """Annotators' pairs, the server's prompts and the judge's pairs.

    With the natural partition data.clients annotators take part (default, and with another partition: 12); annotator i
    is interested in aspect i modulo 3.

    Raises:
        DataError: the package is missing, or the sets ask for more papers than there are.
    """
    papers = read_papers(options.request, options.abstract_words)
    order = generator(seed, "aclsum", "papers").permutation(len(papers))
    sizes = {"train": options.train_papers, "validation": options.validation_papers, "test": options.test_papers,
             "align": options.align_prompts, "judge": options.judge_papers}
    if sum(sizes.values()) > len(papers):
        raise DataError(f"data.options asks for {sum(sizes.values())} papers ({', '.join(f'{k} {v}' for k, v in sizes.items())}), "
                        f"but aclsum has {len(papers)}: make one of the sets smaller")
    sets, start = {}, 0
    for name, size in sizes.items():
        sets[name] = [papers[i] for i in order[start:start + size]]
        start += size

    own = {"train": options.papers_per_annotator, "validation": options.validation_papers_per_annotator, "test": options.test_papers_per_annotator}
    pairs, groups = [], {}
    annotators = data.clients if data.partition == "natural" and data.clients else ANNOTATORS
    for i, client in enumerate(_names("annotator", annotators)):
        groups[client] = ASPECTS[i % len(ASPECTS)]
        for split, count in own.items():
            drawn = generator(seed, "aclsum", "drawn", client, split).choice(len(sets[split]), count, replace=False) if count else []
            pairs += [row | {"client_id": client, "split": split} for p in sorted(drawn) for row in judge_paper(sets[split][p], client, groups[client], options.lead_share, seed)]
    judged = []
    cut = len(sets["judge"]) * 4 // 5
    for i, judge in enumerate(_names("judge", options.judge_annotators)):
        for p, paper in enumerate(sets["judge"]):
            rows = judge_paper(paper, judge, ASPECTS[i % len(ASPECTS)], options.lead_share, seed)
            judged += [row | {"client_id": judge, "split": "train" if p < cut else "test"} for row in rows]
    asked = [(p, "align") for p in sets["align"]] + [(p, "test") for p in sets["test"][:options.evaluation_prompts]]
    prompts = [(paper["prompt"], _references(paper, seed), split) for paper, split in asked]
    return SourceData(pairs_dataset(pairs, "aclsum"), prompts_dataset(prompts, "aclsum"), pairs_dataset(judged, "aclsum"), groups)


def read_papers(request: str = "", abstract_words: int | None = None) -> list[dict[str, Any]]:
    """The papers in their files' order: id, prompt (see show), lead (first sentence of the abstract) and the three summaries.

    All text is detokenised. Papers without an abstract, and such as have two equal texts, are left out.

    Raises:
        DataError: the package aclsum is not installed.
    """
    spec = importlib.util.find_spec("aclsum")       # finding it does not import it (and what it imports)
    if spec is None or spec.origin is None:
        raise DataError("the data source aclsum needs the package aclsum: pip install 'fed-rlhf[demo]', or make install")
    papers = []
    for name in ("train", "val", "test"):
        for line in (Path(spec.origin).parent / "dataset" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            abstract = [detokenize(s) for s in raw["sentences"]["abstract"] if is_sentence(s)]
            title = detokenize(raw["title"]).rstrip(" *†")
            paper = {aspect: detokenize(raw["summary"][aspect]) for aspect in ASPECTS}
            if abstract and len({*paper.values(), abstract[0]}) == len(ASPECTS) + 1:
                papers.append(paper | {"id": raw["id"], "lead": abstract[0], "prompt": show(title, " ".join(abstract), request, abstract_words)})
    return papers


def show(title: str, abstract: str, request: str = "", abstract_words: int | None = None) -> str:
    """A paper as a prompt, see AclsumOptions."""
    words = abstract.split()
    if abstract_words is not None and abstract_words < len(words):
        abstract = " ".join(words[:abstract_words]) + " ..."
    lines = [f"TITLE: {title}", *([f"ABSTRACT: {abstract}"] if abstract_words != 0 else [])]
    return "\n\n".join(part for part in (request.strip(), "\n".join(lines)) if part)


def judge_paper(paper: dict[str, Any], annotator: str, aspect: str, lead_share: float, seed: int) -> Iterator[dict[str, Any]]:
    """The four pairs of one annotator on one paper: two of common taste, two of its own."""
    draw = generator(seed, "aclsum", "judgement", annotator, paper["id"])
    first, second = (paper[ASPECTS[i]] for i in draw.permutation(len(ASPECTS))[:2])
    taste = [("common", first, cut_short(first, draw.uniform(0.4, 0.7)))]
    if draw.random() < 2 * lead_share:
        taste.append(("common", paper[BEYOND_THE_LEAD[draw.integers(len(BEYOND_THE_LEAD))]], paper["lead"]))
    else:
        taste.append(("common", second, cut_short(second, draw.uniform(0.4, 0.7))))
    taste += [("own", paper[aspect], paper[a]) for a in ASPECTS if a != aspect]
    for domain, chosen, rejected in taste:
        yield {"prompt": paper["prompt"], "chosen": chosen, "rejected": rejected, "domain": domain}


def cut_short(text: str, share: float) -> str:
    """The first words of a text, about that share of them, ending with the text's own final mark.

    Without the mark, an untrained model already tells almost all cut texts by its absence (measured: 0.98 of the
    test pairs, by the first 4 layers of the embedded backbone).
    """
    words = text.split()
    mark = text[-1] if text[-1] in ".!?" else ""
    return " ".join(words[:max(1, round(share * len(words)))]).rstrip(" .,;:!?-–(") + mark


def _references(paper: dict[str, Any], seed: int) -> list[str]:
    first = int(generator(seed, "aclsum", "reference", paper["id"]).integers(len(ASPECTS)))
    return [paper[ASPECTS[(first + k) % len(ASPECTS)]] for k in range(len(ASPECTS))]


def _names(kind: str, count: int) -> list[str]:
    width = max(2, len(str(count - 1)))
    return [f"{kind}-{i:0{width}d}" for i in range(count)]
