"""ROUGE of generated texts against human references (Lin 2004), by the package `rouge-score`."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeLsum")


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute the mean ROUGE F1; each text is scored against its best-matching reference.

    Args:
        texts: generated texts.
        references: human texts for each generated text; rows without any are left out.

    Returns:
        mean F1 in [0, 1] by kind (rouge1, rouge2, rougeLsum); empty if no row has a reference.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    scores = [
        scorer.score_multi(list(row_references), text)
        for text, row_references in zip(texts, references, strict=True)
        if row_references
    ]
    if not scores:
        return {}
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
