"""What the tasks of evaluation write down, log and print: the contests at equal length, and AlpacaEval's figures."""

import json
import logging
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from components.config import AlpacaEvalConfig
from components.data.records import DataError
from components.evaluation import alpaca, judges
from components.evaluation.length_control import control_length
from components.evaluation.winrate import Verdict
from components.seeding import derive
from tasks import data, evaluation, reporting, tracking
from tasks.runs import Run, read_json, write_json

ANNOTATOR = str(Path(__file__).resolve().parents[1] / "fixtures" / "alpaca_eval" / "always_second")
PROMPTS = [f"question {i}" for i in range(12)]
SUMMARIZE = "Write a summary of the text in one paragraph of at most 50 words.\n\n"
"""The instruction of the debug recipe's template, which is part of what an annotator is told."""

imports_the_package = [pytest.mark.slow, pytest.mark.skipif(find_spec("alpaca_eval") is None, reason="the package alpaca-eval is not installed (extra alpaca-eval)")]


class Longer:
    """A judge that likes the longer response."""

    description, figures = "the longer one", {}

    def compare(self, comparisons):
        return [Verdict.FIRST if len(c.first) > len(c.second) else Verdict.SECOND for c in comparisons]


@pytest.fixture(autouse=True)
def quiet_log(monkeypatch):
    monkeypatch.setattr(evaluation, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture
def answers(tmp_path):
    """Answers in which the aligned policy's are longer for two prompts of three, and every second prompt has a human text."""
    path = tmp_path / "answers.json"
    write_json(path, [{
        "prompt_id": f"p{i}", "prompt": prompt, "references": ["h" * (20 + 3 * i)] if i % 2 else [],
        "aligned": {"text": "a" * (30 + 5 * i if i % 3 else 10 + i)}, "raw": {"text": "r" * (25 + i)}} for i, prompt in enumerate(PROMPTS)])
    return path


def with_alpaca_eval(recipe, **settings):
    config = AlpacaEvalConfig(**{"annotators_config": ANNOTATOR} | settings)
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"alpaca_eval": config})})


@pytest.mark.parametrize(("wanted", "said"), [(8, True), (0, False)])
def test_a_policy_that_the_clients_trained_has_no_reward_hacking_curve_and_the_log_says_so(tmp_path, monkeypatch, caplog, wanted, said):
    from components.recipes import load_recipe
    from flows import fed_rlhf

    recipe, run = load_recipe("debug", ["federation.method=feddpo", f"evaluation.curve_prompts={wanted}"]), Run("run", tmp_path)
    write_json(run.alignment / "result.json", {"checkpoints": {}})
    write_json(run.federation / "result.json", {})
    monkeypatch.setattr(fed_rlhf, "get_run_logger", lambda: logging.getLogger("test"))
    with caplog.at_level(logging.INFO, "test"):
        assert fed_rlhf.more_measures(run, recipe) == {}
    assert ("no reward-hacking curve (evaluation.curve_prompts): federation.method 'feddpo' trains the policy itself" in caplog.text) is said


def test_every_contest_has_its_rate_at_equal_length_beside_its_win_rate(debug, answers, prepared, tmp_path, monkeypatch):
    monkeypatch.setitem(judges.JUDGES, "longer", lambda *_: Longer())
    recipe = debug.model_copy(update={"evaluation": debug.evaluation.model_copy(update={"judge": debug.evaluation.judge.model_copy(update={"kind": "longer"})})})
    result, rows = evaluation.judge_answers.fn(recipe, prepared, tmp_path, answers), read_json(answers)
    human = [row for row in rows if row["references"]]
    asked = {"aligned_vs_raw": (rows, "aligned", lambda row: row["raw"]["text"]), "aligned_vs_human": (human, "aligned", lambda row: row["references"][0]),
             "raw_vs_human": (human, "raw", lambda row: row["references"][0])}
    for name, (given, ours, theirs) in asked.items():
        contest, verdicts = result["contests"][name], [Verdict(result["verdicts"][name][row["prompt_id"]]) for row in given]
        even = control_length(verdicts, [row[ours]["text"] for row in given], [theirs(row) for row in given], debug.evaluation.bootstrap, derive(debug.seed, "bootstrap", name))
        assert (contest["length_controlled"], contest["length_controlled_low"], contest["length_controlled_high"]) == (even.rate, even.low, even.high)
        assert contest["ties_half"] == even.uncontrolled == pytest.approx((contest["wins"] + contest["ties"] / 2) / len(given))
    contest = result["contests"]["aligned_vs_raw"]
    assert contest["win_rate"] == pytest.approx(2 / 3) and contest["length_effect"] > 1
    assert contest["length_controlled"] < contest["win_rate"]


