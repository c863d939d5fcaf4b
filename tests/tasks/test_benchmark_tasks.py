"""What a benchmark's report reads from its runs: commits, contests, answers, fronts."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from components.config.benchmark import Benchmark
from components.federation.multi_objective import weight_series
from components.io import write_json
from components.recipes.benchmarks import arm_recipe
from components.reporting.benchmark_page import commits_line, short_commit
from components.results import (
    AccuracyReport,
    AlignmentResult,
    ClientRecord,
    CurvePoint,
    EvaluationResult,
    FederationResult,
    Metrics,
    Outcome,
    RoundEvaluation,
    StepRecord,
)
from tasks import benchmark_report
from tasks.benchmark_folder import arm_run, contest_path
from tasks.benchmark_report import read_results, write_benchmark_report
from tasks.runs import RESULT, Run, contest_file, create_run
from tests.support.contests import LOSS, TIE, WIN, contest

CLEAN = "abc" * 13 + "a"
DIRTY = "def" * 13 + "d-dirty"
PLAN = Benchmark(
    recipe="debug",
    seeds=[0, 1],
    arms={"FedBis": [], "FedDPO": ["federation.method=feddpo"]},
    contests=[["FedBis", "FedDPO"]],
    claims=[
        {"arm": "FedBis", "figure": "common", "at_least": 0.9},
        {"arm": "FedBis", "figure": "wins", "against": ["FedDPO"], "above": 0.5},
    ],
)


def test_a_run_records_each_commit_that_worked_on_it_once_in_a_row(tmp_path):
    run = Run("r", tmp_path)
    run.update_metadata(mlflow_run_id="x")
    for commit in (CLEAN, CLEAN, DIRTY, CLEAN):
        run.record_commit(commit)
    assert run.metadata() == {"mlflow_run_id": "x", "commits": [CLEAN, DIRTY, CLEAN]}


@pytest.mark.parametrize(
    ("commits", "line"),
    [
        ({"a": [CLEAN], "b": [CLEAN]}, "commit of the runs: abcabcabcabc"),
        (
            {"a": [CLEAN], "b": [CLEAN, DIRTY], "c": []},
            "commits of the runs: abcabcabcabc (a); abcabcabcabc, then defdefdefdef-dirty (b);"
            " not recorded (c)",
        ),
        ({"a": [], "b": []}, "commit of the runs: not recorded"),
    ],
    ids=["equal", "different", "none"],
)
def test_the_commits_of_the_runs_are_listed_by_run_where_they_differ(commits, line):
    assert commits_line(commits) == line


def test_a_short_commit_says_that_files_differed_from_it():
    assert short_commit(DIRTY) == "defdefdefdef-dirty"


# --- a benchmark's folder as its runs leave it


@dataclass(frozen=True)
class ArmResult:
    """What a run of an arm measured.

    Attributes:
        characters: length of each answer of its policy.
        measures: rewards before and after the rounds; None for methods with one objective.
        server: the server's metrics after its only round.
        series: the client's series in that round.
        diagnostics: of its method.
    """

    characters: int
    measures: tuple[dict[str, float], dict[str, float]] | None = None
    server: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    diagnostics: tuple[str, ...] = ()


ACCURACY = AccuracyReport(
    mean=0.9,
    worst=0.5,
    best=1.0,
    clients={"a": 0.9},
    domains={"common": 0.95, "own": 0.5},
    pairs=8,
    margin=1.0,
    margins={"a": 1.0},
    reward=1.0,
    rewards={"a": 1.0},
)
OWN = contest([WIN, TIE], ["p2", "p1"], [8, 8], [2, 1], opposed=1)
BETWEEN = contest([LOSS, TIE], ["p1", "p2"])


def federation_result(arm):
    metrics = Metrics(scalars={"seconds": 1.0}, series=arm.series)
    record = StepRecord(
        step=1,
        round=0,
        phase="train",
        rounds_done=1,
        logged_at=1,
        clients={"a": ClientRecord(adapter_name="policy", rows=8, metrics=metrics)},
        failed={},
        refused={},
        adapters={},
        memory={},
        server=Metrics(scalars=arm.server),
        aggregation_seconds=0.1,
    )
    evaluations = []
    for rounds_done in (0, 1):
        measures = {}
        if arm.measures is not None:
            measures["rewards"] = Metrics(scalars=arm.measures[rounds_done])
        evaluations.append(RoundEvaluation(rounds_done=rounds_done, accuracy=ACCURACY, measures=measures))
    return FederationResult(
        outcome=Outcome(),
        rounds=1,
        records=[record],
        evaluations=evaluations,
        adapters={},
        diagnostics=list(arm.diagnostics),
    )


EVALUATION = EvaluationResult(
    answers={},
    judge="a judge",
    judge_figures={"judge_accuracy": 0.7, "judge_held_out_pairs": 84},
    contests={"aligned_vs_base": OWN.figures()},
    rouge={"base": {"rougeLsum": 0.1}, "aligned": {"rougeLsum": 0.2}},
    curve=[CurvePoint(step=1, prompts=2, proxy=0.7, judge=0.6)],
)


def answer_rows(characters):
    """Answers to two prompts, of which the base policy's have one and two characters."""
    return [
        {
            "prompt_id": f"p{n}",
            "prompt": f"question {n}",
            "references": ["human"],
            "aligned": {"text": "x" * characters},
            "base": {"text": "r" * n},
        }
        for n in (1, 2)
    ]


