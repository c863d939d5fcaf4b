"""A benchmark on the recipe `debug`: arms and seeds side by side, contests and one report."""

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from mlflow import MlflowClient

from components.config import UserError, check_section
from components.config.benchmark import Benchmark
from components.recipes import load_recipe
from components.recipes.benchmarks import read_benchmark
from components.reporting.published import read_lines
from components.reporting.published import read_results as read_published
from tasks import benchmark_lines
from tasks.benchmark import share_generations
from tasks.benchmark_lines import prospects, publish_lines
from tasks.runs import create_run
from tests.support.pipeline import PipelineRun, Workplace

ARMS = {
    "FedBiscuit": [
        "federation.rounds=5",
        "federation.keep_every=5",
        "federation.method=fedbiscuit",
        "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1}",
        "evaluation.preference_pairs=9",
        "evaluation.curve_prompts=3",
        "alignment.prompts=2",
        "alignment.dpo.checkpoint_every=1",
    ],
    "FedDPO": [
        "federation.rounds=1",
        "federation.method=feddpo",
        "tracking.registered_model=of-one-arm",
    ],
}
SEEDS = [0, 1]
PLAN = {
    "recipe": "debug",
    "seeds": SEEDS,
    "arms": ARMS,
    "contests": [["FedBiscuit", "FedDPO"]],
    "claims": [{"arm": "FedBiscuit", "figure": "worst", "at_least": 0}],
    "regressions": {"accuracy": 0.02},
}
STEPS = {"FedBiscuit": 20, "FedDPO": 4}
"""Rounds times 2 clients times 2 local steps."""
RUNS = [f"{arm}-seed-{seed}" for arm, seed in product(ARMS, SEEDS)]