@pytest.fixture
def annotated(debug, answers, tmp_path):
    def run(recipe=debug, **settings):
        return evaluation.annotate_answers.fn(with_alpaca_eval(recipe, **settings), answers, tmp_path / "alpaca_eval")

    return run


class TestAlpacaEval:
    pytestmark = imports_the_package

    def test_without_a_reference_the_aligned_policy_is_compared_with_the_raw_one(self, annotated, answers, tmp_path):
        result = annotated()
        assert set(result["contests"]) == {"aligned_vs_raw"} and "not defined for these prompts" in result["missing"]
        contest = result["contests"]["aligned_vs_raw"]
        assert contest["n_wins"] + contest["n_wins_base"] == contest["n_total"] == 12 and contest["baseline"] == "debug raw"
        outputs = {name: alpaca.read_outputs(tmp_path / "alpaca_eval" / f"{name}.model_outputs.json") for name in ("aligned", "raw")}
        rows = read_json(answers)
        for name, written in outputs.items():
            assert written == [{"dataset": "aclsum", "instruction": f"{SUMMARIZE}{row['prompt']}", "output": row[name]["text"], "generator": f"debug {name}"} for row in rows]
        annotations = read_json(tmp_path / "alpaca_eval" / "aligned_vs_raw.annotations.json")
        assert [(row["output_2"], row["output_1"]) for row in annotations] == [(row["aligned"]["text"], row["raw"]["text"]) for row in rows]

    def test_with_a_reference_both_policies_are_compared_with_it_whatever_its_order(self, annotated, tmp_path):
        reference = alpaca.model_outputs([*PROMPTS[::-1], "another"], ["t" * i for i in range(13)], "gpt", "set")
        (tmp_path / "reference.json").write_text(json.dumps(reference))
        result = annotated(reference_outputs=str(tmp_path / "reference.json"))
        assert set(result["contests"]) == {"aligned_vs_reference", "raw_vs_reference"}
        assert {contest["baseline"] for contest in result["contests"].values()} == {"gpt"}
        for name in result["contests"]:
            rows = read_json(tmp_path / "alpaca_eval" / f"{name}.annotations.json")
            assert [(row["instruction"], len(row["output_1"])) for row in rows] == [(f"{SUMMARIZE}{prompt}", 11 - i) for i, prompt in enumerate(PROMPTS)]
        assert not any("length_controlled_winrate" in contest for contest in result["contests"].values())

    def test_what_was_annotated_for_another_instruction_is_asked_anew_and_for_the_same_one_is_not(self, annotated, debug, tmp_path):
        annotated()
        kept = read_json(tmp_path / "alpaca_eval" / "annotated.json")
        annotated()
        assert read_json(tmp_path / "alpaca_eval" / "annotated.json") == kept and {row["instruction"] for row in kept} == {f"{SUMMARIZE}{prompt}" for prompt in PROMPTS}
        annotated(recipe=debug.model_copy(update={"policy": debug.policy.model_copy(update={"template": "qa/policy"})}))
        asked = [row["instruction"] for row in read_json(tmp_path / "alpaca_eval" / "annotated.json")]
        assert sorted(asked) == sorted([*PROMPTS, *(f"{SUMMARIZE}{prompt}" for prompt in PROMPTS)])

    def test_the_figures_are_logged_with_the_annotations(self, annotated, answers, debug, tmp_path, mlflow_store):
        run = Run("run-1", tmp_path / "run")
        (run.folder / "recipe.yaml").parent.mkdir(parents=True)
        (run.folder / "recipe.yaml").write_text("name: debug\n")
        result = annotated()
        write_json(tmp_path / "result.json", {"contests": {}, "verdicts": {}, "rouge": {}, "judge_figures": {}, "answers": {}, "judge": "j", "alpaca_eval": result})
        tracking.open_tracking.fn(run, debug, "flow-run", None)
        child = tracking.open_phase.fn(run, debug, "evaluate")
        tracking.log_evaluation.fn(child, tmp_path)
        logged = tracking.mlflow_client().get_run(child).data
        contest = result["contests"]["aligned_vs_raw"]
        for name in ("win_rate", "standard_error", "discrete_win_rate", "n_wins", "equal_length_win_rate"):
            assert logged.metrics[f"alpaca_eval/aligned_vs_raw/{name}"] == contest[name]
        assert logged.tags["alpaca_eval"] == ANNOTATOR
        files = {info.path for info in tracking.mlflow_client().list_artifacts(child, "evaluation/alpaca_eval")}
        assert {"evaluation/alpaca_eval/aligned.model_outputs.json", "evaluation/alpaca_eval/aligned_vs_raw.annotations.json"} <= files


