"""Pairs that the policy itself has sampled, labeled by a gold rule: `python -m perf gold-pairs FILE`.

In the literature on gold reward models (Gao et al. 2023, section 2) a known reward labels pairs of
the policy's own samples, a proxy is trained on them, and a policy that is optimized for the proxy is
scored by the gold reward. Here the gold reward of an annotator is ROUGE-L (F1) against the expert
summary of the aspect that it is interested in; other annotators, other aspects. The file is read by
`data.source: jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import Recipe, RecipeError
from components.data.sources.aclsum import ASPECTS, AclSum, Paper, read_papers
from components.io import read_json, write_atomically
from components.seeding import derive, generator
from perf.harness import prepare_process

if TYPE_CHECKING:
    from components.models.policy import Policy

ANNOTATORS = 15
SOURCE = "aclsum"


@dataclass(frozen=True)
class GoldSettings:
    """How pairs are made."""

    papers: int = 80  # that each annotator judges, drawn for each
    completions: int = 4  # sampled per paper; their disjoint pairs are judged
    temperature: float = 0.7
    seed: int = 0  # determines samples and draws


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L F1 of a text, with stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"], use_stemmer=True).score(reference, text)["rougeL"].fmeasure)


def make_pairs(
    papers: Sequence[Paper],
    completions: Mapping[str, Sequence[str]],
    settings: GoldSettings,
    annotators: int = ANNOTATORS,
) -> Iterator[dict[str, str]]:
    """The pairs of all annotators, as rows of the source jsonl.

    Annotator i is interested in aspect i modulo 3, which is the pairs' domain. Completions that the
    gold rule scores equally make no pair.

    Args:
        papers: all papers.
        completions: texts that the policy sampled, by id of the paper.
        settings: numbers of papers, and the seed.
        annotators: number of annotators.
    """
    width = max(2, len(str(annotators - 1)))
    for number in range(annotators):
        aspect = ASPECTS[number % len(ASPECTS)]
        name = f"annotator-{number:0{width}d}"
        drawn = generator(settings.seed, "gold", "papers", name)
        count = min(settings.papers, len(papers))
        for position in sorted(drawn.choice(len(papers), count, replace=False)):
            paper = papers[position]
            order = generator(settings.seed, "gold", "pairs", name, paper.id)
            texts = [completions[paper.id][k] for k in order.permutation(len(completions[paper.id]))]
            for first, second in zip(texts[::2], texts[1::2], strict=False):
                pair = _label(first, second, paper.summaries[aspect])
                if pair is not None:
                    yield {"prompt": paper.prompt, **pair, "client_id": name, "domain": aspect}


def _label(first: str, second: str, reference: str) -> dict[str, str] | None:
    """The better and the worse text by the gold rule; None if they are equal."""
    scores = rouge_l(first, reference), rouge_l(second, reference)
    if not first.strip() or not second.strip() or scores[0] == scores[1]:
        return None
    better, worse = (first, second) if scores[0] > scores[1] else (second, first)
    return {"chosen": better, "rejected": worse}


def sample_completions(
    policy: Policy,
    papers: Sequence[Paper],
    settings: GoldSettings,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[str]]:
    """Completions of a policy, by id of the paper."""
    samples = policy.generate(
        [paper.prompt for paper in papers],
        derive(settings.seed, "gold", "completions"),
        settings.temperature,
        settings.completions,
        progress=progress,
    )
    return {
        paper.id: [completion.text for completion in own] for paper, own in zip(papers, samples, strict=True)
    }


def gold_scores(folder: Path) -> dict[str, dict[str, float]]:
    """The gold score of a finished run's policies: mean over its answers and over the aspects.

    Args:
        folder: of a run whose pairs were made here.

    Returns:
        by policy (base, aligned): gold, and that of each aspect.
    """
    from tasks.runs import Run

    rows = read_json(Run(folder.name, folder).evaluation / "answers.json")
    papers = {paper.prompt.strip(): paper for paper in read_papers()}
    scores: dict[str, dict[str, float]] = {}
    for policy in ("base", "aligned"):
        by_aspect = {
            aspect: sum(
                rouge_l(row[policy]["text"], papers[row["prompt"].strip()].summaries[aspect]) for row in rows
            )
            / len(rows)
            for aspect in ASPECTS
        }
        scores[policy] = {"gold": sum(by_aspect.values()) / len(ASPECTS), **by_aspect}
    return scores


def papers_of(recipe: Recipe) -> list[Paper]:
    """The papers of a recipe, shown as it shows them.

    Raises:
        RecipeError: its source is another one.
    """
    options = recipe.data.options
    if not isinstance(options, AclSum):
        raise RecipeError(
            f"recipe {recipe.name}: data.source is '{recipe.data.source}', but the gold rule needs the expert"
            f" summaries of {SOURCE}"
        )
    return read_papers(options.request, options.abstract_words)


def write_pairs(
    file: Path,
    recipe: str = "summarization/decisive",
    papers: int = GoldSettings.papers,
    completions: int = GoldSettings.completions,
) -> None:
    """Sample completions of a recipe's policy, label pairs of them, and write a file of JSON lines."""
    from components.models.backbone import fetch_backbone
    from components.models.policy import Policy

    loaded, device = prepare_process(recipe)
    fetch_backbone(loaded.policy.backbone.name)
    settings = GoldSettings(papers, completions, loaded.alignment.temperature, loaded.seed)
    own_papers = papers_of(loaded)

    def progress(done: int, total: int) -> None:
        print(f"{done} of {total} completions", flush=True)

    texts = sample_completions(Policy(loaded.policy, device), own_papers, settings, progress)
    lines = [json.dumps(pair) for pair in make_pairs(own_papers, texts, settings)]
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    print(f"{file}: {len(lines)} pairs of {ANNOTATORS} annotators")
