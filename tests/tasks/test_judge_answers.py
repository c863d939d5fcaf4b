"""Judging answers: any judge's verdicts become win rates, and what a judge wrote is kept."""

import json
import logging

from components.evaluation.judges import JUDGES
from components.evaluation.winrate import Verdict
from tasks import evaluation

ANSWERS = [{"prompt_id": f"p{i}", "prompt": f"query {i}", "references": [f"human {i}"], "raw": {"text": f"raw {i}"}, "aligned": {"text": f"aligned {i}"}} for i in range(3)]


class Terse:
    """A judge with nothing but verdicts: the later word in the alphabet is worse."""

    description = "terse"

    def __init__(self, *_):
        pass

    def compare(self, comparisons):
        return [Verdict.FIRST if c.first < c.second else Verdict.SECOND for c in comparisons]


class Wordy(Terse):
    """One that writes, too."""

    def __init__(self, *_):
        self.texts, self.figures = [], {"judge_shortened": 0}

    def compare(self, comparisons):
        self.texts += [{"prompt": c.prompt, "text": "because"} for c in comparisons]
        return super().compare(comparisons)


def judged(debug, tmp_path, monkeypatch, judge):
    monkeypatch.setitem(JUDGES, "mine", judge)
    monkeypatch.setattr(evaluation, "get_run_logger", lambda: logging.getLogger("test"))
    judge_config = debug.evaluation.judge.model_copy(update={"kind": "mine"})
    recipe = debug.model_copy(update={"evaluation": debug.evaluation.model_copy(update={"judge": judge_config})})
    (tmp_path / "answers.json").write_text(json.dumps(ANSWERS))
    return evaluation.judge_answers.fn(recipe, tmp_path, tmp_path, tmp_path / "answers.json")


def test_a_judge_without_figures_or_texts_gives_win_rates(debug, tmp_path, monkeypatch):
    result = judged(debug, tmp_path, monkeypatch, Terse)
    assert result["judge_figures"] == {} and not (tmp_path / "judgements.json").exists()
    assert {name: c["win_rate"] for name, c in result["contests"].items()} == {"aligned_vs_raw": 1.0, "aligned_vs_human": 1.0, "raw_vs_human": 0.0}


def test_what_a_judge_wrote_is_kept_beside_the_answers(debug, tmp_path, monkeypatch):
    result = judged(debug, tmp_path, monkeypatch, Wordy)
    texts = json.loads((tmp_path / "judgements.json").read_text())
    assert len(texts) == 18 and texts[0] == {"prompt": "query 0", "text": "because"} and result["judge_figures"] == {"judge_shortened": 0}
