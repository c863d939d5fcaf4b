"""DVC repeats only the stages that a change concerns; the recipe `debug`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.io import read_json
from components.models.backbone import fetch_backbone
from tasks.runs import Run
from tests.support.command_line import fed_rlhf
from tests.support.pipeline import ROOT, environment_without

pytestmark = [pytest.mark.long, pytest.mark.pipeline]

STAGES = [
    "check_recipe",
    "fetch_backbone",
    "grow_trees",
    "prepare",
    "federate",
    "align",
    "evaluate",
    "report",
]
FILES = ("dvc.yaml", ".dvcignore", ".gitignore", "data/.gitignore")


class Checkout:
    """A copy of the checkout with a git repository of its own.

    Args:
        folder: of the copy.
        place: the workplace whose Prefect server and MLflow store all stages use.
    """

    def __init__(self, folder, place):
        self.folder = folder
        self.place = place
        self.pipeline = folder / "data" / "pipeline"
        self.result = self.pipeline / "federation" / "result.json"
        ignored = shutil.ignore_patterns("__pycache__", "cache", "tmp")
        for name in ("components", "fed_rlhf", "flows", "infra", "mlflow", "tasks", ".dvc"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        (folder / "data").mkdir()
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        self.set_overrides("")

    def set_overrides(self, overrides):
        (self.folder / "params.yaml").write_text(f'recipe: debug\noverrides: "{overrides}"\n')

    def write_pairs(self, pairs):
        """Write the user's own pairs into the root of the checkout."""
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (self.folder / "pairs.jsonl").write_text(lines, encoding="utf-8")

    @property
    def hashes(self):
        """The hash of each output by its path, as dvc.lock has it."""
        stages = yaml.safe_load((self.folder / "dvc.lock").read_text())["stages"]
        return {out["path"]: out["md5"] for stage in stages.values() for out in stage["outs"]}

    def run_stages(self):
        """Run all stages in this process."""
        from flows.stages import run_stage

        first, *others = STAGES
        result = fed_rlhf("stage", first, "--folder", str(self.pipeline), "--recipe", "debug")
        assert result.exit_code == 0, result.output
        for stage in others:
            self.place.call(lambda stage=stage: run_stage(stage, str(self.pipeline)))

    def dvc(self, *arguments):
        """Names of the stages that a DVC command runs, or would run."""
        programs = Path(sys.executable).parent
        variables = environment_without("FED_RLHF_", "MLFLOW_TRACKING", "PREFECT_API")
        variables["PATH"] = f"{programs}:{variables['PATH']}"
        variables["PREFECT_API_URL"] = self.place.prefect_url
        variables["MLFLOW_TRACKING_URI"] = self.place.tracking
        done = subprocess.run(
            [programs / "dvc", *arguments],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"Running stage '(\w+)'", done.stdout)

    def repeated(self, overrides, *options):
        """Names of the stages that `dvc repro` repeats after a change; --dry only lists them."""
        self.set_overrides(overrides)
        return self.dvc("repro", *options, "federate")


@pytest.fixture(scope="module")
def checkout(new_workplace, tmp_path_factory):
    """A copy of the checkout in which all stages were run, in this process, and committed to DVC."""
    checkout = Checkout(tmp_path_factory.mktemp("dvc") / "checkout", new_workplace("dvc"))
    stages = yaml.safe_load((checkout.folder / "dvc.yaml").read_text())["stages"]
    assert list(stages) == STAGES
    backbones = checkout.folder / "data" / "backbone"
    shutil.copytree(fetch_backbone("tiny-random"), backbones / "tiny-random")
    checkout.pipeline.mkdir()
    (checkout.pipeline / "first-day").write_text("2026-02-03")  # the first run was on another day
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FED_RLHF_BACKBONES", str(backbones))
        checkout.run_stages()
    assert checkout.dvc("repro", "--dry") == STAGES, "DVC knows of no stage yet"
    checkout.dvc("commit", "--force", *STAGES)
    return checkout


