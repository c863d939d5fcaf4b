"""A benchmark as a person runs it: arms and seeds side by side, contests, one report; on the debug recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAN = {
    "recipe": "debug", "seeds": [0, 1],
    "arms": {
        "FedBiscuit": ["federation.rounds=6", "federation.method=fedbiscuit", "federation.selectors=3", 'federation.options={"warmup_rounds": 1, "regroup_every": 2}',
                       "evaluation.preference_pairs=9", "evaluation.curve_prompts=3", "alignment.dpo.checkpoint_every=1"],
        "FedDPO": ["federation.rounds=1", "federation.method=feddpo"]},
    "contests": [["FedBiscuit", "FedDPO"]], "claims": [{"arm": "FedBiscuit", "figure": "worst", "at_least": 0}]}
STEPS = {"FedBiscuit": 24, "FedDPO": 4}
"""Rounds times 2 clients times 2 local steps."""

pytestmark = pytest.mark.slow


def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "FED_RLHF_")) or k == "FED_RLHF_BACKBONES"}
    return kept | {"FED_RLHF_RUNS": str(folder / "runs"), "PREFECT_HOME": str(folder / "prefect"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flows.benchmark", *arguments], cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def result_of(run_folder: Path, phase: str) -> dict:
    return json.loads((run_folder / phase / "result.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    return folder, run(folder, "--benchmark", str(folder / "plan.yaml")), next((folder / "runs").glob("benchmark-plan-*"))


def test_every_arm_is_run_with_every_seed_and_their_figures_are_in_one_report(finished):
    _, output, folder = finished
    assert "Traceback" not in output and (folder / "report" / "report.md").read_text() in output
    written = json.loads((folder / "report" / "figures.json").read_text())
    assert {arm: set(runs) for arm, runs in written["figures"].items()} == {arm: {"0", "1"} for arm in PLAN["arms"]}
    for arm, runs in written["figures"].items():
        for seed, figures in runs.items():
            federated = json.loads((folder / f"{arm}-seed-{seed}" / "federation" / "result.json").read_text())
            assert figures["worst"] == federated["after"]["worst"] and figures["common"] == federated["after"]["domains"]["common"]
            assert figures["client_steps"] == STEPS[arm] and ("adjusted_rand_index" in figures) == (arm == "FedBiscuit")
    assert set(written["contests"]) == {f"{arm} against {other}" for arm in PLAN["arms"] for other in ("raw policy", "the references")} | {
        "raw policy against the references", "FedBiscuit against FedDPO"}
    assert all(len(contest["verdicts"]) == len(contest["ours"]) == 4 and contest["consistency"] is not None for by_seed in written["contests"].values() for contest in by_seed.values())
    assert {run: len(commits) for run, commits in written["commits"].items()} == {f"{arm}-seed-{seed}": 1 for arm in PLAN["arms"] for seed in (0, 1)}
    assert written["claims"][0]["claim"] == "FedBiscuit: worst client at least 0" and written["claims"][0]["says"] == "holds in every seed"
    page = (folder / "report" / "report.html").read_text()
    assert "FedBiscuit" in page and page.count("data:image/png;base64,") == 4 and "http" not in page.replace("http-equiv", "")



def test_runs_of_a_seed_share_what_the_raw_policy_wrote(finished):
    _, output, folder = finished
    for seed in (0, 1):
        texts = {(folder / f"{arm}-seed-{seed}" / "evaluation" / "answers-raw.json").read_text() for arm in PLAN["arms"]}
        assert len(texts) == 1
    assert output.count("raw policy: 4 of 4 answers") == 2


def test_mlflow_has_one_run_for_each_method_and_seed_under_one_parent(finished):
    from mlflow import MlflowClient

    place, _, _ = finished
    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "debug"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 4 == len(runs) - 1 and {r.info.status for r in runs} == {"FINISHED"}
    assert sorted(r.data.tags["method"] for r in children) == ["fedbiscuit"] * 2 + ["feddpo"] * 2
    for child in children:
        assert {"server/server_norm", "aligned_vs_raw/win_rate", "accuracy/mean"} - set(child.data.metrics) <= ({"server/server_norm"} if child.data.tags["method"] == "fedbiscuit" else set())
    assert "report/report.html" in {a.path for a in client.list_artifacts(parent.info.run_id, "report")} and "FedDPO/common" in parent.data.metrics


def test_each_phase_keeps_its_own_result_in_the_run_of_an_arm(finished):
    from mlflow import MlflowClient

    place, _, folder = finished
    client, run_id = MlflowClient(f"sqlite:///{place / 'mlflow.db'}"), json.loads((folder / "FedDPO-seed-0" / "run.json").read_text())["mlflow_run_id"]
    for phase in ("federation", "evaluation"):
        assert f"{phase}/result.json" in {a.path for a in client.list_artifacts(run_id, phase)}


def test_what_is_shared_is_of_the_same_seed_data_and_policy(tmp_path):
    from components.recipes import load_recipe
    from tasks.benchmark import share_generations
    from tasks.runs import Run, claim_folder

    other = claim_folder(load_recipe("debug"), tmp_path / "other")
    for name in ("alignment/completions.json", "evaluation/answers-raw.json"):
        (other.folder / name).parent.mkdir()
        (other.folder / name).write_text("[]")
    for n, (changes, taken) in enumerate([
            ([], ["completions.json", "answers-raw.json"]), (["federation.rounds=9"], ["completions.json", "answers-raw.json"]), (["seed=1"], []), (["policy.max_new_tokens=3"], []),
            (["data.max_pairs=50"], []), (["alignment.temperature=0.5"], ["answers-raw.json"]), (["evaluation.prompts=2"], ["completions.json"])]):
        run: Run = claim_folder(load_recipe("debug", changes), tmp_path / f"run-{n}")
        assert share_generations.fn(run, [other]) == taken, changes


def test_rewards_of_the_raw_policy_are_shared_where_they_are_measured_alike(tmp_path):
    from components.recipes import load_recipe
    from tasks.benchmark import share_generations
    from tasks.runs import claim_folder

    base = ["rewards={one: {kind: function, name: clean}, two: {kind: function, name: 'builtins:len'}}", "policy.lora.dropout=0", "federation.method=firm"]
    firm = [*base, "federation.options={objectives: {good: [one], long: [two, one]}}"]
    other = claim_folder(load_recipe("debug", firm), tmp_path / "other")
    (other.folder / "federation").mkdir()
    (other.folder / "federation" / "rewards-before.json").write_text("{}")
    for n, (changes, shared) in enumerate([
            ([], True), (["federation.options.beta=0", "federation.rounds=9", "federation.options.ppo.epochs=1"], True), (["federation.method=fedcmoo"], True), (["seed=1"], False),
            (["federation.options.ppo={temperature: 0.5}"], False), (["federation.options.reward_prompts=3"], False), (["federation.batch_size=1"], False), (["policy.max_new_tokens=3"], False),
            (["federation.options.objectives={good: [one], long: [one, two]}"], False), (["rewards.one.name=builtins:sum"], False)]):
        assert share_generations.fn(claim_folder(load_recipe("debug", [*firm, *changes]), tmp_path / f"run-{n}"), [other]) == ["rewards-before.json"] * shared, changes
    assert share_generations.fn(claim_folder(load_recipe("debug"), tmp_path / "plain"), [other]) == []


def mlflow_run(folder: Path, arm: str):
    """A client and the MLflow run of an arm."""
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder.parents[1] / 'mlflow.db'}"), json.loads((folder / arm / "run.json").read_text())["mlflow_run_id"]


def test_an_ensemble_is_grouped_logged_and_votes_on_the_labels(finished):
    _, output, folder = finished
    result = result_of(folder / "FedBiscuit-seed-0", "federation")
    assert "grouped 4 clients (selector-0 " in output and "with the selector of each client's own group" in output
    assert set(result["adapters"]) == {"selector-0", "selector-1", "selector-2"} and set(result["assigned"]) == set(result["after"]["clients"])
    assert [r["phase"] for r in result["records"]] == ["train"] * 3 + ["group", "train", "train", "group", "train"]
    client, run_id = mlflow_run(folder, "FedBiscuit-seed-0")
    for name in ("adjusted_rand_index", "moved", "without_vote", "selector-0/size"):
        assert [m.step for m in client.get_metric_history(run_id, f"grouping/{name}")] == [3, 5], name
    assert [a.path for a in client.list_artifacts(run_id, "grouping")] == ["grouping/00004.png", "grouping/00007.png"]
    assert {"accuracy_assigned/mean", "accuracy_assigned/domain/own"} <= set(client.get_run(run_id).data.metrics)


def test_the_implicit_reward_and_the_curve_over_dpos_steps_are_measured_where_a_recipe_asks_for_them(finished):
    _, _, folder = finished
    measured, aligned = (result_of(folder / "FedBiscuit-seed-0", phase) for phase in ("evaluation", "alignment"))
    steps = sorted(aligned["checkpoints"].values())
    client, run_id = mlflow_run(folder, "FedBiscuit-seed-0")
    assert measured["implicit_reward"]["pairs"] == 9 and client.get_run(run_id).data.metrics["implicit_reward/mean"] == measured["implicit_reward"]["mean"]
    assert [point["step"] for point in measured["curve"]] == sorted(set(steps)) == list(range(1, steps[-1] + 1)) and len(steps) == len(set(steps)) + 2, "each step, and twice an epoch's end"
    assert all(0 <= point[key] <= 1 for point in measured["curve"] for key in ("proxy", "judge")) and {point["prompts"] for point in measured["curve"]} == {3}
    assert sorted(m.step for m in client.get_metric_history(run_id, "reward_hacking/proxy")) == sorted(set(steps))


def test_a_method_that_trains_the_policy_ends_with_it_and_is_not_aligned_again(finished):
    _, output, folder = finished
    for arm in ("FedDPO-seed-0", "FedDPO-seed-1"):
        federated, aligned = (result_of(folder / arm, phase) for phase in ("federation", "alignment"))
        assert federated["before"]["mean"] == 0.5, "the adapter is off where it starts, so all its rewards are the same"
        final, trained = (folder / arm / name / "adapter_model.safetensors" for name in ("alignment/final", "federation/final/policy"))
        assert final.read_bytes() == trained.read_bytes()
        assert (aligned["reference"], aligned["history"]) == ("base", []) and aligned["metrics"]["kl_sequence"] > 0
    assert "Implicit reward on 32 held-out pairs" in output


def test_an_arm_that_failed_at_its_end_is_failed_in_mlflow_and_is_logged_when_the_benchmark_goes_on(finished):
    """And nothing that was complete is done again."""
    place, _, folder = finished
    (folder / "FedDPO-seed-0" / "report.done").unlink()
    (folder / "contests" / "FedBiscuit" / "FedDPO" / "seed-1.json").unlink()
    script = f"""
import sys
from flows import cli

def with_a_full_disk(call, run_flow=cli.run_flow):
    def broken():
        from tasks import tracking      # imports Prefect, so only once it has its server

        def fail(*_):
            raise OSError("disk full")

        tracking.log_report = fail
        return call()

    return run_flow(broken)

cli.run_flow = with_a_full_disk
sys.exit(cli.benchmark(["--resume", {folder.name!r}]))
"""
    failed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(place), capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1 and "disk full" in failed.stdout + failed.stderr
    client, run_id = mlflow_run(folder, "FedDPO-seed-0")
    assert client.get_run(run_id).info.status == "FAILED"
    before = {p: p.read_bytes() for p in folder.rglob("adapter_model.safetensors")}
    output = run(place, "--resume", folder.name)
    assert client.get_run(run_id).info.status == "FINISHED" and (folder / "FedDPO-seed-0" / "report.done").is_file()
    assert "round 1 of" not in output and before == {p: p.read_bytes() for p in before} and (folder / "contests" / "FedBiscuit" / "FedDPO" / "seed-1.json").is_file()