@dataclass(frozen=True)
class FinishedBenchmark:
    """A benchmark that was run to its end: where, its folder, and its log."""

    place: Workplace
    folder: Path
    output: str

    def arm(self, arm: str, seed: int) -> PipelineRun:
        return PipelineRun(self.place.tracking, self.folder / f"{arm}-seed-{seed}", self.output)

    def figures(self) -> dict:
        return json.loads((self.folder / "report" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def finished(new_workplace):
    from flows.benchmark import benchmark

    place = new_workplace("benchmark")
    plan = place.folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    report, output = place.call(lambda: benchmark(benchmark=str(plan)))
    return FinishedBenchmark(place, Path(report).parent, output)


@pytest.mark.long
def test_the_policies_of_a_benchmark_are_registered_only_where_it_names_a_model(finished):
    client = MlflowClient(finished.place.tracking)
    assert [model.name for model in client.search_registered_models()] == ["of-one-arm"]
    assert len(client.search_model_versions("name = 'of-one-arm'")) == len(SEEDS)
    assert not client.get_registered_model("of-one-arm").aliases


# --- published lines


@pytest.mark.long
def test_published_lines_have_all_that_claims_and_tables_are_functions_of(finished, tmp_path):
    from tasks.benchmark_report import read_results as read_folder

    file = tmp_path / "plan.jsonl"
    assert publish_lines(finished.folder, file) == len(RUNS) + len(SEEDS)
    assert publish_lines(finished.folder, file) == 0
    lines = read_lines(file)
    assert [(line["kind"], line["seed"]) for line in lines if not line["arm"]] == [
        ("contests", 0),
        ("contests", 1),
    ]
    assert all(line["seconds"] > 0 for line in lines if line["arm"])
    benchmark = read_benchmark(str(finished.folder / "benchmark.yaml"))
    published, measured = read_published(lines, benchmark), read_folder(finished.folder, benchmark)
    for name in ("metrics", "units", "base", "judges", "commits", "fronts"):
        np.testing.assert_equal(getattr(published, name), getattr(measured, name), err_msg=name)
    assert published.contests.keys() == measured.contests.keys()
    for name, by_seed in published.contests.items():
        for seed, contest in by_seed.items():
            expected = measured.contests[name][seed]
            assert contest.verdicts == expected.verdicts
            assert contest.prompts == expected.prompts
            assert contest.win_rate() == expected.win_rate()


@pytest.mark.long
def test_a_finished_benchmark_costs_nothing_and_says_what_its_seeds_decide(finished):
    benchmark = read_benchmark(str(finished.folder / "benchmark.yaml"))
    time, head, *claims = prospects("plan.yaml", benchmark, finished.folder)
    assert time == "estimated time: about 0 minutes for 0 runs, by the time of earlier runs"
    assert head.startswith("what 2 seeds decide")
    assert len(claims) == 1
    more = benchmark.model_copy(update={"seeds": [0, 1, 2]})
    assert "for 2 runs" in prospects("plan.yaml", more, finished.folder)[0]


@pytest.mark.long
def test_a_file_of_results_without_a_folder_is_refused(finished, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        publish_lines(finished.folder, tmp_path / "nothing" / "plan.jsonl")
    with pytest.raises(UserError, match="is a folder: name a file in it"):
        publish_lines(finished.folder, tmp_path)


def test_published_results_of_a_name_are_not_those_of_a_file_of_this_name(monkeypatch, tmp_path):
    """Nor is a file of the folder of published results that no benchmark has the name of read."""
    monkeypatch.setattr(benchmark_lines, "PUBLISHED", tmp_path)
    for name in ("reasoning", "performance"):
        (tmp_path / f"{name}.jsonl").write_text('{"ratios": {}}\n')
        plan = check_section(Benchmark, PLAN | {"claims": []}, "the benchmark")
        (time,) = prospects(f"mine/{name}.yaml", plan, None)
        assert "before one of them is finished" in time


# --- the report


@pytest.mark.long
def test_every_arm_runs_with_every_seed_and_the_report_has_the_figures_of_all(finished):
    assert "Traceback" not in finished.output
    assert [folder.name[:15] for folder in finished.place.runs.glob("benchmark-*")] == ["benchmark-plan-"]
    figures = finished.figures()["metrics"]
    assert {arm: set(runs) for arm, runs in figures.items()} == {arm: {"0", "1"} for arm in ARMS}


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", ARMS)
def test_the_figures_of_an_arm_are_those_of_its_run(finished, arm, seed):
    figures = finished.figures()["metrics"][arm][str(seed)]
    accuracy = finished.arm(arm, seed).federation.after.accuracy
    assert figures["after/accuracy/worst"] == accuracy.worst
    assert figures["after/accuracy/domain/common"] == accuracy.domains["common"]
    assert figures["cost/client_steps"] == STEPS[arm]
    assert ("grouping/adjusted_rand_index" in figures) == (arm == "FedBiscuit")


@pytest.mark.long
def test_every_arm_is_compared_with_all_that_it_should_be_on_each_prompt(finished):
    expected = {"base policy against the references", "FedBiscuit against FedDPO"}
    for arm in ARMS:
        expected |= {f"{arm} against base policy", f"{arm} against the references"}
    assert set(finished.figures()["contests"]) == expected
    for by_seed in finished.figures()["contests"].values():
        for contest in by_seed.values():
            assert len(contest["verdicts"]) == 4
            assert len(contest["ours"]) == 4
            assert "consistency" in contest  # null where all answers were equal


@pytest.mark.long
def test_the_report_has_the_commits_the_verdicts_on_claims_and_plots_without_a_network(finished):
    numbers = finished.figures()
    assert {run: len(commits) for run, commits in numbers["commits"].items()} == dict.fromkeys(RUNS, 1)
    assert [(change["arm"], change["earlier"]) for change in numbers["changes"]] == [
        ("FedBiscuit", []),
        ("FedDPO", []),
    ]
    (claim,) = numbers["claims"]
    assert claim["claim"] == "FedBiscuit: worst client at least 0"
    assert (claim["verdict"], claim["reason"]) == ("undecided", "one value per seed, which needs 3 seeds")
    assert (claim["low"], claim["high"]) == (None, None)
    page = (finished.folder / "report" / "report.html").read_text()
    assert "FedBiscuit" in page
    assert page.count("data-chart=") == 9
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)


@pytest.mark.long
def test_the_runs_of_a_seed_share_the_answers_of_the_base_policy(finished):
    for seed in SEEDS:
        folders = [finished.arm(arm, seed).folder for arm in ARMS]
        assert len({(folder / "evaluation" / "answers-base.json").read_text() for folder in folders}) == 1
    assert finished.output.count("answer prompts, base policy: 4 of 4 completions") == 2


# --- MLflow


@pytest.fixture
def mlflow_runs(finished):
    """MLflow run of the benchmark, and those of its arms."""
    runs = finished.arm("FedDPO", 0).mlflow_runs()
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert {run.info.status for run in runs} == {"FINISHED"}
    return parent, [run for run in runs if run is not parent]


@pytest.mark.long
def test_mlflow_has_a_run_with_metrics_for_each_arm_and_seed_and_a_parent_with_the_report(
    mlflow_runs, finished
):
    parent, children = mlflow_runs
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(child.data.tags["method"] for child in children) == ["fedbiscuit"] * 2 + ["feddpo"] * 2
    for child in mlflow_runs[1]:
        expected = {"aligned_vs_base/win_rate", "accuracy/mean"}
        if child.data.tags["method"] == "feddpo":
            expected.add("server/server_norm")
        assert expected <= set(child.data.metrics)
    parent, _ = mlflow_runs
    paths = finished.arm("FedDPO", 0).artifacts(parent.info.run_id, "report")
    assert "report/report.html" in paths
    assert "FedDPO/after/accuracy/domain/common" in parent.data.metrics
    assert parent.data.tags["claim/1"].startswith("FedBiscuit: worst client at least 0: undecided (")
    assert not {"claim/1/low", "claim/1/high"} & set(parent.data.metrics)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["federation", "evaluation"])
def test_the_result_of_each_phase_is_in_the_mlflow_run_of_the_arm(finished, phase):
    run = finished.arm("FedDPO", 0)
    assert f"{phase}/result.json" in run.artifacts(run.mlflow_id, phase)


# --- an ensemble of selectors


@pytest.mark.long
def test_the_groupings_of_an_ensemble_are_steps_and_logged_and_it_ends_with_its_selectors(finished):
    result = finished.arm("FedBiscuit", 0).federation
    phases = [record.phase for record in result.records]
    assert phases == ["train"] * 3 + ["grouping", "train", "grouping", "train"]
    assert "grouping: 4 clients" in finished.output
    outcome = finished.arm("FedBiscuit", 0).federation.outcome
    assert outcome.votes
    assert set(outcome.adapters) == {"selector-0", "selector-1", "selector-2"}
    assert set(outcome.assignment) == set(finished.arm("FedBiscuit", 0).federation.after.accuracy.clients)
    assert "with the assigned adapter" in finished.output
    run = finished.arm("FedBiscuit", 0)
    for name in ("adjusted_rand_index", "moved", "without_vote", "selector-0/size"):
        assert list(run.history(run.mlflow_id, f"grouping/{name}")) == [3, 4], name
    metrics = run.mlflow.get_run(run.mlflow_id).data.metrics
    assert {"accuracy_assigned/mean", "accuracy_assigned/domain/own"} <= set(metrics)


@pytest.mark.long
def test_the_implicit_reward_is_measured_on_the_pairs_of_the_recipe(finished):
    run = finished.arm("FedBiscuit", 0)
    accuracy = run.evaluation.implicit_reward
    assert accuracy.pairs == 9
    assert run.mlflow.get_run(run.mlflow_id).data.metrics["implicit_reward/mean"] == accuracy.mean


@pytest.mark.long
def test_the_reward_hacking_curve_has_a_point_for_each_step_of_dpo(finished):
    run = finished.arm("FedBiscuit", 0)
    steps = sorted(run.alignment.checkpoints.values())
    distinct = sorted(set(steps))
    assert distinct == list(range(1, steps[-1] + 1))
    assert len(steps) == len(distinct) + 2, "each step, and the ends of two epochs"
    curve = run.evaluation.curve
    assert [point.step for point in curve] == distinct
    assert list(run.history(run.mlflow_id, "reward_hacking/proxy")) == distinct
    for point in curve:
        assert point.prompts == 3
        assert 0 <= point.proxy <= 1
        assert 0 <= point.judge <= 1


# --- a method that trains the policy


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_of_the_clients_is_the_aligned_policy_without_dpo_on_the_server(finished, seed):
    run = finished.arm("FedDPO", seed)
    assert (run.federation.outcome.clients, run.federation.outcome.labels_pairs) == ([], False)
    assert run.federation.before.accuracy.mean == 0.5, "all rewards are the same with the initial adapter"
    aligned = run.folder / "alignment" / "final" / "adapter_model.safetensors"
    trained = run.folder / "federation" / "final" / "policy" / "adapter_model.safetensors"
    assert aligned.read_bytes() == trained.read_bytes()
    assert run.alignment.reference == "base"
    assert run.alignment.history == []
    assert run.alignment.metrics["kl_sequence"] > 0
    assert "Implicit reward on 32 held-out pairs" in run.summary


# --- resuming


def run_command(arguments):
    """Exit status of `fed-rlhf`."""
    from flows.cli import app

    return app(["benchmark", *arguments], standalone_mode=False)


@pytest.mark.long
def test_an_arm_that_failed_at_its_end_is_failed_in_mlflow_and_finished_when_the_benchmark_is_resumed(
    finished, monkeypatch
):
    """The complete phases are not repeated, and the command ends with the report."""
    from flows import fed_rlhf

    run = finished.arm("FedDPO", 0)
    contest = finished.folder / "contests" / "FedBiscuit" / "FedDPO" / "seed-1.json"
    (run.folder / "report.done").unlink()
    contest.unlink()
    before = {path: path.read_bytes() for path in finished.folder.rglob("adapter_model.safetensors")}

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(fed_rlhf, "log_report", fail)
        status, output = finished.place.main(run_command, "--resume", finished.folder.name)
    assert status == 1
    assert "disk full" in output
    assert run.mlflow.get_run(run.mlflow_id).info.status == "FAILED"

    status, output = finished.place.main(run_command, "--resume", finished.folder.name)
    assert status == 0
    assert (finished.folder / "report" / "summary.txt").read_text() in output
    assert "Traceback" not in output
    assert run.mlflow.get_run(run.mlflow_id).info.status == "FINISHED"
    assert (run.folder / "report.done").is_file()
    assert "round 1 of" not in output
    assert before == {path: path.read_bytes() for path in before}
    assert contest.is_file()


# --- what runs of a seed share

COMPLETIONS = "alignment/completions.json"
ANSWERS = "evaluation/answers-base.json"


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ([], [COMPLETIONS, ANSWERS]),
        (["federation.rounds=9"], [COMPLETIONS, ANSWERS]),
        (["seed=1"], []),
        (["policy.max_new_tokens=3"], []),
        (["data.max_pairs=50"], []),
        (["alignment.temperature=0.5"], [ANSWERS]),
        (["evaluation.prompts=2"], [COMPLETIONS]),
        (["evaluation.answers_per_prompt=2"], [COMPLETIONS]),
        (["alignment.dpo.reference=sft", "alignment.dpo.reference_adapter=."], []),
    ],
    ids=lambda value: ", ".join(value),
)
def test_generations_of_the_base_policy_are_shared_by_runs_of_the_same_seed_data_and_policy(
    tmp_path, monkeypatch, changes, shared
):
    other = create_run(load_recipe("debug"), tmp_path / "other")
    for name in (COMPLETIONS, ANSWERS):
        (other.folder / name).parent.mkdir()
        (other.folder / name).write_text("[]")
    (tmp_path / "adapter").mkdir()
    monkeypatch.chdir(tmp_path / "adapter")
    run = create_run(load_recipe("debug", changes), tmp_path / "run")
    assert share_generations(run, [other]) == shared