def test_a_repetition_of_the_same_stages_has_the_same_outputs(checkout):
    first = checkout.hashes
    phases = ["federate", "align", "evaluate"]
    assert checkout.dvc("repro", "--force", "--single-item", *phases) == phases
    assert {f"data/pipeline/{name}" for name in ("federation", "alignment", "evaluation")} <= first.keys()
    assert checkout.hashes == first
    (record, *_) = Run("pipeline", checkout.pipeline).federation_result().records
    assert record.aggregation_seconds > 0


def test_a_colleague_pulls_the_results_and_repeats_what_a_change_concerns(checkout, new_workplace, tmp_path):
    """The results are those of the checkout that pushed, which does not exist any more."""
    colleague = Checkout(tmp_path / "colleague", new_workplace("colleague"))
    shutil.copytree(checkout.folder / "data" / "backbone", colleague.folder / "data" / "backbone")
    shutil.copy(checkout.folder / "dvc.lock", colleague.folder)
    (colleague.pipeline / "report").mkdir(parents=True)
    for name in ("headline.json", "metrics.json"):  # they are in git
        shutil.copy(checkout.pipeline / "report" / name, colleague.pipeline / "report")
    for one in (checkout, colleague):
        one.dvc("remote", "add", "--force", "--default", "shared", str(tmp_path / "remote"))
    checkout.dvc("push")
    away = checkout.folder.rename(tmp_path / "away")
    try:
        colleague.dvc("pull")
        colleague.set_overrides("evaluation.judge.steps=5")
        assert colleague.dvc("repro") == ["check_recipe", "evaluate", "report"]
    finally:
        away.rename(checkout.folder)
    pulled = ["first-day", "federation/result.json", "alignment/result.json", "report/rounds.csv"]
    for name in pulled:
        assert (colleague.pipeline / name).read_bytes() == (checkout.pipeline / name).read_bytes(), name
    answers = [read_json(one.pipeline / "evaluation" / "answers.json") for one in (checkout, colleague)]
    assert answers[0] == answers[1]
    metrics = read_json(colleague.pipeline / "report" / "metrics.json")
    before = read_json(checkout.pipeline / "report" / "metrics.json")
    assert metrics["after/accuracy/mean"] == before["after/accuracy/mean"]
    assert "cost/train_seconds" not in metrics, "it is unknown here"
    written = [path for path in colleague.pipeline.rglob("*") if path.is_file() and path.name != "run.json"]
    moved = str(checkout.folder).encode()
    assert not [path for path in written if moved in path.read_bytes()]


def test_dvc_runs_the_stages_that_a_change_concerns_and_no_others(checkout):
    first = checkout.result.read_text()
    assert checkout.repeated("") == ["check_recipe"], "it reads files that DVC does not know"
    assert checkout.repeated("evaluation.judge.steps=5") == ["check_recipe"]
    assert checkout.result.read_text() == first
    assert checkout.repeated("federation.rounds=4") == ["check_recipe", "federate"]
    assert '"rounds": 4' in checkout.result.read_text()


def test_dvc_repeats_the_stages_of_a_data_file_whose_labels_change(checkout):
    own_data = "data.source=jsonl data.path=pairs.jsonl data.options={} data.partition=iid data.clients=4"
    answers = [("Yes, {}.", "No, and not {}."), ("Yes, {} and more.", "No {}.")]
    pairs = []
    for n in range(80):
        chosen, rejected = (answer.format(n) for answer in answers[n % 2])
        pairs.append({"prompt": f"Question {n}?", "chosen": chosen, "rejected": rejected})
    checkout.write_pairs(pairs)
    checkout.set_overrides(own_data)
    assert checkout.dvc("repro", "prepare") == ["check_recipe", "prepare"]
    checkout.write_pairs([pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs])
    assert checkout.dvc("repro", "check_recipe") == ["check_recipe"]
    assert checkout.repeated(own_data, "--dry") == ["check_recipe", "prepare", "federate"]
