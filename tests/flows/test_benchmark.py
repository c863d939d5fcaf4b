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
    "arms": {"FedBis": ["federation.rounds=1"], "FedBiscuit": ["federation.rounds=4", "federation.method=fedbiscuit", "federation.selectors=3", 'federation.options={"warmup_rounds": 1}'],
             "FedDPO": ["federation.rounds=1", "federation.method=feddpo"]},
    "contests": [["FedBis", "FedDPO"]]}

pytestmark = pytest.mark.slow


def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "FED_RLHF_")) or k == "FED_RLHF_BACKBONES"}
    return kept | {"FED_RLHF_RUNS": str(folder / "runs"), "PREFECT_HOME": str(folder / "prefect"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flows.benchmark", *arguments], cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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
            assert figures["client_steps"] == PLAN_STEPS[arm] and ("adjusted_rand_index" in figures) == (arm == "FedBiscuit")
    assert set(written["contests"]) == {f"{arm} against {other}" for arm in PLAN["arms"] for other in ("raw policy", "the references")} | {
        "raw policy against the references", "FedBis against FedDPO"}
    assert all(len(verdicts) == 4 for by_seed in written["contests"].values() for verdicts in by_seed.values())
    page = (folder / "report" / "report.html").read_text()
    assert "FedBiscuit" in page and "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")


PLAN_STEPS = {"FedBis": 4, "FedBiscuit": 16, "FedDPO": 4}
"""Rounds times 2 clients times 2 local steps."""


def test_runs_of_a_seed_share_what_the_raw_policy_wrote(finished):
    _, output, folder = finished
    for seed in (0, 1):
        texts = {(folder / f"{arm}-seed-{seed}" / "evaluation" / "answers-raw.json").read_text() for arm in PLAN["arms"]}
        completions = {(folder / f"{arm}-seed-{seed}" / "alignment" / "completions.json").read_text() for arm in ("FedBis", "FedBiscuit")}
        assert len(texts) == len(completions) == 1
    assert output.count("raw policy: 4 of 4 answers") == output.count("sampled 8 of 8 completions") == 2


def test_mlflow_has_one_run_for_each_method_and_seed_under_one_parent(finished):
    from mlflow import MlflowClient

    place, _, _ = finished
    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "debug"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 6 == len(runs) - 1 and {r.info.status for r in runs} == {"FINISHED"}
    assert sorted(r.data.tags["method"] for r in children) == ["fedbis"] * 2 + ["fedbiscuit"] * 2 + ["feddpo"] * 2
    for child in children:
        assert {"server/server_norm", "aligned_vs_raw/win_rate", "accuracy/mean"} - set(child.data.metrics) <= ({"server/server_norm"} if child.data.tags["method"] == "fedbiscuit" else set())
    assert "report/report.html" in {a.path for a in client.list_artifacts(parent.info.run_id, "report")} and "FedBis/common" in parent.data.metrics


def test_each_phase_keeps_its_own_result_in_the_run_of_an_arm(finished):
    from mlflow import MlflowClient

    place, _, folder = finished
    client, run_id = MlflowClient(f"sqlite:///{place / 'mlflow.db'}"), json.loads((folder / "FedBis-seed-0" / "run.json").read_text())["mlflow_run_id"]
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


def test_an_arm_that_failed_at_its_end_is_failed_in_mlflow_and_is_logged_when_the_benchmark_goes_on(tmp_path):
    from mlflow import MlflowClient

    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN | {"seeds": [0], "arms": {"FedBis": ["federation.rounds=1"]}, "contests": []}))
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
sys.exit(cli.benchmark(["--benchmark", {str(tmp_path / 'plan.yaml')!r}]))
"""
    failed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1 and "disk full" in failed.stdout + failed.stderr
    folder = next((tmp_path / "runs").glob("benchmark-plan-*"))
    client, run_id = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}"), json.loads((folder / "FedBis-seed-0" / "run.json").read_text())["mlflow_run_id"]
    assert client.get_run(run_id).info.status == "FAILED"
    run(tmp_path, "--resume", folder.name)
    assert client.get_run(run_id).info.status == "FINISHED" and "report/summary.txt" in {a.path for a in client.list_artifacts(run_id, "report")}


def test_a_benchmark_that_is_complete_is_not_run_again_and_one_that_is_not_goes_on(finished):
    place, _, folder = finished
    before = {p: p.read_bytes() for p in folder.rglob("adapter_model.safetensors")}
    (folder / "contests" / "FedBis" / "FedDPO" / "seed-1.json").unlink()
    output = run(place, "--resume", folder.name)
    assert "round 1 of" not in output and before == {p: p.read_bytes() for p in before}
    assert (folder / "contests" / "FedBis" / "FedDPO" / "seed-1.json").is_file()