FIRM = [
    "rewards={one: {kind: function, name: clean}, two: {kind: function, name: 'builtins:len'}}",
    "policy.lora.dropout=0",
    "federation.method=firm",
    "federation.options={objectives: {good: [one], long: [two, one]}}",
]
MEASURE = "federation/rewards-00000.json"


@pytest.fixture
def measured(tmp_path):
    """A run of FIRM that has measured the rewards of the base policy."""
    run = create_run(load_recipe("debug", FIRM), tmp_path / "other")
    run.federation.mkdir()
    (run.folder / MEASURE).write_text("{}")
    return run


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ([], True),
        (["federation.options.beta=0", "federation.rounds=9", "federation.options.ppo.epochs=1"], True),
        (["federation.method=fedcmoo"], True),
        (["seed=1"], False),
        (["federation.options.ppo={temperature: 0.5}"], False),
        (["federation.options.reward_prompts=3"], False),
        (["federation.batch_size=1"], False),
        (["policy.max_new_tokens=3"], False),
        (["federation.options.objectives={good: [one], long: [one, two]}"], False),
        (["rewards.one.name=builtins:sum"], False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else None,
)
def test_rewards_of_the_base_policy_are_shared_by_runs_that_measure_them_alike(
    measured, tmp_path, changes, is_shared
):
    run = create_run(load_recipe("debug", [*FIRM, *changes]), tmp_path / "run")
    assert share_generations(run, [measured]) == ([MEASURE] if is_shared else [])


def test_rewards_of_the_base_policy_are_not_shared_with_a_run_that_measures_none(measured, tmp_path):
    run = create_run(load_recipe("debug"), tmp_path / "plain")
    assert share_generations(run, [measured]) == []
