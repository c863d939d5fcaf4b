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


def run(folder: Path, *arguments: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "FED_RLHF_")) or k == "FED_RLHF_BACKBONES"}
    environment = kept | {"FED_RLHF_RUNS": str(folder / "runs"), "PREFECT_HOME": str(folder / "prefect"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "flows.benchmark", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
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
    assert set(written["contests"]) == {f"{arm} against {other}" for arm in PLAN["arms"] for other in ("raw policy", "human text")} | {
        "raw policy against human text", "FedBis against FedDPO"}
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


def test_a_benchmark_that_is_complete_is_not_run_again_and_one_that_is_not_goes_on(finished):
    place, _, folder = finished
    before = {p: p.read_bytes() for p in folder.rglob("adapter_model.safetensors")}
    (folder / "contests" / "FedBis-FedDPO-seed-1.json").unlink()
    output = run(place, "--resume", folder.name)
    assert "round 1 of" not in output and before == {p: p.read_bytes() for p in before}
    assert (folder / "contests" / "FedBis-FedDPO-seed-1.json").is_file()
