"""Outputs of the evaluation: contests at equal length, AlpacaEval's figures, and refusals."""

import json
import logging
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from components.config import AlpacaEvalConfig, RecipeError
from components.data import prepare
from components.data.records import DataError
from components.evaluation import alpaca_inputs
from components.evaluation.length_control import fit_length_controlled_rate
from components.io import read_json, write_json
from components.recipes import load_recipe
from components.reporting import run_page
from components.reporting.page import text_table
from components.results import (
    AlignmentResult,
    AlpacaEvalContest,
    AlpacaEvalFigures,
    AlpacaEvalResult,
    EvaluationResult,
    Outcome,
)
from components.seeding import derive
from tasks import alignment, data
from tasks.evaluation import judging
from tasks.flow_runs import FlowRunLink
from tasks.policies import aligned_outcome, record_files
from tasks.runs import RESULT, Run, create_run
from tasks.tracking.client import mlflow_client
from tasks.tracking.phases import log_evaluation
from tasks.tracking.run_tree import open_run_tracking, phase_tracking
from tests.support.judges import LengthSection, with_judge
from tests.support.policies import without_prefect
from tests.support.preparation import preparation_report
from tests.support.recipes import with_section
from tests.support.results import federation_result

ANNOTATOR = str(Path(__file__).resolve().parents[1] / "fixtures" / "alpaca_eval" / "always_second")
PROMPTS = [f"question {i}" for i in range(12)]
SUMMARIZE = "Write a summary of the text in one paragraph of at most 50 words.\n\n"
"""The instruction of the debug recipe's template, which the annotator reads before the prompt."""

needs_the_package = [
    pytest.mark.skipif(
        find_spec("alpaca_eval") is None,
        reason="the package alpaca-eval is not installed (extra alpaca-eval)",
    ),
]


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    without_prefect(monkeypatch)
    for module in (judging,):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture
def answers(tmp_path):
    """Answers to 12 prompts.

    The aligned policy's are longer than the base policy's for two prompts of three. Every second
    prompt has a human text.
    """
    rows = [
        {
            "prompt_id": f"p{i}",
            "prompt": prompt,
            "references": ["h" * (20 + 3 * i)] if i % 2 else [],
            "aligned": {"text": "a" * (30 + 5 * i if i % 3 else 10 + i), "finished": True, "tokens": 9},
            "base": {"text": "r" * (25 + i), "finished": True, "tokens": 9},
        }
        for i, prompt in enumerate(PROMPTS)
    ]
    path = tmp_path / "evaluation" / "answers.json"
    write_json(path, rows)
    return path


# --- the reward-hacking curve


@pytest.fixture
def adopted(tmp_path):
    """A run whose policy the clients trained, so that it has no checkpoints of DPO."""
    run = Run("run", tmp_path)
    policy = Outcome(folder="final")
    AlignmentResult(policy=policy, reference="base", metrics={}).write(run.alignment / RESULT)
    return run


@pytest.mark.parametrize(("prompts", "is_logged"), [(8, True), (0, False)])
def test_a_policy_of_the_clients_has_no_reward_hacking_curve_and_the_log_says_why(
    adopted, caplog, prompts, is_logged
):
    recipe = load_recipe("debug", ["federation.method=feddpo", f"evaluation.curve_prompts={prompts}"])
    with caplog.at_level(logging.INFO, "test"):
        assert judging.answer_at_checkpoints(adopted, recipe) == []
    assert ("evaluation.curve_prompts" in caplog.text) == is_logged
    assert ("feddpo" in caplog.text) == is_logged


# --- the files of the aligned policy


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_an_aligned_policy_whose_files_changed_is_refused_by_the_file(tmp_path, damage):
    run = Run("run", tmp_path)
    weights = run.alignment / "final" / "adapter_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    policy = Outcome(folder="final")
    result = record_files(run, AlignmentResult(policy=policy, reference="base", metrics={}))
    assert list(result.files) == ["final/adapter_model.safetensors"]
    result.write(run.alignment / RESULT)
    federation_result(outcome=Outcome()).write(run.federation / RESULT)
    assert aligned_outcome(run).folder == "final"
    if damage == "damaged":
        weights.write_bytes(b"weighty")
    else:
        weights.unlink()
    with pytest.raises(RecipeError, match=rf"adapter_model\.safetensors is {damage}.*delete .*alignment"):
        aligned_outcome(run)


# --- contests


@pytest.fixture
def judged(debug, answers, tmp_path):
    return judging.judge_answers(Run("run", tmp_path), with_judge(debug, LengthSection()))


def opponent(name, row):
    return row["references"][0] if name.endswith("_vs_human") else row["base"]["text"]


