"""ROUGE of generated texts against human answers (Lin 2004), by the package `rouge-score`."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeLsum")


def rouge(texts: Sequence[str], human_answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean F1 in [0, 1] by kind; each text is scored against its best-matching human answer.

    Texts without an answer are left out; without any the result is empty.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    scores = [
        scorer.score_multi(list(answers), text)
        for text, answers in zip(texts, human_answers, strict=True)
        if answers
    ]
    if not scores:
        return {}
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
