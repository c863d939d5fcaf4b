"""ROUGE of generated texts against human references, by the `rouge-score` package (Lin 2004)."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeLsum")


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean ROUGE F1, for each text against the reference that it is nearest to.

    Args:
        texts: generated.
        references: one or more human texts for each; rows without any are left out.

    Returns:
        rouge1, rouge2 and rougeLsum F1 in [0, 1]; nothing where no row has a reference.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    scores = [scorer.score_multi(list(refs), text) for text, refs in zip(texts, references, strict=True) if refs]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS} if scores else {}