@pytest.mark.parametrize("name", ["aligned_vs_base", "aligned_vs_human", "base_vs_human"])
def test_every_contest_has_its_rate_at_equal_length_beside_its_win_rate(judged, debug, answers, name):
    rows = [row for row in read_json(answers) if row["references"] or name == "aligned_vs_base"]
    contest = judged.contests[name]
    ours = [len(row[name.partition("_")[0]]["text"]) for row in rows]
    theirs = [len(opponent(name, row)) for row in rows]
    labels = [0.5 if one == other else float(one > other) for one, other in zip(ours, theirs, strict=True)]
    expected = fit_length_controlled_rate(
        labels,
        ours,
        theirs,
        debug.evaluation.bootstrap,
        derive(debug.seed, "bootstrap", name),
    )
    assert contest.length_controlled == expected.rate
    assert contest.length_controlled_low == expected.low
    assert contest.length_controlled_high == expected.high
    assert contest.ties_half == expected.uncontrolled
    assert contest.ties_half == pytest.approx((contest.wins + contest.ties / 2) / len(rows))


def test_a_judge_that_prefers_length_gives_a_lower_rate_at_equal_length(judged):
    contest = judged.contests["aligned_vs_base"]
    assert contest.win_rate == pytest.approx(2 / 3)
    assert contest.length_effect > 1
    assert contest.length_controlled < contest.win_rate


# --- AlpacaEval


def with_alpaca_eval(recipe, **settings):
    config = AlpacaEvalConfig(**{"annotators_config": ANNOTATOR} | settings)
    evaluation = recipe.evaluation.model_copy(update={"alpaca_eval": config})
    return recipe.model_copy(update={"evaluation": evaluation})


@pytest.fixture
def annotate(debug, answers, tmp_path):
    def run(recipe=debug, **settings):
        return judging.annotate_answers.fn(Run("run", tmp_path), with_alpaca_eval(recipe, **settings))

    return run


class TestAlpacaEval:
    pytestmark = needs_the_package

    def test_without_a_reference_the_base_policy_is_the_baseline(self, annotate, answers, tmp_path):
        result = annotate()
        assert set(result.contests) == {"aligned_vs_base"}
        assert "not defined for these prompts" in result.note
        contest = result.contests["aligned_vs_base"]
        assert contest.figures.n_wins + contest.figures.n_wins_base == 12
        assert contest.figures.n_total == 12
        assert contest.baseline == "debug base"
        rows = read_json(answers)
        annotations = read_json(tmp_path / "evaluation" / "alpaca_eval" / "aligned_vs_base.annotations.json")
        compared = [(row["output_2"], row["output_1"]) for row in annotations]
        assert compared == [(row["aligned"]["text"], row["base"]["text"]) for row in rows]

    def test_the_outputs_are_written_in_the_schema_of_the_package(self, annotate, answers, tmp_path):
        annotate()
        for name in ("aligned", "base"):
            outputs = alpaca_inputs.read_outputs(
                tmp_path / "evaluation" / "alpaca_eval" / f"{name}.model_outputs.json"
            )
            assert [row.model_dump() for row in outputs] == [
                {
                    "dataset": "aclsum",
                    "instruction": f"{SUMMARIZE}{row['prompt']}",
                    "output": row[name]["text"],
                    "generator": f"debug {name}",
                }
                for row in read_json(answers)
            ]

    def test_with_a_reference_it_is_the_baseline_of_both_policies_in_any_order(self, annotate, tmp_path):
        texts = ["t" * i for i in range(13)]
        reference = alpaca_inputs.model_outputs([*PROMPTS[::-1], "another"], texts, "gpt", "set")
        (tmp_path / "reference.json").write_text(json.dumps([row.model_dump() for row in reference]))
        result = annotate(reference_outputs=str(tmp_path / "reference.json"))
        assert set(result.contests) == {"aligned_vs_reference", "base_vs_reference"}
        for name, contest in result.contests.items():
            assert contest.baseline == "gpt"
            assert contest.figures.length_controlled_winrate is None
            rows = read_json(tmp_path / "evaluation" / "alpaca_eval" / f"{name}.annotations.json")
            lengths = [(row["instruction"], len(row["output_1"])) for row in rows]
            assert lengths == [(f"{SUMMARIZE}{prompt}", 11 - i) for i, prompt in enumerate(PROMPTS)]

    def test_an_annotation_is_read_again_for_its_own_instruction_only(self, annotate, debug, tmp_path):
        path = tmp_path / "evaluation" / "alpaca_eval" / "annotated.json"
        annotate()
        first = read_json(path)
        annotate()
        assert read_json(path) == first
        assert {row["instruction"] for row in first} == {f"{SUMMARIZE}{prompt}" for prompt in PROMPTS}
        policy = debug.policy.model_copy(update={"template": "qa/policy"})
        annotate(recipe=debug.model_copy(update={"policy": policy}))
        instructions = [row["instruction"] for row in read_json(path)]
        assert sorted(instructions) == sorted([*PROMPTS, *(f"{SUMMARIZE}{prompt}" for prompt in PROMPTS)])

    def test_the_figures_are_logged_with_the_annotations(self, annotate, debug, tmp_path, mlflow_store):
        run = create_run(debug, tmp_path / "run")
        result = EvaluationResult(
            answers={},
            judge="a judge",
            judge_figures={},
            contests={},
            rouge={},
            alpaca_eval=annotate(),
        )
        result.write(tmp_path / "evaluation" / RESULT)
        open_run_tracking.fn(run, debug, FlowRunLink("flow-run", None))
        with phase_tracking(run, debug.tracking, "evaluate") as child:
            log_evaluation.fn(child, Run("run", tmp_path), result)
        logged = mlflow_client().get_run(child).data
        figures = result.alpaca_eval.contests["aligned_vs_base"].figures
        for name in ("win_rate", "standard_error", "discrete_win_rate", "n_wins", "equal_length_win_rate"):
            assert logged.metrics[f"alpaca_eval/aligned_vs_base/{name}"] == getattr(figures, name)
        assert logged.tags["alpaca_eval"] == ANNOTATOR
        paths = {info.path for info in mlflow_client().list_artifacts(child, "evaluation/alpaca_eval")}
        assert "evaluation/alpaca_eval/aligned.model_outputs.json" in paths
        assert "evaluation/alpaca_eval/aligned_vs_base.annotations.json" in paths