CONTEST = {"win_rate": 3.4019, "standard_error": 0.539, "discrete_win_rate": 2.857, "n_wins": 23, "n_wins_base": 782, "n_draws": 0, "n_total": 805, "n_missing": 0,
           "avg_length": 1041, "equal_length_win_rate": 6.61, "equal_length_low": 4.43, "equal_length_high": 9.26, "baseline": "gpt4_1106_preview"}


def test_the_table_shows_what_was_measured_and_says_what_is_missing():
    text = "\n".join(reporting.alpaca_lines({"annotator": "weighted", "contests": {"aligned_vs_reference": CONTEST}, "missing": "It needs a file."}))
    for part in ("aligned against gpt4_1106_preview", " 3.40 ", " 0.54 ", " 2.86 ", " - ", "6.61  [4.43, 9.26]", "23 wins, 0 draws, 782 losses; 1,041 characters", "annotator: weighted", "It needs a file."):
        assert part in text, part
    complete = CONTEST | {"length_controlled_winrate": 5.4375, "n_missing": 2, "equal_length_win_rate": math.nan, "equal_length_low": math.nan, "equal_length_high": math.nan}
    text = "\n".join(reporting.alpaca_lines({"annotator": "weighted", "contests": {"aligned_vs_reference": complete}, "missing": None}))
    assert " 5.44 " in text and "2 without a preference" in text and "-  [-, -]" in text and "None" not in text


def test_what_alpaca_eval_lacks_is_said_before_the_data_are_prepared(debug, tmp_path, monkeypatch):
    from components.data import prepare

    monkeypatch.setattr(prepare, "prepare", lambda *_: pytest.fail("the data were prepared"))
    monkeypatch.setattr(alpaca, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="package is not installed"):
        data.prepare_data.fn(with_alpaca_eval(debug), tmp_path)


def test_prompts_that_the_reference_did_not_answer_are_refused_when_the_data_are_prepared(debug, prepared, tmp_path, monkeypatch):
    from components.data import prepare

    path = tmp_path / "reference.json"
    path.write_text(json.dumps(alpaca.model_outputs(["server text 0 for test", f"{SUMMARIZE}server text 1 for test"], ["t", "u"], "gpt", "set")))
    monkeypatch.setattr(prepare, "prepare", lambda *_: {})
    monkeypatch.setattr(alpaca, "check_alpaca_eval", lambda config: None)
    with pytest.raises(DataError, match="no output for 1 of the 3 held-out prompts, e.g. 'server text 2 for test'"):
        data.prepare_data.fn(with_alpaca_eval(debug, reference_outputs=str(path)), prepared)