def write_run(run, recipe, arm):
    create_run(recipe, run.folder)
    run.record_commit(CLEAN)
    federation_result(arm).write(run.federation / RESULT)
    AlignmentResult(
        policy=Outcome(folder="final"),
        reference="base",
        metrics={"kl_sequence": 1.0},
    ).write(run.alignment / RESULT)
    EVALUATION.write(run.evaluation / RESULT)
    OWN.write(contest_file(run.evaluation, "aligned_vs_base"))
    rows = answer_rows(arm.characters)
    write_json(run.evaluation / "answers.json", rows)
    own = [{"prompt_id": row["prompt_id"], "text": row["aligned"]["text"]} for row in rows]
    write_json(run.evaluation / "answers-aligned.json", own)
    write_json(run.prepared / "clients.json", {"a": {"train": 8, "validation": 0, "test": 8}})
    run.mark_done("report")


def write_benchmark(folder, plan, arms):
    """The runs of seed 0, and verdicts of their contests."""
    for name, arm in arms.items():
        write_run(arm_run(folder, name, 0), arm_recipe(plan, name, 0), arm)
    for ours, theirs in plan.contests:
        BETWEEN.write(contest_path(folder, ours, theirs, 0))
    return folder


@pytest.fixture
def finished(tmp_path):
    """A benchmark's folder with one finished seed of two."""
    arms = {"FedBis": ArmResult(8), "FedDPO": ArmResult(4)}
    return write_benchmark(tmp_path / "benchmark-x", PLAN, arms)


@dataclass(frozen=True)
class WrittenReport:
    text: str
    page: str
    figures: dict


def write_report(folder: Path, plan: Benchmark) -> WrittenReport:
    out, *_ = write_benchmark_report.fn(folder, plan, None)
    return WrittenReport(
        (out / "report.md").read_text(),
        (out / "report.html").read_text(),
        json.loads((out / "metrics.json").read_text()),
    )