FIGURES = AlpacaEvalFigures(
    win_rate=3.4019,
    standard_error=0.539,
    discrete_win_rate=2.857,
    n_wins=23,
    n_wins_base=782,
    n_draws=0,
    n_total=805,
    n_missing=0,
    avg_length=1041,
    equal_length_win_rate=6.61,
    equal_length_low=4.43,
    equal_length_high=9.26,
)


def alpaca_table(figures, note):
    contest = AlpacaEvalContest(baseline="gpt4_1106_preview", figures=figures)
    contests = {"aligned_vs_reference": contest}
    result = AlpacaEvalResult(annotator="weighted", contests=contests, note=note)
    table, _ = run_page.alpaca_tables(result)
    return "\n".join([*text_table(table), table.caption])


def test_the_table_of_alpaca_eval_shows_the_figures_and_why_one_is_missing():
    table = alpaca_table(FIGURES, "It needs a file.")
    for part in (
        "aligned against gpt4_1106_preview",
        " 3.40 ",
        " 0.54 ",
        " 2.86 ",
        "6.61 [4.43, 9.26]",
        "23/0/782",
        "1,041",
        "annotator: weighted",
        "It needs a file.",
    ):
        assert part in table, part


def test_the_table_of_alpaca_eval_shows_a_dash_for_what_is_not_finite():
    complete = FIGURES.model_copy(
        update={
            "length_controlled_winrate": 5.4375,
            "n_missing": 2,
            "equal_length_win_rate": math.nan,
            "equal_length_low": math.nan,
            "equal_length_high": math.nan,
        }
    )
    table = alpaca_table(complete, None)
    assert " 5.44 " in table
    assert "2 without a preference" in table
    assert "- [-, -]" in table
    assert "None" not in table


def test_a_missing_package_is_reported_before_the_data_are_prepared(debug, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "prepare", lambda *_: pytest.fail("the data were prepared"))
    monkeypatch.setattr(alpaca_inputs, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed"):
        data.prepare_data.fn(with_alpaca_eval(debug), tmp_path, tmp_path / "trees")


def test_prompts_without_an_output_of_the_reference_are_refused_when_the_data_are_prepared(
    debug, prepared, tmp_path, monkeypatch
):
    instructions = ["server text 0 for test", f"{SUMMARIZE}server text 1 for test"]
    path = tmp_path / "reference.json"
    outputs = alpaca_inputs.model_outputs(instructions, ["t", "u"], "gpt", "set")
    path.write_text(json.dumps([row.model_dump() for row in outputs]))
    monkeypatch.setattr(prepare, "prepare", lambda *_: preparation_report())
    monkeypatch.setattr(alpaca_inputs, "check_alpaca_eval", lambda config: None)
    with pytest.raises(DataError, match=r"1 of the 3 held-out prompts \(first: number 3\)"):
        data.prepare_data.fn(
            with_alpaca_eval(debug, reference_outputs=str(path)), prepared, tmp_path / "trees"
        )


# --- DPO


def test_dpo_has_the_recipe_of_the_phase_whose_task_runner_a_stage_of_dvc_does_not_store(
    debug, tmp_path, monkeypatch
):
    run = create_run(debug, tmp_path / "run")
    chosen = with_section(debug, "runtime", task_runner="ray", torch_threads=3)
    called = []

    def train(task, calls, runtime, folder):
        called.extend([*calls, runtime])
        policy = Outcome(folder="final")
        AlignmentResult(policy=policy, reference="base", metrics={}).write(run.alignment / "dpo.json")

    monkeypatch.setattr(alignment, "run_on_workers", train)
    for _ in range(2):  # the second time it is read
        (result,) = alignment.train_by_dpo([(run, chosen)])
        assert result.policy.folder == "final"
    assert called == [{"run": run, "recipe": chosen}, chosen.runtime]