def test_the_report_has_the_commits_the_judge_the_base_policy_and_the_claims(finished, monkeypatch):
    monkeypatch.setattr(benchmark_report, "git_commit", lambda: DIRTY)
    report = write_report(finished, PLAN)
    for line in (
        "- commit of the runs: abcabcabcabc\n- report written by commit defdefdefdef-dirty\n",
        "| FedBis: common taste at least 0.9 | undecided (one seed, 1 of 2 seeds) |",
        "| FedBis against FedDPO: share of wins among wins and losses above 0.5 | undecided (one seed,"
        " 1 of 2 seeds) |",
        "the worst 10% of the clients (at least one), the spread, and Jain's index",
        "| both orders agree, FedBis against base policy | 0.500 |",
        "| own accuracy, held-out pairs | 84 |",
        "| base policy | 1 |",
    ):
        assert line in report.text, line
    assert report.page.count("data-chart=") == 7
    for title in (
        "Selectors and judge over the alignment: FedBis, seed 0",
        "Reward of the chosen completions",
    ):
        assert title in report.page, title


def test_the_summary_for_a_terminal_has_what_the_benchmarks_file_asks(finished):
    choices = {"best": {"among": ["FedBis", "FedDPO"], "figure": "accuracy"}}
    plan = Benchmark.model_validate(PLAN.model_dump() | {"choices": choices, "regressions": {"own": 0.1}})
    earlier = [{"FedBis": {"after/accuracy/domain/own": 0.9}}]
    out, *_ = write_benchmark_report.fn(finished, plan, earlier)
    earlier_words = "(median of 1 earlier runs): regression"
    assert (out / "summary.txt").read_text().splitlines() == [
        "benchmark-x: recipe debug, 2 arms, seeds 0, 1",
        "",
        "Means over seeds  seeds  common taste  pair accuracy  own taste  worst client",
        "  FedBis              1         0.950          0.900      0.500         0.500",
        "  FedDPO              1         0.950          0.900      0.500         0.500",
        "",
        "Win rates over all seeds      wins/ties/losses  length-controlled [95%]  "
        "corrected for the judge's errors [95%]",
        "  FedBis against base policy             1/1/0     75.0% [75.0%, 75.0%]  "
        "     100.0% [0.0%, 100.0%] (undecided)",
        "  FedDPO against base policy             1/1/0     75.0% [75.0%, 75.0%]  "
        "     100.0% [0.0%, 100.0%] (undecided)",
        "  FedBis against FedDPO                  0/1/1      25.0% [0.0%, 50.0%]  "
        "       0.0% [0.0%, 100.0%] (undecided)",
        "",
        "Claims",
        "  FedBis: common taste at least 0.9: undecided (one seed, 1 of 2 seeds)",
        "  FedBis against FedDPO: share of wins among wins and losses above 0.5: undecided (one seed, 1 of 2"
        " seeds)",
        "",
        "Choices",
        "  best: not measured",
        "",
        "Since the last runs",
        f"  FedBis, own taste: 0.500 instead of 0.900 {earlier_words}",
        "  FedDPO, own taste: 0.500: first run",
    ]


@pytest.fixture
def results(finished):
    return read_results(finished, PLAN)


def test_contests_and_figures_of_finished_runs_and_of_the_base_policy_are_read_by_seed(results):
    assert results.contests == {
        "FedBis against base policy": {0: OWN},
        "FedDPO against base policy": {0: OWN},
        "FedBis against FedDPO": {0: BETWEEN},
    }
    assert results.base == {0: {"rouge/aligned/rougeLsum": 0.1, "answers/aligned_characters": 1.5}}
    assert {arm: set(by_seed) for arm, by_seed in results.metrics.items()} == {"FedBis": {0}, "FedDPO": {0}}


@pytest.mark.parametrize("arm", ["FedBis", "FedDPO"])
def test_the_base_policy_is_that_of_the_run_that_answers_most_prompts(finished, arm):
    """One arm answers one prompt of the two of the other, and has a base policy of ROUGE-L 0.9."""
    folder = arm_run(finished, arm, 0).evaluation
    result = EvaluationResult.read(folder / RESULT)
    result.rouge["base"] = {"rougeLsum": 0.9}
    result.write(folder / RESULT)
    contest([WIN], ["p2"]).write(contest_file(folder, "aligned_vs_base"))
    assert read_results(finished, PLAN).base[0]["rouge/aligned/rougeLsum"] == 0.1


def test_the_numbers_of_a_report_have_each_contests_verdicts_and_its_figures_over_all_seeds(finished):
    figures = write_report(finished, PLAN).figures
    assert figures["contests"]["FedBis against base policy"]["0"] == {
        "prompts": ["p2", "p1"],
        "verdicts": ["response 1", "tie"],
        "ours": [8, 8],
        "theirs": [2, 1],
        "consistency": 0.5,
    }
    assert figures["pooled"]["FedBis against base policy"]["win_rate"] == 0.5


# --- fronts

PREFERENCES = {"a": (1.8, 0.2), "b": (0.2, 1.8), "c": (1.8, 0.2), "d": (0.2, 1.8)}
REWARDS = {"a": (4.0, 2.0), "b": (2.0, 5.0), "c": (1.0, 1.5), "d": (3.0, 1.0)}
BASE_REWARDS = (1.5, 0.5)


def preference_setting(x, y):
    return (
        f"federation.options={{objectives: {{x: [one], y: [two]}}, beta: 1, preference: {{x: {x}, y: {y}}}}}"
    )


FRONTS = Benchmark(
    recipe="debug",
    seeds=[0],
    fronts={"good": ["a", "b"], "poor": ["c", "d"]},
    claims=[{"arm": "good", "figure": "hypervolume", "against": ["poor"], "at_least": 0.0}],
    settings=[
        "federation.method=firm",
        "policy.lora.dropout=0",
        "rewards={one: {kind: function, name: clean}, two: {kind: function, name: clean}}",
    ],
    arms={arm: [preference_setting(*preference)] for arm, preference in PREFERENCES.items()},
)


def rewards_measure(x, y):
    return {"x": x, "y": y, "kl": 0.5, "prompts": 2}


@pytest.fixture
def fronts(tmp_path):
    """A finished benchmark of two fronts with two policies each."""
    series = {weight_series(objective): [0.5, 0.5] for objective in ("x", "y")}
    drifts = {"lambda_drift": 0.1, "mean_lambda_drift": 0.1, "update_drift": 1.0}
    arms = {}
    for arm, rewards in REWARDS.items():
        measures = (rewards_measure(*BASE_REWARDS), rewards_measure(*rewards))
        arms[arm] = ArmResult(4, measures, drifts, series, ("objectives",))
    return write_benchmark(tmp_path / "benchmark-x", FRONTS, arms)


def test_a_front_has_the_volume_the_ranks_and_the_scores_of_its_policies(fronts):
    # The smallest x is 1, of c, and the smallest y 0.5, of the base policy.
    # good: (4 - 1)(2 - 0.5) + (2 - 1)(5 - 2); poor: (3 - 1)(1 - 0.5), to which (1, 1.5) adds nothing.
    figures = read_results(fronts, FRONTS).metrics
    assert figures["good"][0]["front/hypervolume"] == pytest.approx(7.5)
    assert figures["poor"][0]["front/hypervolume"] == pytest.approx(1.0)
    assert figures["good"][0]["front/rank"] == pytest.approx(1.0)
    assert figures["poor"][0]["front/rank"] == pytest.approx(-1.0)
    front = read_results(fronts, FRONTS).fronts["good"][0]
    assert {arm: point.scores for arm, point in front.items()} == {
        "a": {"x": 4.0, "y": 2.0},
        "b": {"x": 2.0, "y": 5.0},
    }
    assert front["a"].base_scores == {"x": 1.5, "y": 0.5}


def test_the_report_shows_fronts_their_claims_and_answers_of_their_policies(fronts):
    report = write_report(fronts, FRONTS)
    assert report.figures["claims"][0]["verdict"] == "undecided"
    assert report.figures["metrics"]["good"]["0"]["front/hypervolume"] == pytest.approx(7.5)
    assert "Fronts" in report.page
    assert "good, seed 0" in report.text
